//! An accepted op on its way: what of it the library has, what not yet, and how it stands.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kv_core::transport::{TransportError, TransportErrorKind as ErrorKind, WriteOp};
use mooncake_sys::Batch;

use crate::engine::{Piece, Task};
use crate::environment::MOST_CONNECTIONS;
use crate::peer::Peer;
use crate::stats;
use crate::transport::Core;

/// Tasks found going before the rest is left for the next look: the library has one on each of its connections, and they
/// end in about the order in which they began.
pub(crate) const GOING_SEEN: usize = 8;
/// So long an op of which nothing moves waits for room for many tasks at once.
const PATIENT: Duration = Duration::from_millis(1);

/// Another look, for failures alone, at tasks of `older` flights that were found going: before an acknowledgement that was
/// seen after them is believed.
///
/// An acknowledgement by a successor comes over a connection that the library made after one to its predecessor broke. The
/// task which that broke was given to the library before, and is called failed before.
pub(crate) fn look_again<'a>(core: &Core, older: impl Iterator<Item = &'a Flight>) {
    for flight in older {
        flight.note_failure(core);
    }
}

/// Tasks that the library got at once. Without a destructor: see [`crate::engine`].
struct Group {
    batch: Batch,
    /// Tasks that were not seen to end.
    open: VecDeque<u32>,
    /// One of them failed: the batch is kept until that is proven to be over.
    failed: bool,
}

pub(crate) struct Flight {
    pub op: WriteOp,
    pub peer: Arc<Peer>,
    pieces: Vec<Piece>,
    /// Pieces that the library has or had.
    posted: usize,
    /// Pieces were left out: they never go.
    cut: bool,
    groups: VecDeque<Group>,
    /// The first thing that went wrong with what the library has.
    failed: Option<TransportError>,
    /// Tasks were seen acknowledged, and nobody has asked yet by whom.
    fresh: bool,
    /// That its source is quiet was told, and nothing of its destination.
    pub told_source: bool,
    /// When something of it last moved.
    pub since: Instant,
}

/// How an op stands.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Stand {
    /// Something is not seen to have ended, or waits for room.
    Open,
    /// All of it has arrived.
    Done,
    /// What the library had has arrived; the rest never went.
    CutShort,
    /// All has ended, and something failed.
    Failed,
}

impl Flight {
    pub fn new(op: WriteOp, peer: Arc<Peer>, pieces: Vec<Piece>, now: Instant) -> Self {
        Self {
            op,
            peer,
            pieces,
            posted: 0,
            cut: false,
            groups: VecDeque::new(),
            failed: None,
            fresh: false,
            told_source: false,
            since: now,
        }
    }

    /// Whether the library has tasks of it that were not seen to end.
    pub fn going(&self) -> bool {
        self.groups.iter().any(|g| !g.open.is_empty())
    }

    /// Whether the library has not had all of it.
    pub fn waits(&self) -> bool {
        self.posted < self.pieces.len()
    }

    pub fn failure(&self) -> Option<&TransportError> {
        self.failed.as_ref()
    }

    pub fn stand(&self) -> Stand {
        match (&self.failed, self.going()) {
            (_, true) => Stand::Open,
            (Some(_), false) => Stand::Failed,
            (None, false) if self.waits() => Stand::Open,
            (None, false) if self.cut => Stand::CutShort,
            (None, false) => Stand::Done,
        }
    }

    /// The library gets nothing more of it.
    pub fn cut_short(&mut self) {
        if self.waits() {
            self.pieces.truncate(self.posted);
            self.cut = true;
        }
    }

    /// Give the library as much as there is room for. Whether it has all of it now.
    pub fn post(&mut self, core: &Core, now: Instant) -> bool {
        // What failed may be another op's, and news to nobody yet.
        while self.waits() && !self.peer.failed.load(Ordering::SeqCst) {
            let wanted = (self.pieces.len() - self.posted).min(core.config.batch());
            let most = core.config.tasks();
            // A call for each task that ended would cost more than the tasks; but nobody waits long for others to end.
            let least =
                if now.saturating_duration_since(self.since) < PATIENT { wanted.min(most.div_ceil(4)) } else { 1 };
            let room = self.peer.window.take((least, wanted), most, core.config.confirm_after, now);
            if room == 0 {
                return false;
            }
            let pieces = &self.pieces[self.posted..self.posted + room];
            let Some((batch, submitted)) = core.engine.write(self.peer.segment, pieces) else {
                self.peer.window.give(room, false, now);
                return false;
            };
            self.posted += room;
            self.since = now;
            stats::add(&core.counters.tasks_submitted, room as u64);
            stats::add(&core.counters.batches_submitted, 1);
            let failed = submitted.is_err();
            self.groups.push_back(Group { batch, open: (0..room as u32).collect(), failed });
            if let Err(code) = submitted {
                self.fail(&format!("the library does not take {room} tasks: {}", code.name()));
            }
        }
        !self.waits()
    }

    fn fail(&mut self, why: &str) {
        self.peer.failed.store(true, Ordering::SeqCst);
        if self.failed.is_none() {
            let text = format!("write to {}: {why}", self.peer.name);
            self.failed = Some(TransportError::new(ErrorKind::Backend, text));
        }
    }

    /// Look at tasks that were not seen to end, until `seen` of them were found going. Batches that arrived are let go of.
    pub fn sweep(&mut self, core: &Core, seen: &mut usize, now: Instant) {
        let mut failed = None;
        let (mut ended, mut arrived) = (0, false);
        for group in &mut self.groups {
            let mut at = 0;
            while at < group.open.len() && *seen < GOING_SEEN {
                match core.engine.task(group.batch, group.open[at]) {
                    Task::Going => {
                        *seen += 1;
                        at += 1;
                        continue;
                    }
                    Task::Astray(why) => {
                        // Not ended. It keeps its place, and its room.
                        *seen += 1;
                        at += 1;
                        group.failed = true;
                        failed.get_or_insert(why);
                        continue;
                    }
                    Task::Done => arrived = true,
                    Task::Failed(why) => {
                        group.failed = true;
                        failed.get_or_insert(why);
                    }
                }
                group.open.remove(at);
                ended += 1;
            }
            if *seen >= GOING_SEEN {
                break;
            }
        }
        self.groups.retain(|g| {
            let over = g.open.is_empty() && !g.failed;
            if over {
                core.engine.free(g.batch);
            }
            !over
        });
        self.fresh |= arrived;
        if ended > 0 {
            self.since = now;
            self.peer.window.give(ended, arrived, now);
        }
        if let Some(why) = failed {
            self.fail(why);
        }
    }

    /// Acknowledgements of it were seen that are not believed yet.
    pub fn fresh(&self) -> bool {
        self.fresh
    }

    fn note_failure(&self, core: &Core) {
        let open = self.groups.iter().flat_map(|g| g.open.iter().map(move |number| (g.batch, *number)));
        let failed = |(batch, number)| matches!(core.engine.task(batch, number), Task::Failed(_));
        if open.take(MOST_CONNECTIONS).any(failed) {
            self.peer.failed.store(true, Ordering::SeqCst);
        }
    }

    /// Believe the acknowledgements that were seen, or not.
    pub fn judge(&mut self) {
        if std::mem::take(&mut self.fresh) && !self.peer.vouches() {
            self.fail("it was acknowledged after the peer was lost, so perhaps by its successor");
        }
    }

    /// All of it has ended, and nothing reads its source any more.
    pub fn source_is_quiet(&self) -> bool {
        !self.going() && self.peer.ended_is_read()
    }

    /// Keep of what has ended only what a proof is for.
    pub fn shed(&mut self, core: &Core) {
        if self.source_is_quiet() {
            std::mem::take(&mut self.groups).into_iter().for_each(|g| core.engine.free(g.batch));
            (self.pieces, self.posted) = (Vec::new(), 0);
        }
    }

    /// Let go of what the library has: all of it has ended, and is proven to be over.
    pub fn release(self, core: &Core) {
        debug_assert!(!self.going());
        self.groups.into_iter().for_each(|g| core.engine.free(g.batch));
        self.peer.open.fetch_sub(1, Ordering::SeqCst);
        core.forget_if_over(&self.peer);
    }
}
