//! Anonymous host memory with huge pages advised: what pools of pages are made of.

use std::io;

use kv_core::memory::MemoryOwner;

const HUGE: usize = 2 << 20;

/// A private anonymous mapping, aligned to 2 MiB, with huge pages advised (worth 40 % of copy speed on one host).
///
/// Others write into it while it is registered, so its bytes are read and written by copy only, never by reference.
/// A copy that races with a transfer sees some mixture of old and new bytes: read a page once its transfer is done.
#[derive(Debug)]
pub struct HostArena {
    map: usize,
    map_len: usize,
    base: usize,
    len: usize,
}

impl HostArena {
    /// Map `len` zero bytes. Pages are made on first touch.
    pub fn new(len: usize) -> io::Result<Self> {
        if len == 0 {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "an arena of 0 bytes"));
        }
        let map_len =
            len.checked_add(HUGE).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "arena too large"))?;
        // SAFETY: a fresh private mapping at an address the kernel picks.
        let map = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                map_len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if map == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = (map as usize).next_multiple_of(HUGE);
        // SAFETY: inside our own mapping. A kernel without huge pages refuses; the arena works without them.
        if unsafe { libc::madvise(base as *mut libc::c_void, len, libc::MADV_HUGEPAGE) } != 0 {
            tracing::debug!(error = %io::Error::last_os_error(), "huge pages not advised");
        }
        Ok(Self { map: map as usize, map_len, base, len })
    }

    /// [`HostArena::new`], with every page made now, so that no transfer pays for the first touch.
    pub fn prefaulted(len: usize) -> io::Result<Self> {
        let arena = Self::new(len)?;
        for at in (0..len).step_by(4096) {
            // SAFETY: inside the mapping, which nobody else knows yet.
            unsafe { std::ptr::write_volatile((arena.base + at) as *mut u8, 0) };
        }
        Ok(arena)
    }

    /// First byte. Do not make references out of it while the memory is registered.
    pub fn as_ptr(&self) -> *mut u8 {
        self.base as *mut u8
    }

    fn range(&self, offset: usize, len: usize) -> usize {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "{offset}+{len} lies outside an arena of {} bytes",
            self.len
        );
        self.base + offset
    }

    /// Copy `out.len()` bytes at `offset` out.
    ///
    /// # Panics
    /// When the range lies outside the arena.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) {
        let from = self.range(offset, out.len());
        // SAFETY: inside the mapping (checked), and `out` is a distinct buffer.
        unsafe { std::ptr::copy_nonoverlapping(from as *const u8, out.as_mut_ptr(), out.len()) };
    }

    /// Copy `data` in at `offset`.
    ///
    /// # Panics
    /// When the range lies outside the arena.
    pub fn write_at(&self, offset: usize, data: &[u8]) {
        let to = self.range(offset, data.len());
        // SAFETY: inside the mapping (checked), and no reference into an arena is ever made.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), to as *mut u8, data.len()) };
    }

    /// `len` bytes at `offset`, copied out.
    ///
    /// # Panics
    /// When the range lies outside the arena.
    pub fn to_vec(&self, offset: usize, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        self.read_at(offset, &mut out);
        out
    }
}

// SAFETY: the mapping stays at its address until drop, readable and writable; no references into it are handed out.
unsafe impl MemoryOwner for HostArena {
    fn base(&self) -> u64 {
        self.base as u64
    }

    fn len(&self) -> u64 {
        self.len as u64
    }
}

impl Drop for HostArena {
    fn drop(&mut self) {
        // SAFETY: our own mapping, unmapped once.
        unsafe { libc::munmap(self.map as *mut libc::c_void, self.map_len) };
    }
}
