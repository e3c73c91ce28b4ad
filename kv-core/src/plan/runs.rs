//! Runs of consecutive pages, and the one bounds check a list.

use super::Run;

/// Why a chunk cannot be planned. Nothing was planned.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PlanError {
    /// Two lists that pair by position are not equally long.
    #[error("{src} source and {dst} destination pages do not pair")]
    UnequalLengths {
        /// Our pages.
        src: usize,
        /// The peer's pages.
        dst: usize,
    },
    /// A page or slot that the side does not have.
    #[error("{side} {what} {index} is outside 0..{bound}")]
    OutOfBounds {
        /// Whose.
        side: Side,
        /// `page` or `aux slot`.
        what: &'static str,
        /// The number.
        index: i64,
        /// How many there are.
        bound: u64,
    },
    /// A chunk's slice does not cover the pages given with it.
    #[error("index_slice {start}..{stop} does not cover the chunk's {pages} pages")]
    BadSlice {
        /// First position in the request's page list.
        start: u64,
        /// One past the last.
        stop: u64,
        /// Pages of the chunk.
        pages: usize,
    },
}

/// One of the two sides of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Side {
    /// Prefill: read.
    Source,
    /// Decode: written.
    Destination,
}

impl std::fmt::Display for Side {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Source => "source",
            Self::Destination => "destination",
        })
    }
}

/// Check that every page is in `0..bound`: one maximum over the list, in which a negative page, read as unsigned, is
/// larger than every page.
///
/// # Errors
/// [`PlanError::OutOfBounds`] with the first page that is outside.
pub fn check_pages(side: Side, pages: &[i32], bound: u64) -> Result<(), PlanError> {
    let max = pages.iter().fold(0, |max, &page| max.max(page as u32));
    let bound = bound.min(1 << 31);
    if pages.is_empty() || u64::from(max) < bound {
        return Ok(());
    }
    let index = pages.iter().map(|&page| i64::from(page)).find(|&page| page < 0 || page as u64 >= bound);
    // The maximum came out of this list, so there is one.
    Err(PlanError::OutOfBounds { side, what: "page", index: index.unwrap_or(i64::from(max)), bound })
}

/// SGLang's grouping (protocol 8.2): pair the lists by position and split where either does not step by +1. `runs` is
/// overwritten, its memory reused. An empty list on either side moves nothing.
///
/// # Errors
/// Unequal lengths of two lists that are not empty, or a negative page; `runs` is then empty.
pub fn find_runs(src: &[i32], dst: &[i32], runs: &mut Vec<Run>) -> Result<(), PlanError> {
    runs.clear();
    if src.is_empty() || dst.is_empty() {
        return Ok(());
    }
    if src.len() != dst.len() {
        return Err(PlanError::UnequalLengths { src: src.len(), dst: dst.len() });
    }
    check_pages(Side::Source, src, u64::MAX)?;
    check_pages(Side::Destination, dst, u64::MAX)?;
    push_runs(src, dst, runs);
    Ok(())
}

/// [`find_runs`] without its checks.
pub(super) fn push_runs(src: &[i32], dst: &[i32], runs: &mut Vec<Run>) {
    let mut pairs = src.iter().zip(dst).map(|(&s, &d)| (s as u32, d as u32));
    let Some((src, dst)) = pairs.next() else { return };
    let mut run = Run { src, dst, count: 1 };
    for (s, d) in pairs {
        if s.wrapping_sub(run.src) == run.count && d.wrapping_sub(run.dst) == run.count {
            run.count += 1;
        } else {
            runs.push(run);
            run = Run { src: s, dst: d, count: 1 };
        }
    }
    runs.push(run);
}

/// The pages of one chunk on both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChunkPages<'a> {
    /// Our pages to send.
    pub src: &'a [i32],
    /// Where they go, as many.
    pub dst: &'a [i32],
    /// Pages of the chunk for which decode announced no destination: not sent, as 0.5.23 does not (the room still ends
    /// in Success). Count and log it.
    pub truncated: usize,
}

/// The destinations of the chunk that covers `[start, stop)` of the request's page list, out of decode's whole list.
///
/// # Errors
/// [`PlanError::BadSlice`] when the slice is not as long as `src_pages`.
pub fn dst_slice<'a>(
    dst_pages: &'a [i32],
    (start, stop): (u64, u64),
    src_pages: &'a [i32],
) -> Result<ChunkPages<'a>, PlanError> {
    if stop.checked_sub(start) != Some(src_pages.len() as u64) {
        return Err(PlanError::BadSlice { start, stop, pages: src_pages.len() });
    }
    let clip = |i: u64| usize::try_from(i).unwrap_or(usize::MAX).min(dst_pages.len());
    let dst = &dst_pages[clip(start)..clip(stop)];
    Ok(ChunkPages { src: &src_pages[..dst.len()], dst, truncated: src_pages.len() - dst.len() })
}
