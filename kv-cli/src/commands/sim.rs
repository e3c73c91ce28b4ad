//! `kvt sim`: fleets under faults, simulated from a seed (feature `sim`).

use std::process::ExitCode;
use std::time::Instant;

use kv_testkit::sim::{SimFailure, SimOptions, SimReport, run as simulate};

use crate::cli::SimArgs;
use crate::error::Result;

/// Run it. What goes wrong is printed with the seed that shows it again, and ends in a failure.
pub fn run(args: &SimArgs, json: bool, seed: u64) -> Result<ExitCode> {
    // Panics of the shards are among what it reports, with the seed.
    std::panic::set_hook(Box::new(|_| ()));
    let started = Instant::now();
    let result = simulate(SimOptions { seed, rooms: args.rooms, trace: args.trace });
    drop(std::panic::take_hook());
    let wall = started.elapsed().as_secs_f64();
    Ok(match result {
        Ok(report) => {
            print_report(&report, wall);
            if json {
                println!("{}", report_json(&report, wall));
            }
            ExitCode::SUCCESS
        }
        Err(failure) => {
            print_failure(&failure, args.trace);
            if json {
                println!("{}", failure_json(&failure));
            }
            ExitCode::FAILURE
        }
    })
}

fn print_report(r: &SimReport, wall: f64) {
    r.trace.iter().for_each(|line| println!("{line}"));
    println!("seed {}: {} room lives in {} episodes, nothing wrong", r.seed, r.lives, r.episodes);
    println!("  {} senders and {} receivers succeeded, every byte checked", r.sender_success, r.receiver_success);
    println!("  {} faults of the fleet, {} messages, {} spans landed", r.faults, r.messages, r.landed);
    println!(
        "  {} releases without proof (by policy), {} spans landed after one",
        r.released_without_proof, r.landed_without_proof
    );
    println!("  {} things were unresolved when faults ended, each by name, and drained when they settled", r.unresolved);
    for named in &r.named {
        println!("    e.g. {named}");
    }
    println!("  {:.0} s of fleet time in {wall:.1} s; hash of the run {:016x}", r.simulated.as_secs_f64(), r.hash);
}

fn report_json(r: &SimReport, wall: f64) -> serde_json::Value {
    serde_json::json!({
        "ok": true,
        "seed": r.seed,
        "rooms": r.lives,
        "episodes": r.episodes,
        "sender_success": r.sender_success,
        "receiver_success": r.receiver_success,
        "faults": r.faults,
        "messages": r.messages,
        "landed": r.landed,
        "landed_without_proof": r.landed_without_proof,
        "released_without_proof": r.released_without_proof,
        "unresolved": r.unresolved,
        "simulated_s": r.simulated.as_secs_f64(),
        "wall_s": wall,
        "hash": format!("{:016x}", r.hash),
    })
}

/// Lines of the trace before what went wrong, when the whole is not wanted.
const TAIL: usize = 40;

fn print_failure(f: &SimFailure, whole: bool) {
    let from = if whole { 0 } else { f.trace.len().saturating_sub(TAIL) };
    f.trace[from..].iter().for_each(|line| println!("{line}"));
    println!("{f}");
}

fn failure_json(f: &SimFailure) -> serde_json::Value {
    serde_json::json!({
        "ok": false,
        "seed": f.seed,
        "rooms": f.lives,
        "episode": f.episode,
        "found": f.found,
        "replay": format!("kvt sim --seed {} --rooms 1 --trace", f.seed),
    })
}
