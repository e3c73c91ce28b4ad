//! What a test does to ops, peers and connects, and what it can see.

use kv_core::ids::{OpId, PeerId};
use kv_core::transport::{LaneEvent, Outcome, PeerDescriptor, Settlement, TransportError, TransportErrorKind as Kind};

use super::land::Refusal;
use super::op::{Auto, OpInfo};
use super::policy::{Policy, Verdict};
use super::state::{Inner, PeerState};
use super::{FakeTransport, lost};

/// # Seeing
impl FakeTransport {
    /// Every op ever accepted, in order of submission.
    pub fn ops(&self) -> Vec<OpInfo> {
        let mut inner = self.fabric.0.lock();
        let node = inner.node(&self.name);
        node.order.iter().map(|id| node.ops[id].info.clone()).collect()
    }

    /// The ops accepted since the first `seen` ones, in order of submission.
    pub fn ops_since(&self, seen: usize) -> Vec<OpInfo> {
        let mut inner = self.fabric.0.lock();
        let node = inner.node(&self.name);
        node.order.iter().skip(seen).map(|id| node.ops[id].info.clone()).collect()
    }

    /// One op; `None` when none with this id was accepted.
    pub fn op(&self, id: OpId) -> Option<OpInfo> {
        self.fabric.0.lock().node(&self.name).ops.get(&id).map(|r| r.info.clone())
    }

    /// Ops without an outcome, in order of submission.
    pub fn in_flight(&self) -> Vec<OpInfo> {
        self.ops().into_iter().filter(|o| o.outcome.is_none()).collect()
    }

    /// Ops that may still read or write, with or without an outcome.
    pub fn not_quiet(&self) -> Vec<OpInfo> {
        self.ops().into_iter().filter(|o| !o.is_quiet()).collect()
    }

    /// The only op in flight. Panics unless there is exactly one.
    pub fn only(&self) -> OpInfo {
        let mut ops = self.in_flight();
        assert_eq!(ops.len(), 1, "{}: ops in flight: {ops:#?}", self.name);
        ops.remove(0)
    }

    /// Every connect that was asked for, failed ones included.
    pub fn connects(&self) -> Vec<PeerDescriptor> {
        self.fabric.0.lock().node(&self.name).connects.clone()
    }

    /// Names of the peers connected now, with their ids.
    pub fn connected(&self) -> Vec<(PeerId, String)> {
        let mut inner = self.fabric.0.lock();
        let peers = &inner.node(&self.name).peers;
        let live = peers.iter().filter(|(_, p)| p.state == PeerState::Connected);
        live.map(|(id, p)| (*id, p.target.clone())).collect()
    }
}

/// # Deciding ahead
impl FakeTransport {
    /// What becomes of ops from now on.
    pub fn set_policy(&self, policy: Policy) {
        self.fabric.0.lock().node(&self.name).policy = policy;
    }

    /// What becomes of the next submission; calls queue up, and go before the policy.
    pub fn script_next(&self, verdict: Verdict) {
        self.fabric.0.lock().node(&self.name).script.push_back(verdict);
    }

    /// Most ops without outcome (`Busy` beyond); `None` lifts the bound.
    pub fn set_capacity(&self, ops: Option<usize>) {
        self.fabric.0.lock().node(&self.name).capacity = ops;
    }

    /// Connects work again, whatever [`fail_connect`](Self::fail_connect) said before.
    pub fn heal_connects(&self) {
        self.fabric.0.lock().node(&self.name).connect_errors.clear();
    }

    /// The next connect fails so; calls queue up.
    pub fn fail_connect(&self, kind: Kind, text: &str) {
        self.fabric.0.lock().node(&self.name).connect_errors.push_back(TransportError::new(kind, text));
    }
}

/// # Moving one op
///
/// All of them panic on an unknown id, and on what the seam forbids: a second outcome, a settlement of a quiet op, a
/// landing after `dst_quiet`.
impl FakeTransport {
    fn script<T>(&self, id: OpId, f: impl FnOnce(&mut Inner) -> T) -> T {
        let mut inner = self.fabric.0.lock();
        // By hand from here on.
        let node = inner.node(&self.name);
        node.moving.remove(&id);
        if let Some(row) = node.ops.get_mut(&id) {
            row.auto = Auto::Off;
        }
        let out = f(&mut inner);
        drop(inner);
        out
    }

    /// Let every byte land that has not. Reports nothing.
    pub fn land(&self, id: OpId) {
        self.land_spans(id, 0..usize::MAX);
    }

    /// Let the spans `which` land (numbers beyond the last are ignored). Reports nothing.
    pub fn land_spans(&self, id: OpId, which: std::ops::Range<usize>) {
        self.script(id, |inner| {
            let row = inner.node(&self.name).ops.get(&id).unwrap_or_else(|| panic!("{} has no {id:?}", self.name));
            assert!(!row.info.dst_quiet, "{} {id:?} is proven dst_quiet: it cannot land", self.name);
            let end = which.end.min(row.info.spans);
            match inner.land(&self.name, id, which.start.min(end)..end) {
                // A broken rule is on record as a violation; a dead process is simply not written.
                Ok(()) | Err(Refusal::Dead | Refusal::Broken(_)) => {}
            }
        });
    }

    /// Land what has not landed, then report `Done`; `Failed` when it could not land.
    pub fn complete(&self, id: OpId) {
        let released = self.script(id, |inner| {
            let spans = inner.node(&self.name).ops.get(&id).map_or(0, |r| r.info.spans);
            let outcome = match inner.land(&self.name, id, 0..spans) {
                Ok(()) => Outcome::Done,
                Err(Refusal::Dead) => {
                    Outcome::Failed { src_quiet: true, dst_quiet: true, error: lost("the target process is dead") }
                }
                Err(Refusal::Broken(text)) => {
                    let error = TransportError::new(Kind::Refused, text);
                    Outcome::Failed { src_quiet: true, dst_quiet: true, error }
                }
            };
            inner.report(&self.name, id, outcome)
        });
        drop(released);
    }

    /// Report `Failed`. Lands nothing; [`land`](Self::land) part of it before, or all of it after if not `dst_quiet`.
    pub fn fail(&self, id: OpId, src_quiet: bool, dst_quiet: bool) {
        let error = TransportError::new(Kind::Backend, format!("{}: {id:?} failed by the test", self.name));
        self.end(id, Outcome::Failed { src_quiet, dst_quiet, error });
    }

    /// Report `Unresolved`.
    pub fn unresolve(&self, id: OpId) {
        let error = TransportError::new(Kind::Backend, format!("{}: {id:?} unresolved by the test", self.name));
        self.end(id, Outcome::Unresolved { error });
    }

    /// Report any outcome, landing nothing. `Done` without [`land`](Self::land) is a transport that lies.
    pub fn end(&self, id: OpId, outcome: Outcome) {
        drop(self.script(id, |inner| inner.report(&self.name, id, outcome)));
    }

    /// Report `Settled` for an op that ended not quiet.
    pub fn settle(&self, id: OpId, src_quiet: bool, dst_quiet: bool) {
        self.prove(id, Settlement::Settled { src_quiet, dst_quiet });
    }

    /// Report `PeerGenerationDead` for an op that ended not quiet.
    pub fn peer_generation_dead(&self, id: OpId) {
        self.prove(id, Settlement::PeerGenerationDead);
    }

    fn prove(&self, id: OpId, settlement: Settlement) {
        drop(self.script(id, |inner| inner.settle(&self.name, id, settlement)));
    }

    /// [`complete`](Self::complete) everything in flight, in order of submission; how many that was.
    pub fn complete_all(&self) -> usize {
        let ops = self.in_flight();
        ops.iter().for_each(|o| self.complete(o.id));
        ops.len()
    }

    /// The connection to a peer is gone: later ops to it are rejected, every lane hears `PeerLost`. Ops in flight stay as
    /// they are.
    pub fn lose_peer(&self, peer: PeerId) {
        let mut inner = self.fabric.0.lock();
        let node = inner.node(&self.name);
        let row = node.peers.get_mut(&peer).unwrap_or_else(|| panic!("{} knows no {peer:?}", self.name));
        row.state = PeerState::Gone;
        let error = lost(format!("connection to {} lost by the test", row.target));
        let lanes = node.lanes.len();
        (0..lanes).for_each(|lane| inner.push_event(&self.name, lane, LaneEvent::PeerLost(peer, error.clone())));
    }
}
