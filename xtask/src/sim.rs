//! `cargo xtask sim`: `kvt sim` in a release build.
//!
//! `kvt` has the simulation only with its feature `sim`, which nothing that is shipped turns on: the test kit stays a
//! dependency of tests.

use std::process::ExitCode;
use std::time::UNIX_EPOCH;

use crate::sh::{self, Result};

/// Room lives when nothing is said.
const ROOMS: &str = "1000000";

pub fn run(args: &[String]) -> Result<ExitCode> {
    let mut command = sh::cargo(["run", "--release", "--locked", "--quiet", "-p", "kv-transfer-cli", "--features", "sim"]);
    command.args(["--bin", "kvt", "--", "sim"]).args(args);
    let given = |name: &str| args.iter().any(|a| a == name || a.starts_with(&format!("{name}=")));
    if !given("--rooms") {
        command.args(["--rooms", ROOMS]);
    }
    if !given("--seed") {
        let seed = UNIX_EPOCH.elapsed().map_or(1, |d| d.as_nanos() as u64);
        command.args(["--seed", &seed.to_string()]);
    }
    eprintln!("`{}`", sh::show(&command));
    sh::status(&mut command)
}
