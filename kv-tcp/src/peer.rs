//! The source's side of a session: one generation of a peer we write to.

use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};

use kv_core::ids::PeerId;
use kv_core::net::Endpoint;
use kv_core::transport::{Settlement, TransportError, WriteOp};

use crate::blob::{Key, RemoteRegion};
use crate::keeper::Task;
use crate::stats;
use crate::transport::Inner;
use crate::worker::{Msg, WorkerShared};
use kv_core::host::{HostIdentity, ProcessHandle};

/// How data goes to a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PathKind {
    /// The target copies out of our memory.
    SameHost,
    /// Striped TCP connections.
    Tcp,
}

/// The way to a peer, and why it is this one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathInfo {
    /// How data goes.
    pub kind: PathKind,
    /// Why direct copies are not used; empty when they are.
    pub reason: String,
    /// The peer's address that answered.
    pub address: SocketAddr,
    /// Connections open to it.
    pub connections: usize,
    /// Milliseconds since it last answered anything. Silence proves nothing.
    pub silent_ms: u64,
    /// Ops in flight or not settled.
    pub ops_open: usize,
}

#[derive(Clone, Debug)]
pub(crate) enum State {
    Live,
    /// The session is over. What was in flight is not proven quiet.
    Lost(TransportError),
    /// And now it is.
    Settled(TransportError, Settlement),
}

pub(crate) struct Peer {
    pub id: PeerId,
    pub name: String,
    pub endpoint: Endpoint,
    pub address: SocketAddr,
    pub session: Key,
    pub admission: Key,
    pub host: HostIdentity,
    /// Direct copies; else the reason.
    pub direct: Result<(), String>,
    pub regions: RwLock<Arc<[RemoteRegion]>>,
    /// The process itself, when it runs on our host.
    pub pidfd: Option<ProcessHandle>,
    pub data: Vec<(Arc<WorkerShared>, u64)>,
    pub next_data: AtomicUsize,
    /// Ops whose bytes we are still sending: while there are any, the source is in use.
    pub jobs: AtomicUsize,
    /// Ops in flight or not settled.
    pub open: AtomicUsize,
    /// Lanes that have a connection.
    pub links: AtomicUsize,
    pub closing: AtomicBool,
    /// Milliseconds since the transport started when it last answered.
    pub heard: AtomicU64,
    pub sockets: Mutex<Vec<Weak<TcpStream>>>,
    /// Ops of lanes that are gone.
    pub orphans: Mutex<Vec<WriteOp>>,
    /// A connection that carries nothing: it keeps a session without lanes alive.
    pub spare: Mutex<Option<Arc<TcpStream>>>,
    pub state: Mutex<State>,
    pub inner: Weak<Inner>,
}

impl Peer {
    fn lock_state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn state(&self) -> State {
        self.lock_state().clone()
    }

    pub fn live(&self) -> bool {
        matches!(*self.lock_state(), State::Live)
    }

    pub fn known_regions(&self) -> Arc<[RemoteRegion]> {
        Arc::clone(&self.regions.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn set_regions(&self, regions: Vec<RemoteRegion>) {
        *self.regions.write().unwrap_or_else(PoisonError::into_inner) = regions.into();
    }

    pub fn live_sockets(&self) -> Vec<Arc<TcpStream>> {
        let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        sockets.retain(|s| s.strong_count() > 0);
        sockets.iter().filter_map(Weak::upgrade).collect()
    }

    /// End the session: nothing more is sent, lanes hear of it, and the keeper looks for proof of quiet.
    pub fn lose(self: &Arc<Self>, inner: &Arc<Inner>, error: TransportError) {
        {
            let mut state = self.lock_state();
            if !matches!(*state, State::Live) {
                return;
            }
            *state = State::Lost(error.clone());
        }
        if !self.closing.load(Ordering::Acquire) {
            tracing::info!(peer = self.name, error = %error, "session lost");
            stats::add(&inner.counters.peers_lost, 1);
        }
        self.close_data();
        self.drop_spare();
        inner.notify_lanes(self);
        inner.keeper.post(Task::Lost(Arc::clone(self)));
    }

    pub fn close_data(&self) {
        for (worker, token) in &self.data {
            worker.post(Msg::Close(*token));
        }
    }

    pub fn drop_spare(&self) {
        *self.spare.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Keep the ops of a lane that is gone until they are settled.
    pub fn adopt(&self, ops: Vec<WriteOp>) {
        let state = self.lock_state();
        if matches!(*state, State::Settled(..)) {
            self.open.fetch_sub(ops.len(), Ordering::SeqCst);
        } else {
            self.orphans.lock().unwrap_or_else(PoisonError::into_inner).extend(ops);
        }
    }

    /// Proof came. The caller saw `jobs` at 0 after the loss.
    pub fn settle(self: &Arc<Self>, inner: &Inner, settlement: Settlement) {
        {
            let mut state = self.lock_state();
            let State::Lost(error) = &*state else { return };
            *state = State::Settled(error.clone(), settlement);
        }
        // Adopted before the state changed, or not at all.
        let orphans = std::mem::take(&mut *self.orphans.lock().unwrap_or_else(PoisonError::into_inner));
        self.open.fetch_sub(orphans.len(), Ordering::SeqCst);
        inner.notify_lanes(self);
    }

    /// The last of our sends to it has ended.
    pub fn sends_ended(self: &Arc<Self>) {
        if self.live() {
            return;
        }
        if let Some(inner) = self.inner.upgrade() {
            inner.notify_lanes(self);
            inner.keeper.post(Task::Look);
        }
    }

    /// Break every connection as a network failure would.
    pub fn sever(&self) {
        for sock in self.live_sockets() {
            let _ = sock.shutdown(Shutdown::Both);
        }
    }
}
