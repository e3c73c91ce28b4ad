//! Which pages of a chunk one prefill rank sends, when the pages are split over ranks.

use std::ops::Range;

use super::TopologyError;

/// The part of a chunk that falls to one rank, contiguous in the request's page list.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkPart<'a> {
    /// Our pages.
    pub pages: &'a [i32],
    /// Their positions in the request's page list.
    pub positions: Range<u64>,
}

/// The part of a chunk that falls to one shard, scattered over the request's page list.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ShardPart {
    /// Page numbers in this rank's own pool (`page / shard_size`).
    pub local_pages: Vec<i32>,
    /// Position of each in the request's page list.
    pub positions: Vec<u64>,
}

/// `[start, end)` of the request's page list that CP rank `cp_rank` sends: a balanced split, the first
/// `total_pages % cp_size` ranks get one page more.
///
/// # Errors
/// `cp_size` 0, or a rank that it does not have.
pub fn cp_rank_page_bounds(total_pages: u64, cp_rank: u32, cp_size: u32) -> Result<Range<u64>, TopologyError> {
    super::check_size("attn_cp_size", cp_size)?;
    super::check_rank("attn_cp_rank", cp_rank, cp_size)?;
    let (rank, size) = (u64::from(cp_rank), u64::from(cp_size));
    let (each, rest) = (total_pages / size, total_pages % size);
    let start = rank * each + rank.min(rest);
    Ok(start..start + each + u64::from(rank < rest))
}

/// The part of a chunk (`pages`, the first at position `start` of the request's page list) that CP rank `cp_rank`
/// sends. An empty part keeps the chunk's start as its position.
///
/// # Errors
/// As [`cp_rank_page_bounds`].
pub fn filter_for_cp_rank(
    pages: &[i32],
    start: u64,
    total_pages: u64,
    cp_rank: u32,
    cp_size: u32,
) -> Result<ChunkPart<'_>, TopologyError> {
    let bounds = cp_rank_page_bounds(total_pages, cp_rank, cp_size)?;
    let end = start.saturating_add(pages.len() as u64);
    if cp_size == 1 {
        return Ok(ChunkPart { pages, positions: start..end });
    }
    let (from, to) = (start.max(bounds.start), end.min(bounds.end));
    if from >= to {
        return Ok(ChunkPart { pages: &[], positions: start..start });
    }
    // Both differences are at most `pages.len()`.
    let part = &pages[(from - start) as usize..(to - start) as usize];
    Ok(ChunkPart { pages: part, positions: from..to })
}

/// The part of a chunk that shard `shard_rank` of `shard_size` holds: pages `p` with `p % shard_size == shard_rank`.
/// A negative page stays negative, so that the planner refuses it.
///
/// # Errors
/// `shard_size` 0, or a rank that it does not have.
pub fn filter_for_shard_rank(
    pages: &[i32],
    start: u64,
    shard_rank: u32,
    shard_size: u32,
) -> Result<ShardPart, TopologyError> {
    super::check_size("shard size", shard_size)?;
    super::check_rank("shard rank", shard_rank, shard_size)?;
    // At most MAX_PARALLEL_SIZE.
    let (rank, size) = (shard_rank as i32, shard_size as i32);
    let mut out = ShardPart::default();
    for (i, &page) in pages.iter().enumerate() {
        if page.rem_euclid(size) == rank {
            out.local_pages.push(page.div_euclid(size));
            out.positions.push(start.saturating_add(i as u64));
        }
    }
    Ok(out)
}
