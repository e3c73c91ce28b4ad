//! Layouts: what is refused and how it is named (requirements A4, H2, G2), and what decode says about itself.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test that cannot set up fails

mod support;

use bytes::Bytes;
use kv_core::RegionId;
use kv_core::layout::{
    AttentionKind, EntryDesc, EntryRef, LayoutError, LayoutSpec, LocalLayout, Pairing, PeerLayout, UnknownSlots,
    Unsupported, mha_pairs, mla_pairs,
};
use kv_core::limits::Limits;
use kv_core::memory::MemoryKind;
use kv_core::net::Endpoint;
use kv_core::plan::{PlanError, Planner, Side, WritePlan};
use kv_core::wire::message::{Buffers, Registration, StateComponent};
use support::*;

fn mla(tp: u32) -> LayoutSpec {
    LayoutSpec { attention: AttentionKind::Mla, attn_tp_size: tp, ..Default::default() }
}

fn mha(tp: u32) -> LayoutSpec {
    LayoutSpec { attn_tp_size: tp, ..Default::default() }
}

const KV: [(u64, u64); 2] = [(4096, 64), (8192, 64)];
const DST: [u64; 2] = [1 << 20, 2 << 20];

fn refusal(spec: LayoutSpec, change: impl FnOnce(&mut Registration)) -> LayoutError {
    let mut r = registration(&DST, 64, &[3 << 20]);
    change(&mut r);
    let peer = match PeerLayout::from_registration(&r, &Limits { max_entries: 8, ..Default::default() }) {
        Ok(peer) => peer,
        Err(e) => return e,
    };
    Pairing::new(&local(&KV, &[(16384, 16)], 16, spec), &peer).unwrap_err()
}

#[test]
fn r_a4_cat_f72_each_flipped_field_is_refused_by_name() {
    let text = |e: LayoutError| e.to_string();
    assert_eq!(
        text(refusal(mha(1), |r| (r.kv_item_lens, r.kv_item_len) = (vec![32; 2], 32))),
        "item_len differs: ours 64 (entry 0), the peer's 32 (entry 0)"
    );
    assert_eq!(
        text(refusal(mha(1), |r| r.kv_item_lens[1] = 65)),
        "item_len differs: ours 64 (entry 1), the peer's 65 (entry 1)"
    );
    assert_eq!(
        refusal(mha(1), |r| r.attn_tp_size = 2),
        LayoutError::NotSupported { what: Unsupported::HeadSlices, ours: 1, theirs: 2 }
    );
    assert_eq!(
        text(refusal(LayoutSpec { engine_rank: 5, ..mha(4) }, |r| (r.attn_tp_size, r.engine_rank) = (4, 6))),
        "attention TP rank differs: ours 1, the peer's 2"
    );
    assert_eq!(refusal(mha(3), |r| r.attn_tp_size = 2), LayoutError::TpIndivisible { ours: 3, theirs: 2 });
    assert_eq!(refusal(mla(3), |r| r.attn_tp_size = 2), LayoutError::TpIndivisible { ours: 3, theirs: 2 });
    assert_eq!(
        refusal(mla(1), |r| r.dcp_size = 2),
        LayoutError::NotSupported { what: Unsupported::DcpRelayout, ours: 1, theirs: 2 }
    );
    assert_eq!(text(refusal(mha(1), |r| r.dcp_size = 2)), "dcp_size differs: ours 1, the peer's 2");
    let two = LayoutSpec { dcp_size: 2, ..mla(1) };
    assert_eq!(text(refusal(two, |r| (r.dcp_size, r.dcp_rank) = (2, 1))), "dcp_rank differs: ours 0, the peer's 1");
    let ids = LayoutSpec { kv: layers(&[5, 5]), ..mha(1) };
    assert_eq!(
        refusal(ids.clone(), |r| r.kv_layer_ids = vec![5, 6]),
        LayoutError::MissingLayer { layer: 5, occurrence: 1 }
    );
    let staged = LayoutSpec { pp_size: 2, ..ids };
    assert_eq!(refusal(staged, |_| ()), LayoutError::LayerIdsOneSided { ours: 2, theirs: 0 });
    assert_eq!(
        text(refusal(mla(1), |r| r.kv = Buffers::Addrs(vec![1 << 20]))),
        "kv_item_lens has 2 values for 1 entries"
    );
    assert_eq!(
        text(refusal(mla(1), |r| (r.kv, r.kv_item_lens) = (Buffers::Addrs(vec![1 << 20]), vec![64]))),
        "2 KV entries of ours cannot be placed among 1 of the peer's: the peer has fewer than our last layer needs; \
         send layer ids"
    );
}

#[test]
fn cat_f09_state_components_are_refused_at_registration() {
    let state = StateComponent {
        buffers: Buffers::Addrs(vec![1]),
        item_lens: vec![1],
        dims: vec![],
        layer_ids: vec![],
        region_lens: vec![],
    };
    assert_eq!(
        refusal(mla(1), |r| r.state = vec![state]),
        LayoutError::NotSupported { what: Unsupported::StateComponents, ours: 0, theirs: 1 }
    );
}

#[test]
fn r_h2_registrations_that_lie_are_refused() {
    let kv = EntryRef::Kv(1);
    let invalid = |field, needed| LayoutError::Invalid { field, value: 0, needed };
    let at_least_1 = "it must be at least 1";
    assert_eq!(refusal(mha(1), |r| r.attn_tp_size = 0), invalid("attn_tp_size", at_least_1));
    assert_eq!(refusal(mha(1), |r| r.dcp_size = 0), invalid("dcp_size", at_least_1));
    assert_eq!(
        refusal(mha(1), |r| r.dcp_rank = 1),
        LayoutError::Invalid { field: "dcp_rank", value: 1, needed: "it must be below dcp_size" }
    );
    assert_eq!(refusal(mha(1), |r| r.kv_item_lens[1] = 0), invalid("kv_item_len", at_least_1));
    assert_eq!(refusal(mha(1), |r| (r.kv_item_lens, r.kv_item_len) = (vec![], 0)), invalid("kv_item_len", at_least_1));
    assert!(matches!(refusal(mha(1), |r| r.kv_item_len = 63), LayoutError::Mismatch { .. }));
    assert_eq!(refusal(mha(1), |r| r.kv_slots = Some(0)), invalid("kv_slots", "KV entries hold at least one page"));
    let count = |field, got| LayoutError::Count { field, got, want: 2 };
    assert_eq!(refusal(mha(1), |r| r.kv_layer_ids = vec![1]), count("kv_layer_ids", 1));
    assert_eq!(refusal(mha(1), |r| r.kv_kinds = vec![MemoryKind::Dram; 3]), count("kv_kinds", 3));
    let many = |field| LayoutError::TooMany { field, got: 9, limit: 8 };
    assert_eq!(refusal(mha(1), |r| r.kv = Buffers::Addrs(vec![1; 9])), many("kv"));
    assert_eq!(refusal(mha(1), |r| r.aux = Buffers::Addrs(vec![1; 9])), many("aux"));
    let top = u64::MAX - 63;
    let overflow = |entry, len| LayoutError::AddressOverflow { entry, addr: top, len };
    let addrs = || Buffers::Addrs(vec![1, top]);
    assert_eq!(refusal(mha(1), |r| r.kv = addrs()), overflow(kv, 64));
    assert_eq!(refusal(mha(1), |r| (r.kv, r.kv_slots) = (addrs(), Some(1 << 40))), overflow(kv, 64 << 40));
    assert_eq!(
        refusal(mha(1), |r| (r.kv, r.kv_slots) = (addrs(), Some(u64::MAX))),
        LayoutError::AddressOverflow { entry: EntryRef::Kv(0), addr: 1, len: u64::MAX }
    );
    // The row's length is ours: 16 bytes from here wrap.
    let end = Buffers::Addrs(vec![u64::MAX - 15]);
    assert!(matches!(refusal(mha(1), |r| r.aux = end), LayoutError::AddressOverflow { entry: EntryRef::Aux(0), .. }));
    let elided = Buffers::Descriptors(vec![Some(Bytes::new()), None]);
    assert_eq!(refusal(mha(1), |r| r.kv = elided), LayoutError::Elided(kv));
}

#[test]
fn local_layouts_are_checked_against_their_regions() {
    let spec = |kv: Vec<EntryDesc>| LayoutSpec { kv, ..mla(1) };
    let new = |spec| LocalLayout::new(spec, [region(0, 4096, 640), region(1, 8192, 640)]).map(|_| ()).unwrap_err();
    let e = entry(0, 640, 64);
    assert_eq!(
        new(spec(vec![EntryDesc { offset: 1, ..e }])),
        LayoutError::OutsideRegion {
            entry: EntryRef::Kv(0),
            region: RegionId(0),
            offset: 1,
            len: 640,
            region_len: 640
        }
    );
    assert!(matches!(new(spec(vec![EntryDesc { offset: u64::MAX, ..e }])), LayoutError::OutsideRegion { .. }));
    let entry_7 = EntryDesc { region: RegionId(7), ..e };
    assert_eq!(new(spec(vec![e, entry_7])), LayoutError::UnknownRegion { entry: EntryRef::Kv(1), region: RegionId(7) });
    for item_len in [0, 641] {
        assert_eq!(
            new(spec(vec![EntryDesc { item_len, ..e }])),
            LayoutError::ItemLen { entry: EntryRef::Kv(0), item_len, len: 640 }
        );
    }
    assert_eq!(
        LocalLayout::new(spec(vec![]), [region(3, 0, 1), region(3, 1, 1)]).map(|_| ()).unwrap_err(),
        LayoutError::DuplicateRegion(RegionId(3))
    );
    let one_id = EntryDesc { layer_id: Some(1), ..e };
    assert_eq!(new(spec(vec![e, one_id])), LayoutError::Count { field: "kv layer ids", got: 1, want: 2 });
    let field = |spec| match new(spec) {
        LayoutError::Invalid { field, .. } => field,
        other => panic!("{other}"),
    };
    assert_eq!(field(LayoutSpec { kv: vec![e], ..mha(1) }), "MHA KV entries");
    assert_eq!(field(LayoutSpec { page_size: 0, ..mha(1) }), "page_size");
    assert_eq!(field(mha(0)), "attn_tp_size");
    assert_eq!(field(LayoutSpec { pp_rank: 1, ..mha(1) }), "pp_rank");
    assert_eq!(field(LayoutSpec { num_draft_entries: 2, kv: vec![e], ..mla(1) }), "num_draft_entries");
    let backwards = LayoutSpec { prefill_start_layer: 3, prefill_end_layer: Some(2), ..mla(1) };
    assert_eq!(field(backwards), "prefill_start_layer");
}

#[test]
fn r_a4_decode_checks_what_the_bootstrap_server_says() {
    let spec = LayoutSpec {
        page_size: 64,
        kv_cache_dtype: "auto".into(),
        kv_layout: Some("nhd".into()),
        ..Default::default()
    };
    let layout = local(&KV, &[], 16, spec);
    let check = |size, dtype, kv_layout| layout.check_prefill(size, dtype, kv_layout).map_err(|e| e.to_string());
    assert_eq!(check(Some(64), Some("auto"), Some("nhd")), Ok(()));
    assert_eq!(check(Some(64), Some("auto"), None), Ok(()));
    assert_eq!(check(Some(1), Some("auto"), None), Err("page_size differs: ours 64, the peer's 1".into()));
    assert_eq!(check(None, Some("auto"), None), Err("page_size differs: ours 64, the peer's unknown".into()));
    assert_eq!(check(Some(64), Some("fp8"), None), Err("kv_cache_dtype differs: ours auto, the peer's fp8".into()));
    assert_eq!(check(Some(64), Some("auto"), Some("hnd")), Err("kv_layout differs: ours nhd, the peer's hnd".into()));
}

#[test]
fn a_layout_registered_with_itself_pairs() {
    let spec = LayoutSpec { kv: layers(&[0, 0]), gpu_id: 3, engine_rank: 5, attn_tp_size: 4, ..Default::default() };
    let layout = local(&KV, &[(16384, 16)], 16, spec);
    let r = layout.to_registration(Endpoint::new("10.0.0.7", 41234), "agent", Bytes::from_static(b"MD"));
    let expected = Registration {
        name: "agent".into(),
        metadata: Bytes::from_static(b"MD"),
        kv_slots: Some(16),
        kv_kinds: vec![MemoryKind::Dram; 2],
        kv_layer_ids: vec![0, 0],
        gpu_id: 3,
        attn_tp_size: 4,
        engine_rank: 5,
        ..registration(&[4096, 8192], 64, &[16384])
    };
    assert_eq!(r, expected);
    let pairing = Pairing::new(&layout, &peer(&r)).unwrap();
    assert_eq!(pairing.kv_bounds(), (16, 16));
    let ends: Vec<_> = pairing.kv().iter().map(|p| (p.src_entry, p.dst_entry, p.dst_addr)).collect();
    assert_eq!(ends, vec![(0, 0, 4096), (1, 1, 8192)]);
}

#[test]
fn unknown_slots_are_ours_or_the_backends_to_check() {
    let layout = local(&KV, &[], 16, mha(1));
    let mut planner = Planner::new();
    let outside = |index, bound| PlanError::OutOfBounds { side: Side::Destination, what: "page", index, bound };
    let theirs = peer(&registration(&DST, 64, &[]));
    let ours = Pairing::new(&layout, &theirs).unwrap();
    assert_eq!(planner.plan_chunk(&ours, &[15], &[16]), Err(outside(16, 16)));
    let backend = Pairing::with_unknown_slots(&layout, &theirs, UnknownSlots::CheckedByBackend).unwrap();
    assert!(planner.plan_chunk(&backend, &[15], &[i32::MAX]).is_ok());
    // No address wraps, whatever the page.
    let high = peer(&registration(&[u64::MAX - 640, 1 << 20], 64, &[]));
    let high = Pairing::with_unknown_slots(&layout, &high, UnknownSlots::CheckedByBackend).unwrap();
    assert!(planner.plan_chunk(&high, &[15], &[9]).is_ok());
    assert_eq!(planner.plan_chunk(&high, &[15], &[10]), Err(outside(10, 10)));
    // A peer that says how many it has is held to that.
    let said = peer(&Registration { kv_slots: Some(100), ..registration(&DST, 64, &[]) });
    let said = Pairing::new(&layout, &said).unwrap();
    assert_eq!(planner.plan_chunk(&said, &[15], &[100]), Err(outside(100, 100)));
    assert!(planner.plan_chunk(&said, &[15], &[99]).is_ok());
}

#[test]
fn a_rank_without_kv_entries_moves_no_pages() {
    let pairing = Pairing::new(&local(&[], &[], 4, mla(1)), &peer(&registration(&DST, 64, &[]))).unwrap();
    assert_eq!(Planner::new().plan_chunk(&pairing, &[1, 2], &[3, 4]), Ok(WritePlan::default()));
}

#[test]
fn aux_geometry_is_compared_where_it_is_known() {
    let layout = local(&[], &[(4096, 16), (8192, 32)], 4, mha(1));
    let theirs = || peer(&registration(&[], 0, &DST));
    let unknown = Pairing::new(&layout, &theirs()).unwrap();
    assert!(Planner::new().plan_aux(&unknown, 3, 1000).is_ok());
    let outside = |side, index| PlanError::OutOfBounds { side, what: "aux slot", index, bound: 4 };
    assert_eq!(Planner::new().plan_aux(&unknown, 4, 0), Err(outside(Side::Source, 4)));
    let known = Pairing::new(&layout, &theirs().with_aux_geometry(vec![16, 32], 4).unwrap()).unwrap();
    assert_eq!(Planner::new().plan_aux(&known, 3, 4), Err(outside(Side::Destination, 4)));
    let other = theirs().with_aux_geometry(vec![16, 33], 4).unwrap();
    let e = Pairing::new(&layout, &other).unwrap_err();
    assert_eq!(e.to_string(), "aux row bytes differs: ours 32, the peer's 33");
    assert!(theirs().with_aux_geometry(vec![16], 4).is_err());
    assert!(theirs().with_aux_geometry(vec![16, u64::MAX], 4).is_err());
}

#[test]
fn r_g1_draft_models_and_uneven_stages_never_pair_with_the_wrong_layer() {
    // A draft model as deep as the target, on decode only. 0.5.23 would take D[4..6], the draft's, for V.
    assert_eq!(mha_pairs(4, 8, 0, 0, (0, 1)), Ok(vec![(0, 0), (1, 1), (2, 2), (3, 3)]));
    // 5 layers as 3 + 2. 0.5.23 takes 3 (then 4) for the target's depth and writes V among K.
    assert!(mha_pairs(6, 10, 0, 0, (0, 2)).is_err());
    assert!(mha_pairs(4, 10, 3, 0, (1, 2)).is_err());
    // 4 layers as 2 + 2, without and with a draft layer on decode.
    assert_eq!(mha_pairs(4, 8, 2, 0, (1, 2)), Ok(vec![(0, 2), (1, 3), (2, 6), (3, 7)]));
    assert_eq!(mha_pairs(4, 10, 2, 0, (1, 2)), Ok(vec![(0, 2), (1, 3), (2, 6), (3, 7)]));
    assert!(mha_pairs(6, 10, 2, 2, (1, 2)).is_err());
    assert!(mha_pairs(6, 4, 0, 0, (0, 1)).is_err());
    assert!(mha_pairs(2, 5, 0, 0, (0, 1)).is_err());
    assert!(mha_pairs(4, 8, u32::MAX, 0, (1, 2)).is_err());
    assert!(mla_pairs(3, 4, u32::MAX, 1).is_err());
    assert!(mla_pairs(2, 4, 3, 0).is_err());
}
