//! Counters. Relaxed atomics: they inform, nothing is decided by them.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counters and gauges at one moment.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats { $($(#[$doc])* pub $name: u64,)* }

        #[derive(Debug, Default)]
        pub(crate) struct Counters { $(pub $name: AtomicU64,)* }

        impl Counters {
            pub fn snapshot(&self) -> Stats {
                Stats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

stats! {
    /// Ops accepted by our lanes.
    ops_submitted,
    /// Ops that ended `Done`.
    ops_done,
    /// Ops that failed with both sides quiet.
    ops_failed,
    /// Ops that ended without proof for both sides.
    ops_unresolved,
    /// Of those, settled later.
    ops_settled,
    /// Bytes of accepted ops.
    bytes_submitted,
    /// Bytes copied into our memory from a process on this host.
    bytes_copied_in,
    /// Bytes received into our memory over TCP.
    bytes_received,
    /// Bytes received for refused ops and thrown away.
    bytes_discarded,
    /// Frames that could not be read; each closed its connection.
    frames_malformed,
    /// Panics caught in the transport's own threads; each closed the connection it came from, and no other.
    panics,
    /// Ops refused: wrong key, outside the region, or the region is gone.
    ops_refused,
    /// Connections turned away at the handshake.
    handshakes_refused,
    /// Connections accepted.
    connections_accepted,
    /// Connections opened.
    connections_opened,
    /// Sessions to peers lost.
    peers_lost,
    /// Fences that peers asked of us, answered.
    fences_answered,
    /// Gauge: sessions peers have with us.
    sessions,
    /// Gauge: connections accepted and open.
    connections_in,
    /// Gauge: peers we are connected to, and lost ones whose ops are not settled.
    peers,
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

pub(crate) fn sub(counter: &AtomicU64, n: u64) {
    counter.fetch_sub(n, Ordering::Relaxed);
}
