//! The control plane over ZeroMQ: PUSH to PULL, one multipart message is one event (protocol section 4).
//!
//! A manager has one [`ZmqInbox`] (a PULL socket, owned by the shard's thread alone) and one [`ZmqOutbox`] (PUSH
//! sockets, inside the shard's mutex), both made by its [`ZmqSockets`]. They are never used by two threads at once, so
//! frames of two messages cannot mix (F63).
//!
//! There are two implementations of the sockets. [`Implementation::Own`], the default, speaks ZMTP 3 itself: a message
//! crosses no other thread, which halves its latency. `Implementation::Libzmq` (feature `libzmq`, needs a C++ compiler)
//! is the reference library. On the wire they are the same, and the tests run every pair of them.
//!
//! Everything has a limit: connections, bytes of a frame (the connection is closed), frames and bytes of a message
//! (dropped whole, counted), messages waiting per connection (back-pressure), sockets, messages to send. What libzmq
//! cannot bound: the frames of a message that never ends are kept inside its receiving connection until the last one
//! arrives.

#[cfg(feature = "libzmq")]
mod libzmq;
mod outbox;
mod own;
mod resolve;

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;

#[cfg(feature = "libzmq")]
use libzmq::{LibzmqInbox, LibzmqLinks, ZmqContext};
use outbox::Outbox;
pub use outbox::{OutboxCounters, PushRole};
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub use own::fuzzing;
use own::{OwnInbox, OwnLinks};

use super::wake::WakeFd;
use super::{ControlError, ControlEvent, ControlPlane, ControlTap, Multipart};
use crate::limits::Limits;
use crate::net::Endpoint;
use crate::time::Timestamp;

/// Connections the kernel completes before they are accepted; libzmq's 100 drops SYNs when a fleet starts. The kernel
/// cuts it to `net.core.somaxconn`.
const BACKLOG: i32 = 4096;

/// TCP keepalive as in protocol section 4: a peer that vanished is noticed after about 45 s.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(30), Duration::from_secs(5), 3);

fn keepalive() -> socket2::TcpKeepalive {
    let (idle, interval, count) = KEEPALIVE;
    socket2::TcpKeepalive::new().with_time(idle).with_interval(interval).with_retries(count)
}

/// Why a socket could not be made or used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ZmqError {
    /// The address cannot be bound.
    #[error("cannot bind the control socket to {host}: {reason}")]
    Bind {
        /// The host asked for.
        host: String,
        /// What the system said.
        reason: String,
    },
    /// The system or libzmq refused; in practice descriptors or sockets have run out.
    #[error("control sockets: cannot {action}: {reason}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What was said.
        reason: String,
    },
}

impl ZmqError {
    fn io(action: &'static str, error: &io::Error) -> Self {
        Self::System { action, reason: error.to_string() }
    }

    #[cfg(feature = "libzmq")]
    fn system(action: &'static str, error: ::zmq::Error) -> Self {
        Self::System { action, reason: error.to_string() }
    }
}

/// Who implements the sockets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Implementation {
    /// This crate, without threads of its own.
    #[default]
    Own,
    /// libzmq, with one I/O thread a manager.
    #[cfg(feature = "libzmq")]
    Libzmq,
}

/// Makes a manager's sockets.
#[derive(Clone)]
pub struct ZmqSockets(Maker);

#[derive(Clone)]
enum Maker {
    Own,
    #[cfg(feature = "libzmq")]
    Libzmq(ZmqContext),
}

impl ZmqSockets {
    /// Sockets of this implementation, within `limits`.
    ///
    /// # Errors
    /// [`ZmqError::System`] when libzmq cannot start.
    pub fn new(implementation: Implementation, limits: &Limits) -> Result<Self, ZmqError> {
        let _ = limits;
        Ok(Self(match implementation {
            Implementation::Own => Maker::Own,
            #[cfg(feature = "libzmq")]
            Implementation::Libzmq => Maker::Libzmq(ZmqContext::new(limits)?),
        }))
    }

    /// Bind an inbox to an ephemeral port of `host` (F67: the system chooses, nothing is probed) and say which.
    ///
    /// `host` is an IPv4 or IPv6 address (brackets and zone allowed), a wildcard, or a name; a name is looked up here,
    /// which can block. The endpoint carries `host` as it was given, unbracketed. TCP keepalive is on, so a connection
    /// of a vanished peer does not stay for ever.
    ///
    /// # Errors
    /// [`ZmqError::Bind`] when the host is not an address of this machine; [`ZmqError::System`] when sockets run out.
    pub fn bind(&self, host: &str, limits: &Limits) -> Result<(ZmqInbox, Endpoint), ZmqError> {
        match &self.0 {
            Maker::Own => OwnInbox::bind(host, limits).map(|(i, at)| (ZmqInbox(InboxKind::Own(i)), at)),
            #[cfg(feature = "libzmq")]
            Maker::Libzmq(context) => {
                LibzmqInbox::bind(context, host, limits).map(|(i, at)| (ZmqInbox(InboxKind::Libzmq(i)), at))
            }
        }
    }

    /// An outbox with no sockets yet, bounded by `max_sockets` and `max_send_queue` of `limits`.
    ///
    /// # Errors
    /// [`ZmqError::System`] when descriptors run out.
    pub fn outbox(&self, role: PushRole, limits: &Limits) -> Result<ZmqOutbox, ZmqError> {
        Ok(ZmqOutbox(match &self.0 {
            Maker::Own => {
                let links = OwnLinks::new().map_err(|e| ZmqError::io("create an epoll set", &e))?;
                OutboxKind::Own(Outbox::new(links, role, limits))
            }
            #[cfg(feature = "libzmq")]
            Maker::Libzmq(context) => OutboxKind::Libzmq(Outbox::new(LibzmqLinks::new(context), role, limits)),
        }))
    }
}

/// What an inbox received and refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct InboxCounters {
    /// Whole messages received.
    pub messages: u64,
    /// Messages dropped for more frames than `Limits::max_frames`.
    pub too_many_frames: u64,
    /// Messages dropped for more bytes than `Limits::max_message_bytes`.
    pub too_many_bytes: u64,
    /// Connections refused because there are `Limits::max_sockets` already. Not counted by libzmq.
    pub refused: u64,
}

/// What ended a [`ZmqInbox::wait`]. All false and empty: the timeout passed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ready {
    /// The inbox has a message.
    pub inbox: bool,
    /// The descriptors that are readable or broken, in the order given.
    pub fds: SmallVec<[RawFd; 4]>,
}

/// The PULL socket of a manager. Owned by one thread.
pub struct ZmqInbox(InboxKind);

#[allow(clippy::large_enum_variant, reason = "one a manager")]
enum InboxKind {
    Own(OwnInbox),
    #[cfg(feature = "libzmq")]
    Libzmq(LibzmqInbox),
}

/// Call a method of whichever implementation it is.
macro_rules! each {
    ($self:expr, $kind:ident, $it:ident => $call:expr) => {
        match &$self.0 {
            $kind::Own($it) => $call,
            #[cfg(feature = "libzmq")]
            $kind::Libzmq($it) => $call,
        }
    };
    (mut $self:expr, $kind:ident, $it:ident => $call:expr) => {
        match &mut $self.0 {
            $kind::Own($it) => $call,
            #[cfg(feature = "libzmq")]
            $kind::Libzmq($it) => $call,
        }
    };
}

impl ZmqInbox {
    /// Append at most `max` whole messages to `out`; returns how many. Never blocks.
    ///
    /// A message over a limit is dropped whole and counted (F61).
    ///
    /// # Errors
    /// [`ZmqError::System`]; what was received before stays in `out`.
    pub fn recv(&mut self, max: usize, out: &mut Vec<Multipart>) -> Result<usize, ZmqError> {
        each!(mut self, InboxKind, i => i.recv(max, out))
    }

    /// Block until a message or a descriptor is ready, or `timeout` passed (`None`: no end).
    ///
    /// Messages that [`recv`](Self::recv) left behind count as ready at once. Signals do not end the wait early.
    ///
    /// # Errors
    /// [`ZmqError::System`], for a descriptor that is not open among others.
    pub fn wait(&mut self, fds: &[RawFd], timeout: Option<Duration>) -> Result<Ready, ZmqError> {
        each!(mut self, InboxKind, i => i.wait(fds, timeout))
    }

    /// What was received and refused so far.
    pub fn counters(&self) -> InboxCounters {
        each!(self, InboxKind, i => i.counters())
    }
}

/// PUSH sockets by endpoint. Used by one thread at a time.
///
/// Messages to one endpoint arrive in the order sent while its connection lives. No call blocks; dropping it waits for
/// what is queued, for half a second at most.
pub struct ZmqOutbox(OutboxKind);

#[allow(clippy::large_enum_variant, reason = "one a manager")]
enum OutboxKind {
    Own(Outbox<OwnLinks>),
    #[cfg(feature = "libzmq")]
    Libzmq(Outbox<LibzmqLinks>),
}

impl ZmqOutbox {
    /// Wake this when a host name has been looked up, so that what waits for it leaves before the next sweep. To be
    /// set before the first send.
    pub fn set_wake(&mut self, wake: Arc<WakeFd>) {
        each!(mut self, OutboxKind, o => o.set_wake(wake));
    }

    /// Queue a whole message, or nothing of it. It leaves with the next [`flush`](Self::flush) at the latest. Never
    /// blocks. A message without frames is not a message and is dropped.
    ///
    /// # Errors
    /// [`ControlError::Stalled`] when the peer's queue is full (F64); [`ControlError::Unreachable`] when there cannot
    /// be a connection: no such host text, no sockets left, or the connection broke twice within this call.
    pub fn send(&mut self, to: &Endpoint, message: Multipart) -> Result<(), ControlError> {
        each!(mut self, OutboxKind, o => o.send(to, message))
    }

    /// Send what is queued, as far as the connections take it; the rest follows when they do. True when there are
    /// events to poll. Never blocks.
    pub fn flush(&mut self) -> bool {
        each!(mut self, OutboxKind, o => o.flush())
    }

    /// Move at most `max` [`PeerLost`](ControlEvent::PeerLost) events to `out`. Never blocks.
    pub fn poll_events(&mut self, max: usize, out: &mut Vec<ControlEvent>) {
        each!(mut self, OutboxKind, o => o.poll_events(max, out));
    }

    /// Close an endpoint's socket; what is queued may still leave for half a second, if it is connected or connecting.
    /// Nothing is reported.
    pub fn close(&mut self, endpoint: &Endpoint) {
        each!(mut self, OutboxKind, o => o.close(endpoint));
    }

    /// Look at a part of the sockets for broken connections and for ones that never came up; returns when to be called
    /// again. Sockets in use are looked at by `send` anyway, so this is slow on purpose.
    pub fn sweep(&mut self, now: Timestamp) -> Option<Timestamp> {
        each!(mut self, OutboxKind, o => o.sweep(now))
    }

    /// Readable when a connection has news, which any call takes in. `None`: there is a thread for that.
    pub fn fd(&self) -> Option<RawFd> {
        each!(self, OutboxKind, o => o.fd())
    }

    /// Open sockets, and names being looked up.
    pub fn len(&self) -> usize {
        each!(self, OutboxKind, o => o.len())
    }

    /// Whether there is no socket.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether there is a socket for this endpoint.
    pub fn contains(&self, endpoint: &Endpoint) -> bool {
        each!(self, OutboxKind, o => o.contains(endpoint))
    }

    /// What was done so far.
    pub fn counters(&self) -> OutboxCounters {
        each!(self, OutboxKind, o => o.counters())
    }
}

/// The [`ControlPlane`] of a shard: an outbox, and the messages its thread took from the inbox.
pub struct ZmqControl {
    outbox: ZmqOutbox,
    incoming: VecDeque<Multipart>,
    tap: Option<Arc<dyn ControlTap>>,
}

impl ZmqControl {
    /// A control plane that sends through `outbox`.
    pub fn new(outbox: ZmqOutbox) -> Self {
        Self { outbox, incoming: VecDeque::new(), tap: None }
    }

    /// Tell `tap` of every message that is sent and received from now on.
    #[must_use]
    pub fn tapped(self, tap: Option<Arc<dyn ControlTap>>) -> Self {
        Self { tap, ..self }
    }

    /// Hand over a message that the inbox received. The next [`recv`](ControlPlane::recv) reports it, in this order.
    pub fn push_incoming(&mut self, message: Multipart) {
        self.incoming.push_back(message);
    }

    /// Messages handed over and not yet taken.
    pub fn pending(&self) -> usize {
        self.incoming.len()
    }

    /// The sending half.
    pub fn outbox(&self) -> &ZmqOutbox {
        &self.outbox
    }
}

impl ControlPlane for ZmqControl {
    fn send(&mut self, to: &Endpoint, message: Multipart) -> Result<(), ControlError> {
        let Some(tap) = &self.tap else { return self.outbox.send(to, message) };
        let frames = message.clone();
        self.outbox.send(to, message)?;
        tap.sent(to, &frames);
        Ok(())
    }

    /// Lost peers first: they are few, and a flood of messages must not hide them.
    fn recv(&mut self, max: usize, out: &mut Vec<ControlEvent>) {
        let before = out.len();
        self.outbox.poll_events(max, out);
        let room = max.saturating_sub(out.len() - before).min(self.incoming.len());
        if let Some(tap) = &self.tap {
            self.incoming.range(..room).for_each(|message| tap.received(message));
        }
        out.extend(self.incoming.drain(..room).map(ControlEvent::Message));
    }

    fn flush(&mut self) -> bool {
        self.outbox.flush()
    }

    fn close(&mut self, endpoint: &Endpoint) {
        self.outbox.close(endpoint);
    }

    fn tick(&mut self, now: Timestamp) -> Option<Timestamp> {
        self.outbox.sweep(now)
    }
}
