//! Metadata rows of a rank: one a room, written by prefill, read by decode.

use std::sync::Arc;

use kv_transfer::aux_slots::AuxSlots;

use crate::error::{CliError, Result};

/// Rows of one rank: how many rooms it may have open.
pub const AUX_ROWS: u32 = 16_384;
/// Bytes of a row; the room's number is the first word.
pub const ROW_BYTES: usize = 64;

/// All rows empty.
pub fn rows() -> Result<Arc<AuxSlots>> {
    let slots = AuxSlots::new(AUX_ROWS, &[ROW_BYTES], 0);
    slots.map(Arc::new).map_err(|e| CliError::new(e.to_string()))
}

/// A row for a room.
pub fn take(rows: &AuxSlots) -> Result<u32> {
    let hint = "too many rooms are open: use a smaller --concurrency";
    rows.take().map_err(|e| CliError::new(e.to_string()).hint(hint))
}

/// A row is free again.
pub fn give_back(rows: &AuxSlots, row: u32) {
    if let Err(error) = rows.give_back(row) {
        tracing::error!("{error}");
    }
}
