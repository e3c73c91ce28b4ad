//! Which life of a room a peer of ours speaks of (F6), and the tag that proves what was written for it (H3).

use crate::ids::{ProcessGeneration, Room};
use crate::wire::{Registration, RoomTag};

/// One life of a room on decode, as its metadata named it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RoomLife {
    /// Decode's process.
    pub process: ProcessGeneration,
    /// Decode's number of this life: unique within the process, growing.
    pub generation: u64,
    /// [`geometry`] of what decode registered.
    pub geometry: u64,
}

/// What the head of a tag covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TagHead {
    /// Which room.
    pub room: Room,
    /// Which life of it.
    pub generation: u64,
    /// Tokens decode has already.
    pub decode_prefix_len: u64,
    /// [`geometry`] of what decode registered.
    pub geometry: u64,
    /// The metadata slot that was written, if this rank wrote it.
    pub aux_index: Option<u32>,
}

impl TagHead {
    /// Its hash.
    pub fn hash(&self) -> u64 {
        let aux = self.aux_index.map_or(0, |slot| u64::from(slot) + 1);
        [self.room.get(), self.generation, self.decode_prefix_len, self.geometry, aux].into_iter().fold(SEED, fold)
    }
}

/// Sum over pages at positions of the request's page list. Sums of disjoint parts add up to the sum of the whole, in any
/// order, so ranks that share the pages can be checked together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct PageSum {
    /// The sum.
    pub sum: u64,
    /// How many pages; on prefill also those that decode had no place for.
    pub count: u32,
}

impl PageSum {
    /// The pages of a list that begins at position `first` of the request's.
    pub fn of(first: u32, pages: &[i32]) -> Self {
        let mut all = Self::default();
        all.add(first, pages);
        all
    }

    /// Add the pages at `first` and behind.
    pub fn add(&mut self, first: u32, pages: &[i32]) {
        for (at, page) in (u64::from(first)..).zip(pages) {
            // Pages are never negative; the cast keeps all 32 bits.
            self.sum = self.sum.wrapping_add(mix((at << 32) ^ u64::from(*page as u32) ^ SEED));
        }
        self.count = self.count.wrapping_add(pages.len() as u32);
    }

    /// Add another part.
    pub fn join(&mut self, part: Self) {
        self.sum = self.sum.wrapping_add(part.sum);
        self.count = self.count.wrapping_add(part.count);
    }

    /// The tag of a rank that wrote these pages.
    pub fn tag(self, head: &TagHead) -> RoomTag {
        RoomTag { head: head.hash(), pages: self.sum, count: self.count, wrote_aux: head.aux_index.is_some() }
    }
}

/// What of decode's registration both sides see alike in every dialect: how many KV entries, the bytes of a page.
pub fn geometry(registration: &Registration) -> u64 {
    fold(fold(SEED, registration.kv.len() as u64), registration.kv_item_len)
}

/// Any constant but 0, which the mixing function keeps.
const SEED: u64 = 0x9e37_79b9_7f4a_7c15;

fn fold(hash: u64, word: u64) -> u64 {
    mix(hash.rotate_left(23) ^ word.wrapping_add(SEED))
}

/// The finalizer of SplitMix64: every bit of the input moves every bit of the result.
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_add_up_to_the_whole_and_any_change_shows() {
        let pages = [4, 9, 9, 0, 7];
        let whole = PageSum::of(0, &pages);
        let mut parts = PageSum::of(3, &pages[3..]);
        parts.join(PageSum::of(0, &pages[..1]));
        parts.join(PageSum::of(1, &pages[1..3]));
        assert_eq!(parts, whole);
        let others: [&[i32]; 4] = [&[9, 4, 9, 0, 7], &[4, 9, 9, 0], &[4, 9, 9, 0, 6], &[4, 9, 9, 0, 7, 0]];
        for other in others {
            assert_ne!(PageSum::of(0, other), whole, "{other:?}");
        }
        assert_ne!(PageSum::of(1, &pages).sum, whole.sum);
    }

    #[test]
    fn every_part_of_the_head_counts() {
        let room = Room::new(7).unwrap();
        let head = TagHead { room, generation: 1, decode_prefix_len: 0, geometry: 5, aux_index: Some(0) };
        let others = [
            TagHead { room: Room::new(8).unwrap(), ..head },
            TagHead { generation: 2, ..head },
            TagHead { decode_prefix_len: 1, ..head },
            TagHead { geometry: 6, ..head },
            TagHead { aux_index: None, ..head },
            TagHead { aux_index: Some(1), ..head },
        ];
        assert!(others.iter().all(|other| other.hash() != head.hash()));
        // Peers of another build compute the same: a change is a new field of the extension, never a new value.
        assert_eq!(head.hash(), 11_272_001_257_193_428_891);
        assert_eq!(PageSum::of(2, &[3, 4]), PageSum { sum: 795_710_479_610_462_193, count: 2 });
    }
}
