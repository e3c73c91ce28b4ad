//! Every event in every state of the receiver's room.

use kv_core::poll::KvPoll;
use kv_core::room::*;

use super::support::*;

const STATES: [&str; 6] = ["Bootstrapping", "WaitingForInput", "published", "Success", "Failed", "armed"];

fn state(name: &str) -> Receiver {
    let mut r = Receiver::default_policy();
    match name {
        "Bootstrapping" => return r,
        "WaitingForInput" => return r.with_peers(1),
        "Failed" => drop(r.on(ReceiverEvent::Abort)),
        _ => {
            r = r.with_peers(1).published();
            match name {
                "published" => {}
                "Success" => drop(r.on(success(0))),
                _ => drop(r.on(ReceiverEvent::Abort)),
            }
        }
    }
    r
}

fn event(name: &str) -> ReceiverEvent {
    match name {
        "Peers" => ReceiverEvent::Peers(Ok(peers(2))),
        "no Peers" => ReceiverEvent::Peers(Err("gone".into())),
        "Publish" => ReceiverEvent::Publish(publish_spec()),
        "Published" => ReceiverEvent::Published { contacted: 1, error: None },
        "Published to none" => ReceiverEvent::Published { contacted: 0, error: None },
        "Publish failed" => ReceiverEvent::Published { contacted: 0, error: Some("no route".into()) },
        "Success" => success(0),
        "Success of another rank" => success(7),
        "Failed" => said(0, KvPoll::Failed, Some("boom")),
        "Failed of another rank" => said(7, KvPoll::Failed, Some("boom")),
        "Transferring" => said(0, KvPoll::Transferring, None),
        "AbortAck" => ack(0, 9),
        "NodeLost" => ReceiverEvent::NodeLost("lost".into()),
        "Abort" => ReceiverEvent::Abort,
        "Fail" => ReceiverEvent::Fail(Failure::here("x")),
        "Clear" => ReceiverEvent::Clear,
        other => panic!("{other}"),
    }
}

#[test]
fn r_d3_every_event_in_every_state() {
    let table: [(&str, [u8; 6]); 16] = [
        ("Peers", [2, 2, 2, 4, 0, 0]),
        ("no Peers", [0, 2, 2, 4, 0, 0]),
        ("Publish", [0, 2, 2, 4, 0, 0]),
        ("Published", [1, 2, 2, 4, 0, 0]),
        ("Published to none", [0, 0, 0, 4, 0, 0]),
        ("Publish failed", [0, 0, 0, 4, 0, 0]),
        ("Success", [1, 2, 4, 4, 0, 0]),
        ("Success of another rank", [1, 2, 2, 4, 0, 0]),
        ("Failed", [1, 0, 0, 4, 0, 0]),
        ("Failed of another rank", [1, 2, 2, 4, 0, 0]),
        ("Transferring", [1, 2, 2, 4, 0, 0]),
        ("AbortAck", [1, 2, 2, 4, 0, 0]),
        ("NodeLost", [0, 0, 0, 4, 0, 0]),
        ("Abort", [0, 0, 0, 4, 0, 0]),
        ("Fail", [0, 0, 0, 4, 0, 0]),
        ("Clear", [0, 0, 0, 4, 0, 0]),
    ];
    for (name, want) in table {
        for (from, want) in STATES.into_iter().zip(want) {
            let mut r = state(from);
            let before = r.room.poll();
            let effects = r.on(event(name));
            assert_eq!(r.room.poll() as u8, want, "{name} in {from}");
            let changed = effects.contains(&ReceiverEffect::Changed);
            assert!(changed || r.room.poll() == before, "{name} in {from}: nobody is told of the change");
        }
    }
}

#[test]
fn r_d5_only_a_published_room_has_a_waiting_deadline() {
    for (from, want) in STATES.into_iter().zip([1, 2, 0, 4, 0, 0]) {
        let mut r = state(from);
        let has_deadline = matches!(from, "published" | "armed");
        assert_eq!(r.room.poll_timeout().is_some(), has_deadline, "{from}");
        r.now = secs(10_000);
        r.timeout();
        assert_eq!(r.room.poll() as u8, want, "{from}");
    }
}

#[test]
fn r_d5_cat_f03_waiting_timeout_runs_from_publication_and_names_the_silent_ranks() {
    let mut r = Receiver::default_policy().with_peers(3);
    r.now = secs(100);
    let mut r = r.published();
    r.on(success(1));
    r.now = secs(299);
    assert_eq!(r.timeout(), []);
    r.now = secs(300);
    let effects = r.timeout();
    let text = "Request 42 timed out after 200.0s in KVPoll.WaitingForInput: no completion from prefill rank 0, 2";
    assert_eq!(r.reason(), text);
    let abort = ReceiverEffect::Abort { contacted: 3, generation: Some(1) };
    // The connections go after the ABORTs that still use them.
    assert_eq!(effects, [abort, ReceiverEffect::Changed, ReceiverEffect::Forget]);
}

#[test]
fn r_d5_completion_that_is_there_wins_over_the_deadline() {
    let mut r = Receiver::default_policy().with_peers(1).published();
    r.now = secs(500);
    r.on(success(0));
    assert_eq!((r.timeout(), r.room.poll()), (vec![], KvPoll::Success));
}

#[test]
fn r_d1_send_metadata_before_the_peers_are_known_fails_with_a_reason() {
    let mut r = Receiver::default_policy();
    r.on(ReceiverEvent::Publish(publish_spec()));
    assert_eq!(r.reason(), "send_metadata() before the prefill ranks are known: wait for WaitingForInput first");
}

#[test]
fn metadata_for_no_rank_at_all_fails_instead_of_waiting_for_ever() {
    let mut r = Receiver::default_policy();
    r.on(ReceiverEvent::Peers(Ok(peers_of(vec![], 1))));
    r.on(ReceiverEvent::Publish(publish_spec()));
    r.on(ReceiverEvent::Published { contacted: 0, error: None });
    assert_eq!(r.reason(), "send_metadata: there is no prefill rank to send to");
    assert!(r.room.releasable());
}

#[test]
fn a_partial_publish_holds_the_pages_for_those_who_know_them() {
    let mut r = Receiver::default_policy().with_peers(3);
    r.on(ReceiverEvent::Publish(publish_spec()));
    let effects = r.on(ReceiverEvent::Published { contacted: 2, error: Some("rank 2 is unreachable".into()) });
    let abort = ReceiverEffect::Abort { contacted: 2, generation: Some(1) };
    assert_eq!(effects, [abort, ReceiverEffect::Changed, ReceiverEffect::Forget]);
    assert!(!r.room.releasable());
    r.on(ack(0, 1));
    assert_eq!(r.on(ack(1, 1)), [ReceiverEffect::Released { proven: true }]);
}

#[test]
fn cat_f31_a_failure_before_metadata_is_seen() {
    let mut r = Receiver::default_policy().with_peers(1);
    let effects = r.on(said(0, KvPoll::Failed, Some("aborted there")));
    assert_eq!(effects, [ReceiverEffect::Abort { contacted: 1, generation: None }, ReceiverEffect::Changed]);
    assert_eq!((r.reason(), r.room.releasable()), ("aborted there", true));
    assert_eq!(r.on(ReceiverEvent::Publish(publish_spec())), []);
}

#[test]
fn send_metadata_twice_is_a_counted_violation() {
    let mut r = Receiver::default_policy().with_peers(1).published();
    let effects = r.on(ReceiverEvent::Publish(publish_spec()));
    assert_eq!(effects, [ReceiverEffect::Violation("send_metadata() was called twice")]);
}
