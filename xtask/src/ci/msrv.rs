//! The minimum Rust version: what every dependency declares, and a build where that toolchain is installed.

use serde_json::Value;

use super::Step;
use crate::sh::{self, Result};

/// `major.minor[.patch]`.
fn version(text: &str) -> Option<(u32, u32)> {
    let mut parts = text.split('.').map(|p| p.parse().ok());
    Some((parts.next()??, parts.next()??))
}

fn minimum(metadata: &Value) -> Result<String> {
    let members = metadata["workspace_members"].as_array().ok_or("no workspace members")?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let own: Vec<_> = packages.filter(|p| members.contains(&p["id"])).collect();
    let mut declared = Vec::new();
    for package in own {
        match package["rust_version"].as_str() {
            Some(v) => declared.push(v.to_owned()),
            None => return Err(format!("package {} declares no rust-version", package["name"])),
        }
    }
    declared.sort();
    declared.dedup();
    match declared.as_slice() {
        [one] => Ok(one.clone()),
        many => Err(format!("the workspace declares {} rust-versions: {}", many.len(), many.join(", "))),
    }
}

fn newer_than(metadata: &Value, minimum: &str) -> Result<Vec<String>> {
    let limit = version(minimum).ok_or_else(|| format!("odd rust-version '{minimum}'"))?;
    let packages = metadata["packages"].as_array().into_iter().flatten();
    Ok(packages
        .filter_map(|p| Some((p["name"].as_str()?, p["version"].as_str()?, p["rust_version"].as_str()?)))
        .filter(|(_, _, rust)| version(rust).is_none_or(|v| v > limit))
        .map(|(name, version, rust)| format!("{name} {version} needs Rust {rust}"))
        .collect())
}

/// The host's platform, for which dependencies are looked at.
fn host() -> Result<String> {
    let text = sh::output(std::process::Command::new("rustc").arg("-vV"))?;
    text.lines().find_map(|l| l.strip_prefix("host: ")).map(str::to_owned).ok_or_else(|| "rustc names no host".into())
}

pub fn declared() -> Result<Step> {
    let metadata = sh::metadata(&["--all-features", "--filter-platform", &host()?])?;
    let minimum = minimum(&metadata)?;
    let newer = newer_than(&metadata, &minimum)?;
    if newer.is_empty() {
        Ok(Step::Passed(format!("no dependency declares more than Rust {minimum}")))
    } else {
        Err(format!("rust-version is {minimum}, but {}", newer.join("; ")))
    }
}

pub fn built() -> Result<Step> {
    let minimum = minimum(&sh::metadata(&["--no-deps"])?)?;
    let list = || sh::output(std::process::Command::new("rustup").args(["toolchain", "list"]));
    let Ok(mut toolchains) = list() else {
        return Ok(Step::Skipped("rustup is not here".into()));
    };
    if find(&toolchains, &minimum).is_none() {
        let mut install = std::process::Command::new("rustup");
        install.args(["toolchain", "install", &minimum, "--profile", "minimal", "--no-self-update"]);
        // Without a way to the toolchains the step is skipped below, which says so.
        if sh::run(&mut install).is_ok() {
            toolchains = list()?;
        }
    }
    let Some(name) = find(&toolchains, &minimum) else {
        return Ok(Step::Skipped(format!(
            "Rust {minimum} is not here and cannot be installed; `rustup toolchain install {minimum}`"
        )));
    };
    let mut command = std::process::Command::new("rustup");
    command.args(["run", name, "cargo", "check", "--locked", "--quiet", "--workspace", "--all-features"]);
    command.args(["--target-dir", "target/msrv"]);
    for name in ["CARGO", "RUSTC", "RUSTUP_TOOLCHAIN"] {
        command.env_remove(name);
    }
    sh::run(&mut command)?;
    Ok(Step::Passed(format!("built with {name}")))
}

/// The toolchain of that version: `1.88` is served by `1.88-host` and by `1.88.0-host`.
fn find<'a>(toolchains: &'a str, minimum: &str) -> Option<&'a str> {
    toolchains.lines().filter_map(|l| l.split_whitespace().next()).find(|name| {
        name.strip_prefix(minimum).is_some_and(|rest| rest.starts_with('-') || rest.starts_with('.') || rest.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn one_version_for_the_workspace_and_nothing_newer_below_it() {
        let metadata = json!({
            "workspace_members": ["a"],
            "packages": [
                {"id": "a", "name": "a", "version": "0.1.0", "rust_version": "1.88"},
                {"id": "b", "name": "b", "version": "2.0.0", "rust_version": "1.70.0"},
                {"id": "c", "name": "c", "version": "3.0.0", "rust_version": "1.90"},
                {"id": "d", "name": "d", "version": "4.0.0", "rust_version": null},
            ],
        });
        assert_eq!(minimum(&metadata), Ok("1.88".into()));
        assert_eq!(newer_than(&metadata, "1.88"), Ok(vec!["c 3.0.0 needs Rust 1.90".to_owned()]));
        let none = json!({"workspace_members": ["a"], "packages": [{"id": "a", "name": "a", "rust_version": null}]});
        assert!(minimum(&none).unwrap_err().contains("declares no rust-version"));
    }

    #[test]
    fn finds_the_toolchain_of_that_version_only() {
        let list = "stable-x86_64 (active)\n1.8.0-x86_64\n1.880-x86_64\n1.88.0-x86_64\n";
        assert_eq!(find(list, "1.88"), Some("1.88.0-x86_64"));
        assert_eq!(find("1.95.0-x86_64\n", "1.88"), None);
    }
}
