//! `cargo xtask interop --perf`: both programs side by side in one run, in turns; medians and their spread.

mod cpu;
mod sample;
mod table;

use std::process::ExitCode;
use std::time::Instant;

use sample::Sample;

use super::case::Case;
use super::judge::judge;
use super::launch::Launcher;
use super::play::{self, Stage};
use super::program::{Backend, Direction};
use super::row;
use crate::sh::Result;

/// Who sends to whom over what.
pub type Pair = (Direction, Backend);

/// What is measured over a backend of SGLang; its own figures first.
fn pairs(backend: Backend) -> [Pair; 5] {
    [
        (Direction::SGLANG_SGLANG, backend),
        (Direction::OURS_OURS, backend),
        (Direction::OURS_OURS, Backend::Tcp),
        (Direction::SGLANG_OURS, backend),
        (Direction::OURS_SGLANG, backend),
    ]
}

/// One load that every pair is measured under.
#[derive(Debug, Clone, Copy)]
pub struct Load {
    pub name: &'static str,
    pub says: &'static str,
    layers: u64,
    pages: u64,
    /// Measured rooms; quick runs have fewer.
    pub rooms: u64,
    quick: u64,
    warm: u64,
    pub in_flight: u64,
    /// Of small rooms, what a room costs counts; of others, bytes.
    pub small: bool,
}

const BIG: &str = "32 layers x 256 pages x 16 KiB, MLA: 128 MiB a room, in order";
const LOADS: [Load; 5] = [
    Load { name: "c1", says: BIG, layers: 32, pages: 256, rooms: 10, quick: 4, warm: 2, in_flight: 1, small: false },
    Load { name: "c16", says: BIG, layers: 32, pages: 256, rooms: 32, quick: 16, warm: 2, in_flight: 16, small: false },
    Load { name: "c64", says: BIG, layers: 32, pages: 256, rooms: 64, quick: 0, warm: 2, in_flight: 64, small: false },
    Load {
        name: "small",
        says: "1 layer x 1 page x 16 KiB a room",
        layers: 1,
        pages: 1,
        rooms: 10_000,
        quick: 500,
        warm: 64,
        in_flight: 64,
        small: true,
    },
    Load {
        name: "small-32",
        says: "32 layers x 1 page x 16 KiB: 512 KiB a room",
        layers: 32,
        pages: 1,
        rooms: 10_000,
        quick: 500,
        warm: 64,
        in_flight: 64,
        small: true,
    },
];

impl Load {
    fn case(&self, rooms: u64) -> Case {
        let (name, says, all) = (self.name, self.says, rooms + self.warm);
        // Prefill opens more rooms than decode has in flight, so that it never waits for the next one of its own.
        let (ahead, n) = (2 * self.in_flight, self.in_flight);
        Case::new(name, says)
            .both(&format!(
                "--layers {} --pages {} --rooms 100:{all} --warmup {} --timeout 240",
                self.layers, self.pages, self.warm
            ))
            .both(if self.small { "--share-src --quiet" } else { "--share-src" })
            .prefill(&format!("--concurrency {ahead}"))
            .decode(&format!("--concurrency {n}"))
            .within(300)
    }
}

/// Measured of a pair under a load, a sample a round.
pub struct Cell {
    pub load: Load,
    pub pair: Pair,
    pub samples: Vec<Sample>,
}

pub fn run(backend: Backend, quick: bool, json: bool) -> Result<ExitCode> {
    let rounds = if quick { 1 } else { 3 };
    let launcher = super::run::launcher(Some(&vec![backend]), true, "release")?;
    let mut cells: Vec<Cell> = Vec::new();
    for load in LOADS.iter().filter(|l| !quick || l.quick > 0) {
        cells.extend(pairs(backend).into_iter().map(|pair| Cell { load: *load, pair, samples: Vec::new() }));
    }
    let mut failed = false;
    for round in 1..=rounds {
        for cell in &mut cells {
            let rooms = if quick { cell.load.quick } else { cell.load.rooms };
            let name = format!("round {round}: {} {} {}", cell.load.name, cell.pair.0, cell.pair.1.name());
            match one(&launcher, cell, rooms) {
                Ok(sample) => {
                    eprintln!("{name}: {sample}");
                    cell.samples.push(sample);
                }
                Err(e) => {
                    failed = true;
                    eprintln!("{name}: FAIL {e}");
                }
            }
        }
    }
    println!("{}", table::markdown(&cells));
    if json {
        println!("{}", table::json(&cells));
    }
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn one(launcher: &Launcher, cell: &Cell, rooms: u64) -> Result<Sample> {
    let (direction, backend) = cell.pair;
    let case = cell.load.case(rooms);
    let server = launcher.server.as_ref().map(|s| s.pid());
    let (before, start) = (cpu::Cpu::now(server), Instant::now());
    let played = play::play(&Stage { launcher, backend, captures: None }, &case, direction)?;
    let others = cpu::Cpu::now(server).others_since(before, start.elapsed().as_secs_f64());
    let faults = judge(&case, direction, backend, &played);
    if !faults.is_empty() {
        let text = faults.join("; ");
        let row = row::Row::new(&case, direction, backend, row::Verdict::Fail(faults));
        return Err(format!("{text}\n{}", row::details(&row, &played)));
    }
    Sample::of(&played, rooms, others)
}
