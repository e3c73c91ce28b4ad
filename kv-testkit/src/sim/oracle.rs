//! Who owns which page, and what its bytes must be.
//!
//! Every source page carries the number of the room life it belongs to; every destination page has an owner here. A
//! write that lands where its life does not own the page, or reads a source that was given away, is seen the moment it
//! lands.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::config::PAGE_LEN;
use crate::fake_transport::Landing;
use crate::world::AUX_LEN;

/// Whose a destination page is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Owner {
    /// Nobody's: nothing may land.
    #[default]
    Free,
    /// This life waits for bytes in it.
    Waiting(u64),
    /// This life has failed, and its pages are held until nothing can land. A later life of the same number may write
    /// them, too: prefill pairs its sender with the older metadata when the ABORT was lost. They are nobody else's yet.
    Held(u64),
    /// This life has reported Success: nothing may land any more.
    Done(u64),
    /// Given back by a release timeout, without proof: this life may still write. It is not used until that is over.
    Unproven(u64),
}

/// Destination memory of one decode process.
struct Map {
    kv: (u64, u64),
    entry_len: u64,
    aux: (u64, u64),
    pages: Vec<Owner>,
    rows: Vec<Owner>,
}

#[derive(Default)]
struct Inner {
    maps: BTreeMap<String, Map>,
    late: u64,
    landed: u64,
    /// The number of each life.
    rooms: BTreeMap<u64, u64>,
}

/// Owners of all destination pages. Clones are the same.
#[derive(Clone, Default)]
pub(super) struct Owners(Arc<Mutex<Inner>>);

impl Owners {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, process: &str, kv: (u64, u64), entry_len: u64, aux: (u64, u64)) {
        let map = Map {
            kv,
            entry_len,
            aux,
            pages: vec![Owner::Free; entry_len as usize / PAGE_LEN],
            rows: vec![Owner::Free; aux.1 as usize / AUX_LEN],
        };
        self.lock().maps.insert(process.into(), map);
    }

    /// A life of a number.
    pub(super) fn life(&self, id: u64, room: u64) {
        self.lock().rooms.insert(id, room);
    }

    pub(super) fn forget(&self, process: &str) {
        self.lock().maps.remove(process);
    }

    pub(super) fn set(&self, process: &str, pages: &[i32], row: u32, owner: Owner) {
        let mut inner = self.lock();
        let Some(map) = inner.maps.get_mut(process) else { return };
        for page in pages {
            map.pages[*page as usize] = owner;
        }
        map.rows[row as usize] = owner;
    }

    /// Bytes that landed after a release without proof, and spans that landed at all.
    pub(super) fn counts(&self) -> (u64, u64) {
        let inner = self.lock();
        (inner.late, inner.landed)
    }

    /// What is wrong with a landing.
    pub(super) fn look(&self, landing: &Landing<'_>) -> Option<String> {
        let mut inner = self.lock();
        inner.landed += 1;
        let life = life_of(landing.bytes);
        let map = inner.maps.get(landing.to)?;
        let (what, owner) = if (map.kv.0..map.kv.0 + map.kv.1).contains(&landing.addr) {
            let offset = (landing.addr - map.kv.0) % map.entry_len;
            let first = offset as usize / PAGE_LEN;
            let count = landing.bytes.len().div_ceil(PAGE_LEN);
            // A span covers pages that follow each other: each has its own header.
            for (i, page) in landing.bytes.chunks(PAGE_LEN).enumerate() {
                let owner = map.pages[first + i];
                if i + 1 < count && owner != map.pages[first] {
                    return Some(wrong(landing, "page", first + i, life_of(page), owner));
                }
                if life_of(page) != life {
                    return Some(wrong(landing, "page", first + i, life_of(page), owner));
                }
            }
            (("page", first), map.pages[first])
        } else if (map.aux.0..map.aux.0 + map.aux.1).contains(&landing.addr) {
            let row = (landing.addr - map.aux.0) as usize / AUX_LEN;
            (("metadata slot", row), map.rows[row])
        } else {
            return Some(format!("{} wrote {:#x} of {}, outside its memory", landing.from, landing.addr, landing.to));
        };
        match owner {
            Owner::Waiting(of) | Owner::Held(of) if of == life => None,
            Owner::Held(of) if inner.rooms.get(&of).is_some_and(|room| inner.rooms.get(&life) == Some(room)) => None,
            Owner::Unproven(of) if of == life => {
                inner.late += 1;
                None
            }
            owner => Some(wrong(landing, what.0, what.1, life, owner)),
        }
    }
}

fn wrong(landing: &Landing<'_>, what: &str, number: usize, life: u64, owner: Owner) -> String {
    let Landing { from, to, op, .. } = landing;
    format!("{from} {op:?} wrote {what} {number} of {to} with the bytes of life {life}; it is {owner:?}")
}

/// The life that a page or slot says it belongs to.
pub(super) fn life_of(bytes: &[u8]) -> u64 {
    bytes.first_chunk().map_or(0, |b| u64::from_le_bytes(*b))
}

fn fill(out: &mut [u8], life: u64, salt: u64) {
    out[..8].copy_from_slice(&life.to_le_bytes());
    let mut x = life.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ salt.wrapping_mul(0xd6e8_feb8_6659_fd93);
    for word in out[8..].chunks_mut(8) {
        x = (x ^ (x >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9).wrapping_add(1);
        word.copy_from_slice(&x.to_le_bytes()[..word.len()]);
    }
}

/// The bytes of the page at `position` of a life's list, in one entry of one prefill process.
pub(super) fn page(life: u64, process: u64, entry: u32, position: u32) -> [u8; PAGE_LEN] {
    let mut out = [0; PAGE_LEN];
    fill(&mut out, life, process << 40 | u64::from(entry) << 20 | u64::from(position));
    out
}

/// The bytes of a life's metadata slot: every rank that writes it writes the same.
pub(super) fn slot(life: u64) -> [u8; AUX_LEN] {
    let mut out = [0; AUX_LEN];
    fill(&mut out, life, u64::MAX);
    out
}
