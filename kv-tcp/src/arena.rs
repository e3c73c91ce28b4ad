//! Anonymous host memory with huge pages advised: what pools of pages are made of.

use std::io;
use std::sync::atomic::{AtomicUsize, Ordering};

use kv_core::memory::MemoryOwner;

const HUGE: usize = 2 << 20;
/// Bytes of the unit in which an arena is read and written.
const WORD: usize = size_of::<usize>();

/// A private anonymous mapping, aligned to 2 MiB, with huge pages advised (worth 40 % of copy speed on one host).
///
/// Others write into it while it is registered, so its bytes are read and written by copy only, never by reference, and
/// every copy is made of relaxed atomic words: threads that copy in and out at once are no data race. A copy that races
/// with another, or with a transfer, sees some mixture of old and new bytes: read a page once its transfer is done.
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

    /// The aligned word that holds the byte at address `at`. All copies go by these, so that no two accesses of
    /// different sizes meet.
    fn word(&self, at: usize) -> &AtomicUsize {
        // SAFETY: `at` lies in the mapping (callers checked). Its base is aligned to 2 MiB and it is mapped in whole
        // pages, so the word around `at` is aligned and inside it. It lives as long as `self`, and this process
        // touches it by atomics only; what the kernel writes for a peer counts as another process's stores to shared
        // memory.
        unsafe { AtomicUsize::from_ptr((at & !(WORD - 1)) as *mut usize) }
    }

    /// Copy `out.len()` bytes at `offset` out.
    ///
    /// # Panics
    /// When the range lies outside the arena.
    pub fn read_at(&self, offset: usize, mut out: &mut [u8]) {
        let mut from = self.range(offset, out.len());
        while !out.is_empty() {
            let skip = from % WORD;
            let n = (WORD - skip).min(out.len());
            let word = self.word(from).load(Ordering::Relaxed).to_ne_bytes();
            let (now, later) = out.split_at_mut(n);
            now.copy_from_slice(&word[skip..skip + n]);
            out = later;
            from += n;
        }
    }

    /// Copy `data` in at `offset`.
    ///
    /// # Panics
    /// When the range lies outside the arena.
    pub fn write_at(&self, offset: usize, mut data: &[u8]) {
        let mut to = self.range(offset, data.len());
        while !data.is_empty() {
            let skip = to % WORD;
            let n = (WORD - skip).min(data.len());
            let (now, later) = data.split_at(n);
            let word = self.word(to);
            match <[u8; WORD]>::try_from(now) {
                Ok(whole) => word.store(usize::from_ne_bytes(whole), Ordering::Relaxed),
                // Part of a word: its other bytes may be somebody else's, and keep what they have meanwhile.
                Err(_) => {
                    let _ = word.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |old| {
                        let mut bytes = old.to_ne_bytes();
                        bytes[skip..skip + n].copy_from_slice(now);
                        Some(usize::from_ne_bytes(bytes))
                    });
                }
            }
            data = later;
            to += n;
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_every_cut_are_exact() {
        let arena = HostArena::new(64).unwrap();
        let mut want = vec![0u8; 64];
        let data: Vec<u8> = (1..=40).collect();
        for from in 0..20 {
            for len in 0..=40 {
                arena.write_at(from, &data[..len]);
                want[from..from + len].copy_from_slice(&data[..len]);
                assert_eq!(arena.to_vec(0, 64), want, "{from}+{len}");
                assert_eq!(arena.to_vec(from, len), data[..len], "{from}+{len}");
            }
        }
        // The last byte of an arena that ends inside a word.
        let odd = HostArena::new(4099).unwrap();
        odd.write_at(4096, &[1, 2, 3]);
        assert_eq!(odd.to_vec(4095, 4), [0, 1, 2, 3]);
    }

    /// Neighbours in one word, written by two threads at once: nobody's byte is lost.
    #[test]
    fn writers_of_neighbouring_bytes_do_not_disturb_each_other() {
        let arena = HostArena::new(64).unwrap();
        std::thread::scope(|s| {
            for (at, len) in [(0, 3), (3, 7), (10, 1), (11, 20)] {
                let arena = &arena;
                s.spawn(move || {
                    for n in 0..2000u32 {
                        let bytes = vec![n as u8; len];
                        arena.write_at(at, &bytes);
                        assert_eq!(arena.to_vec(at, len), bytes);
                    }
                });
            }
        });
    }
}
