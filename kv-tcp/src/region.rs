//! The registry of local memory: who may write where.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use kv_core::memory::MemoryOwner;

use crate::blob::{Key, RemoteRegion};

/// One registered block of memory. Whoever copies into it holds an `Arc`, and with it the memory.
pub(crate) struct Region {
    pub id: u32,
    pub key: Key,
    pub addr: u64,
    pub len: u64,
    revoked: AtomicBool,
    _owner: Arc<dyn MemoryOwner>,
}

impl Region {
    /// Whether its registration has ended: copies in progress stop at their next slice.
    pub fn revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }
}

#[derive(Default)]
struct Table {
    next: u32,
    regions: BTreeMap<u32, Arc<Region>>,
}

/// All regions registered now. Numbers are never used twice.
#[derive(Default)]
pub(crate) struct Registry(RwLock<Table>);

/// Why a region cannot be written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Denied {
    /// Not registered any more: an honest peer may be late.
    Gone,
    /// Never registered, or the wrong key: no honest peer does that.
    Forged,
}

impl Registry {
    pub fn add(&self, owner: Arc<dyn MemoryOwner>, key: Key) -> Option<u32> {
        let mut t = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let id = t.next;
        t.next = id.checked_add(1)?;
        let region =
            Region { id, key, addr: owner.base(), len: owner.len(), revoked: AtomicBool::new(false), _owner: owner };
        t.regions.insert(id, Arc::new(region));
        Some(id)
    }

    /// End a registration. Waits for nothing: a copy in progress holds the memory and stops at its next slice.
    pub fn remove(&self, id: u32) {
        let region = self.0.write().unwrap_or_else(PoisonError::into_inner).regions.remove(&id);
        if let Some(region) = region {
            region.revoked.store(true, Ordering::Release);
        }
    }

    /// The region, to whoever knows its key.
    pub fn open(&self, id: u32, key: &Key) -> Result<Arc<Region>, Denied> {
        let t = self.0.read().unwrap_or_else(PoisonError::into_inner);
        match t.regions.get(&id) {
            Some(region) if region.key.matches(key) => Ok(Arc::clone(region)),
            Some(_) => Err(Denied::Forged),
            None if id < t.next => Err(Denied::Gone),
            None => Err(Denied::Forged),
        }
    }

    /// What to publish.
    pub fn published(&self) -> Vec<RemoteRegion> {
        let t = self.0.read().unwrap_or_else(PoisonError::into_inner);
        t.regions.values().map(|r| RemoteRegion { id: r.id, addr: r.addr, len: r.len, key: r.key }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostArena;

    #[test]
    fn a_region_opens_only_with_its_key_and_only_while_registered() {
        let registry = Registry::default();
        let id = registry.add(Arc::new(HostArena::new(4096).unwrap()), Key([1; 16])).unwrap();
        let held = registry.open(id, &Key([1; 16])).unwrap();
        assert_eq!(registry.open(id, &Key([2; 16])).err(), Some(Denied::Forged));
        assert_eq!(registry.open(id + 1, &Key([1; 16])).err(), Some(Denied::Forged));
        registry.remove(id);
        assert!(held.revoked());
        assert_eq!(registry.open(id, &Key([1; 16])).err(), Some(Denied::Gone));
        assert!(registry.published().is_empty());
    }
}
