//! Conversations with the real SGLang 0.5.23, as our side recorded them (`cargo xtask interop --vectors`): every frame of
//! both sides is read and written alike, and each conversation follows the rules of the protocol (R-H1).

// Helpers outside `#[test]` functions may panic as well: they are part of the tests.
#![allow(clippy::unwrap_used)]

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use kv_core::control::Multipart;
use kv_core::wire::{Dialect, NixlDialect, ToDecode, ToPrefill};
use kv_core::{KvPoll, Limits};
use kv_testkit::vectors::{self, Record, unhex};

const DIALECT: NixlDialect = NixlDialect::new();

/// One message of a conversation.
enum Said {
    /// By decode.
    ToPrefill(ToPrefill),
    /// By prefill.
    ToDecode(ToDecode),
}

struct Conversation {
    name: String,
    said: Vec<Said>,
}

fn frames(message: &serde_json::Value) -> Vec<Bytes> {
    message["frames"].as_array().unwrap().iter().map(|f| unhex(f.as_str().unwrap()).unwrap().into()).collect()
}

/// Whether decode said it: the side that recorded sent it, or got it.
fn by_decode(record: &Record, message: &serde_json::Value) -> bool {
    (record.str("side") == "decode") == (message["dir"] == "send")
}

fn write_to_prefill(message: &ToPrefill) -> Multipart {
    match message {
        ToPrefill::Registration(m) => DIALECT.encode_registration(m),
        ToPrefill::Metadata(m) => DIALECT.encode_metadata(m),
        ToPrefill::Abort(m) => DIALECT.encode_abort(m),
        other => panic!("not of these cases: {other:?}"),
    }
    .unwrap()
}

fn write_to_decode(message: &ToDecode) -> Multipart {
    match message {
        ToDecode::Status(m) => DIALECT.encode_status(m),
        ToDecode::AbortAck(m) => DIALECT.encode_abort_ack(m),
        other => panic!("not of these cases: {other:?}"),
    }
    .unwrap()
}

fn all() -> Vec<Conversation> {
    let file = vectors::load("conversations_nixl");
    assert!(file.len() >= 20, "{} conversations", file.len());
    let limits = Limits::default();
    let conversation = |index: usize| {
        let record = file.get(index);
        let name = format!("{} {} ({})", record.name(), record.str("direction"), record.str("side"));
        let said = record.field("messages").as_array().unwrap().iter().enumerate().map(|(at, message)| {
            let recorded = frames(message);
            let (said, written) = if by_decode(&record, message) {
                let read = DIALECT.parse_to_prefill(&recorded, &limits).unwrap_or_else(|e| panic!("{name} {at}: {e}"));
                let written = write_to_prefill(&read);
                (Said::ToPrefill(read), written)
            } else {
                let read = DIALECT.parse_to_decode(&recorded, &limits).unwrap_or_else(|e| panic!("{name} {at}: {e}"));
                let written = write_to_decode(&read);
                (Said::ToDecode(read), written)
            };
            // Frame by frame, so that a difference names its frame.
            for (frame, (ours, recorded)) in written.iter().zip(&recorded).enumerate() {
                assert_eq!(ours, recorded, "{name}: message {at}, frame {frame}");
            }
            assert_eq!(written.len(), recorded.len(), "{name}: message {at}");
            said
        });
        let said = said.collect();
        Conversation { name, said }
    };
    (0..file.len()).map(conversation).collect()
}

#[test]
fn r_h1_recorded_frames_of_both_sides_are_read_and_written_alike() {
    let messages: usize = all().iter().map(|c| c.said.len()).sum();
    assert!(messages > 100, "{messages} messages");
}

/// A decode is registered before it speaks of a room; a status and an ACK speak of rooms and aborts that were spoken of.
#[test]
fn r_h1_recorded_conversations_follow_the_protocol() {
    for c in all() {
        let (mut registered, mut rooms) = (BTreeSet::new(), BTreeSet::new());
        let (mut aborts, mut done) = (BTreeMap::new(), BTreeMap::<_, usize>::new());
        for (at, said) in c.said.iter().enumerate() {
            let at = format!("{}: message {at}", c.name);
            match said {
                Said::ToPrefill(ToPrefill::Registration(m)) => {
                    registered.insert(m.name.clone());
                    assert!(!m.metadata.is_empty() && m.kv_slots.is_some(), "{at}");
                }
                Said::ToPrefill(ToPrefill::Metadata(m)) => {
                    assert!(registered.contains(&m.name), "{at}: metadata of one that did not register");
                    assert!(m.required_dst_info_num > 0, "{at}");
                    rooms.insert(m.room);
                }
                Said::ToPrefill(ToPrefill::Abort(m)) => {
                    aborts.insert(m.room, m.generation);
                }
                Said::ToDecode(ToDecode::Status(m)) => {
                    assert!(rooms.contains(&m.room), "{at}: status of an unknown room");
                    if m.status == KvPoll::Success {
                        // Once to each decode.
                        let told = done.entry((m.room, m.prefill_rank)).or_default();
                        *told += 1;
                        assert!(*told <= registered.len(), "{at}: Success told again");
                    } else {
                        assert!(m.reason.as_ref().is_some_and(|r| !r.is_empty()), "{at}: a failure without a reason");
                    }
                }
                Said::ToDecode(ToDecode::AbortAck(m)) => {
                    let generation = aborts.get(&m.room).copied().flatten();
                    assert_eq!(Some(m.generation), generation, "{at}: an ACK of another ABORT");
                }
                other => panic!("{at}: {}", describe(other)),
            }
        }
    }
}

fn describe(said: &Said) -> String {
    match said {
        Said::ToPrefill(m) => format!("{m:?}"),
        Said::ToDecode(m) => format!("{m:?}"),
    }
}
