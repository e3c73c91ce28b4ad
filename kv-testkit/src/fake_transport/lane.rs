//! The fake's lane: checks a submission as a strict backend would, and moves automatic ops when polled.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::{AsRawFd as _, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use kv_core::ids::OpId;
use kv_core::plan::Span;
use kv_core::transport::{
    Lane, LaneEvent, Outcome, Settlement, SubmitError, TransportError, TransportErrorKind as Kind, WriteOp,
};

use super::land::Refusal;
use super::op::{Auto, OpInfo};
use super::policy::{Flaw, Verdict};
use super::state::{Inner, Node, PeerState};
use super::{Shared, lost};

/// A lane of a [`FakeTransport`](super::FakeTransport).
pub struct FakeLane {
    pub(super) shared: Arc<Shared>,
    pub(super) name: String,
    pub(super) index: usize,
    pub(super) max_op_bytes: Option<u64>,
    pub(super) wake: Option<UnixStream>,
}

fn error(kind: Kind, text: impl std::fmt::Display) -> TransportError {
    TransportError::new(kind, text)
}

/// What a strict backend finds wrong with an op before it posts anything.
fn refuse(node: &Node, name: &str, op: &WriteOp, max_op_bytes: Option<u64>) -> Result<(), TransportError> {
    if !node.alive {
        return Err(error(Kind::Backend, format_args!("{name} itself is dead")));
    }
    let flaw = node.flaw;
    let peer = match node.peers.get(&op.peer) {
        Some(p) if p.state == PeerState::Connected => p,
        _ if flaw == Some(Flaw::AcceptsUnknownPeer) => return Ok(()),
        Some(p) => return Err(lost(format_args!("{:?} ({}) is not connected any more", op.peer, p.target))),
        None => return Err(lost(format_args!("{name} knows no {:?}", op.peer))),
    };
    if op.plan.is_empty() {
        return Err(error(Kind::InvalidArgument, "the plan moves nothing"));
    }
    if let Some(max) = max_op_bytes
        && op.plan.total_bytes() > max
    {
        return Err(error(Kind::InvalidArgument, format_args!("{} bytes, at most {max}", op.plan.total_bytes())));
    }
    let ours = node.regions.lock();
    let check = |s: Span| {
        if s.len == 0 {
            return Err(error(Kind::InvalidArgument, "a span of no bytes"));
        }
        let source = op.regions.iter().find(|r| r.id() == s.src_region);
        let source = source.filter(|r| ours.get(&r.id()).is_some_and(|row| row.base == r.addr() && !row.gone));
        if flaw != Some(Flaw::ReadsAnySource) {
            let len = source.map(|r| r.len()).ok_or_else(|| {
                error(Kind::InvalidArgument, format_args!("{:?} is not among the op's regions", s.src_region))
            })?;
            if s.src_offset.checked_add(s.len).is_none_or(|end| end > len) {
                let text = format!("source [{}; {}] is outside {:?} of {len} bytes", s.src_offset, s.len, s.src_region);
                return Err(error(Kind::InvalidArgument, text));
            }
        }
        let inside = |base: u64, len: u64| {
            s.dst_addr >= base && s.dst_addr.checked_add(s.len).is_some_and(|end| end <= base + len)
        };
        let blind = matches!(flaw, Some(Flaw::IgnoresBounds | Flaw::TrustsForgedPeer));
        if !blind && !peer.regions.iter().any(|r| inside(r.base, r.len)) {
            let text = format!("[{:#x}; {}] is outside what {} registered", s.dst_addr, s.len, peer.target);
            return Err(error(Kind::Refused, text));
        }
        Ok(())
    };
    op.plan.spans().try_for_each(check)
}

impl FakeLane {
    fn info(&self, node: &Node, op: &WriteOp) -> OpInfo {
        OpInfo {
            id: op.id,
            peer: op.peer,
            target: node.peers.get(&op.peer).map(|p| p.target.clone()).unwrap_or_default(),
            lane: self.index,
            seq: node.order.len() as u64,
            plan: op.plan.clone(),
            spans: op.plan.spans().count(),
            landed: 0,
            outcome: None,
            settlement: None,
            src_quiet: false,
            dst_quiet: false,
        }
    }
}

impl Lane for FakeLane {
    fn submit(&mut self, op: WriteOp) -> Result<(), SubmitError> {
        let mut inner = self.shared.lock();
        let node = inner.node(&self.name);
        assert!(!node.ops.contains_key(&op.id), "{}: {:?} was submitted twice", self.name, op.id);
        if let Err(e) = refuse(node, &self.name, &op, self.max_op_bytes) {
            return Err(SubmitError::Rejected(op, e));
        }
        let info = self.info(node, &op);
        let verdict = match node.script.pop_front() {
            Some(verdict) => verdict,
            None if node.capacity.is_some_and(|c| node.in_flight >= c) => Verdict::Busy,
            None => {
                // Out of the node for the call: the closure may look at anything but this fabric.
                let mut policy = std::mem::take(&mut node.policy);
                let verdict = policy.decide(&info);
                node.policy = policy;
                verdict
            }
        };
        let id = op.id;
        let auto = match verdict {
            Verdict::Busy if node.flaw == Some(Flaw::BusyButPosted) => {
                let back = op.clone();
                inner.accept(&self.name, op, info, Auto::Done(1));
                return Err(SubmitError::Busy(back));
            }
            Verdict::Busy => return Err(SubmitError::Busy(op)),
            Verdict::Reject(kind) => {
                let e = error(kind, format_args!("{}: {id:?} refused by the test's script", self.name));
                return Err(SubmitError::Rejected(op, e));
            }
            Verdict::Complete => Auto::Done(1),
            Verdict::AfterPolls(n) => Auto::Done(n.max(1)),
            Verdict::Hold | Verdict::Fail { .. } | Verdict::Unresolve => Auto::Off,
        };
        if node.flaw == Some(Flaw::LeaksFiles) && id.0.is_multiple_of(32) {
            node.leaked.extend(File::open("/dev/null"));
        }
        inner.accept(&self.name, op, info, auto);
        let text = format!("{}: {id:?} ended by the test's script", self.name);
        let released = match verdict {
            Verdict::Fail { src_quiet, dst_quiet } => {
                let outcome = Outcome::Failed { src_quiet, dst_quiet, error: error(Kind::Backend, text) };
                inner.report(&self.name, id, outcome)
            }
            Verdict::Unresolve => {
                inner.report(&self.name, id, Outcome::Unresolved { error: error(Kind::Backend, text) })
            }
            _ => None,
        };
        drop(inner);
        drop(released);
        Ok(())
    }

    fn poll(&mut self, out: &mut Vec<LaneEvent>) {
        if let Some(wake) = &mut self.wake {
            // Drained first: news that comes later writes a new byte.
            let mut sink = [0; 64];
            while wake.read(&mut sink).is_ok_and(|n| n == sink.len()) {}
        }
        let mut inner = self.shared.lock();
        let node = inner.node(&self.name);
        let moving: Vec<OpId> = node.moving.iter().filter(|id| node.ops[id].info.lane == self.index).copied().collect();
        let mut released = Vec::new();
        for id in moving {
            released.extend(inner.advance(&self.name, id));
        }
        out.extend(inner.node(&self.name).lanes[self.index].queue.drain(..));
        drop(inner);
        drop(released);
    }

    fn wake_fd(&self) -> Option<RawFd> {
        self.wake.as_ref().map(|w| w.as_raw_fd())
    }
}

impl Drop for FakeLane {
    fn drop(&mut self) {
        let mut inner = self.shared.lock();
        let node = inner.node(&self.name);
        node.lanes[self.index].open = false;
        let mine = |row: &&super::op::OpRow| row.info.lane == self.index && !row.info.is_quiet();
        let left: Vec<OpId> = node.ops.values().filter(mine).map(|r| r.info.id).collect();
        if !left.is_empty() && !std::thread::panicking() {
            let text =
                format!("{}: lane {} was dropped over writes that are not quiet: {left:?}", self.name, self.index);
            inner.violation(text);
        }
    }
}

impl Inner {
    /// One poll's worth of progress of an automatic op.
    fn advance(&mut self, name: &str, id: OpId) -> Option<WriteOp> {
        let node = self.node(name);
        let flaw = node.flaw;
        let row = &node.ops[&id];
        let (auto, target) = (row.auto, row.info.target.clone());
        let (alive, paused) = self.nodes.get(&target).map_or((true, false), |t| (t.alive, t.paused));
        if paused && alive {
            if flaw == Some(Flaw::ProvesPausedPeer) && matches!(auto, Auto::Done(_)) {
                self.set_auto(name, id, Auto::LateLanding(3));
                let error = error(Kind::Timeout, format_args!("{target} does not answer"));
                return self.report(name, id, Outcome::Failed { src_quiet: true, dst_quiet: true, error });
            }
            return None;
        }
        match auto {
            Auto::Off => None,
            Auto::Done(polls) if polls > 1 => self.set_auto(name, id, Auto::Done(polls - 1)),
            Auto::Done(_) if flaw == Some(Flaw::DoneBeforeLanding) => {
                self.set_auto(name, id, Auto::LateLanding(3));
                self.report(name, id, Outcome::Done)
            }
            Auto::Done(_) => {
                self.stop(name, id);
                let spans = self.node(name).ops[&id].info.spans;
                let outcome = match self.land(name, id, 0..spans) {
                    Ok(()) => Outcome::Done,
                    Err(Refusal::Dead) => Outcome::Failed {
                        src_quiet: true,
                        dst_quiet: true,
                        error: lost(format_args!("process {target} is dead")),
                    },
                    Err(Refusal::Broken(text)) => {
                        Outcome::Failed { src_quiet: true, dst_quiet: true, error: error(Kind::Refused, text) }
                    }
                };
                self.report(name, id, outcome)
            }
            Auto::Settle { polls, lands } if polls > 1 => {
                self.set_auto(name, id, Auto::Settle { polls: polls - 1, lands })
            }
            Auto::Settle { lands, .. } => {
                self.stop(name, id);
                if !alive {
                    return self.settle(name, id, Settlement::PeerGenerationDead);
                }
                if lands {
                    let spans = self.node(name).ops[&id].info.spans;
                    let _ = self.land(name, id, 0..spans);
                }
                self.settle(name, id, Settlement::Settled { src_quiet: true, dst_quiet: true })
            }
            Auto::LateLanding(polls) if polls > 1 => self.set_auto(name, id, Auto::LateLanding(polls - 1)),
            Auto::LateLanding(_) => {
                self.stop(name, id);
                let spans = self.node(name).ops[&id].info.spans;
                let _ = self.land(name, id, 0..spans);
                self.node(name).ops.get_mut(&id).and_then(|row| row.op.take())
            }
        }
    }

    fn set_auto(&mut self, name: &str, id: OpId, auto: Auto) -> Option<WriteOp> {
        self.node(name).ops.get_mut(&id)?.auto = auto;
        None
    }

    fn stop(&mut self, name: &str, id: OpId) {
        self.set_auto(name, id, Auto::Off);
        self.node(name).moving.remove(&id);
    }
}
