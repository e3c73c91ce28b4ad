//! The keeper: one thread that looks for proof of quiet after a session was lost, and for peers whose kernel is gone.
//!
//! Proof is one of: the process's exit, seen through its pidfd; the target's own word that the session is fenced; a
//! successor that answered at the same endpoint of the same host, when that host is not ours; the target's goodbye.
//! Silence is no proof, and no claim in a registration is.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use kv_core::host::ProcessHandle;
use kv_core::ids::PeerId;
use kv_core::transport::{Settlement, TransportError, TransportErrorKind};

use crate::frame::{self, Kind, Purpose, Verdict, Welcome};
use crate::peer::Peer;
use crate::sys::{self, Epoll, EventFd};
use crate::transport::Inner;
use crate::worker::guarded;

const FENCED: Settlement = Settlement::Settled { src_quiet: true, dst_quiet: true };
const FIRST_RETRY: Duration = Duration::from_millis(50);
const LAST_RETRY: Duration = Duration::from_secs(5);
/// How long one attempt may take. A stopped target answers when it runs again.
const ATTEMPT: Duration = Duration::from_secs(30);

/// What others tell the keeper.
pub(crate) enum Task {
    /// A session is over.
    Lost(Arc<Peer>),
    /// Quiet is proven.
    Proven(Arc<Peer>, Settlement),
    /// Something changed that lost peers may wait for.
    Look,
    /// Try the fences of this generation again.
    Retry(String),
}

pub(crate) struct KeeperShared {
    ep: Epoll,
    wake: EventFd,
    inbox: Mutex<Vec<Task>>,
}

impl KeeperShared {
    pub fn new() -> io::Result<Self> {
        let (ep, wake) = (Epoll::new()?, EventFd::new()?);
        ep.add(wake.as_raw_fd(), 0, true, false)?;
        Ok(Self { ep, wake, inbox: Mutex::default() })
    }

    pub fn post(&self, task: Task) {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).push(task);
        self.wake.signal();
    }
}

/// A connection that asks the target to end a session.
struct Attempt {
    sock: TcpStream,
    hello: Vec<u8>,
    sent: usize,
    answer: Vec<u8>,
    until: Instant,
}

enum Progress {
    Wait,
    Fenced,
    /// Another process has the address: asking again would trouble strangers.
    Stranger,
    Failed(String),
}

impl Attempt {
    fn start(inner: &Inner, peer: &Peer) -> io::Result<Self> {
        let domain = socket2::Domain::for_address(peer.address);
        let sock = socket2::Socket::new(domain, socket2::Type::STREAM, Some(socket2::Protocol::TCP))?;
        sock.set_nonblocking(true)?;
        match sock.connect(&peer.address.into()) {
            Ok(()) => {}
            Err(e) if e.raw_os_error() == Some(libc::EINPROGRESS) => {}
            Err(e) => return Err(e),
        }
        let sock = TcpStream::from(sock);
        inner.keeper.ep.add(sock.as_raw_fd(), peer.id.0 + 1, true, true)?;
        let mut hello = Vec::new();
        inner.hello(Purpose::Fence, &peer.name, &peer.admission, &peer.session).encode(&mut hello);
        Ok(Self { sock, hello, sent: 0, answer: Vec::new(), until: Instant::now() + ATTEMPT })
    }

    fn step(&mut self, ep: &Epoll, token: u64) -> Progress {
        match self.try_step(ep, token) {
            Ok(p) => p,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::NotConnected) => {
                if self.until <= Instant::now() { Progress::Failed("no answer".to_owned()) } else { Progress::Wait }
            }
            Err(e) => Progress::Failed(e.to_string()),
        }
    }

    fn try_step(&mut self, ep: &Epoll, token: u64) -> io::Result<Progress> {
        if let Some(e) = self.sock.take_error()? {
            return Err(e);
        }
        if self.sent < self.hello.len() {
            self.sent += (&self.sock).write(&self.hello[self.sent..])?;
            if self.sent == self.hello.len() {
                ep.modify(self.sock.as_raw_fd(), token, true, false)?;
            }
        }
        let mut buf = [0; frame::MAX_SMALL];
        let n = (&self.sock).read(&mut buf)?;
        if n == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        self.answer.extend_from_slice(&buf[..n]);
        let invalid = |m| io::Error::new(io::ErrorKind::InvalidData, m);
        match frame::small(&self.answer).map_err(invalid)? {
            None => Ok(Progress::Wait),
            Some((Kind::Welcome, body, _)) => {
                let welcome = Welcome::decode(body).map_err(invalid)?;
                Ok(match welcome.verdict {
                    Verdict::Fenced => Progress::Fenced,
                    Verdict::NotMe => Progress::Stranger,
                    other => Progress::Failed(format!("{other:?}: {}", welcome.text)),
                })
            }
            Some(_) => Ok(Progress::Failed("an answer out of place".to_owned())),
        }
    }
}

struct Lost {
    peer: Arc<Peer>,
    proven: Option<Settlement>,
    attempt: Option<Attempt>,
    /// `None`: no more by ourselves.
    next_try: Option<Instant>,
    pause: Duration,
    give_up: Instant,
    watched: bool,
}

impl Lost {
    fn new(inner: &Inner, peer: Arc<Peer>) -> Self {
        let now = Instant::now();
        let watched = peer
            .pidfd
            .as_ref()
            .is_some_and(|fd| inner.keeper.ep.add(fd.as_raw_fd(), peer.id.0 + 1, true, false).is_ok());
        Self {
            peer,
            proven: None,
            attempt: None,
            next_try: Some(now),
            pause: FIRST_RETRY,
            give_up: now + inner.config.fence_for,
            watched,
        }
    }

    /// Returns true when nothing is left to prove.
    fn step(&mut self, inner: &Inner) -> bool {
        #[cfg(test)]
        assert!(self.peer.name != crate::inbound::PANICS, "a fault for a test");
        // Every lane has taken note, and nothing was in flight: there is nothing to prove. (Lanes first: an op that was
        // accepted just before its lane took note is counted before the lane's link goes.)
        if self.peer.links.load(Ordering::SeqCst) == 0 && self.peer.open.load(Ordering::SeqCst) == 0 {
            return true;
        }
        let quiet_here = self.peer.jobs.load(Ordering::SeqCst) == 0;
        if self.proven.is_none() && self.peer.pidfd.as_ref().is_some_and(ProcessHandle::exited) {
            self.proven = Some(Settlement::PeerGenerationDead);
        }
        if self.proven.is_none() {
            self.fence(inner);
        }
        match self.proven {
            Some(settlement) if quiet_here => {
                self.peer.settle(inner, settlement);
                true
            }
            _ => false,
        }
    }

    fn fence(&mut self, inner: &Inner) {
        if let Some(attempt) = &mut self.attempt {
            match attempt.step(&inner.keeper.ep, self.peer.id.0 + 1) {
                Progress::Wait => return,
                Progress::Fenced => {
                    self.proven = Some(FENCED);
                    self.attempt = None;
                    return;
                }
                Progress::Stranger => self.next_try = None,
                Progress::Failed(why) => {
                    tracing::debug!(peer = self.peer.name, why, "fence not answered");
                    self.next_try = Some(Instant::now() + self.pause);
                    self.pause = (self.pause * 2).min(LAST_RETRY);
                }
            }
            self.attempt = None;
        }
        let now = Instant::now();
        if self.next_try.is_some_and(|t| t <= now) {
            if now >= self.give_up {
                self.next_try = None;
                return;
            }
            match Attempt::start(inner, &self.peer) {
                Ok(attempt) => {
                    self.attempt = Some(attempt);
                    self.next_try = None;
                }
                Err(e) => {
                    tracing::debug!(peer = self.peer.name, error = %e, "fence not sent");
                    self.next_try = Some(now + self.pause);
                    self.pause = (self.pause * 2).min(LAST_RETRY);
                }
            }
        }
    }

    fn retry(&mut self, inner: &Inner) {
        if self.attempt.is_none() {
            let now = Instant::now();
            self.next_try = Some(now);
            self.pause = FIRST_RETRY;
            self.give_up = now + inner.config.fence_for;
        }
    }

    /// A fault while looking for its proof: it stays unproven, and is looked at again after a while.
    fn fault(&mut self) {
        self.attempt = None;
        self.next_try = Some(Instant::now() + LAST_RETRY);
    }

    fn next(&self) -> Option<Instant> {
        self.attempt.as_ref().map(|a| a.until).or(self.next_try)
    }
}

/// The thread's body.
pub(crate) fn run(inner: &Arc<Inner>) {
    let keeper = &inner.keeper;
    let mut lost: Vec<Lost> = Vec::new();
    let mut events = Vec::new();
    let mut suspects = Suspects::new();
    let watch = (inner.config.dead_after / 4).max(Duration::from_millis(50));
    let mut next_watch = Instant::now() + watch;
    while !inner.stop.load(Ordering::Acquire) {
        let next = lost.iter().filter_map(Lost::next).min().map_or(next_watch, |t| t.min(next_watch));
        events.clear();
        if let Err(e) = keeper.ep.wait(&mut events, Some(next.saturating_duration_since(Instant::now()))) {
            // Cannot happen with a valid set. Everything is looked at in every round, so lost sessions still end.
            tracing::error!(error = %e, "the keeper of the transport cannot wait; trying again");
            std::thread::sleep(FIRST_RETRY);
        }
        keeper.wake.drain();
        for task in std::mem::take(&mut *keeper.inbox.lock().unwrap_or_else(PoisonError::into_inner)) {
            guarded(inner, "a lost session", || match task {
                Task::Lost(peer) => lost.push(Lost::new(inner, peer)),
                Task::Proven(peer, settlement) => {
                    if let Some(l) = lost.iter_mut().find(|l| l.peer.id == peer.id) {
                        l.proven.get_or_insert(settlement);
                    }
                }
                Task::Look => {}
                Task::Retry(name) => lost.iter_mut().filter(|l| l.peer.name == name).for_each(|l| l.retry(inner)),
            });
        }
        lost.retain_mut(|l| {
            let mut done = false;
            if !guarded(inner, "a lost session", || done = l.step(inner)) {
                l.fault();
            }
            if done {
                if let (true, Some(fd)) = (l.watched, &l.peer.pidfd) {
                    keeper.ep.remove(fd.as_raw_fd());
                }
                inner.forget_peer(l.peer.id);
            }
            !done
        });
        if next_watch <= Instant::now() {
            next_watch = Instant::now() + watch;
            guarded(inner, "the watch over peers' kernels", || watch_kernels(inner, &mut suspects));
        }
    }
    drop(lost);
    for peer in inner.all_peers() {
        // No proof came: what these ops may still touch stays registered and mapped for the life of the process.
        let orphans = std::mem::take(&mut *peer.orphans.lock().unwrap_or_else(PoisonError::into_inner));
        if !orphans.is_empty() {
            tracing::warn!(peer = peer.name, ops = orphans.len(), "memory of unsettled writes is never given back");
            std::mem::forget(orphans);
        }
    }
}

/// Sockets whose peer's kernel owes an acknowledgement and gave none at the last look: since when.
type Suspects = HashMap<(PeerId, RawFd), Instant>;

/// Lose peers whose *kernel* has acknowledged nothing for too long although it owes us something. A stopped or busy
/// process's kernel still acknowledges, so this tells a dead or unreachable host from a slow peer; the socket option
/// `TCP_USER_TIMEOUT` does not: it also ends connections to a live peer that takes nothing.
fn watch_kernels(inner: &Arc<Inner>, suspects: &mut Suspects) {
    let (now, before) = (Instant::now(), std::mem::take(suspects));
    for peer in inner.all_peers() {
        if peer.open.load(Ordering::Acquire) == 0 || !peer.live() {
            continue;
        }
        let mut dead = false;
        for sock in peer.live_sockets() {
            let fd = sock.as_raw_fd();
            let Ok(health) = sys::tcp_health(fd) else { continue };
            if health.unacked == 0 {
                continue;
            }
            // A connection that was idle for an hour heard its last acknowledgement an hour ago: what counts is the
            // time since it was first seen waiting, without one since.
            let since = before.get(&(peer.id, fd)).copied().filter(|t| health.last_ack >= now - *t).unwrap_or(now);
            suspects.insert((peer.id, fd), since);
            dead |= now - since >= inner.config.dead_after;
        }
        if dead {
            let text = format!("the host of {} acknowledged nothing for {:?}", peer.name, inner.config.dead_after);
            peer.lose(inner, TransportError::new(TransportErrorKind::PeerLost, text));
        }
    }
}
