//! Every event in every state of the sender's room.

use kv_core::poll::KvPoll;
use kv_core::room::*;

use super::support::*;

const STATES: [&str; 6] = ["Bootstrapping", "WaitingForInput", "Transferring", "Success", "Failed", "Failed, retained"];

fn state(name: &str) -> Sender {
    let mut s = Sender::ours();
    match name {
        "Bootstrapping" => return s,
        "WaitingForInput" => return s.with_metadata(1),
        "Failed" => drop(s.on(SenderEvent::Abort)),
        _ => {
            s = s.with_metadata(1).with_posted(true);
            match name {
                "Transferring" => {}
                "Success" => drop(s.on(SenderEvent::Outcome(0, 0, kv_core::transport::Outcome::Done))),
                _ => drop(s.on(SenderEvent::Outcome(0, 0, unresolved()))),
            }
        }
    }
    s
}

fn event(name: &str) -> SenderEvent {
    use kv_core::transport::Outcome;
    match name {
        "Destination" => SenderEvent::Destination(destination(1, 1)),
        "dummy Destination" => SenderEvent::Destination(dummy(2, 1)),
        "Enqueue" => SenderEvent::Enqueue(chunk(false)),
        "Enqueue last" => SenderEvent::Enqueue(chunk(true)),
        "SourceReady" => SenderEvent::SourceReady(0, Ok(())),
        "SourceReady of no chunk failed" => SenderEvent::SourceReady(9, Err("x".into())),
        "Rejected" => SenderEvent::Rejected(0, 0, "no".into()),
        "Done" => SenderEvent::Outcome(0, 0, Outcome::Done),
        "Done of no chunk" => SenderEvent::Outcome(9, 0, Outcome::Done),
        "Failed quiet" => SenderEvent::Outcome(0, 0, failed(true, true)),
        "Failed" => SenderEvent::Outcome(0, 0, failed(false, false)),
        "Unresolved" => SenderEvent::Outcome(0, 0, unresolved()),
        "Settlement" => SenderEvent::Settlement(0, 0, SETTLED),
        "Abort" => SenderEvent::Abort,
        "AbortedByDecode" => SenderEvent::AbortedByDecode,
        "DestinationLost" => SenderEvent::DestinationLost("d1".into(), "gone".into()),
        "other DestinationLost" => SenderEvent::DestinationLost("d9".into(), "gone".into()),
        "Fail" => SenderEvent::Fail(Failure::here("x")),
        "Clear" => SenderEvent::Clear,
        other => panic!("{other}"),
    }
}

#[test]
fn r_c2_every_event_in_every_state() {
    let table: [(&str, [u8; 6]); 19] = [
        ("Destination", [2, 2, 3, 4, 0, 0]),
        ("dummy Destination", [2, 2, 3, 4, 0, 0]),
        ("Enqueue", [1, 3, 0, 4, 0, 0]),
        ("Enqueue last", [1, 3, 0, 4, 0, 0]),
        ("SourceReady", [1, 2, 3, 4, 0, 0]),
        ("SourceReady of no chunk failed", [1, 2, 3, 4, 0, 0]),
        ("Rejected", [0, 0, 0, 4, 0, 0]),
        ("Done", [1, 2, 4, 4, 0, 0]),
        ("Done of no chunk", [1, 2, 3, 4, 0, 0]),
        ("Failed quiet", [1, 2, 0, 4, 0, 0]),
        ("Failed", [1, 2, 0, 4, 0, 0]),
        ("Unresolved", [1, 2, 0, 4, 0, 0]),
        ("Settlement", [1, 2, 3, 4, 0, 0]),
        ("Abort", [0, 0, 0, 4, 0, 0]),
        ("AbortedByDecode", [0, 0, 0, 4, 0, 0]),
        ("DestinationLost", [1, 0, 0, 4, 0, 0]),
        ("other DestinationLost", [1, 2, 3, 4, 0, 0]),
        ("Fail", [0, 0, 0, 4, 0, 0]),
        ("Clear", [0, 0, 0, 4, 0, 0]),
    ];
    for (name, want) in table {
        for (from, want) in STATES.into_iter().zip(want) {
            let mut s = state(from);
            let before = s.room.poll();
            let effects = s.on(event(name));
            assert_eq!(s.room.poll() as u8, want, "{name} in {from}");
            let changed = effects.contains(&SenderEffect::Changed);
            assert!(changed || s.room.poll() == before, "{name} in {from}: nobody is told of the change");
        }
    }
}

#[test]
fn r_c8_only_bootstrapping_has_a_deadline() {
    for (from, want) in STATES.into_iter().zip([0, 2, 3, 4, 0, 0]) {
        let mut s = state(from);
        assert_eq!(s.room.poll_timeout().is_some(), from == "Bootstrapping", "{from}");
        s.now = secs(10_000);
        s.timeout();
        assert_eq!(s.room.poll() as u8, want, "{from}");
    }
}

#[test]
fn r_c8_bootstrap_timeout_names_what_is_missing_and_tells_decode() {
    let mut s = Sender::ours();
    s.on(SenderEvent::Destination(destination(1, 2)));
    s.now = secs(299);
    assert_eq!((s.timeout(), s.room.poll()), (vec![], KvPoll::Bootstrapping));
    s.now = secs(300);
    let reason = "Request 42 timed out after 300.0s in KVPoll.Bootstrapping: metadata from 1 decode ranks arrived";
    assert_eq!(s.timeout(), [status(1, KvPoll::Failed, Some(reason)), SenderEffect::Changed]);
}

#[test]
fn a_room_goes_through_its_states() {
    let mut s = Sender::ours();
    assert_eq!(s.on(SenderEvent::Destination(destination(1, 2))), []);
    assert_eq!(s.on(SenderEvent::Destination(destination(2, 2))), [SenderEffect::Changed]);
    assert_eq!(s.room.poll(), KvPoll::WaitingForInput);
    let effects = s.on(SenderEvent::Enqueue(chunk(true)));
    assert_eq!(effects, [SenderEffect::Post(0, 0), SenderEffect::Post(0, 1), SenderEffect::Changed]);
    s.post_all(&effects);
    assert_eq!(s.room.poll(), KvPoll::Transferring);
    assert_eq!(s.on(event("Done")), []);
    assert_eq!(
        s.on(SenderEvent::Outcome(0, 1, kv_core::transport::Outcome::Done)),
        [
            SenderEffect::Drained,
            status(1, KvPoll::Success, None),
            status(2, KvPoll::Success, None),
            SenderEffect::Changed
        ]
    );
}

#[test]
fn chunks_sent_before_the_metadata_wait_for_it() {
    let mut s = Sender::ours();
    assert_eq!(s.on(SenderEvent::Enqueue(chunk(false))), []);
    assert_eq!(s.on(SenderEvent::Enqueue(chunk(true))), []);
    let effects = s.on(SenderEvent::Destination(destination(1, 1)));
    assert_eq!(effects, [SenderEffect::Changed, SenderEffect::Post(0, 0), SenderEffect::Changed]);
}

#[test]
fn metadata_that_comes_again_replaces_the_older() {
    let mut s = Sender::ours();
    s.on(SenderEvent::Destination(destination(1, 2)));
    s.on(SenderEvent::Destination(Destination { aux_index: Some(9), ..destination(1, 2) }));
    assert_eq!((s.room.destinations().len(), s.room.destinations()[0].aux_index), (1, Some(9)));
    assert_eq!(s.room.poll(), KvPoll::Bootstrapping);
}

#[test]
fn r_h2_a_decode_that_requires_too_many_is_refused() {
    let mut s = Sender::ours();
    let text = "decode 10.0.0.7:1 requires 5 decode ranks; at most 4 are allowed";
    let effects = s.on(SenderEvent::Destination(destination(1, 5)));
    assert_eq!(effects, [status(1, KvPoll::Failed, Some(text)), SenderEffect::Changed]);
}

#[test]
fn r_h2_chunks_of_one_room_are_bounded() {
    let mut s = Sender::ours();
    (0..4096).for_each(|_| assert_eq!(s.on(event("Enqueue")), []));
    s.on(event("Enqueue"));
    assert_eq!(s.reason(), "more than 4096 chunks are queued");
}

#[test]
fn thousands_of_chunks_with_nothing_to_write_end_without_recursion() {
    let small_stack = std::thread::Builder::new().stack_size(256 << 10);
    let run = || {
        let mut s = Sender::ours();
        (0..4095).for_each(|_| drop(s.on(event("Enqueue"))));
        s.on(event("Enqueue last"));
        s.on(SenderEvent::Destination(dummy(1, 1)));
        assert_eq!(s.room.poll(), KvPoll::Success);
    };
    small_stack.spawn(run).unwrap().join().unwrap();
}

#[test]
fn r_a3_a_chunk_waits_for_its_own_event_only() {
    let with_event = |last| ChunkSpec { has_wait_event: true, ..chunk(last) };
    let mut s = Sender::ours().with_metadata(1);
    assert_eq!(s.on(SenderEvent::Enqueue(with_event(false))), []);
    assert_eq!(s.on(SenderEvent::Enqueue(with_event(true))), []);
    // The second one's event says nothing about the first.
    assert_eq!(s.on(SenderEvent::SourceReady(1, Ok(()))), []);
    assert_eq!(s.room.poll(), KvPoll::WaitingForInput);
    let effects = s.on(SenderEvent::SourceReady(0, Ok(())));
    assert_eq!(effects, [SenderEffect::Post(0, 0), SenderEffect::Changed]);
    s.post_all(&effects);
    assert_eq!(s.on(event("Done")), [SenderEffect::Drained, SenderEffect::Post(1, 0)]);
}

#[test]
fn r_a3_a_failed_event_fails_the_room() {
    let mut s = Sender::ours().with_metadata(1);
    s.on(SenderEvent::Enqueue(ChunkSpec { has_wait_event: true, ..chunk(true) }));
    let text = "wait_event of chunk 0 failed: device lost";
    let effects = s.on(SenderEvent::SourceReady(0, Err("device lost".into())));
    assert_eq!(effects, [status(1, KvPoll::Failed, Some(text)), SenderEffect::Changed]);
    assert!(s.room.releasable());
}

#[test]
fn r_c7_cat_f76_latency_is_exact() {
    let mut s = Sender::ours().with_metadata(1);
    s.now = secs(10);
    let effects = s.on(event("Enqueue"));
    s.post_all(&effects);
    s.now = secs(13);
    s.on(event("Enqueue last"));
    s.now = secs(17);
    let effects = s.on(event("Done"));
    s.post_all(&effects);
    assert_eq!(s.room.latency(), None);
    s.now = secs(20);
    s.on(SenderEvent::Outcome(1, 0, kv_core::transport::Outcome::Done));
    let secs = std::time::Duration::from_secs;
    assert_eq!(s.room.latency(), Some((secs(10), secs(7))));
}
