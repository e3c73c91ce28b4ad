//! What becomes of writes: every outcome the seam allows, at any moment, and bytes that land whenever they still may.

use kv_core::ids::OpId;
use kv_core::transport::TransportErrorKind as Kind;

use super::oracle::life_of;
use super::{Ev, Sim};
use crate::fake_transport::{OpInfo, Policy, Verdict};
use crate::world::PrefillNode;

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

/// A write that is not quiet.
pub(super) struct Write {
    pub(super) life: u64,
    /// Index of the prefill rank.
    pub(super) p: usize,
    /// The process written to.
    pub(super) to: String,
    pub(super) src_quiet: bool,
    pub(super) dst_quiet: bool,
    /// Its outcome came.
    pub(super) reported: bool,
    /// No proof will come by itself.
    pub(super) never: bool,
}

/// A step of a write.
#[derive(Clone, Copy, Debug)]
pub(super) enum Step {
    /// So many of its spans land.
    Land(usize),
    Done,
    Fail(bool, bool),
    Unresolve,
    /// Whatever is not proven yet is.
    Settle,
    PeerDead,
}

impl Sim {
    pub(super) fn set_policy(&mut self, node: &PrefillNode) {
        let (rates, mut rng) = (self.rates.clone(), self.rng.fork());
        node.transport.set_policy(Policy::by(move |_| {
            let rates = rates.get();
            if rng.chance(rates.busy) {
                Verdict::Busy
            } else if rng.chance(rates.reject) {
                let kinds = [Kind::Backend, Kind::Refused, Kind::InvalidArgument, Kind::PeerLost];
                Verdict::Reject(rng.pick(&kinds).copied().unwrap_or(Kind::Backend))
            } else {
                Verdict::Hold
            }
        }));
    }

    /// Writes of a process for a life that are not quiet.
    pub(super) fn open_writes(&self, process: u64, life: u64) -> impl Iterator<Item = (OpId, &Write)> {
        let of = self.writes.range((process, OpId(0))..=(process, OpId(u64::MAX)));
        of.filter(move |(_, w)| w.life == life).map(|((_, op), w)| (*op, w))
    }

    /// Draw the fate of every write submitted since.
    pub(super) fn new_writes(&mut self, p: usize) {
        let new = self.p[p].node.transport.ops_since(self.p[p].seen);
        self.p[p].seen += new.len();
        for info in new {
            self.new_write(p, &info);
        }
    }

    fn new_write(&mut self, p: usize, info: &OpInfo) {
        let life = self.source_life(p, info);
        let key = (self.p[p].process, info.id);
        self.trace.line(format_args!(
            "{} writes {:?} of life {life} to {}: {} spans",
            self.p[p].name, info.id, info.target, info.spans
        ));
        let failed = |l: &super::life::Life| l.senders.get(&p)?.live().map(|s| s.last.is_terminal());
        if self.lives.get(&life).and_then(failed) == Some(true) {
            self.wrong(format!("{}: {:?} was posted for life {life}, which had ended", self.p[p].name, info.id));
        }
        let mut write = Write {
            life,
            p,
            to: info.target.clone(),
            src_quiet: false,
            dst_quiet: false,
            reported: false,
            never: false,
        };
        let most = [200 * US, 2 * MS, 20 * MS][self.rng.below(3) as usize];
        let took = 20 * US + self.rng.below(most);
        if self.rng.chance(0.3) {
            let (at, spans) = (self.rng.below(took), self.rng.below(info.spans as u64 + 1) as usize);
            self.after(at, Ev::Write(key.0, key.1, Step::Land(spans)));
        }
        let rates = self.rates.get();
        if !self.rng.chance(rates.op_error) {
            self.writes.insert(key, write);
            return self.after(took, Ev::Write(key.0, key.1, Step::Done));
        }
        let end = match self.rng.below(6) {
            0 => Step::Fail(true, true),
            1 => Step::Fail(true, false),
            2 => Step::Fail(false, true),
            3 => Step::Fail(false, false),
            _ => Step::Unresolve,
        };
        self.after(took, Ev::Write(key.0, key.1, end));
        if !matches!(end, Step::Fail(true, true)) {
            let most = [MS, 30 * MS, 3_000 * MS][self.rng.below(3) as usize];
            let wait = took + self.rng.below(most);
            // Late landings, of which nobody hears.
            for _ in 0..self.rng.below(3) {
                let (at, spans) =
                    (took + self.rng.below(wait - took + 1), 1 + self.rng.below(info.spans as u64) as usize);
                self.after(at, Ev::Write(key.0, key.1, Step::Land(spans)));
            }
            write.never = self.rng.chance(0.2);
            if write.never {
                // It may land at any time, or not at all.
                let at = self.rng.below(8_000 * MS);
                self.after(at, Ev::Write(key.0, key.1, Step::Land(info.spans)));
            } else {
                self.after(wait + 1, Ev::Write(key.0, key.1, Step::Settle));
            }
        }
        self.writes.insert(key, write);
    }

    /// The life whose bytes a write reads.
    fn source_life(&self, p: usize, info: &OpInfo) -> u64 {
        let Some(span) = info.plan.spans().next() else { return 0 };
        let node = &self.p[p].node;
        let offset = span.src_offset as usize;
        // KV memory was registered first.
        let bytes = if span.src_region.0 == 1 { node.kv.read(offset, 8) } else { node.aux.read(offset, 8) };
        life_of(&bytes)
    }

    pub(super) fn write_step(&mut self, process: u64, op: OpId, step: Step) {
        let key = (process, op);
        let Some(w) = self.writes.get_mut(&key) else { return };
        let rank = &self.p[w.p];
        if rank.process != process {
            return;
        }
        // The fabric may have ended it by itself: a new generation took the peer's place.
        let transport = rank.node.transport.clone();
        let Some(now) = transport.op(op) else { return };
        (w.src_quiet, w.dst_quiet, w.reported) = (now.src_quiet, now.dst_quiet, now.outcome.is_some());
        if now.is_quiet() {
            self.writes.remove(&key);
            self.touched_p.insert(self.index_of(process));
            return;
        }
        self.trace.line(format_args!("{}: {op:?} of life {}: {step:?}", rank.name, w.life));
        match step {
            Step::Land(_) if now.dst_quiet => {}
            Step::Land(spans) => transport.land_spans(op, 0..spans),
            Step::Done if !w.reported => transport.complete(op),
            Step::Fail(src, dst) if !w.reported => transport.fail(op, src, dst),
            Step::Unresolve if !w.reported => transport.unresolve(op),
            Step::Settle if w.reported => {
                let before = now.dst_quiet;
                if !before && self.rng.chance(0.3) {
                    transport.land(op);
                }
                transport.settle(op, true, true);
            }
            Step::PeerDead if w.reported => transport.peer_generation_dead(op),
            _ => {}
        }
        let Some(now) = transport.op(op) else { return };
        if now.is_quiet() {
            self.writes.remove(&key);
        } else if let Some(w) = self.writes.get_mut(&key) {
            (w.src_quiet, w.dst_quiet, w.reported) = (now.src_quiet, now.dst_quiet, now.outcome.is_some());
        }
        let p = self.index_of(process);
        self.touched_p.insert(p);
    }

    fn index_of(&self, process: u64) -> usize {
        self.p.iter().position(|p| p.process == process).unwrap_or(0)
    }

    /// The process that these writes go to died: they end, and it is proven or not.
    pub(super) fn writes_to_the_dead(&mut self, name: &str) {
        let keys: Vec<(u64, OpId)> = self.writes.iter().filter(|(_, w)| w.to == name).map(|(k, _)| *k).collect();
        for (process, op) in keys {
            let soon = self.rng.below(5 * MS);
            let end = if self.rng.chance(0.5) { Step::Unresolve } else { Step::Fail(true, false) };
            self.after(soon, Ev::Write(process, op, end));
            if self.rng.chance(0.8) {
                let later = soon + 1 + self.rng.below(100 * MS);
                self.after(later, Ev::Write(process, op, Step::PeerDead));
            } else if let Some(w) = self.writes.get_mut(&(process, op)) {
                w.never = true;
            }
        }
    }

    /// Forget writes that the fabric ended by itself.
    pub(super) fn refresh_writes(&mut self) {
        let mut ended = Vec::new();
        for (key, w) in &mut self.writes {
            let Some(now) = self.p[w.p].node.transport.op(key.1) else { continue };
            (w.src_quiet, w.dst_quiet, w.reported) = (now.src_quiet, now.dst_quiet, now.outcome.is_some());
            if now.is_quiet() {
                ended.push(*key);
            }
        }
        ended.iter().for_each(|key| drop(self.writes.remove(key)));
    }

    /// Faults are over: every write that has no outcome gets one; what is unresolved stays so.
    pub(super) fn finish_writes(&mut self) {
        self.refresh_writes();
        let keys: Vec<(u64, OpId)> = self.writes.iter().filter(|(_, w)| !w.reported).map(|(k, _)| *k).collect();
        for (process, op) in keys {
            let at = self.rng.below(20 * MS);
            self.after(at, Ev::Write(process, op, Step::Done));
        }
    }
}
