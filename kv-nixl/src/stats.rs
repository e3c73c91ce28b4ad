//! Counters.

use std::sync::atomic::{AtomicU64, Ordering};

#[derive(Debug, Default)]
pub(crate) struct Counters {
    pub ops_submitted: AtomicU64,
    pub bytes_submitted: AtomicU64,
    pub transfers_by_index: AtomicU64,
    pub ops_done: AtomicU64,
    pub ops_unresolved: AtomicU64,
    pub ops_settled: AtomicU64,
    pub ops_retained: AtomicU64,
    pub peers: AtomicU64,
    pub peers_lost: AtomicU64,
    pub peers_dead: AtomicU64,
}

/// What a transport has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Ops accepted.
    pub ops_submitted: u64,
    /// Their bytes.
    pub bytes_submitted: u64,
    /// Transfers made of prepared lists.
    pub transfers_by_index: u64,
    /// Ops the library called successful.
    pub ops_done: u64,
    /// Ops that failed, or were still in progress after the time allowed: nothing is proven about them.
    pub ops_unresolved: u64,
    /// Of those, the ones that were proven quiet later.
    pub ops_settled: u64,
    /// Of those, the ones whose handles and memory are kept now.
    pub ops_retained: u64,
    /// Peer generations known now.
    pub peers: u64,
    /// Generations lost: an error, or a successor.
    pub peers_lost: u64,
    /// Generations proven dead.
    pub peers_dead: u64,
}

pub(crate) fn add(counter: &AtomicU64, n: u64) {
    counter.fetch_add(n, Ordering::Relaxed);
}

pub(crate) fn sub(counter: &AtomicU64, n: u64) {
    counter.fetch_sub(n, Ordering::Relaxed);
}

impl Counters {
    pub fn read(&self) -> Stats {
        let get = |c: &AtomicU64| c.load(Ordering::Relaxed);
        Stats {
            ops_submitted: get(&self.ops_submitted),
            bytes_submitted: get(&self.bytes_submitted),
            transfers_by_index: get(&self.transfers_by_index),
            ops_done: get(&self.ops_done),
            ops_unresolved: get(&self.ops_unresolved),
            ops_settled: get(&self.ops_settled),
            ops_retained: get(&self.ops_retained),
            peers: get(&self.peers),
            peers_lost: get(&self.peers_lost),
            peers_dead: get(&self.peers_dead),
        }
    }
}
