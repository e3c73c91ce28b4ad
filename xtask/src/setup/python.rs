//! python3 with pip is what fetches and unpacks wheels; where we may, what is missing is installed.

use std::process::Command;

use super::apt;
use crate::sh::{self, Result};

/// What Debian and its kin call them.
const PACKAGES: [&str; 2] = ["python3", "python3-pip"];

/// See that there is python3 with pip. As root, where apt-get is, they are installed.
pub fn ready() -> Result<()> {
    let Some(missing) = missing() else { return Ok(()) };
    let packages = PACKAGES.join(" ");
    apt::install(missing, &PACKAGES)?;
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
