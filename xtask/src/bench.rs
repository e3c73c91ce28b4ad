//! `cargo xtask bench`: the budget table of the architecture, each row beside its floor in the same run.

use std::io::{BufRead as _, BufReader};
use std::process::{ExitCode, Stdio};

use serde_json::Value;

use crate::sh::{self, Result};

const PACKAGE: &str = "kv-transfer";
const BENCH: &str = "budget";
/// Keys of a row of `--json`.
const KEYS: [&str; 5] = ["row", "ours", "peer", "ratio", "unit"];

pub fn run(args: &[String]) -> Result<ExitCode> {
    if !sh::metadata(&["--no-deps"])?["packages"].as_array().is_some_and(|p| p.iter().any(has_bench)) {
        return Err(format!("package {PACKAGE} has no benchmark '{BENCH}' (a [[bench]] with harness = false)"));
    }
    let mut command = sh::cargo(["bench", "--locked", "--quiet", "-p", PACKAGE, "--bench", BENCH, "--"]);
    command.args(args).stdout(Stdio::piped());
    let mut child = command.spawn().map_err(|e| format!("cannot run `{}`: {e}", sh::show(&command)))?;
    let mut last = String::new();
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines() {
            let line = line.map_err(|e| format!("cannot read the benchmark's output: {e}"))?;
            println!("{line}");
            last = line;
        }
    }
    let status = child.wait().map_err(|e| format!("the benchmark's status is lost: {e}"))?;
    if !status.success() {
        return Err(format!("`{}`: {status}", sh::show(&command)));
    }
    if args.iter().any(|a| a == "--json") {
        check_rows(&last)?;
    }
    Ok(ExitCode::SUCCESS)
}

fn has_bench(package: &Value) -> bool {
    package["name"] == PACKAGE
        && package["targets"]
            .as_array()
            .is_some_and(|t| t.iter().any(|t| t["name"] == BENCH && t["kind"] == serde_json::json!(["bench"])))
}

fn check_rows(line: &str) -> Result<()> {
    let value: Value = serde_json::from_str(line).map_err(|e| format!("the last line is not JSON: {e}"))?;
    let rows = value.as_array().ok_or("the last line is not an array")?;
    for row in rows {
        for key in KEYS {
            if row.get(key).is_none() {
                return Err(format!("a row has no '{key}': {row}"));
            }
        }
    }
    if rows.is_empty() { Err("no rows".into()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_have_their_keys() {
        assert_eq!(check_rows(r#"[{"row":"a","ours":1,"peer":2,"ratio":0.5,"unit":"us"}]"#), Ok(()));
        assert!(check_rows(r#"[{"row":"a","ours":1,"peer":2,"unit":"us"}]"#).unwrap_err().contains("'ratio'"));
        assert!(check_rows("[]").is_err() && check_rows("x").is_err() && check_rows("{}").is_err());
    }
}
