//! The transport: what its threads share, and the [`Transport`] contract.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::control::local_ip::local_ip;
use kv_core::host::HostIdentity;
use kv_core::ids::{PeerId, RegionId};
use kv_core::memory::{MemoryKind, MemoryOwner, RegisteredRegion};
use kv_core::transport::{
    Capabilities, Lane, PeerDescriptor, Transport, TransportError, TransportErrorKind as ErrorKind,
};
use mooncake_sys::{Api, Batch};

use crate::config::MooncakeConfig;
use crate::engine::{Engine, Task};
use crate::environment::{self, prepare_environment};
use crate::flight::{Flight, Stand, look_again};
use crate::keeper::Keeper;
use crate::lane::{Change, LaneShared, MooncakeLane};
use crate::library::LibraryInfo;
use crate::peer::{Peer, State};
use crate::stats::{self, Counters, Stats};
use crate::window::Window;

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the lanes, the regions and the keeper share. The engine ends with the last of them.
pub(crate) struct Core {
    pub engine: Engine,
    pub config: MooncakeConfig,
    pub op_timeout: Duration,
    pub counters: Counters,
    pub(crate) host: HostIdentity,
    pub(crate) keeper: Keeper,
    pub(crate) next_peer: AtomicU64,
    next_region: AtomicU32,
    pub(crate) peers: Mutex<HashMap<PeerId, Arc<Peer>>>,
    /// Generations that are forgotten, and whose processes still run: the library has connections to them.
    parted: Mutex<HashMap<PeerId, Arc<Peer>>>,
    /// One connection attempt a session at a time.
    connecting: Mutex<HashMap<String, Weak<Mutex<()>>>>,
    /// What the library has outstanding, a session: its generations share the library's queue.
    windows: Mutex<HashMap<String, Weak<Window>>>,
    lanes: Mutex<Vec<Weak<LaneShared>>>,
    /// What lanes that are gone had not settled.
    orphans: Mutex<Vec<Flight>>,
    /// Last words to peers that died: what connections there were to them break over these, and are closed.
    farewells: Mutex<Vec<(Batch, VecDeque<u32>)>>,
    /// Our session id was given out.
    exported: AtomicU64,
}

impl Core {
    pub fn peer(&self, id: PeerId) -> Option<Arc<Peer>> {
        lock(&self.peers).get(&id).cloned()
    }

    pub fn is_ours(self: &Arc<Self>, region: &RegisteredRegion) -> bool {
        region.registration().downcast_ref::<Registered>().is_some_and(|r| Arc::ptr_eq(&r.core, self))
    }

    pub fn window(&self, session: &str) -> Arc<Window> {
        let mut windows = lock(&self.windows);
        windows.retain(|_, w| w.strong_count() > 0);
        windows.get(session).and_then(Weak::upgrade).unwrap_or_else(|| {
            let fresh = Arc::new(Window::new(Instant::now()));
            windows.insert(session.to_owned(), Arc::downgrade(&fresh));
            fresh
        })
    }

    fn notify_lanes(&self, peer: &Arc<Peer>, lost_now: bool) {
        let change = Change { peer: Arc::clone(peer), lost_now };
        let mut lanes = lock(&self.lanes);
        lanes.retain(|l| l.strong_count() > 0);
        lanes.iter().filter_map(Weak::upgrade).for_each(|l| l.changed(change.clone()));
    }

    /// Nothing more is posted to it. What is in flight goes on and is looked at further.
    pub fn lose(&self, peer: &Arc<Peer>, error: TransportError) {
        {
            let mut state = peer.lock_state();
            if !matches!(*state, State::Live) {
                return;
            }
            *state = State::Lost(error.clone());
        }
        let news = !peer.closing.load(Ordering::Acquire);
        if news {
            tracing::info!(peer = peer.name, error = %error, "peer lost");
            stats::add(&self.counters.peers_lost, 1);
        }
        self.notify_lanes(peer, news);
        self.forget_if_over(peer);
    }

    /// Its process has ended: what the library has seen end can land no more.
    pub fn die(&self, peer: &Arc<Peer>, error: TransportError) {
        let news = {
            let mut state = peer.lock_state();
            if matches!(*state, State::Dead(_)) {
                return;
            }
            let news = matches!(*state, State::Live) && !peer.closing.load(Ordering::Acquire);
            *state = State::Dead(error);
            news
        };
        stats::add(&self.counters.peers_lost, news.into());
        stats::add(&self.counters.peers_dead, 1);
        tracing::info!(peer = peer.name, "the peer's process has ended");
        self.notify_lanes(peer, news);
        self.hang_up(peer);
        self.keeper.wake();
        self.forget_if_over(peer);
    }

    /// The library would hold its connections to a process that is gone until they are used again.
    fn hang_up(&self, peer: &Arc<Peer>) {
        let said = peer.described();
        let addr = said.first().filter(|_| said.protocol == "tcp");
        let replaced = lock(&self.peers).values().any(|p| p.name == peer.name && p.live());
        if let Some(addr) = addr.filter(|_| !replaced) {
            match self.engine.poke(peer.segment, addr) {
                Ok(farewell) => lock(&self.farewells).push(farewell),
                Err(why) => tracing::debug!(peer = peer.name, why, "its connections are not closed"),
            }
        }
    }

    /// Whether some were not seen to end.
    fn sweep_farewells(&self) -> bool {
        let mut farewells = lock(&self.farewells);
        farewells.retain_mut(|(batch, open)| {
            open.retain(|number| !matches!(self.engine.task(*batch, *number), Task::Done | Task::Failed(_)));
            if open.is_empty() {
                self.engine.free(*batch);
            }
            !open.is_empty()
        });
        !farewells.is_empty()
    }

    /// Keep what a lane that is gone had not settled; the keeper looks at it.
    pub fn adopt(&self, flights: Vec<Flight>) {
        lock(&self.orphans).extend(flights);
        self.keeper.wake();
    }

    /// Look at what nobody else looks at; whether any of it was not seen to end.
    pub fn sweep(&self) -> bool {
        let farewells = self.sweep_farewells();
        self.sweep_orphans() | farewells
    }

    fn sweep_orphans(&self) -> bool {
        let now = Instant::now();
        let mut over = Vec::new();
        let mut lost = Vec::new();
        let going = {
            let mut orphans = lock(&self.orphans);
            for flight in orphans.iter_mut().filter(|f| f.going()) {
                flight.sweep(self, &mut 0, now);
            }
            if orphans.iter().any(|f| f.fresh() && f.peer.process.is_none()) {
                look_again(self, orphans.iter());
            }
            for flight in orphans.iter_mut() {
                flight.judge();
                let news = flight.failure().filter(|_| flight.peer.live());
                lost.extend(news.cloned().map(|e| (Arc::clone(&flight.peer), e)));
                if flight.stand() == Stand::Failed {
                    flight.shed(self);
                }
            }
            over.extend(orphans.extract_if(.., |f| match f.stand() {
                Stand::Done | Stand::CutShort => true,
                Stand::Failed => f.peer.dead(),
                Stand::Open => false,
            }));
            orphans.iter().any(Flight::going)
        };
        for flight in over {
            self.settled();
            flight.release(self);
        }
        lost.into_iter().for_each(|(peer, error)| self.lose(&peer, error));
        going
    }

    /// A generation that nobody writes to any more, and of which nothing is open, is forgotten.
    pub fn forget_if_over(&self, peer: &Arc<Peer>) {
        let gone = {
            let mut peers = lock(&self.peers);
            let over = peer.closing.load(Ordering::SeqCst) && peer.open.load(Ordering::SeqCst) == 0;
            over && peers.remove(&peer.id).is_some()
        };
        if gone {
            stats::sub(&self.counters.peers, 1);
            let runs = peer.process.as_ref().is_some_and(|p| !p.exited()) && !peer.dead();
            if runs {
                self.supersede_parted(peer);
                lock(&self.parted).insert(peer.id, Arc::clone(peer));
            }
            // It may have ended just now.
            if !runs || peer.process.as_ref().is_some_and(|p| p.exited()) {
                self.part(peer.id);
                self.keeper.unwatch(peer);
            }
        }
    }

    /// Of generations of one process at one session the last one sees to the library's connections, when it ends.
    pub(crate) fn supersede_parted(&self, by: &Peer) {
        let older = |p: &Arc<Peer>| p.name == by.name && p.host == by.host && p.id != by.id;
        let gone: Vec<_> = lock(&self.parted).extract_if(|_, p| older(p)).collect();
        gone.iter().for_each(|(_, p)| self.keeper.unwatch(p));
    }

    /// The process of a generation that is forgotten has ended.
    fn part(&self, id: PeerId) {
        let parted = lock(&self.parted).remove(&id);
        if let Some(peer) = parted {
            self.hang_up(&peer);
            self.keeper.unwatch(&peer);
        }
    }

    /// An op that was unresolved is proven quiet.
    pub fn settled(&self) {
        stats::add(&self.counters.ops_settled, 1);
        stats::sub(&self.counters.ops_retained, 1);
    }

    /// The process of a peer has ended.
    pub fn process_ended(&self, id: PeerId) {
        let ended = |p: &Arc<Peer>| p.process.as_ref().is_some_and(|h| h.exited());
        if let Some(peer) = self.peer(id).filter(ended) {
            let text = format!("the process of {} has ended", peer.name);
            self.die(&peer, TransportError::new(ErrorKind::PeerLost, text));
        }
        self.part(id);
    }

    fn connect_lock(&self, name: &str) -> Arc<Mutex<()>> {
        let mut connecting = lock(&self.connecting);
        connecting.retain(|_, l| l.strong_count() > 0);
        let entry = connecting.entry(name.to_owned()).or_default();
        entry.upgrade().unwrap_or_else(|| {
            let fresh = Arc::new(Mutex::new(()));
            *entry = Arc::downgrade(&fresh);
            fresh
        })
    }
}

impl Drop for Core {
    fn drop(&mut self) {
        self.keeper.stop();
    }
}

/// A registration, ended when its region is dropped.
struct Registered {
    core: Arc<Core>,
    memory: Arc<dyn MemoryOwner>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let (addr, len) = (self.memory.base(), self.memory.len());
        let ended = self.core.engine.unregister(addr);
        if let Err(code) = ended {
            tracing::warn!(code = code.name(), "a registration could not be ended");
        }
        let exported = self.core.exported.load(Ordering::SeqCst) > 0;
        if ended.is_err() || (exported && self.core.config.keep_exported) {
            tracing::info!(
                "{len} bytes at {addr:#x} stay mapped: a peer may know them, and Mooncake does not stop a write that has \
                 begun"
            );
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

/// Mooncake as a transport. See the crate's documentation.
///
/// Threads: the library's own (its two listeners, its I/O, a Go runtime) and one keeper, which sleeps. They stop when the
/// transport, its lanes and all regions registered with it are dropped, but for Go's. That takes up to a second.
pub struct MooncakeTransport {
    core: Arc<Core>,
    capabilities: Capabilities,
}

impl MooncakeTransport {
    /// Open the library and make an engine.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: the library is not to be had, with every place that was tried; or it cannot start.
    pub fn new(config: MooncakeConfig) -> Result<Self, TransportError> {
        prepare_environment();
        let unavailable = |e: &dyn std::fmt::Display| TransportError::new(ErrorKind::Unavailable, e);
        let api = Api::open(config.library.as_deref()).map_err(|e| unavailable(&e))?;
        let host = match &config.host {
            Some(host) => host.clone(),
            None => local_ip().map_err(|e| unavailable(&e))?,
        };
        let engine = Engine::new(api, &host)?;
        let keeper = Keeper::new().map_err(|e| unavailable(&format!("epoll: {e}")))?;
        let core = Arc::new(Core {
            op_timeout: config.op_timeout.unwrap_or_else(environment::above_the_library),
            engine,
            counters: Counters::default(),
            host: HostIdentity::local(),
            keeper,
            next_peer: AtomicU64::new(1),
            next_region: AtomicU32::new(0),
            peers: Mutex::default(),
            parted: Mutex::default(),
            connecting: Mutex::default(),
            windows: Mutex::default(),
            lanes: Mutex::default(),
            orphans: Mutex::default(),
            farewells: Mutex::default(),
            exported: AtomicU64::new(0),
            config,
        });
        core.keeper.start(Arc::downgrade(&core)).map_err(|e| unavailable(&format!("start a thread: {e}")))?;
        let capabilities = Capabilities {
            name: "mooncake",
            host_memory: true,
            // The build for Ascend reads and writes no other device's memory.
            device_memory: !core.engine.api().is_for_ascend(),
            max_op_bytes: Some(core.config.max_op_bytes.max(1)),
            submit_blocks: environment::connects_each_time(),
            // Peers that do not acknowledge are refused.
            done_proves_placement: true,
            settles_unresolved: false,
            // A write that has begun goes on.
            unregister_revokes: false,
            checks_destinations: true,
        };
        Ok(Self { core, capabilities })
    }

    /// Counters.
    pub fn stats(&self) -> Stats {
        self.core.counters.read()
    }

    /// What was loaded.
    pub fn library(&self) -> LibraryInfo {
        LibraryInfo::of(&self.core.engine)
    }

    /// Whether the death of this peer's process can be seen from here.
    pub fn watches(&self, peer: PeerId) -> bool {
        self.core.peer(peer).is_some_and(|p| p.process.is_some())
    }

    /// Tasks that the library has for this peer, over all lanes, and that were not seen to end.
    pub fn tasks_outstanding(&self, peer: PeerId) -> usize {
        self.core.peer(peer).map_or(0, |p| p.window.outstanding())
    }
}

impl Transport for MooncakeTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// The session id, `host:port`.
    fn local_name(&self) -> &str {
        self.core.engine.name()
    }

    /// Nothing: the session id says all, and peers ask behind it.
    fn local_metadata(&self) -> Bytes {
        self.core.exported.fetch_add(1, Ordering::SeqCst);
        Bytes::new()
    }

    fn register(&self, memory: Arc<dyn MemoryOwner>) -> Result<Arc<RegisteredRegion>, TransportError> {
        let (addr, len, kind) = (memory.base(), memory.len(), memory.kind());
        let invalid = |text: String| TransportError::new(ErrorKind::InvalidArgument, text);
        if len == 0 || addr == 0 || addr.checked_add(len).is_none() {
            return Err(invalid(format!("{len} bytes at {addr:#x} cannot be registered")));
        }
        if kind != MemoryKind::Dram && !self.capabilities.device_memory {
            let path = self.core.engine.api().path().display().to_string();
            return Err(invalid(format!("{path} takes host memory alone, not {kind:?}")));
        }
        self.core.engine.register(addr, len, kind).map_err(|code| {
            invalid(format!("Mooncake does not register {len} bytes of {kind:?} at {addr:#x}: {}", code.name()))
        })?;
        let registered = Registered { core: Arc::clone(&self.core), memory: Arc::clone(&memory) };
        let id = RegionId(self.core.next_region.fetch_add(1, Ordering::Relaxed));
        Ok(Arc::new(RegisteredRegion::new(id, memory, Box::new(registered))))
    }

    fn connect(&self, peer: &PeerDescriptor) -> Result<PeerId, TransportError> {
        let turn = self.core.connect_lock(&peer.name);
        let _turn = lock(&turn);
        self.core.connect(peer)
    }

    fn disconnect(&self, id: PeerId) {
        let Some(peer) = self.core.peer(id) else { return };
        peer.closing.store(true, Ordering::SeqCst);
        self.core.forget_if_over(&peer);
    }

    fn lane(&self) -> Result<Box<dyn Lane>, TransportError> {
        let unavailable = |e: std::io::Error| TransportError::new(ErrorKind::Unavailable, format!("a lane: {e}"));
        let shared = LaneShared::new().map_err(unavailable)?;
        lock(&self.core.lanes).push(Arc::downgrade(&shared));
        Ok(Box::new(MooncakeLane::new(Arc::clone(&self.core), shared).map_err(unavailable)?))
    }
}
