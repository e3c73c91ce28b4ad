//! Ten thousand rooms that end badly: whatever was stuck, everything is back where it started once it settles; and when
//! peers vanish, by time alone.
// A test reports by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::sync::Arc;
use std::time::Duration;

use kv_core::KvPoll;
use kv_core::engine::RoomShared;
use kv_testkit::Rng;
use kv_testkit::fake_transport::Policy;
use kv_testkit::world::{World, WorldSpec};

type Room = Arc<RoomShared>;

const ROOMS: u64 = 10_000;
/// Rooms between two rests of the world.
const BATCH: u64 = 200;

fn world(pages: usize) -> World {
    let w = World::new(WorldSpec { pages, page_len: 16, aux_rows: pages, ..WorldSpec::default() });
    w.p[0].transport.set_policy(Policy::Hold);
    w
}

/// What one room came to before it was given up.
struct Given {
    sender: Option<Room>,
    receiver: Option<Room>,
}

/// Rooms `first..first + n`, each led to a random point: a side alone, both without metadata, metadata without a sender,
/// with one, with a chunk sent, with the last chunk sent. Each has a page of its own on both sides.
fn lead_on(w: &mut World, rng: &mut Rng, first: u64, n: u64) -> Vec<Given> {
    let mut rooms = Vec::new();
    for room in first..first + n {
        let point = rng.below(8);
        let sender = (point != 0 && point != 7).then(|| w.sender(0, room));
        let receiver = (point != 1).then(|| w.receiver(0, room));
        rooms.push((point, room, Given { sender, receiver }));
    }
    w.run();
    for (point, room, given) in &rooms {
        let page = [(*room % ROOMS) as i32];
        if let (3.., Some(receiver)) = (*point, &given.receiver) {
            w.publish(0, receiver, &page, page[0] as u32);
        }
        if let (5.., Some(sender)) = (*point, &given.sender) {
            w.send(0, sender, &page, 0, *point == 6);
        }
    }
    w.run();
    rooms.into_iter().map(|(_, _, given)| given).collect()
}

/// Writes that were posted since the first `seen`: left in flight, failed with any flags, or unresolved; half of them with
/// some bytes landed.
fn get_stuck(w: &mut World, rng: &mut Rng, seen: usize) -> usize {
    let transport = w.p[0].transport.clone();
    let new = transport.ops_since(seen);
    for op in &new {
        if rng.chance(0.5) {
            transport.land_spans(op.id, 0..rng.below(op.spans as u64) as usize);
        }
        match rng.below(6) {
            0 => {}
            1 => transport.fail(op.id, true, false),
            2 => transport.fail(op.id, false, true),
            3 => transport.fail(op.id, false, false),
            _ => transport.unresolve(op.id),
        }
    }
    seen + new.len()
}

/// Abort or clear, on either side, in any order; both sides clear in the end.
fn give_up(w: &mut World, rng: &mut Rng, rooms: &[Given]) {
    for given in rooms {
        match (rng.below(4), &given.sender, &given.receiver) {
            (0, Some(s), _) => w.abort_p(0, s),
            (1, _, Some(r)) => w.abort_d(0, r),
            _ => {}
        }
    }
    if rng.chance(0.5) {
        w.run();
    }
    for given in rooms {
        let (mut s, mut r) = (given.sender.as_ref(), given.receiver.as_ref());
        if rng.chance(0.5) {
            r.take().into_iter().for_each(|r| w.clear_d(0, r));
        }
        s.take().into_iter().for_each(|s| w.clear_p(0, s));
        r.take().into_iter().for_each(|r| w.clear_d(0, r));
    }
    w.run();
}

#[test]
fn r_f1_r_f5_ten_thousand_aborted_rooms_with_stuck_handles_drain_when_these_settle() {
    let seed = 11;
    let mut rng = Rng::new(seed);
    let mut w = world(ROOMS as usize);
    // One good room first: peers are registered, connections open.
    let (s, r) = w.open(ROOMS * 2, &[0]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    w.p[0].transport.complete_all();
    w.run();
    assert_eq!((s[0].poll(), r[0].poll()), (KvPoll::Success, KvPoll::Success));
    w.close(&s, &r);
    w.assert_nothing_held();
    let (start, links, bound) = (w.held(), w.net.links(), w.net.bound());

    let mut seen = w.p[0].transport.ops().len();
    let first_stuck = seen;
    let mut all = Vec::new();
    for first in (1..=ROOMS).step_by(BATCH as usize) {
        let rooms = lead_on(&mut w, &mut rng, first, BATCH);
        seen = get_stuck(&mut w, &mut rng, seen);
        w.run();
        give_up(&mut w, &mut rng, &rooms);
        all.extend(rooms);
    }
    // Every handle has ended; what a write may still touch is held, and nothing else is.
    let transport = w.p[0].transport.clone();
    let stuck: Vec<_> = transport.not_quiet();
    assert!(stuck.len() > 2_000, "{} of {} writes are stuck", stuck.len(), seen - first_stuck);
    assert!(all.iter().flat_map(|g| [&g.sender, &g.receiver]).flatten().all(|room| room.poll() == KvPoll::Failed));
    let (p, d) = (w.p[0].shard.held(), w.d[0].shard.held());
    assert_eq!((p.ops, p.rooms, p.named, p.posts), (stuck.len(), stuck.len(), 0, 0));
    assert_eq!((d.rooms, d.generations, d.named), (stuck.len(), stuck.len(), 0), "decode waits for exactly these");
    let held_source = all.iter().filter_map(|g| g.sender.as_ref()).filter(|s| !s.releasable()).count();
    assert_eq!(held_source, stuck.iter().filter(|op| !op.src_quiet).count());

    // They settle, in a random order, by themselves or since their peer's process is proven dead.
    let mut order: Vec<_> = stuck.iter().map(|op| op.id).collect();
    rng.shuffle(&mut order);
    for (i, id) in order.iter().enumerate() {
        let op = transport.op(*id).unwrap();
        match op.outcome {
            None => transport.complete(*id),
            Some(_) if rng.chance(0.5) => transport.settle(*id, true, true),
            Some(_) => transport.peer_generation_dead(*id),
        }
        if (i as u64).is_multiple_of(BATCH) {
            w.run();
            let left = transport.not_quiet().len();
            assert_eq!((w.p[0].shard.held().ops, w.d[0].shard.held().rooms), (left, left));
        }
    }
    w.run();
    assert!(all.iter().flat_map(|g| [&g.sender, &g.receiver]).flatten().all(|room| room.releasable()));
    assert_eq!(w.d[0].stats.released_without_proof.get(), 0);
    let held = w.p[0].shard.held();
    assert_eq!(
        (held.rooms, held.undrained, held.ops, held.pending_acks, w.d[0].shard.held()),
        (0, 0, 0, 0, start.1[0])
    );
    // What late metadata and late senders are to be told is remembered for a while; after that nothing is.
    w.advance(Duration::from_secs(1_000));
    w.assert_nothing_held();
    assert_eq!((w.held(), w.net.links(), w.net.bound()), (start, links, bound), "pages, slots, handles, sockets");
    assert_eq!((w.p[0].shard.pending_deadlines(), w.d[0].shard.pending_deadlines()), (0, 0));
    assert!(w.net.in_flight().is_empty());
    let freed = w.p[0].freed.lock().unwrap().len() + w.d[0].freed.lock().unwrap().len();
    let made = all.iter().flat_map(|g| [&g.sender, &g.receiver]).flatten().count();
    assert_eq!(freed, made + 2, "each room number is given back once on each side");
    w.fabric.assert_no_premature_release();
}

/// The engine's housekeeping: rooms that have ended are cleared. No new room, no abort.
fn clear_what_ended(w: &mut World, rooms: &[Given]) {
    for given in rooms {
        given.sender.iter().filter(|s| s.poll().is_terminal()).for_each(|s| w.clear_p(0, s));
        given.receiver.iter().filter(|r| r.poll().is_terminal()).for_each(|r| w.clear_d(0, r));
    }
    w.run();
}

#[test]
fn r_f5_cat_f20_cat_f55_when_decode_vanishes_prefill_is_empty_again_by_time_alone() {
    let mut rng = Rng::new(12);
    let mut w = World::new(WorldSpec { pages: ROOMS as usize, page_len: 16, aux_rows: 16_000, ..WorldSpec::default() });
    // The transport moves these by itself: when the process dies they are unresolved, and proven dead later.
    w.p[0].transport.set_policy(Policy::Seeded { rng: Rng::new(5), max_polls: 1_000_000, busy: 0.0 });
    let mut rooms = Vec::new();
    for first in (1..2_000).step_by(BATCH as usize) {
        rooms.extend(lead_on(&mut w, &mut rng, first, BATCH));
    }
    let p = w.p[0].shard.held();
    assert!(p.ops > 300 && p.early > 100 && p.rooms > 1_000, "{p:?}");
    // Gone, and nobody comes after it.
    let (name, endpoint) = (w.d[0].name.clone(), w.d[0].endpoint.clone());
    w.d[0].stopped = true;
    w.net.crash(&endpoint);
    w.fabric.kill(&name);
    w.run();
    for _ in 0..20 {
        clear_what_ended(&mut w, &rooms);
        w.advance(Duration::from_secs(60));
    }
    let senders: Vec<_> = rooms.iter().filter_map(|g| g.sender.as_ref()).collect();
    assert!(senders.iter().all(|s| s.poll() == KvPoll::Failed && s.releasable()));
    let held = w.p[0].shard.held();
    assert_eq!((held.rooms, held.ops, held.posts, held.early, held.pending_acks, held.undrained), (0, 0, 0, 0, 0, 0));
    assert_eq!((w.p[0].shard.pending_deadlines(), w.p[0].stats.ops_retained.get()), (0, 0));
    assert!(w.p[0].transport.connected().is_empty(), "nothing of the dead peer is kept");
}

#[test]
fn r_f5_cat_f20_when_prefill_vanishes_decode_is_empty_again_by_time_alone() {
    let mut rng = Rng::new(13);
    let mut w = world(ROOMS as usize);
    let mut rooms = Vec::new();
    for first in (1..2_000).step_by(BATCH as usize) {
        rooms.extend(lead_on(&mut w, &mut rng, first, BATCH));
    }
    assert!(w.d[0].shard.held().rooms > 1_000);
    let held_before = rooms.iter().filter_map(|g| g.receiver.as_ref()).filter(|r| !r.releasable()).count();
    w.kill_prefill(0);
    // Its writes end with it.
    let name = w.p[0].name.clone();
    w.fabric.exit(&name);
    // The heartbeats end, too.
    w.d[0].directory.node_lost("p:8998");
    w.run();
    for _ in 0..8 {
        clear_what_ended(&mut w, &rooms);
        w.advance(Duration::from_secs(60));
    }
    let receivers: Vec<_> = rooms.iter().filter_map(|g| g.receiver.as_ref()).collect();
    assert!(held_before > 500 && receivers.iter().all(|r| r.poll() == KvPoll::Failed && r.releasable()));
    let held = w.d[0].shard.held();
    assert_eq!((held.rooms, held.named, held.generations, held.resolving, held.registered), (0, 0, 0, 0, 0));
    assert_eq!(w.d[0].shard.pending_deadlines(), 0);
    let without = w.d[0].stats.released_without_proof.get();
    assert!(without > 500, "a dead prefill acks nothing: {without} releases are policy, and counted");
}
