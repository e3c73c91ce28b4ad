//! Metadata slots: the memory behind a rank's aux entries, and who has which slot (protocol 8.7).
//!
//! A slot is one row in every buffer. Prefill fills a row and names it with the last chunk; decode names a slot in its
//! metadata, and reads it once its room succeeded. The rules:
//!
//! * a slot that is given back is zeroed **before** anybody can take it, so no trace of the last user is left, and a slot
//!   whose room number is 0 was not written yet;
//! * a slot is given back only when its room is *releasable*, since until then a write may still land in it;
//! * [`verify`](AuxSlots::verify) compares the room number in the slot with the room it is read for (SGLang's metadata
//!   gate), whatever else promises that the row is there.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::ids::Room;
use crate::memory::MemoryOwner;

/// What slots cannot do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuxError {
    /// Every slot is taken.
    #[error("all {0} metadata slots are taken")]
    Full(u32),
    /// No such slot, buffer or range.
    #[error("metadata slot {slot}, buffer {buffer}, {len} bytes: out of range")]
    OutOfRange {
        /// Which slot.
        slot: u32,
        /// Which buffer.
        buffer: usize,
        /// How many bytes.
        len: usize,
    },
    /// Given back twice, or never taken.
    #[error("metadata slot {0} is not taken")]
    NotTaken(u32),
    /// The room's row has not been written.
    #[error("metadata slot {slot} of room {room} was not written: its room number is still 0")]
    NotWritten {
        /// Which slot.
        slot: u32,
        /// Read for which room.
        room: Room,
    },
    /// Somebody else's row.
    #[error("metadata slot {slot} of room {room} holds the row of room {found}")]
    OtherRoom {
        /// Which slot.
        slot: u32,
        /// Read for which room.
        room: Room,
        /// Whose row it is.
        found: u64,
    },
    /// Rows must be whole 64-bit words, and the room number must fit into its row.
    #[error("aux buffer {buffer} has rows of {bytes} bytes: a positive multiple of 8 is needed")]
    BadRow {
        /// Which buffer.
        buffer: usize,
        /// Its row length.
        bytes: usize,
    },
}

#[derive(Clone, Copy, Debug)]
struct Buffer {
    /// First word.
    at: usize,
    /// Words of a row.
    row: usize,
}

/// One aux buffer's place within the memory of [`AuxSlots`], for the layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuxEntry {
    /// First byte.
    pub offset: u64,
    /// Bytes of the whole buffer.
    pub len: u64,
    /// Bytes of a row.
    pub item_len: u64,
}

/// See the [module](self). Words are atomic: a transfer may write a slot while we look at another.
#[derive(Debug)]
pub struct AuxSlots {
    words: Box<[AtomicU64]>,
    buffers: Vec<Buffer>,
    room_buffer: usize,
    slots: u32,
    free: Mutex<Free>,
}

#[derive(Debug)]
struct Free {
    slots: Vec<u32>,
    taken: Vec<bool>,
}

// SAFETY: the boxed words stay at their address until drop, and are atomics, so writes from outside race with nothing.
unsafe impl MemoryOwner for AuxSlots {
    fn base(&self) -> u64 {
        self.words.as_ptr() as u64
    }

    fn len(&self) -> u64 {
        (self.words.len() * 8) as u64
    }
}

impl AuxSlots {
    /// `slots` rows in each buffer, all zero and free. `row_bytes`: of each buffer, in the order of the layout;
    /// `room_buffer`: the one whose row begins with the room number.
    ///
    /// # Errors
    /// [`AuxError::BadRow`], [`AuxError::OutOfRange`] when there is no such buffer.
    pub fn new(slots: u32, row_bytes: &[usize], room_buffer: usize) -> Result<Self, AuxError> {
        let mut words = 0;
        let mut buffers = Vec::with_capacity(row_bytes.len());
        for (buffer, &bytes) in row_bytes.iter().enumerate() {
            let bad = AuxError::BadRow { buffer, bytes };
            if bytes == 0 || bytes % 8 != 0 {
                return Err(bad);
            }
            buffers.push(Buffer { at: words, row: bytes / 8 });
            words = (bytes / 8).checked_mul(slots as usize).and_then(|n| n.checked_add(words)).ok_or(bad)?;
        }
        if room_buffer >= buffers.len() {
            return Err(AuxError::OutOfRange { slot: 0, buffer: room_buffer, len: 8 });
        }
        Ok(Self {
            words: (0..words).map(|_| AtomicU64::new(0)).collect(),
            buffers,
            room_buffer,
            slots,
            free: Mutex::new(Free { slots: (0..slots).rev().collect(), taken: vec![false; slots as usize] }),
        })
    }

    /// Where each buffer is, in order.
    pub fn entries(&self) -> impl Iterator<Item = AuxEntry> + '_ {
        self.buffers.iter().map(|b| AuxEntry {
            offset: (b.at * 8) as u64,
            len: (b.row * 8) as u64 * u64::from(self.slots),
            item_len: (b.row * 8) as u64,
        })
    }

    /// A slot for a room, all zero.
    ///
    /// # Errors
    /// [`AuxError::Full`].
    pub fn take(&self) -> Result<u32, AuxError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = free.slots.pop().ok_or(AuxError::Full(self.slots))?;
        free.taken[slot as usize] = true;
        Ok(slot)
    }

    /// A slot's room is releasable and its row was read: leave no trace of it, then let others have it.
    ///
    /// # Errors
    /// [`AuxError::NotTaken`]; nothing changed.
    pub fn give_back(&self, slot: u32) -> Result<(), AuxError> {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        if free.taken.get(slot as usize) != Some(&true) {
            return Err(AuxError::NotTaken(slot));
        }
        for b in &self.buffers {
            let at = b.at + slot as usize * b.row;
            self.words[at..at + b.row].iter().for_each(|w| w.store(0, Ordering::Relaxed));
        }
        // Whoever takes it next takes the lock, and sees zeros.
        free.taken[slot as usize] = false;
        free.slots.push(slot);
        Ok(())
    }

    /// Slots that are taken.
    pub fn taken(&self) -> usize {
        self.slots as usize - self.free.lock().unwrap_or_else(PoisonError::into_inner).slots.len()
    }

    fn row(&self, slot: u32, buffer: usize, len: usize) -> Result<&[AtomicU64], AuxError> {
        let of = |b: &Buffer| {
            let at = b.at + slot as usize * b.row;
            (slot < self.slots && len <= b.row * 8).then(|| &self.words[at..at + b.row])
        };
        self.buffers.get(buffer).and_then(of).ok_or(AuxError::OutOfRange { slot, buffer, len })
    }

    /// The room number in a slot; 0 when it was not written.
    pub fn room(&self, slot: u32) -> u64 {
        self.row(slot, self.room_buffer, 8).map_or(0, |row| row[0].load(Ordering::Acquire))
    }

    /// Prefill: name the room of a slot, after the rest of the row was filled.
    ///
    /// # Errors
    /// [`AuxError::OutOfRange`].
    pub fn name(&self, slot: u32, room: Room) -> Result<(), AuxError> {
        self.row(slot, self.room_buffer, 8)?[0].store(room.get(), Ordering::Release);
        Ok(())
    }

    /// Decode: the row in this slot is this room's.
    ///
    /// # Errors
    /// [`AuxError::NotWritten`], [`AuxError::OtherRoom`]: the room must not be used.
    pub fn verify(&self, slot: u32, room: Room) -> Result<(), AuxError> {
        match self.row(slot, self.room_buffer, 8)?[0].load(Ordering::Acquire) {
            0 => Err(AuxError::NotWritten { slot, room }),
            found if found == room.get() => Ok(()),
            found => Err(AuxError::OtherRoom { slot, room, found }),
        }
    }

    /// Fill the front of a row; the rest keeps its bytes.
    ///
    /// # Errors
    /// [`AuxError::OutOfRange`].
    pub fn write(&self, slot: u32, buffer: usize, bytes: &[u8]) -> Result<(), AuxError> {
        let row = self.row(slot, buffer, bytes.len())?;
        for (word, part) in row.iter().zip(bytes.chunks(8)) {
            let mut whole = word.load(Ordering::Relaxed).to_ne_bytes();
            whole[..part.len()].copy_from_slice(part);
            word.store(u64::from_ne_bytes(whole), Ordering::Release);
        }
        Ok(())
    }

    /// Read the front of a row.
    ///
    /// # Errors
    /// [`AuxError::OutOfRange`].
    pub fn read(&self, slot: u32, buffer: usize, bytes: &mut [u8]) -> Result<(), AuxError> {
        let row = self.row(slot, buffer, bytes.len())?;
        for (word, part) in row.iter().zip(bytes.chunks_mut(8)) {
            part.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes()[..part.len()]);
        }
        Ok(())
    }
}
