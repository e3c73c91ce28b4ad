//! The transport: what the threads share, and the [`Transport`] contract.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use bytes::Bytes;
use kv_core::ids::{PeerId, ProcessGeneration, RegionId};
use kv_core::memory::{MemoryKind, MemoryOwner, RegisteredRegion};
use kv_core::transport::{
    Capabilities, Lane, PeerDescriptor, Transport, TransportError, TransportErrorKind as ErrorKind,
};

use crate::blob::{Blob, Key};
use crate::config::{PtraceOptIn, SameHost, TcpConfig};
use crate::frame::{self, Hello, Kind, Purpose};
use kv_core::host::HostIdentity;

use crate::host;
use crate::keeper::{self, KeeperShared};
use crate::lane::{LaneShared, TcpLane};
use crate::peer::{PathInfo, PathKind, Peer};
use crate::region::Registry;
use crate::session::Sessions;
use crate::stats::{Counters, Stats};
use crate::sys;
use crate::worker::{FIRST_TOKEN, Remains, Worker, WorkerShared};

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn failure(kind: ErrorKind, what: &str, e: impl std::fmt::Display) -> TransportError {
    TransportError::new(kind, format!("{what}: {e}"))
}

/// What every thread of the transport sees.
pub(crate) struct Inner {
    pub config: TcpConfig,
    pub name: String,
    pub admission: Key,
    pub host: HostIdentity,
    pub cores: usize,
    pub registry: Arc<Registry>,
    pub counters: Arc<Counters>,
    pub sessions: Arc<Sessions>,
    pub workers: Vec<Arc<WorkerShared>>,
    pub keeper: KeeperShared,
    pub stop: AtomicBool,
    addresses: Vec<SocketAddr>,
    started: Instant,
    /// Random bytes at a fixed address: who can read them can copy from us.
    nonce: Box<[u8; 32]>,
    /// Why we ask for no direct copies.
    no_direct: Option<String>,
    next_token: AtomicU64,
    next_lane: AtomicU32,
    peers: Mutex<HashMap<PeerId, Arc<Peer>>>,
    lanes: Mutex<Vec<Weak<LaneShared>>>,
    /// Held while lanes and peers are tied together, so that each pair gets one connection. Never while one is dialled.
    ties: Mutex<()>,
}

impl Inner {
    /// A number that names a connection or a peer; never used twice.
    pub fn token(&self) -> u64 {
        self.next_token.fetch_add(1, Ordering::Relaxed)
    }

    /// Milliseconds since the start.
    pub fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    /// Socket options of a connection. `data`: it carries bulk data.
    pub fn tune(&self, sock: &TcpStream, data: bool) -> io::Result<()> {
        let sock = socket2::SockRef::from(sock);
        sock.set_tcp_nodelay(true)?;
        let probe = self.config.keepalive.max(std::time::Duration::from_secs(1));
        sock.set_tcp_keepalive(
            &socket2::TcpKeepalive::new().with_time(probe).with_interval(probe / 2).with_retries(4),
        )?;
        if let (true, Some(bytes)) = (data, self.config.socket_buffer) {
            sock.set_send_buffer_size(bytes)?;
            sock.set_recv_buffer_size(bytes)?;
        }
        Ok(())
    }

    pub fn hello(&self, purpose: Purpose, target: &str, admission: &Key, session: &Key) -> Hello {
        Hello {
            purpose,
            target: target.to_owned(),
            admission: *admission,
            session: *session,
            source: self.name.clone(),
            process: ProcessGeneration::here(),
            host: self.host,
            direct: self.no_direct.is_none(),
            nonce_addr: self.nonce.as_ptr() as u64,
            nonce: *self.nonce,
        }
    }

    /// Whether we can copy out of the source's memory: tried by reading its nonce, which proves the pid namespace, the
    /// process and the permission at once.
    pub fn try_direct(&self, hello: &Hello) -> Result<(), String> {
        if self.config.same_host == SameHost::Off {
            return Err("turned off at the target".to_owned());
        }
        if !hello.direct {
            return Err("turned off at the source".to_owned());
        }
        if let Some(why) = host::direct_copy_obstacle(&self.host, &hello.host) {
            return Err(why.to_owned());
        }
        if hello.host.open(&self.host).is_none() {
            return Err("the source's process is not found under its number here".to_owned());
        }
        let mut seen = [0; 32];
        match sys::vm_read_buf(hello.host.pid, hello.nonce_addr, &mut seen) {
            Ok(32) if seen == hello.nonce => Ok(()),
            Ok(_) => Err("another process has the source's number here".to_owned()),
            Err(e) if e.raw_os_error() == Some(libc::EPERM) => Err(match host::yama_scope() {
                Some(scope) if scope > 0 => {
                    format!("reading the source's memory is not permitted (Yama scope {scope})")
                }
                _ => "reading the source's memory is not permitted".to_owned(),
            }),
            Err(e) => Err(format!("reading the source's memory: {e}")),
        }
    }

    pub fn all_peers(&self) -> Vec<Arc<Peer>> {
        lock(&self.peers).values().cloned().collect()
    }

    pub fn peer(&self, id: PeerId) -> Option<Arc<Peer>> {
        lock(&self.peers).get(&id).cloned()
    }

    pub fn forget_peer(&self, id: PeerId) {
        let gone = lock(&self.peers).remove(&id);
        if gone.is_some() {
            crate::stats::sub(&self.counters.peers, 1);
        }
    }

    pub fn add_peer(&self, peer: &Arc<Peer>) {
        lock(&self.peers).insert(peer.id, Arc::clone(peer));
        crate::stats::add(&self.counters.peers, 1);
    }

    pub fn all_lanes(&self) -> Vec<Arc<LaneShared>> {
        let mut lanes = lock(&self.lanes);
        lanes.retain(|l| l.strong_count() > 0);
        lanes.iter().filter_map(Weak::upgrade).collect()
    }

    pub fn notify_lanes(&self, peer: &Arc<Peer>) {
        for lane in self.all_lanes() {
            lane.changed(peer);
        }
    }

    pub fn tie(&self) -> MutexGuard<'_, ()> {
        lock(&self.ties)
    }
}

/// The threads, stopped when the transport and its last lane are gone.
pub(crate) struct Core {
    pub inner: Arc<Inner>,
    workers: Vec<JoinHandle<Remains>>,
    keeper: Option<JoinHandle<()>>,
}

impl Drop for Core {
    fn drop(&mut self) {
        self.inner.stop.store(true, Ordering::Release);
        for worker in &self.inner.workers {
            worker.wake();
        }
        self.inner.keeper.post(keeper::Task::Look);
        // Every copy into our memory has ended once the workers have.
        let remains: Vec<Remains> = self.workers.drain(..).filter_map(|w| w.join().ok()).collect();
        if let Some(keeper) = self.keeper.take() {
            let _ = keeper.join();
        }
        // So say goodbye: peers need no other proof.
        let mut bye = Vec::new();
        frame::put(&mut bye, Kind::Bye, |_| {});
        for session in self.inner.sessions.all() {
            session.goodbye(&bye);
        }
        drop(remains);
        // Messages may hold sessions, which know the workers: break the circle.
        self.inner.workers.iter().for_each(|w| w.discard());
    }
}

/// The embedded transport for host memory. See the crate's documentation.
///
/// Threads: [`TcpConfig::workers`] and one keeper, however many peers there are. They stop when the transport and all
/// its lanes are dropped.
pub struct TcpTransport {
    core: Arc<Core>,
    capabilities: Capabilities,
}

impl TcpTransport {
    /// Listen and start the threads.
    ///
    /// # Errors
    /// [`ErrorKind::Unavailable`] when the address cannot be bound or the system gives no threads or descriptors.
    pub fn new(config: TcpConfig) -> Result<Self, TransportError> {
        let unavailable = |what: &'static str| move |e: io::Error| failure(ErrorKind::Unavailable, what, e);
        let (listener, bound) = listen(config.bind)
            .map_err(|e| failure(ErrorKind::Unavailable, &format!("listen on {}", config.bind), e))?;
        let addresses = advertised(&config, bound).map_err(unavailable("list the interfaces' addresses"))?;
        let mut nonce = Box::new([0; 32]);
        let mut id = [0; 16];
        getrandom::fill(&mut *nonce)
            .and_then(|()| getrandom::fill(&mut id))
            .map_err(|e| failure(ErrorKind::Unavailable, "random numbers", e))?;
        let no_direct = match config.same_host {
            SameHost::Off => Some("turned off at the source".to_owned()),
            SameHost::Auto | SameHost::Only => None,
        };
        if no_direct.is_none()
            && host::yama_scope() == Some(1)
            && config.ptrace_opt_in == PtraceOptIn::Any
            && let Err(e) = sys::allow_any_reader()
        {
            tracing::info!(error = %e, "Yama's opt-in failed; peers on this host use TCP");
        }
        let counters = Arc::new(Counters::default());
        let workers = (0..config.worker_count())
            .map(|_| WorkerShared::new())
            .collect::<io::Result<Vec<_>>>()
            .map_err(unavailable("epoll"))?;
        let max_op_bytes = config.max_op_bytes;
        let inner = Arc::new(Inner {
            name: uuid(id),
            admission: Key::random().map_err(unavailable("random numbers"))?,
            host: HostIdentity::local(),
            cores: sys::cores(),
            registry: Arc::default(),
            sessions: Sessions::new(config.max_sessions, Arc::clone(&counters)),
            counters,
            workers,
            keeper: KeeperShared::new().map_err(unavailable("epoll"))?,
            stop: AtomicBool::new(false),
            addresses,
            started: Instant::now(),
            nonce,
            no_direct,
            next_token: AtomicU64::new(FIRST_TOKEN),
            next_lane: AtomicU32::new(0),
            peers: Mutex::default(),
            lanes: Mutex::default(),
            ties: Mutex::default(),
            config,
        });
        let mut core = Core { inner: Arc::clone(&inner), workers: Vec::new(), keeper: None };
        let mut listener = Some(listener);
        for (n, shared) in inner.workers.iter().enumerate() {
            let worker =
                Worker::new(Arc::clone(&inner), Arc::clone(shared), listener.take()).map_err(unavailable("epoll"))?;
            let thread = std::thread::Builder::new().name(format!("kv-tcp-{n}")).spawn(move || worker.run());
            core.workers.push(thread.map_err(unavailable("start a worker"))?);
        }
        let thread = std::thread::Builder::new().name("kv-tcp-keeper".to_owned()).spawn(move || keeper::run(&inner));
        core.keeper = Some(thread.map_err(unavailable("start the keeper"))?);
        Ok(Self {
            core: Arc::new(core),
            capabilities: Capabilities {
                name: "tcp",
                host_memory: true,
                device_memory: false,
                max_op_bytes: Some(max_op_bytes),
                submit_blocks: false,
                done_proves_placement: true,
                settles_unresolved: true,
                unregister_revokes: true,
                checks_destinations: false,
            },
        })
    }

    #[cfg(test)]
    pub(crate) fn inner(&self) -> &Arc<Inner> {
        &self.core.inner
    }

    /// The addresses published to peers.
    pub fn addresses(&self) -> &[SocketAddr] {
        &self.core.inner.addresses
    }

    /// The way to a peer and why it is this one; `None` for a peer that is not known (any more).
    pub fn peer_path(&self, peer: PeerId) -> Option<PathInfo> {
        let inner = &self.core.inner;
        let peer = inner.peer(peer)?;
        let kind = if peer.direct.is_ok() { PathKind::SameHost } else { PathKind::Tcp };
        Some(PathInfo {
            kind,
            reason: peer.direct.clone().err().unwrap_or_default(),
            address: peer.address,
            connections: peer.live_sockets().len(),
            silent_ms: inner.now_ms().saturating_sub(peer.heard.load(Ordering::Relaxed)),
            ops_open: peer.open.load(Ordering::Relaxed),
        })
    }

    /// Counters and gauges.
    pub fn stats(&self) -> Stats {
        self.core.inner.counters.snapshot()
    }

    /// Break every connection to a peer, as a failure of the network would: for drills and tests.
    pub fn sever(&self, peer: PeerId) {
        if let Some(peer) = self.core.inner.peer(peer) {
            peer.sever();
        }
    }

    /// [`TcpTransport::sever`] for every peer.
    pub fn sever_all(&self) {
        self.core.inner.all_peers().iter().for_each(|p| p.sever());
    }
}

impl TcpTransport {
    /// The processes that have, or had, a session to write here.
    pub fn sources(&self) -> Vec<ProcessGeneration> {
        self.core.inner.sessions.sources()
    }
}

impl Transport for TcpTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn local_name(&self) -> &str {
        &self.core.inner.name
    }

    fn local_metadata(&self) -> Bytes {
        let inner = &self.core.inner;
        Blob {
            name: inner.name.clone(),
            admission: inner.admission,
            host: inner.host,
            addresses: inner.addresses.clone(),
            regions: inner.registry.published(),
        }
        .encode()
    }

    fn inbound_dead(&self, process: ProcessGeneration) -> bool {
        self.core.inner.sessions.source_dead(process, &self.core.inner.host)
    }

    fn register(&self, memory: Arc<dyn MemoryOwner>) -> Result<Arc<RegisteredRegion>, TransportError> {
        let inner = &self.core.inner;
        if memory.kind() != MemoryKind::Dram {
            return Err(TransportError::new(ErrorKind::InvalidArgument, "this transport moves host memory only"));
        }
        let (base, len) = (memory.base(), memory.len());
        if len == 0 || base == 0 || base.checked_add(len).is_none() {
            let text = format!("{len} bytes at {base:#x} are no memory");
            return Err(TransportError::new(ErrorKind::InvalidArgument, text));
        }
        let key = Key::random().map_err(|e| failure(ErrorKind::Unavailable, "random numbers", e))?;
        let id = inner
            .registry
            .add(Arc::clone(&memory), key)
            .ok_or_else(|| TransportError::new(ErrorKind::Backend, "no region numbers are left"))?;
        let registration = Registration { registry: Arc::clone(&inner.registry), id };
        Ok(Arc::new(RegisteredRegion::new(RegionId(id), memory, Box::new(registration))))
    }

    fn connect(&self, peer: &PeerDescriptor) -> Result<PeerId, TransportError> {
        crate::connect::connect(&self.core.inner, peer)
    }

    fn disconnect(&self, peer: PeerId) {
        let inner = &self.core.inner;
        let _tie = inner.tie();
        let Some(peer) = inner.peer(peer) else { return };
        peer.closing.store(true, Ordering::Release);
        if peer.links.load(Ordering::SeqCst) == 0 && peer.live() {
            peer.close_data();
            peer.drop_spare();
            inner.forget_peer(peer.id);
        }
        inner.notify_lanes(&peer);
    }

    fn lane(&self) -> Result<Box<dyn Lane>, TransportError> {
        let inner = &self.core.inner;
        let index = inner.next_lane.fetch_add(1, Ordering::Relaxed);
        let shared = LaneShared::new(index).map_err(|e| failure(ErrorKind::Unavailable, "eventfd", e))?;
        let lane = TcpLane::new(Arc::clone(&self.core), Arc::clone(&shared))
            .map_err(|e| failure(ErrorKind::Unavailable, "epoll", e))?;
        // Peers may come while others are dialled, which takes seconds where one does not answer: so dial those that
        // are known, and look again with the door closed.
        let mut dialled = HashMap::new();
        loop {
            let missing = {
                let _tie = inner.tie();
                let peers: Vec<_> = inner.all_peers().into_iter().filter(|p| p.live()).collect();
                let missing: Vec<_> = peers.iter().filter(|p| !dialled.contains_key(&p.id)).cloned().collect();
                if missing.is_empty() {
                    for peer in peers {
                        if let Some(sock) = dialled.remove(&peer.id) {
                            shared.linked(&peer, sock);
                        }
                    }
                    lock(&inner.lanes).push(Arc::downgrade(&shared));
                    return Ok(Box::new(lane));
                }
                missing
            };
            for peer in missing {
                match crate::connect::add_lane(inner, &peer, index) {
                    Ok(sock) => drop(dialled.insert(peer.id, sock)),
                    Err(e) => peer.lose(inner, e),
                }
            }
        }
    }
}

/// Takes a region out of the registry when its [`RegisteredRegion`] goes.
struct Registration {
    registry: Arc<Registry>,
    id: u32,
}

/// Whether a region was registered with this transport.
pub(crate) fn is_ours(inner: &Inner, region: &RegisteredRegion) -> bool {
    let registration = region.registration().downcast_ref::<Registration>();
    registration.is_some_and(|r| Arc::ptr_eq(&r.registry, &inner.registry))
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.registry.remove(self.id);
    }
}

fn listen(bind: SocketAddr) -> io::Result<(TcpListener, SocketAddr)> {
    let open = |bind: SocketAddr| {
        let sock = socket2::Socket::new(
            socket2::Domain::for_address(bind),
            socket2::Type::STREAM,
            Some(socket2::Protocol::TCP),
        )?;
        if bind.is_ipv6() && bind.ip().is_unspecified() {
            // Every address of both families.
            sock.set_only_v6(false)?;
        }
        if bind.port() != 0 {
            // Only lets a restarted process have its port back while old connections linger.
            sock.set_reuse_address(true)?;
        }
        sock.bind(&bind.into())?;
        sock.listen(1024)?;
        sock.set_nonblocking(true)?;
        let listener = TcpListener::from(sock);
        let bound = listener.local_addr()?;
        Ok((listener, bound))
    };
    match open(bind) {
        Err(_) if bind == TcpConfig::default().bind => open(SocketAddr::from(([0, 0, 0, 0], 0))),
        other => other,
    }
}

fn advertised(config: &TcpConfig, bound: SocketAddr) -> io::Result<Vec<SocketAddr>> {
    let ips: Vec<IpAddr> = if !config.advertise.is_empty() {
        config.advertise.clone()
    } else if bound.ip().is_unspecified() {
        let mut all = sys::interface_addresses()?;
        all.retain(|ip| ip.is_ipv4() || bound.is_ipv6());
        all
    } else {
        vec![bound.ip()]
    };
    Ok(ips.into_iter().map(|ip| SocketAddr::new(ip, bound.port())).collect())
}

/// The text form of a random (version 4) UUID.
fn uuid(mut b: [u8; 16]) -> String {
    b[6] = b[6] & 0x0f | 0x40;
    b[8] = b[8] & 0x3f | 0x80;
    let hex: String = b.iter().map(|x| format!("{x:02x}")).collect();
    [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_look_like_uuids() {
        let name = uuid([0xff; 16]);
        assert_eq!(name, "ffffffff-ffff-4fff-bfff-ffffffffffff");
    }

    #[test]
    fn the_bound_address_is_published_alone_unless_unspecified() {
        let config = TcpConfig::loopback();
        let at = "127.0.0.1:99".parse().unwrap();
        assert_eq!(advertised(&config, at).unwrap(), vec![at]);
        let all = advertised(&config, "0.0.0.0:99".parse().unwrap()).unwrap();
        assert!(all.iter().all(SocketAddr::is_ipv4) && all.contains(&at), "{all:?}");
    }
}
