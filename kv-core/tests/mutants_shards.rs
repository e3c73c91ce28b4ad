//! Known faults of the shards, put back one by one: each scenario holds without the fault and breaks with it. The
//! rooms' own faults: `tests/model/mutants.rs`.
// A test reports by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::time::Duration;

use kv_core::KvPoll;
use kv_core::engine::RoomShared;
use kv_core::ids::OpId;
use kv_core::mutants::{Mutant, set};
use kv_testkit::fake_transport::Policy;
use kv_testkit::net::{Action, RuleId};
use kv_testkit::world::{World, WorldSpec};

type Room = Arc<RoomShared>;

/// What goes on, and whether the invariant held.
type Scenario = fn(&mut World, &Room, &Room, OpId) -> bool;

const TABLE: &[(Mutant, &str, Scenario)] = &[
    (Mutant::ForgetAckTargetsAtClear, "every path gives back everything", ack_after_clear),
    (Mutant::ReuseResetsOutstanding, "ABORT_ACK implies that no write can land", ack_after_reuse),
    (Mutant::AckIgnoresClearedLives, "ABORT_ACK implies that no write can land", ack_of_a_cleared_life),
    (Mutant::LateStatusCreatesRoom, "no resurrection", late_status),
    (Mutant::DeadlineBeatsCompletion, "a completion that has arrived wins over the deadline", completion_and_deadline),
    (Mutant::ForgetOpAtError, "every path gives back everything", proof_after_an_error),
    (Mutant::OnePieceIsTheWrite, "Success needs every write Done", success_after_every_piece),
    (Mutant::PieceErrorHushesSiblings, "ABORT_ACK implies that no write can land", ack_after_every_piece),
];

/// The two scenarios that need pieces make a world of their own.
fn in_pieces() -> (World, Room, Room) {
    let mut w = World::new(WorldSpec { max_op_bytes: Some(100), ..WorldSpec::default() });
    w.p[0].transport.set_policy(Policy::Hold);
    let (mut s, mut r) = w.open(7, &[4, 5]);
    w.send(0, &s[0], &[0, 1], 0, true);
    w.run();
    (w, s.remove(0), r.remove(0))
}

/// One of several pieces is done.
fn success_after_every_piece(_: &mut World, _: &Room, _: &Room, _: OpId) -> bool {
    let (mut w, s, _) = in_pieces();
    let ops = w.p[0].transport.in_flight();
    w.p[0].transport.complete(ops[ops.len() - 1].id);
    w.run();
    let held = s.poll() == KvPoll::Transferring;
    w.abandon();
    held
}

/// One of several pieces fails, and is quiet itself.
fn ack_after_every_piece(_: &mut World, _: &Room, _: &Room, _: OpId) -> bool {
    let (mut w, s, r) = in_pieces();
    let ops = w.p[0].transport.in_flight();
    w.p[0].transport.fail(ops[1].id, true, true);
    w.run();
    let held = s.poll() == KvPoll::Failed && !s.releasable() && !r.releasable();
    w.abandon();
    held
}

/// A world with one write in flight, ended by hand, between room 7's two sides.
fn run(scenario: Scenario) -> bool {
    let mut w = World::new(WorldSpec::default());
    w.p[0].transport.set_policy(Policy::Hold);
    let (s, r) = w.open(7, &[4, 5]);
    w.send(0, &s[0], &[0, 1], 0, true);
    w.run();
    let op = w.p[0].transport.only().id;
    let held = scenario(&mut w, &s[0], &r[0], op);
    w.abandon();
    held
}

fn hold(w: &World, tag: &'static str) -> RuleId {
    w.net.rule(Action::Hold, move |f| f.frames.first().is_some_and(|t| t == tag))
}

/// The sender is cleared before the write ends: decode still gets its ACK, and its pages back.
fn ack_after_clear(w: &mut World, s: &Room, r: &Room, op: OpId) -> bool {
    w.abort_d(0, r);
    w.run();
    w.clear_p(0, s);
    w.run();
    w.p[0].transport.complete(op);
    w.run();
    r.releasable()
}

/// The ABORT arrives after the number is used again: the old life's write counts.
fn ack_after_reuse(w: &mut World, s: &Room, r: &Room, _: OpId) -> bool {
    let rule = hold(w, "ABORT");
    w.clear_p(0, s);
    w.run();
    drop(w.sender(0, 7));
    w.run();
    w.net.remove_rule(rule);
    w.net.release_all();
    w.run();
    r.poll() == KvPoll::Failed && !r.releasable()
}

/// The ABORT arrives after the sender is cleared.
fn ack_of_a_cleared_life(w: &mut World, s: &Room, r: &Room, _: OpId) -> bool {
    let rule = hold(w, "ABORT");
    w.clear_p(0, s);
    w.run();
    w.net.remove_rule(rule);
    w.net.release_all();
    w.run();
    r.poll() == KvPoll::Failed && !r.releasable()
}

/// A status for a room that decode has cleared creates nothing.
fn late_status(w: &mut World, _: &Room, r: &Room, op: OpId) -> bool {
    let rule = hold(w, "KV_STATUS");
    w.p[0].transport.complete(op);
    w.run();
    w.clear_d(0, r);
    w.run();
    let before = w.d[0].shard.held().named;
    w.net.remove_rule(rule);
    w.net.release_all();
    w.run();
    (before, w.d[0].shard.held().named) == (0, 0)
}

/// Success and the waiting timeout are seen in one step (D5).
fn completion_and_deadline(w: &mut World, _: &Room, r: &Room, op: OpId) -> bool {
    let rule = hold(w, "KV_STATUS");
    w.p[0].transport.complete(op);
    w.run();
    w.net.remove_rule(rule);
    w.net.release_all();
    w.clock.advance(Duration::from_secs(300));
    w.run();
    r.poll() == KvPoll::Success
}

/// The write fails, and the proof for its destination comes later.
fn proof_after_an_error(w: &mut World, _: &Room, r: &Room, op: OpId) -> bool {
    w.p[0].transport.fail(op, true, false);
    w.run();
    let held = !r.releasable();
    w.p[0].transport.settle(op, false, true);
    w.run();
    held && r.releasable()
}

#[test]
fn each_known_fault_of_the_shards_is_found() {
    println!("| fault put back | found by |\n|---|---|");
    let mut missed = Vec::new();
    for (mutant, invariant, scenario) in TABLE {
        set(None);
        assert!(run(*scenario), "without a fault: {invariant} ({mutant:?})");
        set(Some(*mutant));
        match run(*scenario) {
            false => println!("| {mutant:?} | {invariant} |"),
            true => missed.push(mutant),
        }
    }
    set(None);
    assert!(missed.is_empty(), "not found: {missed:?}");
}
