//! `update_status` and `apply_prefill_status`: the states, and what a prefill's status does to them.

use std::sync::Arc;

use kv_core::control::Multipart;
use kv_core::engine::RoomShared;
use kv_core::ids::Room;
use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::time::Timestamp;
use kv_core::wire::*;
use kv_testkit::directory::{Answer, Shape};
use kv_testkit::fake_transport::Policy;
use kv_testkit::vectors::load;

use super::support::*;

/// A sender of room 42 on prefill rank 0, in state `current` (`None`: no room).
fn sender_in(w: &mut World, current: Option<u64>) -> Option<Arc<RoomShared>> {
    w.p[0].transport.set_policy(Policy::Hold);
    let current = current?;
    let (s, r) = (w.sender(0, 42), w.receiver(0, 42));
    w.run();
    if current != 1 {
        w.publish(0, &r, &[0], 0);
        w.run();
    }
    match current {
        0 => w.abort_p(0, &s),
        3 | 4 => w.send(0, &s, &[0], 0, true),
        _ => {}
    }
    w.run();
    if current == 4 {
        w.p[0].transport.complete_all();
        w.run();
    }
    assert_eq!(s.poll() as u64, current);
    Some(s)
}

/// The metadata of decode rank 0 for room 42.
fn metadata(w: &World) -> Multipart {
    let metadata = Metadata {
        room: 42,
        endpoint: w.d[0].endpoint.clone(),
        name: w.d[0].name.clone(),
        dst_pages: [0].into(),
        aux_index: Some(0),
        required_dst_info_num: 1,
        state_indices: Vec::new(),
        decode_prefix_len: Some(0),
        is_dummy: false,
        device_kv_indices: None,
    };
    NixlDialect::new().encode_metadata(&metadata).unwrap()
}

#[test]
fn update_status_of_the_sender() {
    let file = load("status_and_abort");
    for r in file.select("fn", "update_status", 30) {
        let (current, new) = (r.field("current").as_u64(), r.u64("new"));
        let mut w = world("nixl", Shape::default(), 1);
        let s = sender_in(&mut w, current);
        let again = match (current, new) {
            // A state for no room: what could bring it names a room that nobody made.
            (None, 0 | 3 | 4) => {
                w.net.inject(&w.p[0].endpoint, [&b"ABORT"[..], b"42"]);
                None
            }
            // Created; created with the metadata already there (0.5.23: a dummy CP rank).
            (None, _) => {
                let receiver = (new == 2).then(|| w.receiver(0, 42));
                w.run();
                if let Some(r) = receiver {
                    w.publish(0, &r, &[0], 0);
                    w.run();
                }
                Some(w.sender(0, 42))
            }
            (_, 1) => Some(w.sender(0, 42)),
            (_, 0) => {
                w.abort_p(0, s.as_ref().unwrap());
                None
            }
            // Metadata again; a chunk; the last write done.
            (_, 2) => {
                w.net.inject(&w.p[0].endpoint, metadata(&w));
                None
            }
            (_, n) => {
                w.send(0, s.as_ref().unwrap(), &[0], 0, true);
                w.run();
                if n == 4 {
                    w.p[0].transport.complete_all();
                }
                None
            }
        };
        w.run();
        let got = match (&s, &again) {
            (Some(s), _) => Some(s.poll() as u64),
            (None, Some(created)) => Some(created.poll() as u64),
            (None, None) => (w.p[0].shard.held().rooms > 0).then_some(99),
        };
        let recorded = r.field("result").as_u64();
        match (current, new) {
            // Nothing is written, and so nothing can be done, before the metadata (B2).
            (Some(1), 3 | 4) => assert_eq!(got, Some(1), "{r}"),
            // In 0.5.23 Failed beats Success. Terminal states stay (D3).
            (Some(4), 0) => assert_eq!((got, recorded), (Some(4), Some(0)), "{r}"),
            // A second chunk after the last is a mistake of the caller, and fails the room.
            (Some(3), 3) => assert_eq!((got, recorded), (Some(0), Some(3)), "{r}"),
            (Some(3), 4) => {
                let mut w = world("nixl", Shape::default(), 1);
                let s = sender_in(&mut w, Some(3)).unwrap();
                w.p[0].transport.complete_all();
                w.run();
                assert_eq!(Some(s.poll() as u64), recorded, "{r}");
            }
            _ => assert_eq!(got, recorded, "{r}"),
        }
        if current.is_some() && new == 1 {
            let second = again.unwrap();
            assert_eq!(second.poll(), KvPoll::Failed, "{r}: a live room is not created again (F40)");
        }
        w.p[0].transport.complete_all();
        w.run();
    }
}

#[test]
fn update_status_of_the_receiver() {
    let room = Room::new(42).unwrap();
    let policy = Arc::new(ReceiverPolicy {
        waiting_timeout: std::time::Duration::from_secs(300),
        release: ReleasePolicy::Proof,
    });
    let peers = Arc::new(Shape::default().peers());
    let said = |status| {
        let prefill_rank = peers.records[0].rank;
        ReceiverEvent::Status(KvStatus { room: 42, status, prefill_rank, reason: None })
    };
    let file = load("status_and_abort");
    // A receiver exists from the start (B4), and shows no Transferring (protocol 7.3): those rows are the sender's.
    let rows = file.select_by("update_status of a receiver", 16, |r| {
        r.name() == "update_status" && r.field("current").as_u64().is_some_and(|c| c != 3) && r.u64("new") != 3
    });
    for r in rows {
        let (current, new) = (r.u64("current"), r.u64("new"));
        let mut generation = 0;
        let mut m = ReceiverRoom::new(room, policy.clone());
        let mut on = |m: &mut ReceiverRoom, e| m.handle_event(Timestamp::ZERO, e, &mut generation, &mut Vec::new());
        if current != 1 {
            on(&mut m, ReceiverEvent::Peers(Ok(peers.clone())));
            on(&mut m, ReceiverEvent::Published { contacted: 1, error: None });
        }
        match current {
            0 => on(&mut m, ReceiverEvent::Abort),
            4 => on(&mut m, said(KvPoll::Success)),
            _ => {}
        }
        assert_eq!(m.poll() as u64, current);
        match new {
            0 => on(&mut m, ReceiverEvent::Abort),
            1 => on(&mut m, said(KvPoll::Bootstrapping)),
            2 => on(&mut m, ReceiverEvent::Peers(Ok(peers.clone()))),
            _ => on(&mut m, said(KvPoll::Success)),
        }
        match (current, new) {
            // Nobody knows our pages yet: such a Success is a violation (B1).
            (1, 4) => assert_eq!(m.poll(), KvPoll::Bootstrapping, "{r}"),
            (4, 0) => assert_eq!(m.poll(), KvPoll::Success, "{r}: terminal states stay (D3)"),
            _ => assert_eq!(m.poll() as u64, r.u64("result"), "{r}"),
        }
    }
}

#[test]
fn apply_prefill_status() {
    let file = load("status_and_abort");
    for r in file.select("fn", "apply_prefill_status", 10) {
        let required = r.field("required").as_u64().unwrap_or(1) as u32;
        let mut w = world("nixl", Shape::tp(required, 1, 0), 1);
        w.p.iter_mut().for_each(|p| p.stopped = true);
        // Recorded with the needed number unknown. Ours is known with the ranks, or the room is still looking (B4).
        if r.name() == "no_expected" {
            w.d[0].directory.answer("p:8998", Answer::Never);
        }
        let d = w.receiver(0, 42);
        w.run();
        if r.name() != "no_expected" {
            w.publish(0, &d, &[0], 0);
            w.run();
        }
        if matches!(r.name(), "cleared_room" | "tracker_gone") {
            w.clear_d(0, &d);
            w.run();
        }
        for (i, step) in steps(&r).iter().enumerate() {
            let at = format!("{r}, step {i}");
            let text = |key| field(step, key).as_u64().unwrap().to_string();
            let reason = field(step, "reason").as_str().unwrap_or_default();
            let frames = ["KV_STATUS", "42", &text("status"), &text("prefill_rank"), reason].map(str::to_owned);
            let before = d.poll();
            w.net.inject(&w.d[0].endpoint, frames);
            w.run();
            let recorded = field(step, "room_status").as_u64();
            let failure = d.failure().map(|f| f.reason.to_string());
            match (r.name(), i) {
                // B1: rank 5 was not asked.
                ("duplicate_rank_not_counted", 2) => {
                    assert_eq!((recorded, d.poll()), (Some(4), KvPoll::WaitingForInput), "{at}");
                    assert_eq!(w.d[0].stats.protocol_violations.get(), 1, "{at}");
                }
                // D3: Success stays.
                ("success_then_failed", 1) => {
                    assert_eq!((recorded, d.poll(), failure), (Some(0), KvPoll::Success, None), "{at}");
                }
                // A cleared room keeps its end (D3), and nothing comes of the message (B4). 0.5.23 can lose the
                // tracker alone; here it is part of the room.
                ("cleared_room" | "tracker_gone", _) => {
                    assert_eq!((d.poll(), w.d[0].shard.held().named), (before, 0), "{at}");
                    assert_eq!(w.d[0].stats.messages_stale.get(), i as u64 + 1, "{at}");
                }
                // Ours has no room in this state with a tracker: it is still Bootstrapping.
                ("no_expected", _) => assert_eq!(d.poll(), KvPoll::Bootstrapping, "{at}"),
                _ => {
                    assert_eq!(Some(d.poll() as u64), recorded, "{at}");
                    assert_eq!(failure.as_deref(), field(step, "failure").as_str(), "{at}");
                }
            }
        }
    }
}
