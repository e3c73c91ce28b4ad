//! F47: metadata slots. One writer a room, nothing left of the last user, and read for their own room only.

use kv_core::Room as Number;
use kv_core::aux_slots::{AuxEntry, AuxError, AuxSlots};
use kv_core::engine::AuxRule;
use kv_core::memory::MemoryOwner;
use kv_testkit::directory::Shape;

use super::*;

/// Which prefill rank wrote decode `d`'s slot, when the writes land in this order.
fn writers(w: &mut World, order: impl Fn(&mut Vec<usize>)) -> Vec<usize> {
    let (s, r) = w.open(7, &[4]);
    for (p, s) in s.iter().enumerate() {
        w.send(p, s, &[0], 0, true);
    }
    w.run();
    let mut ranks: Vec<usize> = (0..w.p.len()).collect();
    order(&mut ranks);
    for p in ranks {
        assert!(polls(&r).iter().all(|poll| *poll != 4), "Success before every rank is done");
        w.p[p].transport.complete_all();
        w.run();
    }
    assert!(polls(&r).iter().all(|poll| *poll == 4));
    let row_of = |d: usize| {
        let row = w.d[d].aux_row(1);
        (0..w.p.len()).find(|p| w.p[*p].aux_row(0) == row).expect("a row of somebody")
    };
    let found = (0..w.d.len()).map(row_of).collect();
    end(w, &s, &r);
    found
}

#[test]
fn cat_f47_the_last_stage_alone_writes_the_slot_in_whatever_order_the_stages_end() {
    for decode_ext in [true, false] {
        for reverse in [false, true] {
            let shape = Shape { prefill_pp: 3, ..Shape::default() };
            let mut w = held_world(WorldSpec { decode_ext, ..WorldSpec::of(shape, 1) });
            let found = writers(&mut w, |ranks| {
                if reverse {
                    ranks.reverse();
                }
            });
            assert_eq!(found, [2], "ext: {decode_ext}, reverse: {reverse}");
        }
    }
}

#[test]
fn cat_f47_with_stages_on_both_sides_each_decode_gets_its_own_stages_row() {
    for decode_ext in [true, false] {
        for stage in [0, 1] {
            let shape = Shape { prefill_pp: 2, decode_pp: 2, decode_pp_rank: stage, ..Shape::default() };
            let mut w = held_world(WorldSpec { decode_ext, ..WorldSpec::of(shape, 1) });
            // Only the stage that was asked takes part.
            let p = stage as usize;
            let (s, r) = (w.sender(p, 7), w.receiver(0, 7));
            w.run();
            w.publish(0, &r, &[4], 1);
            w.send(p, &s, &[0], 0, true);
            w.run();
            w.p[p].transport.complete_all();
            w.run();
            assert_eq!(r.poll(), SUCCESS);
            assert_eq!(w.d[0].aux_row(1), w.p[p].aux_row(0), "ext: {decode_ext}, stage {stage}");
            w.clear_p(p, &s);
            w.clear_d(0, &r);
            w.run();
            w.assert_nothing_held();
        }
    }
}

#[test]
fn cat_f47_cp_rank_0_alone_writes_the_slot() {
    for decode_ext in [true, false] {
        let shape = Shape { prefill_cp: 2, all_cp: true, mla: true, ..Shape::default() };
        let mut w = held_world(WorldSpec { decode_ext, ..WorldSpec::of(shape, 1) });
        assert_eq!(writers(&mut w, |ranks| ranks.reverse()), [0], "ext: {decode_ext}");
    }
}

#[test]
fn cat_f47_the_rule_towards_0_5_23_by_tp_group() {
    let mut w = world();
    let registration = |attn_tp_size| {
        let mut r = w.d[0].registration();
        r.attn_tp_size = attn_tp_size;
        r
    };
    // Prefill TP 4 on decode TP 2: ranks 0 and 1 serve decode rank 0, 2 and 3 decode rank 1.
    let writes = |rank, decode_tp| {
        let rule = AuxRule { attn_tp: (4, rank), cp_rank: 0, last_stage: true, kv_entries: 4 };
        rule.writes(&registration(decode_tp), None)
    };
    let by = |decode_tp| [0, 1, 2, 3].map(|rank| writes(rank, decode_tp));
    assert_eq!(by(2), [true, false, true, false]);
    assert_eq!(by(1), [true, false, false, false]);
    assert_eq!(by(4), [true; 4]);
    assert_eq!(by(8), [true; 4]);
    // Decode's own word goes first.
    let rule = AuxRule { attn_tp: (4, 1), cp_rank: 1, last_stage: false, kv_entries: 0 };
    assert!(rule.writes(&registration(1), Some(true)) && !AuxRule::ALONE.writes(&registration(1), Some(false)));
    w.run();
}

fn room(n: u64) -> Number {
    Number::new(n).unwrap()
}

#[test]
fn cat_f47_a_slot_leaves_no_trace_and_is_read_for_its_own_room_only() {
    let slots = AuxSlots::new(2, &[64, 128, 64], 2).unwrap();
    let a = slots.take().unwrap();
    assert_eq!(slots.verify(a, room(7)), Err(AuxError::NotWritten { slot: a, room: room(7) }));
    slots.write(a, 0, b"output ids of room 7").unwrap();
    slots.write(a, 1, &[0xff; 128]).unwrap();
    slots.name(a, room(7)).unwrap();
    assert_eq!((slots.verify(a, room(7)), slots.room(a)), (Ok(()), 7));
    assert_eq!(slots.verify(a, room(8)), Err(AuxError::OtherRoom { slot: a, room: room(8), found: 7 }));
    let mut read = [0; 20];
    slots.read(a, 0, &mut read).unwrap();
    assert_eq!(&read, b"output ids of room 7");

    let b = slots.take().unwrap();
    assert_eq!((slots.take(), slots.taken()), (Err(AuxError::Full(2)), 2));
    slots.give_back(a).unwrap();
    assert_eq!(slots.give_back(a), Err(AuxError::NotTaken(a)), "twice would hand it to two rooms");
    assert_eq!(slots.give_back(9), Err(AuxError::NotTaken(9)));
    let again = slots.take().unwrap();
    assert_eq!((again, slots.room(again)), (a, 0));
    for buffer in 0..3 {
        let mut row = vec![1; if buffer == 1 { 128 } else { 64 }];
        slots.read(again, buffer, &mut row).unwrap();
        assert!(row.iter().all(|byte| *byte == 0), "buffer {buffer}");
    }
    slots.give_back(b).unwrap();
    slots.give_back(again).unwrap();
    assert_eq!(slots.taken(), 0);
}

#[test]
fn aux_slots_say_where_their_buffers_are_and_refuse_what_is_outside() {
    let slots = AuxSlots::new(4, &[64, 8], 1).unwrap();
    let entries: Vec<_> = slots.entries().collect();
    assert_eq!(entries[0], AuxEntry { offset: 0, len: 256, item_len: 64 });
    assert_eq!(entries[1], AuxEntry { offset: 256, len: 32, item_len: 8 });
    assert_eq!(MemoryOwner::len(&slots), 288);
    for (slot, buffer, len) in [(4, 0, 8), (0, 2, 8), (0, 1, 9)] {
        let refused = Err(AuxError::OutOfRange { slot, buffer, len });
        assert_eq!(slots.read(slot, buffer, &mut vec![0; len]), refused);
        assert_eq!(slots.write(slot, buffer, &vec![0; len]), refused);
    }
    assert!(matches!(AuxSlots::new(1, &[12], 0), Err(AuxError::BadRow { buffer: 0, bytes: 12 })));
    assert!(matches!(AuxSlots::new(1, &[0], 0), Err(AuxError::BadRow { .. })));
    assert!(matches!(AuxSlots::new(1, &[8], 1), Err(AuxError::OutOfRange { .. })));
}
