//! One generation of a peer we write to.

use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use kv_core::host::{HostIdentity, ProcessHandle};
use kv_core::ids::PeerId;
use kv_core::net::Endpoint;
use kv_core::transport::TransportError;
use mooncake_sys::Segment;

use crate::probe::Described;
use crate::window::Window;

/// How a generation stands.
#[derive(Clone, Debug)]
pub(crate) enum State {
    /// Writes can be posted.
    Live,
    /// An error, or a successor: nothing more is posted, and nothing is proven about what was.
    Lost(TransportError),
    /// Its process has ended: what the library has seen end can land no more.
    Dead(TransportError),
}

/// After its first failure the library waits for 1 s before it connects to a peer anew: to whoever listens there then. What
/// arrives sooner went over a connection that was there before.
const SAME_CONNECTION: Duration = Duration::from_millis(500);

pub(crate) struct Peer {
    pub id: PeerId,
    /// Its session id.
    pub name: String,
    pub segment: Segment,
    /// Its control endpoint, as it said last.
    pub endpoint: Mutex<Endpoint>,
    pub host: Option<HostIdentity>,
    /// The process itself, when it runs on our host.
    pub process: Option<ProcessHandle>,
    /// What it last said of itself.
    pub described: Mutex<Arc<Described>>,
    /// Shared with other generations of the session.
    pub window: Arc<Window>,
    /// Ops in flight or not settled.
    pub open: AtomicUsize,
    /// Let go of by the manager.
    pub closing: AtomicBool,
    pub state: Mutex<State>,
    /// When it ceased to be live.
    pub lost_at: OnceLock<Instant>,
}

impl Peer {
    pub fn lock_state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn state(&self) -> State {
        self.lock_state().clone()
    }

    pub fn live(&self) -> bool {
        matches!(*self.lock_state(), State::Live)
    }

    /// Why nothing can be posted to it.
    pub fn lost(&self) -> Option<TransportError> {
        match self.state() {
            State::Live => None,
            State::Lost(error) | State::Dead(error) => Some(error),
        }
    }

    pub fn dead(&self) -> bool {
        matches!(*self.lock_state(), State::Dead(_))
    }

    /// Whether what arrives now has arrived at this generation. The library has tasks in a queue when a peer fails, and
    /// connects anew for them: a successor on the same ports, with memory at the same addresses, takes them for its own.
    pub fn vouches(&self, now: Instant) -> bool {
        match (&*self.lock_state(), &self.process) {
            (State::Live, _) => true,
            (State::Dead(_), _) => false,
            // As long as it lives, its ports are its own.
            (State::Lost(_), Some(process)) => !process.exited(),
            (State::Lost(_), None) => {
                self.lost_at.get().is_none_or(|at| now.saturating_duration_since(*at) < SAME_CONNECTION)
            }
        }
    }

    pub fn described(&self) -> Arc<Described> {
        Arc::clone(&self.described.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
