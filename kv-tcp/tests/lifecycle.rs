//! Peers, lanes and connections come and go.

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::*;
use kv_core::memory::{MemoryKind, MemoryOwner};
use kv_core::transport::{Outcome, PeerDescriptor, Settlement, SubmitError, Transport, TransportErrorKind};
use kv_tcp::{HostArena, PathKind, SameHost, TcpConfig, TcpTransport};

const QUIET: Settlement = Settlement::Settled { src_quiet: true, dst_quiet: true };

fn settle_down(what: &str, mut done: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !done() {
        assert!(Instant::now() < end, "never: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[test]
fn cat_f55_peers_that_come_and_go_leave_nothing() {
    let p = Side::new(direct(), 1 << 16);
    let q = Side::new(tcp(), 1 << 16);
    let mut ears = [Ear::new(&p), Ear::new(&q)];
    let mut fds = 0;
    let mut tasks = 0;
    for n in 0..200u64 {
        {
            let d = Side::new(TcpConfig { workers: 1, ..direct() }, 1 << 16);
            for (side, ear) in [&p, &q].into_iter().zip(&mut ears) {
                let peer = side.connect(&d.descriptor(n as u16));
                ear.submit(side.op(n, peer, piece(side, 0, d.base(), 1 << 16)));
                assert_eq!(ear.outcome(n), Outcome::Done);
                // Every other one is let go first, the rest just vanish.
                if n % 2 == 0 {
                    side.transport.disconnect(peer);
                    ear.listen(Duration::ZERO);
                }
            }
        }
        for (side, ear) in [&p, &q].into_iter().zip(&mut ears) {
            settle_down("the peer is forgotten", || {
                ear.listen(Duration::from_millis(1));
                side.transport.stats().peers == 0
            });
        }
        if n == 20 {
            settle_down("quiet", || open_fds() > 0);
            (fds, tasks) = (open_fds(), threads());
        }
    }
    // Other tests of this binary run at the same time: room for them, but not for 200 peers.
    assert!(open_fds() < fds + 100, "{} descriptors, {fds} before", open_fds());
    assert!(threads() < tasks + 60, "{} threads, {tasks} before", threads());
}

#[test]
fn a_cut_connection_settles_through_the_fence() {
    for config in [direct(), tcp()] {
        let p = Side::new(config.clone(), 32 << 20);
        let d = Side::new(config, 32 << 20);
        let mut ear = Ear::new(&p);
        let peer = p.connect(&d.descriptor(1));
        for n in 0..20 {
            ear.submit(p.op(n, peer, piece(&p, 0, d.base(), 32 << 20)));
        }
        p.transport.sever(peer);
        ear.until("20 outcomes", |e| e.outcomes.len() == 20);
        for n in 0..20 {
            if ear.outcome(n) != Outcome::Done {
                assert_eq!(ear.settlement(n), QUIET);
            }
        }
        assert_eq!(ear.lost.len(), 1);
        assert!(!ear.settlements.is_empty(), "the cut came too late for this test");
        match ear.lane.submit(p.op(99, peer, piece(&p, 0, d.base(), 1))) {
            Err(SubmitError::Rejected(_, e)) => assert_eq!(e.kind, TransportErrorKind::PeerLost),
            other => panic!("{other:?}"),
        }
        let again = p.connect(&d.descriptor(1));
        assert_ne!(again, peer);
        ear.submit(p.op(100, again, piece(&p, 0, d.base(), 1 << 20)));
        assert_eq!(ear.outcome(100), Outcome::Done);
    }
}

#[test]
fn a_cut_noticed_by_one_lane_ends_the_ops_of_all() {
    let p = Side::new(direct(), 32 << 20);
    let d = Side::new(direct(), 32 << 20);
    let (mut a, mut b) = (Ear::new(&p), Ear::new(&p));
    let peer = p.connect(&d.descriptor(1));
    for n in 0..30 {
        a.submit(p.op(n, peer, piece(&p, 0, d.base(), 32 << 20)));
        b.submit(p.op(n, peer, piece(&p, 0, d.base(), 32 << 20)));
    }
    p.transport.sever(peer);
    for ear in [&mut a, &mut b] {
        ear.until("all", |e| e.outcomes.len() == 30);
        let open = ear.outcomes.values().filter(|o| **o != Outcome::Done).count();
        ear.until("settled", |e| e.settlements.len() == open);
        assert_eq!(ear.lost.len(), 1);
    }
}

#[test]
fn disconnect_lets_ops_in_flight_end() {
    for config in [direct(), tcp()] {
        let p = Side::new(config.clone(), 32 << 20);
        let d = Side::new(config, 32 << 20);
        let mut ear = Ear::new(&p);
        let peer = p.connect(&d.descriptor(1));
        for n in 0..5 {
            ear.submit(p.op(n, peer, piece(&p, 0, d.base(), 32 << 20)));
        }
        p.transport.disconnect(peer);
        assert!(matches!(ear.lane.submit(p.op(9, peer, piece(&p, 0, d.base(), 1))), Err(SubmitError::Rejected(..))));
        for n in 0..5 {
            assert_eq!(ear.outcome(n), Outcome::Done);
        }
        settle_down("closed", || p.transport.stats().peers == 0 && d.transport.stats().connections_in == 0);
        assert_eq!(d.transport.stats().sessions, 0);
        assert!(ear.lost.is_empty(), "letting go is no loss");
    }
}

/// Memory that says when it goes.
struct Watched(HostArena, Arc<std::sync::atomic::AtomicBool>);

// SAFETY: as the arena inside.
unsafe impl MemoryOwner for Watched {
    fn base(&self) -> u64 {
        self.0.base()
    }
    fn len(&self) -> u64 {
        MemoryOwner::len(&self.0)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.1.store(true, std::sync::atomic::Ordering::SeqCst);
    }
}

#[test]
fn a_dropped_lane_keeps_its_memory_until_its_ops_are_settled() {
    for config in [direct(), tcp()] {
        let p = TcpTransport::new(config.clone()).unwrap();
        let gone = Arc::new(std::sync::atomic::AtomicBool::new(false));
        let memory = Arc::new(Watched(HostArena::new(32 << 20).unwrap(), gone.clone()));
        let region = p.register(memory).unwrap();
        let d = Side::new(config, 32 << 20);
        let mut lane = p.lane().unwrap();
        let peer = p.connect(&d.descriptor(1)).unwrap();
        for n in 0..10 {
            let plan = plan(&[entry(region.id(), 0, d.base(), 32 << 20)], &[run(0, 0, 1)]);
            lane.submit(kv_core::transport::WriteOp {
                id: kv_core::ids::OpId(n),
                peer,
                plan,
                regions: Arc::new([region.clone()]),
            })
            .unwrap();
        }
        drop(region);
        drop(lane);
        settle_down("settled and freed", || gone.load(std::sync::atomic::Ordering::SeqCst));
        settle_down("forgotten", || p.stats().peers == 0);
    }
}

/// The last handle of a source goes, in whatever state it is: at the target, nothing of it stays connected.
#[test]
fn cat_f55_a_dropped_transport_leaves_no_session_at_its_peers() {
    for config in [direct(), tcp()] {
        let d = Side::new(config.clone(), 32 << 20);
        for (lanes, ops) in [(0, 0), (1, 0), (2, 0), (1, 5)] {
            let p = Side::new(config.clone(), 32 << 20);
            let mut ears: Vec<Ear> = (0..lanes).map(|_| Ear::new(&p)).collect();
            let peer = p.connect(&d.descriptor(1));
            assert_eq!(d.transport.stats().sessions, 1);
            for n in 0..ops {
                ears[0].submit(p.op(n, peer, piece(&p, 0, d.base(), 32 << 20)));
            }
            // The transport goes first and its lanes last; with them, everything.
            drop(p);
            assert!(lanes == 0 || d.transport.stats().sessions == 1, "a lane keeps it");
            drop(ears);
            settle_down("the target forgot it", || {
                let stats = d.transport.stats();
                stats.sessions == 0 && stats.connections_in == 0
            });
        }
    }
}

#[test]
fn registration_needs_host_memory() {
    struct Odd(u64, u64, MemoryKind);
    // SAFETY: never dereferenced: it is refused.
    unsafe impl MemoryOwner for Odd {
        fn base(&self) -> u64 {
            self.0
        }
        fn len(&self) -> u64 {
            self.1
        }
        fn kind(&self) -> MemoryKind {
            self.2
        }
    }
    let t = TcpTransport::new(direct()).unwrap();
    for (base, len, kind) in [
        (4096, 4096, MemoryKind::Vram { device: 0 }),
        (4096, 0, MemoryKind::Dram),
        (0, 4096, MemoryKind::Dram),
        (u64::MAX, 4096, MemoryKind::Dram),
    ] {
        assert_eq!(t.register(Arc::new(Odd(base, len, kind))).unwrap_err().kind, TransportErrorKind::InvalidArgument);
    }
}

#[test]
fn bad_descriptors_are_refused() {
    let p = Side::new(direct(), 4096);
    let d = Side::new(direct(), 4096);
    let good = d.descriptor(1);
    let kind = |d: PeerDescriptor| p.transport.connect(&d).unwrap_err().kind;
    assert_eq!(kind(PeerDescriptor { metadata: b"junk".to_vec().into(), ..good.clone() }), TransportErrorKind::BadPeer);
    assert_eq!(kind(PeerDescriptor { name: "other".into(), ..good.clone() }), TransportErrorKind::BadPeer);
    drop(d);
    assert_eq!(kind(good), TransportErrorKind::PeerLost);
}

/// Catalogue F56/F57: an address is no identity. Another transport took the dead one's port.
#[test]
fn cat_f56_another_generation_at_the_address_is_not_taken_for_the_peer() {
    let p = Side::new(direct(), 4096);
    let d = Side::new(direct(), 4096);
    let old = d.descriptor(1);
    let at = d.transport.addresses()[0];
    drop(d);
    let _new = Side::new(TcpConfig { bind: at, ..direct() }, 4096);
    let e = p.transport.connect(&old).unwrap_err();
    assert!(e.kind == TransportErrorKind::PeerLost && e.message.contains("another process answers"), "{e}");
}

#[test]
fn the_reason_for_tcp_is_told() {
    let d = Side::new(tcp(), 4096);
    let p = Side::new(direct(), 4096);
    let path = p.transport.peer_path(p.connect(&d.descriptor(1))).unwrap();
    assert_eq!((path.kind, path.reason.as_str(), path.connections), (PathKind::Tcp, "turned off at the target", 2));
    let p = Side::new(TcpConfig { same_host: SameHost::Off, ..direct() }, 4096);
    let d = Side::new(direct(), 4096);
    let path = p.transport.peer_path(p.connect(&d.descriptor(1))).unwrap();
    assert_eq!((path.kind, path.reason.as_str()), (PathKind::Tcp, "turned off at the source"));
}
