//! python3 with pip is what fetches and unpacks wheels; where we may, what is missing is installed.

use std::process::Command;

use crate::sh::{self, Result};

/// What Debian and its kin call them.
const PACKAGES: [&str; 2] = ["python3", "python3-pip"];

/// See that there is python3 with pip. As root, where apt-get is, they are installed.
pub fn ready() -> Result<()> {
    let Some(missing) = missing() else { return Ok(()) };
    let packages = PACKAGES.join(" ");
    install(missing, &PACKAGES)?;
    match self::missing() {
        None => Ok(()),
        Some(still) => Err(format!(
            "{still}, though {packages} are installed; the first `python3` in PATH is another one, which needs pip"
        )),
    }
}

/// What there is not.
fn missing() -> Option<&'static str> {
    if sh::output(Command::new("python3").arg("--version")).is_err() {
        Some("there is no python3 here")
    } else if sh::output(Command::new("python3").args(["-m", "pip", "--version"])).is_err() {
        Some("python3 has no pip here")
    } else {
        None
    }
}

/// Install packages of Debian and its kin, where we may; else say what to do.
pub fn install(missing: &str, packages: &[&str]) -> Result<()> {
    let names = packages.join(" ");
    if !may_install() {
        return Err(format!("{missing}; `apt-get install {names}` (or what your system calls them), then try again"));
    }
    eprintln!("{missing}: installing {names} ...");
    let install = || sh::output(apt_get().args(["install", "-y"]).args(packages));
    // The lists of packages may be old, or not there at all, as in a fresh container.
    if install().is_err() {
        sh::output(apt_get().arg("update"))
            .and_then(|_| install())
            .map_err(|e| format!("{missing}, and {names} cannot be installed: {e}"))?;
    }
    Ok(())
}

fn may_install() -> bool {
    let root = sh::output(Command::new("id").arg("-u")).is_ok_and(|id| id.trim() == "0");
    root && sh::output(apt_get().arg("--version")).is_ok()
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command.env("DEBIAN_FRONTEND", "noninteractive");
    command
}
