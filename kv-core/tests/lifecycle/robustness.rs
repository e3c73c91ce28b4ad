//! Bad input: counted, dropped or answered; the shard goes on.

use bytes::Bytes;
use kv_core::poll::KvPoll;
use kv_testkit::Rng;

use super::support::*;

/// One room from end to end: the shards work.
fn works(w: &mut World, n: u64) {
    let (s, r) = w.open(n, &[3]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    assert_eq!((polls(&s), polls(&r)), (vec![4], vec![4]));
    w.close(&s, &r);
    w.assert_nothing_held();
}

#[test]
fn cat_f61_bad_frames_then_a_good_one() {
    let mut w = world();
    works(&mut w, 1);
    let text = |parts: &[&str]| parts.iter().map(|p| Bytes::copy_from_slice(p.as_bytes())).collect::<Vec<_>>();
    let huge = "9".repeat(40);
    let bad: Vec<Vec<Bytes>> = vec![
        vec![],
        text(&["x"]),
        text(&["KV_STATUS", "7"]),
        vec![Bytes::new(); 40],
        vec![Bytes::from_static(&[0xff, 0xfe]); 5],
        text(&["KV_STATUS", &huge, "4", "0", ""]),
        text(&["KV_STATUS", "7", "4", "-1", ""]),
        text(&["KV_STATUS", "7", "77", "0", ""]),
        text(&["ABORT"]),
        text(&["ABORT", "-5", "h", "1", "1"]),
        text(&["ABORT_ACK", "7", "0", &huge]),
        text(&["KvTcpMsgGuard", "None"]),
        text(&["KvTcpMsgGuard", "7", "host", "99999999", "x"]),
        text(&["ABORT", "0", "10.0.1.1", "7000", "1"]),
    ];
    let (p, d) = (w.p[0].endpoint.clone(), w.d[0].endpoint.clone());
    for message in &bad {
        w.net.inject(&p, message.clone());
        w.net.inject(&d, message.clone());
    }
    w.run();
    for stats in [&w.p[0].stats, &w.d[0].stats] {
        let seen = stats.messages_malformed.get() + stats.protocol_violations.get() + stats.messages_stale.get();
        assert!(seen >= bad.len() as u64 - 3, "each is counted: {:?}", stats.snapshot());
    }
    works(&mut w, 2);
}

#[test]
fn cat_f61_random_frames_create_nothing_and_stop_nothing() {
    let mut w = world();
    works(&mut w, 1);
    let mut rng = Rng::new(11);
    let words: [&[u8]; 14] = [
        b"KV_STATUS",
        b"ABORT",
        b"ABORT_ACK",
        b"KvTcpMsgGuard",
        b"CHUNK_READY",
        b"STAGING_REQ",
        b"WATERMARK",
        b"7",
        b"-1",
        b"18446744073709551616",
        b"10.0.1.1",
        b"",
        b"\xff\xff",
        b"None",
    ];
    let (p, d) = (w.p[0].endpoint.clone(), w.d[0].endpoint.clone());
    for _ in 0..5000 {
        let n = rng.below(28);
        let frames: Vec<Bytes> = (0..n)
            .map(|_| match rng.below(4) {
                0 => {
                    let n = rng.below(40) as usize;
                    rng.bytes(n).into()
                }
                _ => Bytes::from_static(rng.pick(&words).unwrap()),
            })
            .collect();
        w.net.inject(if rng.chance(0.5) { &p } else { &d }, frames);
        if rng.chance(0.05) {
            w.run();
        }
    }
    w.run();
    // Whatever it took for an ABORT is answered or stale; an early room at most waits for its deadline.
    w.advance(secs(301));
    works(&mut w, 2);
}

#[test]
fn cat_f61_truncated_and_damaged_messages_of_a_real_conversation() {
    let mut w = world();
    let (s, r) = w.open(7, &[3]);
    let heard = std::sync::Arc::new(std::sync::Mutex::new(Vec::new()));
    let tap = heard.clone();
    w.net.rule_times(u32::MAX, kv_testkit::net::Action::Delay(std::time::Duration::ZERO), move |f| {
        tap.lock().unwrap().push((f.to.clone(), f.frames.clone()));
        false
    });
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    end(&mut w, &s, &r);
    works(&mut w, 8);
    let heard = std::mem::take(&mut *heard.lock().unwrap());
    assert!(heard.len() >= 3);
    let mut rng = Rng::new(3);
    for (to, frames) in &heard {
        for cut in 0..frames.len() {
            w.net.inject(to, frames[..cut].to_vec());
            let mut damaged = frames.clone();
            let mut bytes = damaged[cut].to_vec();
            if let Some(b) = bytes.first_mut() {
                *b ^= 1 << rng.below(8);
            }
            damaged[cut] = bytes.into();
            w.net.inject(to, damaged.to_vec());
        }
        w.run();
    }
    w.advance(secs(400));
    works(&mut w, 9);
}

#[test]
fn cat_f73_a_message_that_waits_before_the_start_is_handled() {
    let mut w = world();
    let r = w.receiver(0, 7);
    w.p[0].stopped = true;
    w.run();
    w.publish(0, &r, &[3], 0);
    w.run();
    assert!(!w.net.in_flight().is_empty());
    w.p[0].stopped = false;
    let s = w.sender(0, 7);
    w.send(0, &s, &[0], 0, true);
    w.run();
    assert_eq!((s.poll(), r.poll()), (SUCCESS, SUCCESS));
    one(&mut w, &s, &r);
}

#[test]
fn r_b1_statuses_of_ranks_that_were_not_asked_change_nothing() {
    let mut w = held_world(WorldSpec { prefill_ext: false, ..WorldSpec::default() });
    let (s, r, _) = in_flight(&mut w);
    for (status, rank) in [("4", "1"), ("0", "3"), ("3", "0"), ("4", "4294967295")] {
        w.net.inject(&w.d[0].endpoint, ["KV_STATUS", "7", status, rank, ""].map(str::to_owned));
    }
    w.run();
    assert_eq!(r.poll(), KvPoll::WaitingForInput);
    assert_eq!(w.d[0].stats.protocol_violations.get(), 4);
    w.p[0].transport.complete_all();
    w.run();
    one(&mut w, &s, &r);
}

#[test]
fn cat_f47_a_success_for_pages_nobody_announced_completes_nothing() {
    let mut w = world();
    let r = w.receiver(0, 7);
    w.run();
    w.net.inject(&w.d[0].endpoint, ["KV_STATUS", "7", "4", "0", ""].map(str::to_owned));
    w.run();
    assert_eq!(r.poll(), KvPoll::WaitingForInput);
    w.publish(0, &r, &[3], 0);
    w.run();
    assert_eq!(r.poll(), KvPoll::WaitingForInput);
    w.abort_d(0, &r);
    w.clear_d(0, &r);
    w.run();
    // A sender that comes late still learns of the abort, for a while.
    assert_eq!(w.p[0].shard.held().early, 1);
    w.advance(secs(300));
    w.assert_nothing_held();
}

#[test]
fn cat_f62_a_lane_that_panics_when_polled_stops_nobody() {
    // The fake panics inside `poll` while its writes go to a target that the fabric does not know.
    let mut w = held_world(WorldSpec::default());
    let (s, r, _) = in_flight(&mut w);
    let now = w.clock.now();
    let mut shard = broken_lane(&w);
    let stats = shard.stats().clone();
    let mut commands = vec![kv_core::engine::PrefillCommand::Create(kv_core::engine::RoomShared::new(
        kv_core::Room::new(1).unwrap(),
        1,
        None,
    ))];
    struct Silent;
    impl kv_core::control::ControlPlane for Silent {
        fn send(
            &mut self,
            _: &kv_core::Endpoint,
            _: kv_core::control::Multipart,
        ) -> Result<(), kv_core::control::ControlError> {
            Ok(())
        }
        fn recv(&mut self, _: usize, _: &mut Vec<kv_core::control::ControlEvent>) {}
        fn close(&mut self, _: &kv_core::Endpoint) {}
    }
    shard.step(now, &mut Silent, &mut commands);
    assert_eq!(stats.rooms_live.get(), 1);
    // Its deadlines still work.
    shard.step(now + secs(300), &mut Silent, &mut commands);
    assert_eq!((stats.rooms_timed_out.get(), stats.transport_panics.get()), (1, 2));
    w.p[0].transport.complete_all();
    w.run();
    one(&mut w, &s, &r);
}

struct Broken;

impl kv_core::transport::Lane for Broken {
    fn submit(&mut self, op: kv_core::transport::WriteOp) -> Result<(), kv_core::transport::SubmitError> {
        Err(kv_core::transport::SubmitError::Busy(op))
    }
    fn poll(&mut self, _: &mut Vec<kv_core::transport::LaneEvent>) {
        panic!("the backend breaks when polled");
    }
}

/// A shard like the world's, over a lane that panics.
fn broken_lane(w: &World) -> kv_core::engine::PrefillShard {
    use kv_core::engine::*;
    use kv_core::room::*;
    let config = PrefillShardConfig {
        limits: w.spec.limits.clone(),
        policy: std::sync::Arc::new(SenderPolicy {
            bootstrap_timeout: secs(300),
            failed_status: FailedStatusPolicy::AtOnce,
            max_destinations: 4,
            max_chunks: 4,
        }),
        early_timeout: secs(300),
        tombstone_timeout: secs(600),
        rank: kv_core::PrefillRank(0),
        freed: std::sync::Arc::new(|_| {}),
        aux_rule: AuxRule::ALONE,
        max_op_bytes: None,
        unknown_slots: kv_core::layout::UnknownSlots::AsOurs,
        extension: None,
        commands: std::sync::Arc::new(|_| {}),
    };
    let layout = kv_core::layout::LocalLayout::new(kv_core::layout::LayoutSpec::default(), []).unwrap();
    PrefillShard::new(
        config,
        w.spec.hooks.clone(),
        std::sync::Arc::new(layout),
        Box::new(Broken),
        Box::new(w.p[0].connector.clone()),
        std::sync::Arc::new(Stats::default()),
    )
}
