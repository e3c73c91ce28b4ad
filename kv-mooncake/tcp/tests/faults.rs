//! Peers that are slow, half-open, cut off or out of their mind: what a write to them is called, and what is kept. The peers
//! are the test kit's, which do what the library cannot be made to do.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Remote, Source, config};
use kv_core::net::Endpoint;
use kv_core::transport::{Outcome, PeerDescriptor, Settlement, Transport as _, TransportErrorKind};
use kv_mooncake_tcp::MooncakeTcpConfig;
use kv_testkit::conformance::Target as _;
use kv_testkit::mooncake::{DataFault, HandshakeFault, MooncakePeer};
use mooncake_wire::Opcode;
use serde_json::json;

const M: usize = 1 << 20;
const MS: Duration = Duration::from_millis(1);

/// The body of a target's process; not a test of its own.
#[test]
fn child_entry_point() {
    common::serve_if_child();
}

fn descriptor(peer: &MooncakePeer) -> PeerDescriptor {
    let endpoint = Endpoint::new("127.0.0.1", 9);
    PeerDescriptor { name: peer.session().into(), metadata: Default::default(), endpoint, host: None }
}

fn impatient() -> MooncakeTcpConfig {
    MooncakeTcpConfig { op_timeout: 300 * MS, connect_timeout: 500 * MS, ..config() }
}

/// A source, a misbehaving target that it is connected to, and what it writes there.
struct Pair {
    source: Source,
    peer: MooncakePeer,
    id: kv_core::ids::PeerId,
}

impl Pair {
    fn new(version: i64) -> Self {
        let (source, peer) = (Source::new(impatient(), M), MooncakePeer::start(M, version).unwrap());
        let id = source.connect(&descriptor(&peer));
        Self { source, peer, id }
    }

    fn write(&mut self, at: u64, len: u64) -> kv_core::ids::OpId {
        let addr = self.peer.memory().addr(at as usize);
        self.source.write(self.id, at, addr, len)
    }

    fn in_place(&self, at: usize, len: usize) -> bool {
        self.peer.memory().read(at, len) == self.source.memory.read(at, len)
    }

    fn retained(&self) -> u64 {
        self.source.transport.stats().ops_retained
    }
}

// ---- no acknowledgement

#[test]
fn r_f5_cat_f17_a_write_that_nobody_acknowledges_is_kept_with_its_memory() {
    let mut p = Pair::new(2);
    p.peer.data_fault(DataFault::NoStatus);
    let id = p.write(0, 4096);
    let error = p.source.is_unresolved(id);
    assert!(error.contains(p.peer.session()) && error.contains("300ms"), "{error}");
    let weak = Arc::downgrade(p.source.region.as_ref().unwrap());
    p.source.region = None;
    // A connection that closes proves nothing either.
    p.peer.close_connections();
    p.source.until("the loss", |s| s.lost == [p.id]);
    p.source.watch(300 * MS);
    assert!(p.source.seen[&id].settlement.is_none() && weak.upgrade().is_some(), "let go of without proof");
    assert_eq!(p.retained(), 1);
    // Nor does the end of the lane.
    p.source.lane = p.source.transport.lane().unwrap();
    assert!(weak.upgrade().is_some() && p.retained() == 1, "let go of with its lane");
}

#[test]
fn r_f1_a_late_acknowledgement_settles_and_slow_is_no_failure() {
    let mut p = Pair::new(2);
    p.peer.data_fault(DataFault::SlowStatus(900 * MS));
    let id = p.write(0, 4096);
    p.source.is_unresolved(id);
    assert_eq!(p.retained(), 1);
    assert_eq!(p.source.settlement(id), Settlement::Settled { src_quiet: true, dst_quiet: true });
    assert!(p.in_place(0, 4096) && p.retained() == 0 && p.source.lost.is_empty());
    // As long as something is acknowledged now and then, slow is no failure.
    p.peer.data_fault(DataFault::SlowPayload(64 << 10, 40 * MS));
    let slow: Vec<_> = (0..16).map(|i| p.write(i << 16, 64 << 10)).collect();
    slow.into_iter().for_each(|id| assert_eq!(p.source.outcome(id), Outcome::Done));
    assert!(p.in_place(0, M));
}

#[test]
fn r_f5_nonsense_and_broken_connections_prove_nothing_about_the_destination() {
    let faults = [
        (DataFault::StatusWord(0x4D43_5456_0000_0007), "Unknown(7)"),
        (DataFault::StatusWord(0), "no status"),
        (DataFault::TruncatedStatus(5), "closed by the peer"),
        (DataFault::ClosesWithin(100), ""),
        (DataFault::TruncatedStatus(0), "closed by the peer"),
    ];
    for (fault, word) in faults {
        let mut p = Pair::new(2);
        p.peer.data_fault(fault.clone());
        let id = p.write(0, 256 << 10);
        match p.source.outcome(id) {
            Outcome::Failed { src_quiet: true, dst_quiet: false, error } => {
                assert_eq!(error.kind, TransportErrorKind::PeerLost, "{fault:?}: {error}");
                assert!(error.message.contains(word) && error.message.contains(p.peer.session()), "{fault:?}: {error}");
            }
            other => panic!("{fault:?}: {other:?}"),
        }
        p.source.until("the loss", |s| s.lost == [p.id]);
        p.source.watch(100 * MS);
        assert!(p.source.seen[&id].settlement.is_none() && p.retained() == 1, "{fault:?}");
        // No verdict outlives the attempt: it is reached again.
        p.peer.data_fault(DataFault::None);
        p.id = p.source.connect(&descriptor(&p.peer));
        let id = p.write(0, 4096);
        assert_eq!(p.source.outcome(id), Outcome::Done, "{fault:?}");
        assert!(p.in_place(0, 4096));
    }
}

/// A second status is nobody's word on the next write.
#[test]
fn r_f1_a_status_that_nobody_asked_for_acknowledges_nothing() {
    let mut p = Pair::new(2);
    p.peer.data_fault(DataFault::StatusTwice);
    let first = p.write(0, 4096);
    p.source.outcome(first);
    p.source.until("the loss", |s| s.lost == [p.id]);
    assert!(p.source.try_write(p.id, 0, p.peer.memory().addr(0), 64).is_err(), "written to a peer out of step");
}

#[test]
fn r_f2_a_refusal_ends_everything_behind_it_and_is_proof() {
    let mut p = Pair::new(2);
    p.peer.data_fault(DataFault::Refuses);
    let ids: Vec<_> = (0..8).map(|i| p.write(i * 4096, 4096)).collect();
    for (n, id) in ids.iter().enumerate() {
        match p.source.outcome(*id) {
            Outcome::Failed { src_quiet: true, dst_quiet: true, error } => {
                let want = if n == 0 { TransportErrorKind::Refused } else { TransportErrorKind::PeerLost };
                assert!(error.kind == want && error.message.contains("refuse"), "{error}");
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!((p.retained(), p.source.lost.clone()), (0, vec![p.id]));
    p.peer.memory().assert_canary(0, M, 0);
}

#[test]
fn r_f5_a_peer_that_takes_nothing_more_keeps_what_began_and_gets_nothing_else() {
    let mut source = Source::new(MooncakeTcpConfig { max_op_bytes: 64 << 20, ..impatient() }, 48 * M);
    let peer = MooncakePeer::start(48 * M, 2).unwrap();
    let id = source.connect(&descriptor(&peer));
    peer.data_fault(DataFault::Deaf);
    let base = peer.memory().addr(0);
    // The first is more than both sockets hold; nothing of the second begins.
    let (first, second) = (source.write(id, 0, base, 47 * M as u64), source.write(id, 0, base + 47 * M as u64, 4096));
    source.is_unresolved(first);
    assert!(matches!(source.outcome(second), Outcome::Failed { src_quiet: true, dst_quiet: true, .. }));
    assert_eq!(source.transport.stats().ops_retained, 1);
}

// ---- version 1

#[test]
fn r_f1_towards_version_1_a_byte_is_read_behind_the_writes() {
    let mut p = Pair::new(1);
    let ids: Vec<_> = (0..4).map(|i| p.write(i * 8192, 8192)).collect();
    ids.into_iter().for_each(|id| assert_eq!(p.source.outcome(id), Outcome::Done));
    assert!(p.in_place(0, 4 * 8192));
    let seen: Vec<_> = p.peer.seen().into_iter().map(|s| (s.request.op, s.request.acknowledged, s.inside)).collect();
    // Two greetings: of the connection for the lane, and of the anchor.
    let pair = [(Opcode::Write, false, true), (Opcode::Read, false, true)];
    assert_eq!(seen[..2], [(Opcode::Read, false, true); 2]);
    assert_eq!(seen[2..], [pair, pair, pair, pair].concat());
    for fault in [DataFault::ClosesWithin(10), DataFault::Refuses] {
        p.peer.data_fault(fault);
        let id = p.write(0, 64 << 10);
        let outcome = p.source.outcome(id);
        assert!(matches!(outcome, Outcome::Failed { dst_quiet: false, .. }), "{outcome:?}");
        p.peer.data_fault(DataFault::None);
        p.id = p.source.connect(&descriptor(&p.peer));
    }
    assert_eq!(p.retained(), 2);
}

// ---- handshake

#[test]
fn r_h2_a_peer_that_answers_ill_is_refused_by_name_and_in_time() {
    let source = Source::new(impatient(), M);
    let peer = MooncakePeer::start(M, 2).unwrap();
    let member = |at: &str, value| HandshakeFault::Member(at.into(), value);
    let faults = [
        (HandshakeFault::Silent, TransportErrorKind::PeerLost, "does not answer for itself"),
        (HandshakeFault::Slow(800 * MS), TransportErrorKind::PeerLost, "does not answer for itself"),
        (HandshakeFault::Truncated(3), TransportErrorKind::PeerLost, "does not answer for itself"),
        (HandshakeFault::Truncated(40), TransportErrorKind::PeerLost, "does not answer for itself"),
        (HandshakeFault::Says(json!([1, 2])), TransportErrorKind::BadPeer, "no object"),
        (HandshakeFault::Says(json!(null)), TransportErrorKind::BadPeer, "no object"),
        (member("/tcp_data_port", json!("abc")), TransportErrorKind::BadPeer, "tcp_data_port"),
        (member("/tcp_data_port", json!(70_000)), TransportErrorKind::BadPeer, "tcp_data_port"),
        (member("/tcp_proto_version", json!({})), TransportErrorKind::BadPeer, "tcp_proto_version"),
        (member("/name", json!("127.0.0.1:1")), TransportErrorKind::BadPeer, "calls itself"),
        (member("/protocol", json!("rdma")), TransportErrorKind::BadPeer, "rdma"),
        (member("/buffers/0/addr", json!("0x7f")), TransportErrorKind::BadPeer, "addr"),
        (HandshakeFault::Raw(u64::MAX.to_le_bytes().to_vec()), TransportErrorKind::BadPeer, "announces"),
        (HandshakeFault::Raw(vec![2, 0, 0, 0, 0, 0, 0, 0, 3, b'1']), TransportErrorKind::BadPeer, "type 3"),
    ];
    for (fault, kind, word) in faults {
        peer.handshake_fault(fault.clone());
        let begun = Instant::now();
        let error = source.transport.connect(&descriptor(&peer)).expect_err(word);
        assert!(begun.elapsed() < 10 * impatient().connect_timeout, "{fault:?} took {:?}", begun.elapsed());
        let named = error.message.contains(peer.session()) && error.message.contains(word);
        assert!(error.kind == kind && named, "{fault:?}: {error}");
    }
    peer.handshake_fault(HandshakeFault::None);
    // It speaks well, and its data port does not.
    for fault in [DataFault::NoStatus, DataFault::StatusWord(0), DataFault::Refuses, DataFault::TruncatedRead(0)] {
        peer.data_fault(fault.clone());
        let error = source.transport.connect(&descriptor(&peer)).unwrap_err();
        assert!(error.message.contains("data port") || error.message.contains("it answers"), "{fault:?}: {error}");
    }
    peer.data_fault(DataFault::None);
    source.connect(&descriptor(&peer));
    assert_eq!(source.transport.stats().peers, 1);
    for odd in ["", "nowhere", "127.0.0.1:0", "127.0.0.1:99999", "a b:1", source.transport.local_name()] {
        let odd = PeerDescriptor { name: odd.into(), ..descriptor(&peer) };
        assert_eq!(source.transport.connect(&odd).unwrap_err().kind, TransportErrorKind::BadPeer, "{odd:?}");
    }
}

// ---- death

#[test]
fn cat_f55_a_peer_killed_while_idle_is_lost_alone_and_nothing_is_kept_for_it() {
    let (mut dies, mut lives) = (Remote::new(1, M), Remote::new(2, M));
    let mut s = Source::new(config(), M);
    let (a, b) = (s.connect(&dies.descriptor), s.connect(&lives.descriptor));
    assert!(s.transport.watches(a), "the peer says which process it is");
    s.reaches(a, &mut dies);
    dies.process.kill().unwrap();
    s.until("the loss", |s| s.lost.contains(&a));
    assert!(s.try_write(a, 0, dies.block.addr, 4096).is_err(), "a write to a dead peer");
    s.reaches(b, &mut lives);
    assert_eq!(s.lost, [a]);
    s.until("the proof", |s| s.transport.stats().peers_dead == 1);
    assert_eq!(s.transport.stats().ops_retained, 0);
    s.transport.disconnect(a);
    assert_eq!(s.transport.stats().peers, 1);
}

/// The bytes of a stopped process's sockets land when it goes on, whatever became of the connection.
#[test]
fn r_f5_what_a_stopped_peer_holds_lands_later_and_settles_by_its_death_alone() {
    let mut target = Remote::new(1, M);
    let mut s = Source::new(config(), M);
    let peer = s.connect(&target.descriptor);
    s.reaches(peer, &mut target);
    target.process.pause().unwrap();
    let id = s.write(peer, 8192, target.block.addr + 8192, 64 << 10);
    s.watch(50 * MS);
    common::sever(s.transport.data_port(peer).unwrap());
    assert!(matches!(s.outcome(id), Outcome::Failed { src_quiet: true, dst_quiet: false, .. }));
    target.process.resume();
    s.watch(300 * MS);
    assert_eq!(target.bytes(8192, 64 << 10), s.memory.read(8192, 64 << 10), "it landed after it had failed");
    assert!(s.seen[&id].settlement.is_none());
    target.process.kill().unwrap();
    assert_eq!(s.settlement(id), Settlement::PeerGenerationDead);
    assert_eq!(s.transport.stats().ops_retained, 0);
}
