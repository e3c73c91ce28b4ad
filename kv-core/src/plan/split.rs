//! Plans cut to a transport's largest op.

use std::num::NonZeroU64;
use std::sync::Arc;

use super::{EntryPair, PlanGroup, Run, WritePlan};

impl WritePlan {
    /// Plans of at most `max_bytes` each that together write what this one writes, in the same order. Entries stay
    /// whole where they fit, else runs are cut between items, else single items are cut.
    pub fn split(self, max_bytes: NonZeroU64) -> Vec<WritePlan> {
        if self.total_bytes() <= max_bytes.get() {
            return if self.is_empty() { Vec::new() } else { vec![self] };
        }
        let mut pieces = Pieces { max: max_bytes.get(), left: max_bytes.get(), groups: Vec::new(), out: Vec::new() };
        for group in &self.groups {
            let items: u64 = group.runs.iter().map(|r| u64::from(r.count)).sum();
            let mut whole = Vec::new();
            for entry in group.entries.iter() {
                let bytes = entry.item_len.saturating_mul(items);
                if bytes > pieces.left {
                    pieces.push(std::mem::take(&mut whole), &group.runs);
                    if bytes <= pieces.max {
                        pieces.flush();
                    }
                }
                if bytes <= pieces.left {
                    pieces.left -= bytes;
                    whole.push(*entry);
                } else {
                    pieces.cut_entry(entry, &group.runs);
                }
            }
            pieces.push(whole, &group.runs);
        }
        pieces.flush();
        pieces.out
    }
}

struct Pieces {
    max: u64,
    /// Bytes the piece being filled still takes.
    left: u64,
    groups: Vec<PlanGroup>,
    out: Vec<WritePlan>,
}

impl Pieces {
    fn push(&mut self, entries: Vec<EntryPair>, runs: &Arc<[Run]>) {
        if !entries.is_empty() {
            self.groups.push(PlanGroup { entries: entries.into(), runs: Arc::clone(runs) });
        }
    }

    fn flush(&mut self) {
        if !self.groups.is_empty() {
            self.out.push(WritePlan::new(self.groups.drain(..)));
        }
        self.left = self.max;
    }

    /// An entry that is larger than a whole piece.
    fn cut_entry(&mut self, entry: &EntryPair, runs: &[Run]) {
        if entry.item_len > self.max {
            return self.cut_items(entry, runs);
        }
        let mut part = Vec::new();
        for run in runs {
            let mut rest = *run;
            while rest.count > 0 {
                let fits = self.left / entry.item_len;
                if fits == 0 {
                    self.push_part(entry, &mut part);
                    self.flush();
                    continue;
                }
                let count = fits.min(u64::from(rest.count)) as u32;
                part.push(Run { count, ..rest });
                self.left -= u64::from(count) * entry.item_len;
                rest = Run { src: rest.src + count, dst: rest.dst + count, count: rest.count - count };
            }
        }
        self.push_part(entry, &mut part);
    }

    fn push_part(&mut self, entry: &EntryPair, part: &mut Vec<Run>) {
        if !part.is_empty() {
            self.groups.push(PlanGroup { entries: [*entry].into(), runs: part.as_slice().into() });
            part.clear();
        }
    }

    /// Items larger than a whole piece: byte ranges of one item at a time.
    fn cut_items(&mut self, entry: &EntryPair, runs: &[Run]) {
        let items = runs.iter().flat_map(|r| (0..r.count).map(move |i| (r.src + i, r.dst + i)));
        for (src, dst) in items {
            let mut at = 0;
            while at < entry.item_len {
                if self.left == 0 {
                    self.flush();
                }
                let item_len = self.left.min(entry.item_len - at);
                let part =
                    EntryPair { src_offset: entry.src_offset + at, dst_addr: entry.dst_addr + at, item_len, ..*entry };
                self.groups.push(PlanGroup { entries: [part].into(), runs: [Run { src, dst, count: 1 }].into() });
                self.left -= item_len;
                at += item_len;
            }
        }
    }
}
