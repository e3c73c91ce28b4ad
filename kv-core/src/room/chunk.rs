//! One `send()` on prefill: its pages, and how far each destination has got.

use std::ops::Range;
use std::sync::Arc;

use smallvec::SmallVec;

use crate::ids::OpId;
use crate::mutants::mutant;

/// What a chunk is made of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ChunkSpec {
    /// Source pages.
    pub pages: Arc<[i32]>,
    /// Which positions of the request's page list they are.
    pub index_slice: Range<u32>,
    /// The last chunk: aux and state go with it, Success follows it.
    pub is_last: bool,
    /// Source pages must not be read before the chunk's event fired (A3).
    pub has_wait_event: bool,
    /// Our metadata slot; used with the last chunk only.
    pub aux_index: Option<u32>,
}

/// Counts a chunk as outstanding. Removes only itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Ticket {
    /// The chunk's number within the room.
    pub chunk: u32,
    /// Grows when a deferred chunk is tried again.
    pub attempt: u32,
}

/// How far one destination of a chunk has got.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Progress {
    /// Not posted. A post is legal only from here.
    Todo,
    /// In flight.
    Posted(OpId),
    /// Every byte in place.
    Done,
    /// It ended, and not both sides are proven quiet: its handle and memory are retained.
    Retained {
        /// The write.
        op: OpId,
        /// Nothing reads the source any more.
        src_quiet: bool,
        /// No byte can land any more.
        dst_quiet: bool,
    },
    /// It did not complete, and is proven quiet on both sides (or was never posted).
    Quiet,
}

impl Progress {
    /// Nothing reads the source any more.
    pub fn src_quiet(self) -> bool {
        match self {
            Self::Todo | Self::Done | Self::Quiet => true,
            Self::Posted(_) => false,
            Self::Retained { src_quiet, .. } => src_quiet,
        }
    }

    /// Nothing reads the source and nothing can land.
    pub fn quiet(self) -> bool {
        match self {
            Self::Todo | Self::Done | Self::Quiet => true,
            Self::Posted(_) => false,
            Self::Retained { src_quiet, dst_quiet, .. } => src_quiet && dst_quiet,
        }
    }
}

/// A chunk of a room.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Chunk {
    pub(super) id: u32,
    pub(super) attempt: u32,
    pub(super) spec: ChunkSpec,
    pub(super) source_ready: bool,
    /// One entry per destination; empty until the chunk starts.
    pub(super) progress: SmallVec<[Progress; 1]>,
}

impl Chunk {
    pub(super) fn new(id: u32, spec: ChunkSpec) -> Self {
        let source_ready = !spec.has_wait_event;
        Self { id, attempt: 0, spec, source_ready, progress: SmallVec::new() }
    }

    /// Number within the room.
    pub fn id(&self) -> u32 {
        self.id
    }

    /// Its pages and place.
    pub fn spec(&self) -> &ChunkSpec {
        &self.spec
    }

    /// Progress by destination.
    pub fn progress(&self) -> &[Progress] {
        &self.progress
    }

    pub(super) fn ticket(&self) -> Ticket {
        Ticket { chunk: self.id, attempt: self.attempt }
    }

    pub(super) fn all_done(&self) -> bool {
        if mutant!(SuccessBeforeSiblings) {
            return self.progress.is_empty() || self.progress.contains(&Progress::Done);
        }
        self.progress.iter().all(|p| *p == Progress::Done)
    }

    pub(super) fn quiet(&self) -> bool {
        self.progress.iter().all(|p| p.quiet() || mutant!(DischargeOnError))
    }
}
