//! Running the checker.

use std::time::{Duration, Instant};

use stateright::{Checker, HasDiscoveries, Model};

use crate::setup::Setup;
use crate::step::Action;

/// What an exploration found.
pub struct Explored {
    /// Unique states.
    pub states: usize,
    pub took: Duration,
    /// Invariants broken, and the way there; shortest first.
    pub broken: Vec<(&'static str, Vec<Action>)>,
    /// What was reached of what must be reached.
    pub reached: Vec<&'static str>,
}

/// Every state, or up to the first ones that break an invariant.
pub fn explore(setup: &Setup, threads: usize) -> Explored {
    explore_until(setup, threads, HasDiscoveries::AnyFailures)
}

/// Every state, or up to the first one that breaks this invariant.
#[cfg(feature = "mutants")]
pub fn explore_for(setup: &Setup, invariant: &'static str) -> Explored {
    explore_until(setup, 1, HasDiscoveries::AnyOf([invariant].into()))
}

fn explore_until(setup: &Setup, threads: usize, until: HasDiscoveries) -> Explored {
    let started = Instant::now();
    let checker = setup.clone().checker().threads(threads).finish_when(until).spawn_bfs().join();
    let discoveries = checker.discoveries();
    let mut broken = Vec::new();
    let mut reached = Vec::new();
    for (name, path) in discoveries {
        if name.starts_with("reached: ") {
            reached.push(name);
        } else {
            broken.push((name, path.into_actions()));
        }
    }
    broken.sort_by_key(|(name, path)| (path.len(), *name));
    Explored { states: checker.unique_state_count(), took: started.elapsed(), broken, reached }
}

/// Panics unless every state keeps every invariant, and `reached` is reached.
pub fn assert_sound(setup: &Setup, reached: &[&str]) {
    let found = explore(setup, 1);
    if let Some((name, path)) = found.broken.first() {
        panic!("{}: \"{name}\" is broken by {path:#?}", setup.name);
    }
    for what in reached {
        assert!(found.reached.contains(what), "{}: not {what}", setup.name);
    }
}
