//! Prefill's shard: sender rooms, decode peers, writes in flight, ABORT_ACKs.

use std::collections::{HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use slotmap::{SlotMap, new_key_type};
use smallvec::SmallVec;

use super::outgoing::Outgoing;
use super::peers::{Link, Peer, Peers, Post};
use super::timers::Timers;
use super::{Connected, Connector, MalformedLog, NextWake, RoomFreed, RoomShared, Stats};
use crate::control::{ControlEvent, ControlPlane};
use crate::directory::{Directory, DirectoryRequest};
use crate::error::ABORTED_BY_DECODE_REASON;
use crate::event::WaitEvent;
use crate::hooks::ManagerHooks;
use crate::ids::{OpId, PrefillRank, Room};
use crate::layout::{LocalLayout, Pairing, PeerLayout};
use crate::limits::Limits;
use crate::net::Endpoint;
use crate::plan::{Planner, WritePlan, dst_slice};
use crate::poll::KvPoll;
use crate::room::{ChunkSpec, Destination, Failure, SenderEffect, SenderEvent, SenderPolicy, SenderRoom};
use crate::time::Timestamp;
use crate::transport::{Lane, LaneEvent, Outcome, PeerDescriptor, SubmitError, TransportError, TransportErrorKind, WriteOp};
use crate::wire::{Abort, AbortAck, KvStatus, Metadata, Registration, ToPrefill};

new_key_type! { pub(crate) struct RoomKey; }

/// A handle's wishes.
pub enum PrefillCommand {
    /// A sender was made.
    Create(Arc<RoomShared>),
    /// `send()`.
    Send(Arc<RoomShared>, ChunkSpec, Option<Arc<dyn WaitEvent>>),
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
    /// For the directory.
    Directory(DirectoryRequest),
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
    /// Hands commands back to the shard from other threads (wait events).
    pub commands: Arc<dyn Fn(PrefillCommand) + Send + Sync>,
}

struct Entry {
    room: SenderRoom,
    shared: Arc<RoomShared>,
    armed: Option<Timestamp>,
    drained: bool,
    reported: bool,
}

struct OpRef {
    key: RoomKey,
    chunk: u32,
    dest: usize,
    bytes: u64,
    /// Its outcome came, and left a side not quiet.
    retained: bool,
}

struct Early {
    destinations: Vec<Destination>,
    failed: Option<Arc<str>>,
    deadline: Timestamp,
}

/// See the [module](crate::engine).
pub struct PrefillShard {
    config: PrefillShardConfig,
    hooks: Arc<dyn ManagerHooks>,
    layout: Arc<LocalLayout>,
    lane: Box<dyn Lane>,
    connector: Box<dyn Connector>,
    directory: Box<dyn Directory>,
    planner: Planner,
    rooms: SlotMap<RoomKey, Entry>,
    by_room: HashMap<Room, RoomKey>,
    /// Earlier lives that may still write.
    undrained: HashMap<Room, SmallVec<[RoomKey; 1]>>,
    early: HashMap<Room, Early>,
    early_order: VecDeque<(Timestamp, Room)>,
    tombstones: HashMap<Room, (Timestamp, Arc<str>)>,
    tombstone_order: VecDeque<(Timestamp, Room)>,
    pending_acks: HashMap<Room, SmallVec<[(Endpoint, u64); 1]>>,
    peers: Peers<RoomKey>,
    ready_peers: VecDeque<Arc<str>>,
    ops: HashMap<OpId, OpRef>,
    next_op: u64,
    timers: Timers<RoomKey>,
    outgoing: Outgoing,
    work: VecDeque<(RoomKey, SenderEvent)>,
    effects: Vec<SenderEffect>,
    inbox: Vec<ControlEvent>,
    news: Vec<LaneEvent>,
    malformed: MalformedLog,
    stats: Arc<Stats>,
}

/// Messages handled in one step.
const MAX_INBOX: usize = 256;
/// A lost peer is connected to again at most this often, doubling up to [`RECONNECT_MAX`].
const RECONNECT_MIN: Duration = Duration::from_secs(1);
const RECONNECT_MAX: Duration = Duration::from_secs(60);
/// A busy lane is tried again after this time, news or not.
const BUSY_RETRY: Duration = Duration::from_millis(1);

impl PrefillShard {
    /// A shard without rooms.
    pub fn new(
        config: PrefillShardConfig,
        hooks: Arc<dyn ManagerHooks>,
        layout: Arc<LocalLayout>,
        lane: Box<dyn Lane>,
        connector: Box<dyn Connector>,
        directory: Box<dyn Directory>,
        stats: Arc<Stats>,
    ) -> Self {
        Self {
            config,
            hooks,
            layout,
            lane,
            connector,
            directory,
            planner: Planner::new(),
            rooms: SlotMap::with_key(),
            by_room: HashMap::new(),
            undrained: HashMap::new(),
            early: HashMap::new(),
            early_order: VecDeque::new(),
            tombstones: HashMap::new(),
            tombstone_order: VecDeque::new(),
            pending_acks: HashMap::new(),
            peers: Peers::new(),
            ready_peers: VecDeque::new(),
            ops: HashMap::new(),
            next_op: 0,
            timers: Timers::new(),
            outgoing: Outgoing::default(),
            work: VecDeque::new(),
            effects: Vec::new(),
            inbox: Vec::new(),
            news: Vec::new(),
            malformed: MalformedLog::default(),
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

    /// Rooms held (live, and cleared but not drained), writes in flight or retained, early rooms, peers.
    pub fn held(&self) -> (usize, usize, usize, usize) {
        (self.rooms.len(), self.ops.len(), self.early.len(), self.peers.by_name.len())
    }

    /// Handle everything that is there.
    pub fn step(
        &mut self,
        now: Timestamp,
        control: &mut dyn ControlPlane,
        commands: &mut Vec<PrefillCommand>,
    ) -> NextWake {
        let mut inbox = std::mem::take(&mut self.inbox);
        control.recv(MAX_INBOX, &mut inbox);
        let again = inbox.len() >= MAX_INBOX;
        for event in inbox.drain(..) {
            match event {
                ControlEvent::Message(frames) => self.message(now, &frames, control),
                ControlEvent::PeerLost(endpoint, reason) => {
                    self.outgoing.forget(&endpoint);
                    if let Some(name) = self.peers.at(&endpoint) {
                        self.peer_lost(now, &name, &reason, control);
                    }
                }
            }
        }
        self.inbox = inbox;
        for command in commands.drain(..) {
            self.command(now, command, control);
        }
        self.completions(now, control);
        let tick = control.tick(now);
        self.timeouts(now, control);
        self.post_ready(now, control);
        let mut at = self.poll_timeout().into_iter().chain(tick).min();
        if !self.ready_peers.is_empty() {
            // A lane that is busy without anything in flight has no news to wake us with.
            at = at.into_iter().chain([now + BUSY_RETRY]).min();
        }
        NextWake { at, in_flight: !self.ops.is_empty(), again }
    }

    fn poll_timeout(&self) -> Option<Timestamp> {
        let early = self.early_order.front().map(|e| e.0);
        let tombstone = self.tombstone_order.front().map(|e| e.0);
        [self.timers.next(), early, tombstone, self.outgoing.poll_timeout()].into_iter().flatten().min()
    }

    fn command(&mut self, now: Timestamp, command: PrefillCommand, control: &mut dyn ControlPlane) {
        let (shared, event) = match command {
            PrefillCommand::Create(shared) => return self.create(now, shared, control),
            PrefillCommand::Connected(c) => return self.connected(now, c, control),
            PrefillCommand::Directory(request) => return self.directory.request(request),
            PrefillCommand::Send(shared, spec, event) => return self.send(now, &shared, spec, event, control),
            PrefillCommand::SourceReady(shared, chunk, r) => (shared, SenderEvent::SourceReady(chunk, r)),
            PrefillCommand::Abort(shared) => {
                self.stats.rooms_aborted.inc();
                (shared, SenderEvent::Abort)
            }
            PrefillCommand::Fail(shared, failure) => (shared, SenderEvent::Fail(failure)),
            PrefillCommand::Clear(shared) => return self.clear(now, &shared, control),
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
        let machine = SenderRoom::new(room, now, self.config.policy.clone());
        let key = self.rooms.insert(Entry { room: machine, shared, armed: None, drained: true, reported: false });
        self.by_room.insert(room, key);
        self.tombstones.remove(&room);
        self.stats.rooms_created.inc();
        self.stats.rooms_live.set(self.rooms.len() as u64);
        self.rearm(key);
        if let Some(early) = self.early.remove(&room) {
            for d in early.destinations {
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
        spec: ChunkSpec,
        event: Option<Arc<dyn WaitEvent>>,
        control: &mut dyn ControlPlane,
    ) {
        let Some(key) = self.find(shared) else { return };
        let Some(entry) = self.rooms.get(key) else { return };
        let chunk = entry.room.next_chunk();
        let terminal = entry.room.poll().is_terminal();
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
        self.undrained.entry(shared.room()).or_default().push(key);
        self.drive(now, key, SenderEvent::Clear, control);
    }

    fn message(&mut self, now: Timestamp, frames: &[bytes::Bytes], control: &mut dyn ControlPlane) {
        self.stats.messages_in.inc();
        let parsed = self.hooks.dialect().parse_to_prefill(frames, &self.config.limits);
        match parsed {
            Ok(ToPrefill::Registration(r)) => self.registration(now, r, control),
            Ok(ToPrefill::Metadata(m)) => self.metadata(now, m, control),
            Ok(ToPrefill::Abort(a)) => self.abort(now, a, control),
            // Staging and late allocation are not offered by this rank, so nobody of ours sends these.
            Ok(_) => self.stats.protocol_violations.inc(),
            Err(error) => self.malformed.report(&self.stats, &error),
        }
    }

    fn registration(&mut self, now: Timestamp, r: Box<Registration>, control: &mut dyn ControlPlane) {
        let name: Arc<str> = r.name.as_str().into();
        let mut posts = VecDeque::new();
        if let Some(known) = self.peers.get(&name) {
            let same = *known.registration == *r;
            if same && matches!(known.link, Link::Ready(_) | Link::Connecting(_)) {
                return;
            }
            // Registered again with other geometry, or after a failure: the old connection goes (0.5.23 hazard 7).
            if let Some((old, id)) = self.peers.remove(&name) {
                posts = old.posts;
                if let Some(id) = id {
                    self.connector.disconnect(id);
                }
            }
        }
        if let Some(old) = self.peers.at(&r.endpoint).filter(|old| *old != name) {
            self.peer_lost(now, &old, "a new process registered at its address", control);
            self.drop_peer(&old);
        }
        if self.peers.by_name.len() >= self.config.limits.max_peers {
            match self.peers.victim() {
                Some(victim) => self.drop_peer(&victim),
                None => return self.stats.messages_over_limit.inc(),
            }
        }
        let paired = PeerLayout::from_registration(&r, &self.config.limits)
            .and_then(|peer| Pairing::new(&self.layout, &peer))
            .map_err(|e| -> Arc<str> { format!("decode {} does not fit this prefill: {e}", r.endpoint).into() });
        let (pairing, refused) = match paired {
            Ok(p) => (Some(Arc::new(p)), None),
            Err(reason) => {
                self.stats.peers_refused.inc();
                tracing::warn!("{reason}");
                (None, Some(reason))
            }
        };
        let link = Link::Refused(refused.clone().unwrap_or_default());
        self.peers.insert(name.clone(), Peer { registration: r, pairing, link, posts, last_used: now });
        match refused {
            None => {
                self.stats.peers_registered.inc();
                self.connect(&name);
            }
            Some(reason) => self.fail_rooms_of(now, &name, &reason, control),
        }
    }

    fn connect(&mut self, name: &Arc<str>) {
        let Some(peer) = self.peers.get(name) else { return };
        let r = &peer.registration;
        let descriptor =
            PeerDescriptor { name: r.name.clone(), metadata: r.metadata.clone(), endpoint: r.endpoint.clone() };
        let token = self.peers.connecting(name);
        self.connector.connect(token, descriptor);
    }

    fn drop_peer(&mut self, name: &str) {
        if let Some((_, Some(id))) = self.peers.remove(name) {
            self.connector.disconnect(id);
        }
    }

    fn connected(&mut self, now: Timestamp, c: Connected, control: &mut dyn ControlPlane) {
        let Some(name) = self.peers.connected(c.token) else {
            // The peer has moved on meanwhile.
            if let Ok(id) = c.result {
                self.connector.disconnect(id);
            }
            return;
        };
        match c.result {
            Ok(id) => {
                self.peers.ready(&name, id);
                self.ready_peers.push_back(name);
            }
            Err(error) => self.peer_lost(now, &name, &format!("cannot connect: {error}"), control),
        }
    }

    /// The peer cannot be written to: its rooms fail, its remote state goes (F55). It is tried again when a room
    /// needs it (F51).
    fn peer_lost(&mut self, now: Timestamp, name: &Arc<str>, reason: &str, control: &mut dyn ControlPlane) {
        let Some(peer) = self.peers.get_mut(name) else { return };
        let failures = match &peer.link {
            Link::Down { failures, .. } => *failures,
            Link::Refused(_) => return,
            Link::Connecting(_) => 1,
            Link::Ready(_) => 0,
        };
        peer.posts.clear();
        self.stats.peers_lost.inc();
        let wait = RECONNECT_MIN.saturating_mul(1 << failures.min(6)).min(RECONNECT_MAX);
        if let Some(id) = self.peers.down(name, reason.into(), now + wait, failures + 1) {
            self.connector.disconnect(id);
        }
        self.fail_rooms_of(now, name, reason, control);
    }

    fn fail_rooms_of(&mut self, now: Timestamp, name: &Arc<str>, reason: &str, control: &mut dyn ControlPlane) {
        let rooms: Vec<RoomKey> = self
            .rooms
            .iter()
            .filter(|(_, e)| !e.room.poll().is_terminal() && e.room.destinations().iter().any(|d| d.name == *name))
            .map(|(k, _)| k)
            .collect();
        for key in rooms {
            self.drive(now, key, SenderEvent::DestinationLost(name.clone(), reason.to_owned()), control);
        }
    }

    fn metadata(&mut self, now: Timestamp, m: Metadata, control: &mut dyn ControlPlane) {
        let Some(room) = Room::new(m.room) else { return self.stats.protocol_violations.inc() };
        let refused = match self.usable(now, &m.name) {
            Ok(()) => None,
            Err(reason) => Some(reason),
        };
        let destination = Destination {
            name: m.name.as_str().into(),
            endpoint: m.endpoint,
            pages: m.dst_pages,
            aux_index: m.aux_index,
            required_dst_info_num: m.required_dst_info_num,
            decode_prefix_len: m.decode_prefix_len,
            is_dummy: m.is_dummy,
        };
        if let Some(&key) = self.by_room.get(&room) {
            if let Some(reason) = refused {
                self.drive(now, key, SenderEvent::Fail(Failure::here(reason)), control);
            }
            return self.drive(now, key, SenderEvent::Destination(destination), control);
        }
        if let Some((_, reason)) = self.tombstones.get(&room).cloned() {
            return self.status(now, room, &destination.endpoint, KvPoll::Failed, Some(reason), control);
        }
        if !self.early.contains_key(&room) {
            if self.early.len() >= self.config.limits.max_early_rooms {
                return self.stats.messages_over_limit.inc();
            }
            let deadline = now + self.config.early_timeout;
            self.early.insert(room, Early { destinations: Vec::new(), failed: None, deadline });
            self.early_order.push_back((deadline, room));
        }
        let Some(early) = self.early.get_mut(&room) else { return };
        let reason = match (&early.failed, refused) {
            (Some(reason), _) => Some(reason.clone()),
            (None, refused) => refused,
        };
        if let Some(reason) = reason {
            early.failed = Some(reason.clone());
            let destinations = std::mem::take(&mut early.destinations);
            for d in destinations.iter().chain([&destination]).filter(|d| !d.is_dummy) {
                self.status(now, room, &d.endpoint.clone(), KvPoll::Failed, Some(reason.clone()), control);
            }
        } else if early.destinations.len() < self.config.limits.max_peers_per_room {
            early.destinations.retain(|d| d.name != destination.name);
            early.destinations.push(destination);
        } else {
            self.stats.messages_over_limit.inc();
        }
    }

    /// Whether rooms can go to this decode; connects again where the connection broke.
    fn usable(&mut self, now: Timestamp, name: &str) -> Result<(), Arc<str>> {
        let Some(peer) = self.peers.get_mut(name) else {
            self.stats.messages_stale.inc();
            return Err(format!("decode {name:?} is not registered with this prefill rank: register, then send metadata").into());
        };
        peer.last_used = now;
        match &peer.link {
            Link::Ready(_) | Link::Connecting(_) => Ok(()),
            Link::Refused(reason) => Err(reason.clone()),
            Link::Down { reason, retry_at, .. } if *retry_at > now => {
                let secs = retry_at.since(now).as_secs_f64();
                Err(format!("decode {} is lost ({reason}); tried again in {secs:.1}s", peer.registration.endpoint).into())
            }
            Link::Down { .. } => {
                let name: Arc<str> = name.into();
                self.connect(&name);
                Ok(())
            }
        }
    }

    fn abort(&mut self, now: Timestamp, a: Abort, control: &mut dyn ControlPlane) {
        let Some(room) = Room::new(a.room) else { return self.stats.protocol_violations.inc() };
        self.stats.aborts_in.inc();
        if let Some(&key) = self.by_room.get(&room) {
            if self.rooms.get(key).is_some_and(|e| !e.room.poll().is_terminal()) {
                self.stats.rooms_aborted.inc();
            }
            self.drive(now, key, SenderEvent::AbortedByDecode, control);
        } else if let Some(early) = self.early.get_mut(&room) {
            early.destinations.clear();
            early.failed = Some(ABORTED_BY_DECODE_REASON.into());
        } else {
            self.stats.messages_stale.inc();
        }
        if let (Some(endpoint), Some(generation)) = (a.endpoint, a.generation) {
            let targets = self.pending_acks.entry(room).or_default();
            match targets.iter_mut().find(|(e, _)| *e == endpoint) {
                Some(t) => t.1 = generation,
                None if targets.len() < self.config.limits.max_peers_per_room => targets.push((endpoint, generation)),
                None => self.stats.messages_over_limit.inc(),
            }
            self.ack_if_drained(now, room, control);
        }
    }

    /// ABORT_ACK only when no life of the room can still write (F3).
    fn ack_if_drained(&mut self, now: Timestamp, room: Room, control: &mut dyn ControlPlane) {
        let lives = self.by_room.get(&room).into_iter().chain(self.undrained.get(&room).into_iter().flatten());
        if lives.filter_map(|k| self.rooms.get(*k)).any(|e| e.room.outstanding() > 0) {
            return;
        }
        for (endpoint, generation) in self.pending_acks.remove(&room).into_iter().flatten() {
            let ack = AbortAck { room: room.get(), prefill_rank: self.config.rank, generation };
            match self.hooks.dialect().encode_abort_ack(&ack) {
                Ok(frames) => {
                    self.stats.abort_acks_out.inc();
                    self.outgoing.send(now, control, &endpoint, frames, &self.stats);
                }
                Err(error) => tracing::warn!("ABORT_ACK of room {room} not sent: {error}"),
            }
        }
    }

    fn status(
        &mut self,
        now: Timestamp,
        room: Room,
        to: &Endpoint,
        status: KvPoll,
        reason: Option<Arc<str>>,
        control: &mut dyn ControlPlane,
    ) {
        let message = KvStatus {
            room: room.get(),
            status,
            prefill_rank: self.config.rank,
            reason: reason.map(|r| r.to_string()),
        };
        match self.hooks.dialect().encode_status(&message) {
            Ok(frames) => {
                self.outgoing.send(now, control, to, frames, &self.stats);
            }
            Err(error) => tracing::warn!("status of room {room} not sent: {error}"),
        }
    }

    fn completions(&mut self, now: Timestamp, control: &mut dyn ControlPlane) {
        let mut news = std::mem::take(&mut self.news);
        self.lane.poll(&mut news);
        for event in news.drain(..) {
            match event {
                LaneEvent::Outcome(op, outcome) => self.outcome(now, op, outcome, control),
                LaneEvent::Settlement(op, settlement) => {
                    let Some(r) = self.ops.remove(&op) else { continue };
                    if r.retained {
                        self.stats.ops_retained.set(self.stats.ops_retained.get().saturating_sub(1));
                    }
                    let event = SenderEvent::Settlement(r.chunk, r.dest, settlement);
                    self.drive(now, r.key, event, control);
                }
                LaneEvent::PeerLost(id, error) => {
                    if let Some(name) = self.peers.of(id) {
                        self.peer_lost(now, &name, &error.to_string(), control);
                    }
                }
            }
        }
        self.news = news;
    }

    fn outcome(&mut self, now: Timestamp, op: OpId, outcome: Outcome, control: &mut dyn ControlPlane) {
        let Some(r) = self.ops.get_mut(&op) else { return };
        let (key, chunk, dest) = (r.key, r.chunk, r.dest);
        let quiet = match &outcome {
            Outcome::Done => {
                self.stats.ops_done.inc();
                self.stats.bytes_done.add(r.bytes);
                true
            }
            Outcome::Failed { src_quiet, dst_quiet, .. } => {
                self.stats.ops_failed.inc();
                *src_quiet && *dst_quiet
            }
            Outcome::Unresolved { .. } => {
                self.stats.ops_unresolved.inc();
                false
            }
        };
        if quiet {
            self.ops.remove(&op);
        } else {
            r.retained = true;
            self.stats.ops_retained.inc();
        }
        self.drive(now, key, SenderEvent::Outcome(chunk, dest, outcome), control);
    }

    /// Feed a room one event, and carry out everything that follows from it.
    fn drive(&mut self, now: Timestamp, key: RoomKey, event: SenderEvent, control: &mut dyn ControlPlane) {
        self.work.push_back((key, event));
        while let Some((key, event)) = self.work.pop_front() {
            let Some(entry) = self.rooms.get_mut(key) else { continue };
            let mut effects = std::mem::take(&mut self.effects);
            entry.room.handle_event(now, event, &mut effects);
            self.carry_out(now, key, &mut effects, control);
            self.effects = effects;
            self.after(now, key);
        }
    }

    fn carry_out(
        &mut self,
        now: Timestamp,
        key: RoomKey,
        effects: &mut Vec<SenderEffect>,
        control: &mut dyn ControlPlane,
    ) {
        let Some(room) = self.rooms.get(key).map(|e| e.room.room()) else { return effects.clear() };
        let mut changed = false;
        for effect in effects.drain(..) {
            match effect {
                SenderEffect::Post(chunk, dest) => self.queue_post(Post { key, chunk, dest }),
                SenderEffect::Status(to, status, reason) => self.status(now, room, &to, status, reason, control),
                SenderEffect::Changed => changed = true,
                SenderEffect::Drained => {
                    if self.pending_acks.contains_key(&room) {
                        self.ack_if_drained(now, room, control);
                    }
                }
            }
        }
        if changed {
            self.publish(key);
        }
    }

    /// Show the handle what changed. Last of a room's effects: a waiter that wakes finds everything done.
    fn publish(&mut self, key: RoomKey) {
        let Some(e) = self.rooms.get_mut(key) else { return };
        let poll = e.room.poll();
        if poll.is_terminal() && !e.reported {
            e.reported = true;
            match poll {
                KvPoll::Success => self.stats.rooms_succeeded.inc(),
                _ => self.stats.rooms_failed.inc(),
            }
        }
        e.shared.publish(poll, e.room.releasable(), e.room.failure(), e.room.latency());
    }

    /// Deadlines and the end of a room.
    fn after(&mut self, now: Timestamp, key: RoomKey) {
        let Some(e) = self.rooms.get(key) else { return };
        if !e.room.finished() {
            return self.rearm(key);
        }
        let Some(e) = self.rooms.remove(key) else { return };
        let room = e.room.room();
        if let Some(keys) = self.undrained.get_mut(&room) {
            keys.retain(|k| *k != key);
            if keys.is_empty() {
                self.undrained.remove(&room);
            }
        }
        if let (Some(f), false) = (e.room.failure(), self.by_room.contains_key(&room)) {
            self.bury(now, room, f.reason.clone());
        }
        self.stats.rooms_live.set(self.rooms.len() as u64);
        (self.config.freed)(&e.shared);
    }

    /// Late metadata of a room that failed and was cleared is answered for a while (C6).
    fn bury(&mut self, now: Timestamp, room: Room, reason: Arc<str>) {
        while self.tombstone_order.len() >= self.config.limits.max_early_rooms {
            let Some((deadline, oldest)) = self.tombstone_order.pop_front() else { break };
            if self.tombstones.get(&oldest).is_some_and(|(t, _)| *t == deadline) {
                self.tombstones.remove(&oldest);
            }
        }
        let deadline = now + self.config.tombstone_timeout;
        self.tombstones.insert(room, (deadline, reason));
        self.tombstone_order.push_back((deadline, room));
    }

    fn rearm(&mut self, key: RoomKey) {
        let Some(e) = self.rooms.get_mut(key) else { return };
        let Some(at) = e.room.poll_timeout() else { return };
        if e.armed.is_none_or(|armed| at < armed) {
            e.armed = Some(at);
            let rooms = &self.rooms;
            self.timers.arm(at, key, rooms.len(), |t, k| {
                rooms.get(k).is_some_and(|e| e.armed == Some(t) && e.room.poll_timeout().is_some())
            });
        }
    }

    fn timeouts(&mut self, now: Timestamp, control: &mut dyn ControlPlane) {
        while let Some(key) = self.timers.pop_due(now) {
            let Some(e) = self.rooms.get_mut(key) else { continue };
            e.armed = None;
            let mut effects = std::mem::take(&mut self.effects);
            e.room.handle_timeout(now, &mut effects);
            if !effects.is_empty() {
                self.stats.rooms_timed_out.inc();
            }
            self.carry_out(now, key, &mut effects, control);
            self.effects = effects;
            self.after(now, key);
        }
        self.outgoing.handle_timeout(now, control, &self.stats);
        while self.early_order.front().is_some_and(|(t, _)| *t <= now) {
            let Some((deadline, room)) = self.early_order.pop_front() else { break };
            if self.early.get(&room).is_some_and(|e| e.deadline == deadline) {
                self.expire_early(now, room, control);
            }
        }
        while self.tombstone_order.front().is_some_and(|(t, _)| *t <= now) {
            let Some((deadline, room)) = self.tombstone_order.pop_front() else { break };
            if self.tombstones.get(&room).is_some_and(|(t, _)| *t == deadline) {
                self.tombstones.remove(&room);
            }
        }
    }

    /// Nobody made a sender for this room: decode is told (F28).
    fn expire_early(&mut self, now: Timestamp, room: Room, control: &mut dyn ControlPlane) {
        let Some(early) = self.early.remove(&room) else { return };
        self.stats.early_expired.inc();
        let secs = self.config.early_timeout.as_secs_f64();
        let reason: Arc<str> = format!("prefill made no sender for room {room} within {secs:.1}s").into();
        for d in early.destinations.iter().filter(|d| !d.is_dummy) {
            self.status(now, room, &d.endpoint.clone(), KvPoll::Failed, Some(reason.clone()), control);
        }
    }

    fn queue_post(&mut self, post: Post<RoomKey>) {
        let Some(e) = self.rooms.get(post.key) else { return };
        let Some(d) = e.room.destinations().get(post.dest) else { return };
        let name = d.name.clone();
        match self.peers.get_mut(&name) {
            Some(peer) if !matches!(peer.link, Link::Refused(_) | Link::Down { .. }) => {
                if peer.posts.is_empty() {
                    self.ready_peers.push_back(name);
                }
                peer.posts.push_back(post);
            }
            Some(peer) => {
                let (Link::Refused(reason) | Link::Down { reason, .. }) = &peer.link else { return };
                let event = SenderEvent::Rejected(post.chunk, post.dest, reason.to_string());
                self.work.push_back((post.key, event));
            }
            None => {
                let event = SenderEvent::Rejected(post.chunk, post.dest, "it is not registered any more".into());
                self.work.push_back((post.key, event));
            }
        }
    }

    /// Post what waits, peer by peer: a peer that is busy or still connecting does not hold up the others.
    fn post_ready(&mut self, now: Timestamp, control: &mut dyn ControlPlane) {
        let mut busy = Vec::new();
        while let Some(name) = self.ready_peers.pop_front() {
            if self.ops.len() >= self.config.limits.max_ops_in_flight {
                busy.push(name);
                break;
            }
            let Some(peer) = self.peers.get_mut(&name) else { continue };
            let (Link::Ready(id), Some(pairing)) = (&peer.link, peer.pairing.clone()) else { continue };
            let id = *id;
            let Some(post) = peer.posts.pop_front() else { continue };
            peer.last_used = now;
            match self.try_post(post, id, &pairing) {
                Ok(event) => {
                    // Round robin over peers.
                    self.ready_peers.push_back(name);
                    if let Some(event) = event {
                        self.drive(now, post.key, event, control);
                    }
                }
                Err(()) => {
                    if let Some(peer) = self.peers.get_mut(&name) {
                        peer.posts.push_front(post);
                    }
                    busy.push(name);
                }
            }
        }
        self.ready_peers.extend(busy);
    }

    /// Plan and submit. `Err`: the lane is busy.
    fn try_post(
        &mut self,
        post: Post<RoomKey>,
        peer: crate::ids::PeerId,
        pairing: &Arc<Pairing>,
    ) -> Result<Option<SenderEvent>, ()> {
        let Post { key, chunk, dest } = post;
        let Some(e) = self.rooms.get(key) else { return Ok(None) };
        if !e.room.wants_post(chunk, dest) {
            return Ok(None);
        }
        let (Some(c), Some(d)) = (e.room.chunk(chunk), e.room.destinations().get(dest)) else { return Ok(None) };
        let plan = match make_plan(&mut self.planner, pairing, c.spec(), d) {
            Ok(plan) => plan,
            Err(reason) => return Ok(Some(SenderEvent::Rejected(chunk, dest, reason))),
        };
        if plan.is_empty() {
            return Ok(Some(SenderEvent::NothingToPost(chunk, dest)));
        }
        self.next_op += 1;
        let id = OpId(self.next_op);
        let bytes = plan.total_bytes();
        let op = WriteOp { id, peer, plan, regions: self.layout.regions().clone() };
        // A backend that panics costs this room, not the worker (F62). What it posted before is not known.
        let posted = catch_unwind(AssertUnwindSafe(|| self.lane.submit(op)));
        match posted {
            Ok(Err(SubmitError::Busy(_))) => return Err(()),
            Ok(Err(SubmitError::Rejected(_, error))) => {
                return Ok(Some(SenderEvent::Rejected(chunk, dest, error.to_string())));
            }
            Ok(Ok(())) => {}
            Err(_) => {
                let error = TransportError::new(TransportErrorKind::Backend, "the transport panicked in submit");
                self.work.push_back((key, SenderEvent::Posted(chunk, dest, id)));
                self.ops.insert(id, OpRef { key, chunk, dest, bytes, retained: true });
                self.stats.ops_unresolved.inc();
                self.stats.ops_retained.inc();
                return Ok(Some(SenderEvent::Outcome(chunk, dest, Outcome::Unresolved { error })));
            }
        }
        self.stats.ops_posted.inc();
        self.ops.insert(id, OpRef { key, chunk, dest, bytes, retained: false });
        Ok(Some(SenderEvent::Posted(chunk, dest, id)))
    }
}

/// KV pages of the chunk, and with the last chunk the aux row.
fn make_plan(
    planner: &mut Planner,
    pairing: &Pairing,
    spec: &ChunkSpec,
    d: &Destination,
) -> Result<WritePlan, String> {
    let slice = (u64::from(spec.index_slice.start), u64::from(spec.index_slice.end));
    let pages = dst_slice(&d.pages, slice, &spec.pages).map_err(|e| e.to_string())?;
    if pages.truncated > 0 {
        tracing::warn!("decode {} announced {} pages fewer than are sent; those are not written", d.endpoint, pages.truncated);
    }
    let mut plan = planner.plan_chunk(pairing, pages.src, pages.dst).map_err(|e| e.to_string())?;
    if let (true, Some(src_slot), Some(dst_slot)) = (spec.is_last, spec.aux_index, d.aux_index) {
        plan.append(planner.plan_aux(pairing, src_slot, dst_slot).map_err(|e| e.to_string())?);
    }
    Ok(plan)
}
