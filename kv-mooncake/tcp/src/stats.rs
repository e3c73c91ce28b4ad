//! Counters. Relaxed atomics: they inform, nothing is decided by them.

use std::sync::atomic::{AtomicU64, Ordering};

macro_rules! counters {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        #[derive(Debug, Default)]
        pub(crate) struct Counters {
            $(pub $name: AtomicU64,)*
        }

        /// What a transport has done so far.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct Stats {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Counters {
            pub fn read(&self) -> Stats {
                Stats { $($name: self.$name.load(Ordering::Relaxed),)* }
            }
        }
    };
}

counters! {
    /// Ops accepted.
    ops_submitted,
    /// Their bytes.
    bytes_submitted,
    /// Requests that began to go.
    requests_sent,
    /// Ops whose every request was acknowledged.
    ops_done,
    /// Ops that ended early with proof: what had gone was acknowledged or refused, the rest never went.
    ops_failed,
    /// Ops that ended without proof about the destination.
    ops_unresolved,
    /// Of those, the ones that were proven quiet later.
    ops_settled,
    /// Gauge: of those, the ones that are kept now, with their memory.
    ops_retained,
    /// Gauge: peer generations known now.
    peers,
    /// Generations lost: an error, or a successor.
    peers_lost,
    /// Generations proven dead.
    peers_dead,
    /// Answers of peers that break the rules of the wire; each ended its connection.
    answers_malformed,
    /// Connections that peers opened here and were taken.
    connections_accepted,
    /// Those that were not: too many.
    connections_refused,
    /// Gauge: connections of peers, of both ports.
    connections_in,
    /// Handshakes answered.
    handshakes_answered,
    /// Requests of peers that were carried out.
    requests_served,
    /// Those that were refused: not in one registered block, empty, or its registration ended meanwhile.
    requests_refused,
    /// What peers sent that could not be read; each ended its connection.
    requests_malformed,
    /// Bytes received into our memory.
    bytes_received,
    /// Bytes sent out of it because peers read.
    bytes_read_out,
    /// Panics caught in the service thread; each ended the connection it came from, and no other.
    panics,
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

pub(crate) fn sub(counter: &AtomicU64, n: u64) {
    counter.fetch_sub(n, Ordering::Relaxed);
}
