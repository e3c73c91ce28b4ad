//! `cargo xtask fuzz`: every target for some time, with libFuzzer where nightly Rust is at hand, else with a driver for
//! stable Rust. Both start from the corpus that is checked in.

mod libfuzzer;
mod stable;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::sh::{self, Result};

const PACKAGE: &str = "kv-transfer-fuzz-targets";
/// A workspace of its own, and where everything about fuzzing lies.
const DIR: &str = "fuzz";

#[derive(Debug, clap::Args)]
pub struct FuzzArgs {
    /// For each target.
    #[arg(long, default_value_t = 60)]
    seconds: u64,
    /// Only these.
    #[arg(long = "target", value_name = "NAME")]
    targets: Vec<String>,
    /// Afterwards, take into the corpus what reached new code, and nothing else (libFuzzer only).
    #[arg(long)]
    keep: bool,
    /// Use the driver for stable Rust.
    #[arg(long)]
    stable: bool,
    /// libFuzzer's sanitizer: none, address. The targets hold next to no unsafe code, and run 2 to 5 times faster
    /// without one.
    #[arg(long, default_value = "none")]
    sanitizer: String,
}

/// What a run of one target did.
#[derive(Debug, Default, PartialEq)]
struct Row {
    executions: u64,
    seconds: f64,
    /// Edges and features reached by the corpus with the finds; `None` where nothing measures it.
    coverage: Option<(u64, u64)>,
    /// Inputs that reached something new.
    finds: Option<usize>,
    /// Slowest input.
    slowest_ms: u64,
    /// Files of inputs that made the target panic, run too long, or eat memory.
    crashes: Vec<PathBuf>,
}

pub fn run(args: &FuzzArgs) -> Result<ExitCode> {
    let all = sh::output(&mut sh::cargo(["run", "--locked", "--quiet", "-p", PACKAGE, "--", "list"]))?;
    let all: Vec<&str> = all.lines().collect();
    if let Some(odd) = args.targets.iter().find(|t| !all.contains(&t.as_str())) {
        return Err(format!("no target '{odd}'; there are {}", all.join(", ")));
    }
    let chosen = all.into_iter().filter(|t| args.targets.is_empty() || args.targets.iter().any(|c| c == t));
    let fuzzer = if args.stable { Err("asked for".to_owned()) } else { libfuzzer::Programs::build(&args.sanitizer) };
    match &fuzzer {
        Ok(_) => println!("libFuzzer, sanitizer {}, {} s a target", args.sanitizer, args.seconds),
        Err(why) => println!("driver for stable Rust ({why}), {} s a target; it measures no coverage", args.seconds),
    }
    let stable = if fuzzer.is_err() { Some(stable::build()?) } else { None };
    println!(
        "{:16} {:>12} {:>9} {:>8} {:>8} {:>6} {:>8} {:>7}",
        "target", "executions", "exec/s", "edges", "features", "finds", "slowest", "crashes"
    );
    let mut crashes = Vec::new();
    for target in chosen {
        let row = match (&fuzzer, &stable) {
            (Ok(programs), _) => programs.run(target, args.seconds, args.keep)?,
            (_, Some(program)) => stable::run(program, target, args.seconds)?,
            _ => return Err("no fuzzer was built".into()),
        };
        println!("{}", line(target, &row));
        crashes.extend(row.crashes);
    }
    for crash in &crashes {
        println!("crash: {}", crash.display());
    }
    if crashes.is_empty() {
        println!("fuzz: no crash");
        return Ok(ExitCode::SUCCESS);
    }
    println!(
        "replay one with `cargo run -p {PACKAGE} -- try TARGET FILE`; mended, it belongs into {DIR}/corpus/TARGET"
    );
    Ok(ExitCode::FAILURE)
}

fn line(target: &str, row: &Row) -> String {
    let number = |n: Option<u64>| n.map_or("-".to_owned(), |n| n.to_string());
    format!(
        "{target:16} {:>12} {:>9.0} {:>8} {:>8} {:>6} {:>8} {:>7}",
        row.executions,
        row.executions as f64 / row.seconds.max(0.001),
        number(row.coverage.map(|c| c.0)),
        number(row.coverage.map(|c| c.1)),
        number(row.finds.map(|n| n as u64)),
        // libFuzzer counts whole seconds.
        if row.slowest_ms == 0 { "< 1 s".to_owned() } else { format!("{} ms", row.slowest_ms) },
        row.crashes.len(),
    )
}

fn corpus(target: &str) -> PathBuf {
    Path::new(DIR).join("corpus").join(target)
}

/// A fresh look at a directory that is made when it is missing.
fn files(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e: std::io::Error| format!("{}: {e}", dir.display());
    std::fs::create_dir_all(dir).map_err(failed)?;
    let mut out: Vec<_> = std::fs::read_dir(dir).map_err(failed)?.flatten().map(|e| e.path()).collect();
    out.sort();
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_says_what_is_known() {
        let row = Row { executions: 2000, seconds: 4.0, coverage: Some((10, 30)), finds: Some(3), ..Row::default() };
        let words = |row: &Row| line("t", row).split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        assert_eq!(words(&row), ["t", "2000", "500", "10", "30", "3", "<", "1", "s", "0"]);
        assert_eq!(words(&Row::default()), ["t", "0", "0", "-", "-", "-", "<", "1", "s", "0"]);
    }
}
