//! The cases. To add one, add a row to the file it belongs to.

mod aborts;
mod basic;
mod deaths;
mod registry;
mod topology;

use super::case::Case;

/// All, in the order of the table.
pub fn all() -> Vec<Case> {
    let files = [basic::cases(), topology::cases(), registry::cases(), aborts::cases(), deaths::cases()];
    files.into_iter().flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::super::case::{Step, Who};
    use super::super::options;
    use super::*;

    #[test]
    fn names_are_unique_and_are_names_of_files() {
        let mut names: Vec<_> = all().iter().map(|c| c.name).collect();
        assert!(names.iter().all(|n| n.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-')));
        names.sort_unstable();
        assert!(names.windows(2).all(|w| w[0] != w[1]), "{names:?}");
    }

    #[test]
    fn rules_are_about_rooms_and_actors_that_the_case_has() {
        for case in all() {
            let started: Vec<Who> =
                case.steps().iter().filter_map(|s| if let Step::Start(w) = s { Some(*w) } else { None }).collect();
            for rule in &case.rules {
                assert!(started.contains(&rule.who), "{}: {:?} is never started", case.name, rule.who);
                let rooms = case.options(rule.who).rooms();
                assert!(options::rooms(rule.rooms).iter().all(|r| rooms.contains(r)), "{}: {rule:?}", case.name);
            }
            assert!(case.ends.iter().all(|(who, _, _)| started.contains(who)), "{}", case.name);
        }
    }
}
