//! The control plane over libzmq: PUSH to PULL, one multipart message is one event (protocol section 4).
//!
//! A manager has one [`ZmqInbox`] (a PULL socket, owned by the shard's thread alone) and one [`ZmqOutbox`] (PUSH
//! sockets, inside the shard's mutex). libzmq sockets may move between threads when a full fence lies between the
//! uses; a mutex is one. They are never used by two threads at once, so frames of two messages cannot mix (F63).
//!
//! What libzmq cannot bound: the frames of a message that never ends are kept inside its receiving connection until
//! the last one arrives. Everything else has a limit: bytes of a frame (the connection is closed), frames and bytes of
//! a message (dropped whole, counted), messages waiting per connection (back-pressure), sockets, messages to send.

mod context;
mod inbox;
mod link;
mod outbox;
mod resolve;

use std::collections::VecDeque;

pub use context::ZmqContext;
pub use inbox::{InboxCounters, Ready, ZmqInbox};
pub use outbox::{OutboxCounters, PushRole, ZmqOutbox};

use super::{ControlError, ControlEvent, ControlPlane, Multipart};
use crate::net::Endpoint;
use crate::time::Timestamp;

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
    /// libzmq refused; in practice descriptors or sockets have run out.
    #[error("libzmq: {action}: {reason}")]
    System {
        /// What was tried.
        action: &'static str,
        /// What libzmq said.
        reason: String,
    },
}

impl ZmqError {
    pub(crate) fn system(action: &'static str, error: ::zmq::Error) -> Self {
        Self::System { action, reason: error.to_string() }
    }
}

/// The [`ControlPlane`] of a shard: an outbox, and the messages its thread took from the inbox.
pub struct ZmqControl {
    outbox: ZmqOutbox,
    incoming: VecDeque<Multipart>,
}

impl ZmqControl {
    /// A control plane that sends through `outbox`.
    pub fn new(outbox: ZmqOutbox) -> Self {
        Self { outbox, incoming: VecDeque::new() }
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
        self.outbox.send(to, message)
    }

    /// Lost peers first: they are few, and a flood of messages must not hide them.
    fn recv(&mut self, max: usize, out: &mut Vec<ControlEvent>) {
        let before = out.len();
        self.outbox.poll_events(max, out);
        let room = max.saturating_sub(out.len() - before).min(self.incoming.len());
        out.extend(self.incoming.drain(..room).map(ControlEvent::Message));
    }

    fn close(&mut self, endpoint: &Endpoint) {
        self.outbox.close(endpoint);
    }

    fn tick(&mut self, now: Timestamp) -> Option<Timestamp> {
        self.outbox.sweep(now)
    }
}
