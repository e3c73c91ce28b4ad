//! Known faults of the rooms, put back one by one: each is found, by the invariant named here. The shards' faults:
//! `tests/mutants_shards.rs`.

use kv_core::mutants::Mutant;

use crate::explore::explore_for;
use crate::setup::Setup;
use crate::sizes::*;

const SOURCE: &str = "no source overwrite";
const ONCE: &str = "each (chunk, destination) is delivered at most once";
const ACK: &str = "ABORT_ACK implies that no write can land";
const FREE: &str = "pages are freed only after quiescence";
const FREE_ONCE: &str = "pages are freed at most once";
const RESURRECTION: &str = "no resurrection";
const CAUSE: &str = "the first cause wins";
const TERMINAL: &str = "terminal states absorb";
const LANDED: &str = "Success implies that every byte landed";
const TOLD: &str = "Failed is told when every write settled";
const BACK: &str = "every path gives back everything";

/// The fault, where it shows, and by what.
const TABLE: &[(Mutant, Setup, &str)] = &[
    (Mutant::PopAllOnFailure, ONE_EACH, ACK),
    (Mutant::DischargeOnError, ONE_EACH, ACK),
    (Mutant::ErrorProvesQuiet, ONE_EACH, SOURCE),
    (Mutant::SourceFreeAtTerminal, ONE_EACH, SOURCE),
    (Mutant::DoublePostOnRetry, BAD_NETWORK, ONCE),
    (Mutant::SuccessBeforeSiblings, TWO_DECODES, LANDED),
    (Mutant::SuccessAfterAnyChunk, ONE_EACH, LANDED),
    (Mutant::SenderLeavesSuccess, ONE_EACH, TERMINAL),
    (Mutant::SenderLastReasonWins, ONE_EACH, CAUSE),
    (Mutant::PostAfterFailure, TWO_DECODES, RESURRECTION),
    (Mutant::StartBeforeMetadata, ONE_EACH, LANDED),
    (Mutant::ClearForgetsRetained, ONE_EACH, ACK),
    (Mutant::CountedTwice, ONE_EACH, BACK),
    (Mutant::DrainNotSaid, ONE_EACH, BACK),
    (Mutant::FailedBeforeSettled, TOWARDS_0523, TOLD),
    (Mutant::CountMessagesNotRanks, DUPLICATES, LANDED),
    (Mutant::AcceptUnaskedRank, DUPLICATES, LANDED),
    (Mutant::ReceiverLeavesSuccess, ONE_EACH, TERMINAL),
    (Mutant::ReceiverLeavesFailed, ONE_EACH, TERMINAL),
    (Mutant::ReceiverLastReasonWins, ONE_EACH, CAUSE),
    (Mutant::AckOfAnyGeneration, BAD_NETWORK, FREE),
    (Mutant::OneAckReleases, TWO_PREFILLS_ABORT, FREE),
    (Mutant::AckCountedTwice, DUPLICATES, FREE),
    (Mutant::ReleaseAtAbort, ONE_EACH, FREE),
    (Mutant::ReleaseAtFailedStatus, ONE_EACH, FREE),
    (Mutant::ReleaseAtClear, ONE_EACH, FREE),
    (Mutant::RepeatedAbortTakesPagesBack, ONE_EACH, FREE_ONCE),
    (Mutant::PartialPublishForgotten, HALF_PUBLISHED, FREE),
    (Mutant::ReleaseWithoutProof, DEADLINES, FREE),
    (Mutant::SuccessKeepsPages, ONE_EACH, BACK),
];

#[test]
fn each_known_fault_is_found() {
    println!("| fault put back | found by | states | steps | time |\n|---|---|---|---|---|");
    let mut missed = Vec::new();
    for (mutant, setup, invariant) in TABLE {
        let found = explore_for(&setup.clone().with(*mutant), invariant);
        let Some((_, path)) = found.broken.iter().find(|(name, _)| name == invariant) else {
            let by: Vec<_> = found.broken.iter().map(|b| b.0).collect();
            missed.push(format!("{mutant:?} in \"{}\" does not break \"{invariant}\" but {by:?}", setup.name));
            continue;
        };
        let (steps, secs) = (path.len(), found.took.as_secs_f64());
        println!("| {mutant:?} | {invariant} | {} | {steps} | {secs:.2} s |", found.states);
    }
    assert!(missed.is_empty(), "{missed:#?}");
}
