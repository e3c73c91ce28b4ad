//! Known faults, put back one by one: the simulation finds them, and says in which episode and after how many rooms.
// A test reports by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use Mutant::*;
use kv_core::mutants::{Mutant, set};
use kv_testkit::sim::{SimOptions, run};

/// What it finds from seed 1 on.
///
/// Not here: `ReceiverLastReasonWins` (a handle keeps the first reason by itself), `AckOfAnyGeneration` (the shard finds a
/// room by the ACK's generation, so a room never sees another's), `ForgetAckTargetsAtClear` (decode asks again, and is
/// acked then), `DeadlineBeatsCompletion` (both in one step of a shard: too rare). The model, the scenarios of
/// `mutants_shards` and the lifecycle tests find these.
const FOUND: [Mutant; 32] = [
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
    OneAckReleases,
    AckCountedTwice,
    ReleaseAtAbort,
    ReleaseAtFailedStatus,
    ReleaseAtClear,
    RepeatedAbortTakesPagesBack,
    PartialPublishForgotten,
    ReleaseWithoutProof,
    SuccessKeepsPages,
    ReuseResetsOutstanding,
    AckIgnoresClearedLives,
    LateStatusCreatesRoom,
    ForgetOpAtError,
];

#[test]
fn the_simulation_finds_known_faults() {
    // Panics are reports here.
    std::panic::set_hook(Box::new(|_| ()));
    println!("| fault | seed of the episode | room lives before | what was seen first |");
    println!("|---|---|---|---|");
    let mut missed = Vec::new();
    for mutant in FOUND {
        set(Some(mutant));
        let result = run(SimOptions::new(1, 40_000));
        set(None);
        match result {
            Ok(_) => missed.push(mutant),
            Err(f) => {
                let seen = f.found.first().cloned().unwrap_or_default();
                let seen: String = seen.chars().take(140).collect();
                println!("| `{mutant:?}` | {} | {} | {seen} |", f.seed, f.lives);
            }
        }
    }
    drop(std::panic::take_hook());
    assert!(missed.is_empty(), "missed: {missed:?}");
}
