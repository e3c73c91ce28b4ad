//! F1, F5: what is not proven quiet stays counted and alive; when proof comes, everything comes back.

use kv_core::ids::OpId;
use kv_core::transport::Outcome;

use super::support::*;

#[test]
fn r_f5_each_kind_of_proof_brings_everything_back() {
    type Step = fn(&World, OpId);
    let ways: [(&str, Step, &[Step]); 5] = [
        ("settled", |w, op| w.p[0].transport.unresolve(op), &[|w, op| w.p[0].transport.settle(op, true, true)]),
        ("dead", |w, op| w.p[0].transport.unresolve(op), &[|w, op| w.p[0].transport.peer_generation_dead(op)]),
        ("failed quiet", |w, op| w.p[0].transport.fail(op, true, true), &[]),
        (
            "failed, then dst",
            |w, op| w.p[0].transport.fail(op, true, false),
            &[|w, op| w.p[0].transport.settle(op, false, true)],
        ),
        (
            "failed, then src",
            |w, op| w.p[0].transport.fail(op, false, true),
            &[|w, op| w.p[0].transport.settle(op, true, false)],
        ),
    ];
    for (what, end_op, proofs) in ways {
        let mut w = held_world(WorldSpec::default());
        let (s, r, op) = in_flight(&mut w);
        end_op(&w, op);
        w.run();
        assert_eq!((s.poll(), r.poll()), (FAILED, FAILED), "{what}");
        for proof in proofs {
            assert_eq!((w.p[0].shard.held().ops, w.p[0].stats.ops_retained.get()), (1, 1), "{what}");
            assert_eq!(w.p[0].stats.abort_acks_out.get(), 0, "{what}");
            assert!(!r.releasable(), "{what}");
            proof(&w, op);
            w.run();
        }
        assert!(s.releasable() && r.releasable(), "{what}");
        assert_eq!(w.p[0].stats.abort_acks_out.get(), 1, "{what}");
        one(&mut w, &s, &r);
    }
}

#[test]
fn r_f1_memory_stays_registered_until_the_proof_even_when_the_room_is_cleared() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    w.p[0].transport.unresolve(op);
    w.close(std::slice::from_ref(&s), std::slice::from_ref(&r));
    assert_eq!(w.p[0].shard.held().undrained, 1);
    // It lands late; source memory is as it was, destination pages are still decode's to give.
    w.p[0].transport.land(op);
    w.p[0].transport.settle(op, true, true);
    w.run();
    assert!(s.releasable() && r.releasable());
    w.assert_nothing_held();
    w.fabric.assert_no_premature_release();
}

#[test]
fn cat_f17_the_failure_is_final_at_once_and_the_pages_wait_for_every_sibling() {
    let shape = kv_testkit::directory::Shape { mla: true, ..kv_testkit::directory::Shape::tp(1, 2, 0) };
    let mut w = held_world(WorldSpec::of(shape, 2));
    let (s, r) = w.open(7, &[3]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    let ops = w.p[0].transport.in_flight();
    w.p[0].transport.fail(ops[0].id, true, true);
    w.run();
    assert_eq!((polls(&s), polls(&r)), (vec![0], vec![0, 0]));
    assert!(!s[0].releasable() && !r[0].releasable() && !r[1].releasable());
    w.p[0].transport.complete(ops[1].id);
    w.run();
    assert!(s[0].releasable() && r[0].releasable() && r[1].releasable());
    end(&mut w, &s, &r);
}

#[test]
fn cat_f12_source_pages_are_free_once_both_writes_are_done() {
    let shape = kv_testkit::directory::Shape { mla: true, ..kv_testkit::directory::Shape::tp(1, 2, 0) };
    let mut w = held_world(WorldSpec::of(shape, 2));
    let (s, r) = w.open(7, &[3]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    let ops = w.p[0].transport.in_flight();
    w.p[0].transport.complete(ops[1].id);
    w.run();
    w.advance(SECOND);
    assert!(!s[0].releasable());
    w.p[0].transport.complete(ops[0].id);
    w.run();
    assert!(s[0].releasable());
    end(&mut w, &s, &r);
}

#[test]
fn cat_f23_source_pages_are_pinned_while_anything_reads_them() {
    let mut w = held_world(WorldSpec::default());
    let (s, r, op) = in_flight(&mut w);
    w.abort_p(0, &s);
    w.clear_p(0, &s);
    w.run();
    assert!(!s.releasable(), "cleared, and still read");
    assert!(w.p[0].freed.lock().unwrap().is_empty());
    w.p[0].transport.end(op, Outcome::Failed { src_quiet: true, dst_quiet: false, error: error() });
    w.run();
    assert!(s.releasable() && !r.releasable());
    w.p[0].transport.settle(op, false, true);
    one(&mut w, &s, &r);
}

fn error() -> kv_core::transport::TransportError {
    kv_core::transport::TransportError::new(kv_core::transport::TransportErrorKind::Backend, "half")
}

#[test]
fn cat_f21_expiry_and_completion_in_one_tick_release_once_in_every_order() {
    // 0: the ACK, 1: the deadline. Seen in one step or one after the other.
    for order in [[0, 1], [1, 0]] {
        for together in [true, false] {
            let mut w = held_world(WorldSpec::default());
            let (s, r, op) = in_flight(&mut w);
            w.abort_d(0, &r);
            w.run();
            for what in order {
                match what {
                    0 => w.p[0].transport.complete(op),
                    _ => drop(w.clock.advance(secs(30))),
                }
                if !together {
                    w.run();
                }
            }
            w.run();
            let stats = &w.d[0].stats;
            assert_eq!(stats.released_with_proof.get() + stats.released_without_proof.get(), 1);
            assert!(r.releasable());
            one(&mut w, &s, &r);
        }
    }
}

#[test]
fn r_f2_retained_writes_do_not_take_the_place_of_other_rooms_writes() {
    let mut spec = WorldSpec::default();
    spec.limits.max_ops_in_flight = 1;
    let mut w = held_world(spec);
    let (s, r, op) = in_flight(&mut w);
    w.p[0].transport.unresolve(op);
    w.run();
    let (s2, r2) = w.open(8, &[6]);
    w.send(0, &s2[0], &[3], 0, true);
    w.run();
    let next = w.p[0].transport.only().id;
    w.p[0].transport.complete(next);
    w.run();
    assert_eq!((s2[0].poll(), r2[0].poll()), (SUCCESS, SUCCESS));
    w.close(&s2, &r2);
    w.p[0].transport.settle(op, true, true);
    w.run();
    one(&mut w, &s, &r);
}
