//! One generation of a peer we write to.

use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, Mutex};

use kv_core::host::{HostIdentity, ProcessHandle};
use kv_core::ids::PeerId;
use kv_core::net::Endpoint;
use kv_core::transport::TransportError;
use mooncake_wire::Descriptor;

use crate::transport::lock;

/// How a generation stands.
#[derive(Clone, Debug)]
pub(crate) enum State {
    /// Writes can be posted.
    Live,
    /// An error, or a successor: nothing more is posted, and nothing is proven about what was.
    Lost(TransportError),
    /// Its process has ended: nothing of ours can land any more.
    Dead(TransportError),
}

pub(crate) struct Peer {
    pub id: PeerId,
    /// Its session id.
    pub name: String,
    /// Its control endpoint, as it said last.
    pub endpoint: Mutex<Endpoint>,
    pub host: Option<HostIdentity>,
    /// The process itself, when it runs on our host.
    pub process: Option<ProcessHandle>,
    /// What it last said of itself.
    pub described: Mutex<Arc<Descriptor>>,
    /// A connection on which nothing is written: it vouches that others lead to the same process, and breaks with it.
    pub anchor: Mutex<TcpStream>,
    /// Connections that no lane has taken yet.
    pub spares: Mutex<Vec<TcpStream>>,
    /// Connections that were made for lanes.
    pub made: AtomicUsize,
    /// Ops in flight or not settled.
    pub open: AtomicUsize,
    /// Let go of by the manager.
    pub closing: AtomicBool,
    pub state: Mutex<State>,
}

impl Peer {
    pub fn state(&self) -> State {
        lock(&self.state).clone()
    }

    pub fn live(&self) -> bool {
        matches!(*lock(&self.state), State::Live)
    }

    /// Why nothing can be posted to it.
    pub fn lost(&self) -> Option<TransportError> {
        match self.state() {
            State::Live => None,
            State::Lost(error) | State::Dead(error) => Some(error),
        }
    }

    pub fn dead(&self) -> bool {
        matches!(*lock(&self.state), State::Dead(_))
    }

    pub fn described(&self) -> Arc<Descriptor> {
        Arc::clone(&lock(&self.described))
    }
}
