//! Deadlines of many rooms: a heap with lazy deletion, compacted so that finished rooms do not pile up in it.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use crate::time::Timestamp;

/// Deadlines by key. A key may stand in it more than once; stale entries are asked about and dropped.
#[derive(Debug)]
pub struct Timers<K> {
    heap: BinaryHeap<Reverse<(Timestamp, K)>>,
}

impl<K: Ord + Copy> Timers<K> {
    /// No deadlines.
    pub fn new() -> Self {
        Self { heap: BinaryHeap::new() }
    }

    /// Remember a deadline. `live` says how many keys exist, `valid` whether an entry still stands: with more than a
    /// few entries a key, the stale ones are thrown out.
    pub fn arm(&mut self, at: Timestamp, key: K, live: usize, valid: impl Fn(Timestamp, K) -> bool) {
        if self.heap.len() > 1024 && self.heap.len() > 4 * live {
            self.heap.retain(|Reverse((t, k))| valid(*t, *k));
        }
        self.heap.push(Reverse((at, key)));
    }

    /// How many entries there are, stale ones included.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// The earliest deadline, perhaps stale.
    pub fn next(&self) -> Option<Timestamp> {
        self.heap.peek().map(|Reverse((t, _))| *t)
    }

    /// Take one entry that is due.
    pub fn pop_due(&mut self, now: Timestamp) -> Option<K> {
        if self.next()? > now {
            return None;
        }
        self.heap.pop().map(|Reverse((_, k))| k)
    }
}

impl<K: Ord + Copy> Default for Timers<K> {
    fn default() -> Self {
        Self::new()
    }
}
