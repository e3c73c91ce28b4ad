//! What moves the bytes of a worker's rooms.

use std::sync::Arc;
use std::time::Duration;

use crate::driver::protocol::{Arrived, FetchRoom, ServeRoom, WorkerConfig};
use crate::driver::stats::RankStats;
use crate::error::Result;
use crate::memory::KvMemory;

/// News of an engine's rooms.
///
/// Each room gives exactly one `Done` or `Failed`. `Done` frees its pages; the pages of a failed room are free only
/// after the one `Released` that follows (at once, or much later).
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EngineEvent {
    /// Success.
    Done {
        /// Which room.
        room: u64,
        /// Decode: from just before `send_metadata` to the wake-up with Success. Prefill: from the first `send`.
        latency: Duration,
        /// Pages that moved: without the prefix that decode had.
        pages: u64,
    },
    /// Failed.
    Failed {
        /// Which room.
        room: u64,
        /// Recorded cause.
        reason: String,
    },
    /// Nothing can read or write the pages of a failed room any more.
    Released {
        /// Which room.
        room: u64,
    },
}

/// The prefill side of one rank.
pub trait PrefillEngine: Send {
    /// Open a sender and return at once. When decode's metadata is there, everything but the prefix that decode has is
    /// sent, in chunks of at most `chunk_pages` pages; aux goes with the last. A room without pages (or with nothing
    /// left to send) still sends one empty last chunk.
    fn serve(&mut self, room: &ServeRoom, chunk_pages: u32) -> Result<()>;

    /// What its manager counts, as of now.
    fn stats(&self) -> RankStats;

    /// Drive the rooms; append news to `out`. Returns as soon as there is news, at the latest after `timeout`.
    fn wait(&mut self, timeout: Duration, out: &mut Vec<EngineEvent>) -> Result<()>;
}

/// The decode side of one rank.
pub trait DecodeEngine: Send {
    /// Open a receiver, send its metadata as soon as prefill's ranks are known, and return at once.
    fn fetch(&mut self, room: &FetchRoom) -> Result<()>;

    /// Bytes that came in since the start, by the way they came.
    fn arrived(&self) -> Arrived;

    /// What its manager counts, as of now.
    fn stats(&self) -> RankStats;

    /// Drive the rooms; append news to `out`. Returns as soon as there is news, at the latest after `timeout`.
    fn wait(&mut self, timeout: Duration, out: &mut Vec<EngineEvent>) -> Result<()>;
}

/// A prefill engine that is ready for peers.
pub struct PrefillStart {
    /// The engine.
    pub engine: Box<dyn PrefillEngine>,
    /// `host:port` of the registry, when this rank runs it.
    pub bootstrap: Option<String>,
}

/// Makes engines: register `memory`, connect to (or run) the registry, start threads.
pub trait EngineFactory: Send + Sync {
    /// A prefill rank.
    fn prefill(&self, config: &WorkerConfig, memory: Arc<KvMemory>) -> Result<PrefillStart>;

    /// A decode rank.
    fn decode(&self, config: &WorkerConfig, memory: Arc<KvMemory>) -> Result<Box<dyn DecodeEngine>>;
}
