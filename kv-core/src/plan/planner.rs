//! Checked plans out of a pairing and page lists.

use std::sync::Arc;

use super::runs::{check_pages, push_runs};
use super::{PlanError, PlanGroup, Run, Side, WritePlan};
use crate::layout::Pairing;

/// Makes the plans of one shard.
///
/// Runs are found in a buffer that is kept; what a plan costs once the buffer is warm is one allocation, the
/// `Arc<[Run]>` that it shares with its pieces and copies. The entry pairs are the pairing's own.
#[derive(Debug, Default)]
pub struct Planner {
    runs: Vec<Run>,
}

impl Planner {
    /// A planner with cold buffers.
    pub fn new() -> Self {
        Self::default()
    }

    /// Every paired KV entry, page `src_pages[i]` here to page `dst_pages[i]` there. Both lists are checked against
    /// both sides' pages before anything is planned. Lists that do not pair are refused, an empty one against another
    /// included: pages that decode has no place for are taken off first, and seen to be, by
    /// [`dst_slice`](super::dst_slice).
    ///
    /// # Errors
    /// Unequal lists, negative pages, pages that a side does not have.
    pub fn plan_chunk(
        &mut self,
        pairing: &Pairing,
        src_pages: &[i32],
        dst_pages: &[i32],
    ) -> Result<WritePlan, PlanError> {
        if src_pages.len() != dst_pages.len() {
            return Err(PlanError::UnequalLengths { src: src_pages.len(), dst: dst_pages.len() });
        }
        // A rank without KV entries of its own still counts pages.
        if src_pages.is_empty() || pairing.kv().is_empty() {
            return Ok(WritePlan::default());
        }
        let (src_bound, dst_bound) = pairing.kv_bounds();
        check_pages(Side::Source, src_pages, src_bound)?;
        check_pages(Side::Destination, dst_pages, dst_bound)?;
        self.runs.clear();
        push_runs(src_pages, dst_pages, &mut self.runs);
        Ok(WritePlan::new([PlanGroup { entries: Arc::clone(pairing.kv()), runs: self.runs.as_slice().into() }]))
    }

    /// Every paired aux entry, row `src_slot` here to row `dst_slot` there: one span a row.
    ///
    /// # Errors
    /// A slot that a side does not have.
    pub fn plan_aux(&mut self, pairing: &Pairing, src_slot: u32, dst_slot: u32) -> Result<WritePlan, PlanError> {
        if pairing.aux().is_empty() {
            return Ok(WritePlan::default());
        }
        let (src_bound, dst_bound) = pairing.aux_bounds();
        for (side, slot, bound) in [(Side::Source, src_slot, src_bound), (Side::Destination, dst_slot, dst_bound)] {
            if u64::from(slot) >= bound {
                return Err(PlanError::OutOfBounds { side, what: "aux slot", index: i64::from(slot), bound });
            }
        }
        let run = Run { src: src_slot, dst: dst_slot, count: 1 };
        Ok(WritePlan::new([PlanGroup { entries: Arc::clone(pairing.aux()), runs: [run].into() }]))
    }
}
