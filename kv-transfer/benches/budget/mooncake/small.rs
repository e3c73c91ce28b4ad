//! Single writes and batches of small descriptors, one after the other, through the lane; beside the library bare, and beside its
//! Python module.

use serde_json::{Value, json};

use super::bulk::{WAYS, WINDOW};
use super::pair::DECODE;
use super::work::Shape;
use crate::child::{Peer, number};
use crate::report::{Budget, Report, Row};
use crate::stats::median;
use crate::{Options, Result};

pub const ROWS: &[&str] = &[
    "mooncake_write_4k",
    "mooncake_write_4k_python",
    "mooncake_write_1m",
    "mooncake_write_1m_python",
    "mooncake_write_16m",
    "mooncake_write_16m_python",
    "mooncake_batch_64x4k",
    "mooncake_batch_64x4k_python",
    "mooncake_batch_1000x4k",
    "mooncake_batch_1000x4k_python",
    "mooncake_batch_4000x4k",
    "mooncake_batch_4000x4k_python",
];

/// Pieces, bytes of a piece, writes of one turn, pieces of a batch of Python's (4000 in one fail).
const SIZES: [(u64, u64, u64, u64); 6] = [
    (1, 4 << 10, 500, 1),
    (1, 1 << 20, 100, 1),
    (1, 16 << 20, 10, 1),
    (64, 4 << 10, 100, 64),
    (1000, 4 << 10, 10, 1000),
    (4000, 4 << 10, 4, 1000),
];

/// us a write, and us of its CPU.
#[derive(Default)]
struct Times {
    us: Vec<f64>,
    cpu: Vec<f64>,
}

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let mut peer = Peer::start(DECODE)?;
    // Pools of 64 MiB.
    let hello = peer.ask(&Shape::new(16, 64, 16 << 10).to_json())?;
    let with_python = hello["python"].is_string();
    for ((pieces, len, count, cut), names) in SIZES.into_iter().zip(ROWS.chunks(2)) {
        if !names.iter().any(|n| options.wants(n)) {
            continue;
        }
        let count = options.count(count as usize) as u64;
        let mut turn = |mut what: Value, times: &mut Times, counts: bool| -> Result<()> {
            for (key, value) in [("pieces", pieces), ("len", len), ("count", count)] {
                what[key] = value.into();
            }
            let reply = peer.ask(&what)?;
            if counts {
                times.us.push(number(&reply, "ns")? as f64 / 1e3 / count as f64);
                times.cpu.push(number(&reply, "cpu")? as f64 / 1e3 / count as f64);
            }
            Ok(())
        };
        let (mut lane, mut python) = (Times::default(), Times::default());
        let mut bare = WAYS.map(|_| Times::default());
        let rounds = options.rounds(10);
        // The first round connects.
        for round in 0..=rounds {
            for ((batch, pause), times) in WAYS.iter().zip(&mut bare) {
                let what = json!({ "do": "bare", "batch": batch, "window": WINDOW, "pause_us": pause });
                turn(what, times, round > 0)?;
            }
            turn(json!({ "do": "lane" }), &mut lane, round > 0)?;
            if with_python && options.wants(names[1]) {
                turn(json!({ "do": "python", "cut": cut, "threads": 1 }), &mut python, round > 0)?;
            }
        }
        let each = bare.iter().map(|t| format!("{:.1}", median(&t.us))).collect::<Vec<_>>().join(", ");
        let best = bare.into_iter().min_by(|a, b| median(&a.us).total_cmp(&median(&b.us))).ok_or("no floor")?;
        let what = format!("{rounds} x {count} writes of {pieces} x {} KiB, one after the other", len >> 10);
        let python_note = format!(
            "{what}; floor: {}, {}",
            hello["python"].as_str().unwrap_or_default(),
            if pieces == 1 { "transfer_sync_write".into() } else { format!("batch_transfer_sync_write of {cut}") }
        );
        let bare_note =
            format!("{what}; floor: the best of bare in batches of 128, of 512, of 128 with 20 us rests: {each}");
        let floors = [(best, Budget::RatioAtMost(1.05), bare_note), (python, Budget::RatioAtMost(1.0), python_note)];
        for (name, (floor, budget, note)) in names.iter().zip(floors) {
            if floor.us.is_empty() {
                println!("skipped: {name}: no Python with mooncake.engine; `cargo xtask setup interop` makes one");
            } else if options.wants(name) {
                report.add(Row {
                    row: (*name).to_owned(),
                    ours: median(&lane.us),
                    peer: median(&floor.us),
                    unit: "us a write",
                    budget,
                    cpu: format!("{:.1} | {:.1} us", median(&lane.cpu), median(&floor.cpu)),
                    note,
                });
            }
        }
    }
    Ok(())
}
