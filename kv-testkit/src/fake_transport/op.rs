//! One op as the fake sees it.

use kv_core::ids::{OpId, PeerId};
use kv_core::plan::WritePlan;
use kv_core::transport::{Outcome, Settlement, WriteOp};

/// A snapshot of one submitted op.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpInfo {
    /// Its id.
    pub id: OpId,
    /// The peer generation it goes to.
    pub peer: PeerId,
    /// That peer's name; empty when the peer is unknown.
    pub target: String,
    /// Which of the transport's lanes took it, counted from 0.
    pub lane: usize,
    /// Position among the transport's accepted ops, from 0.
    pub seq: u64,
    /// What it writes.
    pub plan: WritePlan,
    /// Spans in the plan.
    pub spans: usize,
    /// Spans that have landed.
    pub landed: usize,
    /// What was reported, if anything was.
    pub outcome: Option<Outcome>,
    /// What was reported later, if anything was.
    pub settlement: Option<Settlement>,
    /// Reported: nothing reads the source.
    pub src_quiet: bool,
    /// Reported: no byte can land.
    pub dst_quiet: bool,
}

impl OpInfo {
    /// Both sides are quiet.
    pub fn is_quiet(&self) -> bool {
        self.src_quiet && self.dst_quiet
    }
}

/// What drives an op that the test does not drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Auto {
    /// The test drives it.
    Off,
    /// Lands and is Done after so many polls.
    Done(u32),
    /// Unresolved; after so many polls lands (or not) and settles, unless the target died.
    Settle { polls: u32, lands: bool },
    /// Flaw: reported already; lands after so many polls.
    LateLanding(u32),
}

pub(super) struct OpRow {
    pub(super) info: OpInfo,
    /// The op itself, and with it the memory: held until both sides are quiet.
    pub(super) op: Option<WriteOp>,
    pub(super) landed: Vec<bool>,
    /// What the spans carry once nothing reads the source any more while they may still land: the bytes on the wire.
    pub(super) wire: Option<Vec<Vec<u8>>>,
    pub(super) source_digest: Option<u64>,
    pub(super) auto: Auto,
}
