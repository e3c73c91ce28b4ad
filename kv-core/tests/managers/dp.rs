//! DP groups (G1): two prefill ranks of one server behind one bootstrap server, and decode finds the one that serves a room.

use std::io::Read;
use std::net::TcpListener;
use std::time::Duration;

use kv_core::bootstrap::{BootstrapServer, RegistrationConfig};
use kv_core::manager::{DecodeConfig, KvSender, PrefillConfig, PrefillIdentity, SenderOptions};
use kv_core::{KvPoll, Limits};

use super::support::*;

const SHORT: Duration = Duration::from_millis(500);

/// Rank `rank` of two attention DP groups.
fn group(rank: u32, method: &str) -> PrefillConfig {
    PrefillConfig {
        identity: PrefillIdentity { attn_dp: (2, rank), ..PrefillIdentity::default() },
        load_balance_method: method.into(),
        ..PrefillConfig::default()
    }
}

fn named(rank: u32) -> SenderOptions {
    SenderOptions { prefill_dp_rank: Some(rank) }
}

/// Room `n` goes from `p` to `d`, which was told of `dp_rank` or finds it out; decode asks first.
fn goes(cluster: &Cluster, p: &Prefill, d: &Decode, n: u64, dp_rank: Option<u32>) {
    let receiver = d.manager.receiver(room(n), &cluster.addr()).unwrap();
    receiver.init(dp_rank).unwrap();
    let options = SenderOptions { prefill_dp_rank: dp_rank };
    let sender = p.manager.sender_with(room(n), &cluster.addr(), options).unwrap();
    send(&sender);
    ask(&receiver);
    assert_eq!(receiver.wait_timeout(HANG), KvPoll::Success, "room {n}: {:?}", receiver.failure());
    assert_eq!(sender.wait_timeout(HANG), KvPoll::Success);
    arrived(p, d);
}

fn failed(sender: &KvSender) -> String {
    assert_eq!(sender.wait_timeout(HANG), KvPoll::Failed);
    sender.failure().unwrap().reason
}

#[test]
fn r_g1_dp_groups_by_room_number() {
    let mut cluster = Cluster::new();
    let p = [0, 1].map(|rank| cluster.prefill(group(rank, "follow_bootstrap_room")));
    let d = cluster.decode(DecodeConfig::default());
    for n in 8..12 {
        goes(&cluster, &p[n as usize % 2], &d, n, None);
    }
    assert_eq!(p.each_ref().map(|p| p.manager.stats().dp_ranks_registered.get()), [0, 0], "nothing to look up");
    // The router sent it to the other one: decode will never come here.
    let sender = p[1].manager.sender(room(20), &cluster.addr()).unwrap();
    let reason = failed(&sender);
    let text = "follow_bootstrap_room conflict: dispatched to dp_rank 1 but bootstrap_room 20 implies dp_rank 0.";
    assert!(reason.starts_with(text), "{reason}");
    // The request named it to both sides.
    goes(&cluster, &p[1], &d, 22, Some(1));
}

#[test]
fn r_g1_dp_groups_by_registration() {
    let mut cluster = Cluster::new();
    let p = [0, 1].map(|rank| cluster.prefill(group(rank, "round_robin")));
    let d = cluster.decode(DecodeConfig::default());
    // Each number on either rank, whatever its remainder.
    for (n, rank) in [(8, 0), (9, 0), (10, 1), (11, 1)] {
        goes(&cluster, &p[rank], &d, n, None);
    }
    assert_eq!(p.each_ref().map(|p| p.manager.stats().dp_ranks_registered.get()), [2, 2]);
    // Named to both sides: nothing is registered. Named to one: refused, since decode goes elsewhere.
    goes(&cluster, &p[1], &d, 12, Some(1));
    assert_eq!(p[1].manager.stats().dp_ranks_registered.get(), 2);
    let sender = p[1].manager.sender_with(room(13), &cluster.addr(), named(0)).unwrap();
    let reason = failed(&sender);
    assert!(reason.starts_with("prefill_dp_rank conflict: dispatched to dp_rank 1"), "{reason}");
}

#[test]
fn r_g1_replicas_are_dp_groups_too() {
    let mut cluster = Cluster::new();
    let p = [0, 1].map(|rank| {
        let identity = PrefillIdentity { system_dp: (2, rank), ..PrefillIdentity::default() };
        cluster.prefill(PrefillConfig { identity, ..group(0, "total_requests") })
    });
    let d = cluster.decode(DecodeConfig::default());
    for (n, rank) in [(8, 1), (9, 0)] {
        goes(&cluster, &p[rank], &d, n, None);
    }
}

#[test]
fn r_g1_mixed_routing_by_force_on_both_sides() {
    let mut cluster = Cluster::new();
    let p = [0, 1].map(|rank| {
        let by_room = group(rank, "follow_bootstrap_room");
        cluster.prefill(PrefillConfig { force_register_dp_rank: true, ..by_room })
    });
    let d = cluster.decode(DecodeConfig { force_query_dp_rank: true, ..DecodeConfig::default() });
    for (n, rank) in [(8, 1), (9, 1), (10, 0)] {
        goes(&cluster, &p[rank], &d, n, None);
    }
}

#[test]
fn r_g1_r_i2_a_room_that_no_rank_claims_fails_decode_by_its_deadline() {
    let mut cluster = Cluster::new();
    let _p = [0, 1].map(|rank| cluster.prefill(group(rank, "round_robin")));
    let d = cluster.decode(DecodeConfig { waiting_timeout: SHORT, ..DecodeConfig::default() });
    let receiver = d.manager.receiver(room(8), &cluster.addr()).unwrap();
    receiver.init(None).unwrap();
    assert_eq!(receiver.wait_timeout(HANG), KvPoll::Failed);
    let reason = receiver.failure().unwrap().reason;
    let text = format!("No prefill rank claimed bootstrap_room 8 at bootstrap_addr: {} within 0.", cluster.addr());
    assert!(reason.starts_with(&text), "{reason}");
    assert!(receiver.releasable());
}

/// Neither the caller nor the other rooms wait for a registry that does not answer.
#[test]
fn r_g1_a_registry_that_does_not_answer_holds_up_nobody() {
    let mut cluster = Cluster::new();
    let p = [0, 1].map(|rank| cluster.prefill(group(rank, "round_robin")));
    let d = cluster.decode(DecodeConfig::default());
    let silent = TcpListener::bind((HOST, 0)).unwrap();
    let addr = silent.local_addr().unwrap().to_string();
    let senders: Vec<_> = (100..300).map(|n| p[1].manager.sender(room(n), &addr).unwrap()).collect();
    // The question has come, and nobody answers it while these rooms go.
    let (mut held, _) = silent.accept().unwrap();
    let mut head = [0; 4];
    held.read_exact(&mut head).unwrap();
    assert_eq!(&head, b"POST");
    for n in 8..12 {
        goes(&cluster, &p[1], &d, n, None);
    }
    assert!(senders.iter().all(|s| s.poll() == KvPoll::Bootstrapping));
    drop((held, silent));
    until("every failure", || p[1].manager.stats().dp_rank_failures.get() >= 200);
    senders[0].abort();
    let reason = failed(&senders[0]);
    assert!(reason.starts_with("Aborted by AbortReq.; decode cannot know that dp_rank 1 serves it"), "{reason}");
    assert!(reason.contains(&addr), "{reason}");
}

#[test]
fn r_g1_a_registry_that_comes_late_is_asked_again() {
    let mut cluster = Cluster::new();
    let p = [0, 1].map(|rank| cluster.prefill(group(rank, "round_robin")));
    let d = cluster.decode(DecodeConfig::default());
    let late = TcpListener::bind((HOST, 0)).unwrap().local_addr().unwrap();
    let sender = p[1].manager.sender(room(8), &late.to_string()).unwrap();
    send(&sender);
    until("a failure", || p[1].manager.stats().dp_rank_failures.get() > 0);
    let Ok(_late) = BootstrapServer::bind_addr(late, Limits::default()) else {
        eprintln!("skipped: r_g1_a_registry_that_comes_late_is_asked_again: somebody else took the port");
        return;
    };
    for p in &p {
        p.manager.register(&RegistrationConfig::new(HOST, late.port())).unwrap();
    }
    let receiver = d.manager.receiver(room(8), &late.to_string()).unwrap();
    receiver.init(None).unwrap();
    ask(&receiver);
    assert_eq!(receiver.wait_timeout(HANG), KvPoll::Success, "{:?}", receiver.failure());
    arrived(&p[1], &d);
}
