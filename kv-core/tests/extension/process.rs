//! F56: a peer is a process, not an address.

use std::sync::Arc;

use kv_core::net::Endpoint;
use kv_core::room::ReleasePolicy;
use kv_testkit::directory::Answer;
use kv_testkit::fake_transport::Policy;
use kv_testkit::world::process;

use super::*;

fn proof() -> WorldSpec {
    WorldSpec { release: ReleasePolicy::PerPeer(secs(30)), ..WorldSpec::default() }
}

/// From now on the registry knows prefill rank 0 as this process, there.
fn registry_says(w: &World, name: &str, at: &Endpoint) {
    let mut peers = w.spec.peers(0);
    peers.records[0].ext = Some(process(name));
    peers.records[0].endpoint = at.clone();
    w.d[0].directory.answer(&w.spec.shape.bootstrap_addr, Answer::Peers(Arc::new(peers)));
}

/// A world in which prefill died over a write that may still land, and decode gave the room up.
fn orphaned() -> (World, Room) {
    let mut w = held_world(proof());
    let (_, r, _) = in_flight(&mut w);
    w.kill_prefill(0);
    w.abort_d(0, &r);
    w.run();
    assert!(!r.releasable());
    (w, r)
}

#[test]
fn cat_f56_a_restarted_prefill_refuses_at_once_what_was_meant_for_the_process_before() {
    let mut w = World::new(proof());
    let (s, r) = w.open(7, &[4]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    w.close(&s, &r);
    w.restart_prefill(0, "prefill-0-again");
    // Decode still has the address, and takes it for the process it knows.
    let (s, r) = (w.sender(0, 8), w.receiver(0, 8));
    w.run();
    w.publish(0, &r, &[5], 1);
    w.run();
    assert_eq!(r.poll(), FAILED);
    assert!(reason(&r).contains("another process than the one that decode knows"), "{}", reason(&r));
    assert!(r.releasable(), "its answer proves that nobody writes");
    assert_eq!(s.poll() as u8, 1, "a sender of the new process is not touched");
    w.clear_d(0, &r);
    let at = w.p[0].endpoint.clone();
    registry_says(&w, "prefill-0-again", &at);
    // The next room asks anew, and registers with the process that is there now.
    let r = w.receiver(0, 8);
    w.run();
    w.publish(0, &r, &[5], 1);
    w.send(0, &s, &[1], 0, true);
    w.run();
    assert_eq!((s.poll(), r.poll()), (SUCCESS, SUCCESS));
    one(&mut w, &s, &r);
}

/// Prefill keeps so many decodes; one that it gave up for another learns of it, and is back with its next room.
#[test]
fn cat_f51_a_decode_that_prefill_has_forgotten_registers_again() {
    let limits = kv_core::Limits { max_peers: 1, ..Default::default() };
    for decode_ext in [true, false] {
        let spec = WorldSpec {
            decode_ext,
            limits: limits.clone(),
            ..WorldSpec::of(kv_testkit::directory::Shape::default(), 2)
        };
        let mut w = World::new(spec);
        let room = |w: &mut World, d: usize, n: u64| {
            let (s, r) = (w.sender(0, n), w.receiver(d, n));
            w.run();
            w.publish(d, &r, &[5], 1);
            w.send(0, &s, &[1], 0, true);
            w.run();
            let polls = (s.poll() as u8, r.poll() as u8);
            w.clear_p(0, &s);
            w.clear_d(d, &r);
            w.run();
            polls
        };
        assert_eq!(room(&mut w, 0, 1), (4, 4));
        assert_eq!(room(&mut w, 1, 2), (4, 4), "the other one takes its place");
        assert_eq!(room(&mut w, 0, 3), (0, 0));
        // Without the extension decode does not know what to do about it.
        let next = if decode_ext { (4, 4) } else { (0, 0) };
        assert_eq!(room(&mut w, 0, 4), next, "ext: {decode_ext}");
        w.assert_nothing_held();
    }
}

#[test]
fn cat_f56_a_peer_that_restarts_with_fewer_capabilities_is_asked_again() {
    let mut w = World::new(proof());
    let (s, r) = w.open(7, &[4]);
    w.close(&s, &r);
    // Its successor is of 0.5.23, which cannot say that it is another.
    w.spec.prefill_ext = false;
    w.restart_prefill(0, "prefill-0-again");
    let plain = w.spec.peers(0);
    w.d[0].directory.answer(&w.spec.shape.bootstrap_addr, Answer::Peers(Arc::new(plain)));
    w.d[0].directory.node_lost(&w.spec.shape.bootstrap_addr);
    w.run();
    let spy = Spy::on(&w);
    let (s, r) = w.open(8, &[5]);
    w.send(0, &s[0], &[1], 0, true);
    w.run();
    assert_eq!((polls(&s), polls(&r)), (vec![4], vec![4]));
    assert!(spy.all().iter().all(|f| extension(&f.frames).is_none()), "it gets 0.5.23's bytes");
    end(&mut w, &s, &r);
}

/// With either policy: proof that comes before the timeout is proof.
#[test]
fn r_f4_the_transports_word_that_the_process_is_dead_is_proof() {
    for release in [ReleasePolicy::PerPeer(secs(30)), ReleasePolicy::AckOrTimeout(secs(30))] {
        let mut w = held_world(WorldSpec { release, ..WorldSpec::default() });
        let (_, r, _) = in_flight(&mut w);
        w.kill_prefill(0);
        w.abort_d(0, &r);
        w.advance(secs(5));
        assert!(!r.releasable());
        let name = w.p[0].name.clone();
        w.d[0].dead_sources.lock().unwrap().insert(process(&name).process);
        w.advance(secs(5));
        assert!(r.releasable());
        assert_eq!((w.d[0].stats.released_with_proof.get(), w.d[0].stats.released_without_proof.get()), (1, 0));
        w.abandon();
    }
}

#[test]
fn r_f4_a_successor_at_the_same_endpoint_is_proof() {
    let (mut w, r) = orphaned();
    w.restart_prefill(0, "prefill-0-again");
    w.advance(secs(30));
    assert!(r.releasable(), "it answered the ABORT");
    assert_eq!(w.d[0].stats.released_with_proof.get(), 1);
    w.clear_d(0, &r);
    w.run();
    w.assert_nothing_held();
    w.abandon();
}

#[test]
fn r_f4_a_successor_in_the_registry_is_proof_at_the_same_endpoint_alone() {
    let (first, _) = orphaned();
    let at = first.p[0].endpoint.clone();
    first.abandon();
    // A process beside it proves nothing: the one before may only be stopped, and write again.
    let beside = Endpoint::new(at.host(), at.port() + 1);
    for (endpoint, proven) in [(at, true), (beside, false), (Endpoint::new("10.0.0.2", 9999), false)] {
        let (mut w, r) = orphaned();
        w.advance(secs(65));
        assert!(!r.releasable(), "nobody has taken its place");
        registry_says(&w, "prefill-0-again", &endpoint);
        w.advance(secs(30));
        assert_eq!(r.releasable(), proven, "{endpoint}");
        // Asked for once a turn, whatever the number of rooms.
        assert!(w.d[0].directory.fetches() <= 5, "{}", w.d[0].directory.fetches());
        w.abandon();
    }
}

#[test]
fn cat_f56_what_was_said_to_the_decode_before_does_not_reach_its_successor() {
    let mut w = held_world(proof());
    let spy = Spy::on(&w);
    let (s, _, op) = in_flight(&mut w);
    w.p[0].transport.complete(op);
    w.run();
    let (success, ack) = (spy.last(is_status).frames, ["ABORT_ACK", "7", "0", "1"]);
    w.restart_decode(0, "decode-again");
    w.clear_p(0, &s);
    w.run();
    w.p[0].transport.set_policy(Policy::Hold);
    let (s, r, op) = in_flight(&mut w);
    // The Success of the old decode's room 7, and an ACK whose generation the new one uses too.
    w.net.inject(&w.d[0].endpoint, success);
    w.abort_d(0, &r);
    w.run();
    w.net.inject(&w.d[0].endpoint, ack);
    w.run();
    assert_eq!((r.poll(), r.releasable()), (FAILED, false));
    assert_eq!(w.d[0].stats.messages_stale.get(), 2);
    w.p[0].transport.complete(op);
    w.run();
    assert!(r.releasable());
    one(&mut w, &s, &r);
}
