//! `cargo xtask setup interop`: a Python environment with the SGLang that `cargo xtask interop` runs against.
//!
//! A virtual environment cannot be renamed, so it is made in its place; a stamp, written last, tells a whole one from
//! one that a killed run left.

use std::env::consts;
use std::fs;
use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{apt, fetch, python};
use crate::sh::{self, Result};

/// Name on the command line, and of the folder.
pub const NAME: &str = "interop";
/// A Python with SGLang of the user's own.
const OWN: &str = "KV_INTEROP_PYTHON";
/// In the environment: the requirement files that it was made from.
const STAMP: &str = "kv-setup.stamp";
/// What the environment takes, and pip while it unpacks, in GB.
const ROOM: u64 = 10;
/// pip's downloads from this size on are shown, in MB.
const LARGE: f64 = 50.0;
/// Where the wheels of torch, SGLang and NIXL are for.
const VERSIONS: std::ops::RangeInclusive<u32> = 11..=13;

/// The requirement files, and what pip is told besides.
const FILES: [(&str, &[&str]); 2] =
    [("interop/requirements.txt", &[]), ("interop/requirements-nodeps.txt", &["--no-deps"])];
/// Shared libraries that the wheels need: names of Debian packages, one a line.
const APT: &str = "interop/apt.txt";

/// The Python with SGLang; set up when it is not there.
pub fn python(target: &Path) -> Result<PathBuf> {
    if let Some(own) = std::env::var_os(OWN).filter(|v| !v.is_empty()).map(PathBuf::from) {
        eprintln!("{OWN} is set, nothing is fetched: {}", own.display());
        return if own.is_file() { Ok(own) } else { Err(format!("{OWN}={}: there is no such file", own.display())) };
    }
    let place = target.join("setup").join(NAME);
    let (python, stamp) = (place.join("bin").join("python"), place.join(STAMP));
    let wanted = wanted()?;
    packages()?;
    if python.is_file() && fs::read_to_string(&stamp).is_ok_and(|s| s == wanted) {
        return Ok(python);
    }
    platform(consts::OS, consts::ARCH)?;
    let base = base()?;
    if place.exists() {
        eprintln!("{} is half made, or of other requirements: making it anew", place.display());
        fs::remove_dir_all(&place).map_err(|e| format!("cannot remove {}: {e}", place.display()))?;
    }
    fs::create_dir_all(&place).map_err(|e| format!("cannot make {}: {e}", place.display()))?;
    space(&place)?;
    eprintln!("fetching SGLang and what it needs, about 7 GB (once; minutes), into {} ...", place.display());
    sh::output(Command::new(&base).args(["-m", "venv"]).arg(&place))
        .map_err(|e| format!("no virtual environment: {e}"))?;
    for (file, more) in FILES {
        pip(&python, file, more)?;
    }
    sh::output(
        Command::new(&python)
            .args(["-c", "import torch, nixl, zmq, importlib.util as u; assert u.find_spec('sglang')"]),
    )
    .map_err(|e| format!("what was fetched does not load: {e}"))?;
    fs::write(&stamp, wanted).map_err(|e| format!("cannot write {}: {e}", stamp.display()))?;
    Ok(python)
}

/// What the stamp of a whole environment says.
fn wanted() -> Result<String> {
    FILES.iter().map(|(file, _)| read(file)).collect()
}

fn read(file: &str) -> Result<String> {
    fs::read_to_string(file).map_err(|e| format!("cannot read {file}: {e}"))
}

fn platform(os: &str, arch: &str) -> Result<()> {
    if (os, arch) == ("linux", "x86_64") {
        return Ok(());
    }
    Err(format!(
        "SGLang's wheels are for linux on x86_64, this is {os} on {arch}; a Python with SGLang of your own can be named in {OWN}"
    ))
}

/// A CPython that the wheels are for, with venv.
fn base() -> Result<String> {
    python::ready()?;
    let names = std::iter::once("python3".to_owned()).chain(VERSIONS.map(|minor| format!("python3.{minor}")));
    let mut seen = Vec::new();
    for name in names {
        let ask = "import sys; print(sys.implementation.name, *sys.version_info[:2])";
        let Ok(text) = sh::output(Command::new(&name).args(["-c", ask])) else { continue };
        if fits(&text) {
            venv(&name)?;
            return Ok(name);
        }
        seen.push(format!("{name} is {}", text.trim()));
    }
    let (first, last) = (VERSIONS.start(), VERSIONS.end());
    Err(format!(
        "SGLang's wheels are for CPython 3.{first} to 3.{last}, and there is none in PATH ({}); install one, or name a \
         Python with SGLang of your own in {OWN}",
        seen.join(", ")
    ))
}

/// `cpython 3 11`
fn fits(text: &str) -> bool {
    let words: Vec<_> = text.split_whitespace().collect();
    matches!(words[..], ["cpython", "3", minor] if minor.parse().is_ok_and(|m| VERSIONS.contains(&m)))
}

fn venv(name: &str) -> Result<()> {
    let has = || sh::output(Command::new(name).args(["-c", "import ensurepip, venv"])).is_ok();
    if has() {
        return Ok(());
    }
    let missing = format!("{name} cannot make virtual environments here");
    apt::install(&missing, &[&format!("{name}-venv")])?;
    if has() { Ok(()) } else { Err(format!("{missing}, though {name}-venv is installed")) }
}

/// The Debian packages that the wheels need.
fn packages() -> Result<()> {
    let text = read(APT)?;
    let names: Vec<_> = text.lines().map(str::trim).filter(|l| !l.is_empty() && !l.starts_with('#')).collect();
    apt::see("SGLang's wheels need", &names)
}

/// Refuse to fill the disk.
fn space(place: &Path) -> Result<()> {
    let text = sh::output(Command::new("df").arg("-Pk").arg(place))?;
    let Some(free) = free_gb(&text) else { return Err(format!("df says what is not understood: {text}")) };
    if free >= ROOM {
        return Ok(());
    }
    Err(format!(
        "SGLang and what it needs take about 7 GB, {ROOM} GB while they are unpacked; {free} GB are free at {}",
        place.display()
    ))
}

/// The fourth column of `df -Pk`'s second line, in GB.
fn free_gb(text: &str) -> Option<u64> {
    let kib: u64 = text.lines().nth(1)?.split_whitespace().nth(3)?.parse().ok()?;
    Some(kib / (1000 * 1000))
}

/// Where pip fetches from is the user's configuration; what it fetches is pinned by hash.
fn pip(python: &Path, file: &str, more: &[&str]) -> Result<()> {
    let mut command = Command::new(python);
    command.args(["-m", "pip", "install", "--no-input", "--disable-pip-version-check", "--no-cache-dir"]);
    command.args(["--progress-bar", "off", "--require-hashes"]).args(more).args(["-r", file]);
    // Both in one pipe: pip's warnings are not for the screen, and its errors are shown below.
    let mut child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|e| format!("cannot run `{}`: {e}", sh::show(&command)))?;
    let errors = child.stderr.take().map(|e| std::thread::spawn(move || lines(e)));
    for line in
        child.stdout.take().map(|o| BufReader::new(o).lines().map_while(std::io::Result::ok)).into_iter().flatten()
    {
        if worth_showing(&line) {
            eprintln!("  {}", fetch::without_addresses(line.trim()));
        }
    }
    let status = child.wait().map_err(|e| format!("pip's status is lost: {e}"))?;
    if status.success() {
        return Ok(());
    }
    let errors = errors.and_then(|t| t.join().ok()).unwrap_or_default();
    Err(format!("pip cannot install {file}: {}", why(&errors)))
}

fn lines(from: impl std::io::Read) -> Vec<String> {
    BufReader::new(from).lines().map_while(std::io::Result::ok).collect()
}

/// `Downloading torch-2.9.1-....whl (899.7 MB)`, and the last step.
fn worth_showing(line: &str) -> bool {
    let line = line.trim();
    if line.starts_with("Installing collected packages") {
        return false;
    }
    let Some(size) = line.strip_prefix("Downloading ").and_then(|l| l.rsplit_once('(')).map(|(_, s)| s) else {
        return false;
    };
    match size.trim_end_matches(')').split_once(' ') {
        Some((n, "MB")) => n.parse::<f64>().is_ok_and(|n| n >= LARGE),
        Some((_, "GB")) => true,
        _ => false,
    }
}

fn why(errors: &[String]) -> String {
    let all = errors.join("\n");
    if all.contains("DO NOT MATCH THE HASHES") {
        return "a package is not the pinned one (its hash differs); nothing of it is used. Look whether your package \
                index serves what was published"
            .to_owned();
    }
    if ["connection broken", "timed out", "ProxyError", "Could not fetch URL"].iter().any(|w| all.contains(w)) {
        return "it does not reach its package index; see the network, the proxy (HTTPS_PROXY) and \
                `python3 -m pip config list`, then try again"
            .to_owned();
    }
    let last = errors.iter().rev().find(|l| l.contains("ERROR")).or(errors.last());
    fetch::without_addresses(last.map_or("it says nothing", String::as_str))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_large_downloads_are_shown() {
        assert!(worth_showing("  Downloading torch-2.9.1-cp311-cp311-manylinux_2_28_x86_64.whl (899.8 MB)"));
        assert!(!worth_showing("  Downloading idna-3.20-py3-none-any.whl (71 kB)"));
        assert!(!worth_showing("Collecting torch==2.9.1"));
    }

    #[test]
    fn pythons_that_the_wheels_are_for() {
        assert!(fits("cpython 3 11\n") && !fits("cpython 3 9\n") && !fits("pypy 3 11\n") && !fits(""));
        assert!(platform("linux", "x86_64").is_ok());
        assert!(platform("linux", "aarch64").unwrap_err().contains("linux on aarch64"));
    }

    #[test]
    fn free_space_is_in_the_fourth_column() {
        let text = "Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/x 100 50 42000000 50% /\n";
        assert_eq!(free_gb(text), Some(42));
        assert_eq!(free_gb("x\n"), None);
    }

    #[test]
    fn failures_say_what_to_do_and_no_address() {
        let line = |l: &str| why(&[l.to_owned()]);
        assert!(line("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES ...").contains("not the pinned one"));
        assert!(line("WARNING: Retrying after connection broken by 'host=index.example'").contains("HTTPS_PROXY"));
        assert_eq!(line("ERROR: odd https://me:secret@index.example/x"), "ERROR: odd (address)");
        assert_eq!(why(&[]), "it says nothing");
    }
}
