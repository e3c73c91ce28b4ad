//! What threads may do to each other: connections, deaths and lanes that come and go under writes.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Remote, Source, available, config, with_environment};
use kv_core::ids::OpId;
use kv_core::memory::MemoryOwner;
use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_core::transport::{LaneEvent, Outcome, SubmitError, Transport as _, WriteOp};
use kv_nixl::{NixlConfig, NixlTransport};
use kv_testkit::TestMemory;
use kv_testkit::conformance::Target as _;

const M: usize = 1 << 20;
const TCP: &[(&str, &str)] = &[("UCX_TLS", "tcp")];

/// The body of a target's process; not a test of its own.
#[test]
fn child_entry_point() {
    common::serve_if_child();
}

/// Two processes that claim one address: the older one lives, as its handle shows, whatever a registration says.
#[test]
fn r_f5_a_successor_does_not_make_a_living_process_dead() {
    if !with_environment("r_f5_a_successor_does_not_make_a_living_process_dead", TCP) {
        return;
    }
    let (mut old, mut new) = (Remote::new(7, 64 * M), Remote::new(7, M));
    let config = NixlConfig { max_op_bytes: 64 << 20, op_timeout: Duration::from_millis(300), ..config() };
    let mut s = Source::new(config, 64 * M);
    let peer = s.connect(&old.descriptor);
    s.reaches(peer, &mut old);
    old.process.pause().unwrap();
    let id = s.write(peer, 0, old.block.addr, 64 * M as u64);
    let next = s.connect(&new.descriptor);
    s.reaches(next, &mut new);
    s.watch(Duration::from_millis(600));
    assert_eq!(s.seen[&id].settlement, None, "a living process was called dead");
    assert_eq!(s.transport.stats().ops_retained, 1);
    old.process.kill().unwrap();
    s.settlement(id);
}

/// Neighbours in memory that were registered one by one.
#[test]
fn ranges_of_different_registrations_are_not_joined() {
    struct Half(Arc<TestMemory>, u64);
    // SAFETY: half of memory that it holds.
    unsafe impl MemoryOwner for Half {
        fn base(&self) -> u64 {
            self.0.base() + self.1
        }
        fn len(&self) -> u64 {
            4096
        }
    }
    if !available("ranges_of_different_registrations_are_not_joined") {
        return;
    }
    let mut target = Remote::new(1, 8192);
    let transport = NixlTransport::new(config()).unwrap();
    let memory = TestMemory::new(8192);
    memory.write(0, &[7; 8192]);
    let regions = [0, 4096].map(|at| transport.register(Arc::new(Half(memory.clone(), at))).unwrap());
    let peer = transport.connect(&target.descriptor).unwrap();
    let mut lane = transport.lane().unwrap();
    let entry = |i: usize| EntryPair {
        src_entry: i as u32,
        dst_entry: i as u32,
        src_region: regions[i].id(),
        src_offset: 0,
        dst_addr: target.block.addr + 4096 * i as u64,
        item_len: 4096,
        src_stride: 4096,
        dst_stride: 4096,
        dst_kind: Default::default(),
    };
    let runs = [Run { src: 0, dst: 0, count: 1 }];
    let plan = WritePlan::new([PlanGroup { entries: [entry(0), entry(1)].into(), runs: runs.into() }]);
    lane.submit(WriteOp { id: OpId(1), peer, plan, regions: regions.clone().into() }).unwrap();
    let mut events = Vec::new();
    while events.is_empty() {
        lane.poll(&mut events);
    }
    assert_eq!(events, [LaneEvent::Outcome(OpId(1), Outcome::Done)]);
    assert_eq!(target.bytes(0, 8192), [7; 8192]);
}

/// A lane goes with a write in flight: it is counted, looked at further, and let go of when it is done.
#[test]
fn a_write_outlives_its_lane_and_is_let_go_of_when_it_is_done() {
    if !with_environment("a_write_outlives_its_lane_and_is_let_go_of_when_it_is_done", TCP) {
        return;
    }
    let mut target = Remote::new(1, 64 * M);
    let mut s = Source::new(NixlConfig { max_op_bytes: 64 << 20, ..config() }, 64 * M);
    let peer = s.connect(&target.descriptor);
    s.reaches(peer, &mut target);
    target.process.pause().unwrap();
    s.write(peer, 0, target.block.addr, 64 * M as u64);
    let weak = Arc::downgrade(s.region.as_ref().unwrap());
    s.region = None;
    s.lane = s.transport.lane().unwrap();
    s.transport.disconnect(peer);
    std::thread::sleep(Duration::from_millis(300));
    assert!(weak.upgrade().is_some(), "memory was let go of under a write");
    assert_eq!((s.transport.stats().ops_retained, s.transport.stats().peers), (1, 1));
    target.process.resume();
    s.until("the write's end", |s| s.transport.stats().ops_retained == 0);
    s.until("the memory's release", |_| weak.upgrade().is_none());
    assert_eq!(s.transport.stats().peers, 0);
    assert_eq!(target.bytes(0, M), s.memory.read(0, M));
}

/// Two lanes write while two threads let go of the peer and connect it again: whatever is refused, what was accepted ends,
/// and after the peer's death nothing is held.
#[test]
fn writes_and_disconnections_at_once_leave_nothing_behind() {
    const NAME: &str = "writes_and_disconnections_at_once_leave_nothing_behind";
    if !with_environment(NAME, TCP) {
        return;
    }
    let mut target = Remote::new(1, 4 * M);
    let transport = Arc::new(NixlTransport::new(config()).unwrap());
    let memory = TestMemory::new(4 * M);
    let region = transport.register(memory).unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    let connectors: Vec<_> = (0..2)
        .map(|_| {
            let (transport, descriptor, stop) = (transport.clone(), target.descriptor.clone(), stop.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let peer = transport.connect(&descriptor);
                    std::thread::sleep(Duration::from_micros(300));
                    peer.into_iter().for_each(|p| transport.disconnect(p));
                }
            })
        })
        .collect();
    let writers: Vec<_> = (0..2u64)
        .map(|lane_number| {
            let (transport, region, stop) = (transport.clone(), region.clone(), stop.clone());
            let (descriptor, to) = (target.descriptor.clone(), target.block.addr);
            std::thread::spawn(move || {
                let mut lane = transport.lane().unwrap();
                let (mut next, mut open, mut events) = (lane_number << 32, 0i64, Vec::new());
                while !stop.load(Ordering::Relaxed) {
                    let Ok(peer) = transport.connect(&descriptor) else { continue };
                    for _ in 0..16 {
                        next += 1;
                        let entry = EntryPair {
                            src_entry: 0,
                            dst_entry: 0,
                            src_region: region.id(),
                            src_offset: lane_number * 2 * M as u64,
                            dst_addr: to + lane_number * 2 * M as u64,
                            item_len: M as u64,
                            src_stride: M as u64,
                            dst_stride: M as u64,
                            dst_kind: Default::default(),
                        };
                        let runs = [Run { src: 0, dst: 0, count: 1 }];
                        let plan = WritePlan::new([PlanGroup { entries: [entry].into(), runs: runs.into() }]);
                        let op = WriteOp { id: OpId(next), peer, plan, regions: [region.clone()].into() };
                        match lane.submit(op) {
                            Ok(()) => open += 1,
                            Err(SubmitError::Busy(_) | SubmitError::Rejected(..)) => {}
                        }
                        lane.poll(&mut events);
                    }
                }
                (lane, open, events)
            })
        })
        .collect();
    std::thread::sleep(Duration::from_secs(3));
    stop.store(true, Ordering::Relaxed);
    connectors.into_iter().for_each(|t| t.join().unwrap());
    let mut writers: Vec<_> = writers.into_iter().map(|t| t.join().unwrap()).collect();
    target.process.kill().unwrap();
    let start = std::time::Instant::now();
    loop {
        for (lane, _, events) in &mut writers {
            lane.poll(events);
        }
        let settled = writers.iter().all(|(_, open, events)| {
            let outcomes = events.iter().filter(|e| matches!(e, LaneEvent::Outcome(..))).count() as i64;
            assert!(outcomes <= *open, "more outcomes than ops");
            outcomes == *open
        });
        if settled && transport.stats().ops_retained == 0 {
            break;
        }
        assert!(start.elapsed() < common::PATIENCE, "left behind: {:?}", transport.stats());
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(transport.stats().ops_done > 0);
}
