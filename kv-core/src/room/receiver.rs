//! Decode's side of a room.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

use super::{Failure, timed_out};
use crate::directory::PrefillPeers;
use crate::error::{ABORTED_REASON, PREFILL_DEAD_REASON};
use crate::ids::{PrefillRank, Room};
use crate::mutants::mutant;
use crate::poll::KvPoll;
use crate::time::Timestamp;
use crate::wire::KvStatus;

/// When the pages of a failed room are free again (requirement F4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReleasePolicy {
    /// Every contacted prefill rank acked, or this time passed since the ABORT. Policy, not proof: counted as
    /// `released_without_proof`. The default towards SGLang 0.5.23 (30 s).
    AckOrTimeout(Duration),
    /// Every contacted prefill rank acked; nothing else. The default between two of ours.
    Proof,
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
    /// ABORT_ACK arrived.
    AbortAck(PrefillRank, u64),
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

    /// Ranks that were contacted and have not acked.
    pub fn unacked(&self) -> impl Iterator<Item = PrefillRank> + '_ {
        let records = self.peers.as_ref().map_or(&[][..], |p| &p.records[..self.contacted.min(p.records.len())]);
        records.iter().map(|r| r.rank).filter(|r| !self.acks.contains(r))
    }

    /// Nothing is left to do for it.
    pub fn finished(&self) -> bool {
        self.cleared && self.releasable()
    }

    /// When [`Self::handle_timeout`] is due.
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        match (self.status, self.hold, self.policy.release) {
            (KvPoll::WaitingForInput, ..) => self.published.map(|t| t + self.policy.waiting_timeout),
            (_, Hold::Armed { since, .. }, ReleasePolicy::AckOrTimeout(d)) => Some(since + d),
            (_, Hold::Armed { since, .. }, ReleasePolicy::Proof) if mutant!(ReleaseWithoutProof) => Some(since),
            _ => None,
        }
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
                (KvPoll::WaitingForInput, Some(_), None) => out.push(ReceiverEffect::Publish(spec)),
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
            ReceiverEvent::Status(status) => self.status(now, status, generation, out),
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

    fn status(&mut self, now: Timestamp, s: KvStatus, generation: &mut u64, out: &mut Vec<ReceiverEffect>) {
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
                if !self.success.contains(&s.prefill_rank) || mutant!(CountMessagesNotRanks) {
                    self.success.push(s.prefill_rank);
                }
                let required = self.peers.as_ref().map_or(u32::MAX, |p| p.required_prefill_response_num);
                if self.success.len() as u64 >= u64::from(required) {
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
        self.acks.push(rank);
        let counted = mutant!(AckCountedTwice) && self.acks.len() >= self.contacted;
        if self.unacked().next().is_none() || counted || mutant!(OneAckReleases) {
            self.hold = Hold::Released;
            out.push(ReceiverEffect::Released { proven: true });
        }
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
