//! The suite every [`Transport`](kv_core::transport::Transport) runs.
//!
//! A backend's author writes a [`Harness`] and one test:
//!
//! ```
//! use kv_testkit::conformance::{self, Harness};
//!
//! fn conforms(harness: &mut dyn Harness) {
//!     let report = conformance::run(harness);
//!     report.assert_passed();
//!     report.assert_skips(&[]); // an ability once there must not be lost without a word
//! }
//! ```
//!
//! Each trial gets a fresh source and target. Trials that need an ability the harness or backend does not have are skipped,
//! and the line says why. Trials wait generously and assert nothing about time.
//!
//! A trial checks more than its name says. Throughout, whatever the trial: each accepted op has exactly one outcome, on its
//! own lane, and at most one settlement, never of a quiet op; a `Done` op's bytes are in place; a destination proven quiet
//! is painted with a canary that nobody touches again; nothing else of the target's memory changes, nor the guards around
//! it, nor the source.

mod bench;
mod bytes;
mod harness;
mod life;
mod peers;
mod refuse;
mod remote;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

pub use harness::{Absent, Block, Harness, LocalFaults, LocalTarget, NoFaults, Resources, SourceMemory, Target};
pub use remote::{RemoteTarget, serve, serve_stdio};

/// Why a trial did not pass.
enum Stop {
    Skip(String),
    Fail(String),
}

impl From<String> for Stop {
    fn from(text: String) -> Self {
        Self::Fail(text)
    }
}

impl From<&str> for Stop {
    fn from(text: &str) -> Self {
        Self::Fail(text.into())
    }
}

impl From<Absent> for Stop {
    fn from(absent: Absent) -> Self {
        Self::Skip(absent.0.into())
    }
}

type Run = fn(&mut dyn Harness) -> Result<(), Stop>;

struct Trial {
    name: &'static str,
    run: Run,
}

/// How one trial ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It held.
    Passed,
    /// It could not be run, and why.
    Skipped(String),
    /// It did not hold, and how.
    Failed(String),
}

/// How the suite ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The harness's name.
    pub name: String,
    /// Trials in the order they ran.
    pub trials: Vec<(&'static str, Verdict)>,
}

impl Report {
    /// Names of the trials that passed.
    pub fn passed(&self) -> Vec<&'static str> {
        self.named(|v| *v == Verdict::Passed)
    }

    /// Names of the trials that were skipped.
    pub fn skipped(&self) -> Vec<&'static str> {
        self.named(|v| matches!(v, Verdict::Skipped(_)))
    }

    /// Names of the trials that failed.
    pub fn failed(&self) -> Vec<&'static str> {
        self.named(|v| matches!(v, Verdict::Failed(_)))
    }

    fn named(&self, keep: impl Fn(&Verdict) -> bool) -> Vec<&'static str> {
        self.trials.iter().filter(|(_, v)| keep(v)).map(|(n, _)| *n).collect()
    }

    /// Panics with every failure, if there is any.
    pub fn assert_passed(&self) {
        assert!(self.failed().is_empty(), "\n{self}");
    }

    /// Panics unless exactly these trials were skipped: a backend that could do something once must not lose it
    /// without a word.
    pub fn assert_skips(&self, expected: &[&str]) {
        assert_eq!(self.skipped(), expected, "skipped trials of {}", self.name);
    }
}

fn line(f: &mut impl fmt::Write, suite: &str, trial: &str, verdict: &Verdict) -> fmt::Result {
    match verdict {
        Verdict::Passed => writeln!(f, "conformance {suite}: {trial} ... ok"),
        Verdict::Skipped(why) => writeln!(f, "conformance {suite}: {trial} ... skipped: {why}"),
        Verdict::Failed(why) => writeln!(f, "conformance {suite}: {trial} ... FAILED: {why}"),
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.trials.iter().try_for_each(|(trial, verdict)| line(f, &self.name, trial, verdict))?;
        let n = (self.passed().len(), self.skipped().len(), self.failed().len());
        write!(f, "conformance {}: {} passed, {} skipped, {} failed", self.name, n.0, n.1, n.2)
    }
}

/// Names of all trials.
pub fn trials() -> Vec<&'static str> {
    all().iter().map(|t| t.name).collect()
}

fn all() -> Vec<Trial> {
    [bytes::TRIALS, refuse::TRIALS, life::TRIALS, peers::TRIALS]
        .concat()
        .into_iter()
        .map(|(name, run)| Trial { name, run })
        .collect()
}

/// Run every trial, print a line for each and a closing one.
pub fn run(harness: &mut dyn Harness) -> Report {
    run_some(harness, |_| true)
}

/// Run the trials whose name `keep` holds for.
pub fn run_some(harness: &mut dyn Harness, keep: impl Fn(&str) -> bool) -> Report {
    let mut report = Report { name: harness.name(), trials: Vec::new() };
    for trial in all().into_iter().filter(|t| keep(t.name)) {
        // A panicking backend fails its trial; the others still say what they have to say.
        let verdict = match catch_unwind(AssertUnwindSafe(|| (trial.run)(harness))) {
            Ok(Ok(())) => Verdict::Passed,
            Ok(Err(Stop::Skip(why))) => Verdict::Skipped(why),
            Ok(Err(Stop::Fail(why))) => Verdict::Failed(why),
            Err(panic) => {
                let text = panic.downcast_ref::<String>().cloned();
                let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| s.to_string()));
                Verdict::Failed(format!("panicked: {}", text.unwrap_or_default()))
            }
        };
        harness.end_trial();
        let mut text = String::new();
        let _ = line(&mut text, &report.name, trial.name, &verdict);
        print!("{text}");
        report.trials.push((trial.name, verdict));
    }
    println!("{}", report.to_string().lines().last().unwrap_or_default());
    report
}
