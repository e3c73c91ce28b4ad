//! What prefill says about failures: the first cause, and nothing over a write in flight where that is the policy.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kv_core::limits::Limits;
use kv_core::net::Endpoint;
use kv_core::poll::KvPoll;
use kv_core::wire::{Dialect, MessageKind, ToDecode};

/// One KV_STATUS Failed.
pub(super) struct Failed {
    pub(super) room: u64,
    /// 0: not named.
    pub(super) life: u64,
    pub(super) to: Endpoint,
}

#[derive(Default)]
struct Inner {
    /// Numbers are used again: prefill knows which decode rank's life it speaks of, not which lives belong together.
    reuse: bool,
    /// The first reason that the process at an endpoint gave for a life of a room (0: peers that do not name lives).
    first: BTreeMap<(Endpoint, u64, u64, Option<Endpoint>), String>,
    new: Vec<Failed>,
    wrong: Vec<String>,
}

/// Clones are the same.
#[derive(Clone)]
pub(super) struct Told(Arc<Mutex<Inner>>);

impl Told {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn new(reuse: bool) -> Self {
        Self(Arc::new(Mutex::new(Inner { reuse, ..Inner::default() })))
    }

    pub(super) fn add(&self, dialect: &dyn Dialect, from: &Endpoint, to: &Endpoint, frames: &[Bytes], limits: &Limits) {
        let Ok(ToDecode::Status(s)) = dialect.parse_to_decode(frames, limits) else { return };
        if s.status != KvPoll::Failed {
            return;
        }
        let ext = dialect.extension(MessageKind::Status, frames).ok().flatten();
        let life = ext.and_then(|e| e.room_generation).unwrap_or_default();
        let reason = s.reason.unwrap_or_default();
        let mut inner = self.lock();
        let per = inner.reuse.then(|| to.clone());
        inner.new.push(Failed { room: s.room, life, to: to.clone() });
        // Metadata that found no sender expires with a reason of its own, and the sender may come still; what was meant
        // for an earlier process is refused before anybody looks whose it is.
        if reason.contains("made no sender") || reason.contains("prefill was restarted") {
            return;
        }
        let first = inner.first.entry((from.clone(), s.room, life, per)).or_insert_with(|| reason.clone()).clone();
        // How long a lost peer is left alone differs from message to message.
        if first != reason && !(first.contains("tried again") && reason.contains("tried again")) {
            inner
                .wrong
                .push(format!("{from} tells {to} of room {}: {reason:?}; the first cause was {first:?}", s.room));
        }
    }

    /// Another process is at `endpoint` now.
    pub(super) fn restarted(&self, endpoint: &Endpoint) {
        self.lock().first.retain(|(at, ..), _| at != endpoint);
    }

    /// What was told since, and what was wrong with it.
    pub(super) fn take(&self) -> (Vec<Failed>, Vec<String>) {
        let mut inner = self.lock();
        (std::mem::take(&mut inner.new), std::mem::take(&mut inner.wrong))
    }
}
