//! The real library as initiator against peers that do what its own engine never does: the test kit's, told to be slow,
//! truncated, wrong or half-open. What our layer makes of it: nothing is called done or quiet that is not.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{Source, available, config, with_environment};
use kv_core::ids::{OpId, PeerId};
use kv_core::net::Endpoint;
use kv_core::transport::{Outcome, PeerDescriptor, Transport as _, TransportErrorKind};
use kv_mooncake::MooncakeConfig;
use kv_testkit::mooncake::{DataFault, HandshakeFault, MooncakePeer};
use mooncake_wire::Opcode;
use serde_json::json;

const M: usize = 1 << 20;
const MS: Duration = Duration::from_millis(1);
/// The library gives up after 1 s without a byte, or without the acknowledgement.
const IMPATIENT: &[(&str, &str)] = &[("MC_TCP_PROGRESS_TIMEOUT_SEC", "1"), ("MC_TCP_STATUS_TIMEOUT_SEC", "1")];

fn descriptor(peer: &MooncakePeer) -> PeerDescriptor {
    let endpoint = Endpoint::new("127.0.0.1", 9);
    PeerDescriptor { name: peer.session().into(), metadata: Default::default(), endpoint, host: None }
}

struct Pair {
    source: Source,
    peer: MooncakePeer,
    id: PeerId,
}

impl Pair {
    fn new() -> Self {
        let (source, peer) = (Source::new(config(), M), MooncakePeer::start(M, 2).unwrap());
        let id = source.connect(&descriptor(&peer));
        Self { source, peer, id }
    }

    fn write(&mut self, len: u64) -> OpId {
        let addr = self.peer.memory().addr(0);
        self.source.write(self.id, 0, addr, len)
    }

    fn in_place(&self, len: usize) -> bool {
        self.peer.memory().read(0, len) == self.source.memory.read(0, len)
    }

    /// The write ends without proof, and stays so: counted, with its memory, through whatever the peer does next.
    fn is_kept(&mut self, id: OpId) {
        let error = self.source.is_unproven(id);
        assert!(error.contains(self.peer.session()), "{error}");
        self.source.until("the loss", |s| s.lost.contains(&self.id));
        let weak = Arc::downgrade(self.source.region.as_ref().unwrap());
        let region = self.source.region.take();
        drop(region);
        self.peer.close_connections();
        self.source.watch(200 * MS);
        assert!(self.source.seen[&id].settlement.is_none() && weak.upgrade().is_some(), "let go of without proof");
        assert_eq!(self.source.transport.stats().ops_retained, 1);
    }
}

#[test]
fn r_f1_a_slow_peer_is_waited_for() {
    if !available("r_f1_a_slow_peer_is_waited_for") {
        return;
    }
    let mut p = Pair::new();
    for fault in [DataFault::SlowStatus(700 * MS), DataFault::SlowPayload(64 << 10, 40 * MS)] {
        p.peer.data_fault(fault.clone());
        let begun = Instant::now();
        let id = p.write(M as u64);
        assert_eq!(p.source.outcome(id), Outcome::Done, "{fault:?}");
        assert!(p.in_place(M) && begun.elapsed() > 500 * MS && p.source.lost.is_empty(), "{fault:?}");
    }
}

#[test]
fn r_f5_a_status_cut_off_proves_nothing() {
    if !available("r_f5_a_status_cut_off_proves_nothing") {
        return;
    }
    for n in [0, 5] {
        let mut p = Pair::new();
        p.peer.data_fault(DataFault::TruncatedStatus(n));
        let id = p.write(4096);
        p.is_kept(id);
        assert!(p.in_place(4096), "it had arrived, and nobody can know");
    }
}

#[test]
fn r_f5_a_payload_cut_off_proves_nothing() {
    if !available("r_f5_a_payload_cut_off_proves_nothing") {
        return;
    }
    let mut p = Pair::new();
    p.peer.data_fault(DataFault::ClosesWithin(1000));
    let id = p.write(512 << 10);
    p.is_kept(id);
    assert!(p.in_place(1000) && !p.in_place(1001));
}

#[test]
fn r_f5_a_wrong_status_proves_nothing() {
    if !available("r_f5_a_wrong_status_proves_nothing") {
        return;
    }
    // A code nobody knows, another magic, a refusal: the library calls all of them failed.
    for fault in [DataFault::StatusWord(0x4D43_5456_0000_0007), DataFault::StatusWord(0), DataFault::Refuses] {
        let mut p = Pair::new();
        p.peer.data_fault(fault);
        let id = p.write(4096);
        p.is_kept(id);
    }
}

/// Control: a status that nobody asked for is taken for the next write's, which is then called done before it is. Nothing in
/// front of the library can see that. `kv-mooncake-tcp` does.
#[test]
fn control_the_library_believes_a_status_that_nobody_asked_for() {
    let name = "control_the_library_believes_a_status_that_nobody_asked_for";
    let env = [("MC_TCP_LANES_PER_PEER", "1"), IMPATIENT[0], IMPATIENT[1]];
    if !with_environment(name, &env) {
        return;
    }
    let mut p = Pair::new();
    p.peer.data_fault(DataFault::StatusTwice);
    let id = p.write(4096);
    assert_eq!(p.source.outcome(id), Outcome::Done);
    p.peer.data_fault(DataFault::NoStatus);
    let id = p.write(4096);
    assert_eq!(p.source.outcome(id), Outcome::Done, "the library does not believe it: the hazard is gone");
}

#[test]
fn r_f5_a_half_open_peer_costs_its_time_and_is_kept() {
    let name = "r_f5_a_half_open_peer_costs_its_time_and_is_kept";
    if !with_environment(name, IMPATIENT) {
        return;
    }
    for fault in [DataFault::NoStatus, DataFault::Deaf] {
        let mut p = Pair::new();
        p.peer.data_fault(fault.clone());
        let begun = Instant::now();
        let id = p.write(M as u64);
        p.is_kept(id);
        assert!(
            begun.elapsed() > 700 * MS && begun.elapsed() < Duration::from_secs(30),
            "{fault:?}: {:?}",
            begun.elapsed()
        );
    }
}

#[test]
fn r_h2_a_handshake_that_is_slow_cut_off_or_of_wrong_types_is_refused_and_leaves_nothing() {
    if !available("r_h2_a_handshake_that_is_slow_cut_off_or_of_wrong_types_is_refused_and_leaves_nothing") {
        return;
    }
    let source = Source::new(MooncakeConfig { probe_timeout: 400 * MS, ..config() }, M);
    let peer = MooncakePeer::start(M, 2).unwrap();
    let member = |at: &str, value| HandshakeFault::Member(at.into(), value);
    let faults = [
        (HandshakeFault::Silent, TransportErrorKind::PeerLost, "does not answer"),
        (HandshakeFault::Slow(900 * MS), TransportErrorKind::PeerLost, "does not answer"),
        (HandshakeFault::Truncated(0), TransportErrorKind::PeerLost, "does not answer"),
        (HandshakeFault::Truncated(30), TransportErrorKind::PeerLost, "does not answer"),
        (HandshakeFault::Says(json!([1])), TransportErrorKind::BadPeer, "no object"),
        (member("/tcp_data_port", json!("abc")), TransportErrorKind::BadPeer, "tcp_data_port"),
        (member("/tcp_data_port", json!([1, 2])), TransportErrorKind::BadPeer, "tcp_data_port"),
        (member("/tcp_data_host", json!(7)), TransportErrorKind::BadPeer, "tcp_data_host"),
        (member("/metadata_version", json!("0")), TransportErrorKind::BadPeer, "metadata_version"),
        (member("/buffers/0/name", json!({})), TransportErrorKind::BadPeer, "name"),
        (member("/tcp_proto_version", json!(1)), TransportErrorKind::BadPeer, "without acknowledgements"),
    ];
    for (fault, kind, word) in faults {
        peer.handshake_fault(fault.clone());
        let error = source.transport.connect(&descriptor(&peer)).expect_err(word);
        assert!(error.kind == kind && error.message.contains(word), "{fault:?}: {error}");
        assert!(error.message.contains(peer.session()), "{fault:?}: {error}");
    }
    assert!(peer.seen().is_empty() && source.transport.stats().peers == 0);
    peer.handshake_fault(HandshakeFault::None);
    // It speaks well, and serves nothing.
    for fault in [DataFault::TruncatedRead(0), DataFault::Refuses, DataFault::StatusWord(0)] {
        peer.data_fault(fault.clone());
        let error = source.transport.connect(&descriptor(&peer)).unwrap_err();
        assert!(
            error.kind == TransportErrorKind::PeerLost && error.message.contains("data port"),
            "{fault:?}: {error}"
        );
    }
    peer.data_fault(DataFault::None);
    // The library waits for 1 s before it connects anew to whom it failed to reach.
    let begun = Instant::now();
    while let Err(error) = source.transport.connect(&descriptor(&peer)) {
        assert!(begun.elapsed() < common::PATIENCE, "{error}");
    }
}

#[test]
fn r_f1_towards_version_1_nothing_is_ever_written() {
    if !available("r_f1_towards_version_1_nothing_is_ever_written") {
        return;
    }
    let (source, peer) = (Source::new(config(), M), MooncakePeer::start(M, 1).unwrap());
    let error = source.transport.connect(&descriptor(&peer)).unwrap_err();
    assert!(error.kind == TransportErrorKind::BadPeer && error.message.contains("without acknowledgements"), "{error}");
    assert!(!peer.seen().iter().any(|s| s.request.op == Opcode::Write));
}
