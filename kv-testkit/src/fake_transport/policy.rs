//! What becomes of an op when nobody decides it by hand.

use std::fmt;

use kv_core::transport::TransportErrorKind;

use super::op::OpInfo;
use crate::rng::Rng;

/// What to do with one submission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Land and report `Done` on the next poll.
    Complete,
    /// Stay in flight (PROC) until the test says otherwise.
    Hold,
    /// Land and report `Done` on the n-th poll of the lane; react to death, pause and cut of the target.
    AfterPolls(u32),
    /// Accept, land nothing, report `Failed`.
    Fail {
        /// Nothing reads the source any more.
        src_quiet: bool,
        /// No byte can land any more.
        dst_quiet: bool,
    },
    /// Accept and report `Unresolved`.
    Unresolve,
    /// Hand it back: no room now.
    Busy,
    /// Hand it back: never.
    Reject(TransportErrorKind),
}

/// Decides submissions that no [`script_next`](super::FakeTransport::script_next) decided.
#[derive(Default)]
pub enum Policy {
    /// Everything lands and is `Done` on the next poll.
    #[default]
    CompleteAtOnce,
    /// Everything stays in flight.
    Hold,
    /// `Done` after 1 to `max_polls` polls, drawn from a seed; now and then `Busy` first.
    Seeded {
        /// The generator.
        rng: Rng,
        /// Most polls an op takes.
        max_polls: u32,
        /// Chance that a submission is handed back `Busy`.
        busy: f64,
    },
    /// A closure looks at each op.
    By(Box<dyn FnMut(&OpInfo) -> Verdict + Send>),
}

impl Policy {
    /// A closure looks at each op. It must not call the fabric, which is locked meanwhile.
    pub fn by(decide: impl FnMut(&OpInfo) -> Verdict + Send + 'static) -> Self {
        Self::By(Box::new(decide))
    }

    /// From a seed: `Done` after 1 to 4 polls, never `Busy`.
    pub fn seeded(seed: u64) -> Self {
        Self::Seeded { rng: Rng::new(seed), max_polls: 4, busy: 0.0 }
    }

    pub(super) fn decide(&mut self, op: &OpInfo) -> Verdict {
        match self {
            Self::CompleteAtOnce => Verdict::Complete,
            Self::Hold => Verdict::Hold,
            Self::Seeded { rng, max_polls, busy } => {
                if rng.chance(*busy) {
                    Verdict::Busy
                } else {
                    Verdict::AfterPolls(1 + rng.below(u64::from(*max_polls)) as u32)
                }
            }
            Self::By(decide) => decide(op),
        }
    }
}

impl fmt::Debug for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::CompleteAtOnce => "CompleteAtOnce",
            Self::Hold => "Hold",
            Self::Seeded { .. } => "Seeded",
            Self::By(_) => "By(..)",
        })
    }
}

/// A way to break the seam, for negative controls: the conformance suite must catch each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// Reports `Done` some polls before the bytes are there.
    DoneBeforeLanding,
    /// Reports each outcome twice.
    DuplicateOutcome,
    /// Now and then reports no outcome at all.
    ForgetsOutcome,
    /// On a lost connection reports `Failed` with both sides quiet, and lands later.
    LandsAfterDstQuiet,
    /// Writes wherever the plan says.
    IgnoresBounds,
    /// Takes peers' blobs as they come.
    TrustsForgedPeer,
    /// Settles an unresolved op twice.
    SettlesTwice,
    /// Settles ops that ended `Done`.
    SettlesDone,
    /// Drops the op, and its memory, as soon as it is submitted.
    DropsRegions,
    /// Flips the last byte of each op.
    CorruptsByte,
    /// Writes one byte past each span.
    SpillsOver,
    /// Calls ops to a stopped process failed and quiet; they land when it goes on.
    ProvesPausedPeer,
    /// Says `Done` for ops to a process that died under them.
    DoneOnDeath,
    /// Goes on writing through a generation that a newer one replaced.
    KeepsOldGeneration,
    /// Accepts ops to peers that were let go, or never known, and says `Done`.
    AcceptsUnknownPeer,
    /// Reports one lane's ops on another.
    CrossesLanes,
    /// Says `Busy`, and posts the op all the same.
    BusyButPosted,
    /// Reads past the end of source regions and from regions the op does not name.
    ReadsAnySource,
    /// Writes to regions that are no longer registered.
    KeepsUnregistered,
    /// Leaves every lane's peers connected after `disconnect`, and cannot connect again.
    NeverReconnects,
    /// Opens a file for every 32nd op and keeps it.
    LeaksFiles,
}

impl Flaw {
    /// Every flaw.
    pub const ALL: [Self; 21] = [
        Self::DoneBeforeLanding,
        Self::DuplicateOutcome,
        Self::ForgetsOutcome,
        Self::LandsAfterDstQuiet,
        Self::IgnoresBounds,
        Self::TrustsForgedPeer,
        Self::SettlesTwice,
        Self::SettlesDone,
        Self::DropsRegions,
        Self::CorruptsByte,
        Self::SpillsOver,
        Self::ProvesPausedPeer,
        Self::DoneOnDeath,
        Self::KeepsOldGeneration,
        Self::AcceptsUnknownPeer,
        Self::CrossesLanes,
        Self::BusyButPosted,
        Self::ReadsAnySource,
        Self::KeepsUnregistered,
        Self::NeverReconnects,
        Self::LeaksFiles,
    ];
}
