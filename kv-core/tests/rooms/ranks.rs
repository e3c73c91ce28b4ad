//! B1: responses are a set of prefill ranks.

use kv_core::error::PREFILL_DEAD_REASON;
use kv_core::poll::KvPoll;
use kv_core::room::*;

use super::support::*;

const VIOLATION: ReceiverEffect = ReceiverEffect::Violation("status from a prefill rank that was not asked");

#[test]
fn r_b1_cat_f01_duplicates_never_count_twice() {
    let mut r = Receiver::default_policy().with_peers(2).published();
    for _ in 0..3 {
        assert_eq!(r.on(success(0)), []);
        assert_eq!(r.room.poll(), KvPoll::WaitingForInput);
    }
    assert_eq!(r.on(success(1)), [ReceiverEffect::Changed]);
    assert_eq!((r.room.poll(), r.room.releasable()), (KvPoll::Success, true));
}

#[test]
fn r_b1_a_rank_that_was_not_asked_is_counted_and_ignored() {
    let mut r = Receiver::default_policy().with_peers(2).published();
    r.on(success(0));
    assert_eq!(r.on(success(5)), [VIOLATION]);
    assert_eq!(r.on(said(5, KvPoll::Failed, Some("x"))), [VIOLATION]);
    assert_eq!(r.room.poll(), KvPoll::WaitingForInput);
}

#[test]
fn r_b1_dummies_do_not_count() {
    let mut r = Receiver::default_policy();
    r.on(ReceiverEvent::Peers(Ok(peers_of(vec![record(0, false), record(1, true)], 1))));
    let mut r = r.published();
    assert_eq!(r.on(success(1)), [VIOLATION]);
    r.on(success(0));
    assert_eq!(r.room.poll(), KvPoll::Success);
}

#[test]
fn cat_f04_one_failure_among_four_fails_the_room_with_that_ranks_reason() {
    let mut r = Receiver::default_policy().with_peers(4).published();
    for rank in [0, 1, 2] {
        r.on(success(rank));
        assert_eq!(r.room.poll(), KvPoll::WaitingForInput);
    }
    r.on(said(3, KvPoll::Failed, Some("rank 3 broke")));
    assert_eq!((r.room.poll(), r.reason()), (KvPoll::Failed, "rank 3 broke"));
}

#[test]
fn a_failure_without_a_reason_gets_sglangs_text() {
    for reason in [None, Some("")] {
        let mut r = Receiver::default_policy().with_peers(1).published();
        r.on(said(0, KvPoll::Failed, reason));
        assert_eq!(r.reason(), PREFILL_DEAD_REASON);
    }
}

#[test]
fn cat_f47_success_before_metadata_completes_nothing() {
    let mut r = Receiver::default_policy().with_peers(1);
    assert_eq!(r.on(success(0)), [ReceiverEffect::Violation("Success before metadata was published")]);
    assert_eq!(r.published().room.poll(), KvPoll::WaitingForInput);
}

#[test]
fn every_order_of_the_ranks_ends_alike() {
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let mut r = Receiver::default_policy().with_peers(3).published();
        let seen: Vec<_> = order
            .into_iter()
            .map(|rank| {
                r.on(success(rank));
                r.room.poll() as u8
            })
            .collect();
        assert_eq!(seen, [2, 2, 4]);
    }
}
