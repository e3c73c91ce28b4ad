//! The control plane seam: whole multipart messages to and from named endpoints.

#[cfg(feature = "control")]
pub mod local_ip;
#[cfg(feature = "control")]
mod nic;
#[cfg(feature = "control")]
pub mod wake;
#[cfg(feature = "control")]
pub mod zmq;

use std::fmt;

use bytes::Bytes;
use smallvec::SmallVec;

use crate::net::Endpoint;
use crate::time::Timestamp;

/// The frames of one message. One message is one event.
pub type Multipart = SmallVec<[Bytes; 12]>;

/// What a control plane reports.
#[derive(Clone, Debug, PartialEq, Eq)]
// Nearly every event is a message, held for a moment in a reused vector: a box would cost an allocation for each.
#[allow(clippy::large_enum_variant)]
pub enum ControlEvent {
    /// A whole message arrived. Messages carry no sender; what they claim is inside.
    Message(Multipart),
    /// The connection to this endpoint broke, or could not be made again. Messages sent to it may be lost.
    PeerLost(Endpoint, String),
}

/// Why a message was not taken.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ControlError {
    /// The peer's queue is full: it does not read.
    #[error("{endpoint} does not take messages: its queue of {queued} is full")]
    Stalled {
        /// Whose queue.
        endpoint: Endpoint,
        /// How many wait.
        queued: usize,
    },
    /// The endpoint cannot be connected to.
    #[error("cannot connect to {endpoint}: {reason}")]
    Unreachable {
        /// Which endpoint.
        endpoint: Endpoint,
        /// What the system said.
        reason: String,
    },
}

/// Listens in on the conversation of one rank, for a tool that records it.
///
/// Called by whoever runs the shard, in the middle of a step: it should be quick, and must not wait for the manager. Of
/// each peer it hears messages in the order that the shard sends and takes them, each whole.
pub trait ControlTap: Send + Sync {
    /// The control plane took these frames for `to`.
    fn sent(&self, to: &Endpoint, frames: &[Bytes]);

    /// The shard takes these frames. Messages carry no sender.
    fn received(&self, frames: &[Bytes]);
}

impl fmt::Debug for dyn ControlTap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ControlTap")
    }
}

/// Sends and receives control messages. Owned by one shard at a time; never shared.
pub trait ControlPlane: Send {
    /// Queue a message. Never blocks, never retries for ever. Messages to one endpoint keep their order.
    fn send(&mut self, to: &Endpoint, message: Multipart) -> Result<(), ControlError>;

    /// Hand what [`send`](Self::send) queued to the network, as far as it takes it: the end of a step, so that messages
    /// of one step travel together. True when there are events to receive. Never blocks.
    fn flush(&mut self) -> bool {
        false
    }

    /// Append at most `max` events to `out`. Never blocks.
    fn recv(&mut self, max: usize, out: &mut Vec<ControlEvent>);

    /// Forget an endpoint: its connection is closed and not tried again.
    fn close(&mut self, endpoint: &Endpoint);

    /// Slow housekeeping: look at idle connections, give up on ones that never came up. Cheap when nothing is due.
    /// Returns when it wants to be called next; `None` when there is nothing to look at.
    fn tick(&mut self, now: Timestamp) -> Option<Timestamp> {
        let _ = now;
        None
    }
}
