//! A worker: one thread, one epoll set, many connections. It never blocks but in its wait.
//!
//! Work is cut into slices of about 1 MiB, and between two slices the worker looks at every connection that is ready:
//! so nobody waits behind somebody else's large op.
//!
//! Each event is handled behind a guard: a panic ends the connection it came from, and the worker goes on (catalogue F62).

use std::collections::{HashMap, VecDeque};
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::copy::JobPart;
use crate::inbound::{self, Inbound};
use crate::outbound::{Outbound, Stripe};
use crate::peer::Peer;
use crate::plan::Plan;
use crate::region::Region;
use crate::stats;
use crate::sys::{Epoll, Event, EventFd, Seg};
use crate::transport::Inner;

const WAKE: u64 = 0;
const LISTEN: u64 = 1;
/// Numbers below are reserved.
pub(crate) const FIRST_TOKEN: u64 = 16;
/// How long the listener rests when the process is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Pauses of a worker that cannot wait, each twice the one before.
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const LAST_PAUSE: Duration = Duration::from_secs(1);

/// Run one event of one of our threads. False when it panicked: what it was about is in an unknown state and must go.
pub(crate) fn guarded(inner: &Inner, what: &str, event: impl FnOnce()) -> bool {
    let ended = catch_unwind(AssertUnwindSafe(event));
    if let Err(payload) = &ended {
        let text = payload.downcast_ref::<&str>().copied();
        let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str)).unwrap_or("(no text)");
        stats::add(&inner.counters.panics, 1);
        tracing::error!(panic = text, "a fault in {what}: its connection is closed");
    }
    ended.is_ok()
}

/// What other threads ask of a worker.
pub(crate) enum Msg {
    /// Take over an accepted connection.
    Accepted(TcpStream),
    /// Take over a data connection to a peer.
    Data { token: u64, sock: Arc<TcpStream>, peer: Arc<Peer> },
    /// Send on a data connection.
    Send(u64, Stripe),
    /// End a connection.
    Close(u64),
    /// Help with a copy.
    Job(JobPart),
}

/// The part of a worker that others see.
pub(crate) struct WorkerShared {
    pub ep: Arc<Epoll>,
    wake: EventFd,
    inbox: Mutex<Vec<Msg>>,
    idle: AtomicBool,
}

impl WorkerShared {
    pub fn new() -> io::Result<Arc<Self>> {
        let (ep, wake) = (Arc::new(Epoll::new()?), EventFd::new()?);
        ep.add(wake.as_raw_fd(), WAKE, true, false)?;
        Ok(Arc::new(Self { ep, wake, inbox: Mutex::default(), idle: AtomicBool::new(false) }))
    }

    pub fn post(&self, msg: Msg) {
        let mut inbox = self.inbox.lock().unwrap_or_else(PoisonError::into_inner);
        inbox.push(msg);
        if inbox.len() == 1 {
            self.wake.signal();
        }
    }

    pub fn wake(&self) {
        self.wake.signal();
    }

    /// Whether it sleeps with nothing to do.
    pub fn idle(&self) -> bool {
        self.idle.load(Ordering::Relaxed)
    }

    /// Forget what nobody will do any more.
    pub fn discard(&self) {
        drop(self.take());
    }

    fn take(&self) -> Vec<Msg> {
        std::mem::take(&mut *self.inbox.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Memory a worker uses again and again.
#[derive(Default)]
pub(crate) struct Scratch {
    pub read: Vec<u8>,
    pub discard: Vec<u8>,
    pub plan: Plan,
    pub held: Vec<Arc<Region>>,
    pub local: Vec<Seg>,
    pub remote: Vec<Seg>,
    pub acks: Vec<u8>,
}

impl Scratch {
    fn new() -> Self {
        Self { read: vec![0; inbound::READ], ..Self::default() }
    }
}

/// What the handlers of a connection may use.
pub(crate) struct Context<'a> {
    pub inner: &'a Arc<Inner>,
    pub me: &'a Arc<WorkerShared>,
    pub scratch: &'a mut Scratch,
    pub jobs: &'a mut VecDeque<JobPart>,
}

enum Conn {
    In(Inbound),
    Out(Outbound),
}

pub(crate) struct Worker {
    inner: Arc<Inner>,
    me: Arc<WorkerShared>,
    listener: Option<TcpListener>,
    accept_again: Option<Instant>,
    next_worker: usize,
    conns: HashMap<u64, Conn>,
    /// Accepted connections in the order of their deadlines for a hello.
    greeting: VecDeque<(Instant, u64)>,
    jobs: VecDeque<JobPart>,
    scratch: Scratch,
}

/// What a stopped worker leaves: its connections, still open, on which nothing is read any more.
pub(crate) struct Remains(#[allow(dead_code, reason = "held for its drop")] HashMap<u64, Conn>);

impl Worker {
    pub fn new(inner: Arc<Inner>, me: Arc<WorkerShared>, listener: Option<TcpListener>) -> io::Result<Self> {
        if let Some(l) = &listener {
            me.ep.add(l.as_raw_fd(), LISTEN, true, false)?;
        }
        Ok(Self {
            inner,
            me,
            listener,
            accept_again: None,
            next_worker: 0,
            conns: HashMap::new(),
            greeting: VecDeque::new(),
            jobs: VecDeque::new(),
            scratch: Scratch::new(),
        })
    }

    /// Run until the transport stops.
    pub fn run(mut self) -> Remains {
        let mut events: Vec<Event> = Vec::with_capacity(128);
        let mut pause = FIRST_PAUSE;
        while !self.inner.stop.load(Ordering::Acquire) {
            let timeout = self.timeout();
            self.me.idle.store(timeout != Some(Duration::ZERO), Ordering::Relaxed);
            events.clear();
            match self.me.ep.wait(&mut events, timeout) {
                Ok(()) => pause = FIRST_PAUSE,
                Err(e) => {
                    // Cannot happen with a valid set. What waits for this worker is still looked at, now and then.
                    tracing::error!(error = %e, "a worker of the transport cannot wait; trying again");
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(LAST_PAUSE);
                    if pause == LAST_PAUSE {
                        // Peers must not wait for answers on connections that nobody reads.
                        self.close_all();
                    }
                    events.push(Event { token: WAKE, readable: true, writable: false });
                }
            }
            self.me.idle.store(false, Ordering::Relaxed);
            for event in &events {
                match event.token {
                    WAKE => self.inbox(),
                    LISTEN => self.guard("accepting connections", None, Self::accept),
                    token => self.guard("a connection", Some(token), |w| w.ready(token, *event)),
                }
            }
            if !self.jobs.is_empty() {
                // A job that panics is dropped, which answers that it failed.
                self.guard("a copy", None, Self::slice);
            }
            self.guard("the deadlines", None, Self::deadlines);
        }
        self.jobs.clear();
        Remains(std::mem::take(&mut self.conns))
    }

    /// Do something, for connection `token` where it has one; when that panics, close it.
    fn guard(&mut self, what: &str, token: Option<u64>, event: impl FnOnce(&mut Self)) {
        let inner = Arc::clone(&self.inner);
        if guarded(&inner, what, || event(self)) {
            return;
        }
        // It may have been taken out, and may hold answers of that connection.
        self.scratch = Scratch::new();
        if let Some(token) = token {
            guarded(&inner, "closing a connection", || self.fault(token));
        }
    }

    /// Close a connection whose handler panicked, and tell its peer.
    fn fault(&mut self, token: u64) {
        match self.conns.remove(&token) {
            Some(Conn::In(conn)) => {
                stats::sub(&self.inner.counters.connections_in, 1);
                conn.close();
            }
            Some(Conn::Out(out)) => {
                self.me.ep.remove(out.fd());
                out.lost(&self.inner, &io::Error::other("a fault in its handler"));
            }
            None => {}
        }
    }

    fn close_all(&mut self) {
        for token in self.conns.keys().copied().collect::<Vec<_>>() {
            self.guard("closing a connection", Some(token), |w| w.fault(token));
        }
    }

    fn timeout(&self) -> Option<Duration> {
        if !self.jobs.is_empty() {
            return Some(Duration::ZERO);
        }
        let next = [self.greeting.front().map(|g| g.0), self.accept_again].into_iter().flatten().min()?;
        // Never quite zero, which would read as "not idle".
        Some(next.saturating_duration_since(Instant::now()).max(Duration::from_millis(1)))
    }

    fn slice(&mut self) {
        if let Some(mut part) = self.jobs.pop_front()
            && part.slice(&self.inner, &mut self.scratch.local, &mut self.scratch.remote)
        {
            self.jobs.push_back(part);
        }
    }

    fn inbox(&mut self) {
        self.me.wake.drain();
        for msg in self.me.take() {
            let token = match &msg {
                Msg::Data { token, .. } | Msg::Send(token, _) | Msg::Close(token) => Some(*token),
                Msg::Accepted(_) | Msg::Job(_) => None,
            };
            self.guard("a message", token, |w| w.message(msg));
        }
    }

    fn message(&mut self, msg: Msg) {
        match msg {
            Msg::Accepted(sock) => self.adopt(sock),
            Msg::Data { token, sock, peer } => self.add_data(token, sock, peer),
            Msg::Send(token, stripe) => match self.conns.get_mut(&token) {
                Some(Conn::Out(out)) => {
                    out.push(stripe);
                    self.drive(token);
                }
                // The connection is gone; dropping the stripe tells its peer.
                _ => drop(stripe),
            },
            Msg::Close(token) => self.close(token),
            Msg::Job(part) => self.jobs.push_back(part),
        }
    }

    fn accept(&mut self) {
        // A burst of at most this many, so that data goes on meanwhile.
        for _ in 0..32 {
            let Some(listener) = &self.listener else { return };
            match listener.accept() {
                Ok((sock, _)) => {
                    let target = &self.inner.workers[self.next_worker % self.inner.workers.len()];
                    self.next_worker += 1;
                    if Arc::ptr_eq(target, &self.me) {
                        self.adopt(sock);
                    } else {
                        target.post(Msg::Accepted(sock));
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                // The connection died before it was accepted.
                Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => {}
                Err(e) => {
                    tracing::warn!(error = %e, "cannot accept connections; trying again");
                    self.me.ep.remove(listener.as_raw_fd());
                    self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn adopt(&mut self, sock: TcpStream) {
        let token = self.inner.token();
        let too_many = self.greeting.len() >= self.inner.config.max_handshakes;
        let prepared = sock.set_nonblocking(true).and_then(|()| self.inner.tune(&sock, false));
        let added = prepared.and_then(|()| self.me.ep.add(sock.as_raw_fd(), token, true, false));
        if too_many || added.is_err() {
            stats::add(&self.inner.counters.handshakes_refused, 1);
            return;
        }
        stats::add(&self.inner.counters.connections_accepted, 1);
        stats::add(&self.inner.counters.connections_in, 1);
        self.greeting.push_back((Instant::now() + self.inner.config.connect_timeout, token));
        self.conns.insert(token, Conn::In(Inbound::new(&self.me, sock, token)));
    }

    fn add_data(&mut self, token: u64, sock: Arc<TcpStream>, peer: Arc<Peer>) {
        let mut out = Outbound::new(token, sock, peer);
        match out.start(&self.me.ep) {
            Ok(()) => {
                self.conns.insert(token, Conn::Out(out));
            }
            Err(e) => out.lost(&self.inner, &e),
        }
    }

    /// Send what a data connection has; on failure its peer is lost.
    fn drive(&mut self, token: u64) {
        let Some(Conn::Out(out)) = self.conns.get_mut(&token) else { return };
        if let Err(e) = out.drive(&self.me.ep, &mut self.scratch.local)
            && let Some(Conn::Out(out)) = self.conns.remove(&token)
        {
            self.me.ep.remove(out.fd());
            out.lost(&self.inner, &e);
        }
    }

    fn ready(&mut self, token: u64, event: Event) {
        match self.conns.get_mut(&token) {
            Some(Conn::In(conn)) => {
                if event.writable {
                    conn.flush();
                }
                if event.readable {
                    let mut cx =
                        Context { inner: &self.inner, me: &self.me, scratch: &mut self.scratch, jobs: &mut self.jobs };
                    if conn.readable(&mut cx).is_break() {
                        self.close(token);
                    }
                }
            }
            Some(Conn::Out(out)) => {
                let broken = if event.readable { out.readable().err() } else { None };
                match broken {
                    Some(e) => {
                        if let Some(Conn::Out(out)) = self.conns.remove(&token) {
                            self.me.ep.remove(out.fd());
                            out.lost(&self.inner, &e);
                        }
                    }
                    None if event.writable => self.drive(token),
                    None => {}
                }
            }
            None => {}
        }
    }

    fn close(&mut self, token: u64) {
        match self.conns.remove(&token) {
            Some(Conn::In(conn)) => {
                conn.close();
                stats::sub(&self.inner.counters.connections_in, 1);
            }
            Some(Conn::Out(out)) => self.me.ep.remove(out.fd()),
            None => {}
        }
    }

    fn deadlines(&mut self) {
        if self.greeting.is_empty() && self.accept_again.is_none() {
            return;
        }
        // Those who greeted or left make room at once.
        while let Some((deadline, token)) = self.greeting.front().copied() {
            let waiting = matches!(self.conns.get(&token), Some(Conn::In(c)) if !c.greeted());
            if waiting && deadline > Instant::now() {
                break;
            }
            self.greeting.pop_front();
            if waiting {
                stats::add(&self.inner.counters.handshakes_refused, 1);
                self.close(token);
            }
        }
        if self.accept_again.is_some_and(|t| t <= Instant::now()) {
            self.accept_again = None;
            if let Some(l) = &self.listener {
                let _ = self.me.ep.add(l.as_raw_fd(), LISTEN, true, false);
            }
            self.accept();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_post_wakes_the_worker_once() {
        let w = WorkerShared::new().unwrap();
        w.post(Msg::Close(1));
        w.post(Msg::Close(2));
        let mut events = Vec::new();
        w.ep.wait(&mut events, Some(Duration::ZERO)).unwrap();
        assert_eq!(events.len(), 1);
        w.wake.drain();
        assert_eq!(w.take().len(), 2);
        events.clear();
        w.ep.wait(&mut events, Some(Duration::ZERO)).unwrap();
        assert!(events.is_empty());
    }
}
