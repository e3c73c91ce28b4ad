//! Peers that die, stop and go wrong, over the real library: what our layer makes of it, beside what the library itself
//! says (the negative controls, named `control_*`).
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{Remote, Source, available, config, with_environment};
use kv_core::host::HostIdentity;
use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_core::transport::{Outcome, PeerDescriptor, Settlement, SubmitError, Transport as _, TransportErrorKind};
use kv_mooncake::MooncakeConfig;
use kv_testkit::conformance::Target as _;

const M: usize = 1 << 20;
/// Not among the bytes of a source.
const NEW: u8 = 255;
/// The library gives up after 1 s without a byte, or without the acknowledgement.
const IMPATIENT: &[(&str, &str)] = &[("MC_TCP_PROGRESS_TIMEOUT_SEC", "1"), ("MC_TCP_STATUS_TIMEOUT_SEC", "1")];

/// The body of a target's process; not a test of its own.
#[test]
fn child_entry_point() {
    common::serve_if_child();
}

/// Ops large enough that one is in flight for a while.
fn large() -> MooncakeConfig {
    MooncakeConfig { max_op_bytes: 64 << 20, ..config() }
}

/// `n` pieces of `len` bytes that do not lie back to back.
fn pieces(s: &Source, addr: u64, n: u32, len: u64) -> WritePlan {
    let entry = EntryPair {
        src_entry: 0,
        dst_entry: 0,
        src_region: s.region.as_ref().unwrap().id(),
        src_offset: 0,
        dst_addr: addr,
        item_len: len,
        src_stride: len,
        dst_stride: 2 * len,
        dst_kind: Default::default(),
    };
    WritePlan::new([PlanGroup { entries: [entry].into(), runs: [Run { src: 0, dst: 0, count: n }].into() }])
}

// ---- kill -9

#[test]
fn cat_f55_a_peer_killed_while_idle_is_lost_alone_and_nothing_is_kept_for_it() {
    if !available("cat_f55_a_peer_killed_while_idle_is_lost_alone_and_nothing_is_kept_for_it") {
        return;
    }
    let (mut dies, mut lives) = (Remote::new(1, M), Remote::new(2, M));
    let mut s = Source::new(config(), M);
    let (a, b) = (s.connect(&dies.descriptor), s.connect(&lives.descriptor));
    assert!(s.transport.watches(a), "the peer says which process it is");
    s.reaches(a, &mut dies);
    dies.process.kill().unwrap();
    s.until("the loss", |s| s.lost.contains(&a));
    match s.try_write(a, 0, dies.block.addr, 4096) {
        Err(SubmitError::Rejected(_, error)) => assert_eq!(error.kind, TransportErrorKind::PeerLost),
        other => panic!("a write to a dead peer: {other:?}"),
    }
    s.reaches(b, &mut lives);
    assert_eq!(s.lost, [a]);
    assert_eq!((s.transport.stats().peers_dead, s.transport.stats().ops_retained), (1, 0));
    s.transport.disconnect(a);
    assert_eq!(s.transport.stats().peers, 1);
}

#[test]
fn r_f1_writes_in_flight_to_a_killed_peer_all_end_and_settle() {
    if !available("r_f1_writes_in_flight_to_a_killed_peer_all_end_and_settle") {
        return;
    }
    // Stopped first: then all of it is in flight when it dies. And in mid-stride, wherever that is.
    for stop in [true, false] {
        let (mut dies, mut lives) = (Remote::new(1, 64 * M), Remote::new(2, M));
        let mut s = Source::new(large(), 64 * M);
        let (peer, other) = (s.connect(&dies.descriptor), s.connect(&lives.descriptor));
        s.reaches(peer, &mut dies);
        if stop {
            dies.process.pause().unwrap();
        }
        let part = 8 * M as u64;
        let ids: Vec<_> = (0..8).map(|i| s.write(peer, i * part, dies.block.addr + i * part, part)).collect();
        s.watch(Duration::from_millis(if stop { 50 } else { 5 }));
        assert!(ids.iter().any(|id| s.seen[id].outcome.is_none()), "nothing was in flight");
        dies.process.kill().unwrap();
        for id in ids {
            match s.outcome(id) {
                Outcome::Done | Outcome::Failed { src_quiet: true, dst_quiet: true, .. } => {}
                Outcome::Unresolved { .. } | Outcome::Failed { src_quiet: true, dst_quiet: false, .. } => {
                    assert_eq!(s.settlement(id), Settlement::PeerGenerationDead)
                }
                other => panic!("{id:?} ended {other:?}"),
            }
        }
        s.reaches(other, &mut lives);
        assert_eq!((s.transport.stats().ops_retained, s.transport.tasks_outstanding(peer)), (0, 0));
    }
}

/// Without knowing the process, as for a peer on another host or of 0.5.23: the library says that the write failed, and
/// that proves nothing, so it is kept.
#[test]
fn r_f5_cat_f17_an_error_without_proof_of_death_keeps_batch_and_memory() {
    if !available("r_f5_cat_f17_an_error_without_proof_of_death_keeps_batch_and_memory") {
        return;
    }
    let mut dies = Remote::new(1, M);
    let mut s = Source::new(config(), M);
    let stranger = PeerDescriptor { host: None, ..dies.descriptor.clone() };
    let peer = s.connect(&stranger);
    s.reaches(peer, &mut dies);
    dies.process.kill().unwrap();
    let id = s.write(peer, 0, dies.block.addr, 4096);
    assert!(s.is_unproven(id).contains("failed (6)"));
    s.until("the loss", |s| s.lost.contains(&peer));
    let weak = Arc::downgrade(s.region.as_ref().unwrap());
    s.region = None;
    s.watch(Duration::from_millis(300));
    assert!(s.seen[&id].settlement.is_none() && weak.upgrade().is_some(), "let go of without proof");
    // Nobody answers, and nothing is left behind by the attempt.
    assert_eq!(s.transport.connect(&stranger).err().map(|e| e.kind), Some(TransportErrorKind::PeerLost));
    assert_eq!((s.transport.stats().ops_retained, s.transport.stats().peers), (1, 1));
}

/// Proof from another host: a successor at the same address, of the same boot.
#[test]
fn r_f5_cat_f54_a_successor_at_the_same_address_settles_what_its_predecessor_left() {
    if !available("r_f5_cat_f54_a_successor_at_the_same_address_settles_what_its_predecessor_left") {
        return;
    }
    // As seen from elsewhere: process numbers that mean nothing here.
    let far = |pid: u32| Some(HostIdentity { pid_ns: 1, pid, start: u64::from(pid), ..HostIdentity::local() });
    let (mut old, mut next, mut elsewhere) = (Remote::new(7, M), Remote::new(7, M), Remote::new(8, M));
    old.descriptor.host = far(10);
    next.descriptor.host = far(11);
    elsewhere.descriptor.host = far(12);
    let mut s = Source::new(config(), M);
    let peer = s.connect(&old.descriptor);
    s.reaches(peer, &mut old);
    assert!(!s.transport.watches(peer));
    old.process.kill().unwrap();
    let id = s.write(peer, 0, old.block.addr, 4096);
    s.is_unproven(id);
    // One at another address proves nothing.
    let other = s.connect(&elsewhere.descriptor);
    s.watch(Duration::from_millis(100));
    assert_eq!(s.seen[&id].settlement, None);
    let successor = s.connect(&next.descriptor);
    assert_eq!(s.settlement(id), Settlement::PeerGenerationDead);
    s.reaches(successor, &mut next);
    s.reaches(other, &mut elsewhere);
}

// ---- SIGSTOP

/// A stopped peer's kernel keeps its connections alive: our own clock ends the waiting, and nothing is let go of.
#[test]
fn r_f5_cat_f06_a_stopped_peer_ends_by_our_clock_and_settles_when_it_goes_on() {
    if !available("r_f5_cat_f06_a_stopped_peer_ends_by_our_clock_and_settles_when_it_goes_on") {
        return;
    }
    let mut target = Remote::new(1, 64 * M);
    let mut s = Source::new(MooncakeConfig { op_timeout: Some(Duration::from_millis(500)), ..large() }, 64 * M);
    let peer = s.connect(&target.descriptor);
    s.reaches(peer, &mut target);
    target.process.pause().unwrap();
    let id = s.write(peer, 0, target.block.addr, 64 * M as u64);
    assert!(s.is_unproven(id).contains("has moved for 500ms"));
    let weak = Arc::downgrade(s.region.as_ref().unwrap());
    s.region = None;
    s.watch(Duration::from_millis(300));
    assert_eq!(s.seen[&id].settlement, None);
    assert!(weak.upgrade().is_some(), "memory was let go of under a write");
    assert!(s.lost.is_empty(), "slow is not lost");
    target.process.resume();
    assert_eq!(s.settlement(id), Settlement::Settled { src_quiet: true, dst_quiet: true });
    assert_eq!(target.bytes(0, M), s.memory.read(0, M), "what settled has the bytes that were sent");
    s.until("the region to be let go", |_| weak.upgrade().is_none());
}

/// Stopped for longer than every timeout, the library's too, and then resumed. The write stays counted, its memory
/// registered, for as long as the peer lives; so nobody else has the pages when the late bytes land.
///
/// Control, in the same breath: bytes land after the library has called the write failed.
#[test]
fn r_f1_r_f5_a_peer_stopped_longer_than_every_timeout_keeps_its_writes_counted() {
    let name = "r_f1_r_f5_a_peer_stopped_longer_than_every_timeout_keeps_its_writes_counted";
    if !with_environment(name, IMPATIENT) {
        return;
    }
    let mut target = Remote::new(1, 64 * M);
    let mut s = Source::new(large(), 64 * M);
    let peer = s.connect(&target.descriptor);
    target.process.pause().unwrap();
    let id = s.write(peer, 0, target.block.addr, 64 * M as u64);
    let small = s.write(peer, 0, target.block.addr + 32 * M as u64, 4096);
    assert!(s.is_unproven(id).contains("failed (6)"), "ours is above the library's");
    s.is_unproven(small);
    s.until("the loss", |s| s.lost.contains(&peer));
    // The library has ended all of it, so its source may be used for something else.
    for id in [id, small] {
        assert!(s.seen[&id].outcome.as_ref().unwrap().quiet().0, "{:?}", s.seen[&id]);
    }
    s.memory.write(0, &vec![NEW; 64 * M]);
    let weak = Arc::downgrade(s.region.as_ref().unwrap());
    s.region = None;
    target.process.resume();
    s.watch(Duration::from_secs(1));
    let got = target.bytes(0, 64 * M);
    let landed = got.iter().filter(|b| **b != 0).count();
    assert!(landed > 4096, "{landed} bytes landed after the failure: the hazard is gone, and so is its reason");
    assert!(!got.contains(&NEW), "a source that was called quiet was read");
    for id in [id, small] {
        assert_eq!(s.seen[&id].settlement, None, "a living process was called quiet");
    }
    assert!(weak.upgrade().is_some());
    assert_eq!(s.transport.stats().ops_retained, 2);
    // It is the same process, and is reached again; that proves nothing either.
    let again = s.transport.connect(&target.process.descriptor().unwrap()).unwrap();
    assert_ne!(again, peer);
    assert_eq!(s.transport.stats().ops_retained, 2);
    target.process.kill().unwrap();
    for id in [id, small] {
        assert_eq!(s.settlement(id), Settlement::PeerGenerationDead);
    }
    s.until("the region to be let go", |_| weak.upgrade().is_none());
}

/// Control: while the library goes on with a write, its source is read, whatever our own clock says.
#[test]
fn control_a_write_that_is_overdue_and_goes_on_reads_its_source() {
    if !available("control_a_write_that_is_overdue_and_goes_on_reads_its_source") {
        return;
    }
    let mut target = Remote::new(1, 64 * M);
    let mut s = Source::new(MooncakeConfig { op_timeout: Some(Duration::from_millis(500)), ..large() }, 64 * M);
    let peer = s.connect(&target.descriptor);
    target.process.pause().unwrap();
    let id = s.write(peer, 0, target.block.addr, 64 * M as u64);
    s.is_unproven(id);
    assert_eq!(s.seen[&id].outcome.as_ref().unwrap().quiet(), (false, false));
    s.memory.write(0, &vec![NEW; 64 * M]);
    target.process.resume();
    assert_eq!(s.settlement(id), Settlement::Settled { src_quiet: true, dst_quiet: true });
    assert!(target.bytes(0, 64 * M).contains(&NEW), "it was not read: the test of the failed write shows nothing");
}

/// A lane that goes leaves its writes to the keeper.
#[test]
fn r_f1_writes_of_a_lane_that_is_gone_stay_counted_until_they_have_arrived() {
    if !available("r_f1_writes_of_a_lane_that_is_gone_stay_counted_until_they_have_arrived") {
        return;
    }
    let mut target = Remote::new(1, 32 * M);
    let mut s = Source::new(large(), 32 * M);
    let peer = s.connect(&target.descriptor);
    s.reaches(peer, &mut target);
    target.process.pause().unwrap();
    s.write(peer, 0, target.block.addr, 32 * M as u64);
    s.lane = s.transport.lane().unwrap();
    let weak = Arc::downgrade(s.region.as_ref().unwrap());
    s.region = None;
    s.watch(Duration::from_millis(300));
    assert!(weak.upgrade().is_some() && s.transport.stats().ops_retained == 1);
    target.process.resume();
    s.until("the write to arrive", |s| s.transport.stats().ops_retained == 0);
    assert!(weak.upgrade().is_none());
    assert_eq!(target.bytes(0, M), s.memory.read(0, M));
}

/// Of a stopped peer's queue: what the library never had is over at once, with proof; what it had is not.
#[test]
fn r_f2_what_never_went_is_quiet_and_what_went_is_not() {
    if !available("r_f2_what_never_went_is_quiet_and_what_went_is_not") {
        return;
    }
    let mut target = Remote::new(1, 16 * M);
    let config = MooncakeConfig {
        max_tasks_per_peer: 4,
        max_batch: 4,
        op_timeout: Some(Duration::from_millis(500)),
        ..config()
    };
    let mut s = Source::new(config, 16 * M);
    let peer = s.connect(&target.descriptor);
    s.reaches(peer, &mut target);
    target.process.pause().unwrap();
    let plan = pieces(&s, target.block.addr, 64, 64 << 10);
    let went = s.submit(peer, plan).unwrap();
    let never = s.write(peer, 0, target.block.addr, 4096);
    s.is_unproven(went);
    match s.outcome(never) {
        Outcome::Failed { src_quiet: true, dst_quiet: true, error } => {
            assert_eq!(error.kind, TransportErrorKind::Timeout)
        }
        other => panic!("{other:?}"),
    }
    target.process.resume();
    assert_eq!(s.settlement(went), Settlement::Settled { src_quiet: true, dst_quiet: true });
    s.reaches(peer, &mut target);
}

// ---- many descriptors

/// Far beyond what the library takes: 5,000 in one op, and four lanes at once.
#[test]
fn thousands_of_descriptors_to_one_peer_go_within_the_limit() {
    if !available("thousands_of_descriptors_to_one_peer_go_within_the_limit") {
        return;
    }
    let mut target = Remote::new(1, 12 * M);
    let mut s = Source::new(config(), 6 * M);
    let peer = s.connect(&target.descriptor);
    let plan = pieces(&s, target.block.addr, 5000, 1024);
    let mut most = 0;
    for _ in 0..8 {
        // All write the same bytes to the same places.
        let ids: Vec<_> = (0..4).map(|_| s.submit(peer, plan.clone()).unwrap()).collect();
        s.until("the outcomes", |s| {
            most = most.max(s.transport.tasks_outstanding(peer));
            ids.iter().all(|id| s.seen[id].outcome.is_some())
        });
        assert!(ids.iter().all(|id| s.seen[id].outcome == Some(Outcome::Done)));
    }
    assert!((256..=512).contains(&most), "{most} tasks were outstanding");
    let got = target.bytes(0, 10_000 * 1024);
    for i in 0..5000 {
        assert_eq!(got[2 * i * 1024..][..1024], s.memory.read(i * 1024, 1024), "piece {i}");
        assert!(got[(2 * i + 1) * 1024..][..1024].iter().all(|b| *b == 0), "between pieces {i} and {}", i + 1);
    }
    let mut lanes: Vec<_> = (0..4).map(|_| s.transport.lane().unwrap()).collect();
    let region = s.region.clone().unwrap();
    for (i, lane) in lanes.iter_mut().enumerate() {
        let id = kv_core::ids::OpId(i as u64);
        let op = kv_core::transport::WriteOp { id, peer, plan: plan.clone(), regions: [region.clone()].into() };
        lane.submit(op).unwrap();
    }
    let mut done = Vec::new();
    let start = std::time::Instant::now();
    while done.len() < lanes.len() {
        lanes.iter_mut().for_each(|l| l.poll(&mut done));
        assert!(s.transport.tasks_outstanding(peer) <= 512);
        assert!(start.elapsed() < common::PATIENCE, "{done:?}");
    }
    let fine =
        |e: &kv_core::transport::LaneEvent| matches!(e, kv_core::transport::LaneEvent::Outcome(_, Outcome::Done));
    assert!(done.iter().all(fine), "{done:?}");
    assert_eq!(s.transport.tasks_outstanding(peer), 0);
}

/// The library hangs for ever in a few of such batches when it is given 2,500 tasks at once or more.
#[test]
#[ignore = "a minute or two: cargo test -p kv-transfer-mooncake --test faults -- --ignored"]
fn a_thousand_batches_of_4000_descriptors_all_arrive() {
    if !available("a_thousand_batches_of_4000_descriptors_all_arrive") {
        return;
    }
    let mut target = Remote::new(1, 8 * M);
    let mut s = Source::new(config(), 4 * M);
    let peer = s.connect(&target.descriptor);
    let plan = pieces(&s, target.block.addr, 4000, 1024);
    let start = std::time::Instant::now();
    let mut longest = Duration::ZERO;
    for _ in 0..1000 {
        let began = start.elapsed();
        let id = s.submit(peer, plan.clone()).unwrap();
        assert_eq!(s.outcome(id), Outcome::Done);
        longest = longest.max(start.elapsed() - began);
        s.seen.clear();
    }
    println!("1000 batches of 4000 descriptors of 1 KiB: {:?}, the longest {longest:?}", start.elapsed());
    assert_eq!(s.transport.tasks_outstanding(peer), 0);
    let got = target.bytes(0, 8 * M - 1024);
    for i in 0..4000 {
        assert_eq!(got[2 * i * 1024..][..1024], s.memory.read(i * 1024, 1024), "piece {i}");
    }
}
