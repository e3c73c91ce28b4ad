//! The same targets under libFuzzer, which follows the code that an input reaches.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{DIR, PACKAGE, Row, corpus, files};
use crate::sh::{self, Result};

/// The pinned version.
const VERSION: &str = "0.13.2";
/// Where it is installed to when it is not here.
const ROOT: &str = "target/tools";
/// Longest input made, bytes.
const MAX_LEN: u32 = 4096;
/// Longest input kept in the repository, bytes.
const KEEP_LEN: u32 = 1024;
/// Longest time of one input, seconds; memory, MiB.
const TIMEOUT: u32 = 20;
const MEMORY: u32 = 2048;

/// One program a target, built.
pub struct Programs(PathBuf);

impl Programs {
    /// Build them, or say why that is not possible here.
    pub fn build(sanitizer: &str) -> Result<Self> {
        let version = nightly(&["rustc", "-vV"]).output().map_err(|e| format!("rustup is not here: {e}"))?;
        if !version.status.success() {
            return Err("no nightly Rust is installed; `rustup toolchain install nightly`".into());
        }
        let version = String::from_utf8_lossy(&version.stdout).into_owned();
        let host = version.lines().find_map(|l| l.strip_prefix("host: ")).ok_or("rustc names no host")?;
        let tool = tool()?;
        eprintln!("building the libFuzzer programs (once; some minutes) ...");
        let mut command = nightly(&[]);
        command.arg(tool).args(["build", "--fuzz-dir", DIR, "--sanitizer", sanitizer, "--target", host]);
        sh::run(&mut command)?;
        Ok(Self(Path::new(DIR).join("target").join(host).join("release")))
    }

    pub fn run(&self, target: &str, seconds: u64, keep: bool) -> Result<Row> {
        let finds = Path::new(DIR).join("finds").join(target);
        let artifacts = Path::new(DIR).join("artifacts").join(target);
        let (found, crashed) = (files(&finds)?, files(&artifacts)?);
        let mut command = Command::new(self.0.join(target));
        command.args([
            format!("-max_total_time={seconds}"),
            format!("-max_len={MAX_LEN}"),
            format!("-timeout={TIMEOUT}"),
            format!("-rss_limit_mb={MEMORY}"),
            format!("-artifact_prefix={}/", artifacts.display()),
            "-print_final_stats=1".into(),
        ]);
        if let Some(words) = words(target)? {
            command.arg(format!("-dict={}", words.display()));
        }
        command.arg(&finds).arg(corpus(target));
        let out = command.output().map_err(|e| format!("cannot run `{}`: {e}", sh::show(&command)))?;
        let text = String::from_utf8_lossy(&out.stderr);
        let mut row = parse(&text);
        row.seconds = row.seconds.max(1.0);
        row.crashes = files(&artifacts)?.into_iter().filter(|f| !crashed.contains(f)).collect();
        row.finds = Some(files(&finds)?.into_iter().filter(|f| !found.contains(f)).count());
        if !out.status.success() {
            // The input is kept; here is what was said about it.
            let tail: Vec<_> = text.lines().rev().take(60).collect();
            tail.iter().rev().for_each(|line| eprintln!("{line}"));
            if row.crashes.is_empty() {
                return Err(format!("`{}`: {}", sh::show(&command), out.status));
            }
        } else if keep {
            self.keep(target, &finds)?;
        }
        Ok(row)
    }

    /// Take over what reaches code that the corpus does not; short inputs first.
    fn keep(&self, target: &str, finds: &Path) -> Result<()> {
        let mut command = Command::new(self.0.join(target));
        // Counters of how often an edge is taken would keep far more than a repository should hold.
        command.args(["-merge=1", "-use_counters=0", &format!("-max_len={KEEP_LEN}")]);
        command.arg(corpus(target)).arg(finds);
        sh::output(&mut command).map(drop)
    }
}

/// A command under nightly Rust, free of what the outer cargo set.
fn nightly(args: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly"]).args(args);
    for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN", "CARGO_MANIFEST_DIR", "CARGO_PKG_NAME"] {
        command.env_remove(name);
    }
    command
}

fn tool() -> Result<PathBuf> {
    let own = Path::new(ROOT).join("bin/cargo-fuzz");
    let works = |path: &Path| {
        sh::output(Command::new(path).arg("--version")).is_ok_and(|v| v.split_whitespace().any(|w| w == VERSION))
    };
    if let Some(found) = [own.clone(), PathBuf::from("cargo-fuzz")].into_iter().find(|p| works(p)) {
        return Ok(found);
    }
    eprintln!("installing cargo-fuzz {VERSION} into {ROOT} (once; a minute) ...");
    let mut install = sh::cargo(["install", "--locked", "--quiet", "--root", ROOT, "cargo-fuzz", "--version", VERSION]);
    sh::run(&mut install).map_err(|e| format!("cargo-fuzz {VERSION} is not here and cannot be installed: {e}"))?;
    if works(&own) { Ok(own) } else { Err(format!("cargo-fuzz {VERSION} was installed but does not run")) }
}

/// The target's words as a file; `None` when it has none.
fn words(target: &str) -> Result<Option<PathBuf>> {
    let text = sh::output(&mut sh::cargo(["run", "--locked", "--quiet", "-p", PACKAGE, "--", "words", target]))?;
    if text.is_empty() {
        return Ok(None);
    }
    let path = Path::new(DIR).join("target").join(format!("{target}.dict"));
    fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
    Ok(Some(path))
}

/// `#12 NEW cov: 34 ft: 56 ...`, and the statistics at the end.
fn parse(text: &str) -> Row {
    let mut row = Row::default();
    for line in text.lines() {
        let words: Vec<&str> = line.split_whitespace().collect();
        let after = |key: &str| words.windows(2).find(|w| w[0] == key).and_then(|w| w[1].parse::<u64>().ok());
        if let (Some(edges), Some(features)) = (after("cov:"), after("ft:")) {
            row.coverage = Some((edges, features));
        }
        if let Some(n) = after("stat::number_of_executed_units:") {
            row.executions = n;
        }
        if let Some(n) = after("stat::slowest_unit_time_sec:") {
            row.slowest_ms = n * 1000;
        }
        // `Done 123 runs in 61 second(s)`
        if let ["Done", _, "runs", "in", seconds, ..] = words[..] {
            row.seconds = seconds.parse().unwrap_or_default();
        }
    }
    row
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_libfuzzer_prints() {
        let text = "#2\tINITED cov: 300 ft: 900 corp: 40/9Kb exec/s: 0 rss: 50Mb\n\
                    #99\tNEW    cov: 310 ft: 950 corp: 41/9Kb lim: 4096 exec/s: 9 rss: 51Mb L: 3/9 MS: 1 ChangeBit-\n\
                    Done 1234 runs in 11 second(s)\n\
                    stat::number_of_executed_units: 1234\n\
                    stat::slowest_unit_time_sec:    2\n";
        let row = parse(text);
        assert_eq!((row.executions, row.seconds, row.coverage), (1234, 11.0, Some((310, 950))));
        assert_eq!(row.slowest_ms, 2000);
        assert_eq!(parse("nothing"), Row::default());
    }
}
