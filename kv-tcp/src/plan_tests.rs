use kv_core::ids::RegionId;
use kv_core::memory::MemoryOwner;
use kv_core::plan::{EntryPair, PlanGroup};
use proptest::prelude::*;

use super::*;
use crate::HostArena;

const LEN: u64 = 1 << 20;

fn local() -> (Arc<HostArena>, Vec<Arc<RegisteredRegion>>) {
    let arena = Arc::new(HostArena::new(LEN as usize).unwrap());
    let region = RegisteredRegion::new(RegionId(7), arena.clone(), Box::new(()));
    (arena, vec![Arc::new(region)])
}

fn remote() -> Vec<RemoteRegion> {
    vec![
        RemoteRegion { id: 3, addr: 1 << 40, len: LEN, key: Key([1; 16]) },
        RemoteRegion { id: 4, addr: 2 << 40, len: LEN, key: Key([2; 16]) },
    ]
}

fn pair(item_len: u64) -> EntryPair {
    EntryPair {
        src_entry: 0,
        dst_entry: 0,
        src_region: RegionId(7),
        src_offset: 0,
        dst_addr: 1 << 40,
        item_len,
        src_stride: item_len,
        dst_stride: item_len,
        dst_kind: Default::default(),
    }
}

fn one(entry: EntryPair, runs: &[Run]) -> WritePlan {
    WritePlan::new([PlanGroup { entries: Arc::new([entry]), runs: runs.into() }])
}

fn run(src: u32, dst: u32, count: u32) -> Run {
    Run { src, dst, count }
}

#[test]
fn an_entry_outside_the_local_region_is_refused() {
    let (_arena, regions) = local();
    let mut plan = Plan::default();
    let fits = one(pair(4096), &[run(255, 0, 1)]);
    assert_eq!(plan.resolve(&fits, &regions, &remote(), u64::MAX), Ok(()));
    let past = one(pair(4096), &[run(256, 0, 1)]);
    assert_eq!(plan.resolve(&past, &regions, &remote(), u64::MAX), Err(PlanError::SourceBounds(0, 4096)));
    let huge = one(EntryPair { src_offset: u64::MAX, ..pair(4096) }, &[run(u32::MAX, 0, u32::MAX)]);
    assert!(matches!(plan.resolve(&huge, &regions, &remote(), u64::MAX), Err(PlanError::SourceBounds(..))));
    let unknown = one(EntryPair { src_region: RegionId(8), ..pair(1) }, &[run(0, 0, 1)]);
    assert_eq!(plan.resolve(&unknown, &regions, &remote(), u64::MAX), Err(PlanError::UnknownRegion(8)));
    let empty = one(pair(0), &[run(0, 0, 1)]);
    assert_eq!(plan.resolve(&empty, &regions, &remote(), u64::MAX), Err(PlanError::EmptyItem));
    assert_eq!(plan.resolve(&fits, &regions, &remote(), 4095), Err(PlanError::TooLarge(4096)));
}

#[test]
fn an_entry_outside_the_peers_regions_is_refused() {
    let (_arena, regions) = local();
    let mut plan = Plan::default();
    for (addr, dst) in [(1u64 << 40, 256), ((1 << 40) - 1, 0), (u64::MAX - 5, 0), (0, 0), (3 << 40, 0)] {
        let past = one(EntryPair { dst_addr: addr, ..pair(4096) }, &[run(0, dst, 1)]);
        assert_eq!(plan.resolve(&past, &regions, &remote(), u64::MAX), Err(PlanError::TargetBounds(addr, 4096)));
    }
}

#[test]
fn authorisation_checks_key_and_every_byte() {
    let registry = Registry::default();
    let arena = Arc::new(HostArena::new(LEN as usize).unwrap());
    let base = arena.base();
    let id = registry.add(arena.clone(), Key([1; 16])).unwrap();
    let (_arena, regions) = local();
    let try_with = |key: u8, id: u32, addr: u64, len: u64, dst: u32, count: u32| {
        // The sender's own table is made to agree, as a forger's would.
        let table = [RemoteRegion { id, addr: 0, len: u64::MAX, key: Key([key; 16]) }];
        let entry = EntryPair { dst_addr: addr, src_stride: 0, dst_stride: len, ..pair(len) };
        let mut plan = Plan::default();
        plan.resolve(&one(entry, &[run(0, dst, count)]), &regions, &table, u64::MAX).unwrap();
        let mut wire = Vec::new();
        plan.encode(true, &mut wire);
        assert_eq!(wire.len(), plan.encoded_len());
        let mut there = Plan::default();
        there.decode(&mut Reader(&wire)).unwrap();
        there.authorise(&registry, &mut Vec::new())
    };
    assert_eq!(try_with(1, id, base, 4096, 0, 256), Ok(()));
    assert_eq!(try_with(2, id, base, 4096, 0, 1), Err(Denied::Forged), "wrong key");
    assert_eq!(try_with(1, id + 1, base, 4096, 0, 1), Err(Denied::Forged), "unknown region");
    assert_eq!(try_with(1, id, base, 4096, 1, 256), Err(Denied::Forged), "past the end");
    assert_eq!(try_with(1, id, base - 1, 4096, 0, 1), Err(Denied::Forged), "before the start");
    assert_eq!(try_with(1, id, 4096, 1 << 19, u32::MAX, 1), Err(Denied::Forged), "elsewhere");
    registry.remove(id);
    assert_eq!(try_with(1, id, base, 4096, 0, 1), Err(Denied::Gone), "not registered any more");
}

#[test]
fn addresses_that_wrap_are_refused_at_the_target() {
    let registry = Registry::default();
    let arena = Arc::new(HostArena::new(LEN as usize).unwrap());
    let id = registry.add(arena.clone(), Key([1; 16])).unwrap();
    // stride 2^63 twice is 0 in 64 bits: item 2 would seem to lie at the base.
    let mut plan = Plan::default();
    plan.refs.push(RegionRef { id, key: Key([1; 16]) });
    plan.entries.push(Entry { src: 0, dst: arena.base(), len: 8, src_stride: 8, dst_stride: 1 << 63, region: 0 });
    plan.runs.push(run(0, 2, 1));
    plan.groups.push(Group { entries: 0..1, runs: 0..1 });
    assert_eq!(plan.authorise(&registry, &mut Vec::new()), Err(Denied::Forged));
}

#[test]
fn r_h2_a_stripe_may_start_behind_any_number_of_small_items() {
    // Ten bytes behind 2^32 items of one byte: a step an item would hold up a worker for everybody.
    let mut plan = Plan::default();
    plan.entries.push(Entry { src: 0, dst: 4096, len: 1, src_stride: 0, dst_stride: 0, region: 0 });
    plan.runs.push(run(0, 0, u32::MAX));
    plan.runs.push(run(0, 7, 10));
    plan.groups.push(Group { entries: 0..1, runs: 0..2 });
    let mut cursor = Cursor::default();
    cursor.skip(&plan, u64::from(u32::MAX) + 3);
    assert_eq!(cursor, Cursor { run: 1, item: 3, ..Cursor::default() });
    let mut near = Cursor::default();
    near.skip(&plan, u64::from(u32::MAX) - 1);
    assert_eq!(near, Cursor { item: u64::from(u32::MAX) - 1, ..Cursor::default() });
    assert_eq!(near.next(&plan, u64::MAX).map(|p| p.len), Some(1));
    assert_eq!(near, Cursor { run: 1, ..Cursor::default() });
}

prop_compose! {
    fn any_group()(
        entries in prop::collection::vec((1u64..200, 0u64..3, 0u64..3, 0u64..1000, 0u64..2), 1..5),
        runs in prop::collection::vec((0u32..50, 0u32..50, 0u32..6), 1..6),
    ) -> PlanGroup {
        PlanGroup {
            entries: entries.into_iter().map(|(len, ss, ds, at, r)| EntryPair {
                src_stride: len + ss, dst_stride: len + ds, src_offset: at, dst_addr: ((r + 1) << 40) + at, ..pair(len)
            }).collect(),
            runs: runs.into_iter().map(|(s, d, n)| run(s, d, n)).collect(),
        }
    }
}

proptest! {
    /// The wire form walks the same bytes as kv-core's spans, whatever the cuts.
    #[test]
    fn cursor_equals_spans(groups in prop::collection::vec(any_group(), 0..4), cut in 1u64..300, skip in 0u64..5000) {
        let (arena, regions) = local();
        let plan = WritePlan::new(groups);
        let mut here = Plan::default();
        here.resolve(&plan, &regions, &remote(), u64::MAX).unwrap();
        let mut wire = Vec::new();
        here.encode(true, &mut wire);
        let mut there = Plan::default();
        let mut r = Reader(&wire);
        there.decode(&mut r).unwrap();
        r.end().unwrap();
        prop_assert_eq!(there.total(), plan.total_bytes());
        let bytes: Vec<(u64, u64)> = plan
            .spans()
            .flat_map(|s| (0..s.len).map(move |i| (s.src_offset + i, s.dst_addr + i)))
            .map(|(s, d)| (s + arena.base(), d))
            .collect();
        let skip = skip.min(there.total());
        let mut cursor = Cursor::default();
        cursor.skip(&there, skip);
        let mut walked = Vec::new();
        while let Some(p) = cursor.next(&there, cut) {
            prop_assert!(p.len <= cut);
            walked.extend((0..p.len).map(|i| (p.src + i, p.dst + i)));
        }
        prop_assert_eq!(&walked[..], &bytes[skip as usize..]);
        // Hidden sources: the same destinations.
        let mut wire = Vec::new();
        here.encode(false, &mut wire);
        there.decode(&mut Reader(&wire)).unwrap();
        let (mut cursor, mut dsts) = (Cursor::default(), Vec::new());
        while let Some(p) = cursor.next(&there, cut) {
            dsts.extend((0..p.len).map(|i| p.dst + i));
        }
        prop_assert_eq!(dsts, bytes.iter().map(|b| b.1).collect::<Vec<_>>());
    }

    #[test]
    fn garbage_never_panics(groups in prop::collection::vec(any_group(), 1..3), at: usize, v: u8, cut: usize,
                            noise in prop::collection::vec(any::<u8>(), 0..300)) {
        let (_arena, regions) = local();
        let mut plan = Plan::default();
        plan.resolve(&WritePlan::new(groups), &regions, &remote(), u64::MAX).unwrap();
        let mut wire = Vec::new();
        plan.encode(true, &mut wire);
        let at = at % wire.len();
        wire[at] = v;
        wire.truncate(wire.len() - cut % wire.len().min(64));
        let registry = Registry::default();
        for bytes in [&wire, &noise] {
            let mut there = Plan::default();
            if there.decode(&mut Reader(bytes)).is_ok() {
                let _ = there.authorise(&registry, &mut Vec::new());
                let mut c = Cursor::default();
                for _ in 0..1000 {
                    if c.next(&there, u64::MAX).is_none() { break }
                }
            }
        }
    }
}
