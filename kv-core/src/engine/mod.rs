//! The shard: everything a manager does, as one function of time and input.
//!
//! [`PrefillShard::step`] and [`DecodeShard::step`] drain messages, commands, completions and deadlines — in this
//! order, so that a completion that has arrived wins over a deadline seen in the same step — and carry out the rooms'
//! effects. Threads only call them; the simulation calls them too. One shard posts, resolves and sends, so a status
//! never overtakes the write it speaks of.

mod decode;
#[cfg(feature = "metrics")]
mod metrics;
mod outgoing;
mod peer_stats;
mod peers;
mod prefill;
mod shared;
mod snapshot;
mod stats;
mod timers;
mod waiters;

pub use decode::{DecodeCommand, DecodeHeld, DecodeShard, DecodeShardConfig};
pub use peer_stats::{PeerNumbers, PeerTable};
pub use prefill::{AuxRule, ChunkExtras, Claim, PrefillCommand, PrefillHeld, PrefillShard, PrefillShardConfig};
pub use shared::{EventQueue, RoomEvent, RoomShared};
pub use snapshot::StatsSnapshot;
pub use stats::{Counter, Stats};

use std::sync::Arc;

use crate::ids::PeerId;
use crate::time::Timestamp;
use crate::transport::{PeerDescriptor, TransportError};

/// When a shard wants to be called again, beyond news from its inputs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NextWake {
    /// At this time.
    pub at: Option<Timestamp>,
    /// Writes are in flight, and a lane without a wake fd must be polled for them.
    pub in_flight: bool,
    /// More input is waiting: call again at once.
    pub again: bool,
    /// Something small was just posted, and its end is near: until then it is cheaper to look than to sleep.
    pub look_until: Option<Timestamp>,
}

/// Connects transport peers away from the shard: it may take seconds.
pub trait Connector: Send {
    /// Start connecting; [`PrefillCommand::Connected`] with the same token follows. Never blocks.
    fn connect(&mut self, token: u64, peer: PeerDescriptor);
    /// Let go of a peer. Never blocks.
    fn disconnect(&mut self, peer: PeerId);
}

/// A finished connection attempt.
#[derive(Debug)]
pub struct Connected {
    /// From [`Connector::connect`].
    pub token: u64,
    /// The peer generation, or why not.
    pub result: Result<PeerId, TransportError>,
}

/// Tells a manager that a room number is free again (its last life is drained).
pub type RoomFreed = Arc<dyn Fn(&RoomShared) + Send + Sync>;

/// Messages of each malformed kind are logged once, then only counted.
#[derive(Debug, Default)]
pub(crate) struct MalformedLog(std::collections::BTreeSet<crate::wire::WireErrorKind>);

impl MalformedLog {
    pub(crate) fn report(&mut self, stats: &Stats, error: &crate::wire::WireError) {
        stats.messages_malformed.inc();
        if self.0.insert(error.kind) {
            tracing::warn!(kind = ?error.kind, "dropped a malformed message (further ones of this kind are only counted): {error}");
        }
    }
}
