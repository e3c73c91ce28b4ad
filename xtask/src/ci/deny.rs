//! cargo-deny: licences, bans and sources always; advisories where their database can be fetched.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::Step;
use crate::sh::{self, Result};

/// The pinned version.
const VERSION: &str = "0.20.2";
/// Where it is installed to when it is not here.
const ROOT: &str = "target/tools";

pub fn run() -> Result<Step> {
    match tool()? {
        Ok(tool) => {
            sh::run(Command::new(tool).args(["--all-features", "check", "licenses", "bans", "sources"]))?;
            Ok(Step::passed())
        }
        Err(why) => Ok(Step::Skipped(why)),
    }
}

pub fn advisories() -> Result<Step> {
    let tool = match tool()? {
        Ok(tool) => tool,
        Err(why) => return Ok(Step::Skipped(why)),
    };
    if let Err(e) = sh::output(Command::new(&tool).args(["fetch", "db"])) {
        return Ok(Step::Skipped(format!("the advisory database cannot be fetched here: {e}")));
    }
    sh::run(Command::new(&tool).args(["--offline", "--all-features", "check", "advisories"]))?;
    Ok(Step::passed())
}

/// The program, or why there is none.
fn tool() -> Result<std::result::Result<PathBuf, String>> {
    let own = Path::new(ROOT).join("bin/cargo-deny");
    for candidate in [own.clone(), PathBuf::from("cargo-deny")] {
        if is_pinned(&candidate) {
            return Ok(Ok(candidate));
        }
    }
    eprintln!("installing cargo-deny {VERSION} into {ROOT} (once; a few minutes) ...");
    let mut install = sh::cargo(["install", "--locked", "--quiet", "--root", ROOT, "cargo-deny", "--version", VERSION]);
    if let Err(e) = sh::run(&mut install) {
        // No network, or no toolchain for it: said aloud, and not a fault of this project.
        return Ok(Err(format!("cargo-deny {VERSION} is not here and cannot be installed: {e}")));
    }
    if is_pinned(&own) { Ok(Ok(own)) } else { Err(format!("cargo-deny {VERSION} was installed but does not run")) }
}

fn is_pinned(program: &Path) -> bool {
    sh::output(Command::new(program).arg("--version")).is_ok_and(|v| v.split_whitespace().any(|w| w == VERSION))
}
