//! Write plans: entry pairs x page runs, lowered lazily to spans.
//!
//! Runs of consecutive pages depend on the two page lists only, so they are found once a chunk and multiplied by the
//! entry pairs (layers x K/V), which depend on the two layouts only and are made once a peer.

use std::sync::Arc;

use smallvec::SmallVec;

use crate::ids::RegionId;

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
    /// A plan of these groups. Bounds are the maker's duty; use the planner in [`crate::layout`] for checked plans.
    pub fn new(groups: impl IntoIterator<Item = PlanGroup>) -> Self {
        Self { groups: groups.into_iter().filter(|g| !g.entries.is_empty() && !g.runs.is_empty()).collect() }
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

    /// Its spans: entry by entry, run by run. A run is one span where items lie back to back on both sides, else one
    /// span an item.
    pub fn spans(&self) -> impl Iterator<Item = Span> + '_ {
        self.groups.iter().flat_map(|g| {
            g.entries.iter().flat_map(move |e| {
                let whole = e.src_stride == e.item_len && e.dst_stride == e.item_len;
                g.runs.iter().flat_map(move |r| {
                    let (n, items) = if whole { (1, u64::from(r.count)) } else { (r.count, 1) };
                    (0..u64::from(n)).map(move |i| Span {
                        src_region: e.src_region,
                        src_offset: e.src_offset + (u64::from(r.src) + i) * e.src_stride,
                        dst_addr: e.dst_addr + (u64::from(r.dst) + i) * e.dst_stride,
                        len: e.item_len * items,
                    })
                })
            })
        })
    }
}
