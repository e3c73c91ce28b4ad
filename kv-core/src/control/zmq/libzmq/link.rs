//! One PUSH socket and the monitor that tells whether its connection lives.

use std::os::fd::RawFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use zmq_sys as sys;

use super::ZmqContext;
use super::context::Socket;
use crate::control::Multipart;
use crate::control::zmq::outbox::{Dial, LINGER, Link, Links, Push, PushRole, Seen};
use crate::control::zmq::{KEEPALIVE, ZmqError};

/// Makes sockets of one context.
pub(in crate::control::zmq) struct LibzmqLinks(ZmqContext);

impl LibzmqLinks {
    pub fn new(context: &ZmqContext) -> Self {
        Self(context.clone())
    }
}

impl Links for LibzmqLinks {
    type Link = LibzmqLink;

    fn connect(&mut self, dial: Dial<'_>) -> Result<LibzmqLink, ZmqError> {
        let Dial { role, target, port, max_queue, token } = dial;
        let context = &self.0;
        let max_queue = i32::try_from(max_queue).unwrap_or(i32::MAX);
        let push = context.socket(sys::ZMQ_PUSH).map_err(|e| ZmqError::system("create a PUSH socket", e))?;
        set_options(&push, role, target.ipv6, max_queue).map_err(|e| ZmqError::system("set PUSH options", e))?;
        let monitor = watch(context, &push).map_err(|e| ZmqError::system("monitor a PUSH socket", e))?;
        push.connect(&format!("tcp://{}:{port}", target.text)).map_err(|e| ZmqError::system("connect", e))?;
        Ok(LibzmqLink { push, monitor, up: false, broke: None, role, token })
    }

    fn news(&mut self, _timeout: Duration, _tokens: &mut Vec<u64>) {}

    fn fd(&self) -> Option<RawFd> {
        None
    }
}

/// A PUSH socket and the monitor that tells whether its connection lives.
pub(in crate::control::zmq) struct LibzmqLink {
    push: Socket,
    monitor: Socket,
    up: bool,
    broke: Option<String>,
    role: PushRole,
    token: u64,
}

pub(super) fn set_keepalive(socket: &Socket) -> Result<(), zmq::Error> {
    let (idle, interval, count) = KEEPALIVE;
    socket.set_tcp_keepalive(1)?;
    socket.set_tcp_keepalive_idle(idle.as_secs() as i32)?;
    socket.set_tcp_keepalive_intvl(interval.as_secs() as i32)?;
    socket.set_tcp_keepalive_cnt(count as i32)
}

impl LibzmqLink {
    fn push_frame(&self, frame: &[u8], first: bool, more: bool) -> Result<(), Push> {
        let flags = if more { zmq::DONTWAIT | zmq::SNDMORE } else { zmq::DONTWAIT };
        loop {
            match self.push.send(frame, flags) {
                Ok(()) => return Ok(()),
                Err(zmq::Error::EINTR) => {}
                Err(zmq::Error::EAGAIN) if first => return Err(Push::Full),
                Err(e) => return Err(Push::Torn(format!("the connection broke within a message: {e}"))),
            }
        }
    }
}

impl Link for LibzmqLink {
    /// Queue all frames or none.
    ///
    /// libzmq counts its high-water mark in whole messages, so a full queue refuses the first frame and never a later
    /// one. Only the end of the connection on a socket that does not reconnect comes between two frames: then a later
    /// one fails, or the rest is taken and discarded by libzmq; the monitor reports the loss in both cases.
    fn push(&mut self, message: &Multipart) -> Push {
        let last = message.len().saturating_sub(1);
        for (i, frame) in message.iter().enumerate() {
            if let Err(refused) = self.push_frame(frame, i == 0, i < last) {
                return refused;
            }
        }
        Push::Taken
    }

    /// Read what the monitor has. Never blocks; costs one non-blocking receive when there is nothing.
    fn look(&mut self) -> Seen {
        let mut frame = zmq::Message::new();
        loop {
            match self.monitor.recv(&mut frame, zmq::DONTWAIT) {
                Ok(()) => {}
                Err(zmq::Error::EINTR) => continue,
                Err(zmq::Error::EAGAIN) => return Seen::Alive,
                Err(e) => return Seen::Lost(format!("the monitor broke: {e}")),
            }
            // Two frames an event: number (u16) and value (u32) in native order, then the address.
            let event = frame.first_chunk().filter(|_| frame.get_more()).map(|b| u32::from(u16::from_ne_bytes(*b)));
            let lost = match event {
                Some(sys::ZMQ_EVENT_HANDSHAKE_SUCCEEDED) => {
                    self.up = true;
                    continue;
                }
                Some(sys::ZMQ_EVENT_DISCONNECTED) => "the peer closed the connection",
                Some(sys::ZMQ_EVENT_CLOSED) => "the connection was refused",
                _ => continue,
            };
            self.up = false;
            match self.role {
                PushRole::ToDecode => return Seen::Lost(lost.to_owned()),
                PushRole::ToPrefill => self.broke = Some(lost.to_owned()),
            }
        }
    }

    fn broke(&mut self) -> Option<String> {
        self.broke.take()
    }

    /// Whether the connection was established at the last [`look`](Self::look).
    fn is_up(&self) -> bool {
        self.up
    }

    /// Whether the queue takes a message.
    fn has_room(&self) -> bool {
        self.push.get_events().is_ok_and(|events| events.contains(zmq::POLLOUT))
    }

    /// The peer is gone: do not wait for the queue to empty when closed.
    fn abandon(&self) {
        // Can only fail on a closed socket.
        let _ = self.push.set_linger(0);
    }

    fn token(&self) -> u64 {
        self.token
    }

    /// libzmq sees to it.
    fn lingers(&self) -> bool {
        false
    }
}

fn set_options(socket: &Socket, role: PushRole, ipv6: bool, max_queue: i32) -> Result<(), zmq::Error> {
    socket.set_ipv6(ipv6)?;
    socket.set_sndhwm(max_queue)?;
    socket.set_linger(LINGER.as_millis() as i32)?;
    match role {
        PushRole::ToDecode => {
            socket.set_reconnect_ivl(-1)?;
            set_keepalive(socket)
        }
        // From 100 ms, doubled up to 5 s: a restarted peer is found fast, a dead one is not hammered (F53).
        PushRole::ToPrefill => socket.set_reconnect_ivl_max(5000),
    }
}

fn watch(context: &ZmqContext, push: &Socket) -> Result<Socket, zmq::Error> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    // Unique in the process, hence in the context.
    let address = format!("inproc://kv-monitor-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    // A descriptor closed before the handshake is the end of an attempt.
    let events = sys::ZMQ_EVENT_HANDSHAKE_SUCCEEDED | sys::ZMQ_EVENT_DISCONNECTED | sys::ZMQ_EVENT_CLOSED;
    push.monitor(&address, events as i32)?;
    let monitor = context.socket(sys::ZMQ_PAIR)?;
    // libzmq's I/O thread *waits* for room in a full monitor, which would stop every connection of the context.
    monitor.set_rcvhwm(0)?;
    monitor.set_linger(0)?;
    monitor.connect(&address)?;
    Ok(monitor)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::zmq::libzmq::LibzmqInbox;
    use crate::control::zmq::resolve::Target;
    use crate::limits::Limits;

    fn connected() -> (LibzmqInbox, LibzmqLink) {
        let limits = Limits::default();
        let (mut inbox, to) = LibzmqInbox::bind(&ZmqContext::new(&limits).unwrap(), "127.0.0.1", &limits).unwrap();
        let target = Target { text: "127.0.0.1".to_owned(), ipv6: false };
        let context = ZmqContext::new(&limits).unwrap();
        let dial = Dial { role: PushRole::ToDecode, target: &target, port: to.port(), max_queue: 10, token: 0 };
        let mut link = LibzmqLinks::new(&context).connect(dial).unwrap();
        assert_eq!(link.push(&Multipart::from_iter([bytes::Bytes::from_static(b"hello")])), Push::Taken);
        inbox.wait(&[], None).unwrap();
        (inbox, link)
    }

    fn until(mut done: impl FnMut() -> bool) {
        let end = std::time::Instant::now() + std::time::Duration::from_secs(60);
        while !done() {
            assert!(std::time::Instant::now() < end);
            std::thread::yield_now();
        }
    }

    /// What the doc comments above say about libzmq, so that an update of it cannot change it unnoticed.
    #[test]
    fn cat_f63_a_connection_that_ends_within_a_message_ends_the_message() {
        let (inbox, mut link) = connected();
        assert_eq!(link.push_frame(b"1", true, true), Ok(()));
        drop(inbox);
        until(|| link.look() != Seen::Alive);
        let rest = link.push_frame(b"2", false, false);
        assert!(matches!(rest, Ok(()) | Err(Push::Torn(_))), "{rest:?}");
        until(|| !link.has_room());
        assert_eq!(link.push_frame(b"next", true, false), Err(Push::Full));
    }

    #[test]
    fn cat_f53_without_a_connection_nothing_is_taken() {
        let (inbox, mut link) = connected();
        drop(inbox);
        until(|| link.look() != Seen::Alive);
        // Reading its events makes the socket notice at once; `send` looks once a millisecond.
        until(|| !link.has_room());
        assert_eq!(link.push_frame(b"1", true, true), Err(Push::Full));
    }
}
