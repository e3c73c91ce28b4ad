//! Where the library may be.

use std::fmt;
use std::path::{Path, PathBuf};

const FILE: &str = "libtransfer_engine.so";
/// The folder of every Mooncake wheel.
const PACKAGE: &str = "mooncake";
/// The user's own choice.
const VARIABLE: &str = "KV_MOONCAKE_LIB";
/// Where `cargo xtask setup` puts it, below the target directory that our programs lie in.
const DOWNLOAD: &str = "setup/mooncake";

/// A place to look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// Who names it.
    pub named_by: String,
    /// The file, absolute; or the bare name, for the system's loader.
    pub path: PathBuf,
}

/// A place that did not help.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tried {
    /// Which.
    pub place: Place,
    /// What was wrong.
    pub why: String,
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.place.path.display(), self.place.named_by, self.why)
    }
}

impl Place {
    fn new(named_by: &str, path: impl Into<PathBuf>) -> Self {
        Self { named_by: named_by.into(), path: path.into() }
    }

    /// Why it is not worth opening.
    pub(crate) fn absent(&self) -> Option<String> {
        if !self.path.is_absolute() || self.path.exists() {
            return None;
        }
        let python_only = self.path.with_file_name("engine.so").exists();
        Some(if python_only {
            "the Mooncake package there has Python's engine.so alone, without the C API".into()
        } else {
            "no such file".into()
        })
    }
}

/// Every place, in the order they are tried: the configured one alone if there is one; else the one of `KV_MOONCAKE_LIB`
/// alone if it is set; else the project's own download, the packages of Python installations, and the system's loader.
pub fn places(configured: Option<&Path>) -> Vec<Place> {
    let named = |by, path: &Path| vec![Place::new(by, std::path::absolute(path).unwrap_or_else(|_| path.into()))];
    if let Some(path) = configured {
        return named("the configuration", path);
    }
    if let Some(path) = std::env::var_os(VARIABLE).filter(|v| !v.is_empty()) {
        return named(VARIABLE, Path::new(&path));
    }
    let mut out = Vec::new();
    let exe = std::env::current_exe().unwrap_or_default();
    // A place without any is named all the same: whoever looks for the library learns where it would be found.
    let mut look = |by: &str, dirs: Vec<PathBuf>, best: Option<PathBuf>| {
        let found: Vec<PathBuf> = dirs.iter().filter_map(|d| package(d)).collect();
        let none = best.filter(|_| found.is_empty()).map(|d| d.join(PACKAGE).join(FILE));
        out.extend(found.into_iter().chain(none).map(|path| Place::new(by, path)));
    };
    let beside: Vec<&Path> = exe.ancestors().skip(1).take(4).collect();
    let target = beside.iter().find(|d| d.ends_with("target")).or(beside.first()).map(|d| d.join(DOWNLOAD));
    look("cargo xtask setup mooncake", beside.iter().map(|d| d.join(DOWNLOAD)).collect(), target);
    let sites = site_packages();
    let first = sites.first().cloned();
    look("Python's packages", sites, first);
    out.push(Place::new("the loader's path", FILE));
    out
}

/// The library of the package unpacked in `site`, if there is the package: most builds of it have no library.
fn package(site: &Path) -> Option<PathBuf> {
    let folder = site.join(PACKAGE);
    let file = folder.join(FILE);
    (file.exists() || folder.join("engine.so").exists()).then_some(file)
}

/// Directories of Python packages: of the active environment, of the `python3` on the path, the user's, the system's.
fn site_packages() -> Vec<PathBuf> {
    let var = |name: &str| std::env::var_os(name).map(PathBuf::from);
    let mut prefixes: Vec<PathBuf> = [var("VIRTUAL_ENV"), var("CONDA_PREFIX")].into_iter().flatten().collect();
    let path = std::env::var_os("PATH").unwrap_or_default();
    let python = std::env::split_paths(&path).map(|dir| dir.join("python3")).find(|p| p.exists());
    // The link's own place first: it may be that of an environment.
    for python in python.iter().cloned().chain(python.as_ref().and_then(|p| p.canonicalize().ok())) {
        prefixes.extend(python.parent().and_then(Path::parent).map(PathBuf::from));
    }
    prefixes.extend(var("HOME").map(|home| home.join(".local")));
    prefixes.extend(["/usr/local".into(), "/usr".into()]);
    let mut out: Vec<PathBuf> = Vec::new();
    for lib in prefixes.iter().map(|p| p.join("lib")) {
        let Ok(entries) = std::fs::read_dir(&lib) else { continue };
        for name in entries.filter_map(|e| e.ok()?.file_name().into_string().ok()) {
            if name.starts_with("python3") {
                out.extend(["site-packages", "dist-packages"].map(|d| lib.join(&name).join(d)));
            }
        }
    }
    let mut seen = std::collections::HashSet::new();
    out.retain(|p| p.is_dir() && seen.insert(p.clone()));
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_without_the_c_api_is_named_as_that() {
        let dir = std::env::temp_dir().join(format!("mooncake-find-{}", std::process::id()));
        let folder = dir.join(PACKAGE);
        std::fs::create_dir_all(&folder).unwrap();
        assert_eq!(package(&dir), None, "some other folder of that name");
        std::fs::write(folder.join("engine.so"), b"").unwrap();
        let place = Place::new("x", package(&dir).unwrap());
        assert!(place.absent().unwrap().contains("without the C API"));
        std::fs::write(folder.join(FILE), b"").unwrap();
        assert_eq!(package(&dir), Some(folder.join(FILE)));
        assert_eq!(place.absent(), None);
        std::fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn the_loader_comes_last_and_a_configured_place_alone() {
        if std::env::var_os(VARIABLE).is_none() {
            assert_eq!(places(None).last().map(|p| p.path.clone()), Some(FILE.into()));
        }
        assert_eq!(places(Some(Path::new("/x/y.so"))), [Place::new("the configuration", "/x/y.so")]);
    }
}
