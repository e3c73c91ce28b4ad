//! `cargo xtask ci`: every step runs, whatever the one before it said; the last line counts the tests.

mod backends;
mod deny;
mod hygiene;
mod libraries;
mod msrv;
mod no_mutants;
mod pure_core;
mod required;
mod tests_step;

use std::process::ExitCode;
use std::time::Instant;

use crate::golden;
use crate::sh::{self, Result};

#[derive(Debug, clap::Args)]
pub struct CiArgs {
    /// Also what takes long or needs special machines. There is nothing of that kind yet.
    #[arg(long)]
    full: bool,
}

/// How a step went when it did not fail.
pub enum Step {
    /// Passed; a line worth saying, or nothing.
    Passed(String),
    /// Not done here, and why.
    Skipped(String),
}

impl Step {
    fn passed() -> Self {
        Self::Passed(String::new())
    }
}

type StepFn = fn() -> Result<Step>;

const STEPS: &[(&str, StepFn)] = &[
    ("format", format),
    ("hygiene", hygiene::run),
    ("golden vectors", || golden::check().map(Step::Passed)),
    ("backends asked for", backends::run),
    ("backend libraries", libraries::run),
    ("pure core", pure_core::run),
    ("no known faults shipped", no_mutants::run),
    ("default build", default_build),
    ("clippy", clippy),
    ("docs", docs),
    ("minimum Rust: declared", msrv::declared),
    ("minimum Rust: built", msrv::built),
    ("licences, bans, sources", deny::run),
    ("advisories", deny::advisories),
];

pub fn run(args: &CiArgs) -> Result<ExitCode> {
    let (mut failed, mut skipped) = (Vec::new(), Vec::new());
    if args.full {
        skipped.push("--full: there is nothing more than the usual steps yet".to_owned());
    }
    for (name, step) in STEPS {
        let started = Instant::now();
        eprintln!("== {name}");
        let (word, text) = match step() {
            Ok(Step::Passed(text)) => ("passed", text),
            Ok(Step::Skipped(why)) => {
                skipped.push(format!("{name}: {why}"));
                ("skipped", why)
            }
            Err(e) => {
                failed.push(format!("{name}: {e}"));
                ("FAILED", e)
            }
        };
        let colon = if text.is_empty() { "" } else { ": " };
        eprintln!("== {name} {word} in {:.1} s{colon}{text}", started.elapsed().as_secs_f64());
    }

    eprintln!("== tests");
    let tests = tests_step::run()?;
    skipped.extend(tests.skips.iter().cloned());
    if tests.failed > 0 {
        failed.push(format!("tests: {} failed", tests.failed));
    }
    for line in &skipped {
        eprintln!("skipped: {line}");
    }
    for line in &failed {
        eprintln!("FAILED: {line}");
    }
    // Alone, and last: this is what scripts read.
    println!("{}", tests.summary());
    Ok(if failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn format() -> Result<Step> {
    sh::run(&mut sh::cargo(["fmt", "--all", "--check"]))?;
    Ok(Step::passed())
}

fn clippy() -> Result<Step> {
    sh::run(&mut sh::cargo([
        "clippy",
        "--locked",
        "--quiet",
        "--workspace",
        "--all-targets",
        "--all-features",
        "--",
        "-D",
        "warnings",
    ]))?;
    Ok(Step::passed())
}

fn docs() -> Result<Step> {
    let mut command = sh::cargo(["doc", "--locked", "--quiet", "--workspace", "--no-deps", "--all-features"]);
    sh::run(command.env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Step::passed())
}

/// What a newcomer builds: rustc and a linker are enough.
fn default_build() -> Result<Step> {
    sh::run(&mut sh::cargo(["build", "--locked", "--quiet"]))?;
    Ok(Step::passed())
}
