//! One generation of a peer we write to.

use std::ffi::CString;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use kv_core::host::{HostIdentity, ProcessHandle};
use kv_core::ids::PeerId;
use kv_core::net::Endpoint;
use kv_core::transport::{TransportError, TransportErrorKind};

use crate::prepared::Lists;

/// How a generation stands.
#[derive(Clone, Debug)]
pub(crate) enum State {
    /// The library knows it; writes can be posted.
    Live,
    /// An error, or a successor: nothing more is posted, and nothing is proven about what was.
    Lost(TransportError),
    /// Its process has ended and our endpoint to it is closed: nothing can land any more.
    Dead(TransportError),
}

pub(crate) struct Peer {
    pub id: PeerId,
    pub name: CString,
    /// Its control endpoint, as it said last.
    pub endpoint: Mutex<Endpoint>,
    pub host: Option<HostIdentity>,
    /// The process itself, when it runs on our host.
    pub process: Option<ProcessHandle>,
    /// What the library last loaded for it.
    pub metadata: Mutex<Bytes>,
    /// Its entries that were prepared.
    pub lists: Lists,
    /// What it calls device memory in its control messages it registered as host memory with the library. SGLang 0.5.23
    /// says VRAM unless told otherwise, also of a pool on the CPU. The library has the last word: it refuses a write to a
    /// range that is not registered under its kind, and addresses of host and device never coincide.
    pub device_is_host: AtomicBool,
    /// Ops in flight or not settled.
    pub open: AtomicUsize,
    /// Of those, the ones that may still end well, or are just being posted.
    pub flying: AtomicUsize,
    /// Let go of by the manager.
    pub closing: AtomicBool,
    state: Mutex<State>,
}

impl Peer {
    #[allow(clippy::too_many_arguments)] // made in one place
    pub fn new(
        id: PeerId,
        name: CString,
        endpoint: Endpoint,
        host: Option<HostIdentity>,
        process: Option<ProcessHandle>,
        metadata: Bytes,
    ) -> Self {
        Self {
            id,
            name,
            endpoint: Mutex::new(endpoint),
            host,
            process,
            metadata: Mutex::new(metadata),
            lists: Lists::default(),
            device_is_host: AtomicBool::new(false),
            open: AtomicUsize::new(0),
            flying: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            state: Mutex::new(State::Live),
        }
    }

    pub fn lock_state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn state(&self) -> State {
        self.lock_state().clone()
    }

    /// Why nothing can be posted to it.
    pub fn lost(&self) -> Option<TransportError> {
        match self.state() {
            State::Live => None,
            State::Lost(error) | State::Dead(error) => {
                Some(TransportError::new(TransportErrorKind::PeerLost, error.message))
            }
        }
    }

    pub fn live(&self) -> bool {
        matches!(*self.lock_state(), State::Live)
    }
}
