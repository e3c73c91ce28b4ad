//! Opening it: lazily bound, and with stand-ins for a vendor's drivers where those are what is missing.

use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LAZY, RTLD_LOCAL};

/// Libraries of Ascend's drivers that the build for it asks for. Under MC_FORCE_TCP nothing calls them.
pub(crate) const STAND_INS: [&str; 3] = ["libascendcl.so", "libllm_datadist.so", "libmetadef.so"];

/// Open a file, or a name that the loader knows. Lazily: functions of drivers that are not here stay unbound.
pub(crate) fn library(path: &Path) -> Result<Library, String> {
    let first = match lazily(path, RTLD_LOCAL) {
        Ok(library) => return Ok(library),
        Err(why) => why,
    };
    if !STAND_INS.iter().any(|name| first.contains(name)) {
        return Err(first);
    }
    // The loader takes for granted what is loaded under the name that is asked for.
    let near = near(path);
    for stand_in in &near {
        if let Ok(library) = lazily(stand_in, RTLD_GLOBAL) {
            // Never closed: the library needs it as long as it is here.
            std::mem::forget(library);
        }
    }
    if near.is_empty() { Err(first) } else { lazily(path, RTLD_LOCAL) }
}

fn lazily(path: &Path, scope: i32) -> Result<Library, String> {
    // SAFETY: the initialisers of the library and of those it needs; this is what the caller asked for.
    unsafe { Library::open(Some(path), RTLD_LAZY | scope) }.map_err(|e| e.to_string())
}

/// Stand-ins beside the library, or in a folder `stubs` there or next to its own.
fn near(library: &Path) -> Vec<PathBuf> {
    let Some(dir) = library.parent().filter(|d| d.is_absolute()) else { return Vec::new() };
    let dirs = [Some(dir.to_owned()), Some(dir.join("stubs")), dir.parent().map(|up| up.join("stubs"))];
    let found = |name: &&str| dirs.iter().flatten().map(|d| d.join(name)).find(|p| p.exists());
    STAND_INS.iter().filter_map(found).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stand_ins_are_found_beside_the_library_and_in_stubs() {
        let dir = std::env::temp_dir().join(format!("mooncake-open-{}", std::process::id()));
        let (lib, stubs) = (dir.join("mooncake"), dir.join("stubs"));
        for d in [&lib, &stubs] {
            std::fs::create_dir_all(d).unwrap();
        }
        let library = lib.join("libtransfer_engine.so");
        assert!(near(&library).is_empty());
        std::fs::write(lib.join(STAND_INS[0]), b"").unwrap();
        std::fs::write(stubs.join(STAND_INS[2]), b"").unwrap();
        assert_eq!(near(&library), [lib.join(STAND_INS[0]), stubs.join(STAND_INS[2])]);
        assert!(near(Path::new("libtransfer_engine.so")).is_empty(), "the loader's own path");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
