//! Planning rate of one core: descriptors a second, counted before coalescing (pages x entries), for a chunk that is
//! planned and lowered to spans in a reused buffer.
//!
//! ```text
//! cargo run --release -p kv-transfer-core --no-default-features --example plan_rate
//! ```

use std::error::Error;
use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::RegionId;
use kv_core::layout::{AttentionKind, EntryDesc, LayoutSpec, LocalLayout, Pairing, PeerLayout};
use kv_core::limits::Limits;
use kv_core::memory::{MemoryOwner, RegisteredRegion};
use kv_core::net::Endpoint;
use kv_core::plan::{Planner, Span};

/// 32 layers of K and V.
const ENTRIES: u32 = 64;
const ITEM_LEN: u64 = 16 << 10;
const SLOTS: u64 = 1 << 16;

struct Numbers(u64);

// SAFETY: planning never touches the memory, only the numbers are used.
unsafe impl MemoryOwner for Numbers {
    fn base(&self) -> u64 {
        self.0
    }
    fn len(&self) -> u64 {
        SLOTS * ITEM_LEN
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let entries = 0..ENTRIES;
    let spec = LayoutSpec {
        attention: AttentionKind::Mha,
        kv: entries
            .clone()
            .map(|i| EntryDesc {
                region: RegionId(i),
                offset: 0,
                len: SLOTS * ITEM_LEN,
                item_len: ITEM_LEN,
                layer_id: None,
            })
            .collect(),
        ..Default::default()
    };
    let regions = entries.map(|i| {
        let owner = Arc::new(Numbers((u64::from(i) + 1) << 40));
        Arc::new(RegisteredRegion::new(RegionId(i), owner, Box::new(())))
    });
    let local = LocalLayout::new(spec, regions)?;
    let peer = local.to_registration(Endpoint::new("127.0.0.1", 1), "peer", Bytes::new());
    let pairing = Pairing::new(&local, &PeerLayout::from_registration(&peer, &Limits::default())?)?;

    println!("{:<12} {:>6} {:>10} {:>12} {:>12}", "lists", "pages", "spans", "plan M/s", "+spans M/s");
    for (name, pages, run) in [
        ("random", 64, 1),
        ("random", 512, 1),
        ("random", 15_000, 1),
        ("runs of 4", 4_096, 4),
        ("runs of 32", 4_096, 32),
        ("contiguous", 4_096, 4_096),
    ] {
        let (src, dst) = (page_list(pages, run, 1), page_list(pages, run, 2));
        let mut planner = Planner::new();
        let descriptors = f64::from(ENTRIES) * src.len() as f64;
        let mut spans: Vec<Span> = Vec::new();
        let plan_only = rate(descriptors, || {
            black_box(planner.plan_chunk(&pairing, black_box(&src), black_box(&dst)).map(|p| p.groups().len()).ok());
        });
        let lowered = rate(descriptors, || {
            if let Ok(plan) = planner.plan_chunk(&pairing, black_box(&src), black_box(&dst)) {
                spans.clear();
                spans.reserve(plan.descriptor_count() as usize);
                plan.for_each_span(|span| spans.push(span));
                black_box(spans.as_slice());
            }
        });
        println!("{name:<12} {pages:>6} {:>10} {plan_only:>12.0} {lowered:>12.0}", spans.len());
    }
    Ok(())
}

/// `pages` distinct pages in runs of `run`, the runs in random order and never adjacent.
fn page_list(pages: usize, run: usize, seed: u64) -> Vec<i32> {
    let mut starts: Vec<usize> = (0..pages / run).map(|i| i * (run + 1)).collect();
    let mut state = seed;
    for i in (1..starts.len()).rev() {
        // A 64-bit LCG's high bits are random enough to shuffle with.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        starts.swap(i, (state >> 33) as usize % (i + 1));
    }
    starts.iter().flat_map(|&start| (start..start + run).map(|page| page as i32)).collect()
}

/// Millions of descriptors a second: the best of nine stretches, after a warm-up.
fn rate(descriptors: f64, mut work: impl FnMut()) -> f64 {
    work();
    let mut best = 0.0f64;
    for _ in 0..9 {
        let (start, mut rounds) = (Instant::now(), 0u32);
        while start.elapsed() < Duration::from_millis(30) {
            work();
            rounds += 1;
        }
        best = best.max(descriptors * f64::from(rounds) / start.elapsed().as_secs_f64() / 1e6);
    }
    best
}
