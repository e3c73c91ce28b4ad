//! The receiving end: a listener and the connections it accepted, read by the one thread that acts on the messages.

use std::collections::{HashMap, VecDeque};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use smallvec::SmallVec;
use socket2::{Domain, SockRef, Socket, Type};

use super::codec::{Bounds, Decoder, Item};
use super::handshake::{self, Command, End, GREETING};
use super::poll::{self, Epoll};
use crate::control::Multipart;
use crate::control::zmq::{BACKLOG, InboxCounters, Ready, ZmqError, keepalive, resolve};
use crate::limits::Limits;
use crate::net::Endpoint;

const LISTENER: u64 = 0;
/// Bytes read from one connection before the next one's turn.
const READ: usize = 64 << 10;
/// Messages read ahead. Then connections are left to fill, and TCP holds their senders back.
const AHEAD: usize = 256;
/// A connection that has not said who it is after this long is closed (libzmq's default).
const HANDSHAKE: Duration = Duration::from_secs(30);
/// How long the listener rests when the process is out of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Connections accepted before what they send is looked at.
const ACCEPT_AT_ONCE: usize = 64;

struct Conn {
    sock: TcpStream,
    greeting: Vec<u8>,
    greeted: bool,
    up: bool,
    decoder: Decoder,
}

/// The PULL socket of a manager.
pub(in crate::control::zmq) struct OwnInbox {
    epoll: Epoll,
    listener: TcpListener,
    /// The listener rests until then.
    accept_again: Option<Instant>,
    conns: HashMap<u64, Conn>,
    max_conns: usize,
    next: u64,
    /// Connections in the order of their handshakes' deadlines.
    greeting: VecDeque<(Instant, u64)>,
    messages: VecDeque<Multipart>,
    bounds: Bounds,
    counters: InboxCounters,
    tokens: Vec<u64>,
    /// Who had to wait when enough was read: the next look starts there.
    left_out: Option<u64>,
    buf: Vec<u8>,
}

impl OwnInbox {
    /// See [`ZmqSockets::bind`](crate::control::zmq::ZmqSockets::bind).
    pub fn bind(host: &str, limits: &Limits) -> Result<(Self, Endpoint), ZmqError> {
        let named = Endpoint::new(host, 0);
        let refused = |reason: String| ZmqError::Bind { host: named.host().to_owned(), reason };
        let target = resolve::bind_target(named.host()).map_err(refused)?;
        let address = target.socket_address(0).map_err(|e| refused(e.to_string()))?;
        let system = |action: &'static str| move |e: io::Error| ZmqError::io(action, &e);

        let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking().cloexec(), None)
            .map_err(system("create a socket"))?;
        if target.ipv6 {
            // The wildcard takes IPv4 as well, as libzmq's does.
            socket.set_only_v6(false).map_err(system("set socket options"))?;
        }
        // A successor can have the port while connections of this one are still being forgotten.
        socket.set_reuse_address(true).map_err(system("set socket options"))?;
        socket.bind(&address.into()).map_err(|e| refused(e.to_string()))?;
        socket.listen(BACKLOG).map_err(|e| refused(e.to_string()))?;
        let listener = TcpListener::from(socket);
        let port = listener.local_addr().map_err(system("read the bound port"))?.port();
        let epoll = Epoll::new().map_err(system("create an epoll set"))?;
        epoll.add_reader(&listener, LISTENER).map_err(system("watch the listener"))?;
        let inbox = Self {
            epoll,
            listener,
            accept_again: None,
            conns: HashMap::new(),
            max_conns: limits.max_sockets.max(1),
            next: LISTENER + 1,
            greeting: VecDeque::new(),
            messages: VecDeque::new(),
            bounds: Bounds {
                frames: limits.max_frames,
                frame_bytes: limits.max_frame_bytes,
                message_bytes: limits.max_message_bytes,
            },
            counters: InboxCounters::default(),
            tokens: Vec::new(),
            left_out: None,
            buf: vec![0; READ],
        };
        Ok((inbox, Endpoint::new(named.host(), port)))
    }

    /// See [`ZmqInbox::recv`](crate::control::zmq::ZmqInbox::recv).
    pub fn recv(&mut self, max: usize, out: &mut Vec<Multipart>) -> Result<usize, ZmqError> {
        let before = out.len();
        // Also while messages never run out, when nobody waits.
        self.deadlines()?;
        while out.len() - before < max {
            if let Some(message) = self.messages.pop_front() {
                out.push(message);
            } else if !self.look()? || self.messages.is_empty() {
                break;
            }
        }
        Ok(out.len() - before)
    }

    /// See [`ZmqInbox::wait`](crate::control::zmq::ZmqInbox::wait).
    pub fn wait(&mut self, fds: &[RawFd], timeout: Option<Duration>) -> Result<Ready, ZmqError> {
        let end = timeout.and_then(|t| Instant::now().checked_add(t));
        let all: SmallVec<[RawFd; 6]> = std::iter::once(self.epoll.fd()).chain(fds.iter().copied()).collect();
        loop {
            if !self.messages.is_empty() {
                return Ok(Ready { inbox: true, fds: SmallVec::new() });
            }
            let now = Instant::now();
            let next = [end, self.greeting.front().map(|g| g.0), self.accept_again].into_iter().flatten().min();
            let ready = poll::sleep(&all, next.map(|at| at.saturating_duration_since(now)))
                .map_err(|e| ZmqError::io("wait for input", &e))?;
            if ready.first() == Some(&true) {
                self.look()?;
            }
            self.deadlines()?;
            let inbox = !self.messages.is_empty();
            let fds: SmallVec<[RawFd; 4]> =
                fds.iter().zip(&ready[1..]).filter(|(_, r)| **r).map(|(fd, _)| *fd).collect();
            if inbox || !fds.is_empty() || end.is_some_and(|end| Instant::now() >= end) {
                return Ok(Ready { inbox, fds });
            }
        }
    }

    /// What was received and refused so far.
    pub fn counters(&self) -> InboxCounters {
        self.counters
    }

    /// Read once from each connection that has something, as long as few messages wait. False: none had.
    fn look(&mut self) -> Result<bool, ZmqError> {
        let mut tokens = std::mem::take(&mut self.tokens);
        let looked = self.epoll.ready(Duration::ZERO, &mut tokens);
        let any = !tokens.is_empty();
        // The order of the reports is always the same: without this, one that floods would be the only one to be heard.
        let first = tokens.iter().position(|t| Some(*t) == self.left_out).unwrap_or(0);
        tokens.rotate_left(first);
        for token in tokens.drain(..) {
            // Level-triggered: who is left out is reported again.
            if self.messages.len() >= AHEAD {
                self.left_out = Some(token);
                break;
            }
            if token == LISTENER {
                self.accept();
            } else if let Err(reason) = self.read(token) {
                self.close(token, &reason);
            }
        }
        self.tokens = tokens;
        looked.map_err(|e| ZmqError::io("look for input", &e))?;
        Ok(any)
    }

    fn accept(&mut self) {
        for _ in 0..ACCEPT_AT_ONCE {
            let sock = match self.listener.accept() {
                Ok((sock, _)) => sock,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                // It was gone before it was accepted.
                Err(e) if matches!(e.kind(), ErrorKind::ConnectionAborted | ErrorKind::Interrupted) => continue,
                Err(e) => {
                    tracing::warn!("cannot accept control connections; trying again: {e}");
                    self.epoll.remove(&self.listener);
                    self.accept_again = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            };
            if self.conns.len() >= self.max_conns {
                self.counters.refused += 1;
                continue;
            }
            let token = self.next;
            if let Err(e) = self.adopt(sock, token) {
                tracing::debug!("a control connection broke at once: {e}");
                continue;
            }
            self.next += 1;
            self.greeting.push_back((Instant::now() + HANDSHAKE, token));
        }
    }

    fn adopt(&mut self, sock: TcpStream, token: u64) -> io::Result<()> {
        sock.set_nonblocking(true)?;
        sock.set_nodelay(true)?;
        SockRef::from(&sock).set_tcp_keepalive(&keepalive())?;
        self.epoll.add_reader(&sock, token)?;
        // An empty socket has room for it.
        (&sock).write_all(&handshake::greeting())?;
        let conn = Conn { sock, greeting: Vec::new(), greeted: false, up: false, decoder: Decoder::default() };
        self.conns.insert(token, conn);
        Ok(())
    }

    fn close(&mut self, token: u64, reason: &str) {
        if let Some(conn) = self.conns.remove(&token) {
            self.epoll.remove(&conn.sock);
            let peer = conn.sock.peer_addr().map_or_else(|_| "a peer".to_owned(), |a| a.to_string());
            tracing::debug!("control connection of {peer} closed: {reason}");
        }
    }

    fn read(&mut self, token: u64) -> Result<(), String> {
        let Some(conn) = self.conns.get_mut(&token) else { return Ok(()) };
        let n = match conn.sock.read(&mut self.buf) {
            Ok(0) => return Err("the peer closed it".to_owned()),
            Ok(n) => n,
            Err(e) if matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => return Ok(()),
            Err(e) => return Err(e.to_string()),
        };
        let mut data = &self.buf[..n];
        if !conn.greeted {
            let (now, later) = data.split_at(n.min(GREETING - conn.greeting.len()));
            conn.greeting.extend_from_slice(now);
            data = later;
            if !handshake::check_greeting(&conn.greeting)? {
                return Ok(());
            }
            conn.greeted = true;
            conn.greeting = Vec::new();
            conn.sock.write_all(&handshake::ready(End::Pull)).map_err(|e| e.to_string())?;
        }
        let Conn { sock, up, decoder, .. } = conn;
        let (messages, counters) = (&mut self.messages, &mut self.counters);
        let mut broken = None;
        let fed = decoder.feed(data, self.bounds, |item| match item {
            // What follows a fault is not looked at.
            _ if broken.is_some() => {}
            Item::Command(body) => match handshake::command(End::Pull, *up, &body) {
                Ok(Command::Ready) => *up = true,
                // Best effort: who does not read gets no answer.
                Ok(Command::Pong(frame)) => broken = answer(sock, &frame).err(),
                Ok(Command::Other) => {}
                Err(reason) => broken = Some(reason),
            },
            _ if !*up => broken = Some("it sent a message before READY".to_owned()),
            Item::Message(message) => {
                counters.messages += 1;
                messages.push_back(message);
            }
            Item::TooManyFrames => counters.too_many_frames += 1,
            Item::TooManyBytes => counters.too_many_bytes += 1,
        });
        match broken {
            Some(reason) => Err(reason),
            None => fed.map_err(|e| e.to_string()),
        }
    }

    fn deadlines(&mut self) -> Result<(), ZmqError> {
        if self.greeting.is_empty() && self.accept_again.is_none() {
            return Ok(());
        }
        let now = Instant::now();
        if self.accept_again.is_some_and(|at| at <= now) {
            // First, so that it is tried again when it fails.
            self.accept_again = Some(now + ACCEPT_PAUSE);
            self.epoll.add_reader(&self.listener, LISTENER).map_err(|e| ZmqError::io("watch the listener", &e))?;
            self.accept_again = None;
        }
        while let Some((deadline, token)) = self.greeting.front().copied() {
            let waiting = self.conns.get(&token).is_some_and(|c| !c.up);
            if waiting && deadline > now {
                break;
            }
            self.greeting.pop_front();
            if waiting {
                self.close(token, "it did not say who it is");
            }
        }
        Ok(())
    }
}

/// Send a PONG. What does not fit whole breaks the connection: a part of a frame would.
fn answer(mut sock: &TcpStream, frame: &[u8]) -> Result<(), String> {
    match sock.write(frame) {
        Ok(n) if n == frame.len() => Ok(()),
        Err(e) if e.kind() == ErrorKind::WouldBlock => Ok(()),
        Ok(_) => Err("it does not read what it is sent".to_owned()),
        Err(e) => Err(e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A forked child has the descriptors of its parent: closing ours does not take it out of the set by itself.
    #[test]
    fn cat_f61_a_closed_connection_whose_descriptor_lives_on_elsewhere_is_not_reported_for_ever() {
        let (mut inbox, at) = OwnInbox::bind("127.0.0.1", &Limits::default()).unwrap();
        let peer = TcpStream::connect(("127.0.0.1", at.port())).unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while inbox.conns.is_empty() {
            assert!(Instant::now() < end);
            inbox.wait(&[], Some(Duration::from_millis(1))).unwrap();
        }
        let childs: Vec<_> = inbox.conns.values().map(|c| c.sock.try_clone().unwrap()).collect();
        drop(peer);
        while !inbox.conns.is_empty() {
            assert!(Instant::now() < end);
            inbox.wait(&[], Some(Duration::from_millis(1))).unwrap();
        }
        assert!(!inbox.look().unwrap(), "it is still reported");
        drop(childs);
    }
}
