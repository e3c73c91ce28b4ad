//! Metadata rows: one a room, written by prefill, read by decode.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use kv_transfer::memory::MemoryOwner;

use crate::error::{CliError, Result};

/// Rows of one rank: how many rooms it may have open.
pub const AUX_ROWS: u32 = 16_384;
/// Bytes of a row; the room's number is the first word.
pub const ROW_BYTES: usize = 64;
const WORDS: usize = ROW_BYTES / 8;

/// A rank's metadata rows. Words are atomic: a transfer may write one while we look at another.
pub struct AuxRows {
    words: Box<[AtomicU64]>,
    free: Mutex<Vec<u32>>,
}

// SAFETY: the boxed words stay at their address until drop, and are atomics, so writes from outside race with nothing.
unsafe impl MemoryOwner for AuxRows {
    fn base(&self) -> u64 {
        self.words.as_ptr() as u64
    }

    fn len(&self) -> u64 {
        (self.words.len() * 8) as u64
    }
}

impl AuxRows {
    /// All rows empty.
    pub fn new() -> Self {
        let words = (0..AUX_ROWS as usize * WORDS).map(|_| AtomicU64::new(0)).collect();
        Self { words, free: Mutex::new((0..AUX_ROWS).rev().collect()) }
    }

    /// A row for a room.
    pub fn take(&self) -> Result<u32> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).pop().ok_or_else(|| {
            CliError::new(format!("more than {AUX_ROWS} rooms are open")).hint("use a smaller --concurrency")
        })
    }

    /// A row is free again.
    pub fn give_back(&self, row: u32) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(row);
    }

    fn word(&self, row: u32) -> Option<&AtomicU64> {
        self.words.get(row as usize * WORDS)
    }

    /// The room a row names; 0 when none.
    pub fn read(&self, row: u32) -> u64 {
        self.word(row).map_or(0, |w| w.load(Ordering::Acquire))
    }

    /// Name a room.
    pub fn write(&self, row: u32, room: u64) {
        if let Some(w) = self.word(row) {
            w.store(room, Ordering::Release);
        }
    }

    /// Leave no trace of the last room.
    pub fn clear(&self, row: u32) {
        self.write(row, 0);
    }
}

impl Default for AuxRows {
    fn default() -> Self {
        Self::new()
    }
}
