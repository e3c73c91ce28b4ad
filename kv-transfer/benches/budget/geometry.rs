//! Rooms of 32 layers x 256 pages x 16 KiB through the managers, in two processes: sources shared, destinations
//! distinct, 1, 16 and 64 at a time, pages in order and shuffled.
//!
//! Floor: the same copies by `process_vm_readv`, 64 segments a call, two threads, no protocol at all.

use kv_transfer::memory::MemoryOwner;

use crate::bulk::{Bulk, LAYERS, PAGE, room_pages};
use crate::report::{Budget, Report, Row};
use crate::same_host::Speed;
use crate::stats::{median, quantile, shuffled_pages};
use crate::sys::{available_bytes, now_ns, process_cpu_ns};
use crate::vm::Reader;
use crate::{Options, Result};

pub const ROWS: &[&str] = &[
    "geometry_c1_ordered",
    "geometry_c1_shuffled",
    "geometry_c16_ordered",
    "geometry_c16_shuffled",
    "geometry_c64_ordered",
    "geometry_c64_shuffled",
];
/// Concurrency, and rooms of one turn.
const SIZES: [(usize, usize); 3] = [(1, 8), (16, 32), (64, 64)];
/// Rooms copied for the floor in one turn.
const FLOOR_ROOMS: usize = 8;
/// Left to the rest of the machine.
const SPARE: u64 = 3 << 30;

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let pages = room_pages(options);
    let bytes = LAYERS * PAGE * pages as u64;
    let most = SIZES.map(|s| s.0).into_iter().max().unwrap_or(1);
    let fit = (available_bytes()?.saturating_sub(SPARE + bytes) / bytes) as usize;
    let places = most.min(fit.max(1));
    let mut bulk = Bulk::start(pages as u64, (places * pages) as u64)?;
    let reader = Reader { pid: bulk.peer.pid(), from: bulk.source, to: bulk.arena.base() };
    let list = |seed: Option<u64>| match seed {
        None => (0..pages as i32).collect(),
        Some(seed) => shuffled_pages(pages, seed),
    };
    let mut rows = Vec::new();
    for (concurrency, count) in SIZES {
        for order in ["ordered", "shuffled"] {
            let row = format!("geometry_c{concurrency}_{order}");
            if options.wants(&row) {
                let seed = (order == "shuffled").then_some(31);
                let places: Vec<Vec<i32>> = (0..count)
                    .map(|n| {
                        let base = (n % places * pages) as i32;
                        list(seed.map(|s| s + 1 + n as u64)).into_iter().map(|p| base + p).collect()
                    })
                    .collect();
                rows.push((row, concurrency, list(seed), places));
            }
        }
    }
    for (row, concurrency, src, dst) in rows {
        let (mut ours, mut floor, mut took) = (Speed::default(), Speed::default(), Vec::new());
        let rounds = options.rounds(2);
        let copied = dst.len().min(FLOOR_ROOMS);
        for _ in 0..rounds {
            let mut copies = Vec::new();
            for dst in &dst[..copied] {
                copies.extend(bulk.copies(&src, dst)?);
            }
            let (cpu, start) = (process_cpu_ns(), now_ns());
            reader.read(&copies, 64, 2)?;
            floor.add(bytes * copied as u64, now_ns() - start, process_cpu_ns() - cpu);
            let batch = bulk.rooms(&src, &dst, concurrency)?;
            ours.add(bytes * dst.len() as u64, batch.ns, batch.cpu);
            took.extend(batch.took);
        }
        let (p50, p99) = (median(&took), quantile(&took, 0.99));
        let shared =
            if concurrency > places { format!("; only {places} distinct destinations fit") } else { String::new() };
        report.add(Row {
            row,
            ours: ours.median(),
            peer: floor.median(),
            unit: "GB/s",
            budget: Budget::None,
            cpu: format!("{:.3} | {:.3} s/GB", median(&ours.cpu), median(&floor.cpu)),
            note: format!(
                "p50 {p50:.1} ms, p99 {p99:.1} ms of {} rooms of {} MiB{shared}",
                rounds * dst.len(),
                bytes >> 20
            ),
        });
    }
    Ok(())
}
