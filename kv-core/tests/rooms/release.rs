//! F3, F4: pages are free by proof, or by a policy that says so.

use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::transport::{Outcome, Settlement};

use super::support::*;

const PROVEN: ReceiverEffect = ReceiverEffect::Released { proven: true };

fn armed(ranks: u32) -> Receiver {
    let mut r = Receiver::default_policy().with_peers(ranks).published();
    r.on(ReceiverEvent::Abort);
    assert_eq!((r.room.armed_generation(), r.room.releasable()), (Some(1), false));
    r
}

#[test]
fn r_f4_cat_f13_pages_wait_for_every_contacted_rank() {
    let mut r = armed(3);
    assert_eq!(r.on(ack(2, 1)), []);
    assert_eq!(r.on(ack(2, 1)), [], "a duplicate");
    assert_eq!(r.on(ack(0, 1)), []);
    assert!(!r.room.releasable());
    assert_eq!(r.on(ack(1, 1)), [PROVEN]);
    assert!(r.room.releasable());
}

#[test]
fn r_f4_dummies_were_contacted_too() {
    let mut r = Receiver::default_policy();
    r.on(ReceiverEvent::Peers(Ok(peers_of(vec![record(0, false), record(1, true)], 1))));
    let mut r = r.published();
    r.on(ReceiverEvent::Abort);
    assert_eq!(r.on(ack(0, 1)), []);
    assert_eq!(r.on(ack(1, 1)), [PROVEN]);
}

#[test]
fn r_f4_acks_of_another_generation_or_rank_do_not_count() {
    let mut r = armed(1);
    assert_eq!(r.on(ack(0, 0)), [ReceiverEffect::Violation("ABORT_ACK of another generation")]);
    assert_eq!(r.on(ack(0, 2)), [ReceiverEffect::Violation("ABORT_ACK of another generation")]);
    assert_eq!(r.on(ack(7, 1)), [ReceiverEffect::Violation("ABORT_ACK from a prefill rank that was not contacted")]);
    assert!(!r.room.releasable());
}

#[test]
fn r_f4_the_timeout_releases_without_proof_and_says_so() {
    let mut r = armed(2);
    r.on(ack(0, 1));
    r.now = secs(29);
    assert_eq!(r.timeout(), []);
    r.now = secs(30);
    assert_eq!(r.room.unacked().map(|r| r.0).collect::<Vec<_>>(), [1]);
    assert_eq!(r.timeout(), [ReceiverEffect::Released { proven: false }]);
    assert_eq!(r.timeout(), []);
}

#[test]
fn cat_f20_cat_f21_an_ack_after_the_timeout_releases_nothing_again() {
    let mut r = armed(1);
    r.now = secs(30);
    r.timeout();
    assert_eq!(r.on(ack(0, 1)), [ReceiverEffect::Stale]);
    // And the other way round.
    let mut r = armed(1);
    r.now = secs(30);
    assert_eq!(r.on(ack(0, 1)), [PROVEN]);
    assert_eq!(r.timeout(), []);
}

#[test]
fn r_f4_with_proof_only_no_time_releases() {
    let mut r = Receiver::new(ReleasePolicy::Proof).with_peers(1).published();
    r.on(ReceiverEvent::Abort);
    assert_eq!((r.room.poll_timeout(), r.room.awaits_proof()), (None, true));
    r.now = secs(1_000_000);
    assert_eq!((r.timeout(), r.room.releasable()), (vec![], false));
    assert_eq!(r.on(ack(0, 1)), [PROVEN]);
    assert!(!r.room.awaits_proof());
}

#[test]
fn nothing_is_held_when_nobody_knows_the_pages() {
    let mut r = Receiver::default_policy().with_peers(2);
    let effects = r.on(ReceiverEvent::Abort);
    assert_eq!(effects, [ReceiverEffect::Abort { contacted: 2, generation: None }, ReceiverEffect::Changed]);
    assert!(r.room.releasable());
}

#[test]
fn success_frees_the_pages_on_both_sides() {
    let mut r = Receiver::default_policy().with_peers(1).published();
    r.on(success(0));
    assert!(r.room.releasable());
    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    assert!(!s.room.releasable());
    s.on(SenderEvent::Outcome(0, 0, Outcome::Done));
    assert!(s.room.releasable());
}

#[test]
fn cat_f12_source_pages_are_free_once_after_the_last_write() {
    let mut s = Sender::ours().with_metadata(2).with_posted(true);
    s.on(SenderEvent::Outcome(0, 1, Outcome::Done));
    assert!(!s.room.releasable());
    s.on(SenderEvent::Outcome(0, 0, Outcome::Done));
    assert!(s.room.releasable());
}

#[test]
fn source_pages_need_only_the_source_proven() {
    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    s.on(SenderEvent::Outcome(0, 0, failed(true, false)));
    assert_eq!((s.room.releasable(), s.room.outstanding()), (true, 1), "free here, and no ACK");

    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    s.on(SenderEvent::Outcome(0, 0, failed(false, true)));
    assert!(!s.room.releasable());
    let src = Settlement::Settled { src_quiet: true, dst_quiet: false };
    s.on(SenderEvent::Settlement(0, 0, src));
    assert_eq!((s.room.releasable(), s.room.outstanding()), (true, 0));
}

#[test]
fn r_f3_an_abort_before_anything_was_posted_is_drained() {
    let mut s = Sender::ours().with_metadata(1);
    s.on(SenderEvent::AbortedByDecode);
    assert_eq!((s.room.poll(), s.room.outstanding(), s.room.releasable()), (KvPoll::Failed, 0, true));
}

#[test]
fn the_handle_hears_of_the_last_reader_of_the_source() {
    // Retained for its destination alone, while a sibling still reads.
    let mut s = Sender::ours().with_metadata(2).with_posted(true);
    s.on(SenderEvent::Outcome(0, 0, failed(true, false)));
    assert!(!s.room.releasable());
    assert_eq!(s.on(SenderEvent::Outcome(0, 1, Outcome::Done)), [SenderEffect::Changed]);
    assert_eq!((s.room.releasable(), s.room.outstanding()), (true, 1));
    // Aborted first, and then the write ends with the source quiet.
    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    s.on(SenderEvent::Abort);
    assert_eq!(s.on(SenderEvent::Outcome(0, 0, failed(true, false))), [SenderEffect::Changed]);
    assert!(s.room.releasable());
}
