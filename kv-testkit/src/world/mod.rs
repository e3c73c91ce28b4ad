//! Prefill and decode shards on one clock, one network and one fabric, stepped until nothing moves.
//!
//! ```
//! # use kv_testkit::world::{World, WorldSpec};
//! # use kv_core::KvPoll;
//! let mut w = World::new(WorldSpec::default());
//! let (p, d) = (w.sender(0, 7), w.receiver(0, 7));
//! w.run();
//! w.publish(0, &d, &[4, 5], 1);
//! w.send(0, &p, &[0, 1], 0, true);
//! w.run();
//! assert_eq!((p.poll(), d.poll()), (KvPoll::Success, KvPoll::Success));
//! w.assert_copied(0, &[0, 1], 0, &[4, 5]);
//! # w.clear_p(0, &p);
//! # w.clear_d(0, &d);
//! # w.run();
//! w.assert_nothing_held();
//! ```
//!
//! The pieces lie open: script the transports of [`PrefillNode`], the network, the directories. A run that does not come
//! to rest panics.

mod nodes;
mod spec;

use std::sync::Arc;
use std::time::Duration;

use kv_core::engine::{ChunkExtras, DecodeCommand, DecodeHeld, EventQueue, PrefillCommand, PrefillHeld, RoomShared};
use kv_core::ids::Room;
use kv_core::room::{ChunkSpec, PublishSpec};
use kv_core::time::Timestamp;

pub use nodes::{DecodeNode, PrefillNode, SimConnector};
pub use spec::{AUX_LEN, WorldSpec, process};

use crate::{FakeFabric, ManualClock, Rng, SimNet};

/// Rounds without news after which the world is at rest; ops that take some polls fit in.
const IDLE_ROUNDS: u32 = 6;
/// Rounds after which a run that is not at rest is a livelock.
const MAX_ROUNDS: u32 = 100_000;

/// See the [module](self).
pub struct World {
    /// What it was made of.
    pub spec: WorldSpec,
    /// Time.
    pub clock: ManualClock,
    /// The control network.
    pub net: SimNet,
    /// The transports' fabric.
    pub fabric: FakeFabric,
    /// Prefill ranks, in order of their numbers.
    pub p: Vec<PrefillNode>,
    /// Decode ranks.
    pub d: Vec<DecodeNode>,
    /// When set, the nodes are stepped in an order drawn anew each round.
    pub order: Option<Rng>,
    /// When set, rooms made from then on put their changes here.
    pub events: Option<Arc<EventQueue>>,
    lives: u64,
}

impl World {
    /// Every prefill rank of the shape, and `spec.decodes` decode ranks.
    pub fn new(spec: WorldSpec) -> Self {
        let clock = ManualClock::new();
        let net = SimNet::new(&clock, spec.seed);
        let fabric = FakeFabric::new();
        let shape = spec.shape.clone();
        let mut p = Vec::new();
        for tp in 0..shape.prefill_tp {
            for pp in 0..shape.prefill_pp {
                for cp in 0..shape.prefill_cp {
                    let rank = shape.prefill_rank(tp, cp, pp);
                    p.push(PrefillNode::new(&spec, &net, &fabric, rank, (tp, cp, pp), &format!("prefill-{rank}")));
                }
            }
        }
        p.sort_by_key(|n| n.rank);
        let d = (0..spec.decodes)
            .map(|i| DecodeNode::new(&spec, &clock, &net, &fabric, i, &format!("decode-{i}")))
            .collect();
        Self { spec, clock, net, fabric, p, d, order: None, events: None, lives: 0 }
    }

    /// Let the process of decode rank `d` end and another one, named `name`, start at its address.
    pub fn restart_decode(&mut self, d: usize, name: &str) {
        let old = self.d[d].name.clone();
        self.fabric.kill(&old);
        self.succeed_decode(d, name);
    }

    /// [`restart_decode`](Self::restart_decode), and no transport hears that the old process is gone.
    pub fn succeed_decode(&mut self, d: usize, name: &str) {
        let endpoint = self.d[d].endpoint.clone();
        self.net.crash(&endpoint);
        self.d[d] = DecodeNode::new(&self.spec, &self.clock, &self.net, &self.fabric, d as u32, name);
    }

    /// Let the process of prefill rank `p` end and another one, named `name`, start at its address. Decode's directory
    /// is not told.
    pub fn restart_prefill(&mut self, p: usize, name: &str) {
        self.kill_prefill(p);
        let (rank, place) = (self.p[p].rank, self.p[p].place);
        self.p[p] = PrefillNode::new(&self.spec, &self.net, &self.fabric, rank, place, name);
    }

    /// Let the process of prefill rank `p` end.
    pub fn kill_prefill(&mut self, p: usize) {
        self.p[p].stopped = true;
        self.fabric.kill(&self.p[p].name);
        self.net.crash(&self.p[p].endpoint);
    }

    fn life(&mut self, room: u64) -> Arc<RoomShared> {
        self.lives += 1;
        RoomShared::new(Room::new(room).expect("a room number"), self.lives, self.events.clone())
    }

    /// A sender on prefill rank `p`.
    pub fn sender(&mut self, p: usize, room: u64) -> Arc<RoomShared> {
        let shared = self.life(room);
        self.p[p].push(PrefillCommand::Create(shared.clone()));
        shared
    }

    /// Send pages at positions `start..` of the request's list; the last chunk takes aux slot 0 along.
    pub fn send(&mut self, p: usize, room: &Arc<RoomShared>, pages: &[i32], start: u32, is_last: bool) {
        self.send_chunk(p, room, pages, start, is_last, ChunkExtras::default());
    }

    /// [`send`](Self::send) with a wait event or a trace context.
    pub fn send_chunk(
        &mut self,
        p: usize,
        room: &Arc<RoomShared>,
        pages: &[i32],
        start: u32,
        is_last: bool,
        extras: ChunkExtras,
    ) {
        let chunk = ChunkSpec {
            pages: pages.into(),
            index_slice: start..start + pages.len() as u32,
            is_last,
            has_wait_event: extras.wait_event.is_some(),
            aux_index: Some(0),
        };
        self.p[p].push(PrefillCommand::Send(room.clone(), chunk, extras));
    }

    /// `abort()` on prefill rank `p`.
    pub fn abort_p(&mut self, p: usize, room: &Arc<RoomShared>) {
        self.p[p].push(PrefillCommand::Abort(room.clone()));
    }

    /// `clear()` on prefill rank `p`.
    pub fn clear_p(&mut self, p: usize, room: &Arc<RoomShared>) {
        self.p[p].push(PrefillCommand::Clear(room.clone()));
    }

    /// A receiver on decode rank `d`, its prefill ranks being looked up.
    pub fn receiver(&mut self, d: usize, room: u64) -> Arc<RoomShared> {
        let shared = self.life(room);
        let bootstrap_addr = self.spec.shape.bootstrap_addr.clone();
        let create = DecodeCommand::Create { shared: shared.clone(), bootstrap_addr, prefill_dp_rank: None };
        self.d[d].commands.push(create);
        shared
    }

    /// `send_metadata()` on decode rank `d`.
    pub fn publish(&mut self, d: usize, room: &Arc<RoomShared>, pages: &[i32], aux_index: u32) {
        let spec = PublishSpec {
            pages: pages.into(),
            aux_index,
            state_indices: Vec::new(),
            decode_prefix_len: 0,
            device_kv_indices: None,
        };
        self.d[d].commands.push(DecodeCommand::Publish(room.clone(), Box::new(spec)));
    }

    /// `abort()` on decode rank `d`.
    pub fn abort_d(&mut self, d: usize, room: &Arc<RoomShared>) {
        self.d[d].commands.push(DecodeCommand::Abort(room.clone()));
    }

    /// `clear()` on decode rank `d`.
    pub fn clear_d(&mut self, d: usize, room: &Arc<RoomShared>) {
        self.d[d].commands.push(DecodeCommand::Clear(room.clone()));
    }

    /// A sender on every prefill rank and a receiver on every decode rank, metadata published: all is set for `send`.
    /// Decode rank `i` takes `pages` and aux slot 1.
    pub fn open(&mut self, room: u64, pages: &[i32]) -> (Vec<Arc<RoomShared>>, Vec<Arc<RoomShared>>) {
        let senders: Vec<_> = (0..self.p.len()).map(|p| self.sender(p, room)).collect();
        let receivers: Vec<_> = (0..self.d.len()).map(|d| self.receiver(d, room)).collect();
        self.run();
        for (d, r) in receivers.iter().enumerate() {
            self.publish(d, r, pages, 1);
        }
        self.run();
        (senders, receivers)
    }

    /// `clear()` everywhere.
    pub fn close(&mut self, senders: &[Arc<RoomShared>], receivers: &[Arc<RoomShared>]) {
        senders.iter().enumerate().for_each(|(p, s)| self.clear_p(p, s));
        receivers.iter().enumerate().for_each(|(d, r)| self.clear_d(d, r));
        self.run();
    }

    /// Step every node once. True when something happened, or may happen without time passing.
    pub fn round(&mut self) -> bool {
        let now = self.clock.now();
        let mut nodes: Vec<usize> = (0..self.p.len() + self.d.len()).collect();
        if let Some(rng) = &mut self.order {
            rng.shuffle(&mut nodes);
        }
        let mut moved = false;
        for i in nodes {
            moved |= match i.checked_sub(self.p.len()) {
                None => self.p[i].step(now),
                Some(d) => self.d[d].step(now),
            };
            if let Some(events) = &self.events {
                events.flush();
            }
        }
        moved
    }

    /// Step until nothing moves at the present time.
    pub fn run(&mut self) {
        let mut idle = 0;
        for _ in 0..MAX_ROUNDS {
            idle = if self.round() { 0 } else { idle + 1 };
            if idle == IDLE_ROUNDS {
                return;
            }
        }
        panic!("the world does not come to rest:\n{}\n{:?}", self.net.print_in_flight(), self.held());
    }

    /// Let time jump by `d`, then run.
    pub fn jump(&mut self, d: Duration) {
        self.clock.advance(d);
        self.run();
    }

    /// Let time pass, stopping wherever something is due.
    pub fn advance(&mut self, d: Duration) {
        let end = self.clock.now() + d;
        self.run();
        while let Some(next) = self.next_due().filter(|t| *t <= end) {
            self.clock.advance_to(next);
            self.run();
        }
        self.clock.advance_to(end);
        self.run();
    }

    /// When something is due next, later than now.
    pub fn next_due(&self) -> Option<Timestamp> {
        let now = self.clock.now();
        let wakes = self.p.iter().filter_map(|n| n.wake).chain(self.d.iter().filter_map(|n| n.wake));
        let directories = self.d.iter().filter_map(|n| n.directory.next_due());
        wakes.chain(directories).chain(self.net.next_due()).filter(|t| *t > now).min()
    }

    /// What every shard holds.
    pub fn held(&self) -> (Vec<PrefillHeld>, Vec<DecodeHeld>) {
        (self.p.iter().map(|n| n.shard.held()).collect(), self.d.iter().map(|n| n.shard.held()).collect())
    }

    /// Panics unless every shard holds nothing but its peers.
    pub fn assert_nothing_held(&self) {
        for n in &self.p {
            let held = n.shard.held();
            assert_eq!(held, PrefillHeld { peers: held.peers, ..PrefillHeld::default() }, "prefill rank {}", n.rank);
            assert_eq!(n.stats.rooms_live.get(), 0, "prefill rank {}: rooms_live", n.rank);
            assert_eq!(n.stats.ops_retained.get(), 0, "prefill rank {}: ops_retained", n.rank);
        }
        for n in &self.d {
            let held = n.shard.held();
            assert_eq!(held, DecodeHeld { registered: held.registered, ..DecodeHeld::default() }, "{}", n.name);
            assert_eq!(n.stats.rooms_live.get(), 0, "{}: rooms_live", n.name);
        }
    }

    /// End a world whose writes are not all quiet, on purpose: its process ends over them.
    pub fn abandon(self) {
        let Self { p, fabric, .. } = self;
        drop(p);
        drop(fabric.take_violations());
    }

    /// Panics unless the pages of prefill rank `p` arrived in decode rank `d`'s, byte for byte, in every layer of `p`.
    pub fn assert_copied(&self, p: usize, src: &[i32], d: usize, dst: &[i32]) {
        assert_eq!(src.len(), dst.len());
        for entry in 0..self.p[p].entries {
            let to = self.spec.decode_entry(self.p[p].place.2, entry);
            for (s, t) in src.iter().zip(dst) {
                let (want, got) = (self.p[p].page(entry, *s), self.d[d].page(to, *t));
                assert_eq!(got, want, "page {s} -> {t}, entry {entry} -> {to} of prefill rank {}", self.p[p].rank);
            }
        }
    }

    /// Panics unless nothing was ever written into these pages of decode rank `d`.
    pub fn assert_untouched(&self, d: usize, pages: &[i32]) {
        for entry in 0..self.d[d].entries {
            for page in pages {
                let bytes = self.d[d].page(entry, *page);
                assert!(
                    bytes.iter().all(|b| *b == 0),
                    "page {page} of entry {entry} of {} was written",
                    self.d[d].name
                );
            }
        }
    }
}
