//! The libraries that backends load are here, or are fetched. Where that fails, a backend that is asked for fails.

use std::path::{Path, PathBuf};

use super::{Step, required};
use crate::setup::{self, PINS, Pin};
use crate::sh::Result;

pub fn run() -> Result<Step> {
    let parent = setup::parent()?;
    let found = PINS.iter().map(|pin| (pin.backend, find(pin, setup::own(pin), &parent)));
    judge(found.collect(), &required::backends().unwrap_or_default())
}

/// Which library a backend has.
fn find(pin: &Pin, own: Option<PathBuf>, parent: &Path) -> Result<String> {
    match own {
        Some(own) => Ok(format!("{} is set by you, nothing is fetched: {}", pin.variable, own.display())),
        None => setup::library(pin, parent).map(|library| library.display().to_string()),
    }
}

fn judge(found: Vec<(&str, Result<String>)>, required: &[String]) -> Result<Step> {
    let (mut here, mut missing, mut fails) = (Vec::new(), Vec::new(), false);
    for (backend, result) in found {
        match result {
            Ok(text) => here.push(format!("{backend}: {text}")),
            Err(e) => {
                let asked = required.iter().any(|r| r == backend);
                fails |= asked;
                let note = if asked { format!(" ({} names it)", required::VARIABLE) } else { String::new() };
                missing.push(format!("{backend} has no library{note}: {e}"));
            }
        }
    }
    match (missing.is_empty(), fails) {
        (true, _) => Ok(Step::Passed(here.join("; "))),
        (false, true) => Err(missing.join("; ")),
        (false, false) => Ok(Step::Skipped(missing.join("; "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_fails_only_when_asked_for() {
        let found = || vec![("one", Ok("lib".into())), ("two", Err("no network".into()))];
        let Ok(Step::Skipped(why)) = judge(found(), &["tcp".into(), "one".into()]) else { panic!("not a skip") };
        assert_eq!(why, "two has no library: no network");
        let Err(e) = judge(found(), &["two".into()]) else { panic!("not a failure") };
        assert_eq!(e, "two has no library (KV_REQUIRE_BACKENDS names it): no network");
        let Ok(Step::Passed(text)) = judge(found()[..1].to_vec(), &["two".into()]) else { panic!("not passed") };
        assert_eq!(text, "one: lib");
    }

    #[test]
    fn a_library_of_the_users_own_is_left_alone() {
        // The folder cannot be made: a try to fetch would fail.
        let found = find(&PINS[0], Some("my/lib.so".into()), Path::new("\0"));
        assert_eq!(found, Ok("KV_NIXL_LIB is set by you, nothing is fetched: my/lib.so".into()));
    }
}
