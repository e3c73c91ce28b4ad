//! Negative controls: with a known fault put back, the corpus alone makes a target panic.
#![allow(clippy::expect_used)] // a test that cannot set up fails

use kv_core::mutants::Mutant;
use kv_fuzz::faults::{ALL, found_by};

/// Faults that no input of the corpus shows; the model of the rooms and its tests do (`kv-testkit/MUTANTS.md`).
const MISSED: &[Mutant] = &[
    // A decode that waits for proof alone sends its ABORT again, and is acked then: late, but for good.
    Mutant::ForgetAckTargetsAtClear,
    // Only the shards' own order of work tells: the room reports a failure that is true.
    Mutant::DeadlineBeatsCompletion,
];

#[test]
fn the_corpus_finds_known_faults() {
    // Hundreds of panics are expected here.
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let found: Vec<_> = ALL.iter().map(|m| (*m, found_by(*m).expect("a corpus"))).collect();
    std::panic::set_hook(loud);
    for (mutant, by) in &found {
        println!("{mutant:?}: {}", by.as_deref().unwrap_or("not found"));
    }
    let missed: Vec<_> = found.iter().filter(|(_, by)| by.is_none()).map(|(m, _)| *m).collect();
    assert_eq!(missed, MISSED, "the corpus finds other faults than before");
}
