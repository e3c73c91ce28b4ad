//! The inputs that are checked in: `fuzz/corpus/TARGET/FILE`.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::Target;

/// Where the corpus of a target is in the repository.
pub fn dir(target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(target.name)
}

/// Every input in `dir` with its file's name, in order of names.
///
/// # Errors
/// The directory or a file cannot be read.
pub fn read(dir: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut out = Vec::new();
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_file() {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            out.push((name, fs::read(&path)?));
        }
    }
    out.sort();
    Ok(out)
}

/// The name of an input's file: `seed` or `find`, and a hash of the bytes.
pub fn file_name(kind: &str, bytes: &[u8]) -> String {
    // FNV-1a, for a name that is the same everywhere.
    let hash = bytes.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3));
    format!("{kind}-{hash:016x}")
}

/// Write the target's seeds where they are missing; how many that was.
///
/// # Errors
/// A file cannot be written.
pub fn write_seeds(target: &Target, dir: &Path) -> io::Result<usize> {
    fs::create_dir_all(dir)?;
    let mut written = 0;
    for seed in (target.seeds)() {
        let path = dir.join(file_name("seed", &seed));
        if !path.exists() {
            fs::write(path, seed)?;
            written += 1;
        }
    }
    Ok(written)
}
