//! Known faults, put back one by one to show that the tests find them (feature `mutants`, never part of a release).
//!
//! Each name stands for a fault that a system of this kind has shipped, or that a careless change would bring. The
//! code says `mutant!(Name)` where the fault would be; without the feature that is the literal `false`.

/// A fault to put back.
///
/// The first group lives in the sender room, the second in the receiver room, the third in the shards around them.
#[cfg(feature = "mutants")]
#[allow(missing_docs)] // each name says it
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Mutant {
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
    RepeatedAbortTakesPagesBack,
    PartialPublishForgotten,
    ReleaseWithoutProof,
    SuccessKeepsPages,

    ForgetAckTargetsAtClear,
    ReuseResetsOutstanding,
    AckIgnoresClearedLives,
    LateStatusCreatesRoom,
    DeadlineBeatsCompletion,
    ForgetOpAtError,
    OnePieceIsTheWrite,
    PieceErrorHushesSiblings,
}

#[cfg(feature = "mutants")]
mod active {
    use std::cell::Cell;

    use super::Mutant;

    thread_local! {
        static ACTIVE: Cell<Option<Mutant>> = const { Cell::new(None) };
    }

    /// Put this fault back, or none, on this thread.
    pub fn set(mutant: Option<Mutant>) {
        ACTIVE.set(mutant);
    }

    /// Whether this fault is put back on this thread.
    pub fn is_active(mutant: Mutant) -> bool {
        ACTIVE.get() == Some(mutant)
    }
}

#[cfg(feature = "mutants")]
pub use active::{is_active, set};

#[cfg(feature = "mutants")]
macro_rules! mutant {
    ($name:ident) => {
        $crate::mutants::is_active($crate::mutants::Mutant::$name)
    };
}

#[cfg(not(feature = "mutants"))]
macro_rules! mutant {
    ($name:ident) => {
        false
    };
}

pub(crate) use mutant;
