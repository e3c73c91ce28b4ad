//! Trials: bytes arrive, exactly those, exactly there.

use kv_core::plan::{EntryPair, PlanGroup, Run as PageRun, WritePlan};
use kv_core::transport::Outcome;

use super::bench::{Bench, Check};
use super::{Harness, Run, Stop};

pub(super) const TRIALS: &[(&str, Run)] = &[
    ("bytes_contiguous", contiguous),
    ("bytes_scattered", scattered),
    ("bytes_strided", strided),
    ("bytes_many_groups", many_groups),
    ("bytes_tiny", tiny),
    ("bytes_large", large),
    ("bytes_random_plans", random_plans),
    ("bytes_same_source_twice", same_source_twice),
    ("empty_plan_refused_or_empty", empty_plan),
];

const K: usize = 1024;

fn contiguous(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, 64 * K, 64 * K)?;
    let plan =
        Bench::plan(vec![Bench::entry(&source, 0, block.addr, 4096)], vec![PageRun { src: 2, dst: 5, count: 8 }]);
    let op = b.op(plan, &[&source]);
    b.submit(op)?;
    b.all_done()?;
    Ok(b.finish()?)
}

fn scattered(h: &mut dyn Harness) -> Result<(), Stop> {
    const PAGES: u32 = 256;
    let (mut b, source, block) = Bench::ready(h, 256 * K, 256 * K)?;
    let (mut src, mut dst): (Vec<u32>, Vec<u32>) = ((0..PAGES).collect(), (0..PAGES).collect());
    b.rng.shuffle(&mut src);
    b.rng.shuffle(&mut dst);
    // Half of the pages: the other half must stay as it is.
    let runs = src.iter().zip(&dst).take(128).map(|(&src, &dst)| PageRun { src, dst, count: 1 }).collect();
    let plan = Bench::plan(vec![Bench::entry(&source, 0, block.addr, K as u64)], runs);
    let op = b.op(plan, &[&source]);
    b.submit(op)?;
    b.all_done()?;
    Ok(b.finish()?)
}

fn strided(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, 64 * K, 64 * K)?;
    let strides = [(48u64, 64u64, 48u64), (48, 48, 100), (17, 33, 29)];
    let mut at = 0;
    for (item_len, src_stride, dst_stride) in strides {
        let entry = EntryPair { src_stride, dst_stride, ..Bench::entry(&source, 5, block.addr + at + 3, item_len) };
        let runs = vec![PageRun { src: 0, dst: 3, count: 40 }, PageRun { src: 50, dst: 60, count: 7 }];
        let op = b.op(Bench::plan(vec![entry], runs), &[&source]);
        b.submit(op)?;
        at += 70 * dst_stride;
    }
    b.all_done()?;
    Ok(b.finish()?)
}

fn many_groups(h: &mut dyn Harness) -> Result<(), Stop> {
    let mut b = Bench::new(h)?;
    let sources = (0..4).map(|_| b.source(32 * K)).collect::<Result<Vec<_>, _>>()?;
    let blocks = (0..4).map(|_| b.block(32 * K)).collect::<Result<Vec<_>, _>>()?;
    b.connect()?;
    // Like layers x K/V, plus an aux row and a state slot in the same op.
    let layers: Vec<EntryPair> = (0..3)
        .flat_map(|i| [(i, i), (i, 3 - i)])
        .enumerate()
        .map(|(n, (s, d))| Bench::entry(&sources[s], 0, blocks[d].addr + 8192 * (n as u64 / 2), 512))
        .collect();
    let pages = vec![PageRun { src: 0, dst: 1, count: 3 }, PageRun { src: 9, dst: 7, count: 2 }];
    let aux = Bench::entry(&sources[3], 100, blocks[0].addr + 28 * K as u64, 64);
    let state = Bench::entry(&sources[3], 4096, blocks[1].addr + 28 * K as u64, 40);
    let one = |src, dst| vec![PageRun { src, dst, count: 1 }];
    let plan = WritePlan::new([
        PlanGroup { entries: layers.into(), runs: pages.into() },
        PlanGroup { entries: [aux].into(), runs: one(2, 3).into() },
        PlanGroup { entries: [state].into(), runs: one(0, 1).into() },
    ]);
    let op = b.op(plan, &sources.iter().collect::<Vec<_>>());
    b.submit(op)?;
    b.all_done()?;
    Ok(b.finish()?)
}

fn tiny(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, 256, 256)?;
    // First byte, last byte, odd addresses, one byte each.
    for (src, dst) in [(0, 0), (255, 255), (7, 101), (100, 13)] {
        let op = b.op(Bench::piece(&source, src, block.addr + dst, 1), &[&source]);
        b.submit(op)?;
    }
    b.all_done()?;
    Ok(b.finish()?)
}

fn large(h: &mut dyn Harness) -> Result<(), Stop> {
    let len = h.large();
    let (mut b, source, block) = Bench::ready(h, len, len)?;
    let total = len as u64;
    b.check = Check::AtEnd;
    let max = b.transport.capabilities().max_op_bytes.unwrap_or(total).clamp(1, total);
    let (mut at, all) = (0, total - 1);
    while at < all {
        let len = max.min(all - at);
        let op = b.op(Bench::piece(&source, at, block.addr + at, len), &[&source]);
        b.submit(op)?;
        at += len;
    }
    b.all_done()?;
    Ok(b.finish()?)
}

fn random_plans(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, 64 * K, 64 * K)?;
    for _ in 0..40 {
        let item_len = b.rng.range(1..300);
        let (src_stride, dst_stride) = (item_len + b.rng.below(3) * 16, item_len + b.rng.below(3) * 8);
        let most = (64 * K as u64 / src_stride.max(dst_stride)).saturating_sub(2) as u32;
        // Destinations rise, so that no byte has two writers.
        let (mut runs, mut dst) = (Vec::new(), 0);
        while dst + 6 < most && runs.len() < 30 {
            dst += b.rng.below(3) as u32;
            let count = 1 + b.rng.below(4) as u32;
            let src = b.rng.below(u64::from(most - count)) as u32;
            runs.push(PageRun { src, dst, count });
            dst += count;
        }
        let entry = EntryPair { src_stride, dst_stride, ..Bench::entry(&source, 0, block.addr, item_len) };
        let op = b.op(Bench::plan(vec![entry], runs), &[&source]);
        let id = b.submit(op)?;
        if b.outcome(id)? != Outcome::Done {
            return Err(format!("{id:?} ended {:?}", b.seen(id)).into());
        }
    }
    Ok(b.finish()?)
}

fn same_source_twice(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, 8 * K, 16 * K)?;
    for half in 0..2 {
        let op = b.op(Bench::piece(&source, 0, block.addr + half * 8 * K as u64, 8 * K as u64), &[&source]);
        b.submit(op)?;
    }
    b.all_done()?;
    Ok(b.finish()?)
}

fn empty_plan(h: &mut dyn Harness) -> Result<(), Stop> {
    let (mut b, source, block) = Bench::ready(h, K, K)?;
    for plan in [WritePlan::default(), Bench::piece(&source, 0, block.addr, 0)] {
        let op = b.op(plan, &[&source]);
        // Rejected, or accepted with an outcome like any other; either way nothing changes.
        if let Some(id) = b.submit_bad(op)? {
            b.outcome(id)?;
        }
    }
    Ok(b.finish()?)
}
