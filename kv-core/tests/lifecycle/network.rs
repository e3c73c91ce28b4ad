//! Lost, repeated, late and overtaken messages; stalled peers.

use kv_core::poll::KvPoll;
use kv_testkit::Rng;
use kv_testkit::fake_transport::Policy;
use kv_testkit::net::{Action, Faults};

use super::support::*;

#[test]
fn every_message_three_times_ends_as_once() {
    let mut w = world();
    w.net.set_faults(Faults { duplicate: 1.0, ..Faults::default() });
    let (s, r) = w.open(7, &[3]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    assert_eq!((s[0].poll(), r[0].poll()), (SUCCESS, SUCCESS));
    assert_eq!(w.p[0].transport.ops().len(), 1);
    w.assert_copied(0, &[0], 0, &[3]);
    end(&mut w, &s, &r);
}

#[test]
fn repeated_aborts_and_acks_release_once() {
    let mut w = world();
    w.net.set_faults(Faults { duplicate: 1.0, ..Faults::default() });
    let (s, r) = w.open(7, &[3]);
    w.abort_d(0, &r[0]);
    w.run();
    assert!(r[0].releasable());
    assert_eq!(w.d[0].stats.released_with_proof.get(), 1);
    end(&mut w, &s, &r);
}

#[test]
fn an_abort_that_overtakes_its_metadata_leaves_no_room_behind() {
    let mut w = world();
    w.net.rule_times(1, Action::Overtaken(secs(5)), |f| is_tag(f, "KvTcpMsgGuard") && f.frames[1] == "7");
    let s = w.sender(0, 7);
    let r = w.receiver(0, 7);
    w.run();
    w.publish(0, &r, &[3], 0);
    w.abort_d(0, &r);
    w.run();
    assert_eq!((s.poll(), r.poll()), (FAILED, FAILED));
    w.advance(secs(5));
    assert_eq!(w.p[0].shard.held().early, 0);
    one(&mut w, &s, &r);
}

#[test]
fn a_lost_abort_ends_by_the_release_timeout() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    w.net.rule(Action::Drop, |f| is_tag(f, "ABORT"));
    w.abort_d(0, &r);
    w.run();
    assert_eq!((s.poll(), r.poll()), (KvPoll::Transferring, FAILED));
    w.advance(secs(30));
    assert_eq!((r.releasable(), w.d[0].stats.released_without_proof.get()), (true, 1));
    w.p[0].transport.complete(op);
    w.run();
    // Prefill never heard of it: its Success finds a room that has ended.
    assert_eq!((s.poll(), r.poll()), (SUCCESS, FAILED));
    one(&mut w, &s, &r);
}

#[test]
fn cat_f45_late_messages_for_cleared_rooms_create_nothing() {
    let mut w = world();
    let (s, r) = w.open(7, &[3]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    // Another room lives meanwhile; none of it is about that one.
    let (other_s, other_r) = w.open(8, &[5]);
    w.close(&s, &r);
    let (p, d) = (w.p[0].endpoint.clone(), w.d[0].endpoint.clone());
    for status in ["0", "4"] {
        w.net.inject(&d, ["KV_STATUS", "7", status, "0", "late"].map(str::to_owned));
    }
    w.net.inject(&d, ["ABORT_ACK", "7", "0", "1"].map(str::to_owned));
    w.net.inject(&d, ["CHUNK_READY", "7", "0", "0", "1", "d", "0"].map(str::to_owned));
    w.net.inject(&p, ["ABORT", "7", "10.0.1.1", "7000", "5"].map(str::to_owned));
    w.run();
    assert_eq!((polls(&other_s), polls(&other_r)), (vec![2], vec![2]));
    w.close(&other_s, &other_r);
    w.assert_nothing_held();
    // And nothing of it shows in the next life.
    let (s, r) = w.open(7, &[4]);
    w.send(0, &s[0], &[1], 0, true);
    w.run();
    assert_eq!((s[0].poll(), r[0].poll()), (SUCCESS, SUCCESS));
    end(&mut w, &s, &r);
}

#[test]
fn cat_f45_a_cleared_room_that_still_holds_its_pages_hears_acks_only() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    w.clear_d(0, &r);
    w.run();
    let stale = w.d[0].stats.messages_stale.get();
    for status in ["0", "4"] {
        w.net.inject(&w.d[0].endpoint, ["KV_STATUS", "7", status, "0", "late"].map(str::to_owned));
    }
    w.run();
    assert_eq!(w.d[0].stats.messages_stale.get(), stale + 2);
    assert_eq!(reason(&r), "cleared in WaitingForInput, before the transfer ended");
    assert!(!r.releasable());
    w.p[0].transport.complete(op);
    w.run();
    assert!(r.releasable());
    w.clear_p(0, &s);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn cat_f64_metadata_for_a_stalled_prefill_fails_the_room_at_once() {
    let mut w = world();
    let (s, r) = (w.sender(0, 7), w.receiver(0, 7));
    w.run();
    let stall = w.net.rule(Action::Stall, |_| true);
    w.publish(0, &r, &[3], 0);
    w.run();
    assert_eq!(r.poll(), FAILED);
    assert!(reason(&r).contains("send_metadata to prefill 10.0.0.1:9000 failed"), "{}", reason(&r));
    assert!(r.releasable());
    w.net.remove_rule(stall);
    // The next room asks for the addresses anew, and registers again.
    w.advance(secs(31));
    let next = w.open(8, &[3]);
    w.send(0, &next.0[0], &[0], 0, true);
    w.run();
    assert_eq!(next.1[0].poll(), SUCCESS);
    assert_eq!(w.d[0].directory.fetches(), 2);
    w.close(&[s], &[r]);
    end(&mut w, &next.0, &next.1);
}

#[test]
fn cat_f64_a_status_for_a_stalled_decode_is_kept_in_order_and_holds_up_nobody() {
    let mut w = World::new(WorldSpec::of(kv_testkit::directory::Shape::tp(2, 2, 0), 2));
    let slow = w.d[0].endpoint.clone();
    let (s, r) = w.open(7, &[3]);
    let to = slow.clone();
    let stall = w.net.rule(Action::Stall, move |f| f.to == to);
    for (p, room) in s.iter().enumerate() {
        w.send(p, room, &[0], 0, true);
    }
    w.run();
    assert_eq!((polls(&s), polls(&r)), (vec![4, 4], vec![2, 4]));
    w.advance(secs(10));
    w.net.remove_rule(stall);
    w.advance(SECOND);
    assert_eq!(polls(&r), [4, 4]);
    end(&mut w, &s, &r);
}

#[test]
fn metadata_does_not_overtake_a_registration_that_waits() {
    let mut w = world();
    let (s, r) = (w.sender(0, 7), w.receiver(0, 7));
    // The registration finds the queue full; what follows would not.
    w.net.rule_times(1, Action::Stall, |_| true);
    w.run();
    assert_eq!(r.poll(), KvPoll::WaitingForInput);
    w.publish(0, &r, &[3], 0);
    w.run();
    assert_eq!(r.poll(), FAILED);
    assert!(reason(&r).ends_with("it takes no messages"), "{}", reason(&r));
    w.advance(secs(1));
    let next = w.open(8, &[3]);
    w.send(0, &next.0[0], &[0], 0, true);
    w.run();
    assert_eq!(next.1[0].poll(), SUCCESS);
    w.close(&[s], &[r]);
    end(&mut w, &next.0, &next.1);
}

#[test]
fn cat_f51_a_registration_that_was_given_up_is_sent_again() {
    let mut w = world();
    let stall = w.net.rule(Action::Stall, |_| true);
    let r = w.receiver(0, 6);
    w.run();
    w.advance(secs(31));
    w.net.remove_rule(stall);
    assert_eq!(w.d[0].shard.held().registered, 0);
    let (s, next) = w.open(7, &[3]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    assert_eq!(next[0].poll(), SUCCESS);
    w.clear_d(0, &r);
    end(&mut w, &s, &next);
}

#[test]
fn an_unreachable_prefill_fails_the_registration_and_is_looked_up_anew() {
    let mut w = world();
    w.net.rule_times(1, Action::Unreachable, |_| true);
    let r = w.receiver(0, 7);
    w.run();
    assert_eq!((r.poll(), reason(&r)), (FAILED, "registration to prefill 10.0.0.1:9000 failed".into()));
    let next = w.receiver(0, 8);
    w.run();
    assert_eq!((next.poll(), w.d[0].directory.fetches()), (KvPoll::WaitingForInput, 2));
    w.clear_d(0, &r);
    w.clear_d(0, &next);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn a_rough_network_never_breaks_a_rule() {
    for seed in 0..40 {
        let mut w = World::new(WorldSpec { seed, pages: 64, ..WorldSpec::default() });
        w.order = Some(Rng::new(seed));
        w.p[0].transport.set_policy(Policy::seeded(seed));
        w.net.set_latency(std::time::Duration::from_micros(50));
        let mut rng = Rng::new(seed ^ 77);
        // Register in peace: a lost registration is a refused room, tried above.
        let (s, r) = w.open(1000, &[63]);
        w.advance(SECOND);
        w.close(&s, &r);
        let micros = std::time::Duration::from_micros;
        w.net.set_faults(Faults { drop: 0.05, duplicate: 0.1, overtaken: 0.1, delay: micros(10)..micros(900) });
        let rooms: Vec<_> = (0..20).map(|n| (w.sender(0, n + 1), w.receiver(0, n + 1))).collect();
        w.advance(SECOND);
        for (i, (s, r)) in rooms.iter().enumerate() {
            w.publish(0, r, &[i as i32], 0);
            w.send(0, s, &[i as i32 + 20], 0, true);
            match rng.below(6) {
                0 => w.abort_d(0, r),
                1 => w.abort_p(0, s),
                _ => {}
            }
            w.advance(micros(rng.below(400)));
        }
        w.advance(secs(700));
        for (i, (s, r)) in rooms.iter().enumerate() {
            assert!(s.poll().is_terminal() && r.poll().is_terminal(), "seed {seed}, room {}", i + 1);
            if r.poll() == SUCCESS {
                assert_eq!(s.poll(), SUCCESS, "seed {seed}");
                w.assert_copied(0, &[i as i32 + 20], 0, &[i as i32]);
            }
            assert!(s.releasable() && r.releasable(), "seed {seed}");
            w.clear_p(0, s);
            w.clear_d(0, r);
        }
        w.advance(secs(700));
        w.assert_nothing_held();
        w.fabric.assert_no_premature_release();
    }
}
