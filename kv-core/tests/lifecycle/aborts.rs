//! Aborts from either side, in every state: what both sides show, what they give back, and who is told.

use kv_core::poll::KvPoll;
use kv_core::room::FailedStatusPolicy;

use super::support::*;

/// A room at a stage of its life; a write may be in flight.
fn at(stage: &str) -> (World, Room, Room) {
    let mut w = held_world(WorldSpec::default());
    let (s, r) = (w.sender(0, 7), w.receiver(0, 7));
    w.run();
    if stage == "resolved" {
        return (w, s, r);
    }
    w.publish(0, &r, &[4, 5], 1);
    w.run();
    match stage {
        "published" => {}
        "first of two in flight" => {
            w.send(0, &s, &[0], 0, false);
            w.send(0, &s, &[1], 1, true);
        }
        "between chunks" => {
            w.send(0, &s, &[0], 0, false);
            w.run();
            w.p[0].transport.complete_all();
        }
        "last in flight" => w.send(0, &s, &[0, 1], 0, true),
        "done" => {
            w.send(0, &s, &[0, 1], 0, true);
            w.run();
            w.p[0].transport.complete_all();
        }
        other => panic!("{other}"),
    }
    w.run();
    (w, s, r)
}

const STAGES: [&str; 6] =
    ["resolved", "published", "first of two in flight", "between chunks", "last in flight", "done"];

#[test]
fn cat_f13_cat_f27_decode_aborts_in_every_state() {
    for stage in STAGES {
        let (mut w, s, r) = at(stage);
        w.abort_d(0, &r);
        w.abort_d(0, &r);
        w.run();
        if stage == "done" {
            assert_eq!((s.poll(), r.poll()), (SUCCESS, SUCCESS));
            one(&mut w, &s, &r);
            continue;
        }
        assert_eq!((r.poll(), reason(&r)), (FAILED, "Aborted by AbortReq.".into()), "{stage}");
        let flying = !w.p[0].transport.in_flight().is_empty();
        assert_eq!(flying, stage.contains("in flight"));
        assert_eq!((r.releasable(), s.releasable()), (!flying, !flying), "{stage}");
        // An unarmed ABORT (no metadata) reaches prefill as well (F28).
        assert_eq!((s.poll(), reason(&s)), (FAILED, "Aborted by decode-side abort notification.".into()), "{stage}");
        assert!(w.p[0].transport.complete_all() <= 1, "{stage}: a chunk after the abort");
        w.run();
        assert!(r.releasable() && s.releasable(), "{stage}");
        let proven = u64::from(stage != "resolved");
        assert_eq!(w.d[0].stats.released_with_proof.get(), proven, "{stage}");
        one(&mut w, &s, &r);
    }
}

#[test]
fn r_c6_cat_f26_prefill_aborts_in_every_state_and_decode_hears_it() {
    for stage in STAGES {
        let (mut w, s, r) = at(stage);
        w.abort_p(0, &s);
        w.abort_p(0, &s);
        w.run();
        if stage == "done" {
            assert_eq!((s.poll(), r.poll()), (SUCCESS, SUCCESS));
            one(&mut w, &s, &r);
            continue;
        }
        if stage == "resolved" {
            // Nobody is known; the metadata is answered.
            assert_eq!(r.poll(), KvPoll::WaitingForInput);
            w.publish(0, &r, &[4], 0);
            w.run();
        }
        for room in [&s, &r] {
            assert_eq!((room.poll(), reason(room)), (FAILED, "Aborted by AbortReq.".into()), "{stage}");
        }
        let flying = stage.contains("in flight");
        assert_eq!((r.releasable(), s.releasable()), (!flying, !flying), "{stage}");
        w.p[0].transport.complete_all();
        w.run();
        assert!(r.releasable() && s.releasable(), "{stage}");
        one(&mut w, &s, &r);
    }
}

#[test]
fn cat_f27_clear_in_every_state_gives_everything_back() {
    for stage in STAGES {
        for decode_first in [true, false] {
            let (mut w, s, r) = at(stage);
            if decode_first {
                w.clear_d(0, &r)
            } else {
                w.clear_p(0, &s)
            }
            w.run();
            if decode_first {
                w.clear_p(0, &s)
            } else {
                w.clear_d(0, &r)
            }
            w.run();
            let wanted = if stage == "done" { SUCCESS } else { FAILED };
            assert_eq!((s.poll(), r.poll()), (wanted, wanted), "{stage}");
            w.p[0].transport.complete_all();
            w.run();
            assert!(s.releasable() && r.releasable(), "{stage}");
            w.assert_nothing_held();
            assert_eq!(w.p[0].freed.lock().unwrap().len(), 1, "{stage}: the number is free again");
            assert_eq!(w.d[0].freed.lock().unwrap().len(), 1, "{stage}: the number is free again");
        }
    }
}

#[test]
fn cat_f13_nothing_lands_in_pages_that_were_given_away() {
    for proof_first in [true, false] {
        let (mut w, s, r) = at("last in flight");
        let op = w.p[0].transport.only().id;
        w.abort_d(0, &r);
        w.run();
        if proof_first {
            w.p[0].transport.complete(op);
            w.run();
        }
        assert_eq!(r.releasable(), proof_first);
        if r.releasable() {
            // The engine gives them to another room the moment it may.
            w.d[0].guard_pages(&w.fabric, &[4, 5], "pages 4 and 5 belong to another room now");
        } else {
            w.p[0].transport.complete(op);
        }
        w.run();
        one(&mut w, &s, &r);
    }
}

#[test]
fn r_f3_the_ack_is_withheld_while_a_write_is_unresolved() {
    let (mut w, s, r) = at("last in flight");
    let op = w.p[0].transport.only().id;
    w.abort_d(0, &r);
    w.run();
    w.p[0].transport.unresolve(op);
    w.run();
    assert_eq!((w.p[0].stats.abort_acks_out.get(), w.p[0].shard.held().pending_acks), (0, 1));
    // Half a proof: the source may be read no more, the destination may still be written.
    w.p[0].transport.settle(op, true, false);
    w.run();
    assert_eq!((s.releasable(), r.releasable(), w.p[0].stats.abort_acks_out.get()), (true, false, 0));
    assert_eq!((w.p[0].shard.held().ops, w.p[0].stats.ops_retained.get()), (1, 1), "it is still held");
    w.advance(secs(30));
    assert_eq!((r.releasable(), w.d[0].stats.released_without_proof.get()), (true, 1));
    w.abandon();
}

#[test]
fn r_b2_at_once_between_two_of_ours_and_when_settled_towards_0523() {
    for (failed_status, at_once) in [(FailedStatusPolicy::AtOnce, true), (FailedStatusPolicy::WhenSettled, false)] {
        let mut w = held_world(WorldSpec { failed_status, ..WorldSpec::default() });
        let (s, r, op) = in_flight(&mut w);
        w.p[0].transport.unresolve(op);
        w.run();
        assert_eq!((s.poll(), r.poll() == FAILED), (FAILED, at_once));
        assert!(!s.releasable() && !r.releasable());
        assert_eq!(w.p[0].stats.abort_acks_out.get(), 0);
        w.p[0].transport.settle(op, true, true);
        w.run();
        assert_eq!(r.poll(), FAILED);
        assert!(reason(&r).contains("unresolved by the test"), "{}", reason(&r));
        assert!(s.releasable() && r.releasable());
        one(&mut w, &s, &r);
    }
}

#[test]
fn cat_f16_a_stale_chunk_of_a_failed_room_drains_nothing() {
    let (mut w, s, r) = at("first of two in flight");
    let op = w.p[0].transport.only().id;
    w.abort_d(0, &r);
    w.run();
    w.send(0, &s, &[2], 2, false);
    w.clear_p(0, &s);
    w.run();
    assert_eq!((w.p[0].stats.abort_acks_out.get(), r.releasable(), s.releasable()), (0, false, false));
    w.p[0].transport.complete(op);
    w.run();
    assert_eq!((w.p[0].stats.abort_acks_out.get(), r.releasable()), (1, true));
    w.clear_d(0, &r);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn cat_f19_an_abort_without_a_generation_gets_no_ack() {
    let (mut w, s, r) = at("published");
    w.net.inject(&w.p[0].endpoint, [&b"ABORT"[..], b"7", b"10.0.1.1", b"7000"]);
    w.p[0].stats.abort_acks_out.get();
    w.run();
    assert_eq!(s.poll(), FAILED);
    // Decode heard Failed and armed an ABORT of its own; that one alone is acked.
    assert_eq!((w.p[0].stats.aborts_in.get(), w.p[0].stats.abort_acks_out.get()), (2, 1));
    one(&mut w, &s, &r);
}

#[test]
fn cat_f24_an_abort_of_a_finished_or_unknown_room_is_acked_and_changes_nothing() {
    let (mut w, s, r) = at("done");
    for room in [&b"7"[..], b"8"] {
        w.net.inject(&w.p[0].endpoint, [&b"ABORT"[..], room, b"10.0.1.1", b"7000", b"99"]);
    }
    w.run();
    assert_eq!((s.poll(), r.poll()), (SUCCESS, SUCCESS));
    assert_eq!(w.p[0].stats.abort_acks_out.get(), 2);
    assert_eq!(w.d[0].stats.messages_stale.get(), 2);
    one(&mut w, &s, &r);
}

#[test]
fn cat_f25_the_handle_and_the_shard_agree_on_an_abort() {
    let (mut w, s, r) = at("published");
    w.abort_p(0, &s);
    w.run();
    assert_eq!(s.poll(), FAILED);
    w.send(0, &s, &[0, 1], 0, true);
    w.run();
    assert_eq!((s.poll(), w.p[0].transport.ops().len()), (FAILED, 0), "C1");
    one(&mut w, &s, &r);
}

#[test]
fn cat_f77_each_cause_has_its_own_counter() {
    let mut w = world();
    // One failed by the network, one aborted, one timed out, one that is fine.
    let (s, r) = (w.sender(0, 1), w.receiver(0, 1));
    w.run();
    w.publish(0, &r, &[0], 0);
    w.p[0].transport.script_next(kv_testkit::fake_transport::Verdict::Fail { src_quiet: true, dst_quiet: true });
    w.send(0, &s, &[0], 0, true);
    w.run();
    let aborted = w.sender(0, 2);
    w.abort_p(0, &aborted);
    w.abort_p(0, &aborted);
    let silent = w.sender(0, 3);
    let fine = w.open(4, &[1]);
    w.send(0, &fine.0[0], &[1], 0, true);
    w.run();
    w.jump(secs(300));
    let stats = &w.p[0].stats;
    assert_eq!(
        [stats.ops_failed.get(), stats.rooms_aborted.get(), stats.rooms_timed_out.get(), stats.ops_done.get()],
        [1, 1, 1, 1]
    );
    assert_eq!([stats.rooms_failed.get(), stats.rooms_succeeded.get(), stats.rooms_created.get()], [3, 1, 4]);
    [aborted, silent].iter().for_each(|s| w.clear_p(0, s));
    w.close(&[s], &[r]);
    end(&mut w, &fine.0, &fine.1);
}
