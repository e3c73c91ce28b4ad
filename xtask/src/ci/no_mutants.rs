//! The faults that tests put back are in nothing that is shipped.

use super::Step;
use crate::sh::{self, Result};

const FEATURE: &str = "mutants";
const SHIPPED: [&str; 2] = ["kv-transfer", "kv-transfer-cli"];

pub fn run() -> Result<Step> {
    for package in SHIPPED {
        let tree = sh::output(&mut sh::cargo([
            "tree",
            "--locked",
            "-p",
            package,
            "--all-features",
            "-e",
            "normal,features",
            "--prefix",
            "none",
        ]))?;
        check(package, &tree)?;
    }
    Ok(Step::Passed(format!("feature '{FEATURE}' is off in {}", SHIPPED.join(", "))))
}

fn check(package: &str, tree: &str) -> Result<()> {
    if !tree.contains("kv-transfer-core") {
        return Err(format!("cargo tree of {package} does not name kv-transfer-core"));
    }
    match tree.lines().find(|l| l.contains(&format!("kv-transfer-core feature \"{FEATURE}\""))) {
        Some(line) => Err(format!("{package} is built with known faults: {line}")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_faults_in_what_is_shipped_are_refused() {
        assert_eq!(check("p", "kv-transfer-core feature \"control\"\nkv-transfer-core v0.1.0"), Ok(()));
        assert!(check("p", "kv-transfer-core feature \"mutants\"").unwrap_err().contains("known faults"));
        assert!(check("p", "serde v1").is_err());
    }
}
