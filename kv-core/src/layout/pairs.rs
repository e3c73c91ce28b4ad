//! Which entry here goes to which entry there (protocol 8.3). Pure index arithmetic: pairs are (ours, theirs).

use std::collections::HashMap;
use std::ops::Range;

use super::LayoutError;

/// Pair by layer id where both sides have ids: the k-th of our entries with an id goes to the k-th of theirs.
/// Otherwise by position.
///
/// `allow_positional_fallback` is true for a prefill with `pp_size` 1: then ids on one side only are ignored, and the
/// peer may have more entries than we (its draft model's, which come last).
///
/// # Errors
/// Ids on one side only, unequal counts without fallback, fewer entries there than here, a layer the peer lacks.
pub fn build_transfer_entry_pairs(
    src_layer_ids: &[u32],
    dst_layer_ids: &[u32],
    n_src: u32,
    n_dst: u32,
    allow_positional_fallback: bool,
) -> Result<Vec<(u32, u32)>, LayoutError> {
    for (field, ids, n) in [("our layer ids", src_layer_ids, n_src), ("the peer's layer ids", dst_layer_ids, n_dst)] {
        if !ids.is_empty() && ids.len() as u64 != u64::from(n) {
            return Err(LayoutError::Count { field, got: ids.len() as u64, want: u64::from(n) });
        }
    }
    if n_src == 0 {
        return Ok(Vec::new());
    }
    if !src_layer_ids.is_empty() && !dst_layer_ids.is_empty() {
        return pair_by_layer(src_layer_ids, dst_layer_ids);
    }
    if src_layer_ids.is_empty() != dst_layer_ids.is_empty() && !allow_positional_fallback {
        let (ours, theirs) = (src_layer_ids.len() as u64, dst_layer_ids.len() as u64);
        return Err(LayoutError::LayerIdsOneSided { ours, theirs });
    }
    if n_dst < n_src || (n_dst != n_src && !allow_positional_fallback) {
        return Err(unplaceable(n_src, n_dst, "the counts differ"));
    }
    Ok((0..n_src).map(|i| (i, i)).collect())
}

fn pair_by_layer(src: &[u32], dst: &[u32]) -> Result<Vec<(u32, u32)>, LayoutError> {
    let mut theirs = HashMap::<u32, Vec<u32>>::new();
    for (&layer, i) in dst.iter().zip(0..) {
        theirs.entry(layer).or_default().push(i);
    }
    let mut seen = HashMap::<u32, u32>::new();
    src.iter()
        .zip(0..)
        .map(|(&layer, i)| {
            let occurrence = seen.entry(layer).or_default();
            let found = theirs.get(&layer).and_then(|list| list.get(*occurrence as usize));
            let &j = found.ok_or(LayoutError::MissingLayer { layer, occurrence: *occurrence })?;
            *occurrence += 1;
            Ok((i, j))
        })
        .collect()
}

/// MHA without layer ids: half K, half V on both sides, the decode possibly with all layers of the model and with the
/// draft model's entries behind them.
///
/// How many of the peer's layers are the target model's is not on the wire. 0.5.23 takes the largest multiple of our
/// own count, which is wrong for uneven stages and for a draft model as deep as the target. With one stage the answer
/// is ours; with several, a guess that the stage's own position contradicts is refused instead of written to the
/// wrong layer.
///
/// # Errors
/// [`LayoutError::Unplaceable`].
pub fn mha_pairs(
    n_src: u32,
    n_dst: u32,
    start_layer: u32,
    num_draft_entries: u32,
    (pp_rank, pp_size): (u32, u32),
) -> Result<Vec<(u32, u32)>, LayoutError> {
    if !n_src.is_multiple_of(2) || !n_dst.is_multiple_of(2) {
        return Err(unplaceable(n_src, n_dst, "K and V come in pairs"));
    }
    if n_src == n_dst {
        return Ok((0..n_src).map(|i| (i, i)).collect());
    }
    if n_src > n_dst {
        return Err(unplaceable(n_src, n_dst, "the peer has fewer"));
    }
    if n_src == 0 {
        return Ok(Vec::new());
    }
    let (n, m) = (n_src / 2, n_dst / 2);
    if num_draft_entries > 0 {
        return Err(unplaceable(n_src, n_dst, "both halves of a draft model are not found by position"));
    }
    let target_layers = if pp_size == 1 { n } else { m / n * n };
    let end = u64::from(start_layer) + u64::from(n);
    let last = pp_rank + 1 == pp_size;
    let fits = if last { end == u64::from(target_layers) } else { end < u64::from(target_layers) };
    if !fits {
        return Err(unplaceable(n_src, n_dst, "the stage's layers do not tell the peer's target layers"));
    }
    let s = start_layer;
    let k = (0..n).map(|i| (i, s + i));
    let v = (0..n).map(|i| (n + i, target_layers + s + i));
    Ok(k.chain(v).collect())
}

/// MLA without layer ids: one entry a layer; equal counts pair 1:1, else our target entries go to the peer's from
/// `start_layer` on and our draft entries to its last.
///
/// # Errors
/// [`LayoutError::Unplaceable`].
pub fn mla_pairs(
    n_src: u32,
    n_dst: u32,
    start_layer: u32,
    num_draft_entries: u32,
) -> Result<Vec<(u32, u32)>, LayoutError> {
    if n_src == n_dst {
        return Ok((0..n_src).map(|i| (i, i)).collect());
    }
    let Some(n_target) = n_src.checked_sub(num_draft_entries) else {
        return Err(unplaceable(n_src, n_dst, "more draft entries than entries"));
    };
    let end = u64::from(start_layer) + u64::from(n_target) + u64::from(num_draft_entries);
    if end > u64::from(n_dst) {
        return Err(unplaceable(n_src, n_dst, "the peer has fewer than our last layer needs"));
    }
    let target = (0..n_target).map(|i| (i, start_layer + i));
    let draft = (0..num_draft_entries).map(|i| (n_target + i, n_dst - num_draft_entries + i));
    Ok(target.chain(draft).collect())
}

/// Which list of a compressed-MLA model a selection is made from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CompressedList {
    /// KV: `[c4][c4 indexer][c128]`.
    Kv,
    /// SWA state: `[window][c4 state][c4 indexer state]`.
    Swa,
    /// Request state: `[c128 state]`.
    C128State,
    /// SWA ring state: one a layer.
    SwaRing,
}

/// The entries of the peer's list that the layers `[layers)` own, in our order. Lists of compressed-MLA models are
/// ordered by compression ratio first (`ratios`: one per model layer; 4 and 128 count).
///
/// A KV list whose length is not `2 * c4 + c128` is read by the SWA rule, as 0.5.23 does;
/// [`Pairing`](super::Pairing) refuses such a list before it comes here.
///
/// # Errors
/// [`LayoutError::Unplaceable`] when the list is too short for the rule, or longer than the model has layers.
pub fn compressed_offsets(
    ratios: &[u32],
    layers: Range<u32>,
    list: CompressedList,
    n_dst: u32,
) -> Result<Vec<u32>, LayoutError> {
    let count = |ratio: u32, upto: u32| {
        let upto = ratios.len().min(upto as usize);
        ratios[..upto].iter().filter(|&&r| r == ratio).count() as u32
    };
    let all = u32::try_from(ratios.len()).unwrap_or(u32::MAX);
    let (c4_all, c128_all) = (count(4, all), count(128, all));
    let c4 = count(4, layers.start)..count(4, layers.end);
    let c128 = count(128, layers.start)..count(128, layers.end);
    let clip = |len: u32| layers.start.min(len)..layers.end.min(len);
    let shift = |r: &Range<u32>, by: u32| r.start + by..r.end + by;
    let n = layers.end.saturating_sub(layers.start);

    let out: Vec<u32> = match list {
        CompressedList::C128State => c128.collect(),
        CompressedList::SwaRing => clip(n_dst).collect(),
        CompressedList::Kv if u64::from(n_dst) == 2 * u64::from(c4_all) + u64::from(c128_all) => {
            c4.clone().chain(shift(&c4, c4_all)).chain(shift(&c128, 2 * c4_all)).collect()
        }
        CompressedList::Kv | CompressedList::Swa => {
            let window = n_dst
                .checked_sub(2 * c4_all)
                .filter(|&window| window <= all)
                .ok_or_else(|| unplaceable(n, n_dst, "not the length of a compressed-MLA list"))?;
            clip(window).chain(shift(&c4, window)).chain(shift(&c4, window + c4_all)).collect()
        }
    };
    if out.iter().any(|&i| i >= n_dst) {
        return Err(unplaceable(n, n_dst, "not the length of a compressed-MLA list"));
    }
    Ok(out)
}

/// How many KV entries the compressed-MLA layers of a whole model have.
pub(super) fn compressed_kv_len(ratios: &[u32]) -> u64 {
    ratios.iter().map(|r| if *r == 4 { 2 } else { u64::from(*r == 128) }).sum()
}

/// Layer ids of a draft model's entries, moved behind the target's: `num_hidden_layers` + order of first occurrence.
/// `None` when an id would not fit.
pub fn remap_draft_layer_ids(layer_ids: &[u32], num_hidden_layers: u32) -> Option<Vec<u32>> {
    let mut order = HashMap::<u32, u32>::new();
    layer_ids
        .iter()
        .map(|&id| {
            let next = order.len() as u32;
            num_hidden_layers.checked_add(*order.entry(id).or_insert(next))
        })
        .collect()
}

pub(super) fn unplaceable(ours: u32, theirs: u32, why: &'static str) -> LayoutError {
    LayoutError::Unplaceable { ours: u64::from(ours), theirs: u64::from(theirs), why }
}
