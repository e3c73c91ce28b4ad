//! The simulation: 20,000 room lives from a seed of the day, equal runs from equal seeds.

use kv_testkit::sim::{SimOptions, run};

/// From `KV_SIM_SEED`, or from the clock.
fn seed() -> u64 {
    let given = std::env::var("KV_SIM_SEED").ok().and_then(|s| s.parse().ok());
    let now = || std::time::UNIX_EPOCH.elapsed().map_or(1, |d| d.as_nanos() as u64);
    given.unwrap_or_else(now)
}

#[test]
fn r_f_twenty_thousand_room_lives_drain_or_are_named() {
    let (seed, rooms) = (seed(), std::env::var("KV_SIM_ROOMS").ok().and_then(|s| s.parse().ok()).unwrap_or(20_000));
    println!("cargo xtask sim --seed {seed} --rooms {rooms}");
    match run(SimOptions::new(seed, rooms)) {
        Ok(report) => println!("{report:#?}"),
        Err(failure) => panic!("{}\n{failure}", failure.trace.join("\n")),
    }
}

#[test]
fn equal_seeds_are_equal_runs() {
    let reports = [1, 1, 2].map(|seed| run(SimOptions { trace: true, ..SimOptions::new(seed, 600) }));
    let [a, b, c] = reports.map(|r| r.unwrap_or_else(|e| panic!("{e}")));
    assert_eq!(a.trace, b.trace);
    assert_eq!(a, b);
    assert_ne!(a.hash, c.hash);
}
