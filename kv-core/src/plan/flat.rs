//! Flat descriptor indices, for backends that prepare one descriptor per (entry, item) once and then name them by
//! number (NIXL, protocol 8.4).

use std::ops::Range;

/// `entry * slots + page` for every entry and page: entry by entry, pages in order.
///
/// `None` when an index does not fit, or a page is not in `0..slots`.
pub fn flat_indices(pages: &[i32], entries: u32, slots: u64) -> Option<Vec<u64>> {
    if pages.iter().any(|&page| page < 0 || page as u64 >= slots) || u64::from(entries).checked_mul(slots).is_none() {
        return None;
    }
    let base = |entry| u64::from(entry) * slots;
    Some((0..entries).flat_map(|entry| pages.iter().map(move |&page| base(entry) + page as u64)).collect())
}

/// Stretches of consecutive pairs with equal (ours, theirs) kind; each takes a transfer of its own.
pub fn kind_segments<K: Copy + PartialEq>(pairs: &[(K, K)]) -> Vec<(Range<usize>, (K, K))> {
    let mut out: Vec<(Range<usize>, (K, K))> = Vec::new();
    for (i, &kinds) in pairs.iter().enumerate() {
        match out.last_mut() {
            Some((range, last)) if *last == kinds => range.end = i + 1,
            _ => out.push((i..i + 1, kinds)),
        }
    }
    out
}
