//! Any registration against any layout of ours: refused by name, or every span inside what both sides registered (H2).

use std::num::NonZeroU64;
use std::sync::Arc;

use bytes::Bytes;
use kv_core::ids::RegionId;
use kv_core::layout::*;
use kv_core::limits::Limits;
use kv_core::memory::{MemoryOwner, RegisteredRegion};
use kv_core::net::Endpoint;
use kv_core::plan::{Planner, Span, WritePlan, dst_slice};
use kv_core::wire::message::{Buffers, Registration, StateComponent};

use crate::input::Input;

struct Numbers {
    base: u64,
    len: u64,
}

// SAFETY: nothing here reads or writes through the address; only the numbers are used.
unsafe impl MemoryOwner for Numbers {
    fn base(&self) -> u64 {
        self.base
    }
    fn len(&self) -> u64 {
        self.len
    }
}

/// Where the first buffer of the peer is, and how far apart they are.
const THERE: u64 = 1 << 40;
const APART: u64 = 1 << 32;

fn local(i: &mut Input<'_>) -> Option<LocalLayout> {
    let (entries, aux) = (i.below(9) as u32, i.below(4) as u32);
    let slots = 1 + i.number() % (1 << 24);
    let mut item_lens = Vec::new();
    let first = 1 + i.number() % (1 << 20);
    for _ in 0..entries + aux {
        item_lens.push(if i.u8() < 240 { first } else { i.number() % (1 << 20) });
    }
    let regions: Vec<_> = item_lens
        .iter()
        .zip(0u32..)
        .map(|(item, id)| {
            let owner = Numbers { base: 4096 + (u64::from(id) << 36), len: item * slots };
            Arc::new(RegisteredRegion::new(RegionId(id), Arc::new(owner), Box::new(())))
        })
        .collect();
    let with_ids = i.flag();
    let mut desc = |id: u32| {
        let (item_len, odd) = (item_lens[id as usize], i.u8());
        EntryDesc {
            region: RegionId(if odd < 250 { id } else { id + 1 }),
            offset: if odd == 249 { i.number() } else { 0 },
            len: if odd == 248 { i.number() } else { item_len * slots },
            item_len,
            layer_id: with_ids.then(|| if odd < 240 { id } else { odd.into() }),
        }
    };
    let kv: Vec<_> = (0..entries).map(&mut desc).collect();
    let aux = (entries..entries + aux).map(desc).map(|e| EntryDesc { layer_id: None, ..e }).collect();
    let spec = LayoutSpec {
        kv,
        aux,
        attention: i.pick(&[AttentionKind::Mha, AttentionKind::Mla, AttentionKind::HybridMla]),
        num_draft_entries: i.below(3) as u32,
        attn_tp_size: 1 + i.below(4) as u32,
        engine_rank: i.below(5) as u32,
        pp_size: 1 + i.below(3) as u32,
        pp_rank: i.below(3) as u32,
        prefill_start_layer: i.below(4) as u32,
        prefill_end_layer: i.flag().then(|| i.below(10) as u32),
        mla_compression_ratios: if i.u8() < 200 {
            Vec::new()
        } else {
            i.bytes(4).iter().map(|b| b % 9).map(u32::from).collect()
        },
        dcp_size: 1 + i.below(2) as u32,
        dcp_rank: i.below(2) as u32,
        ..LayoutSpec::default()
    };
    LocalLayout::new(spec, regions).ok()
}

/// A registration that mostly fits `ours`, with anything changed.
fn registration(i: &mut Input<'_>, ours: &LocalLayout) -> Registration {
    let mut r = ours.to_registration(Endpoint::new("10.0.0.7", 41234), "peer", Bytes::new());
    let addr = |n: usize| THERE + n as u64 * APART;
    let (kv, aux) = (r.kv.len(), r.aux.len());
    r.kv = Buffers::Addrs((0..kv).map(addr).collect());
    r.aux = Buffers::Addrs((0..aux).map(|n| addr(kv + n)).collect());
    for _ in 0..i.below(6) {
        let (what, value) = (i.u8(), i.number());
        let small = u32::try_from(value).unwrap_or(u32::MAX);
        match what % 20 {
            0..=3 => {
                let list = if what % 20 < 2 { &mut r.kv } else { &mut r.aux };
                if let Buffers::Addrs(list) = list {
                    match list.len() {
                        0 => list.push(value),
                        n if what & 64 != 0 => list.truncate(value as usize % n),
                        n if what & 32 != 0 => list[value as usize % n] = u64::MAX - value,
                        _ => list.push(value),
                    }
                }
            }
            4 => r.kv_slots = Some(value),
            5 => r.kv_slots = None,
            6 => r.kv_item_len = value,
            7 => r.kv_item_lens.clear(),
            8 => r.kv_item_lens.push(value),
            9 => r.kv_item_lens.iter_mut().for_each(|len| *len = value),
            10 => r.kv_layer_ids.clear(),
            11 => r.kv_layer_ids = (0..r.kv.len() as u32).map(|n| n.wrapping_add(small)).collect(),
            12 => r.attn_tp_size = small,
            13 => r.engine_rank = small,
            14 => r.dcp_size = small,
            15 => r.dcp_rank = small,
            16 => r.kv = Buffers::Descriptors(vec![None; r.kv.len()]),
            17 => r.kv_layer_ids.push(small),
            18 => r.kv_kinds.clear(),
            _ => r.state.push(StateComponent {
                buffers: Buffers::Addrs(vec![value; usize::from(what > 100)]),
                item_lens: vec![small],
                dims: Vec::new(),
                layer_ids: Vec::new(),
                region_lens: Vec::new(),
            }),
        }
    }
    r
}

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let i = &mut input;
    let Some(ours) = local(i) else { return };
    let theirs = registration(i, &ours);
    let limits = Limits { max_entries: 16, ..Limits::default() };
    let Ok(mut peer) = PeerLayout::from_registration(&theirs, &limits) else { return };
    if i.flag() {
        let lens = (0..peer.aux_entries()).map(|_| i.number()).collect();
        match peer.clone().with_aux_geometry(lens, i.number()) {
            Ok(with) => peer = with,
            Err(_) => return,
        }
    }
    let unknown = i.pick(&[UnknownSlots::AsOurs, UnknownSlots::CheckedByBackend]);
    let Ok(pairing) = Pairing::with_unknown_slots(&ours, &peer, unknown) else { return };

    let page = |i: &mut Input<'_>| match i.u8() {
        n @ 0..=247 => i32::from(n % 32),
        248 => -1,
        249 => i32::MIN,
        250 => i32::MAX,
        _ => i.u32() as i32,
    };
    let n = i.below(24);
    let src: Vec<i32> = (0..n).map(|_| page(i)).collect();
    let dst: Vec<i32> = (0..i.below(24)).map(|_| page(i)).collect();
    let (start, more) = (i.number(), i.u8());
    let stop = if more < 240 { start.saturating_add(n as u64) } else { i.number() };
    let Ok(chunk) = dst_slice(&dst, (start, stop), &src) else { return };
    assert_eq!(chunk.src.len(), chunk.dst.len());
    assert_eq!(chunk.src.len() + chunk.truncated, src.len());
    let mut planner = Planner::new();
    let (kv_src, kv_dst) = pairing.kv_bounds();
    if let Ok(plan) = planner.plan_chunk(&pairing, chunk.src, chunk.dst) {
        let fits = |list: &[i32], bound| list.iter().all(|p| *p >= 0 && (*p as u64) < bound);
        assert!(pairing.kv().is_empty() || fits(chunk.src, kv_src) && fits(chunk.dst, kv_dst), "{chunk:?}");
        inside(&plan, &ours, &theirs.kv, kv_dst, &pairing);
        split(plan, i.number());
    }
    if let Ok(plan) = planner.plan_aux(&pairing, i.number32(), i.number32()) {
        inside(&plan, &ours, &theirs.aux, pairing.aux_bounds().1, &pairing);
    }
    // What we would tell a peer about ourselves is taken by ourselves.
    let own = ours.to_registration(Endpoint::new("h", 1), "n", Bytes::new());
    PeerLayout::from_registration(&own, &Limits::default()).expect("our own registration");
}

/// Every span lies in one of our entries, and between the start of one of the peer's and its last slot.
fn inside(plan: &WritePlan, ours: &LocalLayout, there: &Buffers, slots: u64, pairing: &Pairing) {
    let Buffers::Addrs(bases) = there else { return };
    let spec = ours.spec();
    let items: Vec<u64> = pairing.kv().iter().chain(pairing.aux().iter()).map(|p| p.item_len).collect();
    for Span { src_region, src_offset, dst_addr, len } in plan.spans() {
        let end = src_offset.checked_add(len).expect("a span that does not wrap here");
        assert!(
            spec.kv.iter().chain(&spec.aux).any(|e| {
                e.region == src_region && e.offset <= src_offset && end <= e.offset + e.slots() * e.item_len
            }),
            "{src_region:?} {src_offset} + {len}"
        );
        let end = dst_addr.checked_add(len).expect("a span that does not wrap there");
        assert!(
            bases.iter().any(|base| {
                *base <= dst_addr
                    && items
                        .iter()
                        .any(|item| u128::from(end) <= u128::from(*base) + u128::from(slots) * u128::from(*item))
            }),
            "{dst_addr:#x} + {len} of {slots} slots: {bases:x?}"
        );
    }
}

/// Pieces are small enough, and together the whole.
fn split(plan: WritePlan, max: u64) {
    let bytes = plan.total_bytes();
    assert_eq!(plan.spans().map(|s| s.len).sum::<u64>(), bytes);
    assert_eq!(plan.spans().count() as u64, plan.descriptor_count());
    // At most some thousand pieces.
    let Some(max) = NonZeroU64::new(max.max(bytes / 2048)) else { return };
    let pieces = plan.split(max);
    assert!(pieces.iter().all(|p| !p.is_empty() && p.total_bytes() <= max.get()));
    assert_eq!(pieces.iter().map(WritePlan::total_bytes).sum::<u64>(), bytes);
}

/// A few shapes with pages.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    for (entries, attention, ids) in [(4u8, 0u8, 0u8), (2, 1, 0), (8, 0, 1), (3, 2, 1), (0, 0, 0)] {
        let mut seed = vec![entries, 1, 40, 64];
        seed.extend(vec![0; usize::from(entries) + 1]); // item lengths
        seed.push(ids);
        seed.extend(vec![0; usize::from(entries) + 1]); // entries
        seed.extend([attention, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]); // the rest of the spec
        seed.extend([0, 0, 0]); // nothing changed, no aux geometry, slots as ours
        seed.extend([6, 1, 2, 3, 9, 8, 20, 6, 4, 5, 6, 7, 10, 11, 0, 0, 100, 3, 4]);
        out.push(seed);
    }
    out
}
