//! `conclude_transfer`: what prefill tells decode at the end.

use std::sync::Arc;

use bytes::Bytes;
use kv_core::control::Multipart;
use kv_core::ids::{OpId, Room};
use kv_core::net::Endpoint;
use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::time::Timestamp;
use kv_core::transport::Outcome;
use kv_core::wire::*;
use kv_testkit::vectors::load;
use serde_json::Value;

use super::support::*;

fn record(host: &str, port: u16, name: &str, is_dummy: bool) -> Destination {
    Destination {
        name: name.into(),
        endpoint: Endpoint::new(host, port),
        pages: [0].into(),
        aux_index: None,
        required_dst_info_num: 4,
        decode_prefix_len: None,
        is_dummy,
        writes_aux: true,
        life: None,
    }
}

#[test]
fn conclude_transfer() {
    let file = load("status_and_abort");
    let records = [
        record("10.0.0.7", 1, "a", false),
        record("10.0.0.8", 2, "b", true),
        record("10.0.0.7", 1, "c", false),
        record("10.0.0.9", 3, "d", false),
    ];
    let policy = SenderPolicy {
        bootstrap_timeout: std::time::Duration::from_secs(300),
        failed_status: FailedStatusPolicy::WhenSettled,
        max_destinations: 16,
        max_chunks: 16,
    };
    for r in file.select("fn", "conclude_transfer", 7) {
        let mut room = SenderRoom::new(Room::new(42).unwrap(), Timestamp::ZERO, Arc::new(policy.clone()));
        let mut out = Vec::new();
        let mut on = |room: &mut SenderRoom, e| {
            room.handle_event(Timestamp::ZERO, e, &mut out);
            std::mem::take(&mut out)
        };
        // Without records ours never leaves Bootstrapping; with a dummy alone there is nobody to tell either.
        let mine = if r.name() == "no_infos" { &records[1..2] } else { &records[..] };
        for d in mine {
            let d = Destination { required_dst_info_num: mine.len() as u32, ..d.clone() };
            on(&mut room, SenderEvent::Destination(d));
        }
        let chunk =
            ChunkSpec { pages: [0].into(), index_slice: 0..1, is_last: true, has_wait_event: false, aux_index: None };
        let mut op = 0;
        for effect in on(&mut room, SenderEvent::Enqueue(chunk)) {
            if let SenderEffect::Post(chunk, dest) = effect {
                op += 1;
                on(&mut room, SenderEvent::Posted(chunk, dest, OpId(op)));
            }
        }
        let done = |room: &mut SenderRoom, on: &mut dyn FnMut(&mut SenderRoom, SenderEvent) -> Vec<SenderEffect>| {
            (0..4).flat_map(|d| on(room, SenderEvent::Outcome(0, d, Outcome::Done))).collect::<Vec<_>>()
        };
        // What happened before the record begins.
        let mut before = Vec::new();
        match r.name() {
            "success_after_abort_status_failed" => before = on(&mut room, SenderEvent::AbortedByDecode),
            "success_after_recorded_failure" => before = on(&mut room, SenderEvent::Abort),
            "cleared_room" => {
                done(&mut room, &mut on);
                on(&mut room, SenderEvent::Clear);
            }
            _ => {}
        }
        assert!(!before.iter().any(|e| matches!(e, SenderEffect::Status(..))), "{r}: told over writes in flight (B2)");
        for (i, step) in steps(&r).iter().enumerate() {
            let call = field(step, "call");
            let effects = match (field(call, "status").as_u64(), call.get("failure_reason")) {
                (Some(4), _) => done(&mut room, &mut on),
                (_, Some(reason)) => {
                    let mut effects =
                        on(&mut room, SenderEvent::Fail(Failure::here(reason.as_str().expect("a reason"))));
                    effects.extend(done(&mut room, &mut on));
                    effects
                }
                // Without a reason: the text of the rank that knows none (C5, D8), where 0.5.23 says
                // `KV transfer failed`.
                _ => {
                    let mut effects = on(&mut room, SenderEvent::Fail(Failure::elsewhere()));
                    effects.extend(done(&mut room, &mut on));
                    effects
                }
            };
            let sent: Vec<(String, Multipart)> = effects
                .into_iter()
                .filter_map(|e| match e {
                    SenderEffect::Status(to, status, reason) => {
                        let reason = reason.map(|r| r.to_string());
                        let prefill_rank = kv_core::PrefillRank(0);
                        let message = KvStatus { room: 42, status, prefill_rank, reason };
                        Some((to.zmq_uri(), NixlDialect::new().encode_status(&message).unwrap()))
                    }
                    _ => None,
                })
                .collect();
            let recorded: Vec<(String, Multipart)> = field(step, "sent")
                .as_array()
                .unwrap()
                .iter()
                .map(|m| {
                    let frame = |f: &Value| Bytes::from(kv_testkit::vectors::bytes_of(f).unwrap());
                    let frames = field(m, "frames").as_array().unwrap().iter().map(frame).collect();
                    (field(m, "endpoint").as_str().unwrap().to_owned(), frames)
                })
                .collect();
            let at = format!("{r}, step {i}");
            let reason = room.failure().map(|f| f.reason.to_string());
            match (r.name(), i) {
                // Told once: 0.5.23 repeats the status for each worker that concludes.
                ("failed_keeps_first_reason", 1..) => assert_eq!((sent.len(), recorded.len()), (0, 2), "{at}"),
                ("failed_default_reason", _) => {
                    assert_eq!((sent.len(), reason.as_deref()), (2, Some(kv_core::error::UNKNOWN_REASON)), "{at}");
                }
                // 0.5.23 keeps no reason of decode's ABORT, and makes up another one.
                ("success_after_abort_status_failed", _) => {
                    assert_eq!(
                        sent.iter().map(|s| &s.0).collect::<Vec<_>>(),
                        recorded.iter().map(|s| &s.0).collect::<Vec<_>>()
                    );
                    assert_eq!(reason.as_deref(), Some(kv_core::error::ABORTED_BY_DECODE_REASON), "{at}");
                }
                // The room is gone; ours keeps what it ended with (C3).
                ("cleared_room", _) => assert_eq!((sent.len(), room.poll()), (0, KvPoll::Success), "{at}"),
                _ => {
                    assert_eq!(sent, recorded, "{at}");
                    assert_eq!(reason.as_deref(), field(step, "failure").as_str(), "{at}");
                }
            }
            if r.name() != "cleared_room" {
                assert_eq!(Some(room.poll() as u64), field(step, "room_status").as_u64(), "{at}");
            }
        }
    }
}
