//! A plan with addresses filled in, as it travels: entries x runs, never expanded. And the cursor that walks it.

use std::ops::Range;
use std::sync::Arc;

use kv_core::memory::RegisteredRegion;
use kv_core::plan::{Run, WritePlan};

use crate::blob::{Key, RemoteRegion};
use crate::codec::{Malformed, Put, Reader};
use crate::region::{Denied, Region, Registry};

/// One buffer of the source paired with one of the destination, by absolute address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub src: u64,
    pub dst: u64,
    /// Bytes of one item; never 0.
    pub len: u64,
    pub src_stride: u64,
    pub dst_stride: u64,
    /// Index into the plan's own list of region references.
    pub region: u32,
}

const ENTRY_LEN: usize = 44;
const RUN_LEN: usize = 12;
const REF_LEN: usize = 20;

#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    entries: Range<usize>,
    runs: Range<usize>,
}

/// A region of the target with its key.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RegionRef {
    pub id: u32,
    pub key: Key,
}

/// Entries x runs, in groups. Reused from op to op: clearing keeps the memory.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    entries: Vec<Entry>,
    runs: Vec<Run>,
    groups: Vec<Group>,
    refs: Vec<RegionRef>,
    total: u64,
}

/// Why a plan is not carried out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PlanError {
    /// An entry names a local region that the op does not hold.
    UnknownRegion(u32),
    /// It reads outside a local region.
    SourceBounds(u64, u64),
    /// It writes outside what the peer registered.
    TargetBounds(u64, u64),
    /// More bytes than an op may have.
    TooLarge(u128),
    /// An item of no bytes.
    EmptyItem,
}

impl std::fmt::Display for PlanError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::UnknownRegion(id) => write!(f, "region {id} is not among the op's regions"),
            Self::SourceBounds(at, len) => {
                write!(f, "offset {at:#x} with items of {len} bytes leaves the local region")
            }
            Self::TargetBounds(at, len) => {
                write!(f, "address {at:#x} with items of {len} bytes leaves the peer's regions")
            }
            Self::TooLarge(n) => write!(f, "{n} bytes in one op"),
            Self::EmptyItem => f.write_str("an item of 0 bytes"),
        }
    }
}

/// First item used and one past the last, over a list of runs; `None` when it names no item.
fn items(runs: &[Run], pick: impl Fn(&Run) -> u32) -> Option<(u64, u64)> {
    let used = runs.iter().filter(|r| r.count > 0);
    used.map(|r| (u64::from(pick(r)), u64::from(pick(r)) + u64::from(r.count)))
        .reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
}

/// First byte and one past the last of items `first..end`. In 128 bits nothing here can overflow.
fn extent(base: u64, stride: u64, len: u64, (first, end): (u64, u64)) -> Range<u128> {
    let at = |item: u64| u128::from(base) + u128::from(item) * u128::from(stride);
    at(first)..at(end - 1) + u128::from(len)
}

fn within(range: &Range<u128>, addr: u64, len: u64) -> bool {
    range.start >= u128::from(addr) && range.end <= u128::from(addr) + u128::from(len)
}

impl Plan {
    /// Bytes it moves.
    pub fn total(&self) -> u64 {
        self.total
    }

    pub fn clear(&mut self) {
        self.entries.clear();
        self.runs.clear();
        self.groups.clear();
        self.refs.clear();
        self.total = 0;
    }

    /// Size when encoded, bytes.
    pub fn encoded_len(&self) -> usize {
        8 + self.refs.len() * REF_LEN
            + self.groups.len() * 8
            + self.entries.len() * ENTRY_LEN
            + self.runs.len() * RUN_LEN
    }

    /// Fill in addresses, checking every entry against the op's own regions and against what the peer registered.
    pub fn resolve(
        &mut self,
        plan: &WritePlan,
        local: &[Arc<RegisteredRegion>],
        remote: &[RemoteRegion],
        max_bytes: u64,
    ) -> Result<(), PlanError> {
        self.clear();
        let mut total = 0u128;
        // Entries mostly name regions in order: start each search where the last one ended.
        let (mut at_local, mut at_remote) = (0, 0);
        for group in plan.groups() {
            let (Some(src_items), Some(dst_items)) = (items(&group.runs, |r| r.src), items(&group.runs, |r| r.dst))
            else {
                continue;
            };
            let count: u128 = group.runs.iter().map(|r| u128::from(r.count)).sum();
            let first_entry = self.entries.len();
            for e in group.entries.iter() {
                if e.item_len == 0 {
                    return Err(PlanError::EmptyItem);
                }
                let region = search(local, &mut at_local, |r| r.id() == e.src_region)
                    .ok_or(PlanError::UnknownRegion(e.src_region.0))?;
                if !within(&extent(e.src_offset, e.src_stride, e.item_len, src_items), 0, region.len()) {
                    return Err(PlanError::SourceBounds(e.src_offset, e.item_len));
                }
                let target = extent(e.dst_addr, e.dst_stride, e.item_len, dst_items);
                let there = search(remote, &mut at_remote, |r| within(&target, r.addr, r.len))
                    .ok_or(PlanError::TargetBounds(e.dst_addr, e.item_len))?;
                let known = self.refs.iter().rposition(|r| r.id == there.id);
                let region_ref = known.unwrap_or_else(|| {
                    self.refs.push(RegionRef { id: there.id, key: there.key });
                    self.refs.len() - 1
                });
                total += count * u128::from(e.item_len);
                self.entries.push(Entry {
                    // A source offset inside the region plus its address is an address.
                    src: region.addr().wrapping_add(e.src_offset),
                    dst: e.dst_addr,
                    len: e.item_len,
                    src_stride: e.src_stride,
                    dst_stride: e.dst_stride,
                    region: region_ref as u32,
                });
            }
            let first_run = self.runs.len();
            self.runs.extend(group.runs.iter().filter(|r| r.count > 0));
            self.groups.push(Group { entries: first_entry..self.entries.len(), runs: first_run..self.runs.len() });
        }
        if total > u128::from(max_bytes) {
            return Err(PlanError::TooLarge(total));
        }
        self.total = total as u64;
        Ok(())
    }

    /// Append the wire form. Without `sources` the peer learns no address of ours, and sees items as contiguous.
    pub fn encode(&self, sources: bool, out: &mut Vec<u8>) {
        out.reserve(self.encoded_len());
        out.put_u32(self.refs.len() as u32);
        out.put_u32(self.groups.len() as u32);
        for r in &self.refs {
            out.put_u32(r.id);
            out.put(&r.key.0);
        }
        for g in &self.groups {
            out.put_u32(g.entries.len() as u32);
            out.put_u32(g.runs.len() as u32);
            for e in &self.entries[g.entries.clone()] {
                let (src, src_stride) = if sources { (e.src, e.src_stride) } else { (0, e.len) };
                let mut b = [0; ENTRY_LEN];
                for (at, v) in [src, e.dst, e.len, src_stride, e.dst_stride].into_iter().enumerate() {
                    b[at * 8..at * 8 + 8].copy_from_slice(&v.to_le_bytes());
                }
                b[40..].copy_from_slice(&e.region.to_le_bytes());
                out.put(&b);
            }
            for r in &self.runs[g.runs.clone()] {
                let mut b = [0; RUN_LEN];
                b[..4].copy_from_slice(&r.src.to_le_bytes());
                b[4..8].copy_from_slice(&r.dst.to_le_bytes());
                b[8..].copy_from_slice(&r.count.to_le_bytes());
                out.put(&b);
            }
        }
    }

    /// Read the wire form. Counts are checked against the bytes present before anything is allocated.
    pub fn decode(&mut self, r: &mut Reader<'_>) -> Result<(), Malformed> {
        self.clear();
        let refs = r.count(REF_LEN)?;
        let groups = r.count(8)?;
        for _ in 0..refs {
            self.refs.push(RegionRef { id: r.u32()?, key: Key(r.array()?) });
        }
        for _ in 0..groups {
            let n_entries = r.u32()? as usize;
            let n_runs = r.u32()? as usize;
            let size = n_entries.checked_mul(ENTRY_LEN).zip(n_runs.checked_mul(RUN_LEN));
            let size = size.and_then(|(a, b)| a.checked_add(b)).ok_or(Malformed("group too large"))?;
            let mut body = Reader(r.bytes(size)?);
            if n_entries == 0 || n_runs == 0 {
                return Err(Malformed("empty group"));
            }
            let (first_entry, first_run) = (self.entries.len(), self.runs.len());
            for _ in 0..n_entries {
                let entry = Entry {
                    src: body.u64()?,
                    dst: body.u64()?,
                    len: body.u64()?,
                    src_stride: body.u64()?,
                    dst_stride: body.u64()?,
                    region: body.u32()?,
                };
                if entry.len == 0 || entry.region as usize >= refs {
                    return Err(Malformed("entry without bytes or region"));
                }
                self.entries.push(entry);
            }
            let mut count = 0u64;
            for _ in 0..n_runs {
                let run = Run { src: body.u32()?, dst: body.u32()?, count: body.u32()? };
                if run.count == 0 {
                    return Err(Malformed("empty run"));
                }
                count = count.checked_add(u64::from(run.count)).ok_or(Malformed("too many items"))?;
                self.runs.push(run);
            }
            for e in &self.entries[first_entry..] {
                let bytes = count.checked_mul(e.len).ok_or(Malformed("too many bytes"))?;
                self.total = self.total.checked_add(bytes).ok_or(Malformed("too many bytes"))?;
            }
            self.groups.push(Group { entries: first_entry..self.entries.len(), runs: first_run..self.runs.len() });
        }
        Ok(())
    }

    /// Open every region the plan names and check every byte it would write against them, before one is written.
    /// `held` receives the regions.
    pub fn authorise(&self, registry: &Registry, held: &mut Vec<Arc<Region>>) -> Result<(), Denied> {
        held.clear();
        for r in &self.refs {
            held.push(registry.open(r.id, &r.key)?);
        }
        for g in &self.groups {
            let Some(dst_items) = items(&self.runs[g.runs.clone()], |r| r.dst) else { continue };
            for e in &self.entries[g.entries.clone()] {
                let region = held.get(e.region as usize).ok_or(Denied::Forged)?;
                if !within(&extent(e.dst, e.dst_stride, e.len, dst_items), region.addr, region.len) {
                    return Err(Denied::Forged);
                }
            }
        }
        Ok(())
    }
}

/// The first match at or after `at`, then from the start; `at` moves there.
fn search<'a, T>(list: &'a [T], at: &mut usize, hit: impl Fn(&T) -> bool) -> Option<&'a T> {
    let start = (*at).min(list.len());
    let found = (start..list.len()).chain(0..start).find(|i| hit(&list[*i]))?;
    *at = found;
    list.get(found)
}

/// One contiguous copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub src: u64,
    pub dst: u64,
    pub len: u64,
}

/// A place in a plan, by bytes: group by group, entry by entry, run by run, item by item.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Cursor {
    group: usize,
    entry: usize,
    run: usize,
    item: u64,
    /// Bytes of the present span that are behind us.
    offset: u64,
}

impl Cursor {
    /// The next contiguous copy of at most `max` bytes, and step behind it. `None` at the end or for `max` 0.
    pub fn next(&mut self, plan: &Plan, max: u64) -> Option<Piece> {
        if max == 0 {
            return None;
        }
        let group = plan.groups.get(self.group)?;
        let entry = plan.entries.get(group.entries.start + self.entry)?;
        let run = plan.runs.get(group.runs.start + self.run)?;
        // Items back to back on both sides are one span.
        let whole = entry.src_stride == entry.len && entry.dst_stride == entry.len;
        let span = if whole { entry.len * u64::from(run.count) } else { entry.len };
        let len = (span - self.offset).min(max);
        // The target's side was checked against its region. The source's side is the peer's own business: wrapped, it
        // is an address that its kernel refuses.
        let at = |base: u64, first: u32, stride: u64| {
            base.wrapping_add((u64::from(first) + self.item).wrapping_mul(stride)).wrapping_add(self.offset)
        };
        let piece =
            Piece { src: at(entry.src, run.src, entry.src_stride), dst: at(entry.dst, run.dst, entry.dst_stride), len };
        self.offset += len;
        if self.offset == span {
            self.offset = 0;
            self.item += 1;
            if whole || self.item == u64::from(run.count) {
                self.item = 0;
                self.run += 1;
                if self.run == group.runs.len() {
                    self.run = 0;
                    self.entry += 1;
                    if self.entry == group.entries.len() {
                        self.entry = 0;
                        self.group += 1;
                    }
                }
            }
        }
        Some(piece)
    }

    /// Step over `n` bytes, in time that grows with the plan's size and not with `n`: a peer may start a stripe behind
    /// any number of small items.
    pub fn skip(&mut self, plan: &Plan, mut n: u64) {
        loop {
            n -= self.skip_items(plan, n);
            let Some(piece) = self.next(plan, n) else { return };
            n -= piece.len;
        }
    }

    /// Step over whole items that lie apart, but not over the last one of their run; the bytes that were.
    fn skip_items(&mut self, plan: &Plan, n: u64) -> u64 {
        let Some(group) = plan.groups.get(self.group) else { return 0 };
        let entry = plan.entries.get(group.entries.start + self.entry);
        let (Some(entry), Some(run)) = (entry, plan.runs.get(group.runs.start + self.run)) else { return 0 };
        if self.offset > 0 || (entry.src_stride == entry.len && entry.dst_stride == entry.len) {
            return 0;
        }
        let items = (n / entry.len).min((u64::from(run.count) - self.item).saturating_sub(1));
        self.item += items;
        items * entry.len
    }
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
