//! One trial's bench: a source, a target, lanes, and a model of what every byte of the target must be.
//!
//! The model is what makes late writers visible: as soon as an op's destination is proven quiet, the bench paints it with
//! a canary, and the canary must still be there at the end.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

use kv_core::ids::{OpId, PeerId};
use kv_core::memory::RegisteredRegion;
use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_core::transport::{Lane, LaneEvent, Outcome, Settlement, SubmitError, Transport, TransportError, WriteOp};

use super::harness::{Block, Harness, SourceMemory, Target};
use crate::print::first_difference;
use crate::rng::Rng;

/// Painted over destinations that are proven quiet.
const CANARY: u8 = 0xa5;

/// A registered block of source memory.
#[derive(Clone)]
pub(super) struct Source {
    pub(super) memory: Arc<dyn SourceMemory>,
    pub(super) region: Arc<RegisteredRegion>,
}

/// How the bench looks at `Done` ops.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Check {
    /// Compare when `Done` is reported, then paint.
    EachDone,
    /// Compare once, at the end: cheaper.
    AtEnd,
}

struct Sent {
    lane: usize,
    /// Piece of the target's memory, and the bytes meant for it.
    pieces: Vec<(u32, usize, Vec<u8>)>,
    outcome: Option<Outcome>,
    settlement: Option<Settlement>,
}

impl Sent {
    fn is_quiet(&self) -> bool {
        let (src, dst) = self.quiet();
        src && dst
    }

    fn quiet(&self) -> (bool, bool) {
        let (src, dst) = match self.outcome {
            None | Some(Outcome::Unresolved { .. }) => (false, false),
            Some(Outcome::Done) => (true, true),
            Some(Outcome::Failed { src_quiet, dst_quiet, .. }) => (src_quiet, dst_quiet),
        };
        match self.settlement {
            None => (src, dst),
            Some(Settlement::PeerGenerationDead) => (true, true),
            Some(Settlement::Settled { src_quiet, dst_quiet }) => (src || src_quiet, dst || dst_quiet),
        }
    }
}

/// What the target's block must hold; `None` = unknown, because a write may or may not have landed.
struct Image {
    block: Block,
    bytes: Vec<Option<u8>>,
}

pub(super) struct Bench<'a> {
    pub(super) harness: &'a mut dyn Harness,
    pub(super) transport: Arc<dyn Transport>,
    pub(super) target: Box<dyn Target>,
    pub(super) peer: PeerId,
    pub(super) lanes: Vec<Box<dyn Lane>>,
    pub(super) check: Check,
    pub(super) rng: Rng,
    pub(super) lost: Vec<PeerId>,
    /// The target is stopped or dead: its memory may be out of reach.
    pub(super) stopped: bool,
    next_op: u64,
    sent: BTreeMap<OpId, Sent>,
    images: Vec<Image>,
    sources: Vec<(Source, Vec<u8>)>,
    faults: Vec<String>,
    /// Done while the target's memory was out of sight.
    unverified: Vec<OpId>,
    /// Proven quiet while the target's memory was out of reach.
    unpainted: Vec<OpId>,
}

pub(super) type Res<T = ()> = Result<T, String>;

pub(super) fn text(e: TransportError) -> String {
    format!("{:?}: {e}", e.kind)
}

impl<'a> Bench<'a> {
    /// A bench whose target has no memory yet, so nothing is connected.
    pub(super) fn new(harness: &'a mut dyn Harness) -> Res<Self> {
        let (transport, target) = (harness.source(), harness.target());
        let lane = transport.lane().map_err(text)?;
        Ok(Self {
            harness,
            transport,
            target,
            peer: PeerId(0),
            lanes: vec![lane],
            check: Check::EachDone,
            rng: Rng::new(42),
            lost: Vec::new(),
            stopped: false,
            next_op: 1,
            sent: BTreeMap::new(),
            images: Vec::new(),
            sources: Vec::new(),
            faults: Vec::new(),
            unverified: Vec::new(),
            unpainted: Vec::new(),
        })
    }

    /// A bench with one source block and one connected target block.
    pub(super) fn ready(harness: &'a mut dyn Harness, src: usize, dst: usize) -> Res<(Self, Source, Block)> {
        let mut bench = Self::new(harness)?;
        let source = bench.source(src)?;
        let block = bench.block(dst)?;
        bench.connect()?;
        Ok((bench, source, block))
    }

    /// Register a source block full of random bytes.
    pub(super) fn source(&mut self, len: usize) -> Res<Source> {
        let memory = self.harness.memory(len);
        let bytes = self.rng.bytes(len);
        memory.put(0, &bytes);
        let region = self.transport.register(memory.clone()).map_err(text)?;
        let source = Source { memory, region };
        self.sources.push((source.clone(), bytes));
        Ok(source)
    }

    /// Let go of every source block the bench itself holds.
    pub(super) fn forget_sources(&mut self) {
        self.sources.clear();
    }

    /// A registered block at the target, filled with random bytes that must stay unless written.
    pub(super) fn block(&mut self, len: usize) -> Res<Block> {
        self.any_block(len, true)
    }

    pub(super) fn any_block(&mut self, len: usize, register: bool) -> Res<Block> {
        let block = self.target.alloc(len, register)?;
        let bytes = self.rng.bytes(len);
        self.target.write(block.id, 0, &bytes)?;
        self.images.push(Image { block, bytes: bytes.into_iter().map(Some).collect() });
        Ok(block)
    }

    /// Connect (again), so that the peer covers everything registered at the target.
    pub(super) fn connect(&mut self) -> Res {
        let descriptor = self.target.descriptor()?;
        self.peer = self.transport.connect(&descriptor).map_err(text)?;
        Ok(())
    }

    /// An id no op has had.
    pub(super) fn op_id(&mut self) -> OpId {
        self.next_op += 1;
        OpId(self.next_op - 1)
    }

    /// A plan for one entry pair.
    pub(super) fn entry(source: &Source, src_offset: u64, dst_addr: u64, item_len: u64) -> EntryPair {
        EntryPair {
            src_entry: 0,
            dst_entry: 0,
            src_region: source.region.id(),
            src_offset,
            dst_addr,
            item_len,
            src_stride: item_len,
            dst_stride: item_len,
            dst_kind: Default::default(),
        }
    }

    /// One contiguous piece.
    pub(super) fn piece(source: &Source, src_offset: u64, dst_addr: u64, len: u64) -> WritePlan {
        Self::plan(vec![Self::entry(source, src_offset, dst_addr, len)], vec![Run { src: 0, dst: 0, count: 1 }])
    }

    pub(super) fn plan(entries: Vec<EntryPair>, runs: Vec<Run>) -> WritePlan {
        WritePlan::new([PlanGroup { entries: entries.into(), runs: runs.into() }])
    }

    /// An op that names these sources.
    pub(super) fn op(&mut self, plan: WritePlan, sources: &[&Source]) -> WriteOp {
        let regions = sources.iter().map(|s| s.region.clone()).collect();
        WriteOp { id: self.op_id(), peer: self.peer, plan, regions }
    }

    /// What the op is meant to write, as far as it lies in the target's known blocks. `sources` must hold its regions.
    fn pieces(&self, op: &WriteOp) -> Vec<(u32, usize, Vec<u8>)> {
        let piece = |span: kv_core::plan::Span| {
            let (source, _) = self.sources.iter().find(|(s, _)| s.region.id() == span.src_region)?;
            let (offset, len) = (usize::try_from(span.src_offset).ok()?, usize::try_from(span.len).ok()?);
            if span.src_offset.checked_add(span.len)? > source.region.len() {
                return None;
            }
            let end = span.dst_addr.checked_add(span.len)?;
            let inside = |b: &Block| span.dst_addr >= b.addr && end <= b.addr + b.len as u64;
            let image = self.images.iter().find(|i| inside(&i.block))?;
            let at = (span.dst_addr - image.block.addr) as usize;
            Some((image.block.id, at, source.memory.get(offset, len)))
        };
        op.plan.spans().filter_map(piece).collect()
    }

    /// Submit on lane 0; `Busy` is retried after news.
    pub(super) fn submit(&mut self, op: WriteOp) -> Res<OpId> {
        let id = op.id;
        let mut op = Some(op);
        self.until("room for an op", |b| match b.try_submit(0, op.take().ok_or("no op")?)? {
            Ok(_) => Ok(true),
            Err(SubmitError::Busy(back)) => {
                op = Some(back);
                Ok(false)
            }
            Err(SubmitError::Rejected(_, e)) => Err(format!("{id:?} was rejected: {}", text(e))),
        })?;
        Ok(id)
    }

    /// Submit once, on any lane. The outer error is a broken rule.
    #[allow(clippy::result_large_err)] // the seam's own error
    pub(super) fn try_submit(&mut self, lane: usize, op: WriteOp) -> Res<Result<OpId, SubmitError>> {
        let (id, pieces, plan) = (op.id, self.pieces(&op), op.plan.clone());
        match self.lanes[lane].submit(op) {
            Ok(()) => {
                self.sent.insert(id, Sent { lane, pieces, outcome: None, settlement: None });
                // Until the outcome, each byte may be old or new.
                self.paint_unknown(id);
                Ok(Ok(id))
            }
            Err(e) => {
                let (SubmitError::Busy(back) | SubmitError::Rejected(back, _)) = &e;
                if back.id != id || back.plan != plan {
                    return Err(format!("{id:?} came back as another op: {:?}", back.id));
                }
                Ok(Err(e))
            }
        }
    }

    /// Submit; `None` when it was rejected, as it should be.
    pub(super) fn submit_bad(&mut self, op: WriteOp) -> Res<Option<OpId>> {
        let id = op.id;
        let mut op = Some(op);
        let mut accepted = None;
        self.until("an answer to a bad op", |b| match b.try_submit(0, op.take().ok_or("no op")?)? {
            Ok(id) => {
                accepted = Some(id);
                Ok(true)
            }
            Err(SubmitError::Rejected(..)) => Ok(true),
            Err(SubmitError::Busy(back)) => {
                op = Some(back);
                Ok(false)
            }
        })?;
        debug_assert!(accepted.is_none_or(|a| a == id));
        Ok(accepted)
    }

    /// A bad op must be rejected, or fail; whichever way, it must not be `Done`.
    pub(super) fn must_not_be_done(&mut self, op: WriteOp, what: &str) -> Res {
        if let Some(id) = self.submit_bad(op)? {
            let outcome = self.outcome(id)?;
            if outcome == Outcome::Done {
                return Err(format!("{what}: the write was Done"));
            }
        }
        Ok(())
    }

    /// Poll every lane once; whether there was news.
    pub(super) fn poll(&mut self) -> Res<bool> {
        let mut any = false;
        for lane in 0..self.lanes.len() {
            let mut events = Vec::new();
            self.lanes[lane].poll(&mut events);
            any |= !events.is_empty();
            for event in events {
                self.event(lane, event);
            }
        }
        match self.faults.first() {
            Some(fault) => Err(fault.clone()),
            None => Ok(any),
        }
    }

    fn event(&mut self, lane: usize, event: LaneEvent) {
        let fault = match event {
            LaneEvent::PeerLost(peer, _) => {
                self.lost.push(peer);
                None
            }
            LaneEvent::Outcome(id, outcome) => self.on_outcome(lane, id, outcome).err(),
            LaneEvent::Settlement(id, settlement) => self.on_settlement(lane, id, settlement).err(),
        };
        self.faults.extend(fault);
    }

    fn known(&mut self, lane: usize, id: OpId, what: &str) -> Res<&mut Sent> {
        let sent = self.sent.get_mut(&id).ok_or_else(|| format!("{what} for {id:?}, which was not accepted"))?;
        if sent.lane != lane {
            return Err(format!("{what} for {id:?} of lane {} came out of lane {lane}", sent.lane));
        }
        Ok(sent)
    }

    fn on_outcome(&mut self, lane: usize, id: OpId, outcome: Outcome) -> Res {
        let sent = self.known(lane, id, "an outcome")?;
        if let Some(first) = &sent.outcome {
            return Err(format!("{id:?} has a second outcome: {first:?}, then {outcome:?}"));
        }
        sent.outcome = Some(outcome.clone());
        match outcome {
            Outcome::Done if self.check == Check::AtEnd => {
                let pieces = std::mem::take(&mut self.sent.get_mut(&id).ok_or("gone")?.pieces);
                for (block, at, bytes) in &pieces {
                    self.expect(*block, *at, bytes);
                }
                Ok(())
            }
            Outcome::Done => self.verify_done(id),
            Outcome::Failed { dst_quiet: true, .. } => self.paint_canary(id),
            Outcome::Failed { .. } | Outcome::Unresolved { .. } => Ok(()),
        }
    }

    fn on_settlement(&mut self, lane: usize, id: OpId, settlement: Settlement) -> Res {
        let sent = self.known(lane, id, "a settlement")?;
        if sent.outcome.is_none() {
            return Err(format!("{id:?} settled before it had an outcome"));
        }
        if let Some(first) = sent.settlement {
            return Err(format!("{id:?} settled twice: {first:?}, then {settlement:?}"));
        }
        if sent.is_quiet() {
            return Err(format!("{id:?} was quiet already and settled: {settlement:?}"));
        }
        let was_dst_quiet = sent.quiet().1;
        sent.settlement = Some(settlement);
        if sent.quiet().1 && !was_dst_quiet { self.paint_canary(id) } else { Ok(()) }
    }

    fn image(&mut self, block: u32) -> Option<&mut Image> {
        self.images.iter_mut().find(|i| i.block.id == block)
    }

    fn expect(&mut self, block: u32, at: usize, bytes: &[u8]) {
        if let Some(image) = self.image(block) {
            image.bytes[at..at + bytes.len()].iter_mut().zip(bytes).for_each(|(i, b)| *i = Some(*b));
        }
    }

    fn paint_unknown(&mut self, id: OpId) {
        let pieces: Vec<(u32, Range<usize>)> =
            self.sent[&id].pieces.iter().map(|(b, at, bytes)| (*b, *at..at + bytes.len())).collect();
        for (block, range) in pieces {
            if let Some(image) = self.image(block) {
                image.bytes[range].fill(None);
            }
        }
    }

    fn reachable(&self) -> bool {
        !self.stopped || self.target.visible_when_stopped()
    }

    /// The destination of `id` is quiet: nobody may write it from now on.
    fn paint_canary(&mut self, id: OpId) -> Res {
        if !self.reachable() {
            self.unpainted.push(id);
            return Ok(());
        }
        let pieces = std::mem::take(&mut self.sent.get_mut(&id).ok_or("gone")?.pieces);
        for (block, at, bytes) in pieces {
            let canary = vec![CANARY; bytes.len()];
            self.target.write(block, at, &canary)?;
            self.expect(block, at, &canary);
        }
        Ok(())
    }

    /// Stop the target, if that can be done; whether it was.
    pub(super) fn pause(&mut self) -> bool {
        self.stopped = self.target.pause().is_ok();
        self.stopped
    }

    /// Let the target go on. Its memory can be seen again: at once paint what was called quiet meanwhile, and verify what
    /// was called Done.
    pub(super) fn resume(&mut self) -> Res {
        self.target.resume();
        self.stopped = false;
        std::mem::take(&mut self.unpainted).into_iter().try_for_each(|id| self.paint_canary(id))?;
        std::mem::take(&mut self.unverified).into_iter().try_for_each(|id| self.verify_done(id))
    }

    fn verify_done(&mut self, id: OpId) -> Res {
        if !self.reachable() {
            self.unverified.push(id);
            return Ok(());
        }
        let pieces = self.sent[&id].pieces.clone();
        let mut whole: BTreeMap<u32, Vec<u8>> = BTreeMap::new();
        for (block, at, want) in &pieces {
            // Many pieces: one read of the block is cheaper than one a piece, above all from another process.
            let got = if pieces.len() > 8 {
                let len = self.images.iter().find(|i| i.block.id == *block).map_or(0, |i| i.block.len);
                if !whole.contains_key(block) {
                    whole.insert(*block, self.target.read(*block, 0, len)?);
                }
                whole[block][*at..at + want.len()].to_vec()
            } else {
                self.target.read(*block, *at, want.len())?
            };
            if let Some(diff) = first_difference(&got, want) {
                return Err(format!("{id:?} is Done but its bytes are not in place: block {block} at {at}: {diff}"));
            }
        }
        self.paint_canary(id)
    }

    /// Poll until `done`, with patience that starts anew with each piece of news.
    pub(super) fn until(&mut self, what: &str, mut done: impl FnMut(&mut Self) -> Res<bool>) -> Res {
        let mut since = Instant::now();
        loop {
            if done(self)? {
                return Ok(());
            }
            if self.poll()? {
                since = Instant::now();
            } else if since.elapsed() > self.harness.patience() {
                return Err(format!("waited in vain for {what}"));
            } else {
                self.harness.idle();
            }
        }
    }

    /// Watch for a while: nothing forbidden may happen.
    pub(super) fn watch(&mut self) -> Res {
        for _ in 0..self.harness.watch_polls() {
            self.poll()?;
            self.harness.idle();
        }
        Ok(())
    }

    /// The outcome of an op, once it has one.
    pub(super) fn outcome(&mut self, id: OpId) -> Res<Outcome> {
        self.until(&format!("the outcome of {id:?}"), |b| Ok(b.sent[&id].outcome.is_some()))?;
        self.sent[&id].outcome.clone().ok_or_else(|| format!("{id:?} has no outcome"))
    }

    /// The outcome so far.
    pub(super) fn seen(&self, id: OpId) -> Option<&Outcome> {
        self.sent.get(&id)?.outcome.as_ref()
    }

    /// Whether both sides of an op are proven quiet so far.
    pub(super) fn quiet(&self, id: OpId) -> bool {
        self.sent.get(&id).is_some_and(Sent::is_quiet)
    }

    /// Whether the op's outcome left a side not quiet.
    pub(super) fn left_open(&self, id: OpId) -> bool {
        let open = |o: &Outcome| match o {
            Outcome::Done => false,
            Outcome::Failed { src_quiet, dst_quiet, .. } => !(*src_quiet && *dst_quiet),
            Outcome::Unresolved { .. } => true,
        };
        self.seen(id).is_some_and(open)
    }

    /// Forget the target's blocks: it is another process from here on.
    pub(super) fn new_target(&mut self, target: Box<dyn Target>) -> Box<dyn Target> {
        self.images.clear();
        self.unverified.clear();
        self.unpainted.clear();
        for sent in self.sent.values_mut() {
            sent.pieces.clear();
        }
        self.stopped = false;
        std::mem::replace(&mut self.target, target)
    }

    /// Wait until every op has its outcome.
    pub(super) fn drain(&mut self) -> Res {
        self.until("the outcome of every op", |b| Ok(b.sent.values().all(|s| s.outcome.is_some())))
    }

    /// Wait until every op is `Done`.
    pub(super) fn all_done(&mut self) -> Res {
        self.drain()?;
        let bad = self.sent.iter().find(|(_, s)| s.outcome != Some(Outcome::Done));
        bad.map_or(Ok(()), |(id, s)| Err(format!("{id:?} ended {:?}", s.outcome)))
    }

    /// Watch, then compare everything with the model: target blocks, guards, source blocks.
    pub(super) fn finish(mut self) -> Res {
        self.watch()?;
        for (source, bytes) in &self.sources {
            if let Some(diff) = first_difference(&source.memory.get(0, bytes.len()), bytes) {
                return Err(format!("the source was written: {diff}"));
            }
        }
        if !self.reachable() {
            return Ok(());
        }
        for image in &self.images {
            let block = image.block;
            self.target.check_guards(block.id)?;
            let got = self.target.read(block.id, 0, block.len)?;
            let want: Vec<u8> = image.bytes.iter().zip(&got).map(|(want, got)| want.unwrap_or(*got)).collect();
            if let Some(diff) = first_difference(&got, &want) {
                return Err(format!(
                    "memory that nobody may write changed, or a Done write is missing: block {}: {diff}",
                    block.id
                ));
            }
        }
        Ok(())
    }
}
