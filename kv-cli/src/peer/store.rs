//! A rank's memory: KV pages and aux rows, the pattern they hold, and whether it arrived.
//!
//! Prefill's room `i` has pages from `i * pages` on, decode's from 2 more on, so that source and destination differ.
//! Decode's pages start as 0xEE, and what no room owns must still be 0xEE at the end.

use std::sync::Arc;

use kv_transfer::Room;
use kv_transfer::aux_slots::AuxSlots;

use super::args::{Attn, Aux, CommonArgs, Order};
use crate::driver::protocol::Role;
use crate::error::{CliError, Result};
use crate::memory::KvMemory;
use crate::model::RankGeometry;
use crate::pattern::{PageForm, PageSource, Pattern};

const POISON: u8 = 0xEE;
/// Decode's first page of a room list.
const DECODE_FIRST: u32 = 2;
/// Wrong places that are named; the rest is counted.
const NAMED: usize = 8;

/// See the [module](self).
pub struct Store {
    pub memory: Arc<KvMemory>,
    pub rows: Arc<AuxSlots>,
    row_bytes: Vec<usize>,
    room_buffer: usize,
    first: u32,
    pages: u32,
    order: Order,
    share: bool,
    reused: bool,
    page_size: u32,
}

/// Bytes of the rows of SGLang's metadata buffers (protocol 8.7), and which begins with the room.
fn aux_rows(args: &CommonArgs) -> (Vec<usize>, usize) {
    let hidden = args.hidden_size as usize * 2;
    let mut rows = vec![64, 64, 64, 64, 512, 512, 64, 128, hidden, 64];
    let room = rows.len() - 1;
    if args.aux == Aux::Checksum {
        rows.push(64);
    }
    (rows, room)
}

/// What this rank holds of a page.
pub fn geometry(args: &CommonArgs) -> Result<RankGeometry> {
    let bad = |what: String, hint: &str| Err(CliError::new(what).hint(hint));
    if args.pp_size == 0 || args.tp_size == 0 || args.dp_size == 0 || args.page_size == 0 || args.layers == 0 {
        return bad("a size of 0".into(), "sizes, --page-size and --layers start at 1");
    }
    for (name, rank, size) in
        [("tp", args.tp_rank, args.tp_size), ("pp", args.pp_rank, args.pp_size), ("dp", args.dp_rank, args.dp_size)]
    {
        if rank >= size {
            return bad(format!("--{name}-rank {rank} of --{name}-size {size}"), "ranks start at 0");
        }
    }
    if !args.layers.is_multiple_of(args.pp_size) {
        return bad(format!("--layers {} on --pp-size {}", args.layers, args.pp_size), "one must divide the other");
    }
    let per = args.layers / args.pp_size;
    let heads = match args.attn {
        Attn::Mla => 0..1,
        Attn::Mha => {
            let first = (u64::from(args.tp_rank) * u64::from(args.heads) / u64::from(args.tp_size)) as u32;
            first..first + (args.heads / args.tp_size).max(1)
        }
    };
    let unit = args.page_size.saturating_mul(heads.len() as u32);
    let head_bytes = args.item_len / unit;
    if head_bytes == 0 || !head_bytes.is_multiple_of(4) || head_bytes * unit != args.item_len {
        let what = format!("--item-len {} for {} tokens x {} heads", args.item_len, args.page_size, heads.len());
        return bad(what, "it must be a multiple of 4 bytes a head and token");
    }
    Ok(RankGeometry {
        layers: args.pp_rank * per..(args.pp_rank + 1) * per,
        heads,
        head_bytes,
        kinds: if args.attn == Attn::Mla { 1 } else { 2 },
        page_tokens: args.page_size,
    })
}

impl Store {
    /// The memory of a role, decode's poisoned.
    pub fn new(args: &CommonArgs, role: Role) -> Result<Self> {
        let geometry = geometry(args)?;
        let decode = role == Role::Decode;
        let rooms = if args.share_src && !decode { 1 } else { args.rooms.0.len() as u64 };
        let enough = rooms * u64::from(args.pages) + if decode { 3 } else { 1 };
        let pool = match args.pool_pages {
            0 => u32::try_from(enough).map_err(|_| CliError::new(format!("{enough} pages are too many")))?,
            n => n,
        };
        let first = if decode { DECODE_FIRST } else { 0 };
        if u64::from(pool) < u64::from(first) + u64::from(args.pages) {
            let what = format!("--pool-pages {pool} holds not one room of {} pages", args.pages);
            return Err(CliError::new(what).hint("give more, or 0 for as many as are needed"));
        }
        if u64::from(pool) < enough - 1 && !args.share_src {
            return Err(CliError::new(format!("--pool-pages {pool} for {enough} pages"))
                .hint("rooms share pages only with --share-src"));
        }
        let memory = Arc::new(KvMemory::new(geometry, pool)?);
        memory.populate();
        let (row_bytes, room_buffer) = aux_rows(args);
        let slots = args.rooms.0.len() as u32 + 3;
        let rows = AuxSlots::new(slots, &row_bytes, room_buffer).map_err(|e| CliError::new(e.to_string()))?;
        let store = Self {
            memory,
            rows: Arc::new(rows),
            row_bytes,
            room_buffer,
            first,
            pages: args.pages,
            order: args.page_order,
            share: args.share_src,
            reused: args.pool_pages != 0,
            page_size: args.page_size,
        };
        if decode {
            (0..store.memory.geometry().entries()).for_each(|entry| store.entry(entry).fill(POISON));
        }
        Ok(store)
    }

    /// Bytes of KV of one room at this rank.
    pub fn room_bytes(&self, prefix: u32) -> u64 {
        u64::from(self.pages.saturating_sub(prefix)) * self.memory.geometry().page_bytes()
    }

    /// All bytes of a buffer. Only before and after the rooms run.
    #[allow(clippy::mut_from_ref)] // the memory is the transport's too; see below
    fn entry(&self, entry: u32) -> &mut [u8] {
        let (ptr, _) = self.memory.page_ptr(entry, 0).unwrap_or((std::ptr::NonNull::dangling().as_ptr(), 0));
        // SAFETY: the buffer's whole range, inside the mapping; called by the role's one thread while no room runs, and
        // one buffer at a time.
        unsafe { std::slice::from_raw_parts_mut(ptr, self.memory.entry_len() as usize) }
    }

    /// Pages of the `i`-th room, in token order.
    pub fn pages_of(&self, i: usize, role: Role) -> Vec<i32> {
        let fits = ((self.memory.pages() - self.first) / self.pages.max(1)).max(1);
        let i = if self.share && role == Role::Prefill { 0 } else { i as u32 % fits };
        let base: Vec<i32> = (i * self.pages..(i + 1) * self.pages).map(|p| (p + self.first) as i32).collect();
        match self.order {
            Order::Contiguous => base,
            Order::Reversed => base.into_iter().rev().collect(),
            Order::Shuffled => shuffled(base, u64::from(i) + if role == Role::Prefill { 0 } else { 7919 }),
            Order::Strided => {
                let odd = base.iter().skip(1).step_by(2).copied();
                base.iter().step_by(2).copied().chain(odd).collect()
            }
        }
    }

    fn key(&self, room: u64) -> u64 {
        if self.share { 0 } else { room }
    }

    /// Prefill: fill the pages of a room.
    pub fn fill_pages(&self, i: usize, room: u64) {
        for (n, page) in self.pages_of(i, Role::Prefill).into_iter().enumerate() {
            let source = PageSource { id: self.key(room), first_token: n as u32 * self.page_size };
            // SAFETY: filled before the room's sender exists; rooms that share pages write the same bytes only once.
            unsafe { self.memory.fill(Pattern::Sglang, page as u32, source) };
        }
    }

    /// Prefill: a row for a room, filled.
    pub fn fill_row(&self, room: u64) -> Result<u32> {
        let error = |e| CliError::new(format!("metadata row of room {room}: {e}"));
        let slot = self.rows.take().map_err(error)?;
        for (j, bytes) in self.row_bytes.iter().enumerate().filter(|(j, _)| *j != self.room_buffer) {
            self.rows.write(slot, j, &self.row(room, j, *bytes)).map_err(error)?;
        }
        self.rows.name(slot, Room::new(room).ok_or_else(|| CliError::new("room 0"))?).map_err(error)?;
        Ok(slot)
    }

    /// What a row of aux buffer `j` holds.
    fn row(&self, room: u64, j: usize, bytes: usize) -> Vec<u8> {
        let mut row = vec![0; bytes];
        if j == self.room_buffer {
            row[..8].copy_from_slice(&room.to_le_bytes());
        } else {
            let form = PageForm { page_tokens: 1, heads: 0..1, head_bytes: bytes as u32 };
            Pattern::Sglang.fill(&mut row, &form, PageSource { id: room, first_token: 0 }, j as u32, 4);
        }
        row
    }

    /// Decode: how many pages and rows of a room are wrong, and the first of them. The room ended in Success.
    pub fn check(&self, i: usize, room: u64, slot: u32, prefix: u32) -> (usize, Vec<String>) {
        let mut wrong = Vec::new();
        for (n, page) in self.pages_of(i, Role::Decode).into_iter().enumerate().skip(prefix as usize) {
            let source = PageSource { id: self.key(room), first_token: n as u32 * self.page_size };
            // SAFETY: the room has ended, nothing writes its pages.
            if let Err(m) = unsafe { self.memory.verify(Pattern::Sglang, page as u32, source) } {
                wrong.push(format!("page {n}: {m}"));
            }
        }
        for (j, bytes) in self.row_bytes.iter().enumerate() {
            let mut got = vec![0; *bytes];
            if self.rows.read(slot, j, &mut got).is_err() || got != self.row(room, j, *bytes) {
                wrong.push(format!("aux {j}"));
            }
        }
        let n = wrong.len();
        wrong.truncate(NAMED);
        (n, wrong)
    }

    /// Decode: pages that none of these rooms (by index) was given, and that were written all the same.
    pub fn strays(&self, rooms: impl Iterator<Item = usize>, prefix: u32) -> Vec<String> {
        if self.reused {
            return Vec::new();
        }
        let mut owned = vec![false; self.memory.pages() as usize];
        for i in rooms {
            self.pages_of(i, Role::Decode).into_iter().skip(prefix as usize).for_each(|p| owned[p as usize] = true);
        }
        let item = self.memory.geometry().item_len() as usize;
        let written = |entry: u32| {
            let pages = self.entry(entry).chunks(item).zip(&owned);
            pages.filter(|(_, owned)| !**owned).any(|(page, _)| page.iter().any(|b| *b != POISON))
        };
        let entries = (0..self.memory.geometry().entries()).filter(|entry| written(*entry));
        entries.take(NAMED).map(|entry| format!("buffer {entry}")).collect()
    }

    /// Spoil a byte of a room's last page, of its aux rows, or of a page that is nobody's.
    pub fn spoil_kv(&self, i: usize) {
        let page = self.pages_of(i, Role::Decode).last().copied().unwrap_or(0) as usize;
        let item = self.memory.geometry().item_len() as usize;
        self.entry(self.memory.geometry().entries() - 1)[(page + 1) * item - 1] ^= 1;
    }

    /// See [`Self::spoil_kv`].
    pub fn spoil_row(&self, slot: u32) -> Result<()> {
        let mut row = vec![0; self.row_bytes[3]];
        let error = |e| CliError::new(format!("aux row: {e}"));
        self.rows.read(slot, 3, &mut row).map_err(error)?;
        row.iter_mut().for_each(|b| *b ^= 1);
        self.rows.write(slot, 3, &row).map_err(error)
    }

    /// See [`Self::spoil_kv`].
    pub fn spoil_stray(&self) {
        self.entry(0)[5] ^= 1;
    }
}

/// The same order for the same seed: Fisher-Yates over splitmix64.
fn shuffled(mut pages: Vec<i32>, seed: u64) -> Vec<i32> {
    let mut state = seed;
    for i in (1..pages.len()).rev() {
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        pages.swap(i, ((z ^ (z >> 31)) % (i as u64 + 1)) as usize);
    }
    pages
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser as _;

    #[derive(clap::Parser)]
    struct Cli {
        #[command(flatten)]
        common: CommonArgs,
    }

    fn args(text: &str) -> CommonArgs {
        Cli::parse_from(std::iter::once("peer").chain(text.split(' '))).common
    }

    const SMALL: &str = "--attn mha --layers 2 --pages 4 --page-size 4 --item-len 1024 --heads 4 --rooms 100:3";

    #[test]
    fn every_order_is_a_permutation_and_rooms_do_not_share() {
        for order in ["contiguous", "reversed", "shuffled", "strided"] {
            let store = Store::new(&args(&format!("{SMALL} --page-order {order}")), Role::Decode).unwrap();
            let mut all: Vec<i32> = (0..3).flat_map(|i| store.pages_of(i, Role::Decode)).collect();
            all.sort_unstable();
            assert_eq!(all, (2..14).collect::<Vec<_>>(), "{order}");
        }
    }

    #[test]
    fn the_verifier_sees_each_kind_of_spoiled_byte() {
        let (p, d) = (args(SMALL), args(SMALL));
        let (from, to) = (Store::new(&p, Role::Prefill).unwrap(), Store::new(&d, Role::Decode).unwrap());
        from.fill_pages(1, 101);
        let (a, b) = (from.fill_row(101).unwrap(), to.rows.take().unwrap());
        // What a transfer does.
        for (s, t) in from.pages_of(1, Role::Prefill).into_iter().zip(to.pages_of(1, Role::Decode)) {
            let item = from.memory.geometry().item_len() as usize;
            for entry in 0..from.memory.geometry().entries() {
                let (s, t) = (s as usize * item, t as usize * item);
                let bytes = from.entry(entry)[s..s + item].to_vec();
                to.entry(entry)[t..t + item].copy_from_slice(&bytes);
            }
        }
        for (j, len) in from.row_bytes.iter().enumerate() {
            let mut row = vec![0; *len];
            from.rows.read(a, j, &mut row).unwrap();
            to.rows.write(b, j, &row).unwrap();
        }
        assert_eq!(to.check(1, 101, b, 0), (0, vec![]));
        assert!(to.strays([1].into_iter(), 0).is_empty());
        assert!(to.check(1, 102, b, 0).0 > 0, "another room's bytes");
        to.spoil_kv(1);
        assert_eq!(to.check(1, 101, b, 0).0, 1);
        to.spoil_row(b).unwrap();
        assert_eq!(to.check(1, 101, b, 0).0, 2);
        to.spoil_stray();
        assert_eq!(to.strays([1].into_iter(), 0), ["buffer 0"]);
    }

    #[test]
    fn what_cannot_be_laid_out_is_refused() {
        for (text, why) in [
            ("--item-len 1000 --page-size 64", "--item-len 1000"),
            ("--layers 3 --pp-size 2", "--layers 3 on --pp-size 2"),
            ("--tp-rank 2 --tp-size 2", "--tp-rank 2"),
            ("--page-size 0", "a size of 0"),
            ("--pages 9 --pool-pages 4", "holds not one room"),
            ("--pages 9 --layers 1 --pool-pages 12 --rooms 1:2", "for 19 pages"),
        ] {
            let e = Store::new(&args(text), Role::Prefill).err().unwrap().one_line();
            assert!(e.contains(why), "{text}: {e}");
        }
    }
}
