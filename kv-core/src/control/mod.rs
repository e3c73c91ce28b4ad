//! The control plane seam: whole multipart messages to and from named endpoints.

use bytes::Bytes;
use smallvec::SmallVec;

use crate::net::Endpoint;

/// The frames of one message. One message is one event.
pub type Multipart = SmallVec<[Bytes; 12]>;

/// What a control plane reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ControlEvent {
    /// A whole message arrived. Messages carry no sender; what they claim is inside.
    Message(Multipart),
    /// The connection to this endpoint broke. Messages sent to it may be lost.
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

/// Sends and receives control messages. Owned by one shard at a time; never shared.
pub trait ControlPlane: Send {
    /// Queue a message. Never blocks, never retries for ever. Messages to one endpoint keep their order.
    fn send(&mut self, to: &Endpoint, message: Multipart) -> Result<(), ControlError>;

    /// Append at most `max` events to `out`. Never blocks.
    fn recv(&mut self, max: usize, out: &mut Vec<ControlEvent>);

    /// Forget an endpoint: its connection is closed and not tried again.
    fn close(&mut self, endpoint: &Endpoint);
}
