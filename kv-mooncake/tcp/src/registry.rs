//! What is registered here: who may write where.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use kv_core::memory::MemoryOwner;
use mooncake_wire::Buffer;

/// A registered block. Peers' bytes go in behind its gate, and none once its registration has ended.
pub(crate) struct Region {
    pub addr: u64,
    pub len: u64,
    /// `None`: the registration has ended. Held while one slice of bytes goes in or out.
    gate: Mutex<Option<Arc<dyn MemoryOwner>>>,
}

impl Region {
    /// Touch the memory while it is registered; `None` when it is not any more.
    pub fn touch<T>(&self, slice: impl FnOnce() -> T) -> Option<T> {
        let gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        gate.as_ref().map(|_held| slice())
    }
}

/// All blocks registered now, by address. Blocks do not overlap.
#[derive(Default)]
pub(crate) struct Registry(RwLock<BTreeMap<u64, Arc<Region>>>);

impl Registry {
    /// `None`: it overlaps one that is registered.
    pub fn add(&self, owner: Arc<dyn MemoryOwner>) -> Option<Arc<Region>> {
        let (addr, len) = (owner.base(), owner.len());
        let mut regions = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let before = regions.range(..addr).next_back().is_some_and(|(_, r)| r.addr + r.len > addr);
        if before || regions.range(addr..addr.checked_add(len)?).next().is_some() {
            return None;
        }
        let region = Arc::new(Region { addr, len, gate: Mutex::new(Some(owner)) });
        regions.insert(addr, Arc::clone(&region));
        Some(region)
    }

    /// End a registration. When this returns, no byte of a peer lands there any more, whatever is on its way.
    pub fn remove(&self, region: &Region) {
        self.0.write().unwrap_or_else(PoisonError::into_inner).remove(&region.addr);
        let owner = region.gate.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(owner);
    }

    /// The block that holds all of `len` bytes at `addr`. An empty range is nowhere.
    pub fn find(&self, addr: u64, len: u64) -> Option<Arc<Region>> {
        let end = addr.checked_add(len).filter(|_| len > 0)?;
        let regions = self.0.read().unwrap_or_else(PoisonError::into_inner);
        let (_, region) = regions.range(..=addr).next_back()?;
        (end - region.addr <= region.len).then(|| Arc::clone(region))
    }

    pub fn buffers(&self) -> Vec<Buffer> {
        let regions = self.0.read().unwrap_or_else(PoisonError::into_inner);
        regions.values().map(|r| Buffer { addr: r.addr, len: r.len }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_testkit::TestMemory;

    #[test]
    fn r_f2_a_range_is_found_in_one_block_or_nowhere() {
        let registry = Registry::default();
        let memory = TestMemory::new(4096);
        let (base, region) = (memory.base(), registry.add(memory.clone()).unwrap());
        assert!(registry.add(memory).is_none(), "registered twice");
        let found = |at: u64, len: u64| registry.find(at, len).is_some();
        assert!(found(base, 4096) && found(base + 4095, 1));
        for (at, len) in
            [(base, 4097), (base - 1, 1), (base - 1, 2), (base + 4096, 1), (base, 0), (base, u64::MAX), (0, 1)]
        {
            assert!(!found(at, len), "{len} bytes at {at:#x}");
        }
        assert_eq!(region.touch(|| 7), Some(7));
        registry.remove(&region);
        assert!(!found(base, 1) && region.touch(|| 7).is_none() && registry.buffers().is_empty());
    }
}
