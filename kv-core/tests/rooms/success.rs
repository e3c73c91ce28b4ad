//! B2: Success needs every write of every chunk Done, and is told once to every distinct endpoint that is no dummy.

use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::transport::Outcome;

use super::support::*;

#[test]
fn r_b2_cat_f05_cat_f10_nobody_is_told_before_every_part_is_done() {
    let mut s = Sender::ours().with_metadata(3).with_posted(true);
    assert_eq!(s.on(SenderEvent::Outcome(0, 2, Outcome::Done)), []);
    assert_eq!(s.on(SenderEvent::Outcome(0, 0, Outcome::Done)), []);
    assert_eq!(s.room.poll(), KvPoll::Transferring);
    let effects = s.on(SenderEvent::Outcome(0, 1, Outcome::Done));
    let told = [1, 2, 3].map(|i| status(i, KvPoll::Success, None));
    assert_eq!(effects[1..4], told);
}

#[test]
fn r_b2_chunks_follow_one_another() {
    let mut s = Sender::ours().with_metadata(2).with_posted(false);
    assert_eq!(s.on(SenderEvent::Enqueue(chunk(true))), []);
    assert_eq!(s.on(SenderEvent::Outcome(0, 0, Outcome::Done)), []);
    let effects = s.on(SenderEvent::Outcome(0, 1, Outcome::Done));
    assert_eq!(effects, [SenderEffect::Drained, SenderEffect::Post(1, 0), SenderEffect::Post(1, 1)]);
}

#[test]
fn r_c4_transferring_while_any_chunk_is_unsettled() {
    let mut s = Sender::ours().with_metadata(1).with_posted(false);
    s.on(SenderEvent::Outcome(0, 0, Outcome::Done));
    assert_eq!((s.room.poll(), s.room.releasable()), (KvPoll::Transferring, false));
    let effects = s.on(SenderEvent::Enqueue(chunk(true)));
    s.post_all(&effects);
    assert_eq!((s.room.poll(), s.room.releasable()), (KvPoll::Transferring, false));
    s.on(SenderEvent::Outcome(1, 0, Outcome::Done));
    assert_eq!((s.room.poll(), s.room.releasable()), (KvPoll::Success, true));
}

#[test]
fn one_endpoint_is_told_once_and_dummies_never() {
    let mut s = Sender::ours();
    s.on(SenderEvent::Destination(destination(1, 4)));
    s.on(SenderEvent::Destination(dummy(2, 4)));
    s.on(SenderEvent::Destination(Destination { name: "other".into(), ..destination(1, 4) }));
    s.on(SenderEvent::Destination(destination(3, 4)));
    let effects = s.on(SenderEvent::Enqueue(chunk(true)));
    s.post_all(&effects);
    let effects: Vec<_> = [0, 2, 3].into_iter().flat_map(|d| s.on(SenderEvent::Outcome(0, d, Outcome::Done))).collect();
    let told: Vec<_> = effects.into_iter().filter(|e| matches!(e, SenderEffect::Status(..))).collect();
    assert_eq!(told, [status(1, KvPoll::Success, None), status(3, KvPoll::Success, None)]);
}

#[test]
fn r_c6_cat_f26_no_success_after_an_abort() {
    for abort in [SenderEvent::Abort, SenderEvent::AbortedByDecode] {
        let mut s = Sender::ours().with_metadata(1).with_posted(true);
        let mut effects = s.on(abort);
        effects.extend(s.on(SenderEvent::Outcome(0, 0, Outcome::Done)));
        effects.extend(s.on(SenderEvent::Enqueue(chunk(true))));
        let told: Vec<_> = effects.iter().filter(|e| matches!(e, SenderEffect::Status(..))).collect();
        assert_eq!(told, [&status(1, KvPoll::Failed, Some(s.reason()))]);
        assert_eq!(s.room.poll(), KvPoll::Failed);
    }
}

#[test]
fn r_b2_between_two_of_ours_failed_goes_out_at_once() {
    let mut s = Sender::ours().with_metadata(2).with_posted(true);
    let text = "Failed to send kv chunk 0 to 10.0.0.7:1: ERR";
    let told = [1, 2].map(|i| status(i, KvPoll::Failed, Some(text)));
    let effects = s.on(SenderEvent::Outcome(0, 0, failed(true, true)));
    assert_eq!(effects, [told[0].clone(), told[1].clone(), SenderEffect::Changed]);
    assert_eq!(s.on(SenderEvent::Outcome(0, 1, Outcome::Done)), [SenderEffect::Drained, SenderEffect::Changed]);
}

#[test]
fn r_b2_towards_0523_failed_waits_for_the_last_write() {
    let mut s = Sender::towards_0523().with_metadata(2).with_posted(true);
    assert_eq!(s.on(SenderEvent::Outcome(0, 0, failed(true, true))), [SenderEffect::Changed]);
    let text = "Failed to send kv chunk 0 to 10.0.0.7:1: ERR";
    let told = [1, 2].map(|i| status(i, KvPoll::Failed, Some(text)));
    assert_eq!(
        s.on(SenderEvent::Outcome(0, 1, Outcome::Done)),
        [SenderEffect::Drained, told[0].clone(), told[1].clone(), SenderEffect::Changed]
    );
}

#[test]
fn r_c6_late_metadata_is_answered_failed() {
    let mut s = Sender::ours();
    s.on(SenderEvent::Abort);
    let told = status(3, KvPoll::Failed, Some("Aborted by AbortReq."));
    assert_eq!(s.on(SenderEvent::Destination(destination(3, 1))), [told]);
    assert_eq!(s.on(SenderEvent::Destination(dummy(4, 1))), []);
}

#[test]
fn r_b2_repeated_metadata_does_not_spill_a_failure_that_is_withheld() {
    let mut s = Sender::towards_0523().with_metadata(1).with_posted(true);
    s.on(SenderEvent::AbortedByDecode);
    assert_eq!(s.on(SenderEvent::Destination(destination(1, 1))), [], "its write is unresolved");
    // Somebody whose pages no write of ours knows may be told.
    let told = |to| status(to, KvPoll::Failed, Some("Aborted by decode-side abort notification."));
    assert_eq!(s.on(SenderEvent::Destination(destination(2, 1))), [told(2)]);
    let effects = s.on(SenderEvent::Outcome(0, 0, Outcome::Done));
    assert_eq!(effects, [SenderEffect::Drained, told(1), SenderEffect::Changed]);
    assert_eq!(s.on(SenderEvent::Destination(destination(1, 1))), [told(1)]);
}
