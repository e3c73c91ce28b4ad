//! The fake transport keeps the seam's law and notices who breaks it.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;

use kv_core::ids::{OpId, PeerId, RegionId};
use kv_core::memory::{MemoryOwner as _, RegisteredRegion};
use kv_core::net::Endpoint;
use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_core::transport::{
    Lane, LaneEvent, Outcome, PeerDescriptor, Settlement, SubmitError, Transport as _, TransportErrorKind, WriteOp,
};
use kv_testkit::fake_transport::{FakeFabric, FakeTransport, Policy, Verdict};
use kv_testkit::{Rng, TestMemory};

const PAGE: u64 = 64;

struct Pair {
    fabric: FakeFabric,
    p: Arc<FakeTransport>,
    d: Arc<FakeTransport>,
    src: Arc<TestMemory>,
    dst: Arc<TestMemory>,
    src_region: Arc<RegisteredRegion>,
    _dst_region: Arc<RegisteredRegion>,
    peer: PeerId,
    lane: Box<dyn Lane>,
}

fn descriptor(t: &FakeTransport, port: u16) -> PeerDescriptor {
    PeerDescriptor {
        name: t.local_name().into(),
        metadata: t.local_metadata(),
        endpoint: Endpoint::new("127.0.0.1", port),
        host: None,
    }
}

fn pair() -> Pair {
    let fabric = FakeFabric::new();
    let (p, d) = (fabric.transport("p"), fabric.transport("d"));
    let (src, dst) = (TestMemory::patterned(1024, 7), TestMemory::new(1024));
    let src_region = p.register(src.clone()).unwrap();
    let _dst_region = d.register(dst.clone()).unwrap();
    let peer = p.connect(&descriptor(&d, 1)).unwrap();
    let lane = p.lane().unwrap();
    p.set_policy(Policy::Hold);
    Pair { fabric, p, d, src, dst, src_region, _dst_region, peer, lane }
}

impl Pair {
    /// Pages `src` to pages `dst`, page by page.
    fn op(&self, id: u64, pages: &[(u32, u32)]) -> WriteOp {
        let entry = EntryPair {
            src_entry: 0,
            dst_entry: 0,
            src_region: self.src_region.id(),
            src_offset: 0,
            dst_addr: self.dst.base(),
            item_len: PAGE,
            src_stride: PAGE,
            dst_stride: PAGE,
            dst_kind: Default::default(),
        };
        let runs = pages.iter().map(|&(src, dst)| Run { src, dst, count: 1 }).collect();
        let plan = WritePlan::new([PlanGroup { entries: Arc::from([entry]), runs }]);
        WriteOp { id: OpId(id), peer: self.peer, plan, regions: Arc::from([self.src_region.clone()]) }
    }

    fn poll(&mut self) -> Vec<LaneEvent> {
        let mut out = Vec::new();
        self.lane.poll(&mut out);
        out
    }
}

#[test]
fn post_stays_in_progress_until_done() {
    let mut t = pair();
    t.lane.submit(t.op(1, &[(0, 3), (1, 1)])).unwrap();
    assert_eq!(t.poll(), []);
    assert_eq!(t.p.only().landed, 0);
    t.p.complete(OpId(1));
    assert_eq!(t.poll(), [LaneEvent::Outcome(OpId(1), Outcome::Done)]);
    assert_eq!(t.dst.read(192, 64), t.src.read(0, 64));
    assert_eq!(t.dst.read(64, 64), t.src.read(64, 64));
    t.dst.assert_canary(128, 64, 0);
    assert!(t.p.op(OpId(1)).unwrap().is_quiet());
    assert_eq!(t.poll(), []);
}

#[test]
fn landing_is_apart_from_reporting() {
    let mut t = pair();
    t.lane.submit(t.op(1, &[(0, 0), (1, 1)])).unwrap();
    t.p.land_spans(OpId(1), 0..1);
    t.p.unresolve(OpId(1));
    assert!(matches!(t.poll()[..], [LaneEvent::Outcome(OpId(1), Outcome::Unresolved { .. })]));
    t.dst.assert_canary(64, 64, 0);
    t.p.land(OpId(1)); // after the error, as a NIC may
    assert_eq!(t.dst.read(0, 128), t.src.read(0, 128));
    t.p.settle(OpId(1), true, true);
    let settled = Settlement::Settled { src_quiet: true, dst_quiet: true };
    assert_eq!(t.poll(), [LaneEvent::Settlement(OpId(1), settled)]);
}

#[test]
fn an_op_holds_its_memory_until_both_sides_are_quiet() {
    let mut t = pair();
    let weak = Arc::downgrade(&t.src_region);
    t.lane.submit(t.op(1, &[(0, 0)])).unwrap();
    t.p.fail(OpId(1), true, false);
    let Pair { fabric, p, src_region, mut lane, .. } = t;
    drop(src_region);
    assert!(weak.upgrade().is_some(), "destination is not quiet: the registration stays");
    p.peer_generation_dead(OpId(1));
    assert!(weak.upgrade().is_none());
    let mut out = Vec::new();
    lane.poll(&mut out);
    assert_eq!(out.len(), 2);
    fabric.assert_no_premature_release();
}

#[test]
fn refusals_hand_the_op_back() {
    let mut t = pair();
    t.p.script_next(Verdict::Busy);
    t.p.script_next(Verdict::Reject(TransportErrorKind::Backend));
    let Err(SubmitError::Busy(op)) = t.lane.submit(t.op(1, &[(0, 0)])) else { panic!("not busy") };
    let Err(SubmitError::Rejected(op, e)) = t.lane.submit(op) else { panic!("not rejected") };
    assert_eq!(e.kind, TransportErrorKind::Backend);
    assert_eq!(op.id, OpId(1));
    t.lane.submit(op).unwrap();
    assert_eq!(t.p.in_flight().len(), 1);

    let refused = |t: &mut Pair, op: WriteOp| match t.lane.submit(op) {
        Err(SubmitError::Rejected(_, e)) => e.kind,
        other => panic!("{other:?}"),
    };
    let op = WriteOp { peer: PeerId(99), ..t.op(2, &[(0, 0)]) };
    assert_eq!(refused(&mut t, op), TransportErrorKind::PeerLost);
    let op = t.op(2, &[(0, 16)]); // one page past the end there
    assert_eq!(refused(&mut t, op), TransportErrorKind::Refused);
    let op = t.op(2, &[(16, 0)]); // one page past the end here
    assert_eq!(refused(&mut t, op), TransportErrorKind::InvalidArgument);
    let op = WriteOp { regions: Arc::from([]), ..t.op(2, &[(0, 0)]) };
    assert_eq!(refused(&mut t, op), TransportErrorKind::InvalidArgument);
    let op = t.op(2, &[]);
    assert_eq!(refused(&mut t, op), TransportErrorKind::InvalidArgument);
    t.p.complete_all();
}

#[test]
fn policies_decide_op_by_op() {
    let mut t = pair();
    t.p.set_policy(Policy::by(|op| {
        if op.seq.is_multiple_of(2) { Verdict::Complete } else { Verdict::Fail { src_quiet: true, dst_quiet: true } }
    }));
    for i in 0..4 {
        t.lane.submit(t.op(i, &[(0, i as u32)])).unwrap();
    }
    let mut done: Vec<(u64, bool)> = Vec::new();
    for event in t.poll() {
        let LaneEvent::Outcome(id, outcome) = event else { panic!("{event:?}") };
        done.push((id.0, outcome == Outcome::Done));
    }
    done.sort_unstable();
    assert_eq!(done, [(0, true), (1, false), (2, true), (3, false)]);

    t.p.set_policy(Policy::Seeded { rng: Rng::new(5), max_polls: 3, busy: 0.5 });
    let (mut next, mut busy, mut ended) = (4, 0, 0);
    while ended < 20 {
        if next < 24 {
            match t.lane.submit(t.op(next, &[(0, 0)])) {
                Ok(()) => next += 1,
                Err(SubmitError::Busy(_)) => busy += 1,
                Err(e) => panic!("{e:?}"),
            }
        }
        ended += t.poll().len();
    }
    assert!(busy > 0);
}

#[test]
#[should_panic(expected = "OpId(1) was submitted twice")]
fn a_duplicate_op_id_panics() {
    let mut t = pair();
    t.lane.submit(t.op(1, &[(0, 0)])).unwrap();
    let _ = t.lane.submit(t.op(1, &[(0, 0)]));
}

#[test]
#[should_panic(expected = "has its outcome already")]
fn a_second_outcome_panics() {
    let mut t = pair();
    t.lane.submit(t.op(1, &[(0, 0)])).unwrap();
    t.p.complete(OpId(1));
    t.p.fail(OpId(1), true, true);
}

#[test]
#[should_panic(expected = "is proven dst_quiet: it cannot land")]
fn landing_after_dst_quiet_panics() {
    let mut t = pair();
    t.lane.submit(t.op(1, &[(0, 0)])).unwrap();
    t.p.fail(OpId(1), false, true);
    t.p.land(OpId(1));
}

#[test]
fn cat_f13_a_landing_in_pages_that_were_given_away_is_seen() {
    let mut t = pair();
    t.lane.submit(t.op(1, &[(0, 2)])).unwrap();
    t.p.unresolve(OpId(1));
    // An engine that frees the page now is wrong; the test gives it to another room.
    t.fabric.guard(t.dst.addr(2 * 64), 64, "page 2 belongs to room 8 now");
    t.p.land(OpId(1));
    let found = t.fabric.take_violations();
    assert_eq!(found.len(), 1);
    assert!(found[0].contains("page 2 belongs to room 8 now"), "{found:?}");
    t.p.settle(OpId(1), true, true);
}

#[test]
fn cat_f32_a_source_overwritten_in_flight_is_seen() {
    let mut t = pair();
    t.lane.submit(t.op(1, &[(0, 0)])).unwrap();
    t.fabric.assert_no_premature_release();
    t.src.fill(0, 1, 0x55);
    let fabric = t.fabric.clone();
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fabric.assert_no_premature_release()));
    assert!(caught.is_err());
    t.p.complete(OpId(1));
    assert_eq!(t.fabric.take_violations(), Vec::<String>::new(), "told once");
}

#[test]
fn a_destination_unregistered_under_a_write_is_seen() {
    let mut t = pair();
    t.lane.submit(t.op(1, &[(0, 0)])).unwrap();
    t.p.unresolve(OpId(1));
    t.fabric.assert_no_premature_release();
    let Pair { fabric, p, _dst_region, lane, .. } = t;
    drop(_dst_region);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fabric.assert_no_premature_release()));
    let text = *caught.unwrap_err().downcast::<String>().unwrap();
    assert!(text.contains("d let go of memory that p OpId(1) may still write"), "{text}");
    p.settle(OpId(1), true, true);
    fabric.assert_no_premature_release();
    drop(lane);
}

#[test]
fn a_lane_dropped_over_a_live_write_is_seen() {
    let mut t = pair();
    t.lane.submit(t.op(1, &[(0, 0)])).unwrap();
    let Pair { fabric, lane, .. } = t;
    drop(lane);
    assert!(fabric.take_violations()[0].contains("not quiet: [OpId(1)]"));
}

#[test]
fn cat_f78_memory_registered_anew_refuses_the_old_key() {
    let fabric = FakeFabric::new();
    let (p, d) = (fabric.transport("p"), fabric.transport("d"));
    let (src, dst) = (TestMemory::patterned(64, 1), TestMemory::new(64));
    let region = p.register(src).unwrap();
    let old = d.register(dst.clone()).unwrap();
    let peer = p.connect(&descriptor(&d, 1)).unwrap();
    drop(old);
    let _new = d.register(dst.clone()).unwrap();
    let mut lane = p.lane().unwrap();
    let entry = EntryPair {
        src_entry: 0,
        dst_entry: 0,
        src_region: region.id(),
        src_offset: 0,
        dst_addr: dst.base(),
        item_len: 64,
        src_stride: 64,
        dst_stride: 64,
        dst_kind: Default::default(),
    };
    let runs = Arc::from([Run { src: 0, dst: 0, count: 1 }]);
    let plan = WritePlan::new([PlanGroup { entries: Arc::from([entry]), runs }]);
    lane.submit(WriteOp { id: OpId(1), peer, plan, regions: Arc::from([region]) }).unwrap();
    let mut out = Vec::new();
    lane.poll(&mut out);
    assert!(matches!(out[..], [LaneEvent::Outcome(OpId(1), Outcome::Failed { .. })]), "{out:?}");
    dst.assert_canary(0, 64, 0);
    assert_eq!(fabric.take_violations().len(), 1);
}

#[test]
fn cat_f54_a_new_generation_at_the_endpoint_tears_down_the_old() {
    let mut t = pair();
    t.lane.submit(t.op(1, &[(0, 0)])).unwrap();
    t.lane.submit(t.op(2, &[(0, 1)])).unwrap();
    t.p.unresolve(OpId(1));
    t.poll();
    let d2 = t.fabric.transport("d2");
    let next = t.p.connect(&descriptor(&d2, 1)).unwrap();
    assert_ne!(next, t.peer);
    let events = t.poll();
    assert!(matches!(events[0], LaneEvent::PeerLost(peer, _) if peer == t.peer));
    assert_eq!(events[1], LaneEvent::Settlement(OpId(1), Settlement::PeerGenerationDead));
    assert!(matches!(events[2], LaneEvent::Outcome(OpId(2), Outcome::Failed { src_quiet: true, dst_quiet: true, .. })));
    assert!(matches!(t.lane.submit(t.op(3, &[(0, 0)])), Err(SubmitError::Rejected(..))));
    assert_eq!(t.p.connected(), [(next, "d2".to_string())]);
}

#[test]
fn connects_fail_on_demand_and_refuse_forgeries() {
    let fabric = FakeFabric::new();
    let (p, d) = (fabric.transport("p"), fabric.transport("d"));
    p.fail_connect(TransportErrorKind::Timeout, "no answer");
    let good = descriptor(&d, 1);
    assert_eq!(p.connect(&good).unwrap_err().kind, TransportErrorKind::Timeout);
    let forged = PeerDescriptor { name: "somebody".into(), ..good.clone() };
    assert_eq!(p.connect(&forged).unwrap_err().kind, TransportErrorKind::BadPeer);
    let cut = PeerDescriptor { metadata: good.metadata.slice(..good.metadata.len() - 1), ..good.clone() };
    assert_eq!(p.connect(&cut).unwrap_err().kind, TransportErrorKind::BadPeer);
    let peer = p.connect(&good).unwrap();
    assert_eq!(p.connect(&good), Ok(peer), "the same process again");
    p.disconnect(peer);
    assert_ne!(p.connect(&good), Ok(peer), "a new connection after letting go");
    assert_eq!(p.connects().len(), 6);
}

#[test]
fn losing_a_peer_says_nothing_about_ops_in_flight() {
    let mut t = pair();
    t.lane.submit(t.op(1, &[(0, 0)])).unwrap();
    t.p.lose_peer(t.peer);
    assert!(matches!(t.poll()[..], [LaneEvent::PeerLost(..)]));
    assert_eq!(t.p.only().id, OpId(1));
    t.p.complete(OpId(1));
    assert_eq!(t.poll(), [LaneEvent::Outcome(OpId(1), Outcome::Done)]);
}

#[test]
fn a_dead_process_is_not_written() {
    let mut t = pair();
    t.lane.submit(t.op(1, &[(0, 0)])).unwrap();
    t.fabric.kill("d");
    t.p.land(OpId(1));
    t.dst.assert_canary(0, 64, 0);
    t.p.unresolve(OpId(1));
    t.p.peer_generation_dead(OpId(1));
    assert_eq!(t.poll().len(), 3);
    assert!(!t.d.local_metadata().is_empty());
}

#[test]
fn regions_are_numbered_apart_and_empty_ones_refused() {
    let fabric = FakeFabric::new();
    let p = fabric.transport("p");
    let a = p.register(TestMemory::new(8)).unwrap();
    let b = p.register(TestMemory::new(8)).unwrap();
    assert_eq!((a.id(), b.id()), (RegionId(1), RegionId(2)));
    assert!(p.register(TestMemory::new(0)).is_err());
}

#[test]
fn a_wake_fd_is_readable_when_the_script_made_news() {
    use std::io::Read as _;
    use std::os::fd::{BorrowedFd, RawFd};
    use std::os::unix::net::UnixStream;

    /// Whether a byte waits; takes it.
    fn readable(fd: RawFd) -> bool {
        // SAFETY: the lane that owns the descriptor outlives this call.
        let copy = unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned().unwrap();
        UnixStream::from(copy).read(&mut [0; 8]).is_ok_and(|n| n > 0)
    }

    let mut t = pair();
    assert_eq!(t.lane.wake_fd(), None);
    let p = t.fabric.builder("p2").wake_fds().policy(Policy::Hold).build();
    let region = p.register(t.src.clone()).unwrap();
    let peer = p.connect(&descriptor(&t.d, 2)).unwrap();
    t.lane = p.lane().unwrap();
    (t.src_region, t.peer) = (region, peer);
    let fd = t.lane.wake_fd().unwrap();
    t.lane.submit(t.op(1, &[(0, 0)])).unwrap();
    assert!(!readable(fd));
    p.complete(OpId(1));
    assert!(readable(fd));
    assert_eq!(t.poll().len(), 1);
}
