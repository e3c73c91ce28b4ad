//! Writes larger than the transport's largest op: cut into several ops, and one write to the room.

use kv_core::Limits;
use kv_core::ids::OpId;
use kv_core::poll::KvPoll;
use kv_core::room::ReleasePolicy;
use kv_testkit::fake_transport::{OpInfo, Verdict};

use super::support::*;

/// Three pages of 64 bytes in each of four entries are 768 bytes, and 48 of the aux row: ten pieces of at most this much.
const MAX: u64 = 90;

fn spec() -> WorldSpec {
    // Pages of a failed room are free by proof alone: what is released was proven.
    WorldSpec { max_op_bytes: Some(MAX), release: ReleasePolicy::Proof, ..WorldSpec::default() }
}

/// A room whose three pages are being written, with the first `posted` pieces accepted, the next one Busy.
fn begun(posted: usize) -> (World, Room, Room, Vec<OpId>) {
    let mut w = held_world(spec());
    w.p[0].transport.set_capacity(Some(posted));
    let (mut s, mut r) = w.open(7, &[4, 5, 9]);
    w.send(0, &s[0], &[0, 1, 3], 0, true);
    w.run();
    let ops: Vec<OpId> = w.p[0].transport.in_flight().iter().map(|o| o.id).collect();
    assert_eq!(ops.len(), posted);
    (w, s.remove(0), r.remove(0), ops)
}

fn let_go(w: &mut World) {
    w.p[0].transport.set_capacity(None);
    // A busy lane without news is tried again by time.
    w.advance(SECOND / 100);
}

fn arrived(w: &World) {
    w.assert_copied(0, &[0, 1, 3], 0, &[4, 5, 9]);
    w.assert_untouched(0, &[0, 1, 2, 3, 6, 7, 8, 10]);
    assert_eq!(w.d[0].aux_row(1), w.p[0].aux_row(0));
}

/// Every span of these ops, joined where they touch.
fn bytes_of(ops: &[OpInfo]) -> Vec<(u64, u64)> {
    let mut all: Vec<_> =
        ops.iter().flat_map(|o| o.plan.spans().map(|s| (s.dst_addr, s.len)).collect::<Vec<_>>()).collect();
    all.sort_unstable();
    all.dedup_by(|next, last| {
        let touch = last.0 + last.1 == next.0;
        last.1 += if touch { next.1 } else { 0 };
        touch
    });
    all
}

#[test]
fn r_f1_a_write_in_pieces_moves_the_bytes_of_one_op_each_once() {
    for max in [None, Some(1 << 20), Some(816), Some(815), Some(200), Some(64), Some(MAX), Some(7)] {
        let mut w = World::new(WorldSpec { max_op_bytes: max, ..spec() });
        let (s, r) = w.open(7, &[4, 5, 9]);
        w.send(0, &s[0], &[0, 1, 3], 0, true);
        w.run();
        assert_eq!((s[0].poll(), r[0].poll()), (SUCCESS, SUCCESS), "{max:?}");
        arrived(&w);
        let ops = w.p[0].transport.ops();
        assert_eq!(ops.len() == 1, max.is_none_or(|max| max >= 816), "{max:?}: {} ops", ops.len());
        assert!(ops.iter().all(|o| o.plan.total_bytes() <= max.unwrap_or(u64::MAX)), "{max:?}");
        assert_eq!(ops.iter().map(|o| o.plan.total_bytes()).sum::<u64>(), 816, "{max:?}: each byte once");
        let written: u64 = bytes_of(&ops).iter().map(|(_, len)| len).sum();
        assert_eq!(written, 816, "{max:?}: and every byte");
        assert_eq!(w.p[0].stats.bytes_done.get(), 816);
        end(&mut w, &s, &r);
    }
}

#[test]
fn r_b2_success_waits_for_every_piece_and_the_aux_row_goes_last() {
    let mut w = held_world(spec());
    let (s, r) = w.open(7, &[4, 5, 9]);
    w.send(0, &s[0], &[0, 1], 0, false);
    w.send(0, &s[0], &[3], 2, true);
    w.run();
    let mut seen = 0;
    // 512 bytes, then 304.
    for pieces in [8, 4] {
        let ops: Vec<_> = w.p[0].transport.in_flight().iter().map(|o| o.id).collect();
        seen += ops.len();
        assert!(ops.len() >= pieces, "{} pieces", ops.len());
        let last = *ops.last().unwrap();
        // In any order; the chunk is not done before its last one.
        for op in ops.iter().rev().skip(1).rev().chain([&last]) {
            assert_eq!(w.d[0].aux_row(1), vec![0; 48]);
            assert_eq!((s[0].poll(), r[0].poll()), (KvPoll::Transferring, KvPoll::WaitingForInput));
            assert_eq!(w.p[0].transport.ops().len(), seen, "the next chunk waits for all pieces of this one");
            w.p[0].transport.complete(*op);
            w.run();
        }
    }
    assert_eq!((s[0].poll(), r[0].poll()), (SUCCESS, SUCCESS));
    arrived(&w);
    end(&mut w, &s, &r);
}

#[test]
fn r_f2_busy_between_pieces_goes_on_with_the_rest_in_order_and_none_twice() {
    for posted in 0..9 {
        let (mut w, s, r, mut ops) = begun(posted);
        let_go(&mut w);
        ops.splice(.., w.p[0].transport.ops().iter().map(|o| o.id));
        let all = w.p[0].transport.ops();
        assert!(all.len() > posted);
        assert_eq!(all.iter().map(|o| o.plan.total_bytes()).sum::<u64>(), 816, "Busy after {posted}");
        assert_eq!(bytes_of(&all).iter().map(|(_, len)| len).sum::<u64>(), 816, "Busy after {posted}");
        let mut whole = World::new(spec());
        let (s2, r2) = whole.open(7, &[4, 5, 9]);
        whole.send(0, &s2[0], &[0, 1, 3], 0, true);
        whole.run();
        let lens = |ops: Vec<OpInfo>| ops.iter().map(|o| o.plan.total_bytes()).collect::<Vec<_>>();
        assert_eq!(lens(all), lens(whole.p[0].transport.ops()), "the same pieces in the same order");
        end(&mut whole, &s2, &r2);
        ops.iter().rev().for_each(|op| w.p[0].transport.complete(*op));
        w.run();
        assert_eq!((s.poll(), r.poll()), (SUCCESS, SUCCESS));
        arrived(&w);
        one(&mut w, &s, &r);
    }
}

#[test]
fn r_f1_a_bound_on_ops_in_flight_holds_for_pieces_too() {
    let limits = Limits { max_ops_per_peer: 3, ..Limits::default() };
    let mut w = held_world(WorldSpec { limits, ..spec() });
    let (s, r) = w.open(7, &[4, 5, 9]);
    w.send(0, &s[0], &[0, 1, 3], 0, true);
    w.advance(SECOND);
    while let Some(op) = w.p[0].transport.in_flight().first().cloned() {
        assert!(w.p[0].transport.in_flight().len() <= 3);
        w.p[0].transport.complete(op.id);
        w.run();
    }
    assert_eq!((s[0].poll(), r[0].poll()), (SUCCESS, SUCCESS));
    arrived(&w);
    end(&mut w, &s, &r);
}

#[test]
fn r_f2_r_f3_a_piece_that_fails_fails_the_chunk_and_its_siblings_stay_counted() {
    // What the middle piece says at first: (source, destination) quiet; none: unresolved.
    for first in [Some((true, true)), Some((true, false)), Some((false, true)), None] {
        let (mut w, s, r, ops) = begun(3);
        match first {
            Some((src, dst)) => w.p[0].transport.fail(ops[1], src, dst),
            None => w.p[0].transport.unresolve(ops[1]),
        }
        w.run();
        // Failed is said at once; nothing more is posted, though the lane takes it.
        assert_eq!((s.poll(), r.poll()), (FAILED, FAILED), "{first:?}");
        assert!(reason(&s).starts_with("Failed to send kv chunk 0 to "), "{}", reason(&s));
        let_go(&mut w);
        assert_eq!(w.p[0].transport.ops().len(), 3, "{first:?}");
        let (src, dst) = first.unwrap_or_default();
        for (n, op) in [ops[0], ops[2]].into_iter().enumerate() {
            assert!(!s.releasable() && !r.releasable(), "{first:?}: {n} of two siblings done");
            assert_eq!(w.p[0].shard.held().ops, 2 - n + usize::from(!(src && dst)));
            w.p[0].transport.complete(op);
            w.run();
        }
        assert_eq!(s.releasable(), src, "{first:?}");
        assert_eq!(r.releasable(), src && dst, "{first:?}: ABORT_ACK is proof");
        if !(src && dst) {
            w.p[0].transport.settle(ops[1], !src, !dst);
            w.run();
        }
        assert!(s.releasable() && r.releasable(), "{first:?}");
        assert_eq!(w.d[0].stats.released_with_proof.get(), 1);
        one(&mut w, &s, &r);
    }
}

#[test]
fn r_f1_two_pieces_that_fail_are_two_proofs() {
    let (mut w, s, r, ops) = begun(2);
    w.p[0].transport.fail(ops[0], true, false);
    w.p[0].transport.fail(ops[1], false, true);
    w.run();
    assert!(!s.releasable() && !r.releasable());
    w.p[0].transport.settle(ops[0], false, true);
    w.run();
    // The destination is quiet, the second one's source is not.
    assert!(!s.releasable() && !r.releasable());
    w.p[0].transport.settle(ops[1], true, false);
    w.run();
    assert!(s.releasable() && r.releasable());
    one(&mut w, &s, &r);
}

/// A way to end a room from outside.
type End = fn(&mut World, &Room, &Room);

#[test]
fn r_f3_an_abort_between_pieces_posts_no_more_and_is_acked_when_those_posted_are_quiet() {
    let ends: [(&str, End); 3] = [
        ("abort there", |w, _, r| w.abort_d(0, r)),
        ("abort here", |w, s, _| w.abort_p(0, s)),
        ("clear here", |w, s, _| w.clear_p(0, s)),
    ];
    for (how, act) in ends {
        for posted in 0..4 {
            for completed in 0..=posted {
                let (mut w, s, r, ops) = begun(posted);
                // The lane stays busy, so that the abort finds a piece that waits.
                w.p[0].transport.set_capacity(Some(0));
                ops[..completed].iter().for_each(|op| w.p[0].transport.complete(*op));
                w.run();
                act(&mut w, &s, &r);
                w.run();
                let_go(&mut w);
                let what = format!("{how}, {completed} of {posted} pieces done");
                assert_eq!((s.poll(), r.poll()), (FAILED, FAILED), "{what}");
                assert_eq!(w.p[0].transport.ops().len(), posted, "{what}");
                for op in &ops[completed..] {
                    assert!(!s.releasable() && !r.releasable(), "{what}");
                    w.p[0].transport.complete(*op);
                    w.run();
                }
                assert!(s.releasable() && r.releasable(), "{what}");
                one(&mut w, &s, &r);
            }
        }
    }
}

#[test]
fn r_f2_a_piece_that_is_refused_or_finds_its_peer_gone_ends_the_chunk() {
    use kv_core::transport::TransportErrorKind::{InvalidArgument, PeerLost};
    for kind in [InvalidArgument, PeerLost] {
        for held in [0, 1] {
            let mut w = held_world(spec());
            for n in 0..3 {
                w.p[0].transport.script_next(if n < 3 - held { Verdict::Complete } else { Verdict::Hold });
            }
            w.p[0].transport.script_next(Verdict::Reject(kind));
            let (s, r) = w.open(7, &[4, 5, 9]);
            w.send(0, &s[0], &[0, 1, 3], 0, true);
            w.run();
            assert_eq!((s[0].poll(), r[0].poll()), (FAILED, FAILED), "{kind:?}");
            assert_eq!((s[0].releasable(), r[0].releasable()), (held == 0, held == 0), "{kind:?}");
            w.p[0].transport.complete_all();
            w.run();
            assert!(s[0].releasable() && r[0].releasable(), "{kind:?}");
            assert_eq!(w.p[0].transport.ops().len(), 3, "{kind:?}");
            end(&mut w, &s, &r);
        }
    }
}

#[test]
fn r_f2_pieces_planned_for_a_registration_that_decode_has_replaced_are_not_posted() {
    let (mut w, s, r, ops) = begun(2);
    let mut other = w.d[0].registration();
    other.gpu_id = 3;
    w.net.inject(&w.p[0].endpoint, w.spec.hooks.build_receiver_registration_message(&other).unwrap());
    w.run();
    let_go(&mut w);
    assert_eq!((s.poll(), r.poll(), w.p[0].transport.ops().len()), (FAILED, FAILED, 2));
    assert!(reason(&s).contains("decode registered other memory"), "{}", reason(&s));
    for op in ops {
        assert!(!s.releasable() && !r.releasable());
        w.p[0].transport.complete(op);
        w.run();
    }
    assert!(s.releasable() && r.releasable());
    one(&mut w, &s, &r);
}
