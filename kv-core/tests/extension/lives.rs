//! F6: what is left of an old life never reaches the new one. Each with a negative control: a peer of 0.5.23 names no
//! life, and there the old message is taken for the new life's.

use kv_core::poll::KvPoll;
use kv_core::room::ReleasePolicy;
use kv_testkit::net::Action;

use super::*;

/// Decode gives pages back by time, as towards 0.5.23: only so can an old life's message be later than its release.
fn by_time(spec: WorldSpec) -> WorldSpec {
    WorldSpec { release: ReleasePolicy::AckOrTimeout(secs(30)), waiting_timeout: secs(60), ..spec }
}

/// Room 7 succeeds on prefill, and its Success is under way when decode has given up and both sides have cleared.
fn with_a_late_success(spec: WorldSpec) -> World {
    let mut w = World::new(by_time(spec));
    let rule = w.net.rule(Action::Hold, is_status);
    let (s, r) = w.open(7, &[4]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    w.advance(secs(60));
    assert_eq!((polls(&s), polls(&r)), (vec![4], vec![0]));
    w.advance(secs(30));
    assert!(r[0].releasable());
    w.close(&s, &r);
    w.net.remove_rule(rule);
    w
}

#[test]
fn r_f6_a_late_success_of_life_1_never_completes_life_2() {
    let mut w = with_a_late_success(WorldSpec::default());
    let (s, r) = w.open(7, &[5]);
    let stale = w.d[0].stats.messages_stale.get();
    w.net.release_all();
    w.run();
    assert_eq!((polls(&r), w.d[0].stats.messages_stale.get()), (vec![2], stale + 1));
    w.send(0, &s[0], &[1], 0, true);
    w.run();
    assert_eq!(polls(&r), [4]);
    w.assert_copied(0, &[1], 0, &[5]);
    end(&mut w, &s, &r);
}

#[test]
fn r_f6_negative_control_a_late_success_of_0_5_23_is_taken_for_the_new_lifes() {
    let mut w = with_a_late_success(old_prefill());
    let (s, r) = w.open(7, &[5]);
    w.net.release_all();
    w.run();
    assert_eq!(polls(&r), [4]);
    w.assert_untouched(0, &[5]);
    w.abort_p(0, &s[0]);
    end(&mut w, &s, &r);
}

/// Room 7 was aborted by decode, which gave its pages back by time, and the ABORT is still under way.
fn with_a_late_abort(spec: WorldSpec) -> World {
    let mut w = World::new(by_time(spec));
    let rule = w.net.rule(Action::Hold, is_abort);
    let (s, r) = w.open(7, &[4]);
    w.abort_d(0, &r[0]);
    w.run();
    w.advance(secs(30));
    assert!(r[0].releasable());
    w.abort_p(0, &s[0]);
    w.close(&s, &r);
    w.net.remove_rule(rule);
    w
}

#[test]
fn r_f6_a_late_abort_of_life_1_never_kills_life_2() {
    let mut w = with_a_late_abort(WorldSpec::default());
    let spy = Spy::on(&w);
    let (s, r) = w.open(7, &[5]);
    w.net.release_all();
    w.run();
    assert_eq!((polls(&s), polls(&r)), (vec![2], vec![2]));
    assert_eq!(w.p[0].stats.rooms_aborted.get(), 1, "the abort() of life 1 only");
    // It is acked all the same, as the old life: whoever still holds its pages may let them go.
    let (ack, first) = (extension(&spy.last(is_ack).frames).unwrap(), r[0].life());
    assert!(ack.room_generation.is_some_and(|life| life < first));
    w.send(0, &s[0], &[1], 0, true);
    w.run();
    assert_eq!((polls(&s), polls(&r)), (vec![4], vec![4]));
    end(&mut w, &s, &r);
}

#[test]
fn r_f6_negative_control_a_late_abort_of_0_5_23_kills_the_new_life() {
    let mut w = with_a_late_abort(WorldSpec { decode_ext: false, ..WorldSpec::default() });
    let (s, r) = w.open(7, &[5]);
    w.net.release_all();
    w.run();
    assert_eq!(polls(&s), [0]);
    end(&mut w, &s, &r);
}

/// A repeated or late ABORT of life 1 reaches a sender that has not heard of life 2 yet.
#[test]
fn r_f6_a_repeated_abort_of_life_1_never_kills_a_sender_that_waits_for_life_2() {
    let mut w = world();
    let spy = Spy::on(&w);
    let (s, r) = w.open(7, &[4]);
    w.abort_d(0, &r[0]);
    w.run();
    end(&mut w, &s, &r);
    let s2 = w.sender(0, 7);
    w.run();
    w.net.inject(&w.p[0].endpoint, spy.last(is_abort).frames);
    w.run();
    assert_eq!(s2.poll(), KvPoll::Bootstrapping);
    let r2 = w.receiver(0, 7);
    w.run();
    w.publish(0, &r2, &[5], 1);
    w.send(0, &s2, &[1], 0, true);
    w.run();
    assert_eq!((s2.poll(), r2.poll()), (SUCCESS, SUCCESS));
    one(&mut w, &s2, &r2);
}

/// The metadata of a life that is over, and a sender that waits for the next one.
fn with_late_metadata(spec: WorldSpec) -> (World, Room) {
    let mut w = World::new(spec);
    let spy = Spy::on(&w);
    let (s, r) = w.open(7, &[4]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    w.close(&s, &r);
    let s2 = w.sender(0, 7);
    w.send(0, &s2, &[1], 0, true);
    w.run();
    w.net.inject(&w.p[0].endpoint, spy.last(is_metadata).frames);
    w.run();
    (w, s2)
}

#[test]
fn r_f6_late_metadata_of_life_1_never_directs_life_2() {
    let (mut w, s2) = with_late_metadata(WorldSpec::default());
    assert_eq!((s2.poll(), w.p[0].stats.messages_stale.get()), (KvPoll::Bootstrapping, 1));
    let r2 = w.receiver(0, 7);
    w.run();
    w.publish(0, &r2, &[5], 1);
    w.run();
    assert_eq!((s2.poll(), r2.poll()), (SUCCESS, SUCCESS));
    w.assert_copied(0, &[1], 0, &[5]);
    w.assert_copied(0, &[0], 0, &[4]);
    one(&mut w, &s2, &r2);
}

#[test]
fn r_f6_negative_control_late_metadata_of_0_5_23_directs_the_new_life() {
    let (mut w, s2) = with_late_metadata(WorldSpec { decode_ext: false, ..WorldSpec::default() });
    assert_eq!(s2.poll(), SUCCESS);
    w.assert_copied(0, &[1], 0, &[4]);
    w.clear_p(0, &s2);
    w.run();
}

/// An ACK says that nothing of a life can land any more, so metadata that the ABORT overtook must not count any more.
#[test]
fn r_f6_metadata_that_its_abort_overtook_is_dead() {
    for (spec, writes) in
        [(WorldSpec::default(), false), (WorldSpec { decode_ext: false, ..WorldSpec::default() }, true)]
    {
        let mut w = World::new(spec);
        let rule = w.net.rule(Action::Hold, is_metadata);
        let r = w.receiver(0, 7);
        w.run();
        w.publish(0, &r, &[4], 1);
        w.run();
        w.abort_d(0, &r);
        w.run();
        assert!(r.releasable(), "acked: nothing was outstanding");
        w.net.remove_rule(rule);
        w.net.release_all();
        let s = w.sender(0, 7);
        w.send(0, &s, &[0], 0, true);
        w.run();
        if writes {
            // Negative control: into pages that decode has given back.
            w.assert_copied(0, &[0], 0, &[4]);
        } else {
            w.assert_untouched(0, &[4]);
            assert_eq!(s.poll(), KvPoll::Bootstrapping);
        }
        w.abort_p(0, &s);
        one(&mut w, &s, &r);
    }
}

/// Decode is through with a number before prefill has cleared it, and uses it again.
#[test]
fn r_f6_a_number_is_used_again_at_once_on_both_sides() {
    for fails in [false, true] {
        let mut w = world();
        let (s, r) = w.open(7, &[4]);
        match fails {
            false => w.send(0, &s[0], &[0], 0, true),
            true => w.abort_d(0, &r[0]),
        }
        w.run();
        w.clear_d(0, &r[0]);
        let r2 = w.receiver(0, 7);
        w.run();
        w.publish(0, &r2, &[5], 1);
        w.run();
        assert_eq!((s[0].poll() as u8, r2.poll()), (if fails { 0 } else { 4 }, KvPoll::WaitingForInput));
        w.clear_p(0, &s[0]);
        let s2 = w.sender(0, 7);
        w.send(0, &s2, &[1], 0, true);
        w.run();
        assert_eq!((s2.poll(), r2.poll()), (SUCCESS, SUCCESS), "fails: {fails}");
        w.assert_copied(0, &[1], 0, &[5]);
        one(&mut w, &s2, &r2);
    }
}

/// The ABORT of the newer life stops the newer life's metadata, and not the sender of the older one.
#[test]
fn r_f6_an_abort_of_life_2_waits_for_its_own_sender() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    // Decode's first life ends in the dark: its ABORT is lost. Its pages are held.
    w.net.rule_times(1, Action::Drop, is_abort);
    w.abort_d(0, &r);
    w.clear_d(0, &r);
    w.run();
    let r2 = w.receiver(0, 7);
    w.run();
    w.publish(0, &r2, &[9], 1);
    w.run();
    assert!(reason(&s).contains("began room 7 anew"), "{}", reason(&s));
    w.abort_d(0, &r2);
    w.run();
    assert!(r2.releasable(), "nothing was ever written for it");
    assert!(!r.releasable(), "the first life's write is under way");
    w.p[0].transport.complete(op);
    w.clear_p(0, &s);
    w.clear_d(0, &r2);
    w.run();
    // The sender of life 2 hears that nobody waits for it.
    let s2 = w.sender(0, 7);
    w.run();
    assert_eq!(s2.poll(), FAILED);
    w.clear_p(0, &s2);
    // The lost ABORT goes out again, and now there is proof.
    w.advance(secs(30));
    assert!(r.releasable());
    w.assert_nothing_held();
}

#[test]
fn r_f6_what_is_remembered_of_lives_is_bounded_in_number_and_time() {
    let limits = kv_core::Limits { max_early_rooms: 8, ..Default::default() };
    let mut w = World::new(WorldSpec { limits, ..WorldSpec::default() });
    for room in 1..=20 {
        let (s, r) = w.open(room, &[4]);
        w.send(0, &s[0], &[0], 0, true);
        w.run();
        w.close(&s, &r);
    }
    assert_eq!(w.p[0].shard.remembered(), 8);
    w.advance(secs(700));
    assert_eq!(w.p[0].shard.remembered(), 0);
    w.assert_nothing_held();
}
