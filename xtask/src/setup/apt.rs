//! Shared libraries of the system that what is fetched needs: where we may, what is missing is installed.

use std::process::Command;

use crate::sh::{self, Result};

/// See that Debian's packages of these names are here. As root, where apt-get is, they are installed. `what` needs them.
pub fn see(what: &str, names: &[&str]) -> Result<()> {
    if names.is_empty() {
        return Ok(());
    }
    if sh::output(Command::new("dpkg").arg("--version")).is_err() {
        eprintln!("no dpkg here: see yourself that there is what Debian calls {}", names.join(", "));
        return Ok(());
    }
    let missing: Vec<_> = names.iter().copied().filter(|n| !here(n)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    install(&format!("{what} {}, which are not here", missing.join(", ")), &missing)
}

fn here(name: &str) -> bool {
    let status = sh::output(Command::new("dpkg-query").args(["-W", "-f", "${Status}", name]));
    status.is_ok_and(|s| s.contains("install ok installed"))
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
