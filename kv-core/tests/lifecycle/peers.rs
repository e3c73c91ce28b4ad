//! Decodes and prefills that die, restart, come back, or register anew.

use kv_core::poll::KvPoll;
use kv_core::transport::TransportErrorKind;
use kv_testkit::fake_transport::Policy;

use super::support::*;

#[test]
fn cat_f54_a_decode_that_restarts_at_its_address_is_another_peer() {
    let mut w = held_world(WorldSpec::default());
    let (s, old, op) = in_flight(&mut w);
    let before = w.p[0].transport.connected();
    let endpoint = w.d[0].endpoint.clone();
    w.restart_decode(0, "decode-0-again");
    w.net.lose_peer(&w.p[0].endpoint, &endpoint, "connection reset");
    w.run();
    assert_eq!(s.poll(), FAILED);
    assert!(reason(&s).starts_with("Lost connection with decode instance 10.0.1.1:7000"), "{}", reason(&s));
    // The successor registers; nothing of the old one is left.
    let (s2, r2) = (w.sender(0, 8), w.receiver(0, 8));
    w.run();
    w.publish(0, &r2, &[1], 0);
    w.run();
    let after = w.p[0].transport.connected();
    assert_eq!(after.len(), 1);
    assert_ne!(after[0].0, before[0].0, "a new generation");
    w.p[0].transport.set_policy(Policy::CompleteAtOnce);
    w.send(0, &s2, &[0], 0, true);
    w.run();
    assert_eq!((s2.poll(), r2.poll()), (SUCCESS, SUCCESS));
    w.assert_copied(0, &[0], 0, &[1]);
    w.assert_untouched(0, &[4, 5]);
    // The death of the generation was the proof for what was in flight.
    assert!(w.p[0].transport.op(op).unwrap().is_quiet());
    assert!(s.releasable());
    drop(old);
    w.clear_p(0, &s);
    one(&mut w, &s2, &r2);
    assert_eq!(w.p[0].shard.held().peers, 1);
}

#[test]
fn cat_f54_a_restart_that_nobody_noticed_is_seen_by_the_registration() {
    let mut w = world();
    let (s, _) = w.open(7, &[4]);
    w.succeed_decode(0, "decode-0-again");
    let r2 = w.receiver(0, 8);
    w.run();
    assert_eq!(s[0].poll(), FAILED);
    assert!(reason(&s[0]).contains("a new process registered at its address"), "{}", reason(&s[0]));
    assert_eq!((w.p[0].shard.held().peers, w.p[0].transport.connected().len()), (1, 1));
    w.clear_p(0, &s[0]);
    w.clear_d(0, &r2);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn cat_f55_the_death_of_a_peer_frees_what_was_held_for_it() {
    let mut w = world();
    let (s, _) = w.open(7, &[4]);
    w.fabric.kill("decode-0");
    w.run();
    assert_eq!(s[0].poll(), FAILED);
    assert!(w.p[0].transport.connected().is_empty(), "with no new peer");
    assert_eq!(w.p[0].connector.disconnected().len(), 1);
    assert_eq!(w.p[0].stats.peers_lost.get(), 1);
    w.clear_p(0, &s[0]);
    w.run();
    assert_eq!(w.p[0].shard.held().rooms, 0);
}

#[test]
fn the_loss_of_a_peer_is_counted_once_however_many_see_it() {
    let mut w = world();
    let (s, r) = w.open(7, &[4]);
    let (p, d) = (w.p[0].endpoint.clone(), w.d[0].endpoint.clone());
    w.net.lose_peer(&p, &d, "reset");
    w.fabric.cut("decode-0");
    w.net.lose_peer(&p, &d, "reset again");
    w.run();
    assert_eq!(w.p[0].stats.peers_lost.get(), 1);
    end(&mut w, &s, &r);
}

/// Open and send room `n`; what both sides end with.
fn attempt(w: &mut World, n: u64) -> (KvPoll, KvPoll) {
    let (s, r) = w.open(n, &[1]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    let got = (s[0].poll(), r[0].poll());
    w.close(&s, &r);
    got
}

#[test]
fn cat_f51_a_lost_peer_is_tried_again_with_growing_pauses_and_then_works() {
    let mut w = world();
    assert_eq!(attempt(&mut w, 1), (SUCCESS, SUCCESS));
    w.fabric.cut("decode-0");
    w.run();
    // Held for 1 s.
    assert_eq!(attempt(&mut w, 2), (FAILED, FAILED));
    assert_eq!(w.p[0].transport.connects().len(), 1, "no attempt while it is held");
    // Then tried: the attempts fail, and the pauses double.
    for (n, pause) in [(10, 1), (20, 2), (30, 4), (40, 8)] {
        let tried = w.p[0].transport.connects().len();
        w.advance(secs(pause) - std::time::Duration::from_millis(1));
        assert_eq!(attempt(&mut w, n), (FAILED, FAILED));
        assert_eq!(w.p[0].transport.connects().len(), tried, "after {pause} s");
        w.advance(std::time::Duration::from_millis(1));
        w.p[0].transport.fail_connect(TransportErrorKind::Timeout, "no answer");
        assert_eq!(attempt(&mut w, n + 1), (FAILED, FAILED));
        assert_eq!(w.p[0].transport.connects().len(), tried + 1);
    }
    w.advance(secs(16));
    assert_eq!(attempt(&mut w, 50), (SUCCESS, SUCCESS));
    // Good once, all is forgiven.
    w.fabric.cut("decode-0");
    w.run();
    w.advance(secs(1));
    assert_eq!(attempt(&mut w, 51), (SUCCESS, SUCCESS));
    w.assert_nothing_held();
}

#[test]
fn cat_f51_a_connection_that_the_lane_calls_lost_is_made_anew() {
    let mut w = world();
    assert_eq!(attempt(&mut w, 1), (SUCCESS, SUCCESS));
    // Gone without an event of its own: the next write is refused.
    let (id, _) = w.p[0].transport.connected()[0];
    kv_core::transport::Transport::disconnect(&*w.p[0].transport, id);
    assert_eq!(attempt(&mut w, 2), (FAILED, FAILED));
    w.advance(secs(1));
    assert_eq!(attempt(&mut w, 3), (SUCCESS, SUCCESS));
    w.assert_nothing_held();
}

#[test]
fn cat_f53_nobody_connects_to_a_dead_peer_without_a_room_for_it() {
    let mut w = world();
    let (s, _) = w.open(7, &[4]);
    w.fabric.kill("decode-0");
    w.net.crash(&w.d[0].endpoint.clone());
    w.run();
    let tried = w.p[0].transport.connects().len();
    w.advance(secs(3600));
    assert_eq!(w.p[0].transport.connects().len(), tried);
    w.clear_p(0, &s[0]);
    w.run();
}

#[test]
fn cat_f58_one_connection_serves_every_room() {
    let mut w = world();
    for n in 1..=500 {
        assert_eq!(attempt(&mut w, n), (SUCCESS, SUCCESS));
    }
    assert_eq!(w.p[0].transport.connects().len(), 1);
    assert_eq!(w.d[0].directory.fetches(), 1);
    w.assert_nothing_held();
}

#[test]
fn rooms_wait_for_a_connection_that_takes_its_time() {
    let mut w = world();
    w.p[0].connector.hold(true);
    let (s, r) = w.open(7, &[4]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    assert_eq!((s[0].poll(), w.p[0].shard.held().posts), (KvPoll::Transferring, 1));
    w.p[0].connector.hold(false);
    w.run();
    assert_eq!(r[0].poll(), SUCCESS);
    end(&mut w, &s, &r);
}

#[test]
fn a_connection_that_fails_fails_its_rooms_on_both_sides() {
    let mut w = world();
    w.p[0].transport.fail_connect(TransportErrorKind::BadPeer, "no such rkey");
    let (s, r) = w.open(7, &[4]);
    for room in [&s[0], &r[0]] {
        assert_eq!(room.poll(), FAILED);
        assert!(reason(room).contains("no such rkey"), "{}", reason(room));
    }
    end(&mut w, &s, &r);
}

/// Decode's registration, changed.
fn registration(w: &World, change: impl Fn(&mut kv_core::wire::Registration)) -> kv_core::control::Multipart {
    let mut r = w.d[0].registration();
    change(&mut r);
    w.spec.hooks.build_receiver_registration_message(&r).unwrap()
}

#[test]
fn the_result_of_an_older_attempt_does_not_tear_down_the_newer() {
    let mut w = world();
    w.p[0].connector.hold(true);
    let (s, r) = w.open(7, &[4]);
    // Registered again with another geometry while the first attempt is under way.
    w.net.inject(&w.p[0].endpoint, registration(&w, |r| r.gpu_id = 3));
    w.run();
    assert_eq!(w.p[0].connector.waiting(), 2);
    w.p[0].connector.hold(false);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    assert_eq!((s[0].poll(), r[0].poll()), (SUCCESS, SUCCESS));
    assert_eq!((w.p[0].connector.disconnected().len(), w.p[0].transport.connected().len()), (0, 1));
    end(&mut w, &s, &r);
}

#[test]
fn hazard_7_a_changed_geometry_is_not_ignored() {
    let mut w = world();
    let (s, r) = w.open(7, &[4]);
    w.net.inject(&w.p[0].endpoint, registration(&w, |r| r.dcp_size = 2));
    w.run();
    assert_eq!((s[0].poll(), r[0].poll()), (FAILED, FAILED));
    assert!(reason(&r[0]).contains("dcp_size"), "{}", reason(&r[0]));
    assert!(w.p[0].transport.connected().is_empty());
    end(&mut w, &s, &r);
    // And back again.
    w.net.inject(&w.p[0].endpoint, registration(&w, |_| {}));
    assert_eq!(attempt(&mut w, 8), (SUCCESS, SUCCESS));
}

#[test]
fn posts_that_wait_for_a_peer_go_with_it_when_it_is_refused() {
    let mut w = world();
    w.p[0].connector.hold(true);
    let (s, r) = w.open(7, &[4]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    assert_eq!(w.p[0].shard.held().posts, 1);
    w.net.inject(&w.p[0].endpoint, registration(&w, |r| r.dcp_size = 2));
    w.run();
    assert_eq!((s[0].poll(), w.p[0].shard.held().posts), (FAILED, 0));
    w.p[0].connector.hold(false);
    end(&mut w, &s, &r);
}

#[test]
fn r_h2_the_table_of_peers_is_bounded() {
    let limits = kv_core::Limits { max_peers: 2, ..kv_core::Limits::default() };
    let mut w = World::new(WorldSpec {
        limits,
        ..WorldSpec::of(kv_testkit::directory::Shape { mla: true, ..kv_testkit::directory::Shape::tp(1, 4, 0) }, 4)
    });
    let rooms: Vec<_> = (0..4).map(|d| w.receiver(d, 7 + d as u64)).collect();
    w.run();
    assert_eq!((w.p[0].shard.held().peers, w.p[0].transport.connected().len()), (2, 2));
    rooms.iter().enumerate().for_each(|(d, r)| w.clear_d(d, r));
    w.run();
    w.assert_nothing_held();
}

#[test]
fn r_d7_a_lost_prefill_fails_its_rooms_and_is_registered_anew() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    let waiting = w.receiver(0, 8);
    w.run();
    w.d[0].directory.node_lost("p:8998");
    w.run();
    for room in [&r, &waiting] {
        assert_eq!(reason(room), "Lost connection with prefill instance (bootstrap_addr: p:8998)");
    }
    assert!(waiting.releasable() && !r.releasable(), "lost heartbeats prove nothing");
    // It lives, and hears the ABORT.
    assert_eq!(s.poll(), FAILED);
    w.p[0].transport.complete(op);
    w.run();
    assert!(r.releasable());
    w.clear_d(0, &waiting);
    one(&mut w, &s, &r);
    w.p[0].transport.set_policy(Policy::CompleteAtOnce);
    assert_eq!(attempt(&mut w, 9), (SUCCESS, SUCCESS));
    assert_eq!(w.d[0].stats.peers_registered.get(), 2);
}

/// A process that is killed takes its connections with it, seconds before its heartbeats are missed. Nobody calls it then.
#[test]
fn cat_f53_a_prefill_whose_connection_broke_is_let_go_of_when_it_is_lost() {
    let mut w = world();
    let r = w.receiver(0, 7);
    w.run();
    let (d, p) = (w.d[0].endpoint.clone(), w.p[0].endpoint.clone());
    w.net.lose_peer(&d, &p, "gone");
    w.run();
    assert!(w.net.links().contains(&(d.clone(), p.clone())), "it may come back");
    w.d[0].directory.node_lost("p:8998");
    w.run();
    assert_eq!(r.poll(), FAILED);
    assert!(!w.net.links().contains(&(d, p)), "{:?}", w.net.links());
    w.clear_d(0, &r);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn cat_f31_a_prefill_lost_before_metadata_fails_the_room_before_any_is_sent() {
    let mut w = world();
    let r = w.receiver(0, 7);
    w.run();
    w.d[0].directory.node_lost("p:8998");
    w.run();
    w.publish(0, &r, &[3], 0);
    w.run();
    assert_eq!((r.poll(), r.releasable()), (FAILED, true));
    assert_eq!(w.p[0].shard.held().early, 0);
    w.clear_d(0, &r);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn cat_f60_the_same_room_is_asked_of_the_same_rank_again() {
    let mut w = World::new(WorldSpec::of(kv_testkit::directory::Shape::tp(2, 2, 0), 2));
    for _ in 0..2 {
        let (s, r) = (w.sender(1, 7), w.receiver(1, 7));
        w.run();
        w.publish(1, &r, &[3], 0);
        w.abort_d(1, &r);
        w.run();
        assert_eq!((s.poll(), r.releasable()), (FAILED, true));
        w.clear_p(1, &s);
        w.clear_d(1, &r);
        w.run();
    }
    assert_eq!((w.p[0].stats.messages_in.get(), w.p[1].stats.messages_in.get()), (0, 5));
}

/// Its heartbeats were not missed, and a prefill as 0.5.23 has no way to say that it does not know us.
#[test]
fn r_d7_a_prefill_whose_connection_broke_is_looked_up_and_registered_with_again() {
    for (told, want) in [(true, SUCCESS), (false, FAILED)] {
        let mut w = World::new(WorldSpec { prefill_ext: false, ..WorldSpec::default() });
        let (s, r) = w.open(7, &[4]);
        w.send(0, &s[0], &[0], 0, true);
        w.run();
        assert_eq!(r[0].poll(), SUCCESS);
        w.clear_d(0, &r[0]);
        w.run();
        w.restart_prefill(0, "prefill-0-again");
        if told {
            let (p, d) = (w.p[0].endpoint.clone(), w.d[0].endpoint.clone());
            w.net.lose_peer(&d, &p, "the peer closed the connection");
            w.run();
        }
        let fetches = w.d[0].directory.fetches();
        let (s, r) = w.open(8, &[5]);
        w.send(0, &s[0], &[0], 0, true);
        w.run();
        assert_eq!((r[0].poll(), w.d[0].directory.fetches() - fetches), (want, u64::from(told)));
        end(&mut w, &s, &r);
    }
}
