//! Pages of one side's pool: who has which, and the prefix cache over them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use serde::{Deserialize, Serialize};

/// Which free page is handed out next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum PageOrder {
    /// Lowest number first: neighbours in a request are neighbours in memory as far as possible.
    Ordered,
    /// Any: as in a pool that has run for days.
    #[default]
    Shuffled,
}

/// A small seeded generator (splitmix64): runs must be repeatable.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// A generator of this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        x ^ (x >> 31)
    }

    /// A number below `n`; 0 when `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        if n == 0 { 0 } else { (self.next_u64() % n as u64) as usize }
    }
}

/// A page was given back that was not handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("page {0} was given back, but nobody has it")]
pub struct NotOwned(pub u32);

#[derive(Debug)]
enum Free {
    Ordered(BTreeSet<u32>),
    Shuffled(Vec<u32>, Random),
}

/// Free and used pages. A page has one owner or none.
#[derive(Debug)]
pub struct PagePool {
    free: Free,
    used: Vec<bool>,
}

impl PagePool {
    /// A pool of `pages` free pages.
    pub fn new(pages: u32, order: PageOrder, seed: u64) -> Self {
        let free = match order {
            PageOrder::Ordered => Free::Ordered((0..pages).collect()),
            PageOrder::Shuffled => Free::Shuffled((0..pages).collect(), Random::new(seed)),
        };
        Self { free, used: vec![false; pages as usize] }
    }

    /// Pages nobody has.
    pub fn free_pages(&self) -> usize {
        match &self.free {
            Free::Ordered(set) => set.len(),
            Free::Shuffled(list, _) => list.len(),
        }
    }

    /// Pages in all.
    pub fn len(&self) -> usize {
        self.used.len()
    }

    /// Whether the pool has no pages at all.
    pub fn is_empty(&self) -> bool {
        self.used.is_empty()
    }

    /// `n` pages, or `None` (and nothing taken) when fewer are free.
    pub fn alloc(&mut self, n: usize) -> Option<Vec<u32>> {
        if n > self.free_pages() {
            return None;
        }
        let mut out = Vec::with_capacity(n);
        match &mut self.free {
            Free::Ordered(set) => out.extend(std::iter::from_fn(|| set.pop_first()).take(n)),
            Free::Shuffled(list, random) => {
                while out.len() < n {
                    out.push(list.swap_remove(random.below(list.len())));
                }
            }
        }
        for &page in &out {
            self.used[page as usize] = true;
        }
        Some(out)
    }

    /// Give pages back. A page that was not handed out is refused; those before it are back.
    pub fn free(&mut self, pages: &[u32]) -> Result<(), NotOwned> {
        for &page in pages {
            match self.used.get_mut(page as usize) {
                Some(used) if *used => *used = false,
                _ => return Err(NotOwned(page)),
            }
            match &mut self.free {
                Free::Ordered(set) => drop(set.insert(page)),
                Free::Shuffled(list, _) => list.push(page),
            }
        }
        Ok(())
    }
}

#[derive(Debug)]
struct CachedBlock {
    pages: Vec<u32>,
    pins: u32,
    /// Key in `lru` while nobody has it pinned.
    tick: u64,
}

/// A request's pages, from [`CachedPool::admit`] to [`CachedPool::release`]. Not `Clone`: it is the ownership.
#[derive(Debug)]
#[must_use = "its pages stay taken until it is released"]
pub struct Lease {
    /// Full blocks of the request, by hash id.
    blocks: Vec<u64>,
    /// Leading blocks found in (or put into) the cache: pinned there.
    pinned: Vec<u64>,
    /// Pages in token order: cached prefix first.
    pages: Vec<u32>,
    prefix_pages: usize,
    /// Pages this lease owns itself.
    own: Vec<u32>,
}

impl Lease {
    /// All pages of the request, in token order.
    pub fn pages(&self) -> &[u32] {
        &self.pages
    }

    /// How many leading pages were in the cache already.
    pub fn prefix_pages(&self) -> usize {
        self.prefix_pages
    }

    /// The pages that were not in the cache.
    pub fn suffix(&self) -> &[u32] {
        &self.pages[self.prefix_pages..]
    }
}

/// A pool with an LRU prefix cache by block hash. Pages in use are never evicted.
#[derive(Debug)]
pub struct CachedPool {
    pool: PagePool,
    blocks: HashMap<u64, CachedBlock>,
    lru: BTreeMap<u64, u64>,
    tick: u64,
    pages_per_block: usize,
    enabled: bool,
}

impl CachedPool {
    /// Cache over `pool` with blocks of `pages_per_block` pages. `enabled` = false: nothing is ever found or kept.
    pub fn new(pool: PagePool, pages_per_block: usize, enabled: bool) -> Self {
        let pages_per_block = pages_per_block.max(1);
        Self { pool, blocks: HashMap::new(), lru: BTreeMap::new(), tick: 0, pages_per_block, enabled }
    }

    /// Pages that a request could get now: free ones and those only the cache has.
    pub fn available(&self) -> usize {
        self.pool.free_pages() + self.lru.len() * self.pages_per_block
    }

    /// Blocks in the cache.
    pub fn cached_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Pages in all.
    pub fn len(&self) -> usize {
        self.pool.len()
    }

    /// Whether the pool has no pages at all.
    pub fn is_empty(&self) -> bool {
        self.pool.is_empty()
    }

    /// How many leading ids of `blocks` are in the cache.
    pub fn lookup(&self, blocks: &[u64]) -> usize {
        blocks.iter().take_while(|b| self.blocks.contains_key(b)).count()
    }

    /// Pages for a request of `pages` pages whose full blocks are `blocks` (ids beyond `pages` are left out). The
    /// matched prefix is pinned; the rest is taken from the pool, evicting the least recently used blocks that nobody
    /// has pinned. `None`, and nothing changed but the order of use, when there is not enough.
    pub fn admit(&mut self, blocks: &[u64], pages: usize) -> Option<Lease> {
        let full = if self.enabled { &blocks[..blocks.len().min(pages / self.pages_per_block)] } else { &[] };
        let matched = self.lookup(full);
        let pinned = full[..matched].to_vec();
        for id in &pinned {
            self.pin(*id);
        }
        let own = self.take(pages - matched * self.pages_per_block);
        let mut lease = Lease {
            blocks: full.to_vec(),
            pinned,
            pages: Vec::new(),
            prefix_pages: 0,
            own: own.clone().unwrap_or_default(),
        };
        for id in &lease.pinned {
            lease.pages.extend(self.blocks.get(id).into_iter().flat_map(|b| &b.pages));
        }
        lease.prefix_pages = lease.pages.len();
        lease.pages.extend(&lease.own);
        if own.is_some() {
            Some(lease)
        } else {
            // Only pins to undo: nothing was taken, so nothing can be refused.
            self.unpin_all(&lease.pinned);
            None
        }
    }

    /// The bytes of the request are in place: its full blocks go into the cache, pinned until the release. A block
    /// that another lease put there meanwhile stays that one's; this lease keeps its own copy to itself.
    pub fn commit(&mut self, lease: &mut Lease) {
        let mut own = Vec::new();
        let start = lease.pinned.len();
        for (i, chunk) in lease.own.chunks(self.pages_per_block).enumerate() {
            match lease.blocks.get(start + i) {
                Some(id) if !self.blocks.contains_key(id) => {
                    self.blocks.insert(*id, CachedBlock { pages: chunk.to_vec(), pins: 1, tick: 0 });
                    lease.pinned.push(*id);
                }
                _ => own.extend_from_slice(chunk),
            }
        }
        // What was committed is not committed again.
        lease.blocks.clear();
        lease.own = own;
    }

    /// The request is over and nothing can write its pages any more: unpins its blocks, frees what it owns itself.
    pub fn release(&mut self, lease: Lease) -> Result<(), NotOwned> {
        self.unpin_all(&lease.pinned);
        self.pool.free(&lease.own)
    }

    /// Empty the cache of everything that is not pinned.
    pub fn clear(&mut self) -> Result<(), NotOwned> {
        while self.evict_one()? {}
        Ok(())
    }

    fn pin(&mut self, id: u64) {
        if let Some(block) = self.blocks.get_mut(&id) {
            if block.pins == 0 {
                self.lru.remove(&block.tick);
            }
            block.pins += 1;
        }
    }

    /// From the last block to the first, so that a block is always older than the blocks it leads to.
    fn unpin_all(&mut self, ids: &[u64]) {
        for id in ids.iter().rev() {
            if let Some(block) = self.blocks.get_mut(id) {
                block.pins -= 1;
                if block.pins == 0 {
                    self.tick += 1;
                    block.tick = self.tick;
                    self.lru.insert(self.tick, *id);
                }
            }
        }
    }

    fn take(&mut self, n: usize) -> Option<Vec<u32>> {
        if n > self.available() {
            return None;
        }
        while self.pool.free_pages() < n {
            if !self.evict_one().ok()? {
                return None;
            }
        }
        self.pool.alloc(n)
    }

    fn evict_one(&mut self) -> Result<bool, NotOwned> {
        let Some((_, id)) = self.lru.pop_first() else { return Ok(false) };
        let Some(block) = self.blocks.remove(&id) else { return Ok(false) };
        self.pool.free(&block.pages)?;
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn cached(pages: u32) -> CachedPool {
        CachedPool::new(PagePool::new(pages, PageOrder::Ordered, 0), 2, true)
    }

    #[test]
    fn ordered_is_contiguous_and_shuffled_is_repeatable() {
        let mut ordered = PagePool::new(8, PageOrder::Ordered, 0);
        assert_eq!(ordered.alloc(4), Some(vec![0, 1, 2, 3]));
        ordered.free(&[2, 1]).unwrap();
        assert_eq!(ordered.alloc(3), Some(vec![1, 2, 4]));
        let shuffled = |seed| PagePool::new(100, PageOrder::Shuffled, seed).alloc(50);
        assert_eq!(shuffled(1), shuffled(1));
        assert_ne!(shuffled(1), shuffled(2));
    }

    #[test]
    fn too_many_and_double_frees_are_refused() {
        let mut pool = PagePool::new(2, PageOrder::Shuffled, 0);
        assert_eq!(pool.alloc(3), None);
        let pages = pool.alloc(2).unwrap();
        pool.free(&pages).unwrap();
        assert_eq!(pool.free(&pages[..1]), Err(NotOwned(pages[0])));
        assert_eq!(pool.free(&[99]), Err(NotOwned(99)));
        assert_eq!(pool.free_pages(), 2);
    }

    #[test]
    fn a_committed_prefix_is_found_and_its_suffix_is_new() {
        let mut pool = cached(10);
        let mut a = pool.admit(&[1, 2], 5).unwrap(); // two full blocks and one page of a third
        assert_eq!((a.prefix_pages(), a.suffix().len()), (0, 5));
        pool.commit(&mut a);
        let b = pool.admit(&[1, 3], 4).unwrap();
        assert_eq!((b.prefix_pages(), &b.pages()[..2]), (2, &a.pages()[..2]));
        pool.release(a).unwrap();
        pool.release(b).unwrap();
        assert_eq!((pool.cached_blocks(), pool.available()), (2, 10));
        assert_eq!(pool.lookup(&[1, 2, 9]), 2);
    }

    #[test]
    fn an_uncommitted_lease_leaves_nothing_behind() {
        let mut pool = cached(10);
        let a = pool.admit(&[1, 2], 4).unwrap();
        pool.release(a).unwrap();
        assert_eq!((pool.cached_blocks(), pool.lookup(&[1])), (0, 0));
    }

    #[test]
    fn two_leases_of_one_block_do_not_share_before_it_is_there() {
        let mut pool = cached(10);
        let mut a = pool.admit(&[1], 2).unwrap();
        let mut b = pool.admit(&[1], 2).unwrap();
        assert_ne!(a.pages(), b.pages());
        pool.commit(&mut a);
        pool.commit(&mut b);
        pool.release(b).unwrap();
        pool.release(a).unwrap();
        assert_eq!((pool.cached_blocks(), pool.available(), pool.pool.free_pages()), (1, 10, 8));
    }

    #[test]
    fn the_least_recently_used_unpinned_block_goes_first() {
        let mut pool = cached(6);
        for id in [1, 2, 3] {
            let mut lease = pool.admit(&[id], 2).unwrap();
            pool.commit(&mut lease);
            pool.release(lease).unwrap();
        }
        let one = pool.admit(&[1], 2).unwrap(); // pinned, most recently used
        let four = pool.admit(&[4], 2).unwrap(); // evicts 2
        assert_eq!([1, 2, 3].map(|id| pool.lookup(&[id])), [1, 0, 1]);
        assert!(pool.admit(&[5], 4).is_none(), "2 free of 4: pinned pages are not for the taking");
        assert_eq!(pool.lookup(&[3]), 1, "a refused request evicts nothing");
        pool.release(one).unwrap();
        pool.release(four).unwrap();
    }

    #[test]
    fn a_disabled_cache_finds_nothing() {
        let mut pool = CachedPool::new(PagePool::new(4, PageOrder::Ordered, 0), 2, false);
        let mut lease = pool.admit(&[1, 2], 4).unwrap();
        pool.commit(&mut lease);
        pool.release(lease).unwrap();
        assert_eq!((pool.cached_blocks(), pool.pool.free_pages()), (0, 4));
    }

    proptest! {
        #[test]
        fn no_page_has_two_owners_and_all_come_back(
            shuffled in any::<bool>(), seed in any::<u64>(), pages in 1u32..40,
            ops in prop::collection::vec((0u8..3, prop::collection::vec(0u64..6, 0..5), 0usize..12), 0..60),
        ) {
            let order = if shuffled { PageOrder::Shuffled } else { PageOrder::Ordered };
            let mut pool = CachedPool::new(PagePool::new(pages, order, seed), 2, true);
            let mut live: Vec<(Lease, bool)> = Vec::new();
            for (op, mut blocks, n) in ops {
                blocks.dedup();
                match op {
                    0 => {
                        // A hash id names its whole prefix: make ids of the chain.
                        let mut chain = 1u64;
                        let ids: Vec<u64> = blocks.iter().map(|b| { chain = chain * 7 + b; chain }).collect();
                        if let Some(lease) = pool.admit(&ids, n) {
                            prop_assert_eq!(lease.pages().len(), n);
                            live.push((lease, false));
                        }
                    }
                    1 if !live.is_empty() => {
                        let i = n % live.len();
                        pool.commit(&mut live[i].0);
                        live[i].1 = true;
                    }
                    _ if !live.is_empty() => {
                        let (lease, _) = live.swap_remove(n % live.len());
                        pool.release(lease).unwrap();
                    }
                    _ => {}
                }
                // New pages of an uncommitted lease belong to it alone.
                let mut owned = BTreeSet::new();
                for (lease, _) in live.iter().filter(|(_, committed)| !committed) {
                    for page in lease.suffix() {
                        prop_assert!(owned.insert(*page), "page {} has two owners", page);
                    }
                }
                for block in pool.blocks.values() {
                    for page in &block.pages {
                        prop_assert!(owned.insert(*page), "page {} is cached and owned", page);
                    }
                }
                // A lease's pages are all different.
                for (lease, _) in &live {
                    prop_assert_eq!(lease.pages().iter().collect::<BTreeSet<_>>().len(), lease.pages().len());
                }
            }
            for (lease, _) in live {
                pool.release(lease).unwrap();
            }
            prop_assert_eq!(pool.available(), pages as usize);
            pool.clear().unwrap();
            prop_assert_eq!(pool.pool.free_pages(), pages as usize);
        }
    }
}
