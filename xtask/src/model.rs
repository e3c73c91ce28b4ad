//! `cargo xtask model`: every order of events of the real rooms in the full-size universes, and the known faults put
//! back one by one; as Markdown tables.

use std::io::{BufRead as _, BufReader};
use std::process::{ExitCode, Stdio};

use crate::sh::{self, Result};

pub fn run() -> Result<ExitCode> {
    let mut command = sh::cargo(["test", "--release", "--locked", "--quiet", "-p", "kv-transfer-core"]);
    command.args(["--no-default-features", "--features", "mutants", "--test", "model", "--test", "mutants_shards"]);
    // One after the other: the full size has the machine to itself.
    command.args(["--", "--include-ignored", "--nocapture", "--test-threads=1", "full_size", "each_known_fault"]);
    let mut child =
        command.stdout(Stdio::piped()).spawn().map_err(|e| format!("cannot run `{}`: {e}", sh::show(&command)))?;
    let (mut rows, mut tables) = (0, 0);
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line.map_err(|e| format!("cannot read the model's output: {e}"))?;
            let Some(row) = row(&line) else { continue };
            if row.starts_with("|---") {
                tables += 1;
            }
            rows += 1;
            println!("{row}");
        }
    }
    let status = child.wait().map_err(|e| format!("the model's status is lost: {e}"))?;
    match (status.success(), tables) {
        (true, 3) => Ok(ExitCode::SUCCESS),
        (true, _) => Err(format!("{rows} lines of {tables} tables, where 3 tables should be")),
        (false, _) => Err(format!("`{}`: {status}", sh::show(&command))),
    }
}

/// The row of a table in a line of libtest's output, which may begin with the test's name.
fn row(line: &str) -> Option<&str> {
    let row = &line[line.find('|')?..];
    row.ends_with('|').then_some(row)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_told_from_the_rest() {
        assert_eq!(row("| a | b |"), Some("| a | b |"));
        assert_eq!(row("test sizes::full_size ... | a |"), Some("| a |"));
        assert_eq!((row("running 2 tests"), row("a | b")), (None, None));
    }
}
