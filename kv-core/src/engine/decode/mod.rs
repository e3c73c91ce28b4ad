//! Decode's shard: receiver rooms, registrations, metadata, ABORTs and their ACKs.

use self::registering::Registered;
use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use slotmap::{SlotMap, new_key_type};

use super::outgoing::Outgoing;
use super::timers::Timers;
use super::{MalformedLog, NextWake, RoomFreed, RoomShared, Stats};
use crate::control::{ControlEvent, ControlPlane, Multipart};
use crate::directory::{Directory, DirectoryEvent, DirectoryRequest, PrefillPeers, PrefillRecord};
use crate::hooks::ManagerHooks;
use crate::host::HostIdentity;
use crate::ids::{PrefillRank, ProcessGeneration, Room};
use crate::limits::Limits;
use crate::mutants::mutant;
use crate::net::Endpoint;
use crate::poll::KvPoll;
use crate::room::{Failure, PublishSpec, ReceiverEffect, ReceiverEvent, ReceiverPolicy, ReceiverRoom, geometry};
use crate::time::Timestamp;
use crate::wire::{
    Abort, AbortAck, ExtCapabilities, ExtPeer, Extension, KvStatus, MessageKind, Metadata, Registration, ToDecode,
    WireError,
};

mod inbound;
mod proof;
mod registering;

new_key_type! { struct RoomKey; }

/// A handle's wishes, and the directory's news.
#[derive(Debug)]
pub enum DecodeCommand {
    /// A receiver was made and its prefill ranks are wanted (`init()`).
    Create {
        /// Its room.
        shared: Arc<RoomShared>,
        /// `host:port` of prefill's bootstrap server.
        bootstrap_addr: String,
        /// From the request, when it names one.
        prefill_dp_rank: Option<u32>,
    },
    /// `send_metadata()`.
    Publish(Arc<RoomShared>, Box<PublishSpec>),
    /// `abort()`.
    Abort(Arc<RoomShared>),
    /// The room cannot go on, for a reason found outside the shard.
    Fail(Arc<RoomShared>, Failure),
    /// `clear()`.
    Clear(Arc<RoomShared>),
    /// News from the directory.
    Directory(DirectoryEvent),
}

impl std::fmt::Debug for RoomShared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RoomShared({}, {:?})", self.room(), self.poll())
    }
}

/// What a decode shard is made with.
#[derive(Clone)]
pub struct DecodeShardConfig {
    /// Bounds.
    pub limits: Limits,
    /// Rooms' policy.
    pub policy: Arc<ReceiverPolicy>,
    /// Our PULL socket as peers reach it.
    pub endpoint: Endpoint,
    /// Our id: agent name or session id.
    pub name: String,
    /// Called when a room number is free again.
    pub freed: RoomFreed,
    /// Our registration as of now.
    pub registration: Arc<dyn Fn() -> Registration + Send + Sync>,
    /// [`Transport::inbound_dead`](crate::transport::Transport::inbound_dead).
    pub inbound_dead: Arc<dyn Fn(ProcessGeneration) -> bool + Send + Sync>,
    /// What we say of ourselves to peers of ours (H4); `None`: to everybody exactly what 0.5.23 says.
    pub extension: Option<ExtPeer>,
    /// Which process this is, for prefill ranks of ours.
    pub host: Option<HostIdentity>,
}

/// What a decode shard holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DecodeHeld {
    /// Rooms: live, and cleared but not released.
    pub rooms: usize,
    /// Room numbers that messages find.
    pub named: usize,
    /// ABORTs whose ACKs are awaited.
    pub generations: usize,
    /// Lookups under way.
    pub resolving: usize,
    /// Connection-pool keys registered with.
    pub registered: usize,
}

struct Entry {
    room: ReceiverRoom,
    shared: Arc<RoomShared>,
    bootstrap_addr: String,
    prefill_dp_rank: Option<u32>,
    armed: Option<Timestamp>,
    /// When to look for proof that does not come by itself; and when to ask others for it.
    look_at: Option<Timestamp>,
    ask_at: Timestamp,
    look_every: Duration,
    generation: Option<u64>,
    reported: bool,
    /// It stands in `rooms_awaiting_release`.
    held: bool,
    /// Its number was said to be free.
    freed: bool,
}

/// See the [module](crate::engine).
pub struct DecodeShard {
    config: DecodeShardConfig,
    geometry: u64,
    hooks: Arc<dyn ManagerHooks>,
    directory: Box<dyn Directory>,
    rooms: SlotMap<RoomKey, Entry>,
    by_room: HashMap<Room, RoomKey>,
    by_generation: HashMap<u64, RoomKey>,
    resolving: HashMap<u64, RoomKey>,
    /// Lookups that look for successors of prefill ranks which owe proof; and when each pool was asked for anew.
    looking: HashMap<u64, RoomKey>,
    looked: HashMap<String, Timestamp>,
    /// What the transport said last of each process.
    dead: HashMap<ProcessGeneration, (Timestamp, bool)>,
    next_token: u64,
    /// Connection-pool keys we registered with.
    registered: HashMap<String, Registered>,
    generation: u64,
    timers: Timers<RoomKey>,
    outgoing: Outgoing,
    work: VecDeque<(RoomKey, ReceiverEvent)>,
    effects: Vec<ReceiverEffect>,
    inbox: Vec<ControlEvent>,
    malformed: MalformedLog,
    held_back: u32,
    stats: Arc<Stats>,
}

impl Entry {
    /// When something is to be done for the room.
    fn due(&self) -> Option<Timestamp> {
        self.room.poll_timeout().into_iter().chain(self.look_at).min()
    }
}

/// The rank that writes the metadata slot: last PP stage, first CP rank, lowest TP rank of those that write. One, so that
/// a slot is never written again after it was read.
fn aux_writer(records: &[PrefillRecord]) -> Option<usize> {
    let place = |r: &PrefillRecord| (std::cmp::Reverse(r.pp_rank), r.cp_rank, r.tp_rank);
    records.iter().enumerate().filter(|(_, r)| !r.is_dummy).min_by_key(|(_, r)| place(r)).map(|(i, _)| i)
}

/// Messages handled in one step.
const MAX_INBOX: usize = 256;
/// Deadlines wait at most so many steps for messages that have arrived.
const MAX_HELD_BACK: u32 = 64;

impl DecodeShard {
    /// A shard without rooms.
    pub fn new(
        config: DecodeShardConfig,
        hooks: Arc<dyn ManagerHooks>,
        directory: Box<dyn Directory>,
        stats: Arc<Stats>,
    ) -> Self {
        let geometry = config.extension.map(|_| geometry(&(config.registration)()));
        Self {
            config,
            geometry: geometry.unwrap_or_default(),
            hooks,
            directory,
            rooms: SlotMap::with_key(),
            by_room: HashMap::new(),
            by_generation: HashMap::new(),
            resolving: HashMap::new(),
            looking: HashMap::new(),
            looked: HashMap::new(),
            dead: HashMap::new(),
            next_token: 0,
            registered: HashMap::new(),
            generation: 0,
            timers: Timers::new(),
            outgoing: Outgoing::default(),
            work: VecDeque::new(),
            effects: Vec::new(),
            inbox: Vec::new(),
            malformed: MalformedLog::default(),
            held_back: 0,
            stats,
        }
    }

    /// Its counters.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.stats
    }

    /// What it holds now. Everything but the registrations returns to zero when the rooms have ended.
    pub fn held(&self) -> DecodeHeld {
        DecodeHeld {
            rooms: self.rooms.len(),
            named: self.by_room.len(),
            generations: self.by_generation.len(),
            resolving: self.resolving.len() + self.looking.len(),
            registered: self.registered.values().filter(|r| !r.forgotten).count(),
        }
    }

    /// Deadlines it remembers, stale ones included. Bounded by the rooms it holds, but for a fixed number.
    pub fn pending_deadlines(&self) -> usize {
        self.timers.len()
    }

    /// Handle everything that is there.
    pub fn step(
        &mut self,
        now: Timestamp,
        control: &mut dyn ControlPlane,
        commands: &mut Vec<DecodeCommand>,
    ) -> NextWake {
        if mutant!(DeadlineBeatsCompletion) {
            self.timeouts(now, control);
        }
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
                    // Heartbeats decide whether the server is lost; the socket reconnects on its own. But a registration
                    // may be lost with it, and the next process there, or elsewhere, knows of none.
                    // It may take the registry seconds to know that process: so again each time that nobody is there.
                    tracing::debug!("connection to prefill {endpoint} broke, the next room registers again: {reason}");
                    if self.forget_all_at(&endpoint) {
                        self.stats.connections_lost.inc();
                    }
                }
            }
        }
        self.inbox = inbox;
        // What has arrived wins over a deadline, also when it does not fit into one step (D5).
        if again && self.held_back < MAX_HELD_BACK {
            self.held_back += 1;
        } else {
            self.held_back = 0;
            self.timeouts(now, control);
        }
        // After everything was sent: a connection that was made or closed in this step is to be looked after, too.
        let tick = control.tick(now);
        let again = control.flush() || again;
        let at = [self.timers.next(), self.outgoing.poll_timeout(), tick].into_iter().flatten().min();
        NextWake { at, again, ..NextWake::default() }
    }

    fn command(&mut self, now: Timestamp, command: DecodeCommand, control: &mut dyn ControlPlane) {
        let (shared, event) = match command {
            DecodeCommand::Create { shared, bootstrap_addr, prefill_dp_rank } => {
                return self.create(shared, bootstrap_addr, prefill_dp_rank);
            }
            DecodeCommand::Directory(event) => return self.directory_event(now, event, control),
            DecodeCommand::Publish(shared, spec) => (shared, ReceiverEvent::Publish(spec)),
            DecodeCommand::Abort(shared) => {
                if !shared.poll().is_terminal() {
                    self.stats.rooms_aborted.inc();
                }
                (shared, ReceiverEvent::Abort)
            }
            DecodeCommand::Fail(shared, failure) => (shared, ReceiverEvent::Fail(failure)),
            DecodeCommand::Clear(shared) => {
                let Some(key) = self.find(&shared) else { return };
                // From here on a late status finds nothing (B4); ACKs find the room by generation.
                self.by_room.remove(&shared.room());
                return self.drive(now, key, ReceiverEvent::Clear, control);
            }
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

    fn create(&mut self, shared: Arc<RoomShared>, bootstrap_addr: String, prefill_dp_rank: Option<u32>) {
        let room = shared.room();
        if self.by_room.contains_key(&room) {
            // The manager refuses this; whoever drives the shard must not harm the first one (F40).
            let failure = Failure::here(format!("room {room} is in use: its receiver was not cleared"));
            return shared.publish(KvPoll::Failed, true, Some(&failure), None);
        }
        let mut machine = ReceiverRoom::new(room, self.config.policy.clone());
        if self.config.extension.is_some() {
            machine = machine.checking_tags(shared.life(), self.geometry);
        }
        let entry = Entry {
            room: machine,
            shared,
            bootstrap_addr: bootstrap_addr.clone(),
            prefill_dp_rank,
            armed: None,
            look_at: None,
            ask_at: Timestamp::default(),
            look_every: proof::LOOK,
            generation: None,
            reported: false,
            held: false,
            freed: false,
        };
        let key = self.rooms.insert(entry);
        self.by_room.insert(room, key);
        self.stats.rooms_created.inc();
        self.stats.rooms_live.set(self.rooms.len() as u64);
        self.next_token += 1;
        let token = self.next_token;
        self.resolving.insert(token, key);
        self.directory.request(DirectoryRequest::Peers { token, room, bootstrap_addr, prefill_dp_rank });
    }

    fn directory_event(&mut self, now: Timestamp, event: DirectoryEvent, control: &mut dyn ControlPlane) {
        match event {
            DirectoryEvent::Peers { token, result } => {
                if let Some(key) = self.looking.remove(&token) {
                    return self.looked_for_successors(now, key, result.ok().as_deref(), control);
                }
                let Some(key) = self.resolving.remove(&token) else { return };
                let result = result.and_then(|peers| {
                    if let Err(reason) = self.register(now, &peers, control) {
                        // The next room asks for the addresses anew.
                        self.directory.request(DirectoryRequest::Forget { pool_key: peers.pool_key.clone() });
                        return Err(reason);
                    }
                    Ok(peers)
                });
                self.drive(now, key, ReceiverEvent::Peers(result), control);
            }
            // Prefill's.
            DirectoryEvent::DpRankRegistered { .. } => {}
            DirectoryEvent::NodeLost { bootstrap_addr, reason } => {
                self.stats.peers_lost.inc();
                let rooms: Vec<RoomKey> = self
                    .rooms
                    .iter()
                    .filter(|(_, e)| e.bootstrap_addr == bootstrap_addr && !e.room.poll().is_terminal())
                    .map(|(k, _)| k)
                    .collect();
                for key in rooms {
                    self.drive(now, key, ReceiverEvent::NodeLost(reason.clone()), control);
                }
                // After the rooms' ABORTs: a prefill whose HTTP server alone is gone still gets them.
                let lost: Vec<String> = self
                    .registered
                    .iter()
                    .filter(|(_, r)| r.peers.bootstrap_addr == bootstrap_addr)
                    .map(|(k, _)| k.clone())
                    .collect();
                for key in lost {
                    self.lose(&key, control);
                }
            }
        }
    }

    /// A message for a peer, with our extension if the peer is ours.
    fn extended(
        &self,
        kind: MessageKind,
        message: &Multipart,
        to: &PrefillRecord,
        life: Option<u64>,
        aux_writer: Option<bool>,
    ) -> Result<Multipart, WireError> {
        let mut message = message.clone();
        if let (Some(us), Some(peer)) = (self.config.extension, to.ext) {
            let host = self.config.host.filter(|_| kind == MessageKind::Registration);
            let to = Some(peer.process);
            let ext = Extension { to, room_generation: life, aux_writer, host, ..Extension::from(us) };
            self.hooks.dialect().attach_extension(kind, &mut message, &ext)?;
        }
        Ok(message)
    }

    /// Feed a room one event, and carry out everything that follows from it.
    fn drive(&mut self, now: Timestamp, key: RoomKey, event: ReceiverEvent, control: &mut dyn ControlPlane) {
        self.work.push_back((key, event));
        while let Some((key, event)) = self.work.pop_front() {
            let Some(entry) = self.rooms.get_mut(key) else { continue };
            let mut effects = std::mem::take(&mut self.effects);
            entry.room.handle_event(now, event, &mut self.generation, &mut effects);
            self.carry_out(now, key, &mut effects, control);
            self.effects = effects;
            self.after(now, key);
        }
    }

    fn carry_out(
        &mut self,
        now: Timestamp,
        key: RoomKey,
        effects: &mut Vec<ReceiverEffect>,
        control: &mut dyn ControlPlane,
    ) {
        let mut changed = false;
        for effect in effects.drain(..) {
            match effect {
                ReceiverEffect::Publish(spec) => {
                    let event = self.publish_metadata(key, &spec, control);
                    self.work.push_back((key, event));
                }
                ReceiverEffect::Abort { contacted, generation } => {
                    self.send_abort(now, key, contacted, generation, control);
                }
                ReceiverEffect::Changed => changed = true,
                ReceiverEffect::Released { proven } => {
                    changed = true;
                    if proven {
                        self.stats.released_with_proof.inc();
                    } else {
                        self.released_without_proof(key);
                    }
                }
                ReceiverEffect::Forget => self.forget_peers_of(key),
                ReceiverEffect::Stale => self.stats.messages_stale.inc(),
                ReceiverEffect::Violation(what) => {
                    self.stats.protocol_violations.inc();
                    if let Some(e) = self.rooms.get(key) {
                        tracing::debug!("room {}: ignored: {what}", e.room.room());
                    }
                }
            }
        }
        if changed {
            self.publish(key);
        }
    }

    fn released_without_proof(&mut self, key: RoomKey) {
        self.stats.released_without_proof.inc();
        let Some(e) = self.rooms.get(key) else { return };
        let ranks: Vec<String> = e.room.unacked().map(|r| r.to_string()).collect();
        for rank in e.room.unacked() {
            let record = e.room.peers().and_then(|p| p.records.iter().find(|r| r.rank == rank));
            record.map(|r| self.stats.peers.released_without_proof(&r.endpoint)).unwrap_or_default();
        }
        tracing::warn!(
            "room {}: pages released by timeout, without proof: no ABORT_ACK from prefill rank {} of {}",
            e.room.room(),
            ranks.join(", "),
            e.bootstrap_addr
        );
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
        if e.room.finished() && !std::mem::replace(&mut e.freed, true) {
            // Before a waiter hears of it: it may take the number at once.
            (self.config.freed)(&e.shared);
        }
        let releasable = e.room.releasable();
        self.stats.awaiting_release(&mut e.held, poll.is_terminal() && !releasable);
        e.shared.publish(poll, releasable, e.room.failure(), None);
    }

    fn publish_metadata(&self, key: RoomKey, spec: &PublishSpec, control: &mut dyn ControlPlane) -> ReceiverEvent {
        let failed = |contacted, error: String| ReceiverEvent::Published { contacted, error: Some(error) };
        let Some(e) = self.rooms.get(key) else { return failed(0, "the room is gone".into()) };
        let Some(peers) = e.room.peers() else {
            return failed(
                0,
                format!("Could not fetch prefill parallel info from bootstrap_addr: {}", e.bootstrap_addr),
            );
        };
        let writer = aux_writer(&peers.records);
        let mut messages: [Option<Multipart>; 2] = [None, None];
        for (i, record) in peers.records.iter().enumerate() {
            let slot = &mut messages[usize::from(record.is_dummy)];
            let message = match slot {
                Some(m) => m,
                None => match self.metadata_message(e, peers, spec, record.is_dummy) {
                    Ok(m) => slot.insert(m),
                    Err(error) => return failed(i, error),
                },
            };
            let life = Some(e.shared.life());
            let message = match self.extended(MessageKind::Metadata, message, record, life, Some(writer == Some(i))) {
                Ok(m) => m,
                Err(error) => return failed(i, format!("metadata cannot be encoded: {error}")),
            };
            let sent = match self.outgoing.is_stalled(&record.endpoint) {
                // The registration may be among what waits.
                true => Err("it takes no messages".to_owned()),
                false => control.send(&record.endpoint, message).map_err(|e| e.to_string()),
            };
            if let Err(error) = sent {
                self.stats.send_failures.inc();
                return failed(i, format!("send_metadata to prefill {} failed: {error}", record.endpoint));
            }
            self.stats.messages_out.inc();
        }
        ReceiverEvent::Published { contacted: peers.records.len(), error: None }
    }

    fn metadata_message(
        &self,
        e: &Entry,
        peers: &PrefillPeers,
        spec: &PublishSpec,
        is_dummy: bool,
    ) -> Result<Multipart, String> {
        let metadata = Metadata {
            room: e.room.room().get(),
            endpoint: self.config.endpoint.clone(),
            name: self.config.name.clone(),
            dst_pages: if is_dummy { Arc::from([]) } else { spec.pages.clone() },
            aux_index: Some(spec.aux_index),
            required_dst_info_num: peers.required_dst_info_num,
            state_indices: if is_dummy { Vec::new() } else { spec.state_indices.clone() },
            decode_prefix_len: Some(spec.decode_prefix_len),
            is_dummy,
            device_kv_indices: spec.device_kv_indices.clone(),
        };
        self.hooks.build_receiver_metadata_message(&metadata).map_err(|e| format!("metadata cannot be encoded: {e}"))
    }

    /// To the contacted ranks that have not acked.
    fn send_abort(
        &mut self,
        now: Timestamp,
        key: RoomKey,
        contacted: usize,
        generation: Option<u64>,
        control: &mut dyn ControlPlane,
    ) {
        let Some(e) = self.rooms.get_mut(key) else { return };
        let Some(peers) = e.room.peers().cloned() else { return };
        if let Some(generation) = generation {
            e.generation = Some(generation);
            self.by_generation.insert(generation, key);
        }
        let abort = Abort { room: e.room.room().get(), endpoint: Some(self.config.endpoint.clone()), generation };
        let message = match self.hooks.dialect().encode_abort(&abort) {
            Ok(m) => m,
            Err(error) => return tracing::warn!("ABORT of room {} not sent: {error}", e.room.room()),
        };
        let (life, unacked): (_, Vec<_>) = (Some(e.shared.life()), e.room.unacked().collect());
        // All of them, the first time.
        let owes = |r: &&PrefillRecord| generation.is_none() || unacked.contains(&r.rank);
        for record in peers.records.iter().take(contacted).filter(owes) {
            match self.extended(MessageKind::Abort, &message, record, life, None) {
                Ok(m) => {
                    self.outgoing.send(now, control, &record.endpoint, m, &self.stats);
                }
                Err(error) => tracing::warn!("ABORT to {} not sent: {error}", record.endpoint),
            }
        }
    }

    /// Deadlines and the end of a room.
    fn after(&mut self, now: Timestamp, key: RoomKey) {
        let Some(e) = self.rooms.get_mut(key) else { return };
        if !e.room.finished() {
            if e.room.armed_generation().is_none() {
                e.look_at = None;
            } else if e.look_at.is_none() && (e.room.awaits_proof() || self.config.extension.is_some()) {
                (e.look_at, e.ask_at) = (Some(now + proof::LOOK), now + proof::ASK);
            }
            let Some(at) = e.due() else { return };
            if e.armed.is_none_or(|armed| at < armed) {
                e.armed = Some(at);
                let rooms = &self.rooms;
                self.timers.arm(at, key, rooms.len(), |t, k| {
                    rooms.get(k).is_some_and(|e| e.armed == Some(t) && e.due().is_some())
                });
            }
            return;
        }
        let Some(e) = self.rooms.remove(key) else { return };
        if let Some(generation) = e.generation {
            self.by_generation.remove(&generation);
        }
        self.stats.rooms_live.set(self.rooms.len() as u64);
        if !e.freed {
            (self.config.freed)(&e.shared);
        }
    }

    fn timeouts(&mut self, now: Timestamp, control: &mut dyn ControlPlane) {
        while let Some(key) = self.timers.pop_due(now) {
            let Some(e) = self.rooms.get_mut(key) else { continue };
            e.armed = None;
            let waiting = e.room.poll() == KvPoll::WaitingForInput;
            let mut effects = std::mem::take(&mut self.effects);
            e.room.handle_timeout(now, &mut self.generation, &mut effects);
            if waiting && !effects.is_empty() {
                self.stats.rooms_timed_out.inc();
            }
            self.carry_out(now, key, &mut effects, control);
            self.effects = effects;
            self.look_for_proof_if_due(now, key, control);
            self.after(now, key);
        }
        for endpoint in self.outgoing.handle_timeout(now, control, &self.stats) {
            // It may have been the registration: the next room registers again.
            self.forget_all_at(&endpoint);
        }
    }
}
