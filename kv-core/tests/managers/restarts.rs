//! Prefill ranks that come back before their server has missed a heartbeat.

use kv_core::bootstrap::{RegistrationConfig, register_prefill_rank};
use kv_core::hooks::TCP_GUARD;
use kv_core::manager::{DecodeConfig, KvReceiver, PrefillConfig};
use kv_core::{KvPoll, Room};

use super::support::*;

/// The registry lives on, so no heartbeat is missed: what tells decode is that the connection broke.
#[test]
fn r_d7_the_next_room_goes_to_the_successor_of_a_prefill_rank_at_another_port() {
    let mut cluster = Cluster::new();
    let d = cluster.decode(DecodeConfig::default());
    for n in 1..4 {
        // The last one is gone, with its port.
        let p = cluster.prefill(PrefillConfig::default());
        let receiver = asked(&cluster, &d, n);
        let sender = p.manager.sender(room(n), &cluster.addr()).unwrap();
        send(&sender);
        assert_eq!(receiver.wait_timeout(HANG), KvPoll::Success, "{:?}", receiver.failure());
        arrived(&p, &d);
        drop((sender, receiver, p));
        until("the end of the connection", || d.manager.stats().connections_lost.get() == n);
    }
}

/// A room that comes before the registry knows of the successor gets the dead rank's address once more. That nobody is there
/// is noticed, so that the rooms after it do not go there too.
#[test]
fn r_d7_a_room_between_a_rank_and_its_successor_does_not_keep_the_old_address() {
    let mut cluster = Cluster::new();
    let d = cluster.decode(DecodeConfig::default());
    let lost = |n| until("a look at the dead rank", || d.manager.stats().connections_lost.get() == n);
    let p = cluster.prefill(PrefillConfig::default());
    let first = asked(&cluster, &d, 1);
    drop(p);
    lost(1);
    let between = asked(&cluster, &d, 2);
    lost(2);
    let p = cluster.prefill(PrefillConfig::default());
    let receiver = asked(&cluster, &d, 3);
    let sender = p.manager.sender(room(3), &cluster.addr()).unwrap();
    send(&sender);
    assert_eq!(receiver.wait_timeout(HANG), KvPoll::Success, "{:?}", receiver.failure());
    drop((first, between));
}

/// A prefill rank as 0.5.23: its frames are read, and it answers nothing.
struct Sglang(zmq::Socket);

impl Sglang {
    fn bind(context: &zmq::Context, at: &str) -> Self {
        let socket = context.socket(zmq::PULL).unwrap();
        until("the port", || socket.bind(at).is_ok());
        socket.set_rcvtimeo(HANG.as_millis() as i32).unwrap();
        Self(socket)
    }

    /// What stands where metadata has its room, and the guard before it.
    fn hears(&self) -> String {
        let frames = self.0.recv_multipart(0).unwrap();
        assert_eq!(frames[0], TCP_GUARD.as_bytes());
        String::from_utf8(frames[1].clone()).unwrap()
    }
}

/// The successor of a rank of 0.5.23 at the same port would fail every room of a decode that it never heard of, without
/// saying why; and a registration that it has is ignored when it comes again.
#[test]
fn r_h1_a_rank_of_0_5_23_that_comes_back_is_registered_with_before_metadata() {
    let mut cluster = Cluster::new();
    let context = zmq::Context::new();
    let mut rank = Sglang::bind(&context, "tcp://127.0.0.1:*");
    let at = rank.0.get_last_endpoint().unwrap().unwrap();
    let port = at.rsplit_once(':').unwrap().1.parse().unwrap();
    // Its row, and nothing in it that says it is ours.
    let p = cluster.prefill(PrefillConfig::default());
    let row = kv_core::bootstrap::PrefillRow { rank_port: port, ext: None, ..p.manager.row() };
    register_prefill_rank(&RegistrationConfig::new(HOST, cluster.server.local_addr().port()), &row).unwrap();
    let d = cluster.decode(DecodeConfig::default());
    // Not dropped before the end, which would send ABORTs.
    let mut receivers = vec![asked(&cluster, &d, 7)];
    assert_eq!([rank.hears(), rank.hears()], ["None", "7"]);
    receivers.push(asked(&cluster, &d, 8));
    assert_eq!(rank.hears(), "8");
    drop(rank);
    until("the end of the connection", || d.manager.stats().connections_lost.get() == 1);
    rank = Sglang::bind(&context, &at);
    receivers.push(asked(&cluster, &d, 9));
    assert_eq!([rank.hears(), rank.hears()], ["None", "9"]);
}

fn asked(cluster: &Cluster, d: &Decode, n: u64) -> KvReceiver {
    let receiver = d.manager.receiver(Room::new(n).unwrap(), &cluster.addr()).unwrap();
    receiver.init(None).unwrap();
    ask(&receiver);
    receiver
}
