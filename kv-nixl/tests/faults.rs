//! Peers that die, stop, come back and go wrong, over the real library: what our layer makes of it, beside what the
//! library itself says (the negative controls, named `control_*`).
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::bare::Bare;
use common::{Remote, Source, available, config, with_environment};
use kv_core::host::HostIdentity;
use kv_core::memory::MemoryOwner as _;
use kv_core::transport::{Outcome, Settlement, SubmitError, Transport as _, TransportErrorKind};
use kv_nixl::{NixlConfig, PeerErrors};
use kv_testkit::TestMemory;
use kv_testkit::conformance::Target as _;
use nixl_capi_sys::status;

const M: usize = 1 << 20;
const TCP: &[(&str, &str)] = &[("UCX_TLS", "tcp")];
const SHM: &[(&str, &str)] = &[("UCX_TLS", "posix,self")];

/// The body of a target's process; not a test of its own.
#[test]
fn child_entry_point() {
    common::serve_if_child();
}

/// The library bare, with 64 MiB registered, and a first write to `target` done.
fn bare_to(target: &Remote, errors: &str) -> (Bare, Arc<TestMemory>) {
    let bare = Bare::new("bare", errors);
    let memory = TestMemory::new(64 * M);
    bare.register(memory.base(), memory.len());
    assert_eq!(bare.load(&target.descriptor.metadata), status::SUCCESS);
    let small = bare.create(&target.descriptor.name, memory.base(), target.block.addr, 64).unwrap();
    let mut code = bare.post(small);
    while code == status::IN_PROG {
        code = bare.status(small);
    }
    assert_eq!(code, status::SUCCESS);
    (bare, memory)
}

/// Ops large enough that one is in flight for a while.
fn large() -> NixlConfig {
    NixlConfig { max_op_bytes: 64 << 20, ..config() }
}

// ---- kill -9

#[test]
fn cat_f55_a_peer_killed_while_idle_is_lost_alone_and_its_writes_settle_by_its_death() {
    if !available("cat_f55_a_peer_killed_while_idle_is_lost_alone_and_its_writes_settle_by_its_death") {
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
    // The death follows the loss.
    s.until("the death", |s| s.transport.stats().peers_dead == 1);
    assert_eq!(s.transport.stats().ops_retained, 0);
}

/// The same without knowing the process, as for a peer on another host or of 0.5.23: the library says that the post
/// failed, and that proves nothing, so the write is kept.
#[test]
fn r_f5_cat_f17_an_error_without_proof_of_death_keeps_handle_and_memory() {
    if !available("r_f5_cat_f17_an_error_without_proof_of_death_keeps_handle_and_memory") {
        return;
    }
    let mut dies = Remote::new(1, M);
    let mut s = Source::new(config(), M);
    let stranger = kv_core::transport::PeerDescriptor { host: None, ..dies.descriptor.clone() };
    let peer = s.connect(&stranger);
    s.reaches(peer, &mut dies);
    dies.process.kill().unwrap();
    let id = s.write(peer, 0, dies.block.addr, 4096);
    assert!(s.is_unresolved(id).contains("backend error"));
    s.until("the loss", |s| s.lost.contains(&peer));
    let weak = Arc::downgrade(s.region.as_ref().unwrap());
    s.region = None;
    s.watch(Duration::from_millis(300));
    assert!(s.seen[&id].settlement.is_none() && weak.upgrade().is_some(), "let go of without proof");
    assert_eq!(s.transport.stats().ops_retained, 1);
    // The metadata of a dead process is refused, and nothing is left behind by the attempt.
    assert!(s.transport.connect(&stranger).is_err());
    assert_eq!(s.transport.stats().ops_retained, 1);
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
    s.is_unresolved(id);
    // One at another address proves nothing.
    let other = s.connect(&elsewhere.descriptor);
    s.watch(Duration::from_millis(100));
    assert_eq!(s.seen[&id].settlement, None);
    let successor = s.connect(&next.descriptor);
    assert_eq!(s.settlement(id), Settlement::PeerGenerationDead);
    s.reaches(successor, &mut next);
    s.reaches(other, &mut elsewhere);
}

#[test]
fn r_f1_writes_in_flight_to_a_killed_peer_all_end_and_settle_over_tcp() {
    if !with_environment("r_f1_writes_in_flight_to_a_killed_peer_all_end_and_settle_over_tcp", TCP) {
        return;
    }
    let (mut dies, mut lives) = (Remote::new(1, 64 * M), Remote::new(2, M));
    let mut s = Source::new(large(), 64 * M);
    let (peer, other) = (s.connect(&dies.descriptor), s.connect(&lives.descriptor));
    s.reaches(peer, &mut dies);
    // Stopped first: then all of it is in flight when it dies.
    dies.process.pause().unwrap();
    let part = 16 * M as u64;
    let ids: Vec<_> = (0..4).map(|i| s.write(peer, i * part, dies.block.addr + i * part, part)).collect();
    s.watch(Duration::from_millis(50));
    assert!(ids.iter().any(|id| s.seen[id].outcome.is_none()), "nothing was in flight");
    dies.process.kill().unwrap();
    for id in ids {
        if s.outcome(id) != Outcome::Done {
            assert_eq!(s.settlement(id), Settlement::PeerGenerationDead);
        }
    }
    s.reaches(other, &mut lives);
    assert_eq!(s.transport.stats().ops_retained, 0);
}

// ---- SIGSTOP, and the release of what is in progress

/// A stopped peer's kernel keeps its connections alive: our own clock ends the waiting, and nothing is let go of.
#[test]
fn r_f5_cat_f06_a_stopped_peer_ends_by_our_clock_and_settles_when_it_goes_on() {
    if !with_environment("r_f5_cat_f06_a_stopped_peer_ends_by_our_clock_and_settles_when_it_goes_on", TCP) {
        return;
    }
    let mut target = Remote::new(1, 64 * M);
    let mut s = Source::new(NixlConfig { op_timeout: Duration::from_millis(500), ..large() }, 64 * M);
    let peer = s.connect(&target.descriptor);
    s.reaches(peer, &mut target);
    target.process.pause().unwrap();
    let id = s.write(peer, 0, target.block.addr, 64 * M as u64);
    assert!(s.is_unresolved(id).contains("still in progress after 500ms"));
    let weak = Arc::downgrade(s.region.as_ref().unwrap());
    let region = s.region.take();
    drop(region);
    s.watch(Duration::from_millis(300));
    assert_eq!(s.seen[&id].settlement, None);
    assert!(weak.upgrade().is_some(), "memory was let go of under a write");
    assert!(s.lost.is_empty(), "slow is not lost");
    target.process.resume();
    assert_eq!(s.settlement(id), Settlement::Settled { src_quiet: true, dst_quiet: true });
    assert_eq!(target.bytes(0, M), s.memory.read(0, M), "what settled has the bytes that were sent");
    s.until("the region to be let go", |_| weak.upgrade().is_none());
}

/// Control: the library says that a release of a transfer in progress succeeded, and what is written to the buffer after
/// it arrives at the peer. This is why nothing here is released without proof.
#[test]
fn control_a_release_in_progress_succeeds_and_stops_nothing() {
    if !with_environment("control_a_release_in_progress_succeeds_and_stops_nothing", TCP) {
        return;
    }
    let mut target = Remote::new(1, 64 * M);
    let (bare, memory) = bare_to(&target, "peer");
    target.process.pause().unwrap();
    let request = bare.create(&target.descriptor.name, memory.base(), target.block.addr, 64 * M as u64).unwrap();
    assert_eq!(bare.post(request), status::IN_PROG);
    assert_eq!(bare.release(request), status::SUCCESS);
    memory.write(0, &vec![0xEE; 64 * M]);
    target.process.resume();
    std::thread::sleep(Duration::from_secs(2));
    let late = target.bytes(0, 64 * M).iter().filter(|b| **b == 0xEE).count();
    assert!(late > M, "{late} bytes written after the release arrived: the hazard is gone, and so is its reason");
}

// ---- generations

#[test]
fn cat_f54_a_peer_that_restarts_under_its_name_is_another_generation_and_disturbs_nobody() {
    if !available("cat_f54_a_peer_that_restarts_under_its_name_is_another_generation_and_disturbs_nobody") {
        return;
    }
    let what = "5 noticed keep the-name";
    let (mut old, mut other) = (Remote::with(what, M), Remote::new(6, M));
    let mut s = Source::new(config(), M);
    let (first, second) = (s.connect(&old.descriptor), s.connect(&other.descriptor));
    s.reaches(first, &mut old);
    old.process.kill().unwrap();
    let mut new = Remote::with(what, M);
    assert_eq!(new.descriptor.name, "the-name");
    let next = s.connect(&new.descriptor);
    assert_ne!(next, first);
    match s.try_write(first, 0, new.block.addr, 64) {
        Err(SubmitError::Rejected(..)) => {}
        other => panic!("a write through the old generation: {other:?}"),
    }
    s.reaches(next, &mut new);
    s.reaches(second, &mut other);
    s.poll();
    assert!(!s.lost.contains(&second) && !s.lost.contains(&next));
}

/// Control: the library refuses the new metadata while it has the old, and posts nothing for the old generation.
#[test]
fn control_a_stale_generation_is_refused_by_the_library() {
    if !available("control_a_stale_generation_is_refused_by_the_library") {
        return;
    }
    let what = "5 noticed keep the-name";
    let mut old = Remote::with(what, M);
    let bare = Bare::new("bare", "peer");
    let memory = TestMemory::new(M);
    bare.register(memory.base(), memory.len());
    assert_eq!(bare.load(&old.descriptor.metadata), status::SUCCESS);
    let request = bare.create("the-name", memory.base(), old.block.addr, 64).unwrap();
    old.process.kill().unwrap();
    let new = Remote::with(what, M);
    assert_eq!(bare.load(&new.descriptor.metadata), status::BACKEND);
    assert_eq!(bare.invalidate("the-name"), status::SUCCESS);
    assert_eq!(bare.load(&new.descriptor.metadata), status::SUCCESS);
    assert_eq!(bare.post(request), status::NOT_FOUND);
}

/// After an error the endpoint is poisoned; connecting again makes a new one, to the same process.
#[test]
fn cat_f51_a_peer_is_reached_again_after_an_error() {
    if !available("cat_f51_a_peer_is_reached_again_after_an_error") {
        return;
    }
    // Memory that goes for good makes the copy fail, and the peer lives.
    let mut target = Remote::with("9 noticed free", M);
    let gone = target.process.alloc(M, true).unwrap();
    let descriptor = target.process.descriptor().unwrap();
    let mut s = Source::new(config(), M);
    let peer = s.connect(&descriptor);
    s.reaches(peer, &mut target);
    target.process.free(gone.id).unwrap();
    let id = s.write(peer, 0, gone.addr, M as u64);
    s.is_unresolved(id);
    s.until("the loss", |s| s.lost.contains(&peer));
    let again = s.connect(&target.process.descriptor().unwrap());
    assert_ne!(again, peer);
    s.reaches(again, &mut target);
    // The process lives: nothing is proven about the failed write.
    assert_eq!(s.seen[&id].settlement, None);
    assert_eq!(s.transport.stats().ops_retained, 1);
}

// ---- memory that goes too early

#[test]
fn cat_f78_memory_that_peers_know_stays_mapped_and_a_late_write_harms_nobody() {
    if !with_environment("cat_f78_memory_that_peers_know_stays_mapped_and_a_late_write_harms_nobody", TCP) {
        return;
    }
    let mut target = Remote::with("9 noticed keep", M);
    let early = target.process.alloc(16 * M, true).unwrap();
    let descriptor = target.process.descriptor().unwrap();
    let mut s = Source::new(large(), 16 * M);
    let peer = s.connect(&descriptor);
    s.reaches(peer, &mut target);
    target.process.free(early.id).unwrap();
    let id = s.write(peer, 0, early.addr, 16 * M as u64);
    assert_eq!(s.outcome(id), Outcome::Done, "the library does not take access back");
    s.reaches(peer, &mut target);
}

/// Control: without that rule, a late write kills the process it is written to.
#[test]
fn control_unmapping_too_early_kills_the_target() {
    if !with_environment("control_unmapping_too_early_kills_the_target", TCP) {
        return;
    }
    let mut target = Remote::with("9 noticed free", M);
    let early = target.process.alloc(16 * M, true).unwrap();
    let descriptor = target.process.descriptor().unwrap();
    let mut s = Source::new(large(), 16 * M);
    let peer = s.connect(&descriptor);
    s.reaches(peer, &mut target);
    target.process.free(early.id).unwrap();
    let id = s.write(peer, 0, early.addr, 16 * M as u64);
    s.is_unresolved(id);
    assert_eq!(s.settlement(id), Settlement::PeerGenerationDead);
    assert!(target.process.descriptor().is_err(), "the target lives: the hazard is gone, and so is its reason");
}

// ---- the silent hang of shared memory

/// Where UCX is told to ignore errors, and copies through shared memory, only the end of the process is seen.
#[test]
fn a_hang_over_shared_memory_ends_with_the_process() {
    if !with_environment("a_hang_over_shared_memory_ends_with_the_process", SHM) {
        return;
    }
    let mut target = Remote::with("3 ignored", 64 * M);
    let mut s = Source::new(NixlConfig { errors: PeerErrors::Ignored, ..large() }, 64 * M);
    let peer = s.connect(&target.descriptor);
    s.reaches(peer, &mut target);
    target.process.pause().unwrap();
    let id = s.write(peer, 0, target.block.addr, 64 * M as u64);
    s.watch(Duration::from_millis(100));
    assert_eq!(s.seen[&id].outcome, None);
    target.process.kill().unwrap();
    assert!(s.is_unresolved(id).contains("has ended"));
    assert_eq!(s.settlement(id), Settlement::PeerGenerationDead);
}

/// Control: the library calls it in progress for ever.
#[test]
fn control_shared_memory_hangs_silently() {
    if !with_environment("control_shared_memory_hangs_silently", SHM) {
        return;
    }
    let mut target = Remote::with("3 ignored", 64 * M);
    let (bare, memory) = bare_to(&target, "none");
    target.process.pause().unwrap();
    let request = bare.create(&target.descriptor.name, memory.base(), target.block.addr, 64 * M as u64).unwrap();
    assert_eq!(bare.post(request), status::IN_PROG);
    target.process.kill().unwrap();
    for _ in 0..30 {
        std::thread::sleep(Duration::from_millis(100));
        assert_eq!(
            bare.status(request),
            status::IN_PROG,
            "the library noticed: the hazard is gone, and so is its reason"
        );
    }
}
