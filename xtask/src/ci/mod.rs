//! `cargo xtask ci`: every step runs, whatever the one before it said; the last line counts the tests.

mod backends;
mod deny;
mod hygiene;
mod interop;
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
    /// Also our prefill and decode against SGLang's own (`cargo xtask interop`); each case counts as a test.
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

/// What `--full` has before its tests.
const FULL: &[(&str, StepFn)] = &[("interop peer", interop::setup)];

pub fn run(args: &CiArgs) -> Result<ExitCode> {
    let (mut failed, mut skipped) = (Vec::new(), Vec::new());
    let full: &[(&str, StepFn)] = if args.full { FULL } else { &[] };
    for (name, step) in STEPS.iter().chain(full) {
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
    let mut tests = tests_step::run()?;
    skipped.extend(tests.skips.iter().cloned());
    if tests.failed > 0 {
        failed.push(format!("tests: {} failed", tests.failed));
    }
    // Without SGLang there is nothing to run, and the step before has said so.
    if args.full && !skipped.iter().chain(&failed).any(|l| l.starts_with(FULL[0].0)) {
        live(&mut tests, &mut skipped, &mut failed);
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

/// The cases against SGLang, as tests.
fn live(tests: &mut tests_step::Tests, skipped: &mut Vec<String>, failed: &mut Vec<String>) {
    let started = Instant::now();
    eprintln!("== interop");
    match interop::run() {
        Err(e) => {
            tests.failed += 1;
            failed.push(format!("interop: {e}"));
        }
        Ok(rows) => {
            eprintln!("== interop in {:.1} s: {}", started.elapsed().as_secs_f64(), interop::text(&rows));
            interop::count(&rows, tests, skipped, failed);
        }
    }
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
