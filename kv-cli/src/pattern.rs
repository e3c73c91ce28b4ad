//! What the pages hold: pseudo-random bytes that either side can compute alone, whatever the shapes.
//!
//! A byte depends on the source block, the layer and head **of the whole model**, K or V, the token and the word in the
//! head, and on nothing else: not on page numbers, ranks or rooms. So decode verifies every byte by itself, and a page
//! of one rank holds the same bytes as its part of a page of another shape. A block's id names the whole prefix up to
//! it, so the id plus the token's place in the block say what a token's KV is, also in a short last block and in a
//! request that was cut to the pool; the unused tokens of a last page are filled and verified like the others.
//!
//! [`Pattern::Sglang`] is the pattern of the interoperability harness around the real SGLang: keyed by room and by the
//! token's place in the request instead.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use crate::model::RankGeometry;

/// Which bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pattern {
    /// Words of 8 bytes keyed by (source block, layer, K/V, token in the block, head, word).
    Keyed {
        /// Makes another run's bytes differ.
        seed: u64,
    },
    /// Words of 4 bytes keyed by (room, layer, K/V, token in the request, head, word).
    Sglang,
}

/// Where a page's tokens come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct PageSource {
    /// Block hash id; the room for [`Pattern::Sglang`] (0 when sources are shared).
    pub id: u64,
    /// The page's first token, counted within the block (within the request for [`Pattern::Sglang`]).
    pub first_token: u32,
}

/// The form of one page in one buffer: `[page_tokens][heads][head_bytes]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageForm {
    /// Tokens.
    pub page_tokens: u32,
    /// Head numbers of the whole model.
    pub heads: Range<u32>,
    /// Bytes of one head of one token.
    pub head_bytes: u32,
}

impl From<&RankGeometry> for PageForm {
    fn from(g: &RankGeometry) -> Self {
        Self { page_tokens: g.page_tokens, heads: g.heads.clone(), head_bytes: g.head_bytes }
    }
}

/// The first wrong word of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// Layer of the whole model.
    pub layer: u32,
    /// 0 = K or MLA, 1 = V.
    pub kv: u32,
    /// Token in the page.
    pub token: u32,
    /// Head number of the whole model.
    pub head: u32,
    /// Word in the head.
    pub word: u32,
    /// What should be there, low bytes first.
    pub expected: u64,
    /// What is there.
    pub got: u64,
}

impl std::fmt::Display for Mismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kv = if self.kv == 0 { "K" } else { "V" };
        write!(
            f,
            "layer {} {kv} token {} head {} word {}: expected {:#018x}, got {:#018x}",
            self.layer, self.token, self.head, self.word, self.expected, self.got
        )
    }
}

const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finaliser of splitmix64: every bit of the input moves every bit of the output.
const fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// One head of one token. Words follow by addition only, which every vector unit has; the key is well mixed.
trait Row: Copy {
    const BYTES: usize;
    fn word(self, w: usize) -> u64;
}

#[derive(Clone, Copy)]
struct KeyedRow(u64);

impl Row for KeyedRow {
    const BYTES: usize = 8;
    #[inline(always)]
    fn word(self, w: usize) -> u64 {
        let x = self.0.wrapping_add((w as u64).wrapping_mul(GOLDEN));
        x ^ (x >> 29)
    }
}

#[derive(Clone, Copy)]
struct SglangRow(u32);

impl Row for SglangRow {
    const BYTES: usize = 4;
    #[inline(always)]
    fn word(self, w: usize) -> u64 {
        u64::from(self.0.wrapping_add((w as u32).wrapping_mul(0xC2B2_AE35)))
    }
}

impl Pattern {
    fn keyed_base(seed: u64, source: PageSource, layer: u32, kv: u32) -> u64 {
        mix(mix(mix(seed ^ GOLDEN).wrapping_add(source.id)).wrapping_add(u64::from(layer) << 1 | u64::from(kv & 1)))
    }

    fn keyed_row(base: u64, token: u32, head: u32) -> KeyedRow {
        KeyedRow(mix(base.wrapping_add(u64::from(token) << 32 | u64::from(head))))
    }

    /// `salt(room, layer, kv)` of the harness; also used for aux rows with `kv` = 4 and the buffer as layer.
    pub fn sglang_salt(room: u64, layer: u32, kv: u32) -> u32 {
        (room as u32)
            .wrapping_mul(0x27D4_EB2F)
            .wrapping_add(layer.wrapping_mul(0x1656_67B1))
            .wrapping_add(kv.wrapping_mul(0x1B87_3593))
    }

    fn sglang_row(salt: u32, token: u32, head: u32) -> SglangRow {
        SglangRow(salt.wrapping_add(token.wrapping_mul(0x9E37_79B1)).wrapping_add(head.wrapping_mul(0x85EB_CA6B)))
    }

    /// Fill one page of one buffer. `page` is as long as the form says; a shorter one is filled as far as it goes.
    pub fn fill(self, page: &mut [u8], form: &PageForm, source: PageSource, layer: u32, kv: u32) {
        let rows = rows(form, source);
        let chunks = page.chunks_mut(row_len(form)).zip(rows);
        match self {
            Self::Keyed { seed } => {
                let base = Self::keyed_base(seed, source, layer, kv);
                chunks.for_each(|(row, (t, h))| fill_row8(row, Self::keyed_row(base, t, h)));
            }
            Self::Sglang => {
                let salt = Self::sglang_salt(source.id, layer, kv);
                chunks.for_each(|(row, (t, h))| fill_row4(row, Self::sglang_row(salt, t, h)));
            }
        }
    }

    /// Compare one page of one buffer with what [`Self::fill`] writes. A page of the wrong length is a mismatch.
    pub fn verify(self, page: &[u8], form: &PageForm, source: PageSource, layer: u32, kv: u32) -> Result<(), Mismatch> {
        let at = |token: u32, head: u32, (word, expected, got): (usize, u64, u64)| Mismatch {
            layer,
            kv,
            token: token - source.first_token,
            head,
            word: word as u32,
            expected,
            got,
        };
        let want = form.page_tokens as usize * form.heads.len() * form.head_bytes as usize;
        if page.len() != want {
            return Err(at(source.first_token, form.heads.start, (0, want as u64, page.len() as u64)));
        }
        let mut chunks = page.chunks(row_len(form)).zip(rows(form, source));
        match self {
            Self::Keyed { seed } => {
                let base = Self::keyed_base(seed, source, layer, kv);
                chunks.try_for_each(|(row, (t, h))| {
                    let r = Self::keyed_row(base, t, h);
                    if same_row8(row, r) { Ok(()) } else { Err(at(t, h, first_difference(row, r))) }
                })
            }
            Self::Sglang => {
                let salt = Self::sglang_salt(source.id, layer, kv);
                chunks.try_for_each(|(row, (t, h))| {
                    let r = Self::sglang_row(salt, t, h);
                    if same_row4(row, r) { Ok(()) } else { Err(at(t, h, first_difference(row, r))) }
                })
            }
        }
    }
}

fn row_len(form: &PageForm) -> usize {
    (form.head_bytes as usize).max(1)
}

/// (token, head) of each row, in memory order.
fn rows(form: &PageForm, source: PageSource) -> impl Iterator<Item = (u32, u32)> {
    let (heads, first) = (form.heads.clone(), source.first_token);
    (0..form.page_tokens).flat_map(move |t| heads.clone().map(move |h| (first + t, h)))
}

// The 8- and 4-byte loops are written out, so that each compiles to straight vector code.

#[inline(always)]
fn fill_row8(row: &mut [u8], key: KeyedRow) {
    let (words, tail) = row.as_chunks_mut::<8>();
    let n = words.len();
    for (w, out) in words.iter_mut().enumerate() {
        *out = key.word(w).to_le_bytes();
    }
    let last = key.word(n).to_le_bytes();
    tail.iter_mut().zip(last).for_each(|(out, b)| *out = b);
}

#[inline(always)]
fn fill_row4(row: &mut [u8], key: SglangRow) {
    let (words, tail) = row.as_chunks_mut::<4>();
    let n = words.len();
    for (w, out) in words.iter_mut().enumerate() {
        *out = (key.word(w) as u32).to_le_bytes();
    }
    let last = (key.word(n) as u32).to_le_bytes();
    tail.iter_mut().zip(last).for_each(|(out, b)| *out = b);
}

#[inline(always)]
fn same_row8(row: &[u8], key: KeyedRow) -> bool {
    let (words, tail) = row.as_chunks::<8>();
    // No early exit: a branch-free sum of differences runs in vectors.
    let diff = words.iter().enumerate().fold(0, |d, (w, got)| d | (u64::from_le_bytes(*got) ^ key.word(w)));
    diff == 0 && tail.iter().zip(key.word(words.len()).to_le_bytes()).all(|(a, b)| *a == b)
}

#[inline(always)]
fn same_row4(row: &[u8], key: SglangRow) -> bool {
    let (words, tail) = row.as_chunks::<4>();
    let diff = words.iter().enumerate().fold(0, |d, (w, got)| d | (u32::from_le_bytes(*got) ^ key.word(w) as u32));
    diff == 0 && tail.iter().zip((key.word(words.len()) as u32).to_le_bytes()).all(|(a, b)| *a == b)
}

/// (word, expected, got) of the first word that differs.
#[cold]
fn first_difference<R: Row>(row: &[u8], key: R) -> (usize, u64, u64) {
    let number = |bytes: &[u8]| bytes.iter().rev().fold(0u64, |n, b| n << 8 | u64::from(*b));
    row.chunks(R::BYTES)
        .enumerate()
        .map(|(w, got)| (w, number(&key.word(w).to_le_bytes()[..got.len()]), number(got)))
        .find(|(_, expected, got)| expected != got)
        .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const KEYED: Pattern = Pattern::Keyed { seed: 7 };

    fn form(heads: Range<u32>, head_bytes: u32) -> PageForm {
        PageForm { page_tokens: 16, heads, head_bytes }
    }

    fn filled(p: Pattern, form: &PageForm, source: PageSource, layer: u32, kv: u32) -> Vec<u8> {
        let mut page = vec![0xEE; form.page_tokens as usize * form.heads.len() * form.head_bytes as usize];
        p.fill(&mut page, form, source, layer, kv);
        page
    }

    #[test]
    fn a_tp_rank_holds_its_heads_of_the_whole_page() {
        let source = PageSource { id: 42, first_token: 64 };
        for pattern in [KEYED, Pattern::Sglang] {
            let whole = filled(pattern, &form(0..8, 256), source, 3, 1);
            for rank in 0..4 {
                let part = filled(pattern, &form(rank * 2..rank * 2 + 2, 256), source, 3, 1);
                for token in 0..16 {
                    let from = token * 8 * 256 + rank as usize * 512;
                    assert_eq!(part[token * 512..(token + 1) * 512], whole[from..from + 512]);
                }
            }
        }
    }

    #[test]
    fn every_coordinate_changes_the_bytes() {
        let (f, s) = (form(0..2, 64), PageSource { id: 1, first_token: 0 });
        for pattern in [KEYED, Pattern::Sglang] {
            let base = filled(pattern, &f, s, 0, 0);
            let others = [
                filled(pattern, &f, PageSource { id: 2, ..s }, 0, 0),
                filled(pattern, &f, PageSource { first_token: 16, ..s }, 0, 0),
                filled(pattern, &f, s, 1, 0),
                filled(pattern, &f, s, 0, 1),
                filled(pattern, &form(2..4, 64), s, 0, 0),
            ];
            for other in &others {
                // Not one row in common: a page in the wrong place never passes.
                assert!(base.chunks(64).zip(other.chunks(64)).all(|(a, b)| a != b));
            }
        }
        assert_ne!(filled(KEYED, &f, s, 0, 0), filled(Pattern::Keyed { seed: 8 }, &f, s, 0, 0));
    }

    /// The formula of the interoperability harness, written as its page has it.
    #[test]
    fn the_sglang_pattern_is_the_harness_formula() {
        let (room, layer, kv) = (100u64, 5u32, 1u32);
        let page = filled(Pattern::Sglang, &form(2..4, 16), PageSource { id: room, first_token: 32 }, layer, kv);
        let (tok, head, w) = (32 + 3, 3u64, 2u64);
        let salt = room * 0x27D4_EB2F + u64::from(layer) * 0x1656_67B1 + u64::from(kv) * 0x1B87_3593;
        let word = salt + tok * 0x9E37_79B1 + head * 0x85EB_CA6B + w * 0xC2B2_AE35;
        let at = (3 * 2 + 1) * 16 + 2 * 4;
        assert_eq!(page[at..at + 4], (word as u32).to_le_bytes());
    }

    #[test]
    fn lengths_that_are_no_multiple_of_a_word_and_wrong_lengths() {
        let (f, s) = (form(0..1, 12), PageSource { id: 9, first_token: 0 });
        let mut page = filled(KEYED, &f, s, 0, 0);
        assert_eq!(KEYED.verify(&page, &f, s, 0, 0), Ok(()));
        page[11] ^= 1;
        assert_eq!(KEYED.verify(&page, &f, s, 0, 0).unwrap_err().word, 1);
        assert!(KEYED.verify(&page[..12], &f, s, 0, 0).is_err());
        assert!(KEYED.verify(&[], &f, s, 0, 0).is_err());
    }

    proptest! {
        #[test]
        fn a_flipped_bit_is_found_and_located(
            sglang in any::<bool>(), id in any::<u64>(), first in 0u32..8, layer in 0u32..80, kv in 0u32..2,
            head0 in 0u32..8, heads in 1u32..4, words in 1u32..6, at in any::<prop::sample::Index>(), bit in 0u8..8,
        ) {
            let pattern = if sglang { Pattern::Sglang } else { KEYED };
            let word_bytes = if sglang { 4 } else { 8 };
            let f = form(head0..head0 + heads, words * 8);
            let s = PageSource { id, first_token: first * 16 };
            let mut page = filled(pattern, &f, s, layer, kv);
            prop_assert_eq!(pattern.verify(&page, &f, s, layer, kv), Ok(()));
            let i = at.index(page.len());
            page[i] ^= 1 << bit;
            let m = pattern.verify(&page, &f, s, layer, kv).unwrap_err();
            let (row, in_row) = (i / f.head_bytes as usize, i % f.head_bytes as usize);
            let want = (row as u32 / heads, head0 + row as u32 % heads, (in_row / word_bytes) as u32);
            prop_assert_eq!((m.token, m.head, m.word), want);
            prop_assert_eq!((m.layer, m.kv), (layer, kv));
            prop_assert_eq!((m.expected ^ m.got).count_ones(), 1);
        }
    }
}
