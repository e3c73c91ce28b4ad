//! Memory for tests: a fixed address, guard zones on both sides, checked access.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_core::memory::{MemoryKind, MemoryOwner};

use crate::rng::Rng;

/// Bytes of guard before and after each [`TestMemory`]: a write that misses it by less lands here and is seen.
pub const GUARD: usize = 4096;
/// What the guards hold.
pub const GUARD_BYTE: u8 = 0xc7;
/// What freed test memory holds for a moment, so that a late reader does not find good bytes by luck.
pub const POISON: u8 = 0xdd;

/// Start -> end of every live allocation, guards included. Lets a deliberately broken fake write out of bounds without
/// touching memory that is not ours.
static LIVE: Mutex<BTreeMap<usize, usize>> = Mutex::new(BTreeMap::new());

fn live() -> MutexGuard<'static, BTreeMap<usize, usize>> {
    LIVE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Run `f` if `[addr, addr + len)` lies inside one live [`TestMemory`], guards included; it stays alive meanwhile.
pub(crate) fn with_live(addr: u64, len: u64, f: impl FnOnce()) -> bool {
    let live = live();
    let (Ok(addr), Ok(len)) = (usize::try_from(addr), usize::try_from(len)) else { return false };
    let Some(end) = addr.checked_add(len) else { return false };
    let inside = live.range(..=addr).next_back().is_some_and(|(_, &e)| end <= e);
    if inside {
        f();
    }
    inside
}

/// A block of host memory between two guards. May pretend to be device memory.
///
/// Access is by copy, never by reference, because fakes, other threads and other processes write into it. A test that
/// reads while a write lands may see a mixture, as a CPU does.
pub struct TestMemory {
    start: NonNull<u8>,
    len: usize,
    kind: MemoryKind,
}

// SAFETY: the block is owned by this value alone and reached through raw pointers only; no reference into it exists.
unsafe impl Send for TestMemory {}
// SAFETY: as above; concurrent copies may mix bytes, which the callers accept, and the block stays valid.
unsafe impl Sync for TestMemory {}

// SAFETY: the allocation lives, unmoved, until `Drop`; no reference into it is ever made.
unsafe impl MemoryOwner for TestMemory {
    fn base(&self) -> u64 {
        self.start.as_ptr() as u64 + GUARD as u64
    }
    fn len(&self) -> u64 {
        self.len as u64
    }
    fn kind(&self) -> MemoryKind {
        self.kind
    }
}

impl TestMemory {
    /// `len` zero bytes at a page boundary.
    pub fn new(len: usize) -> Arc<Self> {
        Self::of_kind(len, MemoryKind::Dram)
    }

    /// `len` zero bytes that say they are of `kind`.
    pub fn of_kind(len: usize, kind: MemoryKind) -> Arc<Self> {
        let layout = Self::layout(len);
        // SAFETY: the layout is not empty: it holds two guards.
        let start = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        live().insert(start.as_ptr() as usize, start.as_ptr() as usize + layout.size());
        let memory = Self { start, len, kind };
        memory.raw_fill(0, GUARD, GUARD_BYTE);
        memory.raw_fill(GUARD, len, 0);
        memory.raw_fill(GUARD + len, GUARD, GUARD_BYTE);
        Arc::new(memory)
    }

    /// `len` bytes that depend on `seed`.
    pub fn patterned(len: usize, seed: u64) -> Arc<Self> {
        let memory = Self::new(len);
        memory.write(0, &Rng::new(seed).bytes(len));
        memory
    }

    fn layout(len: usize) -> Layout {
        Layout::from_size_align(len + 2 * GUARD, 4096).expect("test memory of a sensible size")
    }

    /// `offset` counts from the start of the first guard.
    fn raw_fill(&self, offset: usize, len: usize, byte: u8) {
        assert!(offset + len <= self.len + 2 * GUARD);
        // SAFETY: inside the allocation, as just checked.
        unsafe { self.start.as_ptr().add(offset).write_bytes(byte, len) }
    }

    fn raw_read(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= self.len + 2 * GUARD);
        let mut out = vec![0; len];
        // SAFETY: inside the allocation, as just checked; `out` is another allocation of `len` bytes.
        unsafe { std::ptr::copy_nonoverlapping(self.start.as_ptr().add(offset), out.as_mut_ptr(), len) };
        out
    }

    fn check(&self, offset: usize, len: usize) {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "test memory of {} bytes has no [{offset}; {len}]",
            self.len
        );
    }

    /// Address of the byte at `offset`; `offset == len` is the end.
    pub fn addr(&self, offset: usize) -> u64 {
        self.check(offset, 0);
        self.base() + offset as u64
    }

    /// A copy of `len` bytes from `offset`. Panics outside.
    pub fn read(&self, offset: usize, len: usize) -> Vec<u8> {
        self.check(offset, len);
        self.raw_read(GUARD + offset, len)
    }

    /// A copy of everything.
    pub fn read_all(&self) -> Vec<u8> {
        self.read(0, self.len)
    }

    /// Put `bytes` at `offset`. Panics outside.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        // SAFETY: inside the allocation, as just checked; `bytes` cannot overlap it, for no reference into it exists.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.start.as_ptr().add(GUARD + offset), bytes.len());
        }
    }

    /// Set `len` bytes from `offset` to `byte`: a canary. Panics outside.
    pub fn fill(&self, offset: usize, len: usize, byte: u8) {
        self.check(offset, len);
        self.raw_fill(GUARD + offset, len, byte);
    }

    /// The first offset in `[offset; len]` that does not hold `byte`; `None` when the canary is whole.
    pub fn canary_broken(&self, offset: usize, len: usize, byte: u8) -> Option<usize> {
        self.read(offset, len).iter().position(|&b| b != byte).map(|i| offset + i)
    }

    /// Panics unless `[offset; len]` holds `byte` throughout.
    pub fn assert_canary(&self, offset: usize, len: usize, byte: u8) {
        if let Some(at) = self.canary_broken(offset, len, byte) {
            panic!(
                "canary {byte:#04x} broken at offset {at}: {}",
                crate::print::hex(&self.read(at, 16.min(self.len - at)))
            );
        }
    }

    /// Whether nothing was written just before or just after the block.
    pub fn check_guards(&self) -> Result<(), String> {
        for (name, at) in [("before", 0), ("after", GUARD + self.len)] {
            if let Some(i) = self.raw_read(at, GUARD).iter().position(|&b| b != GUARD_BYTE) {
                let where_ =
                    if at == 0 { format!("{} bytes before it", GUARD - i) } else { format!("{i} bytes past its end") };
                return Err(format!("the guard {name} a block of {} bytes was written, {where_}", self.len));
            }
        }
        Ok(())
    }
}

impl Drop for TestMemory {
    fn drop(&mut self) {
        // First off the list, so that nobody is let in any more.
        live().remove(&(self.start.as_ptr() as usize));
        self.raw_fill(GUARD, self.len, POISON);
        // SAFETY: allocated in `of_kind` with this layout, freed once.
        unsafe { dealloc(self.start.as_ptr(), Self::layout(self.len)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn guards_and_canaries_see_stray_writes() {
        let m = TestMemory::patterned(100, 1);
        assert_eq!(m.read_all(), Rng::new(1).bytes(100));
        assert_eq!(m.check_guards(), Ok(()));
        m.fill(10, 20, 0xa5);
        m.assert_canary(10, 20, 0xa5);
        m.write(29, &[1]);
        assert_eq!(m.canary_broken(10, 20, 0xa5), Some(29));

        m.raw_fill(GUARD + 100, 1, 0);
        assert!(m.check_guards().unwrap_err().contains("0 bytes past its end"));
        m.raw_fill(GUARD + 100, 1, GUARD_BYTE);
        m.raw_fill(GUARD - 3, 1, 0);
        assert!(m.check_guards().unwrap_err().contains("3 bytes before it"));
    }

    #[test]
    fn only_live_memory_may_be_touched() {
        let m = TestMemory::new(10);
        let base = m.base();
        assert!(with_live(base - 1, 12, || ()));
        assert!(!with_live(base, GUARD as u64 + 11, || ()));
        assert!(!with_live(u64::MAX, 2, || ()));
    }

    #[test]
    #[should_panic(expected = "has no [8; 3]")]
    fn access_outside_panics() {
        let _ = TestMemory::new(10).read(8, 3);
    }
}
