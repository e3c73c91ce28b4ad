//! The transport seam: what a backend must be able to do, and what it must prove.
//!
//! A [`Transport`] exists once per engine or device. Each engine shard gets its own [`Lane`] from it, and only that
//! shard touches the lane. Order of calls: `register` memory → publish [`Transport::local_metadata`] → `connect` a
//! peer (on a connector thread: it may take seconds) → `submit` on a lane → `poll` until the op has settled.
//!
//! # Outcomes
//! Each accepted op gives exactly one [`Outcome`]. An outcome that leaves either side not quiet is followed by **at
//! most one** [`Settlement`], when quiescence becomes provable. Until both sides are quiet the lane keeps the
//! [`WriteOp`], and with it the registered memory, alive.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;

use bytes::Bytes;

use crate::host::HostIdentity;
use crate::ids::{OpId, PeerId, ProcessGeneration};
use crate::layout::UnknownSlots;
use crate::memory::{MemoryOwner, RegisteredRegion};
use crate::net::Endpoint;
use crate::plan::WritePlan;

/// What a backend can do. Checked when a manager or a peer registers (requirement A4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Capabilities {
    /// Short name: `tcp`, `nixl`, `mooncake`, `mori`, `fake`.
    pub name: &'static str,
    /// Writes from and into host memory.
    pub host_memory: bool,
    /// Writes from and into device memory.
    pub device_memory: bool,
    /// Largest op in bytes; a larger one is refused. The engine cuts larger writes into several ops.
    pub max_op_bytes: Option<u64>,
    /// `submit` may copy the data before it returns. Callers then never run the shard inline.
    pub submit_blocks: bool,
    /// `Done` means that the bytes are visible to the target's CPU (false for a peer that gives no acknowledgement).
    pub done_proves_placement: bool,
    /// Every `Unresolved` op of a peer that lives, or is cut off, settles later without the death of its peer.
    pub settles_unresolved: bool,
    /// Ending a registration closes the memory to peers that know it. Where it does not, memory that was registered must
    /// not be used for anything else while such peers may still write.
    pub unregister_revokes: bool,
    /// A write to what the peer has not registered is refused before a byte of it goes. A decode that does not say how
    /// many pages it has may then have more than we; else it is taken to have as many.
    pub checks_destinations: bool,
}

impl Capabilities {
    /// How many pages a decode has that does not say.
    pub fn unknown_slots(&self) -> UnknownSlots {
        if self.checks_destinations { UnknownSlots::CheckedByBackend } else { UnknownSlots::AsOurs }
    }
}

/// What decode sent about itself; opaque to everyone but the backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerDescriptor {
    /// Agent name, session id or engine key: names one process generation of the peer.
    pub name: String,
    /// The backend's own blob (agent metadata, engine description, region keys).
    pub metadata: Bytes,
    /// The peer's control endpoint: the address its successor will also use.
    pub endpoint: Endpoint,
    /// Which process it is, as it says itself: where it runs on this host, a backend can see it end. `None`: it does not say.
    pub host: Option<HostIdentity>,
}

/// One write: every span of `plan`, to one peer.
#[derive(Clone, Debug)]
pub struct WriteOp {
    /// Names the op in completions.
    pub id: OpId,
    /// Where to.
    pub peer: PeerId,
    /// What.
    pub plan: WritePlan,
    /// The local regions the plan reads, indexed by nothing: held alive, looked up by [`RegisteredRegion::id`].
    pub regions: Arc<[Arc<RegisteredRegion>]>,
}

/// How a submission ended when it was not accepted. Nothing was posted, and the op is handed back.
#[derive(Debug)]
pub enum SubmitError {
    /// No room for it now; submit again after the next completion.
    Busy(WriteOp),
    /// Never acceptable as it is.
    Rejected(WriteOp, TransportError),
}

/// How an accepted op ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Every byte is in place; source and destination are quiet.
    Done,
    /// It failed, with what is proven about both sides.
    Failed {
        /// Nothing reads the source any more.
        src_quiet: bool,
        /// No byte can land any more.
        dst_quiet: bool,
        /// Why.
        error: TransportError,
    },
    /// Nothing is proven: it may still read the source and write the destination.
    Unresolved {
        /// What was seen.
        error: TransportError,
    },
}

impl Outcome {
    /// Whether (source, destination) are proven quiet.
    pub fn quiet(&self) -> (bool, bool) {
        match self {
            Self::Done => (true, true),
            Self::Failed { src_quiet, dst_quiet, .. } => (*src_quiet, *dst_quiet),
            Self::Unresolved { .. } => (false, false),
        }
    }
}

/// Later news of an op that did not end quiet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// Proven quiet on the sides named.
    Settled {
        /// Nothing reads the source any more.
        src_quiet: bool,
        /// No byte can land any more.
        dst_quiet: bool,
    },
    /// The peer's process generation is proven dead and our endpoint to it torn down: both sides are quiet.
    PeerGenerationDead,
}

impl Settlement {
    /// Which of (source, destination) it proves quiet.
    pub const fn quiet(self) -> (bool, bool) {
        match self {
            Self::PeerGenerationDead => (true, true),
            Self::Settled { src_quiet, dst_quiet } => (src_quiet, dst_quiet),
        }
    }
}

/// What a lane reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaneEvent {
    /// The one outcome of an accepted op.
    Outcome(OpId, Outcome),
    /// Later proof for an op that did not end quiet.
    Settlement(OpId, Settlement),
    /// The connection to this peer generation is gone: no further op to it is accepted. Says nothing about ops in
    /// flight; their outcomes come on their own.
    PeerLost(PeerId, TransportError),
}

/// A shard's own way into a transport. Not shared between threads.
pub trait Lane: Send {
    /// Start a write. `Ok` means accepted: exactly one outcome follows. A submission that failed half way is accepted
    /// and ends `Unresolved`. Blocks only if [`Capabilities::submit_blocks`].
    #[allow(clippy::result_large_err)] // the op comes back whole, so that nothing is lost
    fn submit(&mut self, op: WriteOp) -> Result<(), SubmitError>;

    /// Let go of small writes that [`submit`](Self::submit) has held back to send them together. A lane may hold one back
    /// only while an earlier write to the same peer is in flight, and lets go of it at the next `flush` or `poll`: so
    /// whoever waits for [`wake_fd`](Self::wake_fd) without calling this waits longer, not for ever. Never blocks.
    fn flush(&mut self) {}

    /// Append all news to `out`. Never blocks.
    fn poll(&mut self, out: &mut Vec<LaneEvent>);

    /// Readable when `poll` has news. `None`: the shard must poll by time while ops are in flight.
    fn wake_fd(&self) -> Option<RawFd> {
        None
    }
}

/// A backend.
pub trait Transport: Send + Sync + 'static {
    /// What it can do.
    fn capabilities(&self) -> &Capabilities;

    /// Names this process generation: fresh in every process.
    fn local_name(&self) -> &str;

    /// The blob peers need to write here; covers everything registered so far.
    fn local_metadata(&self) -> Bytes;

    /// Register memory for transfers. The registration ends when the last `Arc` goes.
    fn register(&self, memory: Arc<dyn MemoryOwner>) -> Result<Arc<RegisteredRegion>, TransportError>;

    /// Connect to a peer generation. May block for seconds: called on a connector thread only. A descriptor with a new
    /// name at a known endpoint is a new generation; the old one is torn down.
    fn connect(&self, peer: &PeerDescriptor) -> Result<PeerId, TransportError>;

    /// Let go of a peer. Ops in flight end on their own. Does not wait for the network.
    fn disconnect(&self, peer: PeerId);

    /// Proof, on the target's side: this source process has ended, and no write of it can land here any more. Decode asks
    /// when an ABORT_ACK does not come (requirement F4). False when it cannot be told, and by default. Never blocks.
    fn inbound_dead(&self, _process: ProcessGeneration) -> bool {
        false
    }

    /// A lane for one more shard.
    fn lane(&self) -> Result<Box<dyn Lane>, TransportError>;
}

/// What kind of failure a transport saw.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum TransportErrorKind {
    /// The backend's library or a kernel facility is missing or forbidden here.
    Unavailable,
    /// An argument that can never work (range outside a region, unknown region, unsupported memory).
    InvalidArgument,
    /// The peer is not connected (any more).
    PeerLost,
    /// The peer refused the write: wrong key, or outside its regions.
    Refused,
    /// The blob or descriptor of a peer cannot be used.
    BadPeer,
    /// It took longer than allowed.
    Timeout,
    /// Anything else the backend reported.
    Backend,
}

/// A transport's error: kind and text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct TransportError {
    /// What kind.
    pub kind: TransportErrorKind,
    /// What happened, with names and numbers.
    pub message: String,
}

impl TransportError {
    /// An error of `kind` with a text.
    pub fn new(kind: TransportErrorKind, message: impl fmt::Display) -> Self {
        Self { kind, message: message.to_string() }
    }
}
