//! Where what was set up lies: whole or not at all, and marked with the hash of the wheel it came from.
//!
//! Each run works in a folder of its own and renames the result into place, so that a run that is interrupted leaves
//! nothing half done, and of two runs at the same time the second finds the work of the first.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process;
use std::time::{Duration, SystemTime};

use super::pins::{Pin, Wheel};
use crate::sh::Result;

/// File that holds the wheel's hash.
const MARKER: &str = "wheel.sha256";
/// What is between the names of a backend and of a run in that of a run's own folder.
const PART: &str = ".part-";
/// No run takes that long: a folder as old was left by one that was killed.
const LEFT: Duration = Duration::from_secs(24 * 60 * 60);

/// One backend's place in the folder of all.
#[derive(Debug)]
pub struct Place<'a> {
    parent: &'a Path,
    pin: &'a Pin,
    wheel: &'a Wheel,
}

impl<'a> Place<'a> {
    pub fn new(parent: &'a Path, pin: &'a Pin, wheel: &'a Wheel) -> Self {
        Self { parent, pin, wheel }
    }

    fn dir(&self) -> PathBuf {
        self.parent.join(self.pin.backend)
    }

    /// The library, when it is there and from the pinned wheel.
    pub fn library(&self) -> Option<PathBuf> {
        let library = self.dir().join(self.pin.library);
        let marker = fs::read_to_string(self.dir().join(MARKER)).unwrap_or_default();
        (marker.trim() == self.wheel.sha256 && library.is_file()).then_some(library)
    }

    /// A folder for this run alone.
    pub fn part(&self) -> Result<Part> {
        let failed = |path: &Path, e| format!("cannot make {}: {e}", path.display());
        fs::create_dir_all(self.parent).map_err(|e| failed(self.parent, e))?;
        self.sweep();
        // Process ids repeat where several machines share the folder.
        let start = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_nanos();
        let path = self.parent.join(format!("{}{PART}{}-{start}", self.pin.backend, process::id()));
        fs::create_dir(&path).map_err(|e| failed(&path, e))?;
        Ok(Part(path))
    }

    /// Remove what runs left that were killed.
    fn sweep(&self) {
        let start = format!("{}{PART}", self.pin.backend);
        for entry in fs::read_dir(self.parent).into_iter().flatten().flatten() {
            let age = entry.metadata().and_then(|m| m.modified()).ok().and_then(|t| t.elapsed().ok());
            if entry.file_name().to_string_lossy().starts_with(&start) && age.is_some_and(|a| a > LEFT) {
                // It is in nobody's way.
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }

    /// Put what a run unpacked into its place; the library there. What was there before goes with the run's folder.
    pub fn put(&self, part: &Part) -> Result<PathBuf> {
        let (new, dir) = (part.unpacked(), self.dir());
        let marker = new.join(MARKER);
        fs::write(&marker, self.wheel.sha256).map_err(|e| format!("cannot write {}: {e}", marker.display()))?;
        let failed = |e| format!("cannot put {} into its place: {e}", dir.display());
        // Each time round, another run was faster; it put the same there, or a wheel of another pin.
        for n in 0..10 {
            if let Some(library) = self.library() {
                return Ok(library);
            }
            match fs::rename(&dir, part.0.join(format!("old-{n}"))) {
                Err(e) if e.kind() != ErrorKind::NotFound => return Err(failed(e)),
                _ => {}
            }
            match fs::rename(&new, &dir) {
                Ok(()) => return Ok(dir.join(self.pin.library)),
                Err(e) if matches!(e.kind(), ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists) => {}
                Err(e) => return Err(failed(e)),
            }
        }
        Err(format!("other runs keep changing {}; end them and try again", dir.display()))
    }
}

/// A run's own folder; removed when the run ends.
#[derive(Debug)]
pub struct Part(PathBuf);

impl Part {
    /// Where the wheel goes.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Where what is kept of it goes.
    pub fn unpacked(&self) -> PathBuf {
        self.0.join("unpacked")
    }
}

impl Drop for Part {
    fn drop(&mut self) {
        // A later run sweeps what cannot be removed now.
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::super::pins::PINS;
    use super::*;

    /// A folder that is removed at the end of the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            Self(std::env::temp_dir().join(format!("kv-xtask-{name}-{}", process::id())))
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn unpack(place: &Place<'_>, text: &str) -> Part {
        let part = place.part().unwrap();
        let library = part.unpacked().join(place.pin.library);
        fs::create_dir_all(library.parent().unwrap()).unwrap();
        fs::write(library, text).unwrap();
        part
    }

    fn names(dir: &Path) -> Vec<String> {
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn a_changed_pin_replaces_and_a_failed_run_leaves_nothing() {
        let folder = Folder::new("replace");
        let (one, two) = (&PINS[0].wheels[0], &PINS[0].wheels[1]);
        let place = Place::new(&folder.0, &PINS[0], one);
        assert_eq!(place.library(), None);
        drop(unpack(&place, "half"));
        assert!(names(&folder.0).is_empty());
        assert_eq!(place.library(), None);

        let library = place.put(&unpack(&place, "one")).unwrap();
        assert_eq!(place.library(), Some(library.clone()));

        let place = Place::new(&folder.0, &PINS[0], two);
        assert_eq!(place.library(), None, "of another pin");
        assert_eq!(place.put(&unpack(&place, "two")).unwrap(), library);
        assert_eq!(fs::read_to_string(&library).unwrap(), "two");
        assert_eq!(names(&folder.0), ["nixl"]);

        fs::remove_file(&library).unwrap();
        assert_eq!(place.library(), None, "a marker alone is not enough");
    }

    #[test]
    fn of_two_runs_the_second_finds_the_work_of_the_first() {
        let folder = Folder::new("twice");
        let place = Place::new(&folder.0, &PINS[0], &PINS[0].wheels[0]);
        let (first, second) = (unpack(&place, "first"), unpack(&place, "second"));
        let library = place.put(&first).unwrap();
        assert_eq!(place.put(&second).unwrap(), library);
        drop((first, second));
        assert_eq!(fs::read_to_string(&library).unwrap(), "first");
        assert_eq!(names(&folder.0), ["nixl"]);
    }
}
