//! Two processes: death, pause and cuts, and what may be said about quiet after each.

#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::time::Duration;

use common::*;
use kv_core::transport::{Outcome, Settlement, Transport, TransportErrorKind};
use kv_tcp::{PathKind, TcpConfig};

const MIB: usize = 1 << 20;
const QUIET: Settlement = Settlement::Settled { src_quiet: true, dst_quiet: true };

#[test]
fn child_main() {
    common::child_main();
}

fn pair(mode: &str, len: usize) -> (Side, Other, Ear, kv_core::ids::PeerId) {
    let config = if mode == "tcp" { tcp() } else { direct() };
    let p = Side::new(config, len);
    p.fill(11);
    let d = Other::start(mode, len, 7);
    let ear = Ear::new(&p);
    let peer = p.connect(&d.descriptor);
    let kind = if mode == "tcp" { PathKind::Tcp } else { PathKind::SameHost };
    assert_eq!(p.transport.peer_path(peer).unwrap().kind, kind);
    (p, d, ear, peer)
}

/// An op that takes a while: the whole arena, page by page, `times` over.
fn long_op(p: &Side, base: u64, len: usize, times: usize) -> kv_core::plan::WritePlan {
    let pages = len / 4096;
    let mut rng = Rng(77);
    let order = rng.shuffled(pages);
    let runs: Vec<_> = (0..times).flat_map(|_| order.iter().map(|i| run(*i, *i, 1))).collect();
    plan(&[entry(p.region.as_ref().unwrap().id(), 0, base, 4096)], &runs)
}

#[test]
fn bytes_arrive_in_another_process() {
    for mode in ["direct", "tcp"] {
        let len = 32 * MIB;
        let (p, mut d, mut ear, peer) = pair(mode, len);
        ear.submit(p.op(1, peer, long_op(&p, d.base, len, 1)));
        assert_eq!(ear.outcome(1), Outcome::Done);
        assert_eq!(d.hash(0, len), hash(&p.arena.to_vec(0, len)), "{mode}");
    }
}

#[test]
fn a_killed_target_is_lost_then_proven_dead() {
    for mode in ["direct", "tcp"] {
        let len = 16 * MIB;
        let (p, mut d, mut ear, peer) = pair(mode, len);
        ear.submit(p.op(1, peer, piece(&p, 0, d.base, 100)));
        assert_eq!(ear.outcome(1), Outcome::Done);
        d.signal(libc::SIGSTOP);
        for n in 2..5 {
            ear.submit(p.op(n, peer, long_op(&p, d.base, len, 1)));
        }
        d.kill();
        for n in 2..5 {
            match (mode, ear.outcome(n)) {
                ("direct", Outcome::Unresolved { error }) => assert_eq!(error.kind, TransportErrorKind::PeerLost),
                ("tcp", Outcome::Failed { src_quiet: true, dst_quiet: false, error }) => {
                    assert_eq!(error.kind, TransportErrorKind::PeerLost);
                }
                other => panic!("{other:?}"),
            }
            assert_eq!(ear.settlement(n), Settlement::PeerGenerationDead);
        }
        assert_eq!(ear.lost.len(), 1);
        assert_eq!(ear.lost[0].0, peer);
        // Nothing of it is left, with no new peer (catalogue F55), and nothing is tried again (F53).
        ear.until("the peer is forgotten", |_| p.transport.stats().peers == 0);
        assert!(p.transport.peer_path(peer).is_none());
    }
}

#[test]
fn a_target_killed_in_the_middle_of_its_copy_is_proven_dead() {
    for mode in ["direct", "tcp"] {
        let len = 16 * MIB;
        let (p, mut d, mut ear, peer) = pair(mode, len);
        ear.submit(p.op(1, peer, long_op(&p, d.base, len, 400)));
        ear.listen(Duration::from_millis(100));
        assert!(ear.outcomes.is_empty(), "the op was too short for this test");
        d.kill();
        assert!(!matches!(ear.outcome(1), Outcome::Done));
        assert_eq!(ear.settlement(1), Settlement::PeerGenerationDead);
    }
}

#[test]
fn a_source_killed_in_the_middle_leaves_nothing_behind() {
    // Roles swapped: this process is the target and watches its own state.
    let d = Side::new(direct(), 16 * MIB);
    for mode in ["direct", "tcp"] {
        let before = d.transport.stats();
        let before_it = d.transport.sources();
        let mut p = Source::start(mode, &d);
        let end = std::time::Instant::now() + PATIENCE;
        while d.transport.stats().bytes_copied_in + d.transport.stats().bytes_received
            == before.bytes_copied_in + before.bytes_received
        {
            assert!(std::time::Instant::now() < end);
            std::thread::sleep(Duration::from_millis(5));
        }
        let sources = d.transport.sources();
        assert!(sources.iter().all(|p| !before_it.contains(p) || d.transport.inbound_dead(*p)));
        let it: Vec<_> = sources.into_iter().filter(|p| !before_it.contains(p)).collect();
        assert!(it.len() == 1 && !d.transport.inbound_dead(it[0]), "{mode}: it lives");
        p.kill();
        while d.transport.stats().sessions + d.transport.stats().connections_in > 0 {
            assert!(std::time::Instant::now() < end, "{:?}", d.transport.stats());
            std::thread::sleep(Duration::from_millis(5));
        }
        // F4: it ran here, it is gone, nothing of it is left.
        assert!(d.transport.inbound_dead(it[0]), "{mode}");
    }
    assert!(!d.transport.inbound_dead(kv_core::ids::ProcessGeneration(1)), "never heard of");
    assert!(!d.transport.inbound_dead(kv_core::ids::ProcessGeneration::here()), "it is us");
}

#[test]
fn a_paused_target_is_only_slow() {
    for mode in ["direct", "tcp"] {
        let len = 16 * MIB;
        let config =
            TcpConfig { dead_after: Duration::from_millis(200), ..if mode == "tcp" { tcp() } else { direct() } };
        let p = Side::new(config, len);
        p.fill(3);
        let mut d = Other::start(mode, len, 7);
        let mut ear = Ear::new(&p);
        let peer = p.connect(&d.descriptor);
        d.signal(libc::SIGSTOP);
        ear.submit(p.op(1, peer, long_op(&p, d.base, len, 1)));
        for _ in 0..8 {
            ear.listen(Duration::from_millis(250));
        }
        assert!(ear.outcomes.is_empty() && ear.lost.is_empty(), "{:?} {:?}", ear.outcomes, ear.lost);
        assert_eq!(p.transport.peer_path(peer).unwrap().ops_open, 1);
        d.signal(libc::SIGCONT);
        assert_eq!(ear.outcome(1), Outcome::Done);
        assert_eq!(d.hash(0, len), hash(&p.arena.to_vec(0, len)));
    }
}

/// The late writer: bytes in the sockets of a stopped target when the session breaks. They may land when it resumes,
/// but never after the settlement.
#[test]
fn cat_f13_no_byte_lands_after_the_settlement() {
    for round in 0..6 {
        for mode in ["direct", "tcp"] {
            let len = 16 * MIB;
            let (p, mut d, mut ear, peer) = pair(mode, len);
            if round % 2 == 0 {
                d.signal(libc::SIGSTOP);
            }
            ear.submit(p.op(1, peer, long_op(&p, d.base, len, 3)));
            ear.listen(Duration::from_millis(20));
            if ear.outcomes.is_empty() {
                p.transport.sever(peer);
            }
            let outcome = ear.outcome(1);
            if outcome == Outcome::Done {
                d.signal(libc::SIGCONT);
                continue;
            }
            if round % 2 == 0 {
                // Stopped: no proof can come, and none does.
                ear.listen(Duration::from_millis(300));
                assert!(ear.settlements.is_empty());
                d.signal(libc::SIGCONT);
            }
            assert_eq!(ear.settlement(1), QUIET);
            // The pages belong to another now.
            d.ask(&format!("fill 0 {len} 999"));
            let canary = d.hash(0, len);
            std::thread::sleep(Duration::from_millis(100));
            assert_eq!(d.hash(0, len), canary, "a late byte landed ({mode})");
            // And the peer can be connected again: a new session of the same generation.
            let again = p.connect(&d.descriptor);
            assert_ne!(again, peer);
            ear.submit(p.op(2, again, piece(&p, 0, d.base, 4096)));
            assert_eq!(ear.outcome(2), Outcome::Done);
            assert_eq!(d.hash(0, 4096), hash(&p.arena.to_vec(0, 4096)));
        }
    }
}

#[test]
fn a_target_that_shuts_down_in_order_settles_at_once() {
    for mode in ["direct", "tcp"] {
        let len = 16 * MIB;
        let (p, mut d, mut ear, peer) = pair(mode, len);
        ear.submit(p.op(1, peer, long_op(&p, d.base, len, 400)));
        ear.listen(Duration::from_millis(50));
        d.quit();
        match ear.outcome(1) {
            // The target said itself that it stopped in the middle...
            Outcome::Failed { src_quiet: true, dst_quiet: true, .. } => {}
            // ... or its session ended, with proof.
            Outcome::Unresolved { .. } | Outcome::Failed { dst_quiet: false, .. } => {
                ear.settlement(1);
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(ear.lost.len(), 1);
    }
}

#[test]
fn cat_f54_a_successor_at_the_same_endpoint_takes_the_place_but_only_the_exit_is_proof() {
    let len = 4 * MIB;
    let (p, mut old, mut ear, peer) = pair("tcp", len);
    old.signal(libc::SIGSTOP);
    ear.submit(p.op(1, peer, long_op(&p, old.base, len, 1)));
    // Same endpoint (port 7), same boot, other process. The old one is only stopped: on our own host, we see that.
    let mut new = Other::start("tcp", len, 7);
    let newer = p.connect(&new.descriptor);
    assert_ne!(peer, newer);
    assert!(matches!(ear.outcome(1), Outcome::Failed { src_quiet: true, dst_quiet: false, .. }));
    assert_eq!(ear.lost.len(), 1);
    ear.submit(p.op(2, newer, piece(&p, 0, new.base, 4096)));
    assert_eq!(ear.outcome(2), Outcome::Done);
    assert_eq!(new.hash(0, 4096), hash(&p.arena.to_vec(0, 4096)));
    assert!(ear.settlements.is_empty(), "it may still write");
    old.kill();
    assert_eq!(ear.settlement(1), Settlement::PeerGenerationDead);
}

#[test]
fn a_region_unregistered_in_the_middle_is_refused_from_then_on() {
    for mode in ["direct", "tcp"] {
        let len = 16 * MIB;
        let (p, mut d, mut ear, peer) = pair(mode, len);
        ear.submit(p.op(1, peer, long_op(&p, d.base, len, 400)));
        ear.listen(Duration::from_millis(50));
        d.ask("unregister");
        ear.push(p.op(2, peer, piece(&p, 0, d.base, 100)));
        for n in [1, 2] {
            match ear.outcome(n) {
                Outcome::Failed { src_quiet: true, dst_quiet: true, error } => {
                    assert_eq!(error.kind, TransportErrorKind::Refused, "{error}");
                }
                other => panic!("{mode} {n}: {other:?}"),
            }
        }
        // The session lives on.
        assert!(ear.lost.is_empty());
    }
}

/// Where the kernel forbids reading the source's memory, TCP is used, and the reason is told.
#[test]
fn a_source_that_may_not_be_read_is_served_over_tcp() {
    let mut d = Other::start("unprivileged", 1 << 20, 7);
    let hex: String = d.descriptor.metadata.iter().map(|b| format!("{b:02x}")).collect();
    let out = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "unreadable_source_main", "--nocapture", "--test-threads=1"])
        .env(SOURCE, format!("direct {} {} {hex}", d.descriptor.name, d.base))
        .output()
        .unwrap();
    let out = String::from_utf8(out.stdout).unwrap();
    assert!(out.contains("@Tcp reading the source's memory is not permitted"), "{out}");
    assert_eq!(d.hash(0, 4096), hash(&pattern(1 << 20, 1)[..4096]));
}

#[test]
fn unreadable_source_main() {
    let Ok(spec) = std::env::var(SOURCE) else { return };
    let words: Vec<&str> = spec.split(' ').collect();
    drop_privileges();
    // SAFETY: plain integers. Not dumpable: nobody but root may read this process's memory.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) }, 0);
    let p = Side::new(direct(), 1 << 20);
    p.fill(1);
    let mut ear = Ear::new(&p);
    let peer = p.connect(&descriptor(words[1], words[3]));
    let path = p.transport.peer_path(peer).unwrap();
    ear.submit(p.op(1, peer, piece(&p, 0, words[2].parse().unwrap(), 4096)));
    assert_eq!(ear.outcome(1), Outcome::Done);
    println!("\n@{:?} {}", path.kind, path.reason);
}

// ---- this process as the target, the other as the source ----

struct Source(std::process::Child);

const SOURCE: &str = "KV_TCP_TEST_SOURCE";

impl Source {
    fn start(mode: &str, d: &Side) -> Self {
        let hex: String = d.transport.local_metadata().iter().map(|b| format!("{b:02x}")).collect();
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "source_main", "--nocapture", "--test-threads=1"])
            .env(SOURCE, format!("{mode} {} {} {hex}", d.transport.local_name(), d.base()))
            .spawn()
            .unwrap();
        Self(child)
    }

    fn kill(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn source_main() {
    let Ok(spec) = std::env::var(SOURCE) else { return };
    let words: Vec<&str> = spec.split(' ').collect();
    let p = Side::new(if words[0] == "tcp" { tcp() } else { direct() }, 16 * MIB);
    p.fill(1);
    let mut ear = Ear::new(&p);
    let peer = p.connect(&descriptor(words[1], words[3]));
    let base: u64 = words[2].parse().unwrap();
    for n in 0.. {
        ear.push(p.op(n, peer, long_op(&p, base, 16 * MIB, 10)));
    }
}

fn descriptor(name: &str, hex: &str) -> kv_core::transport::PeerDescriptor {
    let bytes: Vec<u8> =
        hex.as_bytes().chunks(2).map(|c| u8::from_str_radix(std::str::from_utf8(c).unwrap(), 16).unwrap()).collect();
    kv_core::transport::PeerDescriptor {
        name: name.to_owned(),
        metadata: bytes.into(),
        endpoint: kv_core::net::Endpoint::new("127.0.0.1", 1),
        host: None,
    }
}
