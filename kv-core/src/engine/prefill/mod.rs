//! Prefill's shard: sender rooms, decode peers, writes in flight, ABORT_ACKs.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use slotmap::{SlotMap, new_key_type};
use smallvec::SmallVec;

mod aux;
mod claims;
mod inbound;
mod lives;
mod pieces;
mod posting;
mod rooms;
mod traces;

use super::outgoing::Outgoing;
use super::peers::{Link, Peer, Peers, Post};
use super::timers::Timers;
use super::{Connected, Connector, MalformedLog, NextWake, RoomFreed, RoomShared, Stats};
use crate::control::{ControlEvent, ControlPlane};
use crate::directory::{Directory, DirectoryEvent, DirectoryRequest};
use crate::error::ABORTED_BY_DECODE_REASON;
use crate::event::WaitEvent;
use crate::hooks::ManagerHooks;
use crate::ids::{OpId, PrefillRank, Room};
use crate::layout::{LocalLayout, Pairing, PeerLayout, UnknownSlots};
use crate::limits::Limits;
use crate::mutants::mutant;
use crate::net::Endpoint;
use crate::plan::{Planner, WritePlan, dst_slice};
use crate::poll::KvPoll;
use crate::room::{
    ChunkSpec, Destination, Failure, RoomLife, SenderEffect, SenderEvent, SenderPolicy, SenderRoom, geometry,
};
use crate::time::Timestamp;
use crate::transport::{
    Lane, LaneEvent, Outcome, PeerDescriptor, Settlement, SubmitError, TransportError, TransportErrorKind, WriteOp,
};
use crate::wire::{Abort, AbortAck, ExtPeer, Extension, KvStatus, MessageKind, Metadata, Registration, ToPrefill};
pub use aux::AuxRule;
pub use claims::Claim;
use claims::Claiming;
use inbound::About;
use lives::{AckTarget, DecodeLife, Spent};
use pieces::Pieces;
use traces::Traces;

new_key_type! { pub(crate) struct RoomKey; }

/// A handle's wishes.
pub enum PrefillCommand {
    /// A sender was made.
    Create(Arc<RoomShared>),
    /// `send()`.
    Send(Arc<RoomShared>, ChunkSpec, ChunkExtras),
    /// A wait event fired or failed.
    SourceReady(Arc<RoomShared>, u32, Result<(), String>),
    /// `abort()`.
    Abort(Arc<RoomShared>),
    /// The room cannot go on, for a reason found outside the shard.
    Fail(Arc<RoomShared>, Failure),
    /// `clear()`.
    Clear(Arc<RoomShared>),
    /// A connection attempt ended.
    Connected(Connected),
    /// Decode looks the room's DP rank up at its registry: see to it that it is there.
    Claim(Arc<RoomShared>, Claim),
    /// News from the directory.
    Directory(DirectoryEvent),
}

/// What goes with a chunk and is no part of the room's state.
#[derive(Clone, Default)]
pub struct ChunkExtras {
    /// Source pages must not be read before this fired.
    pub wait_event: Option<Arc<dyn WaitEvent>>,
    /// Entered around what is said of the chunk; let go of when the chunk is sent or its room ends.
    pub trace: Option<tracing::Span>,
}

/// What a prefill shard is made with.
#[derive(Clone)]
pub struct PrefillShardConfig {
    /// Bounds.
    pub limits: Limits,
    /// Rooms' policy.
    pub policy: Arc<SenderPolicy>,
    /// Metadata for a room without a sender is kept this long; then decode is told.
    pub early_timeout: Duration,
    /// A failed and cleared room answers late metadata this long.
    pub tombstone_timeout: Duration,
    /// This rank's number in status messages.
    pub rank: PrefillRank,
    /// Called when a room number is free again.
    pub freed: RoomFreed,
    /// Which decodes' metadata slots this rank writes.
    pub aux_rule: AuxRule,
    /// The transport's ([`Capabilities`](crate::transport::Capabilities)): a larger write is cut into several ops.
    pub max_op_bytes: Option<u64>,
    /// How many pages a decode has that does not say.
    pub unknown_slots: UnknownSlots,
    /// What we say of ourselves to peers of ours (H4); `None`: to everybody exactly what 0.5.23 says.
    pub extension: Option<ExtPeer>,
    /// Hands commands back to the shard from other threads (wait events).
    pub commands: Arc<dyn Fn(PrefillCommand) + Send + Sync>,
}

/// What a prefill shard holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefillHeld {
    /// Rooms: live, and cleared but not drained.
    pub rooms: usize,
    /// Room numbers that messages find.
    pub named: usize,
    /// Room numbers with a cleared life that may still write.
    pub undrained: usize,
    /// Writes in flight or retained.
    pub ops: usize,
    /// Writes that wait for their peer.
    pub posts: usize,
    /// Rooms whose metadata came before their sender.
    pub early: usize,
    /// Rooms whose ABORT_ACKs wait for the drain.
    pub pending_acks: usize,
    /// Registered peers.
    pub peers: usize,
}

struct Entry {
    room: SenderRoom,
    shared: Arc<RoomShared>,
    armed: Option<Timestamp>,
    reported: bool,
    /// It stands in `rooms_awaiting_release`.
    held: bool,
    /// The lives on decode that this life is for.
    bound: SmallVec<[DecodeLife; 1]>,
    traces: Traces,
    /// Writes that are cut into several ops.
    pieces: Vec<Pieces>,
    /// Its DP rank is not at the registry yet.
    claiming: Option<Box<Claiming>>,
}

impl Entry {
    /// When something is to be done for the room.
    fn due(&self) -> Option<Timestamp> {
        let claim = self.claiming.as_ref().and_then(|c| c.retry_at);
        self.room.poll_timeout().into_iter().chain(claim).min()
    }
}

/// A write, and whose it is.
struct OpRef {
    key: RoomKey,
    chunk: u32,
    dest: usize,
    bytes: u64,
    name: Arc<str>,
}

/// A write whose outcome came and left a side not quiet.
struct Retained {
    op: OpRef,
    /// Whether (source, destination) are proven quiet since.
    quiet: (bool, bool),
    peer: Endpoint,
    since: Timestamp,
}

struct Early {
    destinations: Vec<Destination>,
    failed: Option<Arc<str>>,
    deadline: Timestamp,
}

/// Bytes of the page lists of some metadata.
fn page_bytes(destinations: &[Destination]) -> usize {
    destinations.iter().map(|d| size_of_val(&*d.pages)).sum()
}

/// See the [module](crate::engine).
pub struct PrefillShard {
    config: PrefillShardConfig,
    hooks: Arc<dyn ManagerHooks>,
    layout: Arc<LocalLayout>,
    lane: Box<dyn Lane>,
    connector: Box<dyn Connector>,
    directory: Option<Box<dyn Directory>>,
    planner: Planner,
    rooms: SlotMap<RoomKey, Entry>,
    by_room: HashMap<Room, RoomKey>,
    /// Earlier lives that may still write.
    undrained: HashMap<Room, SmallVec<[RoomKey; 1]>>,
    early: HashMap<Room, Early>,
    early_order: VecDeque<(Timestamp, Room)>,
    /// Bytes of page lists in `early`.
    early_bytes: usize,
    tombstones: HashMap<Room, (Timestamp, Arc<str>)>,
    tombstone_order: VecDeque<(Timestamp, Room)>,
    pending_acks: HashMap<Room, SmallVec<[AckTarget; 1]>>,
    /// Lives on decode that are over here: nothing that still comes of them is for a later life.
    spent: Spent,
    peers: Peers<RoomKey>,
    ready_peers: VecDeque<Arc<str>>,
    /// Posted, without an outcome yet.
    in_flight: HashMap<OpId, OpRef>,
    /// Without proof. Not in flight: a peer that never gives proof must not hold up the others (F2).
    retained: HashMap<OpId, Retained>,
    next_op: u64,
    posted_at: Timestamp,
    timers: Timers<RoomKey>,
    outgoing: Outgoing,
    work: VecDeque<(RoomKey, SenderEvent)>,
    effects: Vec<SenderEffect>,
    inbox: Vec<ControlEvent>,
    news: Vec<LaneEvent>,
    malformed: MalformedLog,
    held_back: u32,
    strangers: Strangers,
    stats: Arc<Stats>,
}

/// Answers to addresses nobody registered: each may cost a connection, and a message can name any address.
#[derive(Default)]
struct Strangers {
    since: Timestamp,
    answered: u32,
}

impl Strangers {
    fn may_answer(&mut self, now: Timestamp) -> bool {
        if now.since(self.since) >= Duration::from_secs(1) {
            *self = Self { since: now, answered: 0 };
        }
        self.answered += 1;
        self.answered <= MAX_STRANGERS
    }
}

/// Messages handled in one step.
const MAX_INBOX: usize = 256;
/// Deadlines wait at most so many steps for messages that have arrived.
const MAX_HELD_BACK: u32 = 64;
/// Answers a second to addresses nobody registered; enough for a fleet that speaks to a restarted prefill.
const MAX_STRANGERS: u32 = 64;
/// A lost peer is connected to again at most this often, doubling up to [`RECONNECT_MAX`].
const RECONNECT_MIN: Duration = Duration::from_secs(1);
const RECONNECT_MAX: Duration = Duration::from_secs(60);
/// A busy lane is tried again after this time, news or not.
const BUSY_RETRY: Duration = Duration::from_millis(1);
/// How long after the last post the end of [`LOOK_OPS`] writes of [`LOOK_BYTES`] is looked for without sleeping.
const LOOK: Duration = Duration::from_micros(50);
const LOOK_OPS: usize = 4;
const LOOK_BYTES: u64 = 64 << 10;

impl PrefillShard {
    /// A shard without rooms.
    pub fn new(
        config: PrefillShardConfig,
        hooks: Arc<dyn ManagerHooks>,
        layout: Arc<LocalLayout>,
        lane: Box<dyn Lane>,
        connector: Box<dyn Connector>,
        stats: Arc<Stats>,
    ) -> Self {
        Self {
            config,
            hooks,
            layout,
            lane,
            connector,
            directory: None,
            planner: Planner::new(),
            rooms: SlotMap::with_key(),
            by_room: HashMap::new(),
            undrained: HashMap::new(),
            early: HashMap::new(),
            early_order: VecDeque::new(),
            early_bytes: 0,
            tombstones: HashMap::new(),
            tombstone_order: VecDeque::new(),
            pending_acks: HashMap::new(),
            spent: Spent::default(),
            peers: Peers::new(),
            ready_peers: VecDeque::new(),
            in_flight: HashMap::new(),
            retained: HashMap::new(),
            next_op: 0,
            posted_at: Timestamp::default(),
            timers: Timers::new(),
            outgoing: Outgoing::default(),
            work: VecDeque::new(),
            effects: Vec::new(),
            inbox: Vec::new(),
            news: Vec::new(),
            malformed: MalformedLog::default(),
            held_back: 0,
            strangers: Strangers::default(),
            stats,
        }
    }

    /// A file descriptor that turns readable when the lane has news.
    pub fn lane_fd(&self) -> Option<std::os::fd::RawFd> {
        self.lane.wake_fd()
    }

    /// Its counters.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }

    /// What it holds now. Everything but the peers returns to zero when the rooms have ended.
    pub fn held(&self) -> PrefillHeld {
        PrefillHeld {
            rooms: self.rooms.len(),
            named: self.by_room.len(),
            undrained: self.undrained.len(),
            ops: self.in_flight.len() + self.retained.len(),
            posts: self.peers.by_name.values().map(|p| p.posts.len()).sum(),
            early: self.early.len(),
            pending_acks: self.pending_acks.len(),
            peers: self.peers.by_name.len(),
        }
    }

    /// Deadlines it remembers, stale ones included. Bounded by the rooms it holds, but for a fixed number.
    pub fn pending_deadlines(&self) -> usize {
        self.timers.len() + self.early_order.len() + self.tombstone_order.len()
    }

    /// Rooms whose last life is remembered, so that what still comes of it is told from the next life's. Bounded by
    /// [`Limits::max_early_rooms`] and by time.
    pub fn remembered(&self) -> usize {
        self.spent.len()
    }

    /// Handle everything that is there.
    pub fn step(
        &mut self,
        now: Timestamp,
        control: &mut dyn ControlPlane,
        commands: &mut Vec<PrefillCommand>,
    ) -> NextWake {
        // First, so that a message of a room's next life does not meet the last one, whose end is queued (F6).
        for command in commands.drain(..) {
            self.command(now, command, control);
        }
        let mut inbox = std::mem::take(&mut self.inbox);
        control.recv(MAX_INBOX, &mut inbox);
        let again = inbox.len() >= MAX_INBOX;
        for event in inbox.drain(..) {
            match event {
                ControlEvent::Message(frames) => self.message(now, &frames, control),
                ControlEvent::PeerLost(endpoint, reason) => {
                    self.stats.connections_lost.inc();
                    self.outgoing.forget(&endpoint);
                    if let Some(name) = self.peers.at(&endpoint) {
                        self.peer_lost(now, &name, &reason, control);
                    }
                }
            }
        }
        self.inbox = inbox;
        self.completions(now, control);
        // What has arrived wins over a deadline, also when it does not fit into one step (D5).
        if again && self.held_back < MAX_HELD_BACK {
            self.held_back += 1;
        } else {
            self.held_back = 0;
            self.timeouts(now, control);
        }
        self.post_ready(now, control);
        self.lane.flush();
        // After everything was sent: a connection that was made or closed in this step is to be looked after, too.
        let tick = control.tick(now);
        let again = control.flush() || again;
        let mut at = self.poll_timeout().into_iter().chain(tick).min();
        if !self.ready_peers.is_empty() && !self.is_full() {
            // A lane that is busy without anything in flight has no news to wake us with.
            at = at.into_iter().chain([now + BUSY_RETRY]).min();
        }
        NextWake { at, in_flight: !self.in_flight.is_empty(), again, look_until: self.look_until() }
    }

    /// Worth it only for a few small writes: of many, some are always done, and large ones take their time.
    fn look_until(&self) -> Option<Timestamp> {
        let few = !self.in_flight.is_empty() && self.in_flight.len() <= LOOK_OPS;
        (few && self.in_flight.values().all(|op| op.bytes <= LOOK_BYTES)).then(|| self.posted_at + LOOK)
    }

    fn poll_timeout(&self) -> Option<Timestamp> {
        let early = self.early_order.front().map(|e| e.0);
        let tombstone = self.tombstone_order.front().map(|e| e.0);
        [self.timers.next(), early, tombstone, self.spent.poll_timeout(), self.outgoing.poll_timeout()]
            .into_iter()
            .flatten()
            .min()
    }

    fn command(&mut self, now: Timestamp, command: PrefillCommand, control: &mut dyn ControlPlane) {
        let (shared, event) = match command {
            PrefillCommand::Create(shared) => return self.create(now, shared, control),
            PrefillCommand::Connected(c) => return self.connected(now, c, control),
            PrefillCommand::Send(shared, spec, extras) => return self.send(now, &shared, spec, extras, control),
            PrefillCommand::SourceReady(shared, chunk, r) => (shared, SenderEvent::SourceReady(chunk, r)),
            PrefillCommand::Abort(shared) => {
                if !shared.poll().is_terminal() {
                    self.stats.rooms_aborted.inc();
                }
                (shared, SenderEvent::Abort)
            }
            PrefillCommand::Fail(shared, failure) => (shared, SenderEvent::Fail(failure)),
            PrefillCommand::Clear(shared) => return self.clear(now, &shared, control),
            PrefillCommand::Claim(shared, claim) => return self.claim(now, &shared, claim),
            PrefillCommand::Directory(event) => return self.directory_event(now, event, control),
        };
        if let Some(key) = self.find(&shared) {
            self.drive(now, key, event, control);
        }
    }

    /// The entry of this very life of a room.
    fn find(&self, shared: &RoomShared) -> Option<RoomKey> {
        let key = *self.by_room.get(&shared.room())?;
        (self.rooms.get(key)?.shared.life() == shared.life()).then_some(key)
    }

    fn create(&mut self, now: Timestamp, shared: Arc<RoomShared>, control: &mut dyn ControlPlane) {
        let room = shared.room();
        if self.by_room.contains_key(&room) {
            // The manager refuses this; whoever drives the shard must not harm the first one (F40).
            let failure = Failure::here(format!("room {room} is in use: its sender was not cleared"));
            return shared.publish(KvPoll::Failed, true, Some(&failure), None);
        }
        let machine = SenderRoom::new(room, now, self.config.policy.clone());
        let entry = Entry {
            room: machine,
            shared,
            armed: None,
            reported: false,
            held: false,
            bound: SmallVec::new(),
            traces: Traces::default(),
            pieces: Vec::new(),
            claiming: None,
        };
        let key = self.rooms.insert(entry);
        self.by_room.insert(room, key);
        self.tombstones.remove(&room);
        if mutant!(ReuseResetsOutstanding) {
            self.undrained.remove(&room);
        }
        self.stats.rooms_created.inc();
        self.stats.rooms_live.set(self.rooms.len() as u64);
        self.rearm(key);
        if let Some(early) = self.early.remove(&room) {
            self.early_bytes -= page_bytes(&early.destinations);
            for d in early.destinations {
                self.bind(key, d.life.map(|life| DecodeLife::new(&d.endpoint, life)));
                self.drive(now, key, SenderEvent::Destination(d), control);
            }
            if let Some(reason) = early.failed {
                self.drive(now, key, SenderEvent::Fail(Failure::here(reason)), control);
            }
        }
    }

    fn send(
        &mut self,
        now: Timestamp,
        shared: &Arc<RoomShared>,
        mut spec: ChunkSpec,
        extras: ChunkExtras,
        control: &mut dyn ControlPlane,
    ) {
        let ChunkExtras { wait_event: event, trace } = extras;
        spec.has_wait_event = event.is_some();
        let Some(key) = self.find(shared) else { return };
        let Some(entry) = self.rooms.get_mut(key) else { return };
        let chunk = entry.room.next_chunk();
        let terminal = entry.room.poll().is_terminal();
        if let (Some(span), false) = (trace, terminal) {
            entry.traces.insert(chunk, span);
        }
        self.drive(now, key, SenderEvent::Enqueue(spec), control);
        if let (Some(event), false) = (event, terminal) {
            let (shared, commands) = (shared.clone(), self.config.commands.clone());
            event.subscribe(Box::new(move |r| commands(PrefillCommand::SourceReady(shared, chunk, r))));
        }
    }

    fn clear(&mut self, now: Timestamp, shared: &RoomShared, control: &mut dyn ControlPlane) {
        let Some(key) = self.find(shared) else { return };
        self.by_room.remove(&shared.room());
        // Registered before the event, so that an ACK that becomes due waits for this life too.
        if !mutant!(AckIgnoresClearedLives) {
            self.undrained.entry(shared.room()).or_default().push(key);
        }
        if mutant!(ForgetAckTargetsAtClear) {
            self.pending_acks.remove(&shared.room());
        }
        for life in self.rooms.get(key).map(|e| e.bound.clone()).unwrap_or_default() {
            self.spend(now, shared.room(), life);
        }
        self.drive(now, key, SenderEvent::Clear, control);
        if let Some(f) = shared.failure() {
            self.bury(now, shared.room(), f.reason.clone());
        }
    }
}
