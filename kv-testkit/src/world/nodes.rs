//! The ranks of a world: a shard with everything it talks to.

use std::collections::{BTreeSet, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::engine::{
    AuxRule, Connected, Connector, DecodeCommand, DecodeShard, DecodeShardConfig, PrefillCommand, PrefillShard,
    PrefillShardConfig, RoomShared, Stats,
};
use kv_core::ids::{PeerId, PrefillRank, ProcessGeneration, Room};
use kv_core::layout::LocalLayout;
use kv_core::memory::MemoryOwner;
use kv_core::net::Endpoint;
use kv_core::room::{ReceiverPolicy, SenderPolicy};
use kv_core::time::Timestamp;
use kv_core::transport::{PeerDescriptor, Transport};
use kv_core::wire::Registration;

use super::spec::{AUX_LEN, WorldSpec, process};
use crate::directory::Answer;
use crate::net::SimControl;
use crate::{FakeDirectory, FakeFabric, FakeTransport, ManualClock, SimNet, TestMemory};

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Default)]
struct Connects {
    hold: bool,
    waiting: VecDeque<(u64, PeerDescriptor)>,
    disconnected: Vec<PeerId>,
}

/// Connects when the world steps; [`hold`](Self::hold) stands for a connect that takes its time.
#[derive(Clone)]
pub struct SimConnector {
    transport: Arc<FakeTransport>,
    state: Arc<Mutex<Connects>>,
}

impl SimConnector {
    fn new(transport: Arc<FakeTransport>) -> Self {
        Self { transport, state: Arc::default() }
    }

    /// Let attempts wait, or go on.
    pub fn hold(&self, hold: bool) {
        lock(&self.state).hold = hold;
    }

    /// Attempts that wait.
    pub fn waiting(&self) -> usize {
        lock(&self.state).waiting.len()
    }

    /// Every peer that was let go of.
    pub fn disconnected(&self) -> Vec<PeerId> {
        lock(&self.state).disconnected.clone()
    }

    fn finished(&self) -> Vec<Connected> {
        let mut state = lock(&self.state);
        if state.hold {
            return Vec::new();
        }
        let waiting = std::mem::take(&mut state.waiting);
        drop(state);
        waiting.into_iter().map(|(token, peer)| Connected { token, result: self.transport.connect(&peer) }).collect()
    }
}

impl Connector for SimConnector {
    fn connect(&mut self, token: u64, peer: PeerDescriptor) {
        lock(&self.state).waiting.push_back((token, peer));
    }

    fn disconnect(&mut self, peer: PeerId) {
        lock(&self.state).disconnected.push(peer);
        self.transport.disconnect(peer);
    }
}

/// Rooms whose numbers a shard gave back, with their lives.
pub type Freed = Arc<Mutex<Vec<(Room, u64)>>>;

/// One prefill rank.
pub struct PrefillNode {
    /// Which process: its transport's name.
    pub name: String,
    /// Its number in messages.
    pub rank: PrefillRank,
    /// (TP, CP, PP) rank.
    pub place: (u32, u32, u32),
    /// Its control socket.
    pub endpoint: Endpoint,
    /// Its transport: script the writes here.
    pub transport: Arc<FakeTransport>,
    /// Its connections.
    pub connector: SimConnector,
    /// The shard itself.
    pub shard: PrefillShard,
    /// Its counters.
    pub stats: Arc<Stats>,
    /// KV memory, entry after entry.
    pub kv: Arc<TestMemory>,
    /// Aux memory.
    pub aux: Arc<TestMemory>,
    /// KV entries.
    pub entries: u32,
    /// Room numbers given back.
    pub freed: Freed,
    /// When it wants to be stepped next.
    pub wake: Option<Timestamp>,
    /// Not stepped: a process that is stopped.
    pub stopped: bool,
    control: SimControl,
    commands: Arc<Mutex<Vec<PrefillCommand>>>,
    pub(crate) entry_len: usize,
    page_len: usize,
}

impl PrefillNode {
    pub(crate) fn new(
        spec: &WorldSpec,
        net: &SimNet,
        fabric: &FakeFabric,
        rank: PrefillRank,
        place: (u32, u32, u32),
        name: &str,
    ) -> Self {
        let endpoint = spec.shape.endpoint(rank);
        let mut transport = fabric.builder(name);
        transport.capabilities_mut().max_op_bytes = spec.max_op_bytes;
        transport.capabilities_mut().checks_destinations = spec.checks_destinations;
        let transport = transport.build();
        let entry_len = spec.pages * spec.page_len;
        let entries = spec.prefill_entries();
        let kv = TestMemory::patterned(entries as usize * entry_len, 1000 + u64::from(rank.0));
        let aux = TestMemory::patterned(spec.aux_rows * AUX_LEN, 2000 + u64::from(rank.0));
        let regions = [&kv, &aux].map(|m| transport.register(m.clone()).expect("test memory"));
        let layout = spec.prefill_layout((place.0, place.2), &regions[0], &regions[1]);
        let layout = LocalLayout::new(layout, regions).expect("a layout that fits");
        let commands: Arc<Mutex<Vec<PrefillCommand>>> = Arc::default();
        let (queue, freed) = (commands.clone(), Freed::default());
        let stats = Arc::new(Stats::default());
        let connector = SimConnector::new(transport.clone());
        let gone = freed.clone();
        let config = PrefillShardConfig {
            limits: spec.limits.clone(),
            policy: Arc::new(SenderPolicy {
                bootstrap_timeout: spec.bootstrap_timeout,
                failed_status: spec.failed_status,
                max_destinations: spec.limits.max_peers_per_room,
                max_chunks: spec.limits.max_chunks_per_room,
            }),
            early_timeout: spec.early_timeout,
            tombstone_timeout: spec.tombstone_timeout,
            rank,
            freed: Arc::new(move |r: &RoomShared| lock(&gone).push((r.room(), r.life()))),
            aux_rule: AuxRule {
                attn_tp: (spec.shape.prefill_tp, place.0),
                cp_rank: place.1,
                last_stage: place.2 + 1 == spec.shape.prefill_pp,
                kv_entries: entries as usize,
            },
            max_op_bytes: spec.max_op_bytes,
            unknown_slots: transport.capabilities().unknown_slots(),
            extension: spec.prefill_ext.then(|| process(name)),
            commands: Arc::new(move |c| lock(&queue).push(c)),
        };
        let shard = PrefillShard::new(
            config,
            spec.hooks.clone(),
            Arc::new(layout),
            transport.lane().expect("a lane"),
            Box::new(connector.clone()),
            stats.clone(),
        );
        let control = net.bind(&endpoint);
        Self {
            name: name.into(),
            rank,
            place,
            endpoint,
            transport,
            connector,
            shard,
            stats,
            kv,
            aux,
            entries,
            freed,
            wake: None,
            stopped: false,
            control,
            commands,
            entry_len,
            page_len: spec.page_len,
        }
    }

    /// Put a command in line.
    pub fn push(&self, command: PrefillCommand) {
        lock(&self.commands).push(command);
    }

    /// Bytes of a page.
    pub fn page(&self, entry: u32, page: i32) -> Vec<u8> {
        self.kv.read(entry as usize * self.entry_len + page as usize * self.page_len, self.page_len)
    }

    /// Bytes of an aux row.
    pub fn aux_row(&self, row: usize) -> Vec<u8> {
        self.aux.read(row * AUX_LEN, AUX_LEN)
    }

    pub(super) fn step(&mut self, now: Timestamp) -> bool {
        if self.stopped {
            return false;
        }
        let before = self.stats.snapshot();
        self.step_once(now) || before != self.stats.snapshot()
    }

    /// Commands wait, or a connection that has been made.
    pub(crate) fn has_commands(&self) -> bool {
        let connects = lock(&self.connector.state);
        !lock(&self.commands).is_empty() || (!connects.hold && !connects.waiting.is_empty())
    }

    /// One step of the shard. True when it had commands, or wants to be called again at once.
    pub(crate) fn step_once(&mut self, now: Timestamp) -> bool {
        let mut commands = std::mem::take(&mut *lock(&self.commands));
        commands.extend(self.connector.finished().into_iter().map(PrefillCommand::Connected));
        let busy = !commands.is_empty();
        let next = self.shard.step(now, &mut self.control, &mut commands);
        self.wake = next.at;
        // A connection that was asked for in this step has been made by the next one.
        busy || next.again || self.has_commands()
    }
}

/// One decode rank.
pub struct DecodeNode {
    /// Which process generation: its agent name.
    pub name: String,
    /// Its control socket.
    pub endpoint: Endpoint,
    /// Its transport, a target only.
    pub transport: Arc<FakeTransport>,
    /// How it finds prefill.
    pub directory: FakeDirectory,
    /// The shard itself.
    pub shard: DecodeShard,
    /// Its counters.
    pub stats: Arc<Stats>,
    /// KV memory, entry after entry; zero until written.
    pub kv: Arc<TestMemory>,
    /// Aux memory; zero until written.
    pub aux: Arc<TestMemory>,
    /// KV entries.
    pub entries: u32,
    /// Commands for its next step.
    pub commands: Vec<DecodeCommand>,
    /// Room numbers given back.
    pub freed: Freed,
    /// Prefill processes that its transport knows to be dead.
    pub dead_sources: Arc<Mutex<BTreeSet<ProcessGeneration>>>,
    /// When it wants to be stepped next.
    pub wake: Option<Timestamp>,
    /// Not stepped: a process that is stopped.
    pub stopped: bool,
    control: SimControl,
    pub(crate) entry_len: usize,
    page_len: usize,
    layout: LocalLayout,
}

impl DecodeNode {
    pub(crate) fn new(
        spec: &WorldSpec,
        clock: &ManualClock,
        net: &SimNet,
        fabric: &FakeFabric,
        rank: u32,
        name: &str,
    ) -> Self {
        Self::at_endpoint(spec, clock, net, fabric, rank, name, spec.decode_endpoint(rank))
    }

    pub(crate) fn at_endpoint(
        spec: &WorldSpec,
        clock: &ManualClock,
        net: &SimNet,
        fabric: &FakeFabric,
        rank: u32,
        name: &str,
        endpoint: Endpoint,
    ) -> Self {
        let transport = fabric.transport(name);
        let entry_len = spec.decode_pages() * spec.page_len;
        let entries = spec.decode_entries();
        let kv = TestMemory::new(entries as usize * entry_len);
        let aux = TestMemory::new(spec.aux_rows * AUX_LEN);
        let regions = [&kv, &aux].map(|m| transport.register(m.clone()).expect("test memory"));
        let layout = spec.decode_layout(rank, &regions[0], &regions[1]);
        let layout = LocalLayout::new(layout, regions).expect("a layout that fits");
        let registration = layout.to_registration(endpoint.clone(), name, transport.local_metadata());
        let directory = FakeDirectory::new(clock);
        directory.answer(&spec.shape.bootstrap_addr, Answer::Peers(Arc::new(spec.peers(rank))));
        let (freed, stats) = (Freed::default(), Arc::new(Stats::default()));
        let gone = freed.clone();
        let dead_sources: Arc<Mutex<BTreeSet<ProcessGeneration>>> = Arc::default();
        let known_dead = dead_sources.clone();
        let config = DecodeShardConfig {
            limits: spec.limits.clone(),
            policy: Arc::new(ReceiverPolicy { waiting_timeout: spec.waiting_timeout, release: spec.release }),
            endpoint: endpoint.clone(),
            name: name.into(),
            freed: Arc::new(move |r: &RoomShared| lock(&gone).push((r.room(), r.life()))),
            registration: Arc::new(move || registration.clone()),
            inbound_dead: Arc::new(move |process| lock(&known_dead).contains(&process)),
            extension: spec.decode_ext.then(|| process(name)),
            host: None,
        };
        let shard = DecodeShard::new(config, spec.hooks.clone(), Box::new(directory.clone()), stats.clone());
        let control = net.bind(&endpoint);
        Self {
            name: name.into(),
            endpoint,
            transport,
            directory,
            shard,
            stats,
            kv,
            aux,
            entries,
            commands: Vec::new(),
            dead_sources,
            freed,
            wake: None,
            stopped: false,
            control,
            entry_len,
            page_len: spec.page_len,
            layout,
        }
    }

    /// What it registers with prefill.
    pub fn registration(&self) -> Registration {
        self.layout.to_registration(self.endpoint.clone(), &*self.name, self.transport.local_metadata())
    }

    pub(crate) fn at(&self, entry: u32, page: i32) -> usize {
        entry as usize * self.entry_len + page as usize * self.page_len
    }

    /// Bytes of a page.
    pub fn page(&self, entry: u32, page: i32) -> Vec<u8> {
        self.kv.read(self.at(entry, page), self.page_len)
    }

    /// Bytes of an aux row.
    pub fn aux_row(&self, row: usize) -> Vec<u8> {
        self.aux.read(row * AUX_LEN, AUX_LEN)
    }

    /// From now on these pages are somebody else's: a write that lands there is a violation.
    pub fn guard_pages(&self, fabric: &FakeFabric, pages: &[i32], why: &str) {
        for entry in 0..self.entries {
            for page in pages {
                fabric.guard(self.kv.base() + self.at(entry, *page) as u64, self.page_len as u64, why);
            }
        }
    }

    pub(super) fn step(&mut self, now: Timestamp) -> bool {
        if self.stopped {
            return false;
        }
        let before = self.stats.snapshot();
        self.step_once(now) || before != self.stats.snapshot()
    }

    /// One step of the shard. True when it had commands, or wants to be called again at once.
    pub(crate) fn step_once(&mut self, now: Timestamp) -> bool {
        self.commands.extend(self.directory.take_events().into_iter().map(DecodeCommand::Directory));
        let busy = !self.commands.is_empty();
        let next = self.shard.step(now, &mut self.control, &mut self.commands);
        self.wake = next.at;
        busy || next.again
    }
}
