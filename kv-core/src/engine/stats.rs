//! One counter per cause (requirement I1).

use super::peer_stats::PeerTable;
use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! stats {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counters of one manager. Only ever grow, but for the gauges named so.
        #[derive(Debug, Default)]
        pub struct Stats {
            $($(#[$doc])* pub $name: Counter,)*
            /// What is counted by peer.
            pub peers: PeerTable,
        }

        impl Stats {
            /// Every counter with its name, for exporters and for people. With what is counted by peer:
            /// [`snapshot_at`](Self::snapshot_at).
            pub fn snapshot(&self) -> Vec<(&'static str, u64)> {
                vec![$((stringify!($name), self.$name.get()),)*]
            }
        }
    };
}

stats! {
    /// Rooms made.
    rooms_created,
    /// Rooms that ended in Success.
    rooms_succeeded,
    /// Rooms that ended in Failed.
    rooms_failed,
    /// Rooms failed by the bootstrap or the waiting deadline.
    rooms_timed_out,
    /// Rooms given up by an abort, here or there.
    rooms_aborted,
    /// Gauge: rooms the shard holds, cleared ones that are not drained included.
    rooms_live,
    /// Gauge: failed rooms whose pages are not free yet. Decode: a write could still land in them, and neither proof nor
    /// the release policy has given them back. Prefill: a write may still read them.
    rooms_awaiting_release,
    /// Writes posted.
    ops_posted,
    /// Gauge: posted writes whose outcome has not come. With `ops_retained`: every write that may still move bytes.
    ops_in_flight,
    /// Writes that ended Done.
    ops_done,
    /// Writes that failed.
    ops_failed,
    /// Writes that ended Unresolved.
    ops_unresolved,
    /// Times the transport panicked.
    transport_panics,
    /// Gauge: writes whose outcome left a side not quiet, and that no proof has settled since.
    ops_retained,
    /// Gauge: bytes of those writes, whose memory stays registered.
    bytes_retained,
    /// Bytes in writes that ended Done.
    bytes_done,
    /// Messages received.
    messages_in,
    /// Messages sent.
    messages_out,
    /// Messages that could not be parsed.
    messages_malformed,
    /// Messages for rooms, peers or generations that are not known (any more).
    messages_stale,
    /// Messages that break the protocol: a rank that was not asked, a second metadata..
    protocol_violations,
    /// Messages dropped since a table was full.
    messages_over_limit,
    /// Messages that could not be sent.
    send_failures,
    /// ABORTs received.
    aborts_in,
    /// ABORT_ACKs sent.
    abort_acks_out,
    /// Rooms whose pages were released by proof.
    released_with_proof,
    /// Rooms whose pages were released by the timeout, without proof.
    released_without_proof,
    /// Peers registered.
    peers_registered,
    /// Peers refused for their geometry.
    peers_refused,
    /// Peers lost.
    peers_lost,
    /// Control connections to peers that broke or never came up.
    connections_lost,
    /// Metadata kept for a room without a sender, and thrown away by time.
    early_expired,
    /// Rooms whose DP rank the registry took.
    dp_ranks_registered,
    /// Attempts to register a room's DP rank that failed.
    dp_rank_failures,
}

impl Stats {
    /// Keep `rooms_awaiting_release`: a room that stood (or not) in it as `was` says is now ended and held, or not.
    pub(crate) fn awaiting_release(&self, was: &mut bool, is: bool) {
        match (std::mem::replace(was, is), is) {
            (false, true) => self.rooms_awaiting_release.inc(),
            (true, false) => self.rooms_awaiting_release.set(self.rooms_awaiting_release.get().saturating_sub(1)),
            _ => {}
        }
    }
}

/// One counter.
#[derive(Debug, Default)]
pub struct Counter(AtomicU64);

impl Counter {
    /// Add one.
    pub fn inc(&self) {
        self.add(1);
    }

    /// Add `n`.
    pub fn add(&self, n: u64) {
        self.0.fetch_add(n, Ordering::Relaxed);
    }

    /// Set a gauge.
    pub fn set(&self, n: u64) {
        self.0.store(n, Ordering::Relaxed);
    }

    /// Its value.
    pub fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
