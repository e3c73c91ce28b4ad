//! Without its default features the core is pure: no runtime, no sockets, no libc.

use super::Step;
use crate::sh::{self, Result};

const FORBIDDEN: [&str; 10] =
    ["tokio", "zmq", "zmq-sys", "axum", "libc", "hyper", "reqwest", "mio", "socket2", "async-io"];

pub fn run() -> Result<Step> {
    let tree = sh::output(&mut sh::cargo([
        "tree",
        "--locked",
        "-p",
        "kv-transfer-core",
        "--no-default-features",
        "-e",
        "normal",
        "--prefix",
        "none",
        "--format",
        "{p}",
    ]))?;
    check(&tree).map(|n| Step::Passed(format!("{n} packages, none of {}", FORBIDDEN.join(", "))))
}

fn check(tree: &str) -> Result<usize> {
    let mut names: Vec<&str> = tree.lines().filter_map(|l| l.split_whitespace().next()).collect();
    names.sort_unstable();
    names.dedup();
    if !names.contains(&"kv-transfer-core") {
        return Err("cargo tree does not name kv-transfer-core".into());
    }
    let found: Vec<_> = names.iter().copied().filter(|n| FORBIDDEN.contains(n)).collect();
    if found.is_empty() {
        Ok(names.len())
    } else {
        Err(format!("kv-transfer-core without default features depends on {}", found.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_what_should_not_be_there() {
        assert_eq!(check("kv-transfer-core v0.1.0 (/x)\nserde v1\nserde v1 (*)\n"), Ok(2));
        let e = check("kv-transfer-core v0.1.0\ntokio v1\nlibc v0.2\n").unwrap_err();
        assert!(e.contains("libc, tokio"), "{e}");
        assert!(check("").is_err());
    }
}
