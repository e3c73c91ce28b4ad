//! Known faults put back (feature `mutants`): which of them the corpus finds, and how to find the others.

use std::io;
use std::time::Duration;

use kv_core::mutants::{self, Mutant};

use crate::{Target, corpus, driver};

/// Every known fault.
pub const ALL: &[Mutant] = &[
    Mutant::PopAllOnFailure,
    Mutant::DischargeOnError,
    Mutant::ErrorProvesQuiet,
    Mutant::SourceFreeAtTerminal,
    Mutant::DoublePostOnRetry,
    Mutant::SuccessBeforeSiblings,
    Mutant::SuccessAfterAnyChunk,
    Mutant::SenderLeavesSuccess,
    Mutant::SenderLastReasonWins,
    Mutant::PostAfterFailure,
    Mutant::StartBeforeMetadata,
    Mutant::ClearForgetsRetained,
    Mutant::CountedTwice,
    Mutant::DrainNotSaid,
    Mutant::FailedBeforeSettled,
    Mutant::CountMessagesNotRanks,
    Mutant::AcceptUnaskedRank,
    Mutant::ReceiverLeavesSuccess,
    Mutant::ReceiverLeavesFailed,
    Mutant::ReceiverLastReasonWins,
    Mutant::AckOfAnyGeneration,
    Mutant::OneAckReleases,
    Mutant::AckCountedTwice,
    Mutant::ReleaseAtAbort,
    Mutant::ReleaseAtFailedStatus,
    Mutant::ReleaseAtClear,
    Mutant::RepeatedAbortTakesPagesBack,
    Mutant::PartialPublishForgotten,
    Mutant::ReleaseWithoutProof,
    Mutant::SuccessKeepsPages,
    Mutant::ForgetAckTargetsAtClear,
    Mutant::ReuseResetsOutstanding,
    Mutant::AckIgnoresClearedLives,
    Mutant::LateStatusCreatesRoom,
    Mutant::DeadlineBeatsCompletion,
    Mutant::ForgetOpAtError,
];

/// The targets that run the rooms.
fn targets() -> impl Iterator<Item = &'static Target> {
    ["room_sender", "room_receiver", "shards"].into_iter().filter_map(crate::target)
}

/// The first target and file that fail with this fault put back.
///
/// # Errors
/// The corpus cannot be read.
pub fn found_by(mutant: Mutant) -> io::Result<Option<String>> {
    for target in targets() {
        for (file, input) in corpus::read(&corpus::dir(target))? {
            if !passes(mutant, target, &input) {
                return Ok(Some(format!("{}/{file}", target.name)));
            }
        }
    }
    Ok(None)
}

fn passes(mutant: Mutant, target: &Target, input: &[u8]) -> bool {
    mutants::set(Some(mutant));
    let passes = driver::passes(target, input);
    mutants::set(None);
    passes
}

/// Fuzz with this fault put back, for at most `time` a target: the smallest input found that fails with it and passes
/// without.
///
/// # Errors
/// The corpus cannot be read.
pub fn hunt(mutant: Mutant, time: Duration, seed: u64) -> io::Result<Option<(&'static Target, Vec<u8>)>> {
    for target in targets() {
        let inputs: Vec<_> = corpus::read(&corpus::dir(target))?.into_iter().map(|(_, input)| input).collect();
        mutants::set(Some(mutant));
        let report = driver::run(target, &inputs, time, seed);
        mutants::set(None);
        if let Some(input) = report.crashes.into_iter().find(|input| driver::passes(target, input)) {
            return Ok(Some((target, input)));
        }
    }
    Ok(None)
}
