//! F6: a room number used again. Lives never mix.

use kv_core::poll::KvPoll;

use super::support::*;

#[test]
fn r_f6_a_new_life_does_not_reset_what_the_old_one_has_in_flight() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    w.p[0].transport.unresolve(op);
    w.run();
    w.clear_p(0, &s);
    w.run();
    // The number again on prefill; decode still holds the old pages.
    let s2 = w.sender(0, 7);
    w.run();
    assert_eq!((s2.poll(), r.releasable(), w.p[0].stats.abort_acks_out.get()), (KvPoll::Bootstrapping, false, 0));
    w.p[0].transport.settle(op, true, true);
    w.run();
    assert!(r.releasable(), "acked when the old life drained");
    assert_eq!(s2.poll(), KvPoll::Bootstrapping, "and the new one is not touched");
    w.clear_d(0, &r);
    w.run();
    let r2 = w.receiver(0, 7);
    w.run();
    w.publish(0, &r2, &[9], 0);
    w.send(0, &s2, &[3], 0, true);
    w.run();
    w.p[0].transport.complete_all();
    w.run();
    assert_eq!((s2.poll(), r2.poll()), (SUCCESS, SUCCESS));
    w.assert_copied(0, &[3], 0, &[9]);
    one(&mut w, &s2, &r2);
}

#[test]
fn r_f6_an_abort_of_the_new_life_waits_for_the_writes_of_the_old_one() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    w.p[0].transport.unresolve(op);
    w.run();
    w.clear_p(0, &s);
    let s2 = w.sender(0, 7);
    w.run();
    w.net.inject(&w.p[0].endpoint, ["ABORT", "7", "10.9.9.9", "1", "5"].map(str::to_owned));
    w.run();
    assert_eq!((s2.poll(), w.p[0].stats.abort_acks_out.get()), (FAILED, 0));
    w.clear_p(0, &s2);
    w.run();
    assert_eq!(w.p[0].shard.held().undrained, 1);
    w.p[0].transport.settle(op, true, true);
    w.run();
    assert_eq!(w.p[0].stats.abort_acks_out.get(), 2);
    w.clear_d(0, &r);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn r_f6_commands_of_an_old_handle_do_not_reach_the_new_life() {
    let mut w = world();
    let (s, r) = w.open(7, &[3]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    w.close(&s, &r);
    let (s2, r2) = w.open(7, &[4]);
    // The old handles go on talking.
    w.abort_p(0, &s[0]);
    w.send(0, &s[0], &[0], 0, true);
    w.clear_p(0, &s[0]);
    w.abort_d(0, &r[0]);
    w.publish(0, &r[0], &[5], 0);
    w.clear_d(0, &r[0]);
    w.run();
    assert_eq!((polls(&s2), polls(&r2)), (vec![2], vec![2]));
    w.send(0, &s2[0], &[1], 0, true);
    w.run();
    assert_eq!((polls(&s2), polls(&r2)), (vec![4], vec![4]));
    assert_eq!((s[0].poll(), r[0].poll()), (SUCCESS, SUCCESS));
    end(&mut w, &s2, &r2);
}

#[test]
fn cat_f40_a_live_number_is_refused_and_its_owner_not_touched() {
    let mut w = world();
    let (s, r) = w.open(7, &[3]);
    let (s2, r2) = (w.sender(0, 7), w.receiver(0, 7));
    w.run();
    assert_eq!(reason(&s2), "room 7 is in use: its sender was not cleared");
    assert_eq!(reason(&r2), "room 7 is in use: its receiver was not cleared");
    assert!(s2.releasable() && r2.releasable());
    // Clearing the refused ones does not clear the first ones.
    w.clear_p(0, &s2);
    w.clear_d(0, &r2);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    assert_eq!((polls(&s), polls(&r)), (vec![4], vec![4]));
    end(&mut w, &s, &r);
}

#[test]
fn cat_f45_a_failure_of_the_old_life_is_not_the_new_ones() {
    let mut w = world();
    let (s, r) = w.open(7, &[3]);
    w.abort_p(0, &s[0]);
    w.run();
    end(&mut w, &s, &r);
    let (s, r) = w.open(7, &[3]);
    assert_eq!((polls(&s), polls(&r)), (vec![2], vec![2]));
    assert_eq!((s[0].failure(), r[0].failure()), (None, None));
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    assert_eq!(polls(&r), [4]);
    end(&mut w, &s, &r);
}

#[test]
fn an_ack_of_an_older_generation_does_not_release_the_new_life() {
    let mut w = held_world(WorldSpec::default());
    w.net.rule(kv_testkit::net::Action::Hold, |f| is_tag(f, "ABORT_ACK"));
    let (s, r, op) = in_flight(&mut w);
    w.abort_d(0, &r);
    w.run();
    w.p[0].transport.complete(op);
    w.run();
    // Released by time; the ACK of generation 1 is still under way.
    w.advance(secs(30));
    w.close(&[s], &[r]);
    let (s2, r2, op2) = in_flight(&mut w);
    w.abort_d(0, &r2);
    w.run();
    w.net.release_all();
    w.run();
    assert!(!r2.releasable(), "the old life's ACK");
    assert_eq!(w.d[0].stats.messages_stale.get(), 1);
    w.p[0].transport.complete(op2);
    w.run();
    w.net.release_all();
    w.run();
    assert!(r2.releasable());
    one(&mut w, &s2, &r2);
}

#[test]
fn cat_f03_rooms_that_agree_in_their_low_bits_do_not_mix() {
    let mut w = world();
    let numbers = [7, 7 + 4096, 7 + (1 << 32), 7 + (1 << 62)];
    let rooms: Vec<_> = numbers.iter().map(|n| (w.sender(0, *n), w.receiver(0, *n))).collect();
    w.run();
    for (i, (_, r)) in rooms.iter().enumerate() {
        w.publish(0, r, &[i as i32], 0);
    }
    w.run();
    for (i, (s, _)) in rooms.iter().enumerate() {
        w.send(0, s, &[i as i32 + 8], 0, true);
        w.run();
        let done: Vec<_> = rooms.iter().map(|(_, r)| r.poll() == SUCCESS).collect();
        assert_eq!(done.iter().filter(|d| **d).count(), i + 1);
        w.assert_copied(0, &[i as i32 + 8], 0, &[i as i32]);
    }
    rooms.iter().for_each(|(s, r)| {
        w.clear_p(0, s);
        w.clear_d(0, r);
    });
    w.run();
    w.assert_nothing_held();
}
