//! The transport: what its threads share, and the [`Transport`] contract.

use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use kv_core::host::{HostIdentity, ProcessHandle};
use kv_core::ids::{PeerId, RegionId};
use kv_core::memory::{MemoryKind, MemoryOwner, RegisteredRegion};
use kv_core::transport::{
    Capabilities, Lane, PeerDescriptor, Transport, TransportError, TransportErrorKind as ErrorKind,
};
use nixl_capi_sys::Api;

use crate::agent::{Agent, Progress, Registration};
use crate::config::NixlConfig;
use crate::environment::prepare_environment;
use crate::keeper::Keeper;
use crate::lane::{Change, Flight, LaneShared, NixlLane};
use crate::library::LibraryInfo;
use crate::metadata::{self, EndsEarly};
use crate::peer::{Peer, State};
use crate::prepared::{Budget, Lists};
use crate::stats::{self, Counters, Stats};

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the lanes, the regions and the keeper share. The agent ends with the last of them.
pub(crate) struct Core {
    pub agent: Arc<Agent>,
    /// Entries of ours that were prepared, by region.
    pub lists: Lists,
    pub budget: Arc<Budget>,
    pub config: NixlConfig,
    pub counters: Counters,
    name: String,
    host: HostIdentity,
    keeper: Keeper,
    next_peer: AtomicU64,
    next_region: AtomicU32,
    peers: Mutex<HashMap<PeerId, Arc<Peer>>>,
    /// Generations that the library has metadata of, by the name it knows them by.
    loaded: Mutex<HashMap<CString, Arc<Peer>>>,
    /// One connection attempt a name at a time.
    connecting: Mutex<HashMap<String, Weak<Mutex<()>>>>,
    lanes: Mutex<Vec<Weak<LaneShared>>>,
    /// What lanes that are gone had not settled.
    orphans: Mutex<Vec<Flight>>,
    /// Regions of transfers that were in progress when their peer died. The bytes can reach nobody, but the library may
    /// still read them: they stay mapped for the life of the process. And so does the agent,
    /// which they hold: the library waits for such transfers when an agent ends; over shared memory for ever.
    graveyard: Mutex<HashMap<RegionId, Arc<RegisteredRegion>>>,
    metadata: Mutex<Option<Bytes>>,
    /// How often metadata was given out.
    exports: AtomicU64,
    /// The library writes metadata as we know it.
    known_format: bool,
}

impl Core {
    pub fn peer(&self, id: PeerId) -> Option<Arc<Peer>> {
        lock(&self.peers).get(&id).cloned()
    }

    pub fn is_ours(self: &Arc<Self>, region: &RegisteredRegion) -> bool {
        region.registration().downcast_ref::<Registered>().is_some_and(|r| Arc::ptr_eq(&r.core, self))
    }

    fn notify_lanes(&self, peer: &Arc<Peer>, lost_now: bool) {
        let change = Change { peer: Arc::clone(peer), lost_now };
        let mut lanes = lock(&self.lanes);
        lanes.retain(|l| l.strong_count() > 0);
        lanes.iter().filter_map(Weak::upgrade).for_each(|l| l.changed(change.clone()));
    }

    /// Forget the library's metadata of a generation and close the endpoint, unless a later generation has its name.
    fn unload(&self, peer: &Arc<Peer>) {
        let mut loaded = lock(&self.loaded);
        if loaded.get(&peer.name).is_some_and(|p| Arc::ptr_eq(p, peer)) {
            loaded.remove(&peer.name);
            peer.lists.forget(|_| true);
            if let Err(code) = self.agent.invalidate(&peer.name) {
                tracing::debug!(peer = ?peer.name, status = code.name(), "metadata was not known to the library");
            }
        }
    }

    /// Nothing more is posted to it. What is in flight goes on and is looked at further: only success, or death, proves
    /// anything.
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
            tracing::info!(peer = ?peer.name, error = %error, "peer lost");
            stats::add(&self.counters.peers_lost, 1);
        }
        self.notify_lanes(peer, news);
        self.landed(peer);
        self.forget_if_over(peer);
    }

    /// Nothing more can end well at a generation that is lost: close its endpoint, which is of no use any more.
    pub fn landed(&self, peer: &Arc<Peer>) {
        if peer.flying.load(Ordering::SeqCst) == 0 && !peer.live() {
            self.unload(peer);
        }
    }

    /// Its process has ended: close the endpoint, which settles everything.
    pub fn die(&self, peer: &Arc<Peer>, error: TransportError) {
        let mut orphans: Vec<Flight> = lock(&self.orphans).extract_if(.., |f| f.peer.id == peer.id).collect();
        for flight in &mut orphans {
            NixlLane::sweep(self, flight);
        }
        let news = {
            let mut state = peer.lock_state();
            if matches!(*state, State::Dead(_)) {
                drop(state);
                return self.adopt(orphans);
            }
            let news = matches!(*state, State::Live) && !peer.closing.load(Ordering::Acquire);
            *state = State::Lost(error.clone());
            news
        };
        // First the endpoint: what is called dead has no way to it any more.
        self.unload(peer);
        *peer.lock_state() = State::Dead(error);
        stats::add(&self.counters.peers_lost, news.into());
        stats::add(&self.counters.peers_dead, 1);
        tracing::info!(peer = ?peer.name, "the peer's process has ended");
        orphans.extend(lock(&self.orphans).extract_if(.., |f| f.peer.id == peer.id));
        for flight in orphans {
            self.orphan_settled(flight);
        }
        self.notify_lanes(peer, news);
        self.forget_if_over(peer);
    }

    /// Let go of a transfer whose peer is proven dead, or that is done.
    pub fn bury(&self, flight: Flight) {
        if flight.going {
            lock(&self.graveyard).extend(flight.op.regions.iter().map(|r| (r.id(), Arc::clone(r))));
        }
        flight.requests.into_iter().for_each(|r| self.agent.release(r));
    }

    /// Keep what a lane that is gone had not settled; the keeper looks at it.
    pub fn adopt(&self, flights: Vec<Flight>) {
        let mut over = Vec::new();
        {
            let mut orphans = lock(&self.orphans);
            for flight in flights {
                // Under the lock of the orphans: `die` changes the state first and looks at them then.
                if matches!(flight.peer.state(), State::Dead(_)) { over.push(flight) } else { orphans.push(flight) }
            }
        }
        over.into_iter().for_each(|f| self.orphan_settled(f));
        self.keeper.wake();
    }

    fn orphan_settled(&self, flight: Flight) {
        let peer = Arc::clone(&flight.peer);
        self.bury(flight);
        self.settled();
        peer.flying.fetch_sub(1, Ordering::SeqCst);
        peer.open.fetch_sub(1, Ordering::SeqCst);
        self.landed(&peer);
        self.forget_if_over(&peer);
    }

    /// Look at what lanes that are gone left; whether any of it may still end well.
    pub fn sweep_orphans(&self) -> bool {
        let mut done = Vec::new();
        let going = {
            let mut orphans = lock(&self.orphans);
            done.extend(orphans.extract_if(.., |f| f.going && NixlLane::sweep(self, f) == Progress::Done));
            orphans.iter().any(|f| f.going)
        };
        done.into_iter().for_each(|f| self.orphan_settled(f));
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
            self.unload(peer);
            self.keeper.unwatch(peer);
            stats::sub(&self.counters.peers, 1);
        }
    }

    fn export(&self, metadata: Bytes) -> Bytes {
        self.exports.fetch_add(1, Ordering::SeqCst);
        metadata
    }

    /// An op that was unresolved is proven quiet.
    pub fn settled(&self) {
        stats::add(&self.counters.ops_settled, 1);
        stats::sub(&self.counters.ops_retained, 1);
    }

    fn ended(&self, id: PeerId) -> Option<(Arc<Peer>, TransportError)> {
        let peer = self.peer(id).filter(|p| p.process.as_ref().is_some_and(|h| h.exited()))?;
        let text = format!("the process of {} has ended", peer.name.to_string_lossy());
        Some((peer, TransportError::new(ErrorKind::PeerLost, text)))
    }

    /// The process of a peer has ended. Whether the library is to have time to notice it itself: what it knows to be over
    /// leaves nothing behind.
    pub fn process_ended(&self, id: PeerId) -> bool {
        let Some((peer, error)) = self.ended(id) else { return false };
        self.lose(&peer, error.clone());
        let open = peer.open.load(Ordering::SeqCst) > 0;
        if !open {
            self.die(&peer, error);
        }
        open
    }

    /// It had its time.
    pub fn process_is_gone(&self, id: PeerId) {
        if let Some((peer, error)) = self.ended(id) {
            self.die(&peer, error);
        }
    }

    fn connect(&self, descriptor: &PeerDescriptor) -> Result<PeerId, TransportError> {
        let bad = |text: String| TransportError::new(ErrorKind::BadPeer, text);
        let name = CString::new(descriptor.name.as_str())
            .ok()
            .filter(|n| !n.is_empty())
            .ok_or_else(|| bad(format!("{:?} is no agent's name", descriptor.name)))?;
        if descriptor.name == self.name {
            return Err(bad(format!("{} is this agent itself", descriptor.name)));
        }
        let size = descriptor.metadata.len();
        if size == 0 || size > self.config.max_metadata_bytes {
            let most = self.config.max_metadata_bytes;
            return Err(bad(format!("{}: metadata of {size} bytes (1 to {most})", descriptor.name)));
        }
        match metadata::agent(&descriptor.metadata) {
            Err(EndsEarly) => return Err(bad(format!("the metadata of {} ends early", descriptor.name))),
            Ok(Some(inside)) if inside != name.to_bytes() => {
                let inside = String::from_utf8_lossy(inside);
                return Err(bad(format!("the metadata of {} is that of {inside}", descriptor.name)));
            }
            // Our own library writes the known format: so does theirs, or it is damaged.
            Ok(_) if self.known_format && !metadata::is_known(&descriptor.metadata) => {
                return Err(bad(format!(
                    "the metadata of {} is damaged, or of another release of NIXL",
                    descriptor.name
                )));
            }
            Ok(_) => {}
        }
        if let Some(same) = self.known(&name, descriptor) {
            return Ok(same);
        }
        // A handle from before the connection: it also sees an end that comes while we connect.
        let process = descriptor.host.and_then(|h| h.open(&self.host));
        if descriptor.host.is_some_and(|h| h.is_gone(&self.host)) {
            let text = format!("the process of {} has ended", descriptor.name);
            return Err(TransportError::new(ErrorKind::PeerLost, text));
        }
        if !lock(&self.loaded).contains_key(&name) {
            // Metadata that came too late for a generation that was lost meanwhile.
            let _ = self.agent.invalidate(&name);
        }
        let found = self.agent.load(&descriptor.metadata).map_err(|code| {
            let text =
                format!("{} cannot be reached, or its metadata cannot be read: {}", descriptor.name, code.name());
            TransportError::new(ErrorKind::BadPeer, text)
        })?;
        if found != name {
            // Somebody else's metadata: if that one is known, it stays.
            if !lock(&self.loaded).contains_key(&found) {
                let _ = self.agent.invalidate(&found);
            }
            let found = found.to_string_lossy();
            return Err(bad(format!("the metadata of {} is that of {found}", descriptor.name)));
        }
        if let Err(code) = self.agent.make_connection(&name) {
            let _ = self.agent.invalidate(&name);
            let text = format!("{} does not answer: {}", descriptor.name, code.name());
            return Err(TransportError::new(ErrorKind::PeerLost, text));
        }
        self.succeed(descriptor);
        let id = PeerId(self.next_peer.fetch_add(1, Ordering::Relaxed));
        let (endpoint, metadata) = (descriptor.endpoint.clone(), descriptor.metadata.clone());
        let peer = Arc::new(Peer::new(id, name.clone(), endpoint, descriptor.host, process, metadata));
        lock(&self.peers).insert(id, Arc::clone(&peer));
        lock(&self.loaded).insert(name, Arc::clone(&peer));
        stats::add(&self.counters.peers, 1);
        self.keeper.watch(&peer);
        Ok(id)
    }

    /// The generation that is connected under this name already, with what it registered since; none when it must be
    /// connected anew.
    fn known(&self, name: &CString, descriptor: &PeerDescriptor) -> Option<PeerId> {
        let peer = lock(&self.loaded).get(name).cloned()?;
        let same_process = match (peer.host, descriptor.host) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        };
        if peer.live() && same_process {
            let unchanged = *lock(&peer.metadata) == descriptor.metadata;
            // More registrations of the same process are added; those of another one are refused by the library.
            if unchanged || self.agent.load(&descriptor.metadata).is_ok_and(|found| found == *name) {
                *lock(&peer.metadata) = descriptor.metadata.clone();
                // It may be forgotten just now.
                let peers = lock(&self.peers);
                if peers.contains_key(&peer.id) && peer.live() {
                    peer.closing.store(false, Ordering::SeqCst);
                    *lock(&peer.endpoint) = descriptor.endpoint.clone();
                    return Some(peer.id);
                }
            }
        }
        // After any error, and for another process, the endpoint is closed before a new one is made.
        self.replaced(&peer, descriptor);
        self.unload(&peer);
        None
    }

    /// Another process, or the same one behind a new endpoint, takes the place of `peer`.
    fn replaced(&self, peer: &Arc<Peer>, descriptor: &PeerDescriptor) {
        let text = format!("{} registered anew at {}", descriptor.name, descriptor.endpoint);
        let error = TransportError::new(ErrorKind::PeerLost, text);
        let dead = match (peer.host, descriptor.host) {
            // One address on one boot of one host belongs to one process at a time.
            (Some(old), Some(new)) => *lock(&peer.endpoint) == descriptor.endpoint && old.succeeded_by(&new),
            _ => false,
        };
        // Where the process itself can be seen, only its end is its end.
        let dead = dead && peer.process.as_ref().is_none_or(ProcessHandle::exited);
        if dead { self.die(peer, error) } else { self.lose(peer, error) }
    }

    /// Older generations at the address of a new one are over.
    fn succeed(&self, descriptor: &PeerDescriptor) {
        let at = |p: &&Arc<Peer>| {
            *lock(&p.endpoint) == descriptor.endpoint && p.name.to_bytes() != descriptor.name.as_bytes()
        };
        let old: Vec<Arc<Peer>> = lock(&self.peers).values().filter(at).cloned().collect();
        for peer in old {
            self.replaced(&peer, descriptor);
        }
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
    registration: Option<Registration>,
    memory: Arc<dyn MemoryOwner>,
    /// How often metadata had been given out when it began.
    exports_before: u64,
}

impl Drop for Registered {
    fn drop(&mut self) {
        let (from, to) = (self.memory.base(), self.memory.base() + self.memory.len());
        self.core.lists.forget(|(addr, _, kind)| (from..to).contains(addr) && *kind == self.memory.kind());
        if let Some(registration) = self.registration.take() {
            if let Err(code) = self.core.agent.deregister(registration) {
                tracing::warn!(status = code.name(), "a registration could not be ended");
            }
            *lock(&self.core.metadata) = None;
        }
        let exported = self.core.exports.load(Ordering::SeqCst) != self.exports_before;
        if exported && self.core.config.keep_exported {
            let (addr, len) = (self.memory.base(), self.memory.len());
            tracing::info!(
                "{len} bytes at {addr:#x} stay mapped: a peer may know them, and NIXL does not take access back"
            );
            std::mem::forget(Arc::clone(&self.memory));
        }
    }
}

/// NIXL as a transport. See the crate's documentation.
///
/// Threads: the library's own (two with UCX) and one keeper, which sleeps. They stop when the transport, its lanes and
/// all regions registered with it are dropped.
pub struct NixlTransport {
    core: Arc<Core>,
    capabilities: Capabilities,
}

impl NixlTransport {
    /// Open the library (the first in the process: 0.2 to 0.6 s) and make an agent of a fresh name.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: the library is not to be had, with every place that was tried; or it cannot start.
    pub fn new(config: NixlConfig) -> Result<Self, TransportError> {
        prepare_environment();
        let unavailable = |e: &dyn std::fmt::Display| TransportError::new(ErrorKind::Unavailable, e);
        let api = Api::open(config.library.as_deref()).map_err(|e| unavailable(&e))?;
        let name = match &config.name {
            Some(name) => name.clone(),
            None => fresh_name().map_err(|e| unavailable(&format!("random numbers: {e}")))?,
        };
        let c_name = CString::new(name.as_str()).map_err(|e| unavailable(&e))?;
        let agent = Agent::new(api, &c_name, &config)?;
        let known_format = agent.local_metadata().is_ok_and(|m| metadata::is_known(&m));
        let keeper = Keeper::new().map_err(|e| unavailable(&format!("epoll: {e}")))?;
        let core = Arc::new(Core {
            agent: Arc::new(agent),
            lists: Lists::default(),
            budget: Budget::new(config.prepared_descriptors),
            counters: Counters::default(),
            name,
            host: HostIdentity::local(),
            keeper,
            next_peer: AtomicU64::new(1),
            next_region: AtomicU32::new(0),
            peers: Mutex::default(),
            loaded: Mutex::default(),
            connecting: Mutex::default(),
            lanes: Mutex::default(),
            orphans: Mutex::default(),
            graveyard: Mutex::default(),
            metadata: Mutex::default(),
            exports: AtomicU64::new(0),
            known_format,
            config,
        });
        core.keeper.start(Arc::downgrade(&core)).map_err(|e| unavailable(&format!("start a thread: {e}")))?;
        let capabilities = Capabilities {
            name: "nixl",
            host_memory: true,
            device_memory: true,
            max_op_bytes: Some(core.config.max_op_bytes.max(1)),
            // Between processes of one host the library copies inside the post.
            submit_blocks: true,
            done_proves_placement: true,
            settles_unresolved: false,
            unregister_revokes: false,
            checks_destinations: false,
        };
        Ok(Self { core, capabilities })
    }

    /// Counters.
    pub fn stats(&self) -> Stats {
        self.core.counters.read()
    }

    /// What was loaded.
    pub fn library(&self) -> LibraryInfo {
        LibraryInfo::of(&self.core.agent)
    }

    /// Whether the death of this peer's process can be seen from here.
    pub fn watches(&self, peer: PeerId) -> bool {
        self.core.peer(peer).is_some_and(|p| p.process.is_some())
    }
}

/// A version 4 UUID, as SGLang's agents are named.
fn fresh_name() -> Result<String, getrandom::Error> {
    let mut b = [0u8; 16];
    getrandom::fill(&mut b)?;
    b[6] = b[6] & 0x0f | 0x40;
    b[8] = b[8] & 0x3f | 0x80;
    let hex: String = b.iter().map(|b| format!("{b:02x}")).collect();
    Ok(format!("{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]))
}

impl Transport for NixlTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn local_name(&self) -> &str {
        &self.core.name
    }

    fn local_metadata(&self) -> Bytes {
        let mut cached = lock(&self.core.metadata);
        let made = match &*cached {
            Some(bytes) => return self.core.export(bytes.clone()),
            None => self.core.agent.local_metadata(),
        };
        match made {
            Ok(bytes) => self.core.export(cached.insert(bytes).clone()),
            Err(code) => {
                tracing::error!(status = code.name(), "NIXL gives no metadata; peers will refuse it");
                Bytes::new()
            }
        }
    }

    fn register(&self, memory: Arc<dyn MemoryOwner>) -> Result<Arc<RegisteredRegion>, TransportError> {
        let (addr, len, kind) = (memory.base(), memory.len(), memory.kind());
        let invalid = |text: String| TransportError::new(ErrorKind::InvalidArgument, text);
        // The library takes any range without a look.
        if len == 0 || addr == 0 || addr.checked_add(len).is_none() {
            return Err(invalid(format!("{len} bytes at {addr:#x} cannot be registered")));
        }
        // Before it begins: metadata that is given out from now on may have it in.
        let exports_before = self.core.exports.load(Ordering::SeqCst);
        let registration = self.core.agent.register(addr, len, kind).map_err(|code| {
            let what = match kind {
                MemoryKind::Dram => "host memory".to_owned(),
                MemoryKind::Vram { device } => format!("memory of device {device}"),
            };
            invalid(format!("NIXL does not register {len} bytes of {what} at {addr:#x}: {}", code.name()))
        })?;
        *lock(&self.core.metadata) = None;
        let registered = Registered {
            core: Arc::clone(&self.core),
            registration: Some(registration),
            memory: Arc::clone(&memory),
            exports_before,
        };
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
        Ok(Box::new(NixlLane::new(Arc::clone(&self.core), shared).map_err(unavailable)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_version_4_uuids() {
        let name = fresh_name().unwrap();
        assert_eq!((name.len(), &name[14..15]), (36, "4"), "{name}");
        assert!("89ab".contains(&name[19..20]), "{name}");
        assert_ne!(name, fresh_name().unwrap());
    }
}
