//! Descriptor lists prepared once and used by index: one for each entry (a layer's K or V), with a descriptor a page.
//!
//! They save the library from looking up each page again in every transfer, and cost memory for every page of every entry,
//! for each peer generation: so they are made only for entries that many pages are sent of at once, and only as many as
//! [`NixlConfig::prepared_descriptors`](crate::NixlConfig::prepared_descriptors) allows. What has none goes by fresh lists.

use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use kv_core::memory::MemoryKind;
use kv_core::plan::Run;

use crate::agent::{Agent, Code, Prepared};

/// Runs of an op in one entry from which on a prepared list is worth having.
pub(crate) const WORTH: usize = 32;
const BAD_INDEX: Code = Code(nixl_capi_sys::status::INVALID_PARAM);

/// One entry's list.
pub(crate) struct List {
    prepared: Prepared,
    slots: u64,
    budget: Arc<Budget>,
}

impl Drop for List {
    fn drop(&mut self) {
        self.budget.used.fetch_sub(self.slots, Ordering::Relaxed);
    }
}

/// Descriptors in all lists of a transport.
#[derive(Debug)]
pub(crate) struct Budget {
    pub most: u64,
    used: AtomicU64,
}

impl Budget {
    pub fn new(most: u64) -> Arc<Self> {
        Arc::new(Self { most, used: AtomicU64::new(0) })
    }

    fn take(&self, slots: u64) -> bool {
        let fits = |used: u64| used.checked_add(slots).filter(|sum| *sum <= self.most);
        self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits).is_ok()
    }
}

/// Where an entry lies: first byte, bytes of an item, kind of memory.
type Key = (u64, u64, MemoryKind);

/// The lists of one side: of our own memory, or of one peer generation's.
#[derive(Default)]
pub(crate) struct Lists(Mutex<HashMap<Key, Arc<List>>>);

impl Lists {
    /// The list of an entry, with at least `slots` items; at most `most` exist. `None`: there is none, and no room for it,
    /// or the library refuses it.
    pub fn get(
        &self,
        agent: &Arc<Agent>,
        owner: Option<&std::ffi::CStr>,
        key: Key,
        slots: u64,
        most: Option<u64>,
        budget: &Arc<Budget>,
    ) -> Option<Arc<List>> {
        let mut lists = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(list) = lists.get(&key).filter(|l| l.slots >= slots) {
            return Some(Arc::clone(list));
        }
        // How many items an entry has is not said: room for some more spares most of the growing, where it is registered.
        let wanted = slots.next_power_of_two().min(most.unwrap_or(u64::MAX));
        lists.remove(&key);
        let exact = (wanted != slots).then_some(slots);
        let made = [Some(wanted), exact].into_iter().flatten().find_map(|slots| {
            if !budget.take(slots) {
                return None;
            }
            match agent.prepare(owner, key, slots) {
                Ok(prepared) => Some(Arc::new(List { prepared, slots, budget: Arc::clone(budget) })),
                Err(_) => {
                    budget.used.fetch_sub(slots, Ordering::Relaxed);
                    None
                }
            }
        })?;
        lists.insert(key, Arc::clone(&made));
        Some(made)
    }

    /// Let go of the lists that `gone` holds for; a transfer that is made of one just now keeps it until it is made.
    pub fn forget(&self, gone: impl Fn(&Key) -> bool) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).retain(|key, _| !gone(key));
    }
}

/// Items of runs, one by one: here and there.
pub(crate) fn indices(runs: &[Run]) -> Result<(Vec<c_int>, Vec<c_int>), Code> {
    let one = |at: u32, i: u32| at.checked_add(i).and_then(|n| c_int::try_from(n).ok()).ok_or(BAD_INDEX);
    let all = |start: fn(&Run) -> u32| {
        runs.iter().flat_map(|r| (0..r.count).map(move |i| one(start(r), i))).collect::<Result<Vec<_>, _>>()
    };
    Ok((all(|r| r.src)?, all(|r| r.dst)?))
}

/// Items that the runs reach to: here and there.
pub(crate) fn reach(runs: &[Run]) -> (u64, u64) {
    let end = |at: u32, count: u32| u64::from(at) + u64::from(count);
    runs.iter().fold((0, 0), |(s, d), r| (s.max(end(r.src, r.count)), d.max(end(r.dst, r.count))))
}

impl List {
    pub fn prepared(&self) -> &Prepared {
        &self.prepared
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_counted_out_item_by_item() {
        let runs = [Run { src: 4, dst: 9, count: 2 }, Run { src: 0, dst: 1, count: 1 }];
        assert_eq!(indices(&runs), Ok((vec![4, 5, 0], vec![9, 10, 1])));
        assert_eq!(reach(&runs), (6, 11));
        assert!(indices(&[Run { src: u32::MAX, dst: 0, count: 1 }]).is_err());
    }

    #[test]
    fn the_budget_holds() {
        let budget = Budget::new(10);
        assert!(budget.take(6) && !budget.take(5) && budget.take(4) && !budget.take(u64::MAX));
    }
}
