//! The sending end: one connection, its handshake, and what waits to be sent.

use std::collections::VecDeque;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use socket2::{Domain, Socket, Type};

use super::codec::{self, Bounds, Decoder, Item};
use super::handshake::{self, Command, End, GREETING};
use super::poll::Epoll;
use crate::control::Multipart;
use crate::control::zmq::outbox::{Dial, Link, Links, Push, PushRole, Seen};
use crate::control::zmq::{ZmqError, keepalive};
use crate::time::Timestamp;

/// Bytes queued beyond which `push` writes at once instead of waiting for the flush of its step.
const WRITE_AT: usize = 64 << 10;
/// Bytes sent already that may lie in front of the rest.
const SENT_KEPT: usize = 1 << 20;
/// A PULL peer has nothing to say but its handshake and now and then a PING: more than this at once, bytes, is abuse.
const MAX_CHATTER: usize = 64 << 10;
/// First pause before another attempt to connect, doubled up to the last one: a restarted peer is found fast, a dead one
/// is not hammered (F53).
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// Opens connections, and knows which of them have news.
pub(in crate::control::zmq) struct OwnLinks {
    epoll: Arc<Epoll>,
}

impl OwnLinks {
    pub fn new() -> io::Result<Self> {
        Ok(Self { epoll: Arc::new(Epoll::new()?) })
    }
}

impl Links for OwnLinks {
    type Link = OwnLink;

    fn connect(&mut self, dial: Dial<'_>) -> Result<OwnLink, ZmqError> {
        let Dial { role, target, port, max_queue, token } = dial;
        let system = |action| move |e: io::Error| ZmqError::io(action, &e);
        let address = target.socket_address(port).map_err(system("read the address"))?;
        let mut link = OwnLink {
            role,
            address,
            token,
            epoll: self.epoll.clone(),
            max_queue,
            sock: None,
            stage: Stage::Down,
            next: None,
            pause: FIRST_PAUSE,
            greeting: Vec::new(),
            decoder: Decoder::default(),
            lost: None,
            broke: None,
            out: Vec::new(),
            start: 0,
            sent: 0,
            whole: 0,
            ends: VecDeque::new(),
        };
        // Fails for want of descriptors only; everything else is news of the connection.
        link.call().map_err(system("create a socket"))?;
        Ok(link)
    }

    fn news(&mut self, timeout: Duration, tokens: &mut Vec<u64>) {
        if let Err(error) = self.epoll.ready(timeout, tokens) {
            tracing::error!("the control connections cannot be looked at: {error}");
        }
    }

    fn fd(&self) -> Option<RawFd> {
        Some(self.epoll.fd())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Down,
    Connecting,
    Greeting,
    Readying,
    Up,
}

/// A PUSH connection.
pub(in crate::control::zmq) struct OwnLink {
    role: PushRole,
    address: SocketAddr,
    token: u64,
    epoll: Arc<Epoll>,
    max_queue: usize,
    /// None while it is down.
    sock: Option<TcpStream>,
    stage: Stage,
    /// While down: when to connect again, once somebody has looked at the clock.
    next: Option<Timestamp>,
    pause: Duration,
    greeting: Vec<u8>,
    decoder: Decoder,
    lost: Option<String>,
    broke: Option<String>,
    /// Encoded messages. Kept until the last byte is with the kernel, so that a new connection starts with a whole one.
    out: Vec<u8>,
    /// Where `out` starts, in bytes since the link was made.
    start: u64,
    /// Bytes of `out` that the kernel has.
    sent: usize,
    /// Bytes of `out` that are messages the kernel has whole.
    whole: usize,
    /// Where each of the others ends, counted as `start` is.
    ends: VecDeque<u64>,
}

impl OwnLink {
    /// Start to connect.
    fn call(&mut self) -> io::Result<()> {
        let socket = Socket::new(Domain::for_address(self.address), Type::STREAM.nonblocking().cloexec(), None)?;
        socket.set_tcp_nodelay(true)?;
        if self.role == PushRole::ToDecode {
            socket.set_tcp_keepalive(&keepalive())?;
        }
        self.greeting.clear();
        self.decoder = Decoder::default();
        let begun = socket.connect(&self.address.into());
        let socket = TcpStream::from(socket);
        self.epoll.add_edges(&socket, self.token)?;
        self.sock = Some(socket);
        self.stage = Stage::Connecting;
        match begun {
            Err(e) if e.raw_os_error() != Some(libc::EINPROGRESS) => self.fail(refusal(&e)),
            _ => {}
        }
        Ok(())
    }

    /// The connection is over.
    fn fail(&mut self, reason: String) {
        if let Some(sock) = self.sock.take() {
            self.epoll.remove(&sock);
        }
        self.stage = Stage::Down;
        self.next = None;
        // Messages that the kernel took whole may be lost with it; one of which it took a part starts again.
        self.forget(self.whole);
        self.sent = 0;
        match self.role {
            PushRole::ToDecode => self.lost = Some(reason),
            PushRole::ToPrefill => {
                tracing::debug!("control connection to {}: {reason}", self.address);
                self.broke = Some(reason);
            }
        }
    }

    fn forget(&mut self, bytes: usize) {
        self.out.drain(..bytes);
        self.start += bytes as u64;
        self.sent = self.sent.saturating_sub(bytes);
        self.whole = 0;
    }

    /// Go on as far as the connection allows.
    fn go_on(&mut self) -> Result<(), String> {
        let Some(sock) = &self.sock else { return Ok(()) };
        if self.stage == Stage::Connecting {
            if let Some(e) = sock.take_error().unwrap_or_else(Some) {
                return Err(refusal(&e));
            }
            if sock.peer_addr().is_err() {
                return Ok(());
            }
            self.stage = Stage::Greeting;
            self.say(&handshake::greeting())?;
        }
        self.read()?;
        self.write()
    }

    /// A few bytes of the handshake, for which an empty socket has room.
    fn say(&self, bytes: &[u8]) -> Result<(), String> {
        let Some(mut sock) = self.sock.as_ref() else { return Ok(()) };
        sock.write_all(bytes).map_err(|e| broken(&e))
    }

    fn read(&mut self) -> Result<(), String> {
        let mut buf = [0; 1024];
        let mut total = 0;
        while let Some(mut sock) = self.sock.as_ref() {
            let n = match sock.read(&mut buf) {
                Ok(0) => return Err(CLOSED.to_owned()),
                Ok(n) => n,
                Err(e) if e.kind() == ErrorKind::Interrupted => continue,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(e) => return Err(broken(&e)),
            };
            total += n;
            if total > MAX_CHATTER {
                return Err("it sends what nobody asked for".to_owned());
            }
            self.take(&buf[..n])?;
        }
        Ok(())
    }

    fn take(&mut self, mut data: &[u8]) -> Result<(), String> {
        if self.stage == Stage::Greeting {
            let (now, later) = data.split_at(data.len().min(GREETING - self.greeting.len()));
            self.greeting.extend_from_slice(now);
            data = later;
            if !handshake::check_greeting(&self.greeting)? {
                return Ok(());
            }
            self.stage = Stage::Readying;
            self.say(&handshake::ready(End::Push))?;
        }
        // What else than commands comes is dropped at once.
        let bounds = Bounds { frames: 0, frame_bytes: MAX_CHATTER, message_bytes: 0 };
        let mut commands = Vec::new();
        self.decoder
            .feed(data, bounds, |item| {
                if let Item::Command(body) = item {
                    commands.push(body);
                }
            })
            .map_err(|e| e.to_string())?;
        for body in commands {
            match handshake::command(End::Push, self.stage == Stage::Up, &body)? {
                Command::Ready => {
                    self.stage = Stage::Up;
                    self.pause = FIRST_PAUSE;
                }
                // Behind what waits: it must not fall into a message.
                Command::Pong(frame) if self.ends.len() < self.max_queue => {
                    self.out.extend_from_slice(&frame);
                    self.ends.push_back(self.start + self.out.len() as u64);
                }
                Command::Pong(_) | Command::Other => {}
            }
        }
        Ok(())
    }

    fn write(&mut self) -> Result<(), String> {
        if self.stage != Stage::Up {
            return Ok(());
        }
        while let Some(mut sock) = self.sock.as_ref().filter(|_| self.sent < self.out.len()) {
            match sock.write(&self.out[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) => return Err(broken(&e)),
            }
        }
        while let Some(end) = self.ends.front().map(|end| (end - self.start) as usize).filter(|e| *e <= self.sent) {
            self.whole = end;
            self.ends.pop_front();
        }
        if self.sent == self.out.len() {
            self.start += self.out.len() as u64;
            self.out.clear();
            (self.sent, self.whole) = (0, 0);
            if self.out.capacity() > SENT_KEPT {
                self.out = Vec::new();
            }
        } else if self.whole > SENT_KEPT {
            self.forget(self.whole);
        }
        Ok(())
    }
}

impl Link for OwnLink {
    fn push(&mut self, message: &Multipart) -> Push {
        if self.ends.len() >= self.max_queue {
            self.flush();
            if self.ends.len() >= self.max_queue {
                return Push::Full;
            }
        }
        codec::put_message(&mut self.out, message);
        self.ends.push_back(self.start + self.out.len() as u64);
        if self.out.len() - self.sent > WRITE_AT {
            self.flush();
        }
        Push::Taken
    }

    fn flush(&mut self) {
        if let Err(reason) = self.write() {
            self.fail(reason);
        }
    }

    fn look(&mut self) -> Seen {
        self.lost.clone().map_or(Seen::Alive, Seen::Lost)
    }

    fn broke(&mut self) -> Option<String> {
        self.broke.take()
    }

    fn advance(&mut self) {
        if let Err(reason) = self.go_on() {
            self.fail(reason);
        }
    }

    fn tick(&mut self, now: Timestamp) {
        if self.stage != Stage::Down || self.lost.is_some() {
            return;
        }
        let next = *self.next.get_or_insert(now + self.pause);
        if now >= next {
            self.pause = (self.pause * 2).min(LAST_PAUSE);
            if let Err(e) = self.call() {
                self.fail(ZmqError::io("create a socket", &e).to_string());
            }
        }
    }

    fn token(&self) -> u64 {
        self.token
    }

    fn is_up(&self) -> bool {
        self.stage == Stage::Up
    }

    fn has_room(&self) -> bool {
        self.ends.is_empty()
    }

    fn lingers(&self) -> bool {
        self.lost.is_none() && self.stage != Stage::Down && !self.ends.is_empty()
    }
}

const CLOSED: &str = "the peer closed the connection";

fn refusal(e: &io::Error) -> String {
    match e.kind() {
        ErrorKind::ConnectionRefused => "the connection was refused".to_owned(),
        _ => format!("it cannot be reached: {e}"),
    }
}

fn broken(e: &io::Error) -> String {
    match e.kind() {
        ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => CLOSED.to_owned(),
        _ => format!("the connection broke: {e}"),
    }
}
