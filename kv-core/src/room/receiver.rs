//! Decode's side of a room.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::{Failure, PageSum, TagHead, timed_out};
use crate::directory::{PrefillPeers, PrefillRecord};
use crate::error::{ABORTED_REASON, PREFILL_DEAD_REASON};
use crate::ids::{PrefillRank, Room};
use crate::mutants::mutant;
use crate::poll::KvPoll;
use crate::time::Timestamp;
use crate::wire::{ExtCapabilities, KvStatus, RoomTag};

/// When the pages of a failed room are free again (requirement F4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReleasePolicy {
    /// Every contacted prefill rank acked, or this time passed since the ABORT. Policy, not proof: counted as
    /// `released_without_proof`. The default towards SGLang 0.5.23 (30 s).
    AckOrTimeout(Duration),
    /// Every contacted prefill rank acked, or its process is proven dead; nothing else. The default between two of ours.
    Proof,
    /// [`Proof`](Self::Proof) when every contacted prefill rank is known to be ours and says that its ACK proves
    /// ([`ExtCapabilities::PROOF`]), else [`AckOrTimeout`](Self::AckOrTimeout) with this time.
    PerPeer(Duration),
}

/// What a receiver room is made with.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReceiverPolicy {
    /// From `send_metadata` to Success at most this long (D5).
    pub waiting_timeout: Duration,
    /// See [`ReleasePolicy`].
    pub release: ReleasePolicy,
}

/// What `send_metadata()` publishes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PublishSpec {
    /// Destination pages.
    pub pages: Arc<[i32]>,
    /// Metadata slot.
    pub aux_index: u32,
    /// State indices per component.
    pub state_indices: Vec<Vec<i32>>,
    /// Tokens already here.
    pub decode_prefix_len: u64,
    /// Mooncake's device pages (A2).
    pub device_kv_indices: Option<Arc<[i32]>>,
}

/// What can happen to a receiver room.
#[derive(Clone, Debug)]
pub enum ReceiverEvent {
    /// Prefill's ranks are known and registered with, or the reason they are not.
    Peers(Result<Arc<PrefillPeers>, String>),
    /// `send_metadata()`.
    Publish(Box<PublishSpec>),
    /// Metadata went to the first `contacted` records; then, if not to all, this went wrong.
    Published {
        /// How many records may know of this room.
        contacted: usize,
        /// Why not all.
        error: Option<String>,
    },
    /// KV_STATUS arrived.
    Status(KvStatus),
    /// KV_STATUS of a prefill rank of ours arrived, about this very life; with Success, what was written.
    StatusOf(KvStatus, Option<RoomTag>),
    /// ABORT_ACK arrived.
    AbortAck(PrefillRank, u64),
    /// The process of this prefill rank that knew the room is proven dead, and with it every write it could make.
    RankDead(PrefillRank),
    /// Prefill's server is lost.
    NodeLost(String),
    /// `abort()`.
    Abort,
    /// Something outside the room made it impossible.
    Fail(Failure),
    /// `clear()`.
    Clear,
}

/// What the shard must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ReceiverEffect {
    /// Send metadata to every record, then report [`ReceiverEvent::Published`].
    Publish(Box<PublishSpec>),
    /// Send ABORT to the first `contacted` records.
    Abort {
        /// How many records are told.
        contacted: usize,
        /// Set when pages are held until the ACK.
        generation: Option<u64>,
    },
    /// `poll()` changed.
    Changed,
    /// The pages are free.
    Released {
        /// False: by timeout.
        proven: bool,
    },
    /// The peers did not take a message, or did not answer in time: drop their connections and fetch anew next time.
    Forget,
    /// A message that comes too late was ignored.
    Stale,
    /// A message that breaks the protocol was ignored.
    Violation(&'static str),
}

/// What tags are checked against (H3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Expect {
    head: TagHead,
    /// The slot that was announced.
    aux_index: u32,
    pages: PageSum,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Hold {
    /// No prefill rank knows the pages, or all of them are done with them.
    None,
    /// Metadata is out.
    Published,
    /// ABORT with this generation is out.
    Armed { generation: u64, since: Timestamp },
    /// Given back.
    Released,
}

/// Decode's side of one room.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReceiverRoom {
    room: Room,
    status: KvPoll,
    cleared: bool,
    failure: Option<Failure>,
    peers: Option<Arc<PrefillPeers>>,
    success: SmallVec<[PrefillRank; 4]>,
    /// What a tag must say; and the tags of ranks that wrote some of the pages only.
    expect: Option<Box<Expect>>,
    parts: Vec<(PrefillRank, PageSum)>,
    acks: SmallVec<[PrefillRank; 4]>,
    contacted: usize,
    published: Option<Timestamp>,
    hold: Hold,
    abort_sent: bool,
    policy: Arc<ReceiverPolicy>,
}

impl ReceiverRoom {
    /// A room in Bootstrapping; its response tracker exists from here on (B4).
    pub fn new(room: Room, policy: Arc<ReceiverPolicy>) -> Self {
        Self {
            room,
            status: KvPoll::Bootstrapping,
            cleared: false,
            failure: None,
            peers: None,
            success: SmallVec::new(),
            expect: None,
            parts: Vec::new(),
            acks: SmallVec::new(),
            contacted: 0,
            published: None,
            hold: Hold::None,
            abort_sent: false,
            policy,
        }
    }

    /// Its number.
    pub fn room(&self) -> Room {
        self.room
    }

    /// Check the tags of this life: `generation` and `geometry` as its metadata and our registration say. Call before
    /// metadata is published.
    #[must_use]
    pub fn checking_tags(mut self, generation: u64, geometry: u64) -> Self {
        let head = TagHead { room: self.room, generation, decode_prefix_len: 0, geometry, aux_index: None };
        self.expect = Some(Box::new(Expect { head, aux_index: 0, pages: PageSum::default() }));
        self
    }

    /// What `poll()` shows.
    pub fn poll(&self) -> KvPoll {
        self.status
    }

    /// Why it failed.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_ref()
    }

    /// Prefill's ranks.
    pub fn peers(&self) -> Option<&Arc<PrefillPeers>> {
        self.peers.as_ref()
    }

    /// When metadata went out.
    pub fn published(&self) -> Option<Timestamp> {
        self.published
    }

    /// The pages are free: terminal, and no write of this room can land (or the release policy gave up waiting).
    pub fn releasable(&self) -> bool {
        if mutant!(ReleaseAtAbort) {
            return self.status.is_terminal();
        }
        self.status.is_terminal() && matches!(self.hold, Hold::None | Hold::Released)
    }

    /// The generation its ABORT carried, while ACKs are awaited.
    pub fn armed_generation(&self) -> Option<u64> {
        match self.hold {
            Hold::Armed { generation, .. } => Some(generation),
            _ => None,
        }
    }

    /// How many of the records, from the first, may know of this room.
    pub fn contacted(&self) -> usize {
        self.contacted
    }

    /// Its pages are held, and nothing but proof frees them.
    pub fn awaits_proof(&self) -> bool {
        matches!(self.hold, Hold::Armed { .. }) && self.release() == ReleasePolicy::Proof
    }

    /// Ranks that were contacted and have not acked.
    pub fn unacked(&self) -> impl Iterator<Item = PrefillRank> + '_ {
        self.contacted_records().iter().map(|r| r.rank).filter(|r| !self.acks.contains(r))
    }

    /// Nothing is left to do for it.
    pub fn finished(&self) -> bool {
        self.cleared && self.releasable()
    }

    /// When [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        match (self.status, self.hold, self.release()) {
            (KvPoll::WaitingForInput, ..) => self.published.map(|t| t + self.policy.waiting_timeout),
            (_, Hold::Armed { since, .. }, ReleasePolicy::AckOrTimeout(d)) => Some(since + d),
            (_, Hold::Armed { since, .. }, ReleasePolicy::Proof) if mutant!(ReleaseWithoutProof) => Some(since),
            _ => None,
        }
    }

    /// The release policy, for the peers this room has.
    fn release(&self) -> ReleasePolicy {
        let proves = |r: &PrefillRecord| r.ext.is_some_and(|e| e.capabilities.has(ExtCapabilities::PROOF));
        match self.policy.release {
            ReleasePolicy::PerPeer(d) if !self.contacted_records().iter().all(proves) => ReleasePolicy::AckOrTimeout(d),
            ReleasePolicy::PerPeer(_) => ReleasePolicy::Proof,
            policy => policy,
        }
    }

    fn contacted_records(&self) -> &[PrefillRecord] {
        self.peers.as_ref().map_or(&[], |p| &p.records[..self.contacted.min(p.records.len())])
    }

    /// A deadline came. Call after every event of the same step: completion that has arrived wins (D5).
    pub fn handle_timeout(&mut self, now: Timestamp, generation: &mut u64, out: &mut Vec<ReceiverEffect>) {
        if self.poll_timeout().is_none_or(|t| t > now) {
            return;
        }
        if self.status == KvPoll::WaitingForInput {
            let waited = now.since(self.published.unwrap_or(now));
            let missing: Vec<_> = self.missing().map(|r| r.to_string()).collect();
            let hint = format!(": no completion from prefill rank {}", missing.join(", "));
            let failure = Failure::here(timed_out(self.room, waited, "WaitingForInput", &hint));
            self.fail(now, failure, generation, out);
            // After the ABORTs, which still use the connections.
            out.push(ReceiverEffect::Forget);
        } else {
            self.hold = Hold::Released;
            out.push(ReceiverEffect::Released { proven: false });
        }
    }

    /// Something happened. `generation` is the manager's counter, increased for each armed ABORT.
    pub fn handle_event(
        &mut self,
        now: Timestamp,
        event: ReceiverEvent,
        generation: &mut u64,
        out: &mut Vec<ReceiverEffect>,
    ) {
        match event {
            ReceiverEvent::Peers(Ok(peers)) => {
                if self.status == KvPoll::Bootstrapping {
                    self.peers = Some(peers);
                    self.status = KvPoll::WaitingForInput;
                    out.push(ReceiverEffect::Changed);
                }
            }
            ReceiverEvent::Peers(Err(reason)) => {
                if self.status == KvPoll::Bootstrapping {
                    self.fail(now, Failure::here(reason), generation, out);
                }
            }
            ReceiverEvent::Publish(spec) => match (self.status, &self.peers, self.published) {
                (KvPoll::WaitingForInput, Some(_), None) => {
                    if let Some(expect) = &mut self.expect {
                        expect.head.decode_prefix_len = spec.decode_prefix_len;
                        expect.aux_index = spec.aux_index;
                        expect.pages = PageSum::of(0, &spec.pages);
                    }
                    out.push(ReceiverEffect::Publish(spec));
                }
                (KvPoll::Bootstrapping, ..) => {
                    let text = "send_metadata() before the prefill ranks are known: wait for WaitingForInput first";
                    self.fail(now, Failure::here(text), generation, out);
                }
                (status, ..) if status.is_terminal() => {}
                _ => out.push(ReceiverEffect::Violation("send_metadata() was called twice")),
            },
            ReceiverEvent::Published { contacted, error } => {
                if self.status.is_terminal() {
                    return;
                }
                let contacted = if error.is_some() && mutant!(PartialPublishForgotten) { 0 } else { contacted };
                self.contacted = contacted;
                if contacted > 0 {
                    self.hold = Hold::Published;
                    self.published = Some(now);
                }
                if let Some(reason) = error {
                    self.fail(now, Failure::here(reason), generation, out);
                    // After the ABORTs, which still use the connections.
                    out.push(ReceiverEffect::Forget);
                } else if contacted == 0 {
                    // Without a deadline, since nothing was published: nobody would ever answer.
                    self.fail(
                        now,
                        Failure::here("send_metadata: there is no prefill rank to send to"),
                        generation,
                        out,
                    );
                }
            }
            ReceiverEvent::Status(status) => self.status(now, status, None, generation, out),
            ReceiverEvent::StatusOf(status, tag) => self.status(now, status, Some(tag), generation, out),
            ReceiverEvent::RankDead(rank) => self.rank_dead(rank, out),
            ReceiverEvent::AbortAck(rank, of) => self.abort_ack(rank, of, out),
            ReceiverEvent::NodeLost(reason) => self.fail(now, Failure::here(reason), generation, out),
            ReceiverEvent::Abort => self.fail(now, Failure::here(ABORTED_REASON), generation, out),
            ReceiverEvent::Fail(failure) => self.fail(now, failure, generation, out),
            ReceiverEvent::Clear => {
                self.cleared = true;
                let text = format!("cleared in {:?}, before the transfer ended", self.status);
                self.fail(now, Failure::here(text), generation, out);
                if mutant!(ReleaseAtClear) {
                    self.hold = Hold::Released;
                }
            }
        }
    }

    /// Ranks whose Success counts: asked, and not dummy.
    fn expects(&self, rank: PrefillRank) -> bool {
        self.peers.as_ref().is_some_and(|p| p.records.iter().any(|r| r.rank == rank && !r.is_dummy))
    }

    fn missing(&self) -> impl Iterator<Item = PrefillRank> + '_ {
        let records = self.peers.as_ref().map_or(&[][..], |p| &p.records);
        records.iter().filter(|r| !r.is_dummy && !self.success.contains(&r.rank)).map(|r| r.rank)
    }

    /// `tag`: the rank is one of ours; then Success must carry one.
    fn status(
        &mut self,
        now: Timestamp,
        s: KvStatus,
        tag: Option<Option<RoomTag>>,
        generation: &mut u64,
        out: &mut Vec<ReceiverEffect>,
    ) {
        if self.status.is_terminal()
            && !(self.status == KvPoll::Success && s.status == KvPoll::Failed && mutant!(ReceiverLeavesSuccess))
            && !(self.status == KvPoll::Failed && s.status == KvPoll::Success && mutant!(ReceiverLeavesFailed))
        {
            return;
        }
        if !self.expects(s.prefill_rank) && !mutant!(AcceptUnaskedRank) {
            return out.push(ReceiverEffect::Violation("status from a prefill rank that was not asked"));
        }
        match s.status {
            KvPoll::Success if self.published.is_none() => {
                out.push(ReceiverEffect::Violation("Success before metadata was published"));
            }
            KvPoll::Success => {
                let tags = !self.success.contains(&s.prefill_rank) && self.expect.is_some();
                if let (Some(tag), true) = (tag, tags)
                    && let Err(reason) = self.check_tag(s.prefill_rank, tag)
                {
                    return self.fail(now, Failure::here(reason), generation, out);
                }
                if !self.success.contains(&s.prefill_rank) || mutant!(CountMessagesNotRanks) {
                    self.success.push(s.prefill_rank);
                }
                let required = self.peers.as_ref().map_or(u32::MAX, |p| p.required_prefill_response_num);
                if self.success.len() as u64 >= u64::from(required) {
                    if let Err(reason) = self.check_parts() {
                        return self.fail(now, Failure::here(reason), generation, out);
                    }
                    self.status = KvPoll::Success;
                    if !mutant!(SuccessKeepsPages) {
                        self.hold = Hold::None;
                    }
                    out.push(ReceiverEffect::Changed);
                }
            }
            KvPoll::Failed => {
                let text = s.reason.filter(|r| !r.is_empty()).unwrap_or_else(|| PREFILL_DEAD_REASON.to_owned());
                self.fail(now, Failure::here(text), generation, out);
                if mutant!(ReleaseAtFailedStatus) {
                    self.hold = Hold::Released;
                }
            }
            _ => out.push(ReceiverEffect::Violation("status that is neither Success nor Failed")),
        }
    }

    /// A rank wrote what this life announced, or a part of it.
    fn check_tag(&mut self, rank: PrefillRank, tag: Option<RoomTag>) -> Result<(), String> {
        let Some(expect) = &self.expect else { return Ok(()) };
        let bad = |what: String| {
            format!(
                "integrity tag of prefill rank {rank} does not match room {} (life {}): {what}; the pages are held \
                 until that rank is proven quiet",
                self.room, expect.head.generation
            )
        };
        let Some(tag) = tag else { return Err(bad("Success came without it".into())) };
        let head = TagHead { aux_index: tag.wrote_aux.then_some(expect.aux_index), ..expect.head };
        if tag.head != head.hash() {
            return Err(bad("it wrote for another room, life, prefix length, metadata slot or geometry".into()));
        }
        let part = PageSum { sum: tag.pages, count: tag.count };
        if part.count == expect.pages.count && part != expect.pages {
            return Err(bad(format!("it wrote {} pages, but others than were announced", part.count)));
        }
        if part.count > expect.pages.count {
            return Err(bad(format!("it has {} pages, {} were announced", part.count, expect.pages.count)));
        }
        if part != expect.pages {
            self.parts.push((rank, part));
        }
        Ok(())
    }

    /// Ranks that wrote some of the pages only must add up to all of them: CP ranks of one (PP, TP), or TP ranks of one
    /// (PP, CP) where pages are sharded.
    fn check_parts(&self) -> Result<(), String> {
        let (Some(expect), false) = (&self.expect, self.parts.is_empty()) else { return Ok(()) };
        let place = |rank: PrefillRank| self.peers.as_ref()?.records.iter().find(|r| r.rank == rank);
        let adds_up = |key: fn(&PrefillRecord) -> (u32, u32)| {
            let mut sums: Vec<((u32, u32), PageSum)> = Vec::new();
            for (rank, part) in &self.parts {
                let Some(key) = place(*rank).map(key) else { return false };
                match sums.iter_mut().find(|(k, _)| *k == key) {
                    Some((_, sum)) => sum.join(*part),
                    None => sums.push((key, *part)),
                }
            }
            // Of a page that cannot be shared one rank writes all, and the others of its group nothing.
            let whole = |of: &(u32, u32)| {
                let mut others = self.success.iter().filter(|rank| !self.parts.iter().any(|(r, _)| r == *rank));
                others.any(|rank| place(*rank).is_some_and(|r| key(r) == *of))
            };
            sums.iter().all(|(of, sum)| *sum == expect.pages || (*sum == PageSum::default() && whole(of)))
        };
        if adds_up(|r| (r.pp_rank, r.tp_rank)) || adds_up(|r| (r.pp_rank, r.cp_rank)) {
            return Ok(());
        }
        let wrote: Vec<_> = self.parts.iter().map(|(rank, part)| format!("{} by rank {rank}", part.count)).collect();
        Err(format!(
            "room {} (life {}): {} pages were announced, and the prefill ranks wrote {}, which do not add up: prefill \
             and decode disagree about the length of the request",
            self.room,
            expect.head.generation,
            expect.pages.count,
            wrote.join(", ")
        ))
    }

    fn rank_dead(&mut self, rank: PrefillRank, out: &mut Vec<ReceiverEffect>) {
        if matches!(self.hold, Hold::Armed { .. }) && self.unacked().any(|r| r == rank) {
            self.quiet(rank, out);
        }
    }

    fn quiet(&mut self, rank: PrefillRank, out: &mut Vec<ReceiverEffect>) {
        self.acks.push(rank);
        let counted = mutant!(AckCountedTwice) && self.acks.len() >= self.contacted;
        if self.unacked().next().is_none() || counted || mutant!(OneAckReleases) {
            self.hold = Hold::Released;
            out.push(ReceiverEffect::Released { proven: true });
        }
    }

    fn abort_ack(&mut self, rank: PrefillRank, of: u64, out: &mut Vec<ReceiverEffect>) {
        match self.hold {
            Hold::Armed { generation, .. } if generation == of || mutant!(AckOfAnyGeneration) => {}
            // A duplicate, or later than the timeout (F20).
            Hold::Released => return out.push(ReceiverEffect::Stale),
            _ => return out.push(ReceiverEffect::Violation("ABORT_ACK of another generation")),
        }
        if !self.unacked().any(|r| r == rank) && !mutant!(AckCountedTwice) {
            if !self.acks.contains(&rank) {
                out.push(ReceiverEffect::Violation("ABORT_ACK from a prefill rank that was not contacted"));
            }
            return;
        }
        self.quiet(rank, out);
    }

    fn fail(&mut self, now: Timestamp, failure: Failure, generation: &mut u64, out: &mut Vec<ReceiverEffect>) {
        if self.status == KvPoll::Failed && mutant!(RepeatedAbortTakesPagesBack) {
            self.hold = Hold::Published;
        }
        if self.status == KvPoll::Failed && mutant!(ReceiverLastReasonWins) {
            self.failure = Some(failure);
            return;
        }
        if self.status.is_terminal() && !(self.status == KvPoll::Success && mutant!(ReceiverLeavesSuccess)) {
            return;
        }
        self.status = KvPoll::Failed;
        self.failure = Some(failure);
        if let (Some(peers), false) = (&self.peers, self.abort_sent) {
            self.abort_sent = true;
            if self.hold == Hold::Published {
                *generation += 1;
                self.hold = Hold::Armed { generation: *generation, since: now };
                out.push(ReceiverEffect::Abort { contacted: self.contacted, generation: Some(*generation) });
            } else {
                // Nothing of ours is known there; prefill only learns that nobody will come (F28).
                out.push(ReceiverEffect::Abort { contacted: peers.records.len(), generation: None });
            }
        }
        out.push(ReceiverEffect::Changed);
    }
}
