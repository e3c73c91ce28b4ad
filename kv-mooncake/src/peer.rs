//! One generation of a peer we write to.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    /// A task of it was seen to fail. From then on the library may have connected anew, to whoever listened.
    pub failed: AtomicBool,
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

    /// Whether what was seen to arrive until now has arrived at this generation. The library has tasks in a queue when a peer
    /// fails, and connects anew for them, at once where its last connection broke: a successor on the same ports, with
    /// memory at the same addresses, takes them for its own. Ask after the acknowledgement was seen, not before.
    pub fn vouches(&self) -> bool {
        match &self.process {
            // As long as it lives, its ports are its own.
            Some(process) => !process.exited(),
            None => self.live() && !self.failed.load(Ordering::SeqCst),
        }
    }

    /// Whether a task that ended badly reads its source no more: over TCP the library calls none failed before its socket is
    /// closed and the last write to that has returned. Of RDMA nothing is known.
    pub fn ended_is_read(&self) -> bool {
        self.described().protocol == "tcp"
    }

    pub fn described(&self) -> Arc<Described> {
        Arc::clone(&self.described.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
