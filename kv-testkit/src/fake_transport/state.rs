//! Everything the fabric knows, under one lock.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::File;
use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kv_core::ids::{OpId, PeerId, RegionId};
use kv_core::memory::MemoryOwner;
use kv_core::net::Endpoint;
use kv_core::transport::{LaneEvent, Outcome, PeerDescriptor, Settlement, TransportError, WriteOp};

use super::blob::RemoteRegion;
use super::op::{Auto, OpInfo, OpRow};
use super::policy::{Flaw, Policy, Verdict};
use super::{lost, outcome_quiet, settlement_quiet};
use crate::rng::Rng;

/// Looks at every span that lands, before it does; says what is wrong with it.
pub(super) type Observer = Box<dyn FnMut(&Landing<'_>) -> Option<String> + Send>;

/// A span about to land.
#[derive(Clone, Copy, Debug)]
pub struct Landing<'a> {
    /// The writing process.
    pub from: &'a str,
    /// The written one.
    pub to: &'a str,
    /// Which write.
    pub op: OpId,
    /// Where to.
    pub addr: u64,
    /// What.
    pub bytes: &'a [u8],
}

pub(super) struct Guard {
    pub(super) addr: u64,
    pub(super) len: u64,
    pub(super) why: String,
}

/// One registered region at its owner. `Weak`: a registration does not keep memory alive by itself.
pub(super) struct RegionRow {
    pub(super) base: u64,
    pub(super) len: u64,
    pub(super) key: u64,
    pub(super) owner: Weak<dyn MemoryOwner>,
    /// Unregistered, and kept by a flaw.
    pub(super) gone: bool,
}

/// A node's regions, under a lock of their own: a registration ends wherever its last holder lets go.
#[derive(Clone, Default)]
pub(super) struct Regions(Arc<Mutex<BTreeMap<RegionId, RegionRow>>>);

impl Regions {
    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<RegionId, RegionRow>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PeerState {
    Connected,
    /// Replaced, disconnected, cut or dead.
    Gone,
}

pub(super) struct PeerRow {
    pub(super) target: String,
    pub(super) endpoint: Endpoint,
    pub(super) regions: Vec<RemoteRegion>,
    pub(super) state: PeerState,
}

pub(super) struct LaneRow {
    pub(super) queue: VecDeque<LaneEvent>,
    pub(super) open: bool,
    pub(super) waker: Option<UnixStream>,
}

pub(super) struct Node {
    pub(super) alive: bool,
    pub(super) paused: bool,
    pub(super) regions: Regions,
    pub(super) next_region: u32,
    pub(super) peers: BTreeMap<PeerId, PeerRow>,
    pub(super) lanes: Vec<LaneRow>,
    pub(super) ops: BTreeMap<OpId, OpRow>,
    /// Ops an automatic policy still moves.
    pub(super) moving: BTreeSet<OpId>,
    pub(super) order: Vec<OpId>,
    pub(super) in_flight: usize,
    pub(super) capacity: Option<usize>,
    pub(super) policy: Policy,
    pub(super) script: VecDeque<Verdict>,
    pub(super) connect_errors: VecDeque<TransportError>,
    pub(super) connects: Vec<PeerDescriptor>,
    pub(super) flaw: Option<Flaw>,
    pub(super) leaked: Vec<File>,
    pub(super) rng: Rng,
}

pub(super) struct Inner {
    pub(super) nodes: BTreeMap<String, Node>,
    pub(super) next_peer: u64,
    pub(super) guards: Vec<Guard>,
    pub(super) violations: Vec<String>,
    pub(super) refuse_quietly: bool,
    pub(super) watch_sources: bool,
    pub(super) leave_superseded: bool,
    pub(super) observer: Option<Observer>,
    pub(super) rng: Rng,
}

impl Default for Inner {
    fn default() -> Self {
        Self {
            nodes: BTreeMap::new(),
            next_peer: 1,
            guards: Vec::new(),
            violations: Vec::new(),
            refuse_quietly: false,
            watch_sources: true,
            leave_superseded: false,
            observer: None,
            rng: Rng::new(0x6661_6b65),
        }
    }
}

impl Inner {
    pub(super) fn node(&mut self, name: &str) -> &mut Node {
        self.nodes.get_mut(name).unwrap_or_else(|| panic!("the fabric has no transport named {name:?}"))
    }

    pub(super) fn violation(&mut self, text: String) {
        self.violations.push(text);
    }

    pub(super) fn push_event(&mut self, name: &str, lane: usize, event: LaneEvent) {
        let node = self.node(name);
        let lanes = node.lanes.len();
        let lane = if node.flaw == Some(Flaw::CrossesLanes) { (lane + 1) % lanes.max(1) } else { lane };
        if let Some(row) = node.lanes.get_mut(lane).filter(|l| l.open) {
            row.queue.push_back(event);
            if let Some(waker) = &mut row.waker {
                // A full pipe is readable already.
                let _ = waker.write(&[1]);
            }
        }
    }

    /// Report the outcome of an op. What it held is handed back, to be dropped outside the lock.
    pub(super) fn report(&mut self, name: &str, id: OpId, outcome: Outcome) -> Option<WriteOp> {
        let node = self.node(name);
        let flaw = node.flaw;
        let row = node.ops.get_mut(&id).unwrap_or_else(|| panic!("{name} has no {id:?}"));
        assert!(row.info.outcome.is_none(), "{name} {id:?} has its outcome already: {:?}", row.info.outcome);
        (row.info.src_quiet, row.info.dst_quiet) = outcome_quiet(&outcome);
        row.info.outcome = Some(outcome.clone());
        row.take_to_the_wire();
        node.in_flight -= 1;
        let lane = row.info.lane;
        let released =
            if row.info.is_quiet() && !matches!(row.auto, Auto::LateLanding(_)) { row.op.take() } else { None };
        if flaw == Some(Flaw::ForgetsOutcome) && id.0 % 5 == 3 {
            return released;
        }
        self.push_event(name, lane, LaneEvent::Outcome(id, outcome.clone()));
        if flaw == Some(Flaw::DuplicateOutcome) {
            self.push_event(name, lane, LaneEvent::Outcome(id, outcome.clone()));
        }
        if flaw == Some(Flaw::SettlesDone) && outcome == Outcome::Done {
            let settled = Settlement::Settled { src_quiet: true, dst_quiet: true };
            self.push_event(name, lane, LaneEvent::Settlement(id, settled));
        }
        released
    }

    /// Report the settlement of an op.
    pub(super) fn settle(&mut self, name: &str, id: OpId, settlement: Settlement) -> Option<WriteOp> {
        let node = self.node(name);
        let twice = node.flaw == Some(Flaw::SettlesTwice);
        let row = node.ops.get_mut(&id).unwrap_or_else(|| panic!("{name} has no {id:?}"));
        assert!(
            row.info.outcome.is_some() && !row.info.is_quiet(),
            "{name} {id:?} cannot settle: outcome {:?}",
            row.info.outcome
        );
        assert!(row.info.settlement.is_none(), "{name} {id:?} has settled already");
        let (src, dst) = settlement_quiet(settlement);
        row.info.src_quiet |= src;
        row.info.dst_quiet |= dst;
        row.info.settlement = Some(settlement);
        row.take_to_the_wire();
        let lane = row.info.lane;
        let released = if row.info.is_quiet() { row.op.take() } else { None };
        self.push_event(name, lane, LaneEvent::Settlement(id, settlement));
        if twice {
            self.push_event(name, lane, LaneEvent::Settlement(id, settlement));
        }
        released
    }

    /// All (source transport, op) that go to `target` and that an automatic policy moves.
    fn moving_to(&self, target: &str) -> Vec<(String, OpId)> {
        let per_node = |(name, node): (&String, &Node)| {
            let ids = node.moving.iter().filter(|id| node.ops[id].info.target == target);
            ids.map(|id| (name.clone(), *id)).collect::<Vec<_>>()
        };
        self.nodes.iter().flat_map(per_node).collect()
    }

    /// Connections to `target` are gone; everyone connected hears of it.
    fn lose(&mut self, target: &str, why: &str) {
        let mut news = Vec::new();
        for (name, node) in &mut self.nodes {
            for (id, peer) in node.peers.iter_mut().filter(|(_, p)| p.target == target) {
                if peer.state == PeerState::Connected {
                    peer.state = PeerState::Gone;
                    news.extend((0..node.lanes.len()).map(|lane| (name.clone(), lane, *id)));
                }
            }
        }
        for (name, lane, peer) in news {
            self.push_event(&name, lane, LaneEvent::PeerLost(peer, lost(why)));
        }
    }

    pub(super) fn kill(&mut self, target: &str) {
        self.node(target).alive = false;
        self.lose(target, &format!("process {target} died"));
        for (name, id) in self.moving_to(target) {
            let node = self.node(&name);
            let done = node.flaw == Some(Flaw::DoneOnDeath);
            let polls = 1 + node.rng.below(3) as u32;
            let row = node.ops.get_mut(&id).expect("moving ops exist");
            if row.info.outcome.is_some() {
                continue;
            }
            if done {
                row.auto = Auto::Off;
                node.moving.remove(&id);
                let _ = self.report(&name, id, Outcome::Done);
                continue;
            }
            row.auto = Auto::Settle { polls, lands: false };
            let error = lost(format!("process {target} died with {id:?} in flight"));
            let _ = self.report(&name, id, Outcome::Unresolved { error });
        }
    }

    /// The process `name` ends, its own writes with it: nothing of it lands any more, and nobody hears of them.
    pub(super) fn exit(&mut self, name: &str) -> Vec<WriteOp> {
        let node = self.node(name);
        node.alive = false;
        node.moving.clear();
        node.in_flight = 0;
        node.lanes.iter_mut().for_each(|lane| lane.open = false);
        let mut released = Vec::new();
        for row in node.ops.values_mut() {
            row.auto = Auto::Off;
            (row.info.src_quiet, row.info.dst_quiet) = (true, true);
            released.extend(row.op.take());
        }
        self.kill(name);
        released
    }

    pub(super) fn cut(&mut self, target: &str) {
        self.lose(target, &format!("connection to {target} was cut"));
        for (name, id) in self.moving_to(target) {
            let node = self.node(&name);
            let (polls, lands) = (1 + node.rng.below(4) as u32, node.rng.chance(0.5));
            let liar = node.flaw == Some(Flaw::LandsAfterDstQuiet);
            let row = node.ops.get_mut(&id).expect("moving ops exist");
            if row.info.outcome.is_some() {
                continue;
            }
            row.auto = if liar { Auto::LateLanding(polls + 3) } else { Auto::Settle { polls, lands } };
            let error = lost(format!("connection to {target} was cut with {id:?} in flight"));
            let outcome = if liar {
                Outcome::Failed { src_quiet: true, dst_quiet: true, error }
            } else {
                Outcome::Unresolved { error }
            };
            let _ = self.report(&name, id, outcome);
        }
    }

    /// A new generation took over `endpoint`: tear down what `name` has open to older ones. Their memory is taken as
    /// unreachable from here on, so everything not quiet is proven quiet.
    pub(super) fn supersede(&mut self, name: &str, endpoint: &Endpoint, newer: &str) -> Vec<WriteOp> {
        let node = self.node(name);
        if node.flaw == Some(Flaw::KeepsOldGeneration) {
            return Vec::new();
        }
        let old: Vec<PeerId> = node
            .peers
            .iter()
            .filter(|(_, p)| p.endpoint == *endpoint && p.target != newer)
            .map(|(id, _)| *id)
            .collect();
        let mut released = Vec::new();
        for peer in old {
            let node = self.node(name);
            let row = node.peers.get_mut(&peer).expect("just listed");
            let was = std::mem::replace(&mut row.state, PeerState::Gone);
            let error = lost(format!("{} was replaced by {newer} at {endpoint}", row.target));
            let lanes = node.lanes.len();
            let ops: Vec<(OpId, bool)> = node
                .ops
                .values()
                .filter(|o| o.info.peer == peer && !o.info.is_quiet())
                .filter(|o| o.info.settlement.is_none())
                .map(|o| (o.info.id, o.info.outcome.is_some()))
                .collect();
            if was == PeerState::Connected {
                (0..lanes).for_each(|lane| self.push_event(name, lane, LaneEvent::PeerLost(peer, error.clone())));
            }
            for (id, reported) in if self.leave_superseded { Vec::new() } else { ops } {
                let node = self.node(name);
                node.moving.remove(&id);
                node.ops.get_mut(&id).expect("just listed").auto = Auto::Off;
                if reported {
                    released.extend(self.settle(name, id, Settlement::PeerGenerationDead));
                } else {
                    let outcome = Outcome::Failed { src_quiet: true, dst_quiet: true, error: error.clone() };
                    released.extend(self.report(name, id, outcome));
                }
            }
        }
        released
    }

    /// Enter an accepted op.
    pub(super) fn accept(&mut self, name: &str, op: WriteOp, info: OpInfo, auto: Auto) {
        let watch = self.watch_sources;
        let source_digest = watch.then(|| super::land::source_digest(&op)).flatten();
        let node = self.node(name);
        let id = op.id;
        let keep = node.flaw != Some(Flaw::DropsRegions);
        let landed = vec![false; info.spans];
        node.order.push(id);
        node.in_flight += 1;
        if auto != Auto::Off {
            node.moving.insert(id);
        }
        let op = if keep { op } else { WriteOp { regions: Arc::from([]), ..op } };
        node.ops.insert(id, OpRow { info, op: Some(op), landed, wire: None, source_digest, auto });
    }

    /// Record a violation for every op that lost, before it was proven quiet, what it may still use: its source bytes, or
    /// the registration of its destination.
    pub(super) fn check_held(&mut self) {
        let mut found = Vec::new();
        let targets: BTreeMap<&String, &Regions> =
            self.nodes.iter().filter(|(_, n)| n.alive).map(|(name, n)| (name, &n.regions)).collect();
        let mut told = Vec::new();
        for (name, node) in &self.nodes {
            for row in node.ops.values() {
                let Some(op) = &row.op else { continue };
                let id = row.info.id;
                let source = row.source_digest.filter(|_| !row.info.src_quiet && row.info.landed < row.info.spans);
                if source.is_some_and(|want| super::land::source_digest(op) != Some(want)) {
                    told.push((name.clone(), id));
                    found.push(format!("the source of {name} {id:?} changed while the write may still read it"));
                }
                let (Some(regions), Some(peer)) = (targets.get(&row.info.target), node.peers.get(&op.peer)) else {
                    continue;
                };
                let held = |addr: u64, len: u64| super::land::is_registered(regions, &peer.regions, addr, len);
                if !row.info.dst_quiet && !op.plan.spans().all(|s| held(s.dst_addr, s.len)) {
                    let target = &row.info.target;
                    found.push(format!("{target} let go of memory that {name} {id:?} may still write"));
                }
            }
        }
        for (name, id) in told {
            if let Some(row) = self.node(&name).ops.get_mut(&id) {
                row.source_digest = None;
            }
        }
        self.violations.extend(found);
    }
}
