//! Counters.

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
    /// Tasks given to the library.
    tasks_submitted,
    /// Batches they went in.
    batches_submitted,
    /// Ops whose every task was acknowledged.
    ops_done,
    /// Ops that ended early with proof: everything that was given to the library has arrived, the rest never went.
    ops_failed,
    /// Ops that failed, or of which nothing moved for the time allowed: nothing is proven about them.
    ops_unresolved,
    /// Of those, the ones that were proven quiet later.
    ops_settled,
    /// Of those, the ones whose batches and memory are kept now.
    ops_retained,
    /// Peers asked for their descriptor.
    probes,
    /// Of those, the ones that did not answer, or not as they should.
    probes_failed,
    /// Peer generations known now.
    peers,
    /// Generations lost: an error, or a successor.
    peers_lost,
    /// Generations proven dead.
    peers_dead,
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

pub(crate) fn sub(counter: &AtomicU64, n: u64) {
    counter.fetch_sub(n, Ordering::Relaxed);
}
