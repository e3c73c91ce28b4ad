//! `cargo xtask setup`: the libraries that backends load at run time, from pinned wheels, into the target directory.
//!
//! Nothing is installed and nothing is linked: what is fetched lies in `setup/BACKEND` of the target directory, and
//! `cargo clean` removes it.

mod fetch;
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
    /// Only these backends.
    #[arg(value_name = "BACKEND")]
    backends: Vec<String>,
}

pub fn run(args: &SetupArgs) -> Result<ExitCode> {
    let chosen = choose(&args.backends)?;
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
    if failed.is_empty() { Ok(ExitCode::SUCCESS) } else { Err(failed.join("\n")) }
}

fn choose(names: &[String]) -> Result<Vec<&'static Pin>> {
    if let Some(odd) = names.iter().find(|n| !PINS.iter().any(|p| p.backend == n.as_str())) {
        let all: Vec<_> = PINS.iter().map(|p| p.backend).collect();
        return Err(format!("no library to set up for '{odd}'; there are {}", all.join(", ")));
    }
    Ok(PINS.iter().filter(|p| names.is_empty() || names.iter().any(|n| n == p.backend)).collect())
}

/// The library that the user names for a backend.
pub fn own(pin: &Pin) -> Option<PathBuf> {
    std::env::var_os(pin.variable).filter(|v| !v.is_empty()).map(PathBuf::from)
}

/// The folder of all backends' folders.
pub fn parent() -> Result<PathBuf> {
    let metadata = sh::metadata(&["--no-deps"])?;
    let target = metadata["target_directory"].as_str().ok_or("cargo metadata names no target directory")?;
    Ok(Path::new(target).join("setup"))
}

/// The library of a backend, fetched when it is not here.
pub fn library(pin: &Pin, parent: &Path) -> Result<PathBuf> {
    let wheel = pin.wheel(consts::OS, consts::ARCH)?;
    let place = place::Place::new(parent, pin, wheel);
    if let Some(library) = place.library() {
        return Ok(library);
    }
    python::ready()?;
    eprintln!("fetching {} {} (once) ...", pin.package, pin.version);
    let part = place.part()?;
    let file = fetch::wheel(pin, wheel, part.path())?;
    fetch::unpack(pin, &file, &part.unpacked())?;
    place.put(&part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_name_all_are_set_up() {
        assert_eq!(choose(&[]).unwrap().len(), PINS.len());
        assert_eq!(choose(&["nixl".into(), "nixl".into()]).unwrap()[0].backend, "nixl");
        assert!(choose(&["nixle".into()]).unwrap_err().contains("'nixle'; there are nixl"));
    }
}
