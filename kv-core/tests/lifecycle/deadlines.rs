//! Bootstrap, waiting and release deadlines.

use kv_core::control::{ControlError, ControlEvent, ControlPlane, Multipart};
use kv_core::net::Endpoint;
use kv_core::poll::KvPoll;
use kv_core::room::ReleasePolicy;
use kv_testkit::directory::Answer;

use super::support::*;

#[test]
fn cat_f59_r_c8_no_metadata_by_the_deadline_fails_the_room() {
    let mut w = world();
    let s = w.sender(0, 7);
    w.run();
    w.jump(secs(299));
    assert_eq!(s.poll(), KvPoll::Bootstrapping);
    w.advance(secs(1));
    assert_eq!(s.poll(), FAILED);
    assert!(reason(&s).starts_with("Request 7 timed out after 300.0s in KVPoll.Bootstrapping"), "{}", reason(&s));
    assert_eq!(w.p[0].stats.rooms_timed_out.get(), 1);
    // C6, F29: whoever comes later is told why.
    let r = w.receiver(0, 7);
    w.run();
    w.publish(0, &r, &[3], 0);
    w.run();
    assert_eq!((r.poll(), reason(&r)), (FAILED, reason(&s)));
    assert!(r.releasable());
    one(&mut w, &s, &r);
}

#[test]
fn cat_f59_after_the_metadata_the_bootstrap_deadline_is_void() {
    let mut w = World::new(WorldSpec { waiting_timeout: secs(10_000), ..WorldSpec::default() });
    let (s, r) = w.open(7, &[3]);
    w.jump(secs(1000));
    assert_eq!((s[0].poll(), r[0].poll()), (KvPoll::WaitingForInput, KvPoll::WaitingForInput));
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    assert_eq!(r[0].poll(), SUCCESS);
    end(&mut w, &s, &r);
}

#[test]
fn cat_f29_metadata_after_prefills_deadline_is_refused_also_when_the_sender_is_cleared() {
    let mut w = world();
    let s = w.sender(0, 7);
    w.run();
    w.jump(secs(300));
    w.clear_p(0, &s);
    let r = w.receiver(0, 7);
    w.run();
    w.publish(0, &r, &[3], 0);
    w.run();
    assert_eq!(r.poll(), FAILED);
    assert!(reason(&r).contains("KVPoll.Bootstrapping"), "{}", reason(&r));
    w.clear_d(0, &r);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn cat_f03_a_lost_success_ends_in_a_named_failure() {
    let mut w = world();
    w.net.rule_times(1, kv_testkit::net::Action::Drop, |f| is_tag(f, "KV_STATUS"));
    let (s, r) = w.open(7, &[3]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    assert_eq!((s[0].poll(), r[0].poll()), (SUCCESS, KvPoll::WaitingForInput));
    w.advance(secs(300));
    assert_eq!(r[0].poll(), FAILED);
    assert!(reason(&r[0]).ends_with("no completion from prefill rank 0"), "{}", reason(&r[0]));
    // Prefill has nothing outstanding: it acks, and the pages come back by proof.
    assert!(r[0].releasable());
    assert_eq!((s[0].poll(), w.d[0].stats.released_with_proof.get()), (SUCCESS, 1));
    end(&mut w, &s, &r);
}

#[test]
fn r_d5_completion_in_the_step_of_the_deadline_wins() {
    let mut w = world();
    let (s, r) = w.open(7, &[3]);
    w.send(0, &s[0], &[0], 0, true);
    w.d[0].stopped = true;
    w.run();
    w.clock.advance(secs(300));
    w.d[0].stopped = false;
    w.run();
    assert_eq!(r[0].poll(), SUCCESS);
    end(&mut w, &s, &r);
}

#[test]
fn r_d5_completion_wins_also_behind_a_thousand_other_messages() {
    let mut w = world();
    let (s, r) = w.open(7, &[3]);
    w.d[0].stopped = true;
    for _ in 0..1000 {
        w.net.inject(&w.d[0].endpoint, [&b"KV_STATUS"[..], b"99", b"4", b"0", b""]);
    }
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    w.clock.advance(secs(300));
    w.d[0].stopped = false;
    w.run();
    assert_eq!(r[0].poll(), SUCCESS);
    assert_eq!(w.d[0].stats.messages_stale.get(), 1000);
    end(&mut w, &s, &r);
}

#[test]
fn metadata_in_the_step_of_prefills_deadline_wins_too() {
    let mut w = World::new(WorldSpec { waiting_timeout: secs(9000), ..WorldSpec::default() });
    let (s, r) = (w.sender(0, 7), w.receiver(0, 7));
    w.run();
    w.p[0].stopped = true;
    for _ in 0..1000 {
        w.net.inject(&w.p[0].endpoint, [&b"ABORT"[..], b"99"]);
    }
    w.publish(0, &r, &[3], 0);
    w.run();
    w.clock.advance(secs(300));
    w.p[0].stopped = false;
    w.run();
    assert_eq!(s.poll(), KvPoll::WaitingForInput);
    w.send(0, &s, &[0], 0, true);
    w.run();
    one(&mut w, &s, &r);
}

/// Always has more messages than fit into a step.
struct Flood;

impl ControlPlane for Flood {
    fn send(&mut self, _: &Endpoint, _: Multipart) -> Result<(), ControlError> {
        Ok(())
    }
    fn recv(&mut self, max: usize, out: &mut Vec<ControlEvent>) {
        let abort = || ["ABORT", "99"].into_iter().map(Into::into).collect();
        out.extend((0..max).map(|_| ControlEvent::Message(abort())));
    }
    fn close(&mut self, _: &Endpoint) {}
}

#[test]
fn a_flood_of_messages_does_not_keep_deadlines_away_for_ever() {
    let mut w = world();
    let s = w.sender(0, 7);
    w.run();
    let now = w.clock.advance(secs(300));
    let steps = (1..).find(|_| {
        w.p[0].shard.step(now, &mut Flood, &mut Vec::new());
        s.poll() == FAILED
    });
    assert_eq!(steps, Some(65));
    w.run();
    w.clear_p(0, &s);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn cat_f20_r_f4_pages_come_back_at_the_release_timeout_counted_when_prefill_is_dead() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    w.p[0].stopped = true;
    w.abort_d(0, &r);
    w.run();
    w.advance(secs(29));
    assert!(!r.releasable());
    w.advance(secs(1));
    assert!(r.releasable());
    let count = |w: &World| (w.d[0].stats.released_without_proof.get(), w.d[0].stats.released_with_proof.get());
    assert_eq!(count(&w), (1, 0));
    // An ACK after it: no effect, no second release.
    w.p[0].stopped = false;
    w.p[0].transport.complete(op);
    w.run();
    assert_eq!(count(&w), (1, 0));
    assert_eq!(w.d[0].stats.messages_stale.get() + w.d[0].stats.protocol_violations.get(), 1);
    one(&mut w, &s, &r);
}

#[test]
fn r_f4_with_proof_as_policy_no_time_is_enough() {
    let mut w = held_world(WorldSpec { release: ReleasePolicy::Proof, ..WorldSpec::default() });
    let (s, r, op) = in_flight(&mut w);
    w.abort_d(0, &r);
    w.run();
    w.advance(secs(100_000));
    assert_eq!((r.poll(), r.releasable()), (FAILED, false));
    w.p[0].transport.complete(op);
    w.run();
    assert!(r.releasable());
    one(&mut w, &s, &r);
}

#[test]
fn cat_f06_a_write_that_never_ends_is_reported_and_its_pages_stay_held() {
    let mut w = held_world(WorldSpec { release: ReleasePolicy::Proof, ..WorldSpec::default() });
    let (s, r, op) = in_flight(&mut w);
    w.advance(secs(300));
    assert_eq!((s.poll(), r.poll()), (FAILED, FAILED));
    assert!(reason(&r).contains("no completion from prefill rank 0"));
    assert!(!s.releasable() && !r.releasable());
    w.p[0].transport.complete(op);
    w.run();
    assert!(s.releasable() && r.releasable());
    one(&mut w, &s, &r);
}

#[test]
fn waiting_for_input_without_metadata_has_no_deadline() {
    let mut w = world();
    let r = w.receiver(0, 7);
    w.run();
    w.advance(secs(10_000));
    assert_eq!(r.poll(), KvPoll::WaitingForInput);
    w.clear_d(0, &r);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn a_refused_lookup_fails_the_room_with_the_directorys_reason() {
    let mut w = world();
    w.d[0].directory.answer("p:8998", Answer::Refused("no prefill at p:8998".into()));
    let r = w.receiver(0, 7);
    w.run();
    assert_eq!((r.poll(), reason(&r), r.releasable()), (FAILED, "no prefill at p:8998".into(), true));
    w.clear_d(0, &r);
    w.run();
    w.assert_nothing_held();
}
