//! Write plans: entry pairs x page runs, lowered lazily to spans.
//!
//! Runs of consecutive pages depend on the two page lists only, so they are found once a chunk and multiplied by the
//! entry pairs (layers x K/V), which depend on the two layouts only and are made once a peer.

mod flat;
mod planner;
mod runs;
mod split;

use std::sync::Arc;

use smallvec::SmallVec;

use crate::ids::RegionId;
use crate::memory::MemoryKind;

pub use flat::{flat_indices, kind_segments};
pub use planner::Planner;
pub use runs::{ChunkPages, PlanError, Side, check_pages, dst_slice, find_runs};

/// One buffer here paired with one buffer there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryPair {
    /// Index in our own list of entries.
    pub src_entry: u32,
    /// Index in the peer's list of entries.
    pub dst_entry: u32,
    /// Our region.
    pub src_region: RegionId,
    /// Byte offset of item 0 (plus any slice offset) in our region.
    pub src_offset: u64,
    /// Absolute address of item 0 (plus any slice offset) at the peer.
    pub dst_addr: u64,
    /// Bytes moved for one item.
    pub item_len: u64,
    /// Bytes from one item to the next here.
    pub src_stride: u64,
    /// Bytes from one item to the next there.
    pub dst_stride: u64,
    /// Host or device memory there.
    pub dst_kind: MemoryKind,
}

impl EntryPair {
    /// Items lie back to back on both sides, so that a run is one copy.
    pub const fn is_dense(&self) -> bool {
        self.src_stride == self.item_len && self.dst_stride == self.item_len
    }

    /// The copy of `items` items from `src` to `dst`; more than one only if [`Self::is_dense`].
    const fn span(&self, src: u32, dst: u32, items: u32) -> Span {
        Span {
            src_region: self.src_region,
            src_offset: self.src_offset + src as u64 * self.src_stride,
            dst_addr: self.dst_addr + dst as u64 * self.dst_stride,
            len: self.item_len * items as u64,
        }
    }
}

/// `count` consecutive items: `src..src+count` here to `dst..dst+count` there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// First item here.
    pub src: u32,
    /// First item there.
    pub dst: u32,
    /// How many.
    pub count: u32,
}

/// Every entry pair times every run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanGroup {
    /// Shared by all chunks to one peer.
    pub entries: Arc<[EntryPair]>,
    /// Shared by all peers that take the same pages.
    pub runs: Arc<[Run]>,
}

/// One contiguous copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Our region.
    pub src_region: RegionId,
    /// Byte offset in our region.
    pub src_offset: u64,
    /// Absolute address at the peer.
    pub dst_addr: u64,
    /// Bytes.
    pub len: u64,
}

/// Everything one op writes. Checked against both layouts when it was made: every span lies inside a local region and
/// inside what the peer registered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WritePlan {
    groups: SmallVec<[PlanGroup; 2]>,
}

impl WritePlan {
    /// A plan of these groups. Bounds are the maker's duty; [`Planner`] makes checked plans.
    pub fn new(groups: impl IntoIterator<Item = PlanGroup>) -> Self {
        Self { groups: groups.into_iter().filter(|g| !g.entries.is_empty() && !g.runs.is_empty()).collect() }
    }

    /// Write `other` as well, in the same op.
    pub fn append(&mut self, other: Self) {
        self.groups.extend(other.groups);
    }

    /// Its groups, in order.
    pub fn groups(&self) -> &[PlanGroup] {
        &self.groups
    }

    /// Whether it moves nothing.
    pub fn is_empty(&self) -> bool {
        self.groups.is_empty()
    }

    /// Bytes it moves.
    pub fn total_bytes(&self) -> u64 {
        self.groups
            .iter()
            .map(|g| {
                let items: u64 = g.runs.iter().map(|r| u64::from(r.count)).sum();
                let per_item: u64 = g.entries.iter().map(|e| e.item_len).sum();
                items * per_item
            })
            .sum()
    }

    /// How many spans it has.
    pub fn descriptor_count(&self) -> u64 {
        self.groups
            .iter()
            .map(|g| {
                let items: u64 = g.runs.iter().map(|r| u64::from(r.count)).sum();
                let whole = g.entries.iter().filter(|e| e.is_dense()).count() as u64;
                whole * g.runs.len() as u64 + (g.entries.len() as u64 - whole) * items
            })
            .sum()
    }

    /// Call `f` with every span, in the order of [`Self::spans`]: the tight loop for lowering whole plans.
    pub fn for_each_span(&self, mut f: impl FnMut(Span)) {
        for g in &self.groups {
            for e in g.entries.iter() {
                if e.is_dense() {
                    g.runs.iter().for_each(|r| f(e.span(r.src, r.dst, r.count)));
                } else {
                    g.runs.iter().for_each(|r| (0..r.count).for_each(|i| f(e.span(r.src + i, r.dst + i, 1))));
                }
            }
        }
    }

    /// Its spans: entry by entry, run by run. A run is one span where items lie back to back on both sides, else one
    /// span an item.
    pub fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        self.groups.iter().flat_map(|g| {
            g.entries.iter().flat_map(move |e| {
                let dense = e.is_dense();
                g.runs.iter().flat_map(move |r| {
                    let (n, items) = if dense { (1, r.count) } else { (r.count, 1) };
                    (0..n).map(move |i| e.span(r.src + i, r.dst + i, items))
                })
            })
        })
    }
}
