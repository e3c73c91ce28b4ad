//! F1: outstanding is a set of tickets. A ticket removes only itself, and an unresolved outcome never removes it.

use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::transport::{Outcome, Settlement};

use super::support::*;

#[test]
fn r_f1_a_chunk_is_counted_before_its_first_post() {
    let mut s = Sender::ours().with_metadata(1);
    assert_eq!(s.room.outstanding(), 0);
    let effects = s.on(SenderEvent::Enqueue(chunk(true)));
    assert_eq!(s.room.outstanding(), 1);
    s.post_all(&effects);
    assert_eq!(s.room.outstanding(), 1);
}

#[test]
fn r_f1_an_unresolved_write_stays_counted_until_both_sides_are_proven() {
    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    s.on(SenderEvent::Outcome(0, 0, unresolved()));
    assert_eq!((s.room.poll(), s.room.outstanding()), (KvPoll::Failed, 1));
    let src = Settlement::Settled { src_quiet: true, dst_quiet: false };
    let dst = Settlement::Settled { src_quiet: false, dst_quiet: true };
    assert_eq!(s.on(SenderEvent::Settlement(0, 0, src)), [SenderEffect::Changed]);
    assert_eq!(s.room.outstanding(), 1);
    let effects = s.on(SenderEvent::Settlement(0, 0, dst));
    assert!(effects.contains(&SenderEffect::Drained));
    assert_eq!(s.room.outstanding(), 0);
}

#[test]
fn r_f1_the_death_of_the_peers_generation_is_proof_of_both() {
    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    s.on(SenderEvent::Outcome(0, 0, unresolved()));
    let effects = s.on(SenderEvent::Settlement(0, 0, Settlement::PeerGenerationDead));
    assert_eq!(effects, [SenderEffect::Drained, SenderEffect::Changed]);
}

#[test]
fn r_f1_cat_f16_a_chunk_skipped_in_a_failed_room_takes_nothing_away() {
    let mut s = Sender::ours().with_metadata(1).with_posted(false);
    s.on(SenderEvent::Enqueue(chunk(true)));
    s.on(SenderEvent::AbortedByDecode);
    assert_eq!(s.room.outstanding(), 1);
    // Chunks queued before and after the failure: neither drains anything.
    assert_eq!(s.on(SenderEvent::Enqueue(chunk(true))), []);
    assert_eq!(s.on(SenderEvent::NothingToPost(1, 0)), []);
    assert_eq!(s.on(SenderEvent::Outcome(1, 0, Outcome::Done)), []);
    assert_eq!(s.room.outstanding(), 1);
    let effects = s.on(SenderEvent::Outcome(0, 0, Outcome::Done));
    assert_eq!(effects, [SenderEffect::Drained, SenderEffect::Changed]);
}

#[test]
fn r_f1_a_failed_write_that_is_quiet_on_both_sides_discharges_at_once() {
    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    let text = "Failed to send kv chunk 0 to 10.0.0.7:1: ERR";
    assert_eq!(
        s.on(SenderEvent::Outcome(0, 0, failed(true, true))),
        [SenderEffect::Drained, status(1, KvPoll::Failed, Some(text)), SenderEffect::Changed]
    );
}

#[test]
fn r_f2_cat_f17_one_error_does_not_release_its_siblings() {
    let mut s = Sender::ours().with_metadata(3).with_posted(true);
    s.on(SenderEvent::Outcome(0, 0, failed(true, true)));
    assert_eq!((s.room.poll(), s.room.outstanding(), s.room.releasable()), (KvPoll::Failed, 1, false));
    assert_eq!(s.on(SenderEvent::Outcome(0, 1, Outcome::Done)), []);
    assert!(!s.room.releasable());
    let effects = s.on(SenderEvent::Outcome(0, 2, Outcome::Done));
    assert_eq!(effects, [SenderEffect::Drained, SenderEffect::Changed]);
    assert!(s.room.releasable());
}

#[test]
fn r_f2_what_was_never_posted_needs_no_proof() {
    let mut s = Sender::ours().with_metadata(2);
    s.on(SenderEvent::Enqueue(chunk(true)));
    let effects = s.on(SenderEvent::Abort);
    assert!(effects.contains(&SenderEffect::Drained));
    assert_eq!((s.room.outstanding(), s.room.releasable()), (0, true));
    assert!(!s.room.wants_post(0, 0) && !s.room.wants_post(0, 1));
}

#[test]
fn drained_is_said_once_a_room() {
    let mut s = Sender::ours().with_metadata(2).with_posted(true);
    let mut effects = s.on(SenderEvent::Outcome(0, 0, unresolved()));
    effects.extend(s.on(SenderEvent::Outcome(0, 1, unresolved())));
    effects.extend(s.on(SenderEvent::Settlement(0, 0, SETTLED)));
    effects.extend(s.on(SenderEvent::Settlement(0, 0, SETTLED)));
    assert!(!effects.contains(&SenderEffect::Drained));
    let effects = s.on(SenderEvent::Settlement(0, 1, SETTLED));
    assert_eq!(effects.iter().filter(|e| **e == SenderEffect::Drained).count(), 1);
    assert_eq!(s.on(SenderEvent::Settlement(0, 1, SETTLED)), []);
}
