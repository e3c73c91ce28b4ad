//! `CATALOGUE.md` speaks of every row of the fault catalogue, and of tests that exist.
// A test reports by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// Rows of sections B1 to B6.
const ROWS: [&str; 61] = [
    "F01", "F03", "F04", "F05", "F06", "F09", "F10", "F11", "F12", "F13", "F16", "F17", "F19", "F20", "F21", "F23",
    "F24", "F25", "F26", "F27", "F28", "F29", "F30", "F31", "F32", "F33", "F36", "F37", "F38", "F39", "F40", "F45",
    "F46", "F47", "F48", "F51", "F53", "F54", "F55", "F56", "F57", "F58", "F59", "F60", "F61", "F62", "F63", "F64",
    "F65", "F66", "F67", "F69", "F70", "F71", "F72", "F73", "F74", "F75", "F76", "F77", "F78",
];

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

struct Row {
    status: String,
    tests: String,
}

fn table() -> BTreeMap<String, Row> {
    let text = fs::read_to_string(workspace().join("kv-testkit/CATALOGUE.md")).unwrap();
    let mut rows = BTreeMap::new();
    for line in text.lines().filter(|l| l.starts_with("| F")) {
        let cells: Vec<&str> = line.trim_matches('|').splitn(4, '|').map(str::trim).collect();
        let [row, fault, status, tests] = cells[..] else { panic!("four cells: {line}") };
        assert!(!fault.is_empty(), "{row} says nothing");
        let row_text = Row { status: status.into(), tests: tests.into() };
        assert!(rows.insert(row.to_owned(), row_text).is_none(), "{row} stands there twice");
    }
    rows
}

/// Names of all functions of a file that are tests.
fn tests_of(file: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let mut names = BTreeSet::new();
    let mut is_test = false;
    for line in text.lines().map(str::trim) {
        // A property test is written `#[test] fn` inside `proptest!`, one line after the other, too.
        if line.starts_with("#[test]") || line.starts_with("#[tokio::test") {
            is_test = true;
        } else if let Some(rest) = line.strip_prefix("async fn ").or_else(|| line.strip_prefix("fn ")) {
            let name: String = rest.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
            if std::mem::take(&mut is_test) {
                names.insert(name);
            }
        } else if !line.starts_with("#[") {
            is_test = false;
        }
    }
    names
}

/// (tests, file): "`a`, `b` (file)" parts of a cell.
fn named(cell: &str) -> Vec<(Vec<String>, PathBuf)> {
    let mut out = Vec::new();
    for part in cell.split_inclusive(".rs)") {
        let Some((before, file)) = part.strip_suffix(".rs)").and_then(|p| p.rsplit_once('(')) else { continue };
        let names = before.split('`').skip(1).step_by(2).map(str::to_owned);
        out.push((names.collect(), PathBuf::from(format!("{file}.rs"))));
    }
    out
}

#[test]
fn every_row_of_the_catalogue_has_a_line() {
    let table = table();
    let have: BTreeSet<&str> = table.keys().map(String::as_str).collect();
    assert_eq!(have, ROWS.into_iter().collect::<BTreeSet<_>>());
    for (row, Row { status, tests }) in &table {
        let step = status.strip_prefix("step ").is_some_and(|n| n.parse::<u32>().is_ok_and(|n| n > 2));
        assert!(step || status == "done" || status == "part", "{row}: {status}");
        assert!(!tests.is_empty(), "{row} has neither a test nor a reason");
        if !step {
            let of_row = format!("cat_{}_", row.to_lowercase());
            assert!(tests.contains(&of_row), "{row} is {status}, and no test is named after it");
        }
    }
}

#[test]
fn every_test_named_in_the_catalogue_exists() {
    let mut count = 0;
    for (row, Row { tests, .. }) in table() {
        for (names, file) in named(&tests) {
            let exist = tests_of(&workspace().join(&file));
            for name in names.iter().filter(|n| !n.ends_with("..")) {
                assert!(exist.contains(name), "{row}: {} has no test {name}", file.display());
                count += 1;
            }
        }
    }
    assert!(count > 120, "{count} tests are named: the table is not read");
}

#[test]
fn every_test_named_after_a_row_is_in_the_catalogue() {
    let table = table();
    let mut files = Vec::new();
    let mut folders = vec![workspace()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().flatten() {
            let (path, name) = (entry.path(), entry.file_name());
            let hidden = name.to_string_lossy().starts_with('.');
            if path.is_dir() && !hidden && name != "target" {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "rs") {
                files.push(path);
            }
        }
    }
    for file in files {
        for name in tests_of(&file) {
            for part in name.split("cat_f").skip(1) {
                let number: String = part.chars().take_while(char::is_ascii_digit).collect();
                let row = format!("F{number}");
                let cell = table.get(&row).unwrap_or_else(|| panic!("{name}: the catalogue has no row {row}"));
                assert!(cell.tests.contains(&name), "{row} does not name {name} ({})", file.display());
            }
        }
    }
}
