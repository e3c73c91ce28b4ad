//! Prepared descriptor lists: used where they are worth it, exact to the byte, within their budget, of one generation.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use common::{Remote, Source, available, config};
use kv_core::ids::PeerId;
use kv_core::memory::MemoryKind;
use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_core::transport::{Outcome, SubmitError};
use kv_nixl::NixlConfig;
use kv_testkit::Rng;
use kv_testkit::conformance::Target as _;

const PAGE: u64 = 512;
const PAGES: u32 = 256;
const ENTRY: u64 = PAGE * PAGES as u64;

/// The body of a target's process; not a test of its own.
#[test]
fn child_entry_point() {
    common::serve_if_child();
}

/// Two entries, each page of the first half of a shuffled list to a page of another.
fn plan(s: &Source, to: u64, rng: &mut Rng, pages: usize) -> (WritePlan, Vec<Run>) {
    plan_to(s, to, MemoryKind::Dram, rng, pages)
}

fn plan_to(s: &Source, to: u64, kind: MemoryKind, rng: &mut Rng, pages: usize) -> (WritePlan, Vec<Run>) {
    let (mut src, mut dst): (Vec<u32>, Vec<u32>) = ((0..PAGES).collect(), (0..PAGES).collect());
    rng.shuffle(&mut src);
    rng.shuffle(&mut dst);
    let runs: Vec<Run> = src.iter().zip(&dst).take(pages).map(|(&src, &dst)| Run { src, dst, count: 1 }).collect();
    let entry = |i: u64| EntryPair {
        src_entry: i as u32,
        dst_entry: i as u32,
        src_region: s.region.as_ref().unwrap().id(),
        src_offset: i * ENTRY,
        dst_addr: to + i * ENTRY,
        item_len: PAGE,
        src_stride: PAGE,
        dst_stride: PAGE,
        dst_kind: kind,
    };
    let group = PlanGroup { entries: [entry(0), entry(1)].into(), runs: runs.clone().into() };
    (WritePlan::new([group]), runs)
}

fn write_and_compare(s: &mut Source, peer: PeerId, target: &mut Remote, rng: &mut Rng, pages: usize) {
    write_as(s, peer, target, MemoryKind::Dram, rng, pages);
}

fn write_as(s: &mut Source, peer: PeerId, target: &mut Remote, kind: MemoryKind, rng: &mut Rng, pages: usize) {
    let len = 2 * ENTRY as usize;
    target.process.write(target.block.id, 0, &vec![0; len]).unwrap();
    let (plan, runs) = plan_to(s, target.block.addr, kind, rng, pages);
    let id = s.submit(peer, plan).unwrap();
    assert_eq!(s.outcome(id), Outcome::Done);
    let source = s.memory.read(0, len);
    let mut want = vec![0; len];
    for entry in [0, ENTRY as usize] {
        for r in &runs {
            let (from, to) = (entry + r.src as usize * PAGE as usize, entry + r.dst as usize * PAGE as usize);
            want[to..to + PAGE as usize].copy_from_slice(&source[from..from + PAGE as usize]);
        }
    }
    assert!(target.bytes(0, len) == want, "other bytes than were sent");
}

#[test]
fn many_runs_go_by_prepared_lists_and_few_do_not() {
    if !available("many_runs_go_by_prepared_lists_and_few_do_not") {
        return;
    }
    let mut rng = Rng::new(7);
    let mut target = Remote::new(1, 2 * ENTRY as usize);
    let mut s = Source::new(config(), 2 * ENTRY as usize);
    let peer = s.connect(&target.descriptor);
    write_and_compare(&mut s, peer, &mut target, &mut rng, 4);
    assert_eq!(s.transport.stats().transfers_by_index, 0);
    for round in 1..=8 {
        write_and_compare(&mut s, peer, &mut target, &mut rng, 64 + 16 * round);
        assert_eq!(s.transport.stats().transfers_by_index, 2 * round as u64);
    }
    // The next generation has lists of its own.
    target.process.kill().unwrap();
    s.until("the loss", |s| s.lost.contains(&peer));
    let mut next = Remote::new(1, 2 * ENTRY as usize);
    let peer = s.connect(&next.descriptor);
    write_and_compare(&mut s, peer, &mut next, &mut rng, 200);
    assert_eq!(s.transport.stats().transfers_by_index, 18);
}

#[test]
fn beyond_the_budget_lists_are_made_for_the_op() {
    if !available("beyond_the_budget_lists_are_made_for_the_op") {
        return;
    }
    let mut rng = Rng::new(8);
    let mut target = Remote::new(1, 2 * ENTRY as usize);
    for (prepared_descriptors, by_index) in [(0, 0), (2 * u64::from(PAGES), 1), (4 * u64::from(PAGES), 2)] {
        let mut s = Source::new(NixlConfig { prepared_descriptors, ..config() }, 2 * ENTRY as usize);
        let peer = s.connect(&target.descriptor);
        write_and_compare(&mut s, peer, &mut target, &mut rng, 256);
        assert_eq!(s.transport.stats().transfers_by_index, by_index, "{prepared_descriptors} descriptors allowed");
    }
}

/// A page beyond what the peer registered is refused, whichever lists would be used.
#[test]
fn a_page_that_the_peer_does_not_have_is_refused() {
    if !available("a_page_that_the_peer_does_not_have_is_refused") {
        return;
    }
    let mut rng = Rng::new(9);
    let mut target = Remote::new(1, 2 * ENTRY as usize);
    let mut s = Source::new(config(), 2 * ENTRY as usize);
    let peer = s.connect(&target.descriptor);
    write_and_compare(&mut s, peer, &mut target, &mut rng, 100);
    let (_, mut runs) = plan(&s, target.block.addr, &mut rng, 100);
    for (src, dst) in [(0, 2 * PAGES + 9), (2 * PAGES + 9, 0)] {
        runs[50] = Run { src, dst, count: 1 };
        let (good, _) = plan(&s, target.block.addr, &mut rng, 100);
        let entries = good.groups()[0].entries.clone();
        match s.submit(peer, WritePlan::new([PlanGroup { entries, runs: runs.clone().into() }])) {
            Err(SubmitError::Rejected(..)) => {}
            other => panic!("from {src} to {dst}: {other:?}"),
        }
    }
    write_and_compare(&mut s, peer, &mut target, &mut rng, 100);
}

/// SGLang 0.5.23 calls a pool VRAM unless told otherwise: what it registered with the library is what counts.
#[test]
fn r_h1_memory_that_a_peer_calls_vram_and_registered_as_host_memory_is_written() {
    if !available("r_h1_memory_that_a_peer_calls_vram_and_registered_as_host_memory_is_written") {
        return;
    }
    let mut rng = Rng::new(10);
    let mut target = Remote::new(1, 2 * ENTRY as usize);
    let mut s = Source::new(config(), 2 * ENTRY as usize);
    let peer = s.connect(&target.descriptor);
    let vram = MemoryKind::Vram { device: 0 };
    for (kind, pages) in [(vram, 4), (vram, 100), (MemoryKind::Dram, 100), (vram, 200)] {
        write_as(&mut s, peer, &mut target, kind, &mut rng, pages);
    }
    // What it did not register under either kind stays refused.
    let (plan, _) = plan_to(&s, target.block.addr + 64 * ENTRY, vram, &mut rng, 4);
    assert!(matches!(s.submit(peer, plan), Err(SubmitError::Rejected(..))));
    write_as(&mut s, peer, &mut target, vram, &mut rng, 8);
}
