//! `cargo xtask golden`: the recorded vectors are all there, and the tests that read them pass.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::ExitCode;

use crate::sh::{self, Result};

const DIR: &str = "kv-testkit/vectors";
/// One line a file: `name count`.
const MANIFEST: &str = "kv-testkit/vectors/MANIFEST";

#[derive(Debug, clap::Args)]
pub struct GoldenArgs {
    /// Write the manifest anew from the files that are there.
    #[arg(long)]
    bless: bool,
}

pub fn run(args: &GoldenArgs) -> Result<ExitCode> {
    if args.bless {
        let counts = count(Path::new(DIR))?;
        fs::write(MANIFEST, render(&counts)).map_err(|e| format!("cannot write {MANIFEST}: {e}"))?;
    }
    eprintln!("{}", check()?);
    let metadata = sh::metadata(&["--no-deps"])?;
    let mut ran = 0;
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let tests = package["targets"].as_array().into_iter().flatten().filter(|t| t["kind"][0] == "test");
        let names: Vec<&str> = tests.filter_map(|t| t["name"].as_str()).filter(|n| n.contains("golden")).collect();
        if names.is_empty() {
            continue;
        }
        ran += names.len();
        let mut command = sh::cargo(["test", "--locked", "--all-features", "-p"]);
        command.arg(package["name"].as_str().unwrap_or_default());
        for name in names {
            command.args(["--test", name]);
        }
        sh::run(&mut command)?;
    }
    if ran == 0 {
        return Err("no golden test found (test targets named *golden*)".into());
    }
    println!("golden: {ran} test programs passed");
    Ok(ExitCode::SUCCESS)
}

/// Compare the files with the manifest; a line that says what is there.
pub fn check() -> Result<String> {
    let text = fs::read_to_string(MANIFEST).map_err(|e| format!("cannot read {MANIFEST}: {e}"))?;
    let (want, have) = (parse(&text)?, count(Path::new(DIR))?);
    compare(&want, &have)?;
    Ok(format!("golden vectors: {} in {} files", have.values().sum::<usize>(), have.len()))
}

fn compare(want: &BTreeMap<String, usize>, have: &BTreeMap<String, usize>) -> Result<()> {
    for (file, n) in want {
        match have.get(file) {
            None => return Err(format!("golden vectors: {file} is missing ({n} vectors)")),
            Some(m) if m != n => {
                return Err(format!("golden vectors: {file} holds {m} vectors, the manifest says {n}"));
            }
            Some(_) => {}
        }
    }
    match have.keys().find(|f| !want.contains_key(*f)) {
        Some(file) => {
            Err(format!("golden vectors: {file} is not in the manifest; `cargo xtask golden --bless` adds it"))
        }
        None => Ok(()),
    }
}

fn parse(text: &str) -> Result<BTreeMap<String, usize>> {
    let lines = text.lines().filter(|l| !l.trim().is_empty());
    lines
        .map(|line| {
            let (file, n) = line.rsplit_once(' ').ok_or_else(|| format!("{MANIFEST}: odd line '{line}'"))?;
            Ok((file.to_owned(), n.parse().map_err(|_| format!("{MANIFEST}: odd count in '{line}'"))?))
        })
        .collect()
}

fn render(counts: &BTreeMap<String, usize>) -> String {
    counts.iter().map(|(file, n)| format!("{file} {n}\n")).collect()
}

fn count(dir: &Path) -> Result<BTreeMap<String, usize>> {
    let mut out = BTreeMap::new();
    let entries = fs::read_dir(dir).map_err(|e| format!("cannot read {}: {e}", dir.display()))?;
    for path in entries.flatten().map(|e| e.path()).filter(|p| p.extension().is_some_and(|e| e == "json")) {
        let text = fs::read_to_string(&path).map_err(|e| format!("cannot read {}: {e}", path.display()))?;
        let value: serde_json::Value =
            serde_json::from_str(&text).map_err(|e| format!("{} is not JSON: {e}", path.display()))?;
        let n = value["vectors"].as_array().ok_or_else(|| format!("{} has no vectors", path.display()))?.len();
        out.insert(path.file_name().unwrap_or_default().to_string_lossy().into_owned(), n);
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_manifest_survives_its_own_format() {
        let counts = BTreeMap::from([("a.json".to_owned(), 3), ("b.json".to_owned(), 0)]);
        assert_eq!(parse(&render(&counts)), Ok(counts));
        assert!(parse("a.json x").is_err());
    }

    #[test]
    fn lost_changed_and_new_files_are_named() {
        let map = |items: &[(&str, usize)]| items.iter().map(|(f, n)| ((*f).to_owned(), *n)).collect();
        let want: BTreeMap<_, _> = map(&[("a.json", 3)]);
        assert_eq!(compare(&want, &want), Ok(()));
        assert!(compare(&want, &map(&[])).unwrap_err().contains("a.json is missing"));
        assert!(compare(&want, &map(&[("a.json", 2)])).unwrap_err().contains("holds 2 vectors, the manifest says 3"));
        assert!(compare(&want, &map(&[("a.json", 3), ("b.json", 1)])).unwrap_err().contains("b.json is not in"));
    }
}
