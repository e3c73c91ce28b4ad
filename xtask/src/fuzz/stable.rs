//! `kv-fuzz` of the targets' package: mutates the corpus at random.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{SystemTime, UNIX_EPOCH};

use super::{DIR, PACKAGE, Row, files};
use crate::sh::{self, Result};

/// Optimised where it matters, and with the checks of a debug build.
pub fn build() -> Result<PathBuf> {
    let dir = Path::new("target/fuzz-stable");
    eprintln!("building the driver for stable Rust ...");
    let mut command = sh::cargo(["build", "--profile", "quick", "--locked", "--quiet", "-p", PACKAGE, "--target-dir"]);
    command.arg(dir);
    for check in ["CARGO_PROFILE_QUICK_DEBUG_ASSERTIONS", "CARGO_PROFILE_QUICK_OVERFLOW_CHECKS"] {
        command.env(check, "true");
    }
    sh::run(&mut command)?;
    Ok(dir.join("quick/kv-fuzz"))
}

pub fn run(program: &Path, target: &str, seconds: u64) -> Result<Row> {
    let artifacts = Path::new(DIR).join("artifacts").join(target);
    let before = files(&artifacts)?;
    // Another seed each time; a crash is kept as a file, so that it replays.
    let seed = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let mut command = Command::new(program);
    command.args(["run", target, &seconds.to_string(), &seed.to_string()]).arg(&artifacts);
    let out = command.output().map_err(|e| format!("cannot run `{}`: {e}", sh::show(&command)))?;
    let text = String::from_utf8_lossy(&out.stdout);
    let mut row = parse(&text)
        .ok_or_else(|| format!("`{}`: {}: {}", sh::show(&command), out.status, String::from_utf8_lossy(&out.stderr)))?;
    row.crashes = files(&artifacts)?.into_iter().filter(|f| !before.contains(f)).collect();
    if !out.status.success() {
        eprint!("{}", String::from_utf8_lossy(&out.stderr));
    }
    Ok(row)
}

/// `executions=9 seconds=1.0 slowest_ms=3 crashes=0`
fn parse(text: &str) -> Option<Row> {
    let line = text.lines().rev().find(|l| l.starts_with("executions="))?;
    let field = |key: &str| line.split_whitespace().find_map(|w| w.strip_prefix(key)?.strip_prefix('='));
    Some(Row {
        executions: field("executions")?.parse().ok()?,
        seconds: field("seconds")?.parse().ok()?,
        slowest_ms: field("slowest_ms")?.parse().ok()?,
        ..Row::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_drivers_line() {
        let row = parse("noise\nexecutions=9 seconds=1.5 slowest_ms=3 crashes=0\n").unwrap();
        assert_eq!((row.executions, row.seconds, row.slowest_ms), (9, 1.5, 3));
        assert_eq!(parse("nothing"), None);
    }
}
