//! Planning: page lists times 64 entries (32 layers of K and V) into spans, descriptors a second of one core, counted
//! before neighbours are joined. One core: CPU time of this thread.
//!
//! Floor: the plain loop, entry by entry and page by page, joining as it goes, with a bounds check for each.

use std::hint::black_box;
use std::sync::Arc;

use bytes::Bytes;
use kv_transfer::layout::{AttentionKind, EntryDesc, LayoutSpec, LocalLayout, Pairing, PeerLayout};
use kv_transfer::memory::{MemoryOwner, RegisteredRegion};
use kv_transfer::plan::{EntryPair, Planner, Span};
use kv_transfer::{Endpoint, Limits, RegionId};

use crate::report::{Budget, Report, Row};
use crate::stats::{median, shuffled};
use crate::sys::thread_cpu_ns;
use crate::{Options, Result};

pub const ROWS: &[&str] = &["plan_random", "plan_runs4", "plan_contiguous"];
const ENTRIES: u32 = 64;
const PAGE: u64 = 16 << 10;
const SLOTS: u64 = 1 << 16;
const PAGES: usize = 4096;
/// CPU time of one turn, ns.
const TURN: u64 = 40_000_000;

struct Numbers(u64);

// SAFETY: planning never touches the memory, only the numbers are used.
unsafe impl MemoryOwner for Numbers {
    fn base(&self) -> u64 {
        self.0
    }
    fn len(&self) -> u64 {
        SLOTS * PAGE
    }
}

fn pairing() -> Result<Pairing> {
    let entry = |i| EntryDesc { region: RegionId(i), offset: 0, len: SLOTS * PAGE, item_len: PAGE, layer_id: None };
    let spec =
        LayoutSpec { attention: AttentionKind::Mha, kv: (0..ENTRIES).map(entry).collect(), ..LayoutSpec::default() };
    let regions = (0..ENTRIES).map(|i| {
        let owner = Arc::new(Numbers((u64::from(i) + 1) << 40));
        Arc::new(RegisteredRegion::new(RegionId(i), owner, Box::new(())))
    });
    let local = LocalLayout::new(spec, regions)?;
    let peer = local.to_registration(Endpoint::new("127.0.0.1", 1), "peer", Bytes::new());
    Ok(Pairing::new(&local, &PeerLayout::from_registration(&peer, &Limits::default())?)?)
}

/// Distinct pages in runs of `run`, the runs shuffled and never adjacent.
fn list(run: usize, seed: u64) -> Vec<i32> {
    let starts = shuffled(PAGES / run, seed);
    starts.iter().flat_map(|s| (0..run).map(move |i| (s * (run + 1) + i) as i32)).collect()
}

fn plain(entries: &[EntryPair], (src, dst): (&[i32], &[i32]), bound: u64, out: &mut Vec<Span>) -> bool {
    out.clear();
    for e in entries {
        let mut last: Option<Span> = None;
        for (&s, &d) in src.iter().zip(dst) {
            if s < 0 || d < 0 || s as u64 >= bound || d as u64 >= bound {
                return false;
            }
            let next = Span {
                src_region: e.src_region,
                src_offset: e.src_offset + s as u64 * e.src_stride,
                dst_addr: e.dst_addr + d as u64 * e.dst_stride,
                len: e.item_len,
            };
            match &mut last {
                Some(l) if l.src_offset + l.len == next.src_offset && l.dst_addr + l.len == next.dst_addr => {
                    l.len += next.len;
                }
                _ => out.extend(last.replace(next)),
            }
        }
        out.extend(last);
    }
    true
}

/// Millions of descriptors a second of CPU time.
fn rate(mut work: impl FnMut()) -> f64 {
    let (start, mut rounds) = (thread_cpu_ns(), 0u32);
    loop {
        work();
        rounds += 1;
        let ns = thread_cpu_ns() - start;
        if ns >= TURN {
            return f64::from(ENTRIES) * PAGES as f64 * f64::from(rounds) / ns as f64 * 1e3;
        }
    }
}

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let pairing = pairing()?;
    let budgets = [Budget::AtLeast(300.0), Budget::None, Budget::None];
    for ((row, run), budget) in ROWS.iter().zip([1, 4, PAGES]).zip(budgets) {
        if !options.wants(row) {
            continue;
        }
        let (src, dst) = (list(run, 1), list(run, 2));
        let mut planner = Planner::new();
        let mut spans: Vec<Span> = Vec::new();
        let mut plain_spans = Vec::new();
        let mut ours = || -> Result<()> {
            let plan = planner.plan_chunk(&pairing, black_box(&src), black_box(&dst))?;
            spans.clear();
            spans.reserve(plan.descriptor_count() as usize);
            plan.for_each_span(|span| spans.push(span));
            black_box(spans.as_slice());
            Ok(())
        };
        let mut floor = || {
            let lists = (black_box(&src[..]), black_box(&dst[..]));
            black_box(plain(pairing.kv(), lists, pairing.kv_bounds().0, &mut plain_spans));
        };
        // Warm, and the lists are good: in the loops below an error could not be told.
        ours()?;
        floor();
        let (mut a, mut b) = (Vec::new(), Vec::new());
        for _ in 0..options.rounds(7) {
            b.push(rate(&mut floor));
            a.push(rate(|| drop(ours())));
        }
        if spans != plain_spans {
            return Err(format!("{row}: the plan and the plain loop differ").into());
        }
        report.add(Row {
            row: (*row).to_owned(),
            ours: median(&a),
            peer: median(&b),
            unit: "M desc/s",
            budget,
            cpu: "one core".into(),
            note: format!("{PAGES} pages x {ENTRIES} entries -> {} spans written out", spans.len()),
        });
    }
    Ok(())
}
