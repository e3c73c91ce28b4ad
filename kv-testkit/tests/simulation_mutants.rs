//! Known faults, put back one by one: the simulation finds them.
// A test reports by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use kv_core::mutants::{Mutant, set};
use kv_testkit::sim::{SimOptions, run};

use Mutant::*;

/// What it finds.
const FOUND: &[Mutant] = &[
    PopAllOnFailure,
    DischargeOnError,
    ErrorProvesQuiet,
    SourceFreeAtTerminal,
    DoublePostOnRetry,
    SuccessBeforeSiblings,
    SuccessAfterAnyChunk,
    SenderLeavesSuccess,
    SenderLastReasonWins,
    PostAfterFailure,
    StartBeforeMetadata,
    ClearForgetsRetained,
    CountedTwice,
    DrainNotSaid,
    FailedBeforeSettled,
    CountMessagesNotRanks,
    AcceptUnaskedRank,
    ReceiverLeavesSuccess,
    ReceiverLeavesFailed,
    ReceiverLastReasonWins,
    AckOfAnyGeneration,
    OneAckReleases,
    AckCountedTwice,
    ReleaseAtAbort,
    ReleaseAtFailedStatus,
    ReleaseAtClear,
    PartialPublishForgotten,
    ReleaseWithoutProof,
    SuccessKeepsPages,
    ForgetAckTargetsAtClear,
    ReuseResetsOutstanding,
    AckIgnoresClearedLives,
    LateStatusCreatesRoom,
    DeadlineBeatsCompletion,
    ForgetOpAtError,
];

#[test]
fn the_simulation_finds_known_faults() {
    // Panics are reports here.
    std::panic::set_hook(Box::new(|_| ()));
    let mut missed = Vec::new();
    let only = std::env::var("ONLY").unwrap_or_default();
    for mutant in FOUND.iter().filter(|m| format!("{m:?}").contains(&only)) {
        set(Some(*mutant));
        let result = run(SimOptions::new(1, 6_000));
        set(None);
        match result {
            Ok(_) => missed.push(*mutant),
            Err(f) => println!("| {mutant:?} | {} | {} | {} |", f.seed, f.lives, f.found[0].replace('\n', " ")),
        }
    }
    drop(std::panic::take_hook());
    assert!(missed.is_empty(), "missed: {missed:?}");
}
