//! The tests, and their count. Plain `cargo test`: a fresh machine needs nothing else.

use std::io::{BufRead as _, BufReader};
use std::process::Stdio;

use crate::sh::{self, Result};

/// Counts over all test programs.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Tests {
    /// Passed, those that passed over themselves included.
    pub passed: u64,
    /// Failed, or not built.
    pub failed: u64,
    /// Marked as ignored.
    pub ignored: u64,
    /// Reasons of tests that passed over themselves: lines `skipped: NAME: WHY` of their output.
    pub skips: Vec<String>,
}

impl Tests {
    pub fn summary(&self) -> String {
        // To libtest, a test that passes over itself has passed.
        let own = self.skips.len() as u64;
        let (passed, skipped) = (self.passed.saturating_sub(own), self.ignored + own);
        format!("{passed} passed, {} failed, {skipped} skipped", self.failed)
    }
}

/// What a test prints that cannot run here.
const SKIP: &str = "skipped: ";

pub fn run() -> Result<Tests> {
    let mut command = sh::cargo(["test", "--locked", "--workspace", "--all-features", "--no-fail-fast"]);
    command.args(["--", "--show-output"]).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("cannot run `{}`: {e}", sh::show(&command)))?;
    let mut reader = Reader::default();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n') {
            let line = line.map_err(|e| format!("cannot read the tests' output: {e}"))?;
            let line = String::from_utf8_lossy(&line);
            if reader.line(&line) {
                eprintln!("{line}");
            }
        }
    }
    let status = child.wait().map_err(|e| format!("the tests' status is lost: {e}"))?;
    let mut tests = reader.tests;
    // A test program that did not build, or that was killed, counts.
    if !status.success() && tests.failed == 0 {
        tests.failed = 1;
    }
    Ok(tests)
}

/// Reads libtest's output. That of passed tests is only looked through for reasons of skips.
#[derive(Default)]
struct Reader {
    tests: Tests,
    in_successes: bool,
}

impl Reader {
    /// Whether the line is worth showing.
    fn line(&mut self, line: &str) -> bool {
        if let Some(rest) = line.strip_prefix("test result: ") {
            self.in_successes = false;
            self.count(rest);
            return true;
        }
        match line {
            "successes:" => self.in_successes = true,
            "failures:" => self.in_successes = false,
            _ => {}
        }
        if self.in_successes
            && let Some(why) = line.trim_start().strip_prefix(SKIP)
        {
            self.tests.skips.push(why.to_owned());
        }
        !self.in_successes
    }

    /// `ok. 3 passed; 0 failed; 1 ignored; 0 measured; ...`
    fn count(&mut self, rest: &str) {
        for part in rest.split([';', '.']) {
            let mut words = part.split_whitespace();
            let (Some(Ok(n)), Some(what)) = (words.next().map(str::parse::<u64>), words.next()) else { continue };
            match what {
                "passed" => self.tests.passed += n,
                "failed" => self.tests.failed += n,
                "ignored" => self.tests.ignored += n,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_over_programs_and_takes_skips_out_of_the_passed() {
        let text = "\
running 3 tests
test a ... ok
test b ... ok
test c ... FAILED

successes:

---- b stdout ----
noise
skipped: b: no network namespaces here


successes:
    a
    b

failures:

---- c stdout ----
boom

test result: FAILED. 2 passed; 1 failed; 0 ignored; 0 measured; 0 filtered out; finished in 0.00s
test result: ok. 4 passed; 0 failed; 1 ignored; 0 measured; 0 filtered out; finished in 1.20s
";
        let mut reader = Reader::default();
        let shown: Vec<_> = text.lines().filter(|l| reader.line(l)).collect();
        assert!(shown.contains(&"boom") && shown.contains(&"test c ... FAILED") && !shown.contains(&"noise"));
        let tests = reader.tests;
        assert_eq!(tests.skips, ["b: no network namespaces here"]);
        assert_eq!(tests.summary(), "5 passed, 1 failed, 2 skipped");
    }
}
