//! One rank's KV memory: an anonymous mapping with one buffer per layer and K/V.

use std::io;
use std::ptr::NonNull;

use kv_core::memory::MemoryOwner;

use crate::error::{CliError, Result};
use crate::model::RankGeometry;
use crate::pattern::{Mismatch, PageForm, PageSource, Pattern};

/// A rank's pool: `entries` buffers of `pages` pages, back to back in one mapping.
pub struct KvMemory {
    base: NonNull<u8>,
    len: usize,
    pages: u32,
    geometry: RankGeometry,
    form: PageForm,
}

// SAFETY: the mapping belongs to this value alone, is never moved, and is reached only through raw pointers (see
// `fill` and `verify`).
unsafe impl Send for KvMemory {}
// SAFETY: as above; who may touch which page when is the contract of `fill` and `verify`.
unsafe impl Sync for KvMemory {}

// SAFETY: the mapping is readable and writable at one address until it is unmapped in `drop`.
unsafe impl MemoryOwner for KvMemory {
    fn base(&self) -> u64 {
        self.base.as_ptr() as u64
    }

    fn len(&self) -> u64 {
        self.len as u64
    }
}

impl KvMemory {
    /// Map memory for `pages` pages of `geometry`. Huge pages are asked for: copies run 40 % faster with them.
    pub fn new(geometry: RankGeometry, pages: u32) -> Result<Self> {
        let len = geometry
            .page_bytes()
            .checked_mul(u64::from(pages))
            .and_then(|n| usize::try_from(n).ok())
            .filter(|n| *n > 0)
            .ok_or_else(|| CliError::new(format!("a pool of {pages} pages has no usable size")))?;
        // SAFETY: a new private mapping; nothing that exists is touched.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(CliError::new(format!("cannot map {len} bytes: {}", io::Error::last_os_error()))
                .hint("use a smaller --pool-mib"));
        }
        // SAFETY: exactly the mapping made above. Advice only: it is fine when the kernel has no huge pages.
        unsafe { libc::madvise(base, len, libc::MADV_HUGEPAGE) };
        let base = NonNull::new(base.cast()).ok_or_else(|| CliError::new("the kernel mapped memory at address 0"))?;
        let form = PageForm::from(&geometry);
        Ok(Self { base, len, pages, geometry, form })
    }

    /// Have the kernel give every page of the mapping its memory now, so that no first touch falls into a measured
    /// transfer. Call it before anyone else uses the memory.
    pub fn populate(&self) {
        // Linux 5.14. Much faster than touching: one call, no trap per page.
        const MADV_POPULATE_WRITE: libc::c_int = 23;
        // SAFETY: exactly our mapping; contents stay as they are.
        if unsafe { libc::madvise(self.base.as_ptr().cast(), self.len, MADV_POPULATE_WRITE) } == 0 {
            return;
        }
        for offset in (0..self.len).step_by(4096) {
            // SAFETY: inside the mapping; a volatile read and write of the same byte, before anyone else uses it.
            unsafe {
                let byte = self.base.as_ptr().add(offset);
                byte.write_volatile(byte.read_volatile());
            }
        }
    }

    /// What the rank holds of a page.
    pub fn geometry(&self) -> &RankGeometry {
        &self.geometry
    }

    /// Pages in each buffer.
    pub fn pages(&self) -> u32 {
        self.pages
    }

    /// Byte offset of buffer `entry` in the mapping; its length is [`Self::entry_len`].
    pub fn entry_offset(&self, entry: u32) -> u64 {
        self.entry_len() * u64::from(entry)
    }

    /// Bytes of each buffer.
    pub fn entry_len(&self) -> u64 {
        self.geometry.item_len() * u64::from(self.pages)
    }

    /// First byte of `page` in buffer `entry`, and the bytes of a page; `None` outside the pool.
    pub fn page_ptr(&self, entry: u32, page: u32) -> Option<(*mut u8, usize)> {
        if entry >= self.geometry.entries() || page >= self.pages {
            return None;
        }
        let offset = self.entry_offset(entry) + self.geometry.item_len() * u64::from(page);
        // SAFETY: entry and page are inside, so the offset is below `len`.
        Some((unsafe { self.base.as_ptr().add(offset as usize) }, self.geometry.item_len() as usize))
    }

    /// Write the pattern into `page`, all buffers. Returns the bytes written.
    ///
    /// # Safety
    /// Nobody else reads or writes the page meanwhile: it belongs to the caller, and no transfer from or to it is
    /// outstanding.
    pub unsafe fn fill(&self, pattern: Pattern, page: u32, source: PageSource) -> u64 {
        let mut bytes = 0;
        for entry in 0..self.geometry.entries() {
            let Some((ptr, len)) = self.page_ptr(entry, page) else { continue };
            // SAFETY: `ptr..ptr + len` is inside the mapping; the caller owns the page.
            let item = unsafe { std::slice::from_raw_parts_mut(ptr, len) };
            let (layer, kv) = self.geometry.entry(entry);
            pattern.fill(item, &self.form, source, layer, kv);
            bytes += len as u64;
        }
        bytes
    }

    /// Compare `page`, all buffers, with the pattern.
    ///
    /// # Safety
    /// Nobody writes the page meanwhile: its room ended in Success, or was released.
    pub unsafe fn verify(&self, pattern: Pattern, page: u32, source: PageSource) -> std::result::Result<(), Mismatch> {
        for entry in 0..self.geometry.entries() {
            let (layer, kv) = self.geometry.entry(entry);
            let item = match self.page_ptr(entry, page) {
                // SAFETY: `ptr..ptr + len` is inside the mapping; nobody writes it.
                Some((ptr, len)) => unsafe { std::slice::from_raw_parts(ptr, len) },
                None => &[],
            };
            pattern.verify(item, &self.form, source, layer, kv)?;
        }
        Ok(())
    }
}

impl Drop for KvMemory {
    fn drop(&mut self) {
        // SAFETY: exactly the mapping made in `new`; nothing points into it any more, since transfers hold an `Arc`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Memory that can still be had, bytes: `MemAvailable` of this machine, or what its container leaves, if less.
pub fn mem_available() -> Result<u64> {
    let path = "/proc/meminfo";
    let text = std::fs::read_to_string(path).map_err(|e| CliError::new(format!("cannot read {path}: {e}")))?;
    let machine = parse_mem_available(&text)
        .ok_or_else(|| CliError::new(format!("{path} names no MemAvailable")).hint("give --pool-mib"))?;
    Ok(cgroup_memory().map_or(machine, |(limit, used)| machine.min(limit.saturating_sub(used))))
}

/// What this container may have in all, bytes; `None` when it has no limit of its own.
pub fn memory_limit() -> Option<u64> {
    cgroup_memory().map(|(limit, _)| limit)
}

/// Limit and use of our control group, as a container sees its own (version 2, else 1).
fn cgroup_memory() -> Option<(u64, u64)> {
    let read = |path: &str| std::fs::read_to_string(path).ok()?.trim().parse::<u64>().ok();
    let pair = |limit, used| Some((read(limit)?, read(used)?));
    // Without a limit, version 2 says "max" and version 1 an absurd number.
    pair("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current")
        .or_else(|| pair("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"))
        .filter(|(limit, _)| *limit < 1 << 60)
}

fn parse_mem_available(text: &str) -> Option<u64> {
    let line = text.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ModelSpec;
    use crate::shape::{Rank, Shape};

    #[test]
    fn fills_and_verifies_every_buffer_of_a_page() {
        let shape = Shape { tp: 4, pp: 4, ..Shape::default() };
        let rank = Rank { tp: 1, pp: 2, ..Rank::default() };
        let geometry = ModelSpec::preset("Qwen3-0.6B").unwrap().rank_geometry(shape, rank).unwrap();
        let memory = KvMemory::new(geometry, 3).unwrap();
        let (pattern, source) = (Pattern::Keyed { seed: 1 }, PageSource { id: 5, first_token: 64 });
        // SAFETY: this thread has the only access.
        unsafe {
            memory.populate();
            assert_eq!(memory.fill(pattern, 2, source), memory.geometry().page_bytes());
            assert_eq!(memory.verify(pattern, 2, source), Ok(()));
            assert!(memory.verify(pattern, 1, source).is_err());
            // A flipped byte in the last buffer (V of the last layer of the stage) is named.
            let (ptr, _) = memory.page_ptr(13, 2).unwrap();
            *ptr ^= 1;
            let m = memory.verify(pattern, 2, source).unwrap_err();
            assert_eq!((m.layer, m.kv, m.token, m.head, m.word), (20, 1, 0, 2, 0));
        }
        assert!(memory.page_ptr(14, 0).is_none());
        assert!(memory.page_ptr(0, 3).is_none());
    }

    #[test]
    fn mem_available_is_read() {
        assert_eq!(parse_mem_available("MemTotal: 9 kB\nMemAvailable:   12 kB\n"), Some(12_288));
        assert_eq!(parse_mem_available("MemTotal: 9 kB\n"), None);
        assert!(mem_available().unwrap() > 0);
    }
}
