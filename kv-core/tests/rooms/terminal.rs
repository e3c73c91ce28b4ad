//! C2, D3, D4: terminal states absorb, and the first reason stays.

use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::transport::Outcome;

use super::support::*;

#[test]
fn cat_f46_first_cause_wins_on_prefill() {
    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    s.on(SenderEvent::Fail(Failure::here("RDMA")));
    for later in [SenderEvent::Fail(Failure::here("timeout")), SenderEvent::Abort, SenderEvent::AbortedByDecode] {
        assert_eq!(s.on(later), []);
    }
    s.on(SenderEvent::Outcome(0, 0, Outcome::Done));
    s.on(SenderEvent::Clear);
    assert_eq!((s.room.poll(), s.reason()), (KvPoll::Failed, "RDMA"));
}

#[test]
fn cat_f46_r_d4_first_cause_wins_on_decode() {
    let mut r = Receiver::default_policy().with_peers(1).published();
    r.on(said(0, KvPoll::Failed, Some("RDMA")));
    assert_eq!(r.on(said(0, KvPoll::Failed, Some("timeout"))), []);
    assert_eq!(r.on(ReceiverEvent::Abort), []);
    assert_eq!(r.on(ReceiverEvent::Abort), []);
    assert_eq!(r.on(success(0)), []);
    r.on(ReceiverEvent::Clear);
    assert_eq!((r.room.poll(), r.reason()), (KvPoll::Failed, "RDMA"));
}

#[test]
fn r_d4_abort_sends_one_abort_however_often_it_is_called() {
    let mut r = Receiver::default_policy().with_peers(1).published();
    let mut effects: Vec<_> = (0..3).flat_map(|_| r.on(ReceiverEvent::Abort)).collect();
    effects.extend(r.on(ReceiverEvent::Clear));
    let aborts = effects.iter().filter(|e| matches!(e, ReceiverEffect::Abort { .. })).count();
    assert_eq!((aborts, r.generation), (1, 1));
}

#[test]
fn r_d3_success_survives_everything() {
    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    s.on(SenderEvent::Outcome(0, 0, Outcome::Done));
    for e in
        [SenderEvent::Abort, SenderEvent::AbortedByDecode, SenderEvent::Fail(Failure::here("x")), SenderEvent::Clear]
    {
        assert_eq!(s.on(e), []);
    }
    assert_eq!((s.room.poll(), s.room.failure()), (KvPoll::Success, None));

    let mut r = Receiver::default_policy().with_peers(1).published();
    r.on(success(0));
    for e in [
        said(0, KvPoll::Failed, Some("late")),
        ReceiverEvent::NodeLost("x".into()),
        ReceiverEvent::Abort,
        ReceiverEvent::Clear,
    ] {
        assert_eq!(r.on(e), []);
    }
    assert_eq!((r.room.poll(), r.room.failure()), (KvPoll::Success, None));
}

#[test]
fn cat_f24_failed_is_sticky_against_the_workers_success() {
    let mut s = Sender::ours().with_metadata(1).with_posted(true);
    s.on(SenderEvent::AbortedByDecode);
    s.on(SenderEvent::Outcome(0, 0, Outcome::Done));
    assert_eq!((s.room.poll(), s.reason()), (KvPoll::Failed, "Aborted by decode-side abort notification."));
}

#[test]
fn r_c1_send_after_a_terminal_state_queues_nothing() {
    let mut s = Sender::ours().with_metadata(1);
    s.on(SenderEvent::Abort);
    let number = s.room.next_chunk();
    assert_eq!(s.on(SenderEvent::Enqueue(chunk(true))), []);
    assert_eq!((s.room.next_chunk(), s.room.outstanding()), (number, 0));
}

#[test]
fn r_c5_a_failure_without_a_local_cause_says_so() {
    let f = Failure::elsewhere().error(room());
    assert_eq!(f.to_string(), "room 42: Failed due to an unknown reason from another rank");
    assert!(f.from_another_rank);
    assert!(!Failure::here("x").error(room()).from_another_rank);
}
