//! Metadata that comes before its sender: kept for a while, bounded, answered.

use kv_core::Limits;
use kv_core::poll::KvPoll;

use super::support::*;

fn publish(w: &mut World, d: usize, room: u64) -> Room {
    let r = w.receiver(d, room);
    w.run();
    w.publish(d, &r, &[3], 0);
    w.run();
    r
}

#[test]
fn early_metadata_waits_for_its_sender() {
    let mut w = world();
    let r = publish(&mut w, 0, 7);
    assert_eq!(w.p[0].shard.held().early, 1);
    let s = w.sender(0, 7);
    w.run();
    assert_eq!((s.poll(), w.p[0].shard.held().early), (KvPoll::WaitingForInput, 0));
    w.send(0, &s, &[0], 0, true);
    w.run();
    assert_eq!(r.poll(), SUCCESS);
    one(&mut w, &s, &r);
}

#[test]
fn cat_f28_metadata_that_nobody_comes_for_expires_and_decode_is_told() {
    let mut w = World::new(WorldSpec { early_timeout: secs(60), ..WorldSpec::default() });
    let r = publish(&mut w, 0, 7);
    w.advance(secs(59));
    assert_eq!(r.poll(), KvPoll::WaitingForInput);
    w.advance(secs(1));
    assert_eq!((r.poll(), reason(&r)), (FAILED, "prefill made no sender for room 7 within 60.0s".into()));
    assert_eq!(w.p[0].stats.early_expired.get(), 1);
    assert!(r.releasable());
    w.clear_d(0, &r);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn r_h2_early_rooms_are_bounded() {
    let limits = Limits { max_early_rooms: 3, ..Limits::default() };
    let mut w = World::new(WorldSpec { limits, ..WorldSpec::default() });
    let rooms: Vec<_> = (1..=5).map(|n| publish(&mut w, 0, n)).collect();
    assert_eq!((w.p[0].shard.held().early, w.p[0].stats.messages_over_limit.get()), (3, 2));
    w.advance(secs(300));
    assert_eq!(polls(&rooms), [0; 5]);
    rooms.iter().for_each(|r| w.clear_d(0, r));
    w.run();
    w.assert_nothing_held();
}

#[test]
fn r_h2_rooms_that_found_their_sender_leave_no_deadlines_behind() {
    let mut w = world();
    for n in 1..=3000 {
        let r = publish(&mut w, 0, n);
        let s = w.sender(0, n);
        w.send(0, &s, &[0], 0, true);
        w.run();
        assert_eq!(r.poll(), SUCCESS);
        w.clear_p(0, &s);
        w.clear_d(0, &r);
        w.run();
    }
    w.assert_nothing_held();
    let (p, d) = (w.p[0].shard.pending_deadlines(), w.d[0].shard.pending_deadlines());
    assert!(p <= 2100 && d <= 1100, "{p} and {d} deadlines for no rooms");
}

#[test]
fn cat_f28_an_abort_before_the_sender_exists_reaches_it() {
    let mut w = world();
    let r = publish(&mut w, 0, 7);
    w.abort_d(0, &r);
    w.run();
    assert!(r.releasable(), "acked: nothing was ever posted");
    let s = w.sender(0, 7);
    w.run();
    assert_eq!((s.poll(), reason(&s)), (FAILED, "Aborted by decode-side abort notification.".into()));
    one(&mut w, &s, &r);
}

#[test]
fn an_abort_of_one_decode_is_told_to_the_others_that_came_early() {
    let shape = kv_testkit::directory::Shape { mla: true, ..kv_testkit::directory::Shape::tp(1, 2, 0) };
    let mut w = World::new(WorldSpec::of(shape, 2));
    let (a, b) = (publish(&mut w, 0, 7), publish(&mut w, 1, 7));
    w.abort_d(0, &a);
    w.run();
    assert_eq!((b.poll(), reason(&b)), (FAILED, "Aborted by decode-side abort notification.".into()));
    let s = w.sender(0, 7);
    w.run();
    assert_eq!(s.poll(), FAILED);
    end(&mut w, &[s], &[a, b]);
}

#[test]
fn cat_f46_the_reason_of_a_refused_peer_outlives_decodes_abort() {
    let mut w = World::new(WorldSpec { tune_decode: |s| s.dcp_size = 2, ..WorldSpec::default() });
    // Refused, told, and aborted by decode for that: the sender still learns the cause.
    let r = publish(&mut w, 0, 7);
    assert_eq!((r.poll(), w.p[0].stats.aborts_in.get()), (FAILED, 1));
    let s = w.sender(0, 7);
    w.run();
    assert_eq!(reason(&s), reason(&r));
    one(&mut w, &s, &r);
}

#[test]
fn early_metadata_of_an_unregistered_decode_is_answered() {
    let mut w = world();
    let register = w.net.rule_times(1, kv_testkit::net::Action::Drop, |_| true);
    let r = publish(&mut w, 0, 7);
    w.net.remove_rule(register);
    assert_eq!(r.poll(), FAILED);
    let text = r#"decode "decode-0" is not registered with this prefill rank: register, then send metadata"#;
    assert_eq!(reason(&r), text);
    w.clear_d(0, &r);
    w.run();
    w.advance(secs(300));
    w.assert_nothing_held();
}
