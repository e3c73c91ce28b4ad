//! Connecting to a peer: blocking, on the caller's (connector) thread.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, RwLock};
use std::time::Instant;

use kv_core::ids::PeerId;
use kv_core::transport::{PeerDescriptor, Settlement, TransportError, TransportErrorKind as ErrorKind};

use crate::blob::{Blob, Key};
use crate::config::SameHost;
use crate::frame::{self, Hello, Kind, Purpose, Verdict, Welcome};
use crate::keeper::Task;
use crate::peer::{Peer, State};
use crate::stats;
use crate::transport::{Inner, failure};
use crate::worker::Msg;

/// Number under which a session without lanes opens; no lane has it.
const NO_LANE: u32 = u32::MAX;

pub(crate) fn connect(inner: &Arc<Inner>, descriptor: &PeerDescriptor) -> Result<PeerId, TransportError> {
    let bad = |e: &dyn std::fmt::Display| failure(ErrorKind::BadPeer, &format!("peer {}", descriptor.name), e);
    let blob = Blob::decode(&descriptor.metadata).map_err(|e| bad(&e))?;
    if blob.name != descriptor.name {
        return Err(bad(&format!("its metadata names {}", blob.name)));
    }
    // The same generation again: it may have registered more. (Identity is the generation, not the address.)
    for peer in inner.all_peers() {
        if peer.name == blob.name && peer.live() && !peer.closing.load(Ordering::Acquire) {
            if !peer.admission.matches(&blob.admission) || peer.host != blob.host {
                return Err(bad(&"a connected peer has that name, and this is not its metadata"));
            }
            peer.set_regions(blob.regions);
            return Ok(peer.id);
        }
    }
    inner.keeper.post(Task::Retry(blob.name.clone()));

    let session = Key::random().map_err(|e| failure(ErrorKind::Unavailable, "random numbers", e))?;
    let first = inner.all_lanes().first().map_or(NO_LANE, |l| l.index);
    let (sock, address, welcome) = open(inner, &blob, &session, first)?;
    let sock = Arc::new(sock);
    if welcome.host != Some(blob.host) {
        return Err(bad(&format!("at {address}, another process answers than its metadata describes")));
    }
    succeed(inner, descriptor, &blob, address);

    let direct = match welcome.verdict {
        Verdict::Direct => Ok(()),
        _ => Err(welcome.text),
    };
    if let (Err(why), SameHost::Only) = (&direct, inner.config.same_host) {
        let text = format!("{} cannot copy directly: {why}; only direct copies are allowed here", blob.name);
        return Err(TransportError::new(ErrorKind::Refused, text));
    }
    let dial = |purpose| {
        dial(inner, address, &inner.hello(purpose, &blob.name, &blob.admission, &session), purpose == Purpose::Data)
    };
    let mut data = Vec::new();
    if direct.is_err() {
        for _ in 0..inner.config.connections_per_peer.max(1) {
            data.push(Arc::new(dial(Purpose::Data)?.0));
        }
    }
    // Lanes may come while others are dialled: dial for those that are known, and look again with the door closed.
    let mut dialled = HashMap::from([(first, sock)]);
    let (tie, lanes) = loop {
        let tie = inner.tie();
        let lanes = inner.all_lanes();
        let missing: Vec<u32> = lanes.iter().map(|l| l.index).filter(|l| !dialled.contains_key(l)).collect();
        if missing.is_empty() {
            break (tie, lanes);
        }
        drop(tie);
        for lane in missing {
            dialled.insert(lane, Arc::new(dial(Purpose::Lane { lane })?.0));
        }
    };
    // Two connectors may have raced for the same generation: the first one's session stays.
    if let Some(winner) = inner.all_peers().into_iter().find(|p| p.name == blob.name && p.live())
        && !winner.closing.load(Ordering::Acquire)
    {
        winner.set_regions(blob.regions);
        return Ok(winner.id);
    }
    let links: Vec<_> =
        lanes.into_iter().filter_map(|lane| dialled.remove(&lane.index).map(|sock| (lane, sock))).collect();
    // Without lanes, the connection that opened the session keeps it alive. Those of other lanes that went away
    // meanwhile end in order, so that the session does not end with them.
    let spare = dialled.remove(&first);
    for sock in dialled.into_values() {
        let mut bye = Vec::new();
        frame::put(&mut bye, Kind::Bye, |_| {});
        // A connection that takes no 8 bytes is broken, and so is its session.
        let _ = (&*sock).write_all(&bye);
    }
    let sockets = links.iter().map(|l| &l.1).chain(&data).map(Arc::downgrade).collect();
    // Spread over the workers, starting at another one for every peer.
    let base = inner.token() as usize;
    let routes: Vec<_> = (0..data.len())
        .map(|n| (Arc::clone(&inner.workers[(base + n) % inner.workers.len()]), inner.token()))
        .collect();
    let peer = Arc::new(Peer {
        id: PeerId(inner.token()),
        name: blob.name.clone(),
        endpoint: descriptor.endpoint.clone(),
        address,
        session,
        admission: blob.admission,
        host: blob.host,
        direct,
        regions: RwLock::new(blob.regions.into()),
        pidfd: blob.host.open(&inner.host),
        data: routes,
        next_data: AtomicUsize::new(0),
        jobs: AtomicUsize::new(0),
        open: AtomicUsize::new(0),
        links: AtomicUsize::new(links.len()),
        closing: AtomicBool::new(false),
        heard: AtomicU64::new(inner.now_ms()),
        sockets: Mutex::new(sockets),
        orphans: Mutex::default(),
        spare: Mutex::new(spare),
        state: Mutex::new(State::Live),
        inner: Arc::downgrade(inner),
    });
    inner.add_peer(&peer);
    for (sock, (worker, token)) in data.into_iter().zip(&peer.data) {
        worker.post(Msg::Data { token: *token, sock, peer: Arc::clone(&peer) });
    }
    for (lane, sock) in links {
        lane.linked_already(&peer, sock);
    }
    drop(tie);
    tracing::debug!(peer = peer.name, %address, direct = ?peer.direct, "connected");
    Ok(peer.id)
}

/// Another generation at a peer's endpoint takes its place: the old one goes before the new one comes.
///
/// Metadata comes with a registration that anybody can send, so it proves nothing. What counts here was answered: the
/// successor was called, by the address where the old one was, and said with its own name which process on which boot
/// it is. Nothing of a peer is touched otherwise. Where we can see the old process ourselves, not even that proves its
/// death: its pidfd does, or the fence.
fn succeed(inner: &Arc<Inner>, descriptor: &PeerDescriptor, new: &Blob, address: SocketAddr) {
    for old in inner.all_peers() {
        let place = old.endpoint == descriptor.endpoint && old.address.ip() == address.ip();
        if old.name == new.name || !place || !old.host.succeeded_by(&new.host) {
            continue;
        }
        let text = format!("{} at {} was succeeded by {}", old.name, old.endpoint, new.name);
        old.lose(inner, TransportError::new(ErrorKind::PeerLost, text));
        if old.host.gone(&inner.host) != Some(false) {
            inner.keeper.post(Task::Proven(old, Settlement::PeerGenerationDead));
        }
    }
}

/// A connection of one more lane to a peer.
pub(crate) fn add_lane(inner: &Inner, peer: &Arc<Peer>, lane: u32) -> Result<Arc<TcpStream>, TransportError> {
    let hello = inner.hello(Purpose::Lane { lane }, &peer.name, &peer.admission, &peer.session);
    let sock = Arc::new(dial(inner, peer.address, &hello, false)?.0);
    peer.sockets.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(Arc::downgrade(&sock));
    Ok(sock)
}

/// Try the peer's addresses in turn.
fn open(
    inner: &Inner,
    blob: &Blob,
    session: &Key,
    lane: u32,
) -> Result<(TcpStream, SocketAddr, Welcome), TransportError> {
    let hello = inner.hello(Purpose::Open { lane }, &blob.name, &blob.admission, session);
    let near = inner.host.boot_id == blob.host.boot_id;
    let mut addresses: Vec<SocketAddr> = blob.addresses.clone();
    // Another host's loopback address is ours.
    addresses.retain(|a| near || !a.ip().is_loopback());
    addresses.sort_by_key(|a| near && !a.ip().is_loopback());
    let mut last = TransportError::new(ErrorKind::BadPeer, format!("{} has no usable address", blob.name));
    for address in addresses {
        match dial(inner, address, &hello, false) {
            Ok((sock, welcome)) => return Ok((sock, address, welcome)),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// Connect, say hello, hear the verdict; non-blocking afterwards.
fn dial(inner: &Inner, address: SocketAddr, hello: &Hello, data: bool) -> Result<(TcpStream, Welcome), TransportError> {
    let timeout = inner.config.connect_timeout;
    let until = Instant::now() + timeout;
    let text = |e: std::io::Error| {
        let kind = match e.kind() {
            std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => ErrorKind::Timeout,
            _ => ErrorKind::PeerLost,
        };
        failure(kind, &format!("connect to {} at {address}", hello.target), e)
    };
    let talk = || {
        let sock = socket2::Socket::new(
            socket2::Domain::for_address(address),
            socket2::Type::STREAM,
            Some(socket2::Protocol::TCP),
        )?;
        let sock = {
            // Buffer sizes count for the window offered in the first packet, so they come before the connect.
            let tuned = TcpStream::from(sock);
            inner.tune(&tuned, data)?;
            socket2::Socket::from(tuned)
        };
        sock.connect_timeout(&address.into(), timeout)?;
        let mut sock = TcpStream::from(sock);
        let mut bytes = Vec::new();
        hello.encode(&mut bytes);
        sock.set_write_timeout(Some(timeout))?;
        sock.write_all(&bytes)?;
        let mut answer = Vec::new();
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(std::io::ErrorKind::TimedOut.into());
            }
            sock.set_read_timeout(Some(left))?;
            let mut buf = [0; frame::MAX_SMALL];
            // The target says nothing more until we do, so no byte beyond the answer is read here.
            let n = sock.read(&mut buf)?;
            if n == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            answer.extend_from_slice(&buf[..n]);
            let invalid = |m| std::io::Error::new(std::io::ErrorKind::InvalidData, m);
            if let Some((kind, body, _)) = frame::small(&answer).map_err(invalid)? {
                if kind != Kind::Welcome {
                    return Err(std::io::Error::other("an answer out of place"));
                }
                sock.set_nonblocking(true)?;
                return Ok((sock, Welcome::decode(body).map_err(invalid)?));
            }
        }
    };
    let (sock, welcome) = talk().map_err(text)?;
    stats::add(&inner.counters.connections_opened, 1);
    let refused = |kind, why: &str| {
        Err(TransportError::new(kind, format!("{} at {address}: {why} {}", hello.target, welcome.text)))
    };
    match welcome.verdict {
        Verdict::Direct | Verdict::Tcp => Ok((sock, welcome)),
        Verdict::NotMe => refused(ErrorKind::PeerLost, "another process answers:"),
        Verdict::Denied => refused(ErrorKind::Refused, "refused:"),
        Verdict::NoSession | Verdict::Fenced => refused(ErrorKind::PeerLost, "the session has ended."),
    }
}
