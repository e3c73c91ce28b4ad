//! Files of this repository name no place of one machine, and stay short.

use std::fs;
use std::process::Command;

use super::Step;
use crate::sh::{self, Result};

/// Longest Rust file that is still one idea; longer ones are named, not refused.
const LONG: usize = 650;

pub fn run() -> Result<Step> {
    let Ok(list) = sh::output(Command::new("git").args(["ls-files"])) else {
        return Ok(Step::Skipped("this is no git checkout".into()));
    };
    let (mut places, mut long) = (Vec::new(), Vec::new());
    for path in list.lines() {
        let Ok(text) = fs::read_to_string(path) else { continue }; // binary, or deleted in the work tree
        if let Some(line) = first_place(&text) {
            places.push(format!("{path}:{line}"));
        }
        let lines = text.lines().count();
        if path.ends_with(".rs") && lines > LONG {
            long.push(format!("{path} ({lines} lines)"));
        }
    }
    if !places.is_empty() {
        return Err(format!("a path of one machine in {}", places.join(", ")));
    }
    let text = if long.is_empty() { String::new() } else { format!("long files: {}", long.join(", ")) };
    Ok(Step::Passed(text))
}

/// First line that names a home or work directory of a machine.
fn first_place(text: &str) -> Option<usize> {
    // Put together here, so that this file does not name them.
    let places = ["home", "root", "work"].map(|dir| format!("/{dir}/"));
    let starts = |line: &str, at: usize| !line[..at].ends_with(|c: char| c.is_alphanumeric() || "._-})>".contains(c));
    let names = |line: &str| places.iter().any(|p| line.match_indices(p.as_str()).any(|(at, _)| starts(line, at)));
    text.lines().position(names).map(|i| i + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_places_and_leaves_relative_paths_alone() {
        let place = format!("fine\nsee /{}/me/x\n", "home");
        assert_eq!(first_place(&place), Some(2));
        let relative = format!("target/{0}/x and ./{0}/y and https://host.example/{0}/z", "work");
        assert_eq!(first_place(&relative), None);
    }
}
