//! The transport: what its threads share, and the [`Transport`] contract.

use std::collections::HashMap;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use bytes::Bytes;
use kv_core::control::local_ip::local_ip;
use kv_core::host::HostIdentity;
use kv_core::ids::{PeerId, RegionId};
use kv_core::memory::{MemoryKind, MemoryOwner, RegisteredRegion};
use kv_core::transport::{
    Capabilities, Lane, PeerDescriptor, Transport, TransportError, TransportErrorKind as ErrorKind,
};

use crate::config::MooncakeTcpConfig;
use crate::flight::Flight;
use crate::lane::{Change, LaneShared, TcpLane};
use crate::peer::{Peer, State};
use crate::registry::Region;
use crate::service::{Service, Target};
use crate::stats::{self, Stats};

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the transport and its lanes share. The service ends with the last of them.
pub(crate) struct Core {
    pub target: Arc<Target>,
    pub host: HostIdentity,
    pub next_peer: AtomicU64,
    pub peers: Mutex<HashMap<PeerId, Arc<Peer>>>,
    lanes: Mutex<Vec<Weak<LaneShared>>>,
    /// What lanes that are gone had not settled.
    orphans: Mutex<Vec<(Arc<Peer>, Flight)>>,
    /// One connection attempt a session at a time.
    connecting: Mutex<HashMap<String, Weak<Mutex<()>>>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Core {
    pub fn peer(&self, id: PeerId) -> Option<Arc<Peer>> {
        lock(&self.peers).get(&id).cloned()
    }

    pub fn is_ours(&self, region: &RegisteredRegion) -> bool {
        region.registration().downcast_ref::<Registered>().is_some_and(|r| Arc::ptr_eq(&r.target, &self.target))
    }

    /// How many there are.
    pub fn lanes(&self) -> usize {
        lock(&self.lanes).iter().filter(|l| l.strong_count() > 0).count()
    }

    fn notify_lanes(&self, peer: &Arc<Peer>, lost_now: bool) {
        let change = Change { peer: Arc::clone(peer), lost_now };
        let mut lanes = lock(&self.lanes);
        lanes.retain(|l| l.strong_count() > 0);
        lanes.iter().filter_map(Weak::upgrade).for_each(|l| l.changed(change.clone()));
    }

    /// Nothing more is posted to it. What is in flight is answered, or its connection breaks.
    pub fn lose(&self, peer: &Arc<Peer>, error: TransportError) {
        {
            let mut state = lock(&peer.state);
            if !matches!(*state, State::Live) {
                return;
            }
            *state = State::Lost(error.clone());
        }
        let news = !peer.closing.load(Ordering::Acquire);
        if news {
            tracing::info!(peer = peer.name, error = %error, "peer lost");
            stats::add(&self.target.counters.peers_lost, 1);
        }
        lock(&peer.spares).clear();
        self.notify_lanes(peer, news);
        self.forget_if_over(peer);
    }

    /// Its process has ended: nothing of ours can land any more.
    pub fn die(&self, peer: &Arc<Peer>, error: TransportError) {
        let news = {
            let mut state = lock(&peer.state);
            if matches!(*state, State::Dead(_)) {
                return;
            }
            let news = matches!(*state, State::Live) && !peer.closing.load(Ordering::Acquire);
            *state = State::Dead(error);
            news
        };
        stats::add(&self.target.counters.peers_lost, news.into());
        stats::add(&self.target.counters.peers_dead, 1);
        tracing::info!(peer = peer.name, "the peer's process has ended");
        lock(&peer.spares).clear();
        self.notify_lanes(peer, news);
        let over: Vec<_> = lock(&self.orphans).extract_if(.., |(p, _)| p.id == peer.id).collect();
        for (peer, _) in over {
            self.settled();
            self.released(&peer);
        }
        self.forget_if_over(peer);
    }

    /// Keep what a lane that is gone had not settled.
    pub fn adopt(&self, flights: Vec<(Arc<Peer>, Flight)>) {
        for (peer, flight) in flights {
            // Under the lock, so that a death that comes now finds it.
            let mut orphans = lock(&self.orphans);
            if peer.dead() {
                drop(orphans);
                self.settled();
                self.released(&peer);
            } else {
                orphans.push((peer, flight));
            }
        }
    }

    /// An op of this peer is over.
    pub fn released(&self, peer: &Arc<Peer>) {
        peer.open.fetch_sub(1, Ordering::SeqCst);
        self.forget_if_over(peer);
    }

    /// A generation that nobody writes to any more, and of which nothing is open, is forgotten.
    fn forget_if_over(&self, peer: &Arc<Peer>) {
        let gone = {
            let mut peers = lock(&self.peers);
            let over = peer.closing.load(Ordering::SeqCst) && peer.open.load(Ordering::SeqCst) == 0;
            over && peers.remove(&peer.id).is_some()
        };
        if gone {
            stats::sub(&self.target.counters.peers, 1);
            lock(&peer.spares).clear();
            if let Some(process) = &peer.process {
                self.target.unwatch(process.as_fd());
            }
            self.target.unwatch(lock(&peer.anchor).as_fd());
            // Their connections go.
            self.notify_lanes(peer, false);
        }
    }

    /// An op ended without proof.
    pub fn unresolved(&self) {
        stats::add(&self.target.counters.ops_unresolved, 1);
        stats::add(&self.target.counters.ops_retained, 1);
    }

    /// An op that ended without proof is proven quiet.
    pub fn settled(&self) {
        stats::add(&self.target.counters.ops_settled, 1);
        stats::sub(&self.target.counters.ops_retained, 1);
    }

    /// The process of a peer has ended.
    pub fn process_ended(&self, id: PeerId) {
        let ended = |p: &Arc<Peer>| p.process.as_ref().is_some_and(|h| h.exited());
        if let Some(peer) = self.peer(id).filter(ended) {
            let text = format!("the process of {} has ended", peer.name);
            self.die(&peer, TransportError::new(ErrorKind::PeerLost, text));
        }
    }

    /// The connection that vouches for a peer is gone.
    pub fn anchor_broke(&self, id: PeerId) {
        if let Some(peer) = self.peer(id) {
            let text = format!("{} closed its connections; connect to it again", peer.name);
            self.lose(&peer, TransportError::new(ErrorKind::PeerLost, text));
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
        self.target.stop.store(true, Ordering::Release);
        self.target.wake();
        // The last holder may be that very thread.
        if let Some(thread) = lock(&self.thread).take().filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

/// A registration, ended when its region is dropped.
struct Registered {
    target: Arc<Target>,
    region: Arc<Region>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.target.registry.remove(&self.region);
    }
}

/// Mooncake's TCP wire as a transport. See the crate's documentation.
///
/// Threads: one, which serves peers and sleeps otherwise. It stops when the transport and its lanes are dropped.
pub struct MooncakeTcpTransport {
    core: Arc<Core>,
    capabilities: Capabilities,
    next_region: AtomicU32,
}

impl MooncakeTcpTransport {
    /// Listen on both ports.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`]: a port cannot be had, there is no address to publish, or no thread.
    pub fn new(config: MooncakeTcpConfig) -> Result<Self, TransportError> {
        let unavailable =
            |what: &str, e: &dyn std::fmt::Display| TransportError::new(ErrorKind::Unavailable, format!("{what}: {e}"));
        let host = match &config.host {
            Some(host) => host.clone(),
            None => local_ip().map_err(|e| unavailable("an address to publish", &e))?,
        };
        let listen = |what: &str, at: SocketAddr| {
            let bound = TcpListener::bind(at).and_then(|l| Ok((l.local_addr()?.port(), l)));
            bound.map_err(|e| unavailable(&format!("the {what} port cannot listen at {at}"), &e))
        };
        let (port, handshakes) = listen("handshake", config.bind)?;
        let (data_port, data) = listen("data", SocketAddr::new(config.bind.ip(), config.data_port))?;
        let name = if host.contains(':') { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
        if mooncake_wire::session(&name).is_none() {
            return Err(unavailable("the address to publish", &format_args!("{host:?} is no host's name or address")));
        }
        let max_op_bytes = config.max_op_bytes.max(1);
        let target = Target::new(config, name, host, data_port).map_err(|e| unavailable("epoll", &e))?;
        let core = Arc::new(Core {
            target: Arc::new(target),
            host: HostIdentity::local(),
            next_peer: AtomicU64::new(1),
            peers: Mutex::default(),
            lanes: Mutex::default(),
            orphans: Mutex::default(),
            connecting: Mutex::default(),
            thread: Mutex::default(),
        });
        let service = Service::new(Arc::clone(&core.target), Arc::downgrade(&core), handshakes, data);
        let service = service.map_err(|e| unavailable("epoll", &e))?;
        let thread = std::thread::Builder::new().name("kv-mc-tcp".into()).spawn(move || service.run());
        *lock(&core.thread) = Some(thread.map_err(|e| unavailable("start a thread", &e))?);
        let capabilities = Capabilities {
            name: "mooncake-tcp",
            host_memory: true,
            device_memory: false,
            max_op_bytes: Some(max_op_bytes),
            submit_blocks: false,
            // Each write is acknowledged, or a byte is read behind it.
            done_proves_placement: true,
            settles_unresolved: false,
            unregister_revokes: true,
            checks_destinations: true,
        };
        Ok(Self { core, capabilities, next_region: AtomicU32::new(0) })
    }

    /// Counters.
    pub fn stats(&self) -> Stats {
        self.core.target.counters.read()
    }

    /// Whether the death of this peer's process can be seen from here.
    pub fn watches(&self, peer: PeerId) -> bool {
        self.core.peer(peer).is_some_and(|p| p.process.is_some())
    }

    /// The data port that our connections to this peer lead to.
    pub fn data_port(&self, peer: PeerId) -> Option<u16> {
        self.core.peer(peer).map(|p| p.described().data_port)
    }
}

impl Transport for MooncakeTcpTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    /// The session id, `host:port`.
    fn local_name(&self) -> &str {
        &self.core.target.name
    }

    /// Nothing: the session id says all, and peers ask behind it.
    fn local_metadata(&self) -> Bytes {
        Bytes::new()
    }

    fn register(&self, memory: Arc<dyn MemoryOwner>) -> Result<Arc<RegisteredRegion>, TransportError> {
        let (addr, len, kind) = (memory.base(), memory.len(), memory.kind());
        let invalid = |text: String| TransportError::new(ErrorKind::InvalidArgument, text);
        if len == 0 || addr == 0 || addr.checked_add(len).is_none() {
            return Err(invalid(format!("{len} bytes at {addr:#x} cannot be registered")));
        }
        if kind != MemoryKind::Dram {
            return Err(invalid(format!("this transport takes host memory alone, not {kind:?}")));
        }
        let target = Arc::clone(&self.core.target);
        let region = target.registry.add(Arc::clone(&memory));
        let region =
            region.ok_or_else(|| invalid(format!("{len} bytes at {addr:#x} overlap what is registered already")))?;
        let id = RegionId(self.next_region.fetch_add(1, Ordering::Relaxed));
        Ok(Arc::new(RegisteredRegion::new(id, memory, Box::new(Registered { target, region }))))
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

    /// A lane. It gets a connection to each peer that is connected already: the caller waits for that, and nobody else.
    fn lane(&self) -> Result<Box<dyn Lane>, TransportError> {
        let unavailable = |e: io::Error| TransportError::new(ErrorKind::Unavailable, format!("a lane: {e}"));
        let shared = LaneShared::new().map_err(unavailable)?;
        lock(&self.core.lanes).push(Arc::downgrade(&shared));
        let lane = TcpLane::new(Arc::clone(&self.core), shared).map_err(unavailable)?;
        let peers: Vec<Arc<Peer>> = lock(&self.core.peers).values().filter(|p| p.live()).cloned().collect();
        for peer in peers {
            let turn = self.core.connect_lock(&peer.name);
            let _turn = lock(&turn);
            let until = Instant::now() + self.core.target.config.connect_timeout;
            if let Err(e) = self.core.equip(&peer, self.core.lanes(), until) {
                let text = format!("{} takes no connection for another lane: {e:?}; connect to it again", peer.name);
                self.core.lose(&peer, TransportError::new(ErrorKind::PeerLost, text));
            }
        }
        Ok(Box::new(lane))
    }
}
