//! Prefill's side of a room.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::{Chunk, ChunkSpec, Failure, PageSum, Progress, RoomLife, TagHead, Ticket, timed_out};
use crate::error::{ABORTED_BY_DECODE_REASON, ABORTED_REASON};
use crate::ids::{OpId, Room};
use crate::mutants::mutant;
use crate::net::Endpoint;
use crate::plan::dst_slice;
use crate::poll::KvPoll;
use crate::time::Timestamp;
use crate::transport::{Outcome, Settlement};
use crate::wire::RoomTag;

/// When D is told that a room failed while one of its writes is unresolved (requirement B2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FailedStatusPolicy {
    /// At once: D holds the pages until the proof; only the ABORT_ACK is withheld. Between two of ours.
    AtOnce,
    /// When every write settled: such a D may free the pages on its own clock. Towards SGLang 0.5.23.
    WhenSettled,
    /// [`AtOnce`](Self::AtOnce) to a D that is known to be ours ([`Destination::life`]), else
    /// [`WhenSettled`](Self::WhenSettled).
    PerPeer,
}

/// What a sender room is made with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SenderPolicy {
    /// Bootstrapping may last this long (C8).
    pub bootstrap_timeout: Duration,
    /// See [`FailedStatusPolicy`].
    pub failed_status: FailedStatusPolicy,
    /// Destinations one room may have.
    pub max_destinations: usize,
    /// Chunks one room may hold.
    pub max_chunks: usize,
}

/// One decode rank a room goes to: the metadata it sent.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Destination {
    /// The id P counts distinct decodes by.
    pub name: Arc<str>,
    /// Where status messages go.
    pub endpoint: Endpoint,
    /// Destination pages, paired with the sent pages by position.
    pub pages: Arc<[i32]>,
    /// Metadata slot there.
    pub aux_index: Option<u32>,
    /// How many distinct decodes must be heard from.
    pub required_dst_info_num: u32,
    /// Tokens decode already has.
    pub decode_prefix_len: Option<u64>,
    /// Writes nothing, reports to nobody.
    pub is_dummy: bool,
    /// This rank writes the metadata slot there; one of the ranks that serve a D does.
    pub writes_aux: bool,
    /// The life of the room it speaks for, when it is one of ours.
    pub life: Option<RoomLife>,
}

/// What was said to a destination, and what was written for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Told {
    failed: bool,
    pages: PageSum,
}

/// What can happen to a sender room.
#[derive(Clone, Debug)]
pub enum SenderEvent {
    /// Metadata arrived.
    Destination(Destination),
    /// `send()`.
    Enqueue(ChunkSpec),
    /// A chunk's wait event fired, or failed with a reason.
    SourceReady(u32, Result<(), String>),
    /// A post of (chunk, destination) was accepted as this op.
    Posted(u32, usize, OpId),
    /// A post of (chunk, destination) had nothing to move.
    NothingToPost(u32, usize),
    /// A post of (chunk, destination) cannot be made.
    Rejected(u32, usize, String),
    /// The outcome of (chunk, destination)'s write.
    Outcome(u32, usize, Outcome),
    /// Later proof for (chunk, destination)'s write.
    Settlement(u32, usize, Settlement),
    /// `abort()` here.
    Abort,
    /// ABORT arrived.
    AbortedByDecode,
    /// The decode of this name is gone, or was refused.
    DestinationLost(Arc<str>, String),
    /// Something else made the room impossible.
    Fail(Failure),
    /// Something keeps decode away. It does not fail the room, but a room that fails before decode came says so.
    Hindered(Option<Arc<str>>),
    /// `clear()`.
    Clear,
}

/// What the shard must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SenderEffect {
    /// Post (chunk, destination), unless [`SenderRoom::wants_post`] says no by then.
    Post(u32, usize),
    /// Tell decode.
    Status(Endpoint, KvPoll, Option<Arc<str>>),
    /// Tell a decode of ours, about this life of the room.
    StatusOf {
        /// Where.
        to: Endpoint,
        /// Which life.
        life: RoomLife,
        /// What.
        status: KvPoll,
        /// Why it failed.
        reason: Option<Arc<str>>,
        /// With Success: what was written (H3).
        tag: Option<RoomTag>,
    },
    /// `poll()` changed.
    Changed,
    /// No write of this room is outstanding any more: ABORT_ACKs may go out.
    Drained,
}

/// Prefill's side of one room.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SenderRoom {
    room: Room,
    status: KvPoll,
    cleared: bool,
    failure: Option<Failure>,
    hindered: Option<Arc<str>>,
    destinations: SmallVec<[Destination; 1]>,
    /// By destination.
    told: SmallVec<[Told; 1]>,
    queue: VecDeque<Chunk>,
    current: Option<Chunk>,
    retained: Vec<Chunk>,
    outstanding: BTreeSet<Ticket>,
    next_chunk: u32,
    saw_last: bool,
    created: Timestamp,
    first_enqueue: Option<Timestamp>,
    last_enqueue: Option<Timestamp>,
    concluded: Option<Timestamp>,
    policy: Arc<SenderPolicy>,
}

impl SenderRoom {
    /// A room in Bootstrapping.
    pub fn new(room: Room, now: Timestamp, policy: Arc<SenderPolicy>) -> Self {
        Self {
            room,
            status: KvPoll::Bootstrapping,
            cleared: false,
            failure: None,
            hindered: None,
            destinations: SmallVec::new(),
            told: SmallVec::new(),
            queue: VecDeque::new(),
            current: None,
            retained: Vec::new(),
            outstanding: BTreeSet::new(),
            next_chunk: 0,
            saw_last: false,
            created: now,
            first_enqueue: None,
            last_enqueue: None,
            concluded: None,
            policy,
        }
    }

    /// Its number.
    pub fn room(&self) -> Room {
        self.room
    }

    /// What `poll()` shows. Transferring while any chunk is unsettled (C4).
    pub fn poll(&self) -> KvPoll {
        self.status
    }

    /// Why it failed.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Tokens decode already has: the first length any of them named. Known from WaitingForInput on.
    pub fn decode_prefix_len(&self) -> u64 {
        self.destinations.iter().find_map(|d| d.decode_prefix_len).unwrap_or(0)
    }

    /// Where it goes.
    pub fn destinations(&self) -> &[Destination] {
        &self.destinations
    }

    /// The chunk with this number, when it is being written or retained.
    pub fn chunk(&self, id: u32) -> Option<&Chunk> {
        self.current.iter().chain(&self.retained).find(|c| c.id == id)
    }

    /// Chunks with a lower number have ended, in order: in place, or failed with the room.
    pub fn ended_before(&self) -> u32 {
        self.current.as_ref().or(self.queue.front()).map_or(self.next_chunk, |c| c.id)
    }

    /// Chunks that may still write.
    pub fn outstanding(&self) -> usize {
        self.outstanding.len()
    }

    /// The source pages are free: the room is terminal and nothing reads them any more.
    pub fn releasable(&self) -> bool {
        if mutant!(SourceFreeAtTerminal) {
            return self.status.is_terminal();
        }
        self.status.is_terminal() && self.active().all(|c| c.progress.iter().all(|p| p.src_quiet()))
    }

    /// Nothing is left to do for it: cleared, drained, and decode told.
    pub fn finished(&self) -> bool {
        self.cleared && self.outstanding.is_empty()
    }

    /// From the first enqueue to Success, and from the last chunk's enqueue to Success (C7).
    pub fn latency(&self) -> Option<(Duration, Duration)> {
        match (self.status, self.first_enqueue, self.last_enqueue, self.concluded) {
            (KvPoll::Success, Some(first), Some(last), Some(end)) => Some((end.since(first), end.since(last))),
            _ => None,
        }
    }

    /// Whether (chunk, destination) may be posted now.
    pub fn wants_post(&self, chunk: u32, destination: usize) -> bool {
        if mutant!(DoublePostOnRetry) {
            return self.chunk(chunk).is_some_and(|c| c.progress.get(destination) != Some(&Progress::Done));
        }
        if mutant!(PostAfterFailure) && self.status == KvPoll::Failed {
            return self.chunk(chunk).is_some_and(|c| c.progress.get(destination) == Some(&Progress::Todo));
        }
        self.status == KvPoll::Transferring
            && self
                .current
                .as_ref()
                .is_some_and(|c| c.id == chunk && c.progress.get(destination) == Some(&Progress::Todo))
    }

    /// When [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        (self.status == KvPoll::Bootstrapping).then(|| self.created + self.policy.bootstrap_timeout)
    }

    /// A deadline came.
    pub fn handle_timeout(&mut self, now: Timestamp, out: &mut Vec<SenderEffect>) {
        if self.poll_timeout().is_some_and(|t| t <= now) {
            let heard = self.destinations.len();
            let hint = format!(": metadata from {heard} decode ranks arrived");
            self.fail(now, Failure::here(timed_out(self.room, now.since(self.created), "Bootstrapping", &hint)), out);
        }
    }

    /// Something happened.
    pub fn handle_event(&mut self, now: Timestamp, event: SenderEvent, out: &mut Vec<SenderEffect>) {
        match event {
            SenderEvent::Destination(d) => self.destination(now, d, out),
            SenderEvent::Enqueue(spec) => self.enqueue(now, spec, out),
            SenderEvent::SourceReady(chunk, Ok(())) => {
                if let Some(c) = self.queue.iter_mut().find(|c| c.id == chunk) {
                    c.source_ready = true;
                    self.pump(now, out);
                }
            }
            SenderEvent::SourceReady(chunk, Err(reason)) => {
                if self.queue.iter().any(|c| c.id == chunk) {
                    self.fail(now, Failure::here(format!("wait_event of chunk {chunk} failed: {reason}")), out);
                }
            }
            SenderEvent::Posted(chunk, dest, op) => self.set_progress(chunk, dest, Progress::Posted(op)),
            SenderEvent::NothingToPost(chunk, dest) => {
                self.set_progress(chunk, dest, Progress::Done);
                self.settle(now, chunk, out);
            }
            SenderEvent::Rejected(chunk, dest, reason) => {
                let to = self.destinations.get(dest).map(|d| d.endpoint.to_string()).unwrap_or_default();
                self.fail(now, Failure::here(format!("Failed to send kv chunk {chunk} to {to}: {reason}")), out);
            }
            SenderEvent::Outcome(chunk, dest, outcome) => self.outcome(now, chunk, dest, outcome, out),
            SenderEvent::Settlement(chunk, dest, settlement) => self.settlement(now, chunk, dest, settlement, out),
            SenderEvent::Abort => self.fail(now, Failure::here(ABORTED_REASON), out),
            SenderEvent::AbortedByDecode => self.fail(now, Failure::here(ABORTED_BY_DECODE_REASON), out),
            SenderEvent::DestinationLost(name, reason) => {
                if let Some(d) = self.destinations.iter().find(|d| d.name == name && !d.is_dummy) {
                    let text = format!("Lost connection with decode instance {}: {reason}", d.endpoint);
                    self.fail(now, Failure::here(text), out);
                }
            }
            SenderEvent::Fail(failure) => self.fail(now, failure, out),
            SenderEvent::Hindered(by) => self.hindered = by,
            SenderEvent::Clear => {
                self.cleared = true;
                if mutant!(ClearForgetsRetained) {
                    (self.retained, self.outstanding) = Default::default();
                }
                let text = format!("cleared in {:?}, before the transfer ended", self.status);
                self.fail(now, Failure::here(text), out);
            }
        }
    }

    fn destination(&mut self, now: Timestamp, d: Destination, out: &mut Vec<SenderEffect>) {
        match self.status {
            // C6: whoever comes late is told; whoever is known is told when everybody is (B2).
            KvPoll::Failed if !d.is_dummy => {
                let known = |x: &Destination| !x.is_dummy && x.endpoint == d.endpoint && x.life == d.life;
                if self.destinations.iter().zip(&self.told).any(|(x, told)| known(x) && !told.failed) {
                    return;
                }
                let reason = self.failure.as_ref().map(|f| f.reason.clone());
                return self.tell(&d, KvPoll::Failed, reason, None, out);
            }
            KvPoll::Bootstrapping => {}
            _ => return,
        }
        let required = d.required_dst_info_num.max(1) as usize;
        if required > self.policy.max_destinations {
            let max = self.policy.max_destinations;
            let text = format!("decode {} requires {required} decode ranks; at most {max} are allowed", d.endpoint);
            self.add(d);
            return self.fail(now, Failure::here(text), out);
        }
        match self.destinations.iter_mut().find(|x| x.name == d.name) {
            Some(old) => *old = d,
            None => self.add(d),
        }
        if self.destinations.len() >= required {
            self.status = KvPoll::WaitingForInput;
            out.push(SenderEffect::Changed);
            self.pump(now, out);
        }
    }

    fn add(&mut self, d: Destination) {
        self.destinations.push(d);
        self.told.push(Told::default());
    }

    fn enqueue(&mut self, now: Timestamp, spec: ChunkSpec, out: &mut Vec<SenderEffect>) {
        // C1: nothing is queued after a terminal state. Nothing may follow the last chunk either.
        if self.status.is_terminal() {
            return;
        }
        if self.saw_last {
            let text = format!("send() of pages {:?} after the last chunk", spec.index_slice);
            return self.fail(now, Failure::here(text), out);
        }
        if self.queue.len() >= self.policy.max_chunks {
            let text = format!("more than {} chunks are queued", self.policy.max_chunks);
            return self.fail(now, Failure::here(text), out);
        }
        self.saw_last = spec.is_last;
        self.first_enqueue.get_or_insert(now);
        self.last_enqueue = Some(now);
        self.queue.push_back(Chunk::new(self.next_chunk, spec));
        self.next_chunk += 1;
        self.pump(now, out);
    }

    /// The number the next enqueued chunk gets.
    pub fn next_chunk(&self) -> u32 {
        self.next_chunk
    }

    /// Start chunks while the one before is done (B2) and its source is ready (A3). A loop, not a recursion: thousands
    /// of chunks may have nothing to write.
    fn pump(&mut self, now: Timestamp, out: &mut Vec<SenderEffect>) {
        while self.current.is_none()
            && (matches!(self.status, KvPoll::WaitingForInput | KvPoll::Transferring) || mutant!(StartBeforeMetadata))
            && self.queue.front().is_some_and(|c| c.source_ready)
        {
            let Some(mut chunk) = self.queue.pop_front() else { return };
            chunk.progress =
                self.destinations.iter().map(|d| if d.is_dummy { Progress::Done } else { Progress::Todo }).collect();
            // F1: counted once, before its first post.
            self.outstanding.insert(chunk.ticket());
            if mutant!(CountedTwice) {
                self.outstanding.insert(Ticket { attempt: chunk.attempt + 1, ..chunk.ticket() });
            }
            let id = chunk.id;
            for (i, p) in chunk.progress.iter().enumerate() {
                if *p == Progress::Todo {
                    out.push(SenderEffect::Post(id, i));
                }
            }
            self.current = Some(chunk);
            if self.status != KvPoll::Transferring {
                self.status = KvPoll::Transferring;
                out.push(SenderEffect::Changed);
            }
            self.finish_current(now, out);
        }
    }

    fn active(&self) -> impl Iterator<Item = &Chunk> {
        self.current.iter().chain(&self.retained)
    }

    fn progress_mut(&mut self, chunk: u32, dest: usize) -> Option<&mut Progress> {
        self.current.iter_mut().chain(&mut self.retained).find(|c| c.id == chunk)?.progress.get_mut(dest)
    }

    fn set_progress(&mut self, chunk: u32, dest: usize, to: Progress) {
        if let Some(p) = self.progress_mut(chunk, dest) {
            debug_assert!(
                *p == Progress::Todo || mutant!(DoublePostOnRetry),
                "a post is legal only from Todo, and this is {p:?}"
            );
            *p = to;
        }
    }

    fn outcome(&mut self, now: Timestamp, chunk: u32, dest: usize, outcome: Outcome, out: &mut Vec<SenderEffect>) {
        let Some(p) = self.progress_mut(chunk, dest) else { return };
        let Progress::Posted(op) = *p else { return };
        let error = match outcome {
            Outcome::Done => {
                *p = Progress::Done;
                self.settle(now, chunk, out);
                // In a failed room it may have been the last one to read the source.
                if self.releasable() {
                    changed(out);
                }
                return;
            }
            Outcome::Failed { src_quiet: true, dst_quiet: true, error } => {
                *p = Progress::Quiet;
                error
            }
            Outcome::Failed { error, .. } if mutant!(ErrorProvesQuiet) => {
                *p = Progress::Quiet;
                error
            }
            Outcome::Failed { src_quiet, dst_quiet, error } => {
                *p = Progress::Retained { op, src_quiet, dst_quiet };
                error
            }
            Outcome::Unresolved { error } => {
                *p = Progress::Retained { op, src_quiet: false, dst_quiet: false };
                error
            }
        };
        let to = self.destinations.get(dest).map(|d| d.endpoint.to_string()).unwrap_or_default();
        self.fail(now, Failure::here(format!("Failed to send kv chunk {chunk} to {to}: {error}")), out);
        self.settle(now, chunk, out);
        if self.releasable() {
            changed(out);
        }
    }

    fn settlement(
        &mut self,
        now: Timestamp,
        chunk: u32,
        dest: usize,
        settlement: Settlement,
        out: &mut Vec<SenderEffect>,
    ) {
        let Some(p) = self.progress_mut(chunk, dest) else { return };
        let Progress::Retained { op, src_quiet, dst_quiet } = *p else { return };
        let (s, d) = settlement.quiet();
        let (src_quiet, dst_quiet) = (src_quiet || s, dst_quiet || d);
        *p = if src_quiet && dst_quiet { Progress::Quiet } else { Progress::Retained { op, src_quiet, dst_quiet } };
        self.settle(now, chunk, out);
        if self.releasable() {
            changed(out);
        }
    }

    /// After any change of a chunk's progress: discharge its ticket when it is proven quiet, go on when it is done.
    fn settle(&mut self, now: Timestamp, chunk: u32, out: &mut Vec<SenderEffect>) {
        if self.status == KvPoll::Failed {
            if let Some(i) = self.retained.iter().position(|c| c.id == chunk && c.quiet()) {
                let chunk = self.retained.swap_remove(i);
                self.discharge(chunk.ticket(), out);
                changed(out);
            }
            return;
        }
        self.finish_current(now, out);
        self.pump(now, out);
    }

    /// Conclude the current chunk when every write of it is Done; Success follows the last one.
    fn finish_current(&mut self, now: Timestamp, out: &mut Vec<SenderEffect>) {
        let Some(chunk) = self.current.take_if(|c| c.all_done()) else { return };
        for (d, told) in self.destinations.iter().zip(&mut self.told).filter(|(d, _)| d.life.is_some() && !d.is_dummy) {
            let slice = (u64::from(chunk.spec.index_slice.start), u64::from(chunk.spec.index_slice.end));
            // A slice that is none was refused when it was planned.
            if let Ok(pages) = dst_slice(&d.pages, slice, &chunk.spec.pages) {
                told.pages.add(chunk.spec.index_slice.start, pages.dst);
                // What decode has no place for counts, so that it does not take the rest for the whole.
                told.pages.count = told.pages.count.wrapping_add(pages.truncated as u32);
            }
        }
        self.discharge(chunk.ticket(), out);
        if chunk.spec.is_last || mutant!(SuccessAfterAnyChunk) {
            self.status = KvPoll::Success;
            self.concluded = Some(now);
            self.tell_success(chunk.spec.aux_index.is_some(), out);
            out.push(SenderEffect::Changed);
        }
    }

    fn discharge(&mut self, ticket: Ticket, out: &mut Vec<SenderEffect>) {
        if self.outstanding.remove(&ticket) && self.outstanding.is_empty() {
            if !mutant!(DrainNotSaid) {
                out.push(SenderEffect::Drained);
            }
            self.tell_failed(out);
        }
    }

    fn fail(&mut self, now: Timestamp, mut failure: Failure, out: &mut Vec<SenderEffect>) {
        if self.status == KvPoll::Failed && mutant!(SenderLastReasonWins) {
            self.failure = Some(failure);
            return;
        }
        if self.status.is_terminal() && !(self.status == KvPoll::Success && mutant!(SenderLeavesSuccess)) {
            return;
        }
        if let Some(by) = self.hindered.take().filter(|_| self.status == KvPoll::Bootstrapping) {
            failure.reason = format!("{}; {by}", failure.reason).into();
        }
        self.status = KvPoll::Failed;
        self.concluded = Some(now);
        self.failure = Some(failure);
        self.queue.clear();
        if mutant!(PopAllOnFailure) {
            self.outstanding.clear();
        }
        if let Some(mut chunk) = self.current.take() {
            // F2: what was never posted has no write; what was posted keeps the chunk counted.
            for p in chunk.progress.iter_mut().filter(|p| **p == Progress::Todo && !mutant!(PostAfterFailure)) {
                *p = Progress::Quiet;
            }
            let (ticket, quiet) = (chunk.ticket(), chunk.quiet());
            if quiet {
                self.discharge(ticket, out);
            } else {
                self.retained.push(chunk);
            }
        }
        self.tell_failed(out);
        out.push(SenderEffect::Changed);
    }

    /// Tell everybody who may know by now, and was not told (B2).
    fn tell_failed(&mut self, out: &mut Vec<SenderEffect>) {
        if self.status != KvPoll::Failed {
            return;
        }
        let (policy, settled) = (self.policy.failed_status, self.outstanding.is_empty());
        let reason = self.failure.as_ref().map(|f| f.reason.clone());
        for i in 0..self.destinations.len() {
            let may = settled
                || mutant!(FailedBeforeSettled)
                || match policy {
                    FailedStatusPolicy::AtOnce => true,
                    FailedStatusPolicy::WhenSettled => false,
                    FailedStatusPolicy::PerPeer => self.destinations[i].life.is_some(),
                };
            if may && !std::mem::replace(&mut self.told[i].failed, true) && self.speaks_for_endpoint(i) {
                self.tell(&self.destinations[i], KvPoll::Failed, reason.clone(), None, out);
            }
        }
    }

    fn tell_success(&self, sent_aux: bool, out: &mut Vec<SenderEffect>) {
        for (i, d) in self.destinations.iter().enumerate().filter(|(i, _)| self.speaks_for_endpoint(*i)) {
            let tag = d.life.map(|life| {
                self.told[i].pages.tag(&TagHead {
                    room: self.room,
                    generation: life.generation,
                    decode_prefix_len: d.decode_prefix_len.unwrap_or(0),
                    geometry: life.geometry,
                    aux_index: d.aux_index.filter(|_| d.writes_aux && sent_aux),
                })
            });
            self.tell(d, KvPoll::Success, None, tag, out);
        }
    }

    /// Each distinct endpoint (and life) of a non-dummy destination is told once, in order of arrival.
    fn speaks_for_endpoint(&self, i: usize) -> bool {
        let d = &self.destinations[i];
        let same = |e: &Destination| !e.is_dummy && e.endpoint == d.endpoint && e.life == d.life;
        !d.is_dummy && !self.destinations[..i].iter().any(same)
    }

    fn tell(
        &self,
        d: &Destination,
        status: KvPoll,
        reason: Option<Arc<str>>,
        tag: Option<RoomTag>,
        out: &mut Vec<SenderEffect>,
    ) {
        let to = d.endpoint.clone();
        out.push(match d.life {
            Some(life) => SenderEffect::StatusOf { to, life, status, reason, tag },
            None => SenderEffect::Status(to, status, reason),
        });
    }
}

/// Say it once, however many parts of one event changed what the handle shows.
fn changed(out: &mut Vec<SenderEffect>) {
    if out.last() != Some(&SenderEffect::Changed) {
        out.push(SenderEffect::Changed);
    }
}
