//! `cargo xtask setup`: the libraries that backends load at run time, from pinned wheels, into the target directory.
//!
//! Nothing is installed and nothing is linked: what is fetched lies in `setup/BACKEND` of the target directory, and
//! `cargo clean` removes it. `cargo xtask setup interop` sets up SGLang in the same way.

mod apt;
mod fetch;
pub mod interop;
mod pins;
mod place;
mod python;

use std::env::consts;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

pub use pins::{PINS, Pin};

use crate::sh::{self, Result};

#[derive(Debug, clap::Args)]
pub struct SetupArgs {
    /// Only these: backends, whose libraries are fetched, or `interop`, the SGLang that `cargo xtask interop` needs
    /// (about 7 GB, only when it is named).
    #[arg(value_name = "NAME")]
    backends: Vec<String>,
}

pub fn run(args: &SetupArgs) -> Result<ExitCode> {
    let (interop, backends): (Vec<_>, Vec<_>) = args.backends.iter().cloned().partition(|n| n == interop::NAME);
    let chosen = if backends.is_empty() && !interop.is_empty() { Vec::new() } else { choose(&backends)? };
    let parent = parent()?;
    let mut failed = Vec::new();
    for pin in chosen {
        if own(pin).is_some() {
            eprintln!("{} is set, and names the library that is used instead of this one", pin.variable);
        }
        match library(pin, &parent) {
            // Alone on standard output, for scripts.
            Ok(library) => println!("{}", library.display()),
            Err(e) => failed.push(format!("{}: {e}", pin.backend)),
        }
    }
    if !interop.is_empty() {
        match target().and_then(|target| interop::python(&target)) {
            Ok(python) => println!("{}", python.display()),
            Err(e) => failed.push(format!("{}: {e}", interop::NAME)),
        }
    }
    if failed.is_empty() { Ok(ExitCode::SUCCESS) } else { Err(failed.join("\n")) }
}

fn choose(names: &[String]) -> Result<Vec<&'static Pin>> {
    if let Some(odd) = names.iter().find(|n| !PINS.iter().any(|p| p.backend == n.as_str())) {
        let all: Vec<_> = PINS.iter().map(|p| p.backend).collect();
        return Err(format!("no library to set up for '{odd}'; there are {}, {}", all.join(", "), interop::NAME));
    }
    Ok(PINS.iter().filter(|p| names.is_empty() || names.iter().any(|n| n == p.backend)).collect())
}

/// The library that the user names for a backend.
pub fn own(pin: &Pin) -> Option<PathBuf> {
    std::env::var_os(pin.variable).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// The target directory.
pub fn target() -> Result<PathBuf> {
    let metadata = sh::metadata(&["--no-deps"])?;
    metadata["target_directory"]
        .as_str()
        .map(PathBuf::from)
        .ok_or_else(|| "cargo metadata names no target directory".into())
}

/// The folder of all backends' folders.
pub fn parent() -> Result<PathBuf> {
    Ok(target()?.join("setup"))
}

/// The library of a backend for a `kvt` that may not find it by itself, with the variable that names it. `None`: the
/// backend has none, or the user names one.
pub fn library_of(backend: &str) -> Result<Option<(&'static str, PathBuf)>> {
    let Some(pin) = PINS.iter().find(|p| p.backend == backend).filter(|p| own(p).is_none()) else { return Ok(None) };
    Ok(Some((pin.variable, library(pin, &parent()?)?)))
}

/// The library of a backend, fetched when it is not here.
pub fn library(pin: &Pin, parent: &Path) -> Result<PathBuf> {
    let wheel = pin.wheel(consts::OS, consts::ARCH)?;
    let place = place::Place::new(parent, pin, wheel);
    apt::see(&format!("the library of {} needs", pin.backend), pin.packages)?;
    if let Some(library) = place.library() {
        return Ok(library);
    }
    python::ready()?;
    eprintln!("fetching {} {} (once) ...", pin.package, pin.version);
    let part = place.part()?;
    let file = fetch::wheel(pin, wheel, part.path())?;
    fetch::unpack(pin, &file, &part.unpacked())?;
    stand_ins(pin, &part.unpacked())?;
    place.put(&part)
}

/// Make what the loader asks for and the library never calls: links to a library that is there.
fn stand_ins(pin: &Pin, unpacked: &Path) -> Result<()> {
    let Some((like, names)) = pin.stand_ins else { return Ok(()) };
    let Some(folder) = Path::new(pin.library).parent().map(|p| unpacked.join(p)) else { return Ok(()) };
    names.iter().try_for_each(|name| {
        let link = folder.join(name);
        std::os::unix::fs::symlink(like, &link).map_err(|e| format!("cannot make {}: {e}", link.display()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_name_all_are_set_up() {
        assert_eq!(choose(&[]).unwrap().len(), PINS.len());
        assert_eq!(choose(&["nixl".into(), "nixl".into()]).unwrap()[0].backend, "nixl");
        assert!(choose(&["nixle".into()]).unwrap_err().contains("'nixle'; there are nixl, mooncake, interop"));
    }

    #[test]
    fn stand_ins_are_links_that_lead_somewhere() {
        let dir = std::env::temp_dir().join(format!("kv-xtask-stand-ins-{}", std::process::id()));
        let pin = PINS.iter().find(|p| p.backend == "mooncake").unwrap();
        let folder = dir.join(pin.library).parent().unwrap().to_owned();
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("libasio.so"), "x").unwrap();
        stand_ins(pin, &dir).unwrap();
        for name in pin.stand_ins.unwrap().1 {
            assert_eq!(std::fs::read_to_string(folder.join(name)).unwrap(), "x");
            assert!(std::fs::read_link(folder.join(name)).unwrap().is_relative(), "the folder is renamed later");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
