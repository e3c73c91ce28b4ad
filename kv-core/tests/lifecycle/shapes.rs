//! Several prefill ranks for one decode, several decodes for one prefill rank, dummies.

use std::sync::Arc;

use kv_core::control::Multipart;
use kv_core::hooks::{ManagerHooks, TcpHooks};
use kv_core::poll::{AgreedPoll, KvPoll};
use kv_core::wire::{Dialect, Registration, WireError};
use kv_testkit::directory::Shape;
use kv_testkit::fake_transport::Policy;

use super::support::*;

#[test]
fn cat_f01_two_pp_ranks_with_the_same_chunk_numbers_both_count() {
    let mut w = World::new(WorldSpec::of(Shape { prefill_pp: 2, ..Shape::default() }, 1));
    let (s, r) = w.open(7, &[1, 2, 3]);
    for (p, room) in s.iter().enumerate() {
        for chunk in 0..3 {
            w.send(p, room, &[chunk], chunk as u32, chunk == 2);
        }
        w.run();
        assert_eq!((room.poll(), r[0].poll() as u8), (SUCCESS, if p == 0 { 2 } else { 4 }));
    }
    w.assert_copied(0, &[0, 1, 2], 0, &[1, 2, 3]);
    w.assert_copied(1, &[0, 1, 2], 0, &[1, 2, 3]);
    end(&mut w, &s, &r);
}

#[test]
fn stages_of_equal_pp_pair_one_to_one() {
    let shape = Shape { prefill_pp: 2, decode_pp: 2, ..Shape::default() };
    let mut w = World::new(WorldSpec::of(shape, 1));
    let (s, r) = w.open(7, &[5]);
    assert_eq!(polls(&s), [2, 1], "decode's stage 0 asks prefill's stage 0 alone");
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    assert_eq!(r[0].poll(), SUCCESS);
    w.assert_copied(0, &[0], 0, &[5]);
    end(&mut w, &s, &r);
}

#[test]
fn every_cp_rank_sends_its_part_of_the_pages() {
    let shape = Shape { prefill_cp: 2, all_cp: true, ..Shape::default() };
    let mut w = World::new(WorldSpec::of(shape, 1));
    let (s, r) = w.open(7, &[10, 11, 12, 13]);
    w.send(0, &s[0], &[0, 1], 0, true);
    w.run();
    assert_eq!(r[0].poll(), KvPoll::WaitingForInput);
    w.send(1, &s[1], &[4, 5], 2, true);
    w.run();
    assert_eq!(r[0].poll(), SUCCESS);
    w.assert_copied(0, &[0, 1], 0, &[10, 11]);
    w.assert_copied(1, &[4, 5], 0, &[12, 13]);
    end(&mut w, &s, &r);
}

/// A decode that does not say how many pages it has, as Mooncake's and Mori's.
struct Unsaid(TcpHooks);

impl ManagerHooks for Unsaid {
    fn dialect(&self) -> &dyn Dialect {
        self.0.dialect()
    }

    fn build_receiver_registration_message(&self, registration: &Registration) -> Result<Multipart, WireError> {
        self.0.build_receiver_registration_message(&Registration { kv_slots: None, ..registration.clone() })
    }
}

/// Decode's pages beyond ours are its pages as well, where the transport knows what it registered; page 19 of the last
/// layer is, and page 20 is not.
#[test]
fn r_h2_a_decode_that_does_not_say_its_pages_may_have_more_where_writes_are_checked() {
    let spec = WorldSpec {
        hooks: Arc::new(Unsaid(TcpHooks::new())),
        prefill_ext: false,
        decode_ext: false,
        more_at_decode: 4,
        checks_destinations: true,
        ..WorldSpec::default()
    };
    let mut w = World::new(spec.clone());
    let (s, r) = w.open(7, &[17, 19]);
    w.send(0, &s[0], &[0, 15], 0, true);
    w.run();
    assert_eq!(r[0].poll(), SUCCESS, "{:?}", s[0].failure());
    w.assert_copied(0, &[0, 15], 0, &[17, 19]);
    let (outside, _) = w.open(8, &[20]);
    w.send(0, &outside[0], &[0], 0, true);
    w.run();
    assert_eq!(outside[0].poll(), KvPoll::Failed);

    // Where nobody checks, it is taken to have as many as we.
    let mut w = World::new(WorldSpec { checks_destinations: false, ..spec });
    let (s, _) = w.open(7, &[17]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    assert!(reason(&s[0]).contains("destination page 17 is outside 0..16"), "{}", reason(&s[0]));
}

#[test]
fn tp_ranks_pair_one_to_one() {
    let mut w = World::new(WorldSpec::of(Shape::tp(4, 4, 0), 4));
    let (s, r) = w.open(7, &[3, 8]);
    for (p, room) in s.iter().enumerate() {
        w.send(p, room, &[1, 2], 0, true);
    }
    w.run();
    assert_eq!((polls(&s), polls(&r)), (vec![4; 4], vec![4; 4]));
    (0..4).for_each(|i| w.assert_copied(i, &[1, 2], i, &[3, 8]));
    end(&mut w, &s, &r);
}

#[test]
fn dummy_ranks_of_mla_write_nothing_and_report_to_nobody() {
    let shape = Shape { mla: true, ..Shape::tp(2, 1, 0) };
    let mut w = World::new(WorldSpec::of(shape, 1));
    let (s, r) = w.open(7, &[3]);
    for (p, room) in s.iter().enumerate() {
        w.send(p, room, &[1], 0, true);
    }
    w.run();
    assert_eq!((polls(&s), polls(&r)), (vec![4, 4], vec![4]));
    w.assert_copied(0, &[1], 0, &[3]);
    assert!(w.p[1].transport.ops().is_empty());
    assert_eq!(w.p[1].stats.messages_out.get(), 0);
    end(&mut w, &s, &r);
}

#[test]
fn an_abort_waits_for_the_dummies_acks_too() {
    let shape = Shape { mla: true, ..Shape::tp(2, 1, 0) };
    let mut w = World::new(WorldSpec::of(shape, 1));
    let (s, r) = w.open(7, &[3]);
    w.p[1].stopped = true;
    w.abort_d(0, &r[0]);
    w.run();
    assert_eq!((s[0].poll(), r[0].poll(), r[0].releasable()), (FAILED, FAILED, false));
    w.p[1].stopped = false;
    w.run();
    assert!(r[0].releasable());
    assert_eq!(w.d[0].stats.released_with_proof.get(), 1);
    end(&mut w, &s, &r);
}

#[test]
fn two_decodes_of_one_prefill_rank_both_get_everything() {
    let shape = Shape { mla: true, ..Shape::tp(1, 2, 0) };
    let mut w = World::new(WorldSpec::of(shape, 2));
    w.p[0].transport.set_policy(Policy::Hold);
    let (s, r) = (w.sender(0, 7), [w.receiver(0, 7), w.receiver(1, 7)]);
    w.run();
    w.publish(0, &r[0], &[3], 0);
    w.send(0, &s, &[1], 0, true);
    w.run();
    assert_eq!(s.poll(), KvPoll::Bootstrapping, "the second decode has not spoken");
    w.publish(1, &r[1], &[4], 0);
    w.run();
    let ops = w.p[0].transport.in_flight();
    assert_eq!(ops.len(), 2);
    w.p[0].transport.complete(ops[1].id);
    w.run();
    assert_eq!((s.poll() as u8, polls(&r)), (3, vec![2, 2]), "B2: both, or nobody");
    w.p[0].transport.complete(ops[0].id);
    w.run();
    assert_eq!((s.poll() as u8, polls(&r)), (4, vec![4, 4]));
    w.assert_copied(0, &[1], 0, &[3]);
    w.assert_copied(0, &[1], 1, &[4]);
    end(&mut w, &[s], &r);
}

#[test]
fn cat_f04_one_failing_rank_of_four_fails_the_room_with_its_reason() {
    let shape = Shape { prefill_pp: 4, ..Shape::default() };
    let mut w = World::new(WorldSpec::of(shape, 1));
    let (s, r) = w.open(7, &[3]);
    for (p, room) in s.iter().enumerate().take(3) {
        w.send(p, room, &[1], 0, true);
        w.run();
        assert_eq!(r[0].poll(), KvPoll::WaitingForInput);
    }
    w.abort_p(3, &s[3]);
    w.run();
    assert_eq!((r[0].poll(), reason(&r[0])), (FAILED, "Aborted by AbortReq.".into()));
    assert!(r[0].releasable(), "all four acked");
    end(&mut w, &s, &r);
}

#[test]
fn cat_f71_r_a4_r_g1_a_peer_that_does_not_fit_fails_on_both_sides_at_once() {
    let other_page: fn(&mut kv_core::layout::LayoutSpec) = |spec| {
        spec.kv.iter_mut().for_each(|e| e.item_len = 32);
    };
    let other_dcp: fn(&mut kv_core::layout::LayoutSpec) = |spec| spec.dcp_size = 2;
    for (tune_decode, says) in [(other_page, ["64", "32"]), (other_dcp, ["1", "2"])] {
        // Metadata first, or the sender first: the same.
        for sender_first in [true, false] {
            let mut w = World::new(WorldSpec { tune_decode, ..WorldSpec::default() });
            let early = sender_first.then(|| w.sender(0, 7));
            let r = w.receiver(0, 7);
            w.run();
            w.publish(0, &r, &[3], 0);
            w.run();
            assert_eq!(r.poll(), FAILED, "at once, not at a deadline");
            let s = early.unwrap_or_else(|| w.sender(0, 7));
            w.run();
            assert_eq!(s.poll(), FAILED);
            for room in [&s, &r] {
                let reason = reason(room);
                assert!(says.iter().all(|v| reason.contains(v)), "{reason}");
                assert!(reason.contains("10.0.1.1:7000 does not fit this prefill"), "{reason}");
            }
            assert_eq!(w.p[0].stats.peers_refused.get(), 1);
            assert!(w.p[0].transport.connects().is_empty());
            assert!(r.releasable());
            one(&mut w, &s, &r);
        }
    }
}

#[test]
fn r_g3_cat_f30_stages_decide_by_one_snapshot() {
    let mut w = World::new(WorldSpec::of(Shape { prefill_pp: 2, ..Shape::default() }, 1));
    let s: Vec<_> = (0..2).map(|p| w.sender(p, 7)).collect();
    let r = w.receiver(0, 7);
    w.run();
    let mut view = AgreedPoll::new(2);
    let look = |view: &mut AgreedPoll| s.iter().enumerate().for_each(|(rank, s)| view.report(rank, s.poll()));
    // One stage alone knows the metadata: the other's silence is Bootstrapping.
    w.publish(0, &r, &[3], 1);
    w.run();
    view.report(0, s[0].poll());
    assert_eq!((s[0].poll(), view.agree()), (KvPoll::WaitingForInput, KvPoll::Bootstrapping));
    look(&mut view);
    assert_eq!(view.agree(), KvPoll::WaitingForInput);
    // An abort lands on one of them after the consensus: good for this step on both, Failed in the next on both.
    // Decode, which would tell the other stage, is slow.
    w.d[0].stopped = true;
    w.abort_p(1, &s[1]);
    w.run();
    look(&mut view);
    assert_eq!((s[0].poll(), s[1].poll(), view.poll()), (KvPoll::WaitingForInput, FAILED, KvPoll::WaitingForInput));
    assert_eq!((view.agree(), view.poll()), (FAILED, FAILED));
    // It stays, whatever a rank says later.
    view.report(1, SUCCESS);
    view.report(0, SUCCESS);
    view.report(9, KvPoll::Bootstrapping);
    assert_eq!(view.agree(), FAILED);
    w.d[0].stopped = false;
    w.run();
    assert_eq!(polls(&s), [0, 0]);
    end(&mut w, &s, &[r]);
}

#[test]
fn r_h3_one_page_over_two_cp_ranks_adds_up() {
    for stages in [1, 2] {
        let shape = Shape { prefill_cp: 2, all_cp: true, prefill_pp: stages, ..Shape::default() };
        let mut w = World::new(WorldSpec::of(shape, 1));
        let (s, r) = w.open(7, &[10]);
        // One CP rank has the page, the other has none of it and says so.
        for (p, room) in s.iter().enumerate() {
            let pages: &[i32] = if w.p[p].place.1 == 1 { &[4] } else { &[] };
            w.send(p, room, pages, 0, true);
        }
        w.run();
        assert_eq!((polls(&s), polls(&r)), (vec![4; s.len()], vec![4]));
        end(&mut w, &s, &r);
        // Where both have nothing, nothing adds up.
        let (s, r) = w.open(8, &[10]);
        s.iter().enumerate().for_each(|(p, room)| w.send(p, room, &[], 0, true));
        w.run();
        assert_eq!(polls(&r), [0]);
        assert!(reason(&r[0]).contains("do not add up"), "{}", reason(&r[0]));
        end(&mut w, &s, &r);
    }
}
