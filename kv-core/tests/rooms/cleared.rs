//! B4: events of a cleared room create nothing.

use kv_core::ids::OpId;
use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::transport::Outcome;

use super::support::*;

#[test]
fn r_c3_clear_keeps_the_terminal_state() {
    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    s.on(SenderEvent::Outcome(0, 0, Outcome::Done));
    assert_eq!(s.on(SenderEvent::Clear), []);
    assert_eq!((s.room.poll(), s.room.finished()), (KvPoll::Success, true));
}

#[test]
fn r_d3_clear_of_a_live_room_concludes_it_failed_and_tells() {
    let mut s = Sender::ours().with_metadata(1);
    let text = "cleared in WaitingForInput, before the transfer ended";
    assert_eq!(s.on(SenderEvent::Clear), [status(1, KvPoll::Failed, Some(text)), SenderEffect::Changed]);
    assert!(s.room.finished());

    let mut r = Receiver::default_policy().with_peers(2).published();
    let effects = r.on(ReceiverEvent::Clear);
    assert_eq!(effects, [ReceiverEffect::Abort { contacted: 2, generation: Some(1) }, ReceiverEffect::Changed]);
    assert_eq!((r.room.poll(), r.room.finished()), (KvPoll::Failed, false), "its pages are not free");
}

#[test]
fn r_b4_cat_f45_late_events_of_a_cleared_sender_do_nothing() {
    let mut s = Sender::ours().with_metadata(1);
    s.on(SenderEvent::Clear);
    let late = [
        SenderEvent::Enqueue(chunk(true)),
        SenderEvent::SourceReady(0, Ok(())),
        SenderEvent::Posted(0, 0, OpId(1)),
        SenderEvent::NothingToPost(0, 0),
        SenderEvent::Outcome(0, 0, Outcome::Done),
        SenderEvent::Settlement(0, 0, SETTLED),
        SenderEvent::Rejected(0, 0, "x".into()),
        SenderEvent::AbortedByDecode,
        SenderEvent::DestinationLost("d1".into(), "x".into()),
        SenderEvent::Clear,
    ];
    for event in late {
        assert_eq!(s.on(event), []);
    }
    assert!(s.room.finished() && s.room.poll_timeout().is_none());
}

#[test]
fn r_b4_cat_f45_late_events_of_a_cleared_receiver_do_nothing() {
    let mut r = Receiver::default_policy();
    r.on(ReceiverEvent::Clear);
    let late = [
        ReceiverEvent::Peers(Ok(peers(1))),
        ReceiverEvent::Peers(Err("x".into())),
        ReceiverEvent::Publish(publish_spec()),
        ReceiverEvent::Published { contacted: 1, error: None },
        success(0),
        said(0, KvPoll::Failed, Some("x")),
        ReceiverEvent::NodeLost("x".into()),
        ReceiverEvent::Abort,
        ReceiverEvent::Clear,
    ];
    for event in late {
        assert_eq!(r.on(event), []);
    }
    assert!(r.room.finished() && r.room.poll_timeout().is_none());
}

#[test]
fn a_cleared_sender_lives_until_its_writes_are_quiet() {
    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    s.on(SenderEvent::Clear);
    assert!(!s.room.finished());
    s.on(SenderEvent::Outcome(0, 0, unresolved()));
    assert!(!s.room.finished());
    s.on(SenderEvent::Settlement(0, 0, SETTLED));
    assert!(s.room.finished());
}
