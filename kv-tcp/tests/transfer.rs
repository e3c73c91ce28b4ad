//! Bytes arrive where the plan says, whatever the plan and the path.

#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use common::*;
use kv_core::ids::OpId;
use kv_core::plan::{PlanGroup, WritePlan};
use kv_core::transport::{Outcome, SubmitError, Transport, TransportErrorKind};
use kv_tcp::{PathKind, TcpConfig};

const LEN: usize = 8 << 20;

/// Groups of entries with strides and runs that do not overlap at the destination.
fn random_plan(rng: &mut Rng, p: &Side, d: &Side) -> WritePlan {
    let groups = 1 + rng.below(3);
    // Each entry of each group has a share of the destination for itself.
    let shares = groups * 4;
    let share = LEN as u64 / shares;
    let mut out = Vec::new();
    for g in 0..groups {
        let pages = 1 + rng.below(40) as usize;
        let (src, dst) = (rng.shuffled(pages), rng.shuffled(pages));
        let mut runs = Vec::new();
        let mut at = 0;
        while at < pages {
            // Runs of neighbours only where both lists go on, as a planner finds them.
            let mut n = 1;
            while at + n < pages && src[at + n] == src[at] + n as u32 && dst[at + n] == dst[at] + n as u32 {
                n += 1;
            }
            runs.push(run(src[at], dst[at], n as u32));
            at += n;
        }
        if rng.below(4) == 0 {
            runs = vec![run(0, 0, pages as u32)];
        }
        let entries: Vec<_> = (0..1 + rng.below(4))
            .map(|e| {
                let stride = 1 + rng.below(share / pages as u64);
                let len = if rng.below(2) == 0 { stride } else { 1 + rng.below(stride) };
                let mut pair = entry(
                    p.region.as_ref().unwrap().id(),
                    rng.below(LEN as u64 - share),
                    d.base() + (g * 4 + e) * share,
                    len,
                );
                pair.dst_stride = stride;
                pair.src_stride = len + rng.below(share / pages as u64 - len + 1);
                pair
            })
            .collect();
        out.push(PlanGroup { entries: entries.into(), runs: runs.into() });
    }
    WritePlan::new(out)
}

fn random_plans(config: &TcpConfig, kind: PathKind, rounds: u64) {
    let p = Side::new(config.clone(), LEN);
    let d = Side::new(config.clone(), LEN);
    p.fill(1);
    let src = p.arena.to_vec(0, LEN);
    let mut ear = Ear::new(&p);
    let peer = p.connect(&d.descriptor(1));
    assert_eq!(p.transport.peer_path(peer).unwrap().kind, kind);
    let mut rng = Rng(42);
    for n in 0..rounds {
        d.fill(n + 100);
        let before = d.arena.to_vec(0, LEN);
        let plan = random_plan(&mut rng, &p, &d);
        let want = expected(&plan, &src, before, d.base());
        ear.submit(p.op(n, peer, plan));
        assert_eq!(ear.outcome(n), Outcome::Done);
        assert!(d.arena.to_vec(0, LEN) == want, "round {n}");
    }
    let stats = d.transport.stats();
    assert_eq!((stats.ops_refused, stats.frames_malformed), (0, 0));
}

#[test]
fn random_plans_arrive_by_direct_copy() {
    random_plans(&direct(), PathKind::SameHost, 60);
}

#[test]
fn random_plans_arrive_over_tcp() {
    random_plans(&tcp(), PathKind::Tcp, 60);
}

#[test]
fn random_plans_arrive_over_tcp_with_other_cuts() {
    let config =
        TcpConfig { connections_per_peer: 3, workers: 3, inline_max: 0, socket_buffer: Some(128 << 10), ..tcp() };
    random_plans(&config, PathKind::Tcp, 30);
}

#[test]
fn ipv6_carries_both_paths() {
    for (config, kind) in [(direct(), PathKind::SameHost), (tcp(), PathKind::Tcp)] {
        random_plans(&TcpConfig { bind: "[::1]:0".parse().unwrap(), ..config }, kind, 5);
    }
}

#[test]
fn the_default_address_serves_ipv4_and_ipv6() {
    let p = Side::new(TcpConfig::default(), 4096);
    let d = Side::new(TcpConfig::default(), 4096);
    let addresses = d.transport.addresses().to_vec();
    assert!(addresses.iter().any(|a| a.is_ipv4()), "{addresses:?}");
    for ip in ["127.0.0.1", "::1"] {
        let one = TcpConfig { advertise: vec![ip.parse().unwrap()], ..TcpConfig::default() };
        let d = Side::new(one, 4096);
        let peer = p.connect(&d.descriptor(2));
        assert_eq!(p.transport.peer_path(peer).unwrap().address.ip().to_string(), ip);
    }
}

#[test]
fn a_large_op_is_shared_by_workers_and_stripes() {
    for config in [direct(), tcp()] {
        let len = 64 << 20;
        let p = Side::new(config.clone(), len);
        let d = Side::new(config, len);
        p.fill(7);
        let mut ear = Ear::new(&p);
        let peer = p.connect(&d.descriptor(1));
        let pages = len / 16384;
        let mut rng = Rng(5);
        let (s, t) = (rng.shuffled(pages), rng.shuffled(pages));
        let runs: Vec<_> = s.iter().zip(&t).map(|(s, t)| run(*s, *t, 1)).collect();
        let plan = plan(&[entry(p.region.as_ref().unwrap().id(), 0, d.base(), 16384)], &runs);
        let want = expected(&plan, &p.arena.to_vec(0, len), vec![0; len], d.base());
        ear.submit(p.op(1, peer, plan));
        assert_eq!(ear.outcome(1), Outcome::Done);
        assert!(d.arena.to_vec(0, len) == want);
    }
}

#[test]
fn cat_f58_ten_thousand_ops_use_the_same_few_connections() {
    for config in [direct(), tcp()] {
        let p = Side::new(config.clone(), LEN);
        let d = Side::new(config, LEN);
        p.fill(3);
        let mut ear = Ear::new(&p);
        let peer = p.connect(&d.descriptor(1));
        let connections = p.transport.peer_path(peer).unwrap().connections;
        assert!(connections <= 3);
        for n in 0..10_000u64 {
            let at = n % 2000 * 4096;
            ear.push(p.op(n, peer, piece(&p, at, d.base() + at, 4096 - n % 100)));
        }
        ear.until("all done", |e| e.outcomes.len() == 10_000);
        assert!(ear.outcomes.values().all(|o| *o == Outcome::Done));
        assert_eq!(p.transport.stats().connections_opened, connections as u64);
        assert_eq!(d.transport.stats().connections_accepted, connections as u64);
        assert!(p.arena.to_vec(0, 4096 - 99) == d.arena.to_vec(0, 4096 - 99));
    }
}

#[test]
fn several_lanes_and_peers_at_once() {
    for config in [direct(), tcp()] {
        let p = Side::new(config.clone(), LEN);
        p.fill(9);
        let targets: Vec<Side> = (0..3).map(|_| Side::new(config.clone(), LEN)).collect();
        // One lane before the peers, one after.
        let mut ears = vec![Ear::new(&p)];
        let peers: Vec<_> = targets.iter().enumerate().map(|(n, d)| p.connect(&d.descriptor(n as u16))).collect();
        ears.push(Ear::new(&p));
        for (e, ear) in ears.iter_mut().enumerate() {
            for n in 0..300u64 {
                let (peer, d) = (peers[n as usize % 3], &targets[n as usize % 3]);
                let at = (n / 3 * 2 + e as u64) * 40_000;
                ear.push(p.op(n, peer, piece(&p, at, d.base() + at, 40_000)));
            }
        }
        for ear in &mut ears {
            ear.until("all done", |e| e.outcomes.len() == 300);
            assert!(ear.outcomes.values().all(|o| *o == Outcome::Done));
        }
        let want = p.arena.to_vec(0, 200 * 40_000);
        for d in &targets {
            assert!(d.arena.to_vec(0, want.len()) == want);
        }
    }
}

#[test]
fn an_op_of_nothing_is_done() {
    let p = Side::new(direct(), 4096);
    let d = Side::new(direct(), 4096);
    let mut ear = Ear::new(&p);
    let peer = p.connect(&d.descriptor(1));
    ear.submit(p.op(1, peer, WritePlan::default()));
    assert_eq!(ear.outcome(1), Outcome::Done);
}

#[test]
fn ops_that_can_never_work_are_handed_back() {
    let p = Side::new(direct(), 4096);
    let d = Side::new(direct(), 4096);
    let mut ear = Ear::new(&p);
    let peer = p.connect(&d.descriptor(1));
    let mut reject = |plan: WritePlan, peer, kind: TransportErrorKind| match ear.lane.submit(p.op(9, peer, plan)) {
        Err(SubmitError::Rejected(op, e)) => assert_eq!((op.id, e.kind), (OpId(9), kind), "{e}"),
        other => panic!("{other:?}"),
    };
    use TransportErrorKind::{InvalidArgument, PeerLost};
    reject(piece(&p, 1, d.base(), 4096), peer, InvalidArgument);
    reject(piece(&p, 0, d.base() + 1, 4096), peer, InvalidArgument);
    reject(piece(&p, 0, d.base() - 1, 1), peer, InvalidArgument);
    reject(piece(&p, u64::MAX, d.base(), 1), peer, InvalidArgument);
    reject(piece(&p, 0, u64::MAX, 1), peer, InvalidArgument);
    let foreign = Side::new(direct(), 4096);
    let mut op = p.op(9, peer, piece(&p, 0, d.base(), 1));
    op.regions = std::sync::Arc::new([foreign.region.clone().unwrap()]);
    reject(piece(&p, 0, d.base(), 1), kv_core::ids::PeerId(1 << 50), PeerLost);
    match ear.lane.submit(op) {
        Err(SubmitError::Rejected(_, e)) => assert_eq!(e.kind, InvalidArgument, "another transport's region: {e}"),
        other => panic!("{other:?}"),
    }
    assert!(ear.outcomes.is_empty());
}

#[test]
fn a_full_lane_is_busy_and_takes_ops_again() {
    for config in [direct(), tcp()] {
        let p = Side::new(TcpConfig { max_ops_in_flight: 4, ..config.clone() }, LEN);
        let d = Side::new(config, LEN);
        let mut ear = Ear::new(&p);
        let peer = p.connect(&d.descriptor(1));
        let (mut accepted, mut busy) = (0u64, false);
        while !busy {
            match ear.lane.submit(p.op(accepted, peer, piece(&p, 0, d.base(), LEN as u64))) {
                Ok(()) => accepted += 1,
                Err(SubmitError::Busy(op)) => {
                    assert_eq!(op.id, OpId(accepted));
                    busy = true;
                }
                Err(e) => panic!("{e:?}"),
            }
        }
        assert_eq!(accepted, 4);
        ear.until("all done", |e| e.outcomes.len() as u64 == accepted);
        ear.submit(p.op(accepted, peer, piece(&p, 0, d.base(), 100)));
        assert_eq!(ear.outcome(accepted), Outcome::Done);
    }
}

#[test]
fn a_peer_that_registers_more_is_connected_again_as_the_same_generation() {
    let p = Side::new(direct(), 4096);
    let d = Side::new(direct(), 4096);
    let mut ear = Ear::new(&p);
    let peer = p.connect(&d.descriptor(1));
    let more = std::sync::Arc::new(kv_tcp::HostArena::new(4096).unwrap());
    let at = more.as_ptr() as u64;
    assert!(matches!(ear.lane.submit(p.op(1, peer, piece(&p, 0, at, 10))), Err(SubmitError::Rejected(..))));
    let _region = d.transport.register(more).unwrap();
    assert_eq!(p.connect(&d.descriptor(1)), peer);
    ear.submit(p.op(2, peer, piece(&p, 0, at, 10)));
    assert_eq!(ear.outcome(2), Outcome::Done);
}

#[test]
fn cat_f57_an_engine_at_our_own_address_is_a_peer_like_any_other() {
    for (config, kind) in [(direct(), PathKind::SameHost), (tcp(), PathKind::Tcp)] {
        // Three engines on one address, told apart by port and identity, never by the address alone.
        let p = Side::new(config.clone(), LEN);
        let targets: Vec<Side> = (0..2).map(|_| Side::new(config.clone(), LEN)).collect();
        p.fill(5);
        let before = p.arena.to_vec(0, LEN);
        let mut ear = Ear::new(&p);
        for (n, d) in targets.iter().enumerate() {
            let peer = p.connect(&d.descriptor(n as u16 + 1));
            assert_eq!(p.transport.peer_path(peer).unwrap().kind, kind, "not taken for ourselves");
            ear.submit(p.op(n as u64, peer, piece(&p, 0, d.base() + 8192 * n as u64, 4096)));
            assert_eq!(ear.outcome(n as u64), Outcome::Done);
        }
        for (n, d) in targets.iter().enumerate() {
            let mut want = vec![0; LEN];
            want[8192 * n..8192 * n + 4096].copy_from_slice(&before[..4096]);
            assert!(d.arena.to_vec(0, LEN) == want, "engine {n} has its own bytes and nobody else's");
        }
        assert!(p.arena.to_vec(0, LEN) == before);
    }
}
