//! H3: decode reports Success for what *this* life of the room announced, and for nothing else.

use std::sync::Arc;

use kv_core::directory::{PrefillPeers, PrefillRecord};
use kv_core::ids::{PrefillRank, ProcessGeneration, Room as Number};
use kv_core::net::Endpoint;
use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::time::Timestamp;
use kv_core::wire::{ExtPeer, Extension, KvStatus, RoomTag};
use kv_testkit::net::Action;

use super::*;

#[test]
fn r_h3_pages_that_are_not_written_fail_the_room_between_two_of_ours() {
    // Decode announced too few pages, or more than prefill sends: 0.5.23 reports Success.
    for (announced, sent) in [(vec![4], vec![0, 1]), (vec![4, 5], vec![0])] {
        for ours in [true, false] {
            let mut w = World::new(if ours { WorldSpec::default() } else { old_prefill() });
            let (s, r) = w.open(7, &announced);
            w.send(0, &s[0], &sent, 0, true);
            w.run();
            assert_eq!(polls(&r), [if ours { 0 } else { 4 }], "{announced:?} {sent:?} ours: {ours}");
            if ours {
                let text = match announced.len() < sent.len() {
                    true => "it has 2 pages, 1 were announced",
                    false => "2 pages were announced, and the prefill ranks wrote 1 by rank 0",
                };
                assert!(reason(&r[0]).contains(text), "{}", reason(&r[0]));
                assert!(r[0].releasable(), "prefill acks: nothing is outstanding");
            }
            end(&mut w, &s, &r);
        }
    }
}

/// Success of a room, with its tag changed on the way.
fn with_changed_tag(change: impl FnOnce(&mut Extension)) -> (World, Vec<Room>, Vec<Room>) {
    let mut w = world();
    let spy = Spy::on(&w);
    let rule = w.net.rule(Action::Drop, is_status);
    let (s, r) = w.open(7, &[4, 5]);
    w.send(0, &s[0], &[0, 1], 0, true);
    w.run();
    w.net.remove_rule(rule);
    assert_eq!((polls(&s), polls(&r)), (vec![4], vec![2]));
    let mut frames = spy.last(is_status).frames;
    let mut ext = extension(&frames).unwrap();
    change(&mut ext);
    *frames.last_mut().unwrap() = ext.encode();
    w.net.inject(&w.d[0].endpoint, frames);
    w.run();
    (w, s, r)
}

#[test]
fn r_h3_cat_f47_a_tag_that_does_not_match_is_a_named_failure() {
    fn tag(ext: &mut Extension) -> &mut RoomTag {
        ext.tag.as_mut().expect("a tag")
    }
    type Change = (fn(&mut Extension), &'static str);
    let changes: [Change; 6] = [
        (|e| tag(e).head ^= 1, "another room, life, prefix length, metadata slot or geometry"),
        (|e| tag(e).wrote_aux = false, "another room, life, prefix length, metadata slot or geometry"),
        (|e| tag(e).pages ^= 1, "it wrote 2 pages, but others than were announced"),
        (|e| tag(e).count = 3, "it has 3 pages, 2 were announced"),
        (|e| tag(e).count = 1, "2 pages were announced, and the prefill ranks wrote 1 by rank 0"),
        (|e| e.tag = None, "Success came without it"),
    ];
    for (change, text) in changes {
        let (mut w, s, r) = with_changed_tag(change);
        assert_eq!(polls(&r), [0], "{text}");
        let reason = reason(&r[0]);
        assert!(reason.contains(text) && reason.contains("rank 0") && reason.contains("room 7"), "{reason}");
        end(&mut w, &s, &r);
    }
    let (mut w, s, r) = with_changed_tag(|_| {});
    assert_eq!(polls(&r), [4], "as it was");
    end(&mut w, &s, &r);
}

#[test]
fn r_h3_several_chunks_a_prefix_and_an_empty_request_match() {
    for chunks in [vec![vec![0, 1], vec![2]], vec![vec![3], vec![], vec![1, 0]], vec![vec![]]] {
        let mut w = world();
        let pages: Vec<i32> = chunks.iter().flatten().map(|p| p + 8).collect();
        let (s, r) = w.open(7, &pages);
        let mut start = 0;
        for (i, chunk) in chunks.iter().enumerate() {
            w.send(0, &s[0], chunk, start, i + 1 == chunks.len());
            start += chunk.len() as u32;
        }
        w.run();
        assert_eq!(polls(&r), [4], "{chunks:?}");
        end(&mut w, &s, &r);
    }
}

/// TP, CP and PP rank.
type Places<'a> = &'a [(u32, u32, u32)];

const LIFE: u64 = 5;
const GEOMETRY: u64 = 77;

/// Decode's room with these prefill ranks, metadata for `pages` published.
fn receiver(ranks: Places<'_>, pages: &[i32]) -> ReceiverRoom {
    let ext = Some(ExtPeer::new(ProcessGeneration(1)));
    let record = |(i, &(tp_rank, cp_rank, pp_rank)): (usize, &(u32, u32, u32))| PrefillRecord {
        endpoint: Endpoint::new("p", 1 + i as u16),
        rank: PrefillRank(i as u32),
        cp_rank,
        tp_rank,
        pp_rank,
        is_dummy: false,
        ext,
    };
    let peers = PrefillPeers {
        bootstrap_addr: "p:8998".into(),
        pool_key: "p:8998_0_0_0".into(),
        records: ranks.iter().enumerate().map(record).collect(),
        required_dst_info_num: 1,
        required_prefill_response_num: ranks.len() as u32,
        generation: 1,
    };
    let policy = ReceiverPolicy { waiting_timeout: secs(300), release: ReleasePolicy::Proof };
    let mut room = ReceiverRoom::new(Number::new(7).unwrap(), Arc::new(policy)).checking_tags(LIFE, GEOMETRY);
    on(&mut room, ReceiverEvent::Peers(Ok(Arc::new(peers))));
    let spec = PublishSpec {
        pages: pages.into(),
        aux_index: 3,
        state_indices: Vec::new(),
        decode_prefix_len: 16,
        device_kv_indices: None,
    };
    on(&mut room, ReceiverEvent::Publish(Box::new(spec)));
    on(&mut room, ReceiverEvent::Published { contacted: ranks.len(), error: None });
    room
}

fn on(room: &mut ReceiverRoom, event: ReceiverEvent) {
    room.handle_event(Timestamp::default(), event, &mut 0, &mut Vec::new());
}

/// Success of a rank that wrote these pages at these positions.
fn wrote(rank: u32, parts: &[(u32, &[i32])], aux: bool) -> ReceiverEvent {
    let mut sum = PageSum::default();
    parts.iter().for_each(|(first, pages)| sum.add(*first, pages));
    let head = TagHead {
        room: Number::new(7).unwrap(),
        generation: LIFE,
        decode_prefix_len: 16,
        geometry: GEOMETRY,
        aux_index: aux.then_some(3),
    };
    let status = KvStatus { room: 7, status: KvPoll::Success, prefill_rank: PrefillRank(rank), reason: None };
    ReceiverEvent::StatusOf(status, Some(sum.tag(&head)))
}

#[test]
fn r_h3_ranks_that_share_the_pages_are_checked_together() {
    let pages = [10, 11, 12, 13];
    let (front, back) = (&pages[..2], &pages[2..]);
    // CP ranks of two PP stages; TP ranks that shard the pages; every stage the whole.
    let cp = [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)];
    let sharded = [(0, 0, 0), (1, 0, 0)];
    let whole = [(0, 0, 0), (0, 0, 1)];
    let good: [(Places<'_>, Vec<ReceiverEvent>); 4] = [
        (
            &cp,
            vec![
                wrote(0, &[(0, front)], false),
                wrote(3, &[(2, back)], false),
                wrote(1, &[(2, back)], false),
                wrote(2, &[(0, front)], true),
            ],
        ),
        (&sharded, vec![wrote(1, &[(1, &[11]), (3, &[13])], false), wrote(0, &[(0, &[10]), (2, &[12])], true)]),
        (&whole, vec![wrote(0, &[(0, &pages)], false), wrote(1, &[(0, front), (2, back)], true)]),
        (&sharded, vec![wrote(0, &[(0, &pages)], true), wrote(1, &[(0, &pages)], false)]),
    ];
    for (i, (ranks, events)) in good.into_iter().enumerate() {
        let mut room = receiver(ranks, &pages);
        for event in events {
            assert_eq!(room.poll(), KvPoll::WaitingForInput, "case {i}");
            on(&mut room, event);
        }
        assert_eq!(room.poll(), KvPoll::Success, "case {i}: {:?}", room.failure());
    }
    let bad: [(Places<'_>, Vec<ReceiverEvent>); 3] = [
        // The same part twice; a part missing; the parts of one stage written by the other.
        (&sharded, vec![wrote(0, &[(0, front)], true), wrote(1, &[(0, front)], false)]),
        (&sharded, vec![wrote(0, &[(0, front)], true), wrote(1, &[(2, &back[..1])], false)]),
        (&whole, vec![wrote(0, &[(0, front)], true), wrote(1, &[(2, back)], false)]),
    ];
    for (i, (ranks, events)) in bad.into_iter().enumerate() {
        let mut room = receiver(ranks, &pages);
        events.into_iter().for_each(|event| on(&mut room, event));
        assert_eq!(room.poll(), KvPoll::Failed, "case {i}");
        assert!(room.failure().unwrap().reason.contains("do not add up"), "case {i}");
        assert!(!room.releasable(), "case {i}: held until the ranks are quiet");
    }
}

#[test]
fn r_h3_a_repeated_success_is_not_checked_twice() {
    let pages = [10, 11];
    let mut room = receiver(&[(0, 0, 0), (1, 0, 0)], &pages);
    for _ in 0..3 {
        on(&mut room, wrote(0, &[(0, &pages[..1])], true));
    }
    assert_eq!(room.poll(), KvPoll::WaitingForInput);
    on(&mut room, wrote(1, &[(1, &pages[1..])], false));
    assert_eq!(room.poll(), KvPoll::Success);
}
