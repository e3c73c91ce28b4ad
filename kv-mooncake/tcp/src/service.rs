//! The one thread of a transport: it answers peers on both ports, and sees peers' processes and connections end.
//!
//! Each event is handled behind a guard: a panic ends the connection it came from, and the thread goes on.

use std::collections::HashMap;
use std::io;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use kv_core::ids::PeerId;
use mooncake_wire::{Descriptor, descriptor::ACKNOWLEDGES};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::config::MooncakeTcpConfig;
use crate::greeting::Greeting;
use crate::inbound::{Inbound, Memory, SCRATCH, Wants};
use crate::registry::Registry;
use crate::stats::{self, Counters};
use crate::sys;
use crate::transport::Core;

const WAKE: u64 = 0;
const HANDSHAKES: u64 = 1;
const DATA: u64 = 2;
/// Numbers of connections begin here.
const FIRST: u64 = 16;
/// Marks of what belongs to a peer of ours, over its number.
const PROCESS: u64 = 1 << 62;
const ANCHOR: u64 = 1 << 63;
/// Deadlines are looked at this often.
const TICK: Duration = Duration::from_millis(250);
/// How long the listeners rest when no connection can be taken.
const PAUSE: Duration = Duration::from_millis(50);

/// What the service shares with everybody else.
pub(crate) struct Target {
    pub config: MooncakeTcpConfig,
    pub name: String,
    pub data_host: String,
    pub data_port: u16,
    pub registry: Registry,
    pub counters: Counters,
    pub stop: AtomicBool,
    set: OwnedFd,
    wake: OwnedFd,
}

impl Target {
    pub fn new(config: MooncakeTcpConfig, name: String, data_host: String, data_port: u16) -> io::Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&set, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        let (registry, counters) = (Registry::default(), Counters::default());
        Ok(Self { config, name, data_host, data_port, registry, counters, stop: AtomicBool::new(false), set, wake })
    }

    /// What we say of ourselves: all that is registered now.
    fn descriptor(&self) -> String {
        let host = Some(self.data_host.as_str());
        let buffers = self.registry.buffers();
        Descriptor::tcp(&self.name, host, self.data_port, ACKNOWLEDGES, buffers).to_json().to_string()
    }

    pub fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// Tell when this process ends: once.
    pub fn watch_process(&self, id: PeerId, process: BorrowedFd<'_>) {
        self.watch(PROCESS | id.0, process, epoll::EventFlags::IN);
    }

    /// Tell when the other end of this connection is gone: once.
    pub fn watch_anchor(&self, id: PeerId, sock: BorrowedFd<'_>) {
        self.watch(ANCHOR | id.0, sock, epoll::EventFlags::RDHUP);
    }

    fn watch(&self, token: u64, fd: BorrowedFd<'_>, what: epoll::EventFlags) {
        let flags = what | epoll::EventFlags::ONESHOT;
        if let Err(e) = epoll::add(&self.set, fd, epoll::EventData::new_u64(token), flags) {
            tracing::warn!(error = %e, "the end of a peer will not be seen");
        }
    }

    pub fn unwatch(&self, fd: BorrowedFd<'_>) {
        // It may never have been in the set.
        let _ = epoll::delete(&self.set, fd);
    }
}

enum Conn {
    Data(Inbound),
    Greeting(Greeting),
}

impl Conn {
    fn sock(&self) -> &TcpStream {
        match self {
            Self::Data(c) => &c.sock,
            Self::Greeting(c) => &c.sock,
        }
    }

    fn wants(&self) -> Wants {
        match self {
            Self::Data(c) => c.wants,
            Self::Greeting(c) => c.wants,
        }
    }

    fn deadline(&self) -> Option<Instant> {
        match self {
            Self::Data(c) => c.deadline(),
            Self::Greeting(c) => Some(c.deadline),
        }
    }
}

pub(crate) struct Service {
    target: Arc<Target>,
    core: Weak<Core>,
    handshakes: TcpListener,
    data: TcpListener,
    conns: HashMap<u64, Conn>,
    greetings: usize,
    next: u64,
    scratch: Vec<u8>,
}

fn flags(wants: Wants) -> epoll::EventFlags {
    let mut flags = epoll::EventFlags::empty();
    flags.set(epoll::EventFlags::IN, wants.read);
    flags.set(epoll::EventFlags::OUT, wants.write);
    flags
}

impl Service {
    pub fn new(target: Arc<Target>, core: Weak<Core>, handshakes: TcpListener, data: TcpListener) -> io::Result<Self> {
        for (listener, token) in [(&handshakes, HANDSHAKES), (&data, DATA)] {
            listener.set_nonblocking(true)?;
            epoll::add(&target.set, listener, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?;
        }
        let scratch = vec![0; SCRATCH];
        Ok(Self { target, core, handshakes, data, conns: HashMap::new(), greetings: 0, next: FIRST, scratch })
    }

    /// Run until the transport stops.
    pub fn run(mut self) {
        let mut events: Vec<epoll::Event> = Vec::with_capacity(64);
        let mut looked = Instant::now();
        while !self.target.stop.load(Ordering::Acquire) {
            let tick = self.conns.values().any(|c| c.deadline().is_some());
            let timeout = Timespec { tv_sec: 0, tv_nsec: TICK.subsec_nanos().into() };
            events.clear();
            let waited =
                epoll::wait(&self.target.set, rustix::buffer::spare_capacity(&mut events), tick.then_some(&timeout));
            if let Err(e) = waited
                && e != rustix::io::Errno::INTR
            {
                tracing::error!(error = %e, "the transport's thread cannot wait");
                std::thread::sleep(PAUSE);
            }
            for event in &events {
                self.guarded(event.data.u64());
            }
            if looked.elapsed() >= TICK {
                looked = Instant::now();
                let late = |c: &Conn| c.deadline().is_some_and(|d| d <= looked);
                let over: Vec<u64> = self.conns.iter().filter(|(_, c)| late(c)).map(|(t, _)| *t).collect();
                over.into_iter().for_each(|token| self.close(token));
            }
        }
    }

    fn guarded(&mut self, token: u64) {
        if catch_unwind(AssertUnwindSafe(|| self.event(token))).is_err() {
            stats::add(&self.target.counters.panics, 1);
            tracing::error!("a fault in the transport's thread: the connection it came from is closed");
            self.scratch.resize(SCRATCH, 0);
            self.close(token);
        }
    }

    fn event(&mut self, token: u64) {
        match token {
            WAKE => {
                let _ = rustix::io::read(&self.target.wake, &mut [0u8; 8]);
            }
            HANDSHAKES | DATA => self.accept(token == DATA),
            _ if token & ANCHOR != 0 => {
                if let Some(core) = self.core.upgrade() {
                    core.anchor_broke(PeerId(token & !ANCHOR));
                }
            }
            _ if token & PROCESS != 0 => {
                if let Some(core) = self.core.upgrade() {
                    core.process_ended(PeerId(token & !PROCESS));
                }
            }
            _ => self.drive(token),
        }
    }

    fn accept(&mut self, data: bool) {
        // So many, and then others have their turn.
        for _ in 0..32 {
            let listener = if data { &self.data } else { &self.handshakes };
            let sock = match listener.accept() {
                Ok((sock, _)) => sock,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) if matches!(e.kind(), io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted) => continue,
                Err(e) => {
                    tracing::warn!(error = %e, "cannot take a peer's connection; trying again");
                    return std::thread::sleep(PAUSE);
                }
            };
            let (counters, config) = (&self.target.counters, &self.target.config);
            let open = if data { self.conns.len() - self.greetings } else { self.greetings };
            let most = if data { config.max_connections } else { config.max_handshakes };
            let tuned = sys::tune(&sock, config.dead_after).and_then(|()| sock.set_nonblocking(true));
            if open >= most || tuned.is_err() {
                stats::add(&counters.connections_refused, 1);
                continue;
            }
            let conn = match data {
                true => Conn::Data(Inbound::new(sock)),
                false => Conn::Greeting(Greeting::new(sock, Instant::now() + config.handshake_timeout)),
            };
            let token = self.next;
            if epoll::add(&self.target.set, conn.sock(), epoll::EventData::new_u64(token), flags(conn.wants())).is_ok()
            {
                stats::add(&counters.connections_accepted, 1);
                stats::add(&counters.connections_in, 1);
                self.next += 1;
                self.greetings += usize::from(!data);
                self.conns.insert(token, conn);
            }
        }
    }

    fn drive(&mut self, token: u64) {
        let target = &self.target;
        let Some(conn) = self.conns.get_mut(&token) else { return };
        let before = conn.wants();
        let driven = match conn {
            Conn::Data(c) => {
                let mut memory =
                    Memory { registry: &target.registry, counters: &target.counters, scratch: &mut self.scratch };
                c.drive(&mut memory)
            }
            Conn::Greeting(c) => c.drive(|| target.descriptor()).map(|answered| {
                stats::add(&target.counters.handshakes_answered, answered.into());
            }),
        };
        let after = conn.wants();
        let kept = driven.and_then(|()| match before == after {
            true => Ok(()),
            false => Ok(epoll::modify(&target.set, conn.sock(), epoll::EventData::new_u64(token), flags(after))?),
        });
        if let Err(e) = kept {
            tracing::debug!(error = %e, "a peer's connection has ended");
            self.close(token);
        }
    }

    fn close(&mut self, token: u64) {
        if let Some(conn) = self.conns.remove(&token) {
            let _ = epoll::delete(&self.target.set, conn.sock().as_fd());
            self.greetings -= usize::from(matches!(conn, Conn::Greeting(_)));
            stats::sub(&self.target.counters.connections_in, 1);
        }
    }
}
