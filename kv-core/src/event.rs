//! Wait events: source pages that must not be read yet (requirement A3).

use std::sync::{Arc, Mutex, PoisonError};

/// Called once when an event fires.
pub type EventWaker = Box<dyn FnOnce(Result<(), String>) + Send>;

/// Something that must happen before a chunk's source pages are read: a CUDA or HIP event, a host-side signal.
pub trait WaitEvent: Send + Sync + 'static {
    /// Call `waker` once, when the event fired or failed; at once if it has already. Must not block.
    fn subscribe(&self, waker: EventWaker);
}

enum State {
    Pending(Vec<EventWaker>),
    Fired(Result<(), String>),
}

/// A host-side wait event: [`SourceEvent::signal`] fires it.
#[derive(Clone)]
pub struct SourceEvent(Arc<Mutex<State>>);

impl SourceEvent {
    /// An event that has not fired.
    pub fn new() -> Self {
        Self(Arc::new(Mutex::new(State::Pending(Vec::new()))))
    }

    /// Fire it. Only the first call counts.
    pub fn signal(&self, result: Result<(), String>) {
        let wakers = {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match &mut *state {
                State::Fired(_) => return,
                State::Pending(w) => {
                    let w = std::mem::take(w);
                    *state = State::Fired(result.clone());
                    w
                }
            }
        };
        for w in wakers {
            w(result.clone());
        }
    }
}

impl Default for SourceEvent {
    fn default() -> Self {
        Self::new()
    }
}

impl WaitEvent for SourceEvent {
    fn subscribe(&self, waker: EventWaker) {
        let fired = {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            match &mut *state {
                State::Fired(r) => r.clone(),
                State::Pending(w) => return w.push(waker),
            }
        };
        waker(fired);
    }
}
