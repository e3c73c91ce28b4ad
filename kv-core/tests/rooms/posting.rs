//! Per-destination progress lives in the chunk; a post is legal only from `Todo`.

use kv_core::ids::OpId;
use kv_core::room::*;
use kv_core::transport::Outcome;

use super::support::*;

#[test]
fn a_destination_is_posted_once() {
    let mut s = Sender::ours().with_metadata(2);
    s.on(SenderEvent::Enqueue(chunk(true)));
    assert!(s.room.wants_post(0, 0) && s.room.wants_post(0, 1));
    s.on(SenderEvent::Posted(0, 0, OpId(1)));
    assert!(!s.room.wants_post(0, 0) && s.room.wants_post(0, 1));
    assert_eq!(s.room.chunk(0).unwrap().progress(), [Progress::Posted(OpId(1)), Progress::Todo]);
    s.on(SenderEvent::Outcome(0, 0, Outcome::Done));
    assert!(!s.room.wants_post(0, 0));
}

#[test]
fn nothing_is_posted_for_a_chunk_that_is_not_current_or_does_not_exist() {
    let mut s = Sender::ours().with_metadata(1).with_posted(false);
    s.on(SenderEvent::Enqueue(chunk(true)));
    assert!(!s.room.wants_post(1, 0), "chunk 0 is not done (B2)");
    assert!(!s.room.wants_post(7, 0) && !s.room.wants_post(0, 7));
    assert_eq!(s.on(SenderEvent::Outcome(0, 0, Outcome::Done)), [SenderEffect::Drained, SenderEffect::Post(1, 0)]);
    assert!(s.room.wants_post(1, 0));
}

#[test]
#[should_panic(expected = "a post is legal only from Todo")]
fn posting_twice_is_a_bug_of_the_shard() {
    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    s.on(SenderEvent::Posted(0, 0, OpId(9)));
}

#[test]
fn no_post_after_a_terminal_state() {
    let mut s = Sender::ours().with_metadata(2);
    s.on(SenderEvent::Enqueue(chunk(true)));
    s.on(SenderEvent::Posted(0, 0, OpId(1)));
    s.on(SenderEvent::Rejected(0, 1, "no".into()));
    assert!(!s.room.wants_post(0, 1));
    assert_eq!(s.reason(), "Failed to send kv chunk 0 to 10.0.0.7:2: no");
    // What is in flight keeps its place.
    assert_eq!(s.room.chunk(0).unwrap().progress(), [Progress::Posted(OpId(1)), Progress::Quiet]);
}

#[test]
fn dummies_are_never_posted() {
    let mut s = Sender::ours();
    s.on(SenderEvent::Destination(destination(1, 2)));
    s.on(SenderEvent::Destination(dummy(2, 2)));
    let effects = s.on(SenderEvent::Enqueue(chunk(true)));
    assert_eq!(effects, [SenderEffect::Post(0, 0), SenderEffect::Changed]);
}

#[test]
fn a_second_outcome_of_a_write_changes_nothing() {
    let mut s = Sender::ours().with_metadata(2).with_posted(true);
    s.on(SenderEvent::Outcome(0, 0, Outcome::Done));
    assert_eq!(s.on(SenderEvent::Outcome(0, 0, failed(false, false))), []);
    assert_eq!(s.on(SenderEvent::Settlement(0, 0, SETTLED)), []);
    assert_eq!(s.room.poll(), kv_core::KvPoll::Transferring);
}
