//! `deferred_abort_prefill` and `deferred_abort_decode`: who may say that nothing can land any more.

use bytes::Bytes;
use kv_testkit::directory::Shape;
use kv_testkit::fake_transport::Policy;
use kv_testkit::vectors::{Record, load};
use serde_json::Value;

use super::support::*;

/// What prefill rank 1 sent to the decodes of the records, which are not in the world.
fn acks(w: &World) -> Vec<(String, Vec<String>)> {
    let strangers: Vec<_> = w.net.in_flight().into_iter().filter(|f| f.to.host().starts_with("10.0.0.")).collect();
    strangers.iter().for_each(|f| drop(w.net.drop_message(f.id)));
    let hex = |f: &kv_testkit::net::Flight| f.frames.iter().map(|b| kv_testkit::vectors::hex(b)).collect();
    strangers.iter().map(|f| (f.to.zmq_uri(), hex(f))).collect()
}

fn recorded_acks(step: &Value) -> Vec<(String, Vec<String>)> {
    let text = |v: &Value| v.as_str().unwrap().to_owned();
    let message =
        |m: &Value| (text(field(m, "endpoint")), field(m, "frames").as_array().unwrap().iter().map(text).collect());
    field(step, "sent").as_array().unwrap().iter().map(message).collect()
}

fn abort_prefill(r: &Record) {
    let backend = r.str("backend").trim_end_matches("KVManager").to_lowercase();
    // Rank 1 of TP 2, its addresses outside 10.0.0.x, which is the records'.
    let shape = Shape { host: "10.9.0.1".into(), ..Shape::tp(2, 2, 0) };
    let mut w = world(&backend, shape, 2);
    let room = (r.name() != "unknown_room").then(|| {
        let (s, d) = (w.sender(1, 42), w.receiver(1, 42));
        w.run();
        w.publish(1, &d, &[0; 8], 0);
        w.run();
        // Transferring, with nothing in flight.
        w.send(1, &s, &[0], 0, r.name() == "already_success");
        w.run();
        s
    });
    w.d[1].stopped = true;
    w.p[1].transport.set_policy(Policy::Hold);
    let (mut room, mut position) = (room, 1);
    let mut deviations = 0;
    for (i, step) in steps(r).iter().enumerate() {
        let at = format!("{r}, step {i}");
        let what = field(step, "step").as_array().unwrap();
        let verb = what[0].as_str().unwrap();
        let oldest = w.p[1].transport.in_flight().first().map(|o| o.id);
        match verb {
            "abort" => {
                let frame = |f: &Value| Bytes::from(kv_testkit::vectors::bytes_of(f).unwrap());
                let frames: Vec<Bytes> = what[1].as_array().unwrap().iter().map(frame).collect();
                w.net.inject(&w.p[1].endpoint, frames);
            }
            "dequeue" | "start" => {
                w.send(1, room.as_ref().unwrap(), &[0], position, false);
                position += 1;
            }
            // Skipping is what `send()` to a Failed room does here: it queues nothing (C1).
            "skip_pop" => {}
            "done" | "quiescent" => oldest.into_iter().for_each(|id| w.p[1].transport.complete(id)),
            "poison" => w.p[1].transport.unresolve(oldest.expect("a write to lose sight of")),
            "clear" => w.clear_p(1, room.as_ref().unwrap()),
            "new_room" => room = Some(w.sender(1, 42)),
            other => panic!("{at}: {other}"),
        }
        w.run();
        let (sent, recorded) = (acks(&w), recorded_acks(step));
        let held = w.p[1].shard.held();
        let unquiet = w.p[1].transport.not_quiet().len() as u64;
        assert_eq!(held.ops as u64, unquiet, "{at}");
        assert!(sent.is_empty() || unquiet == 0, "{at}: ABORT_ACK over a write that may land (F3)");
        let live = w.p[1].shard.held().named > 0;
        let status = if live { room.as_ref().map(|s| s.poll() as u64) } else { None };
        assert_eq!(status, field(step, "room_status").as_u64(), "{at}");

        let mut differs = |why: &str, differ: bool| {
            assert!(differ, "{at}: no longer differs ({why})");
            deviations += 1;
        };
        match (r.name(), verb) {
            // B2: the second chunk is not taken before the first is done, so it is never outstanding beside it, and an
            // abort throws it away: the first write's end drains the room.
            ("two_chunks" | "two", _) if recorded.len() + sent.len() == 1 => {
                differs("B2: one chunk at a time", sent.len() + recorded.len() == 1);
            }
            ("two_chunks" | "two", _) => assert_eq!(sent, recorded, "{at}"),
            // F1: only its own share.
            ("failed_room_skip_path_pops_all_counts", "skip_pop") => {
                differs("F1: false ACK", recorded.len() == 1 && sent.is_empty() && unquiet == 1);
            }
            // F6: the old life's write stays counted across the reuse of its number.
            ("room_reuse_resets", "abort") if i > 3 => {
                differs("F6: false ACK", recorded.len() == 1 && sent.is_empty() && unquiet == 1);
            }
            // F3: an ABORT with a generation is acked when it is drained; there is no switch, and no ACK that is not true.
            ("feature_off", "abort") if backend == "mooncake" => {
                differs("F3: ACK over a write", recorded.len() == 1 && sent.is_empty() && unquiet == 1);
            }
            ("feature_off", "done" | "quiescent") => {
                differs("F3: drained, so acked", recorded.is_empty() && sent.len() == 1 && unquiet == 0);
            }
            // Mori does not even count then.
            ("feature_off", _) => assert_eq!(sent, recorded, "{at}"),
            // F1: the count stays where 0.5.23 has a mark besides; and the target stays, for when proof comes (F5).
            ("poisoned_never_acks" | "poison" | "room_reuse_resets", _) => {
                assert_eq!(sent, recorded, "{at}");
                let expected = u64::from(i > 0 || verb != "abort");
                assert_eq!(unquiet, expected, "{at}");
            }
            _ => {
                assert_eq!(sent, recorded, "{at}");
                let counted = match (verb, r.name()) {
                    // Counted when dequeued, although it is thrown away: ours never is.
                    ("dequeue", "failed_room_skip_path_pops_all_counts") if i > 1 => 1,
                    _ => field(step, "outstanding").as_u64().unwrap(),
                };
                assert_eq!(unquiet, counted, "{at}");
                if let Some(targets) = step.get("pending_targets") {
                    assert_eq!(held.pending_acks > 0, !targets.as_array().unwrap().is_empty(), "{at}");
                }
            }
        }
    }
    let expected = match r.name() {
        "two_chunks" | "two" => 2,
        "failed_room_skip_path_pops_all_counts" | "room_reuse_resets" => 1,
        "feature_off" if backend == "mooncake" => 2,
        "feature_off" if backend == "nixl" => 1,
        _ => 0,
    };
    assert_eq!(deviations, expected, "{r}");
    w.p[1].transport.complete_all();
    for op in w.p[1].transport.not_quiet() {
        w.p[1].transport.settle(op.id, true, true);
    }
    w.run();
    assert_eq!((w.p[1].shard.held().ops, w.p[1].shard.held().pending_acks), (0, 0), "{r}");
}

#[test]
fn deferred_abort_prefill() {
    let file = load("status_and_abort");
    for (backend, n) in [("MooncakeKVManager", 13), ("NixlKVManager", 13), ("MoriKVManager", 6)] {
        file.select("backend", backend, n).iter().for_each(abort_prefill);
    }
}

#[test]
fn deferred_abort_decode() {
    let file = load("status_and_abort");
    let [r] = &file.select("fn", "deferred_abort_decode", 1)[..] else { panic!() };
    // `safe[k]`: release allowed when k ranks were contacted.
    for required in [0u32, 1, 2] {
        let mut w = world("nixl", Shape::tp(required.max(1), 1, 0), 1);
        w.p.iter_mut().for_each(|p| p.stopped = true);
        let open = |w: &mut World| {
            let d = w.receiver(0, 42);
            w.run();
            if required > 0 {
                w.publish(0, &d, &[0], 0);
                w.run();
            }
            w.abort_d(0, &d);
            w.run();
            d
        };
        let mut d = None;
        let mut generation = 0;
        for (i, step) in steps(r).iter().enumerate() {
            let verb = field(step, "step").as_str().unwrap();
            let at = format!("{r}, step {i} ({verb}), {required} contacted");
            let ack = |w: &World, rank: u64, generation: Option<u64>| {
                let mut frames = vec!["ABORT_ACK".to_owned(), "42".into(), rank.to_string()];
                frames.extend(generation.map(|g| g.to_string()));
                w.net.inject(&w.d[0].endpoint, frames);
            };
            match verb {
                // Here one room is aborted once; a new generation is a new life of its number, which needs the old one
                // to be over (F6).
                "register" | "re-register" => {
                    if let Some(old) = d.take() {
                        w.clear_d(0, &old);
                        w.run();
                    }
                    d = Some(open(&mut w));
                    generation += u64::from(required > 0);
                }
                "ack gen0 rank0" => ack(&w, 0, Some(0)),
                "ack gen1 rank0" | "dup" => ack(&w, 0, Some(1)),
                "no generation" => ack(&w, 1, None),
                "legacy 2 frames" => drop(w.net.inject(&w.d[0].endpoint, [&b"ABORT_ACK"[..], b"42"])),
                "rank1" => ack(&w, 1, Some(1)),
                "other tag" => drop(w.net.inject(&w.d[0].endpoint, [&b"KV_STATUS"[..]])),
                "late gen1" => ack(&w, 1, Some(1)),
                "clear" => w.clear_d(0, d.as_ref().unwrap()),
                other => panic!("{at}: {other}"),
            }
            w.run();
            let recorded = field(field(step, "safe"), &required.to_string()).as_bool().unwrap();
            let safe = d.as_ref().unwrap().releasable();
            assert_eq!(safe, recorded, "{at}");
            let armed = w.d[0].shard.held().generations as u64;
            if verb == "clear" {
                // 0.5.23 forgets the generation with the tracker; ours holds the pages, and with them the number.
                assert_eq!(armed, u64::from(required > 0), "{at}");
            } else if required > 0 {
                assert_eq!(field(step, "generation").as_u64(), Some(generation), "{at}");
            }
        }
    }
}
