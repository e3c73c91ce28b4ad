//! What happened, as lines; and a hash of all of them, by which two runs are compared.

use std::collections::VecDeque;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Lines kept when the whole trace is not wanted.
const TAIL: usize = 120;

struct Inner {
    hash: u64,
    messages: u64,
    now: u64,
    kept: VecDeque<String>,
    whole: bool,
}

/// The trace of one episode. Clones are the same trace.
#[derive(Clone)]
pub(super) struct Trace(Arc<Mutex<Inner>>);

impl Trace {
    pub(super) fn new(whole: bool) -> Self {
        let inner = Inner { hash: 0xcbf2_9ce4_8422_2325, messages: 0, now: 0, kept: VecDeque::new(), whole };
        Self(Arc::new(Mutex::new(inner)))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time of the lines that follow, in nanoseconds.
    pub(super) fn at(&self, now: u64) {
        self.lock().now = now;
    }

    pub(super) fn line(&self, text: fmt::Arguments<'_>) {
        let mut inner = self.lock();
        let us = inner.now / 1000;
        let line = format!("{us:>11} us  {text}");
        inner.hash = line.bytes().fold(inner.hash, |h, b| (h ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3));
        if !inner.whole && inner.kept.len() == TAIL {
            inner.kept.pop_front();
        }
        inner.kept.push_back(line);
    }

    /// One message more was sent.
    pub(super) fn message(&self) {
        self.lock().messages += 1;
    }

    pub(super) fn messages(&self) -> u64 {
        self.lock().messages
    }

    pub(super) fn hash(&self) -> u64 {
        self.lock().hash
    }

    /// The lines that were kept: all of them, or the last ones.
    pub(super) fn lines(&self) -> Vec<String> {
        self.lock().kept.iter().cloned().collect()
    }
}
