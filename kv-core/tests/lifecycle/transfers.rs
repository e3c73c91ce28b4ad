//! Whole transfers, byte for byte.

use kv_core::event::SourceEvent;
use kv_core::poll::KvPoll;
use kv_testkit::Rng;
use kv_testkit::fake_transport::{Policy, Verdict};

use super::support::*;

#[test]
fn one_chunk_and_its_aux_row_arrive() {
    let mut w = world();
    let (s, r) = w.open(7, &[4, 5, 9]);
    assert_eq!((polls(&s), polls(&r)), (vec![2], vec![2]));
    w.send(0, &s[0], &[0, 1, 3], 0, true);
    w.run();
    assert_eq!((s[0].poll(), r[0].poll()), (SUCCESS, SUCCESS));
    assert!(s[0].releasable() && r[0].releasable());
    w.assert_copied(0, &[0, 1, 3], 0, &[4, 5, 9]);
    w.assert_untouched(0, &[0, 1, 2, 3, 6, 7, 8, 10]);
    assert_eq!(w.d[0].aux_row(1), w.p[0].aux_row(0));
    assert_eq!(w.d[0].aux_row(0), vec![0; 48]);
    assert_eq!(w.p[0].transport.ops().len(), 1, "KV and aux of the last chunk are one write");
    end(&mut w, &s, &r);
}

#[test]
fn r_b2_chunks_arrive_one_after_another_and_aux_comes_last() {
    let mut w = held_world(WorldSpec::default());
    let (s, r) = w.open(7, &[10, 11, 12, 13]);
    w.send(0, &s[0], &[0, 1], 0, false);
    w.send(0, &s[0], &[2], 2, false);
    w.send(0, &s[0], &[3], 3, true);
    w.run();
    for n in 0..3 {
        let op = w.p[0].transport.only();
        assert_eq!(w.d[0].aux_row(1), vec![0; 48]);
        assert_eq!((s[0].poll(), r[0].poll()), (KvPoll::Transferring, KvPoll::WaitingForInput), "chunk {n}");
        w.p[0].transport.complete(op.id);
        w.run();
    }
    assert_eq!((s[0].poll(), r[0].poll()), (SUCCESS, SUCCESS));
    w.assert_copied(0, &[0, 1, 2, 3], 0, &[10, 11, 12, 13]);
    assert_eq!(w.d[0].aux_row(1), w.p[0].aux_row(0));
    end(&mut w, &s, &r);
}

#[test]
fn a_request_without_pages_sends_its_aux_row_only() {
    let mut w = world();
    let (s, r) = w.open(7, &[]);
    w.send(0, &s[0], &[], 0, true);
    w.run();
    assert_eq!((s[0].poll(), r[0].poll()), (SUCCESS, SUCCESS));
    assert_eq!(w.d[0].aux_row(1), w.p[0].aux_row(0));
    w.assert_untouched(0, &(0..16).collect::<Vec<_>>());
    end(&mut w, &s, &r);
}

#[test]
fn pages_that_are_sent_before_the_metadata_wait_for_it() {
    let mut w = world();
    let s = w.sender(0, 7);
    w.send(0, &s, &[0], 0, true);
    w.run();
    assert_eq!(s.poll(), KvPoll::Bootstrapping);
    let r = w.receiver(0, 7);
    w.run();
    w.publish(0, &r, &[3], 0);
    w.run();
    assert_eq!((s.poll(), r.poll()), (SUCCESS, SUCCESS));
    w.assert_copied(0, &[0], 0, &[3]);
    one(&mut w, &s, &r);
}

#[test]
fn many_rooms_at_once_with_a_lane_that_is_often_busy() {
    let mut w = World::new(WorldSpec { pages: 128, ..WorldSpec::default() });
    w.order = Some(Rng::new(5));
    let (rng, max_polls, busy) = (Rng::new(6), 3, 0.3);
    w.p[0].transport.set_policy(Policy::Seeded { rng, max_polls, busy });
    w.p[0].transport.set_capacity(Some(4));
    let rooms: Vec<_> = (0..64).map(|i| (w.sender(0, 100 + i), w.receiver(0, 100 + i))).collect();
    w.run();
    for (i, (s, r)) in rooms.iter().enumerate() {
        let page = 2 * i as i32;
        w.publish(0, r, &[page, page + 1], 0);
        w.send(0, s, &[127 - page], 0, false);
        w.send(0, s, &[126 - page], 1, true);
    }
    w.advance(SECOND);
    for (i, (s, r)) in rooms.iter().enumerate() {
        assert_eq!((s.poll(), r.poll()), (SUCCESS, SUCCESS), "room {i}");
        let page = 2 * i as i32;
        w.assert_copied(0, &[127 - page, 126 - page], 0, &[page, page + 1]);
    }
    rooms.iter().for_each(|(s, r)| {
        w.clear_p(0, s);
        w.clear_d(0, r);
    });
    w.run();
    w.assert_nothing_held();
    assert_eq!(w.p[0].transport.connects().len(), 1, "one connection (F58)");
    assert_eq!(w.p[0].freed.lock().unwrap().len(), 64);
}

#[test]
fn r_a3_a_chunks_bytes_are_read_after_its_event_and_only_its_own() {
    let mut w = world();
    let (s, r) = w.open(7, &[4, 5]);
    let (first, second) = (SourceEvent::new(), SourceEvent::new());
    w.send_chunk(0, &s[0], &[0], 0, false, after(&first));
    w.send_chunk(0, &s[0], &[1], 1, true, after(&second));
    second.signal(Ok(()));
    w.run();
    assert!(w.p[0].transport.ops().is_empty(), "the second's event says nothing about the first");
    // The kernel writes the pages now.
    w.p[0].kv.fill(0, 64, 0xaa);
    first.signal(Ok(()));
    w.run();
    assert_eq!(r[0].poll(), SUCCESS);
    w.assert_copied(0, &[0, 1], 0, &[4, 5]);
    assert_eq!(w.d[0].page(0, 4), vec![0xaa; 64]);
    end(&mut w, &s, &r);
}

#[test]
fn r_a3_a_failed_event_fails_the_room_on_both_sides() {
    let mut w = world();
    let (s, r) = w.open(7, &[4]);
    let event = SourceEvent::new();
    w.send_chunk(0, &s[0], &[0], 0, true, after(&event));
    w.run();
    event.signal(Err("device lost".into()));
    w.run();
    for room in [&s[0], &r[0]] {
        assert_eq!((room.poll(), reason(room)), (FAILED, "wait_event of chunk 0 failed: device lost".into()));
    }
    w.assert_untouched(0, &[4]);
    end(&mut w, &s, &r);
}

#[test]
fn r_a3_an_event_that_fires_after_the_room_ended_does_nothing() {
    let mut w = world();
    let (s, r) = w.open(7, &[4]);
    let event = SourceEvent::new();
    w.send_chunk(0, &s[0], &[0], 0, true, after(&event));
    w.abort_p(0, &s[0]);
    w.run();
    end(&mut w, &s, &r);
    let again = w.sender(0, 7);
    event.signal(Ok(()));
    w.run();
    assert_eq!(again.poll(), KvPoll::Bootstrapping);
    assert!(w.p[0].transport.ops().is_empty());
    w.clear_p(0, &again);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn cat_f05_cat_f10_nobody_is_told_while_a_part_is_in_flight() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    w.p[0].transport.land_spans(op, 0..3);
    w.run();
    assert_eq!((s.poll(), r.poll()), (KvPoll::Transferring, KvPoll::WaitingForInput));
    assert_eq!(w.p[0].stats.messages_out.get(), 0);
    w.p[0].transport.complete(op);
    w.run();
    assert_eq!((s.poll(), r.poll()), (SUCCESS, SUCCESS));
    one(&mut w, &s, &r);
}

#[test]
fn cat_f11_the_sides_share_nothing_but_the_room() {
    // Each side counts its lives for itself; here they differ by construction.
    let mut w = world();
    let unused = w.sender(0, 1);
    let (s, r) = (w.sender(0, 7), w.receiver(0, 7));
    assert_ne!(s.life(), r.life());
    w.run();
    w.publish(0, &r, &[1], 0);
    w.send(0, &s, &[0], 0, true);
    w.run();
    assert_eq!(r.poll(), SUCCESS);
    w.clear_p(0, &unused);
    one(&mut w, &s, &r);
}

#[test]
fn r_c7_cat_f76_latencies_equal_the_fake_timings_to_the_tick() {
    let mut w = held_world(WorldSpec::default());
    let (s, r) = w.open(7, &[4, 5]);
    w.jump(secs(3));
    w.send(0, &s[0], &[0], 0, false);
    w.run();
    w.jump(secs(5));
    w.send(0, &s[0], &[1], 1, true);
    w.run();
    w.jump(secs(7));
    w.p[0].transport.complete_all();
    w.run();
    w.jump(secs(11));
    w.p[0].transport.complete_all();
    w.run();
    assert_eq!(s[0].latency(), Some((secs(5 + 7 + 11), secs(7 + 11))));
    end(&mut w, &s, &r);
}

#[test]
fn r_h2_pages_outside_either_side_are_refused_before_any_post() {
    let outside = "is outside 0..16";
    // A negative destination does not even get onto the wire.
    for (src, dst, text) in [(16, 0, outside), (0, 16, outside), (-1, 0, outside), (0, -1, "a negative index")] {
        let mut w = world();
        let (s, r) = w.open(7, &[dst]);
        w.send(0, &s[0], &[src], 0, true);
        w.run();
        assert_eq!((s[0].poll(), r[0].poll()), (FAILED, FAILED));
        assert!(reason(&r[0]).contains(text), "{}", reason(&r[0]));
        assert!(w.p[0].transport.ops().is_empty());
        end(&mut w, &s, &r);
    }
}

#[test]
fn cat_f62_one_rooms_trouble_is_its_own() {
    type Prepare = fn(&World);
    let verdicts: [(&str, Prepare); 4] = [
        ("rejected", |w| {
            w.p[0].transport.script_next(Verdict::Reject(kv_core::transport::TransportErrorKind::Backend))
        }),
        ("failed", |w| w.p[0].transport.script_next(Verdict::Fail { src_quiet: true, dst_quiet: true })),
        ("unresolved", |w| w.p[0].transport.script_next(Verdict::Unresolve)),
        ("panicked", |w| {
            let mut first = true;
            w.p[0].transport.set_policy(Policy::by(move |_| {
                assert!(!std::mem::take(&mut first), "the backend breaks on the first write");
                Verdict::Complete
            }));
        }),
    ];
    for (what, prepare) in verdicts {
        let mut w = world();
        prepare(&w);
        let rooms: Vec<_> = (1..=10).map(|n| (w.sender(0, n), w.receiver(0, n))).collect();
        w.run();
        for (i, (s, r)) in rooms.iter().enumerate() {
            w.publish(0, r, &[i as i32], 0);
            w.send(0, s, &[i as i32], 0, true);
        }
        w.run();
        assert_eq!((rooms[0].0.poll(), rooms[0].1.poll()), (FAILED, FAILED), "{what}");
        for (i, (s, r)) in rooms.iter().enumerate().skip(1) {
            assert_eq!((s.poll(), r.poll()), (SUCCESS, SUCCESS), "{what}, room {}", i + 1);
            w.assert_copied(0, &[i as i32], 0, &[i as i32]);
        }
        let retained = matches!(what, "unresolved" | "panicked") as u64;
        assert_eq!(w.p[0].stats.ops_retained.get(), retained, "{what}");
        assert_eq!(rooms[0].0.releasable(), retained == 0, "{what}");
        w.abandon();
    }
}

#[test]
fn cat_f69_ten_thousand_rooms_send_one_message_each_and_no_aux_data() {
    const ROOMS: u64 = 10_000;
    let mut w = world();
    for first in (1..=ROOMS).step_by(100) {
        let rooms: Vec<_> = (first..first + 100).map(|n| (w.sender(0, n), w.receiver(0, n))).collect();
        w.run();
        for (s, r) in &rooms {
            w.publish(0, r, &[3], 1);
            w.send(0, s, &[0], 0, true);
        }
        w.run();
        for (s, r) in &rooms {
            assert_eq!((s.poll(), r.poll()), (SUCCESS, SUCCESS));
            w.clear_p(0, s);
            w.clear_d(0, r);
        }
        w.run();
    }
    // The metadata slot goes with the last chunk's write; what travels by message is one status a room.
    assert_eq!(w.d[0].aux_row(1), w.p[0].aux_row(0));
    assert_eq!(w.p[0].stats.messages_out.get(), ROOMS);
    // One registration, one metadata a room.
    assert_eq!(w.d[0].stats.messages_out.get(), ROOMS + 1);
    w.assert_nothing_held();
}
