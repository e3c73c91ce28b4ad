//! A write that is larger than the transport's largest op: its pieces are ops of their own, and one write to the room.
//!
//! The room hears Done when every piece is done. It hears of the first piece that fails at once, with what is proven of all
//! that were posted (F2), and of the rest as settlements: so the chunk stays counted until each piece is proven quiet (F1,
//! F3). Pieces are posted in the plan's order, so the aux row goes with the last one.

use std::num::NonZeroU64;

use super::posting::make_plan;
use super::*;

/// The pieces of one (chunk, destination): there until all that were posted are quiet and no more will be.
#[derive(Debug)]
pub(super) struct Pieces {
    at: (u32, usize),
    /// What they were planned with.
    pairing: Arc<Pairing>,
    /// Not posted yet, in order.
    left: VecDeque<WritePlan>,
    /// The first one was accepted: the room counts the write.
    started: bool,
    /// The room ended before all of them were posted.
    given_up: bool,
    /// Pieces that were posted, and are not proven quiet at (source, destination).
    loud: (usize, usize),
    /// The room heard of an outcome: what follows are settlements.
    told: bool,
}

impl Pieces {
    fn quiet(&self) -> (bool, bool) {
        (self.loud.0 == 0, self.loud.1 == 0)
    }

    fn over(&self) -> bool {
        self.left.is_empty() && self.quiet() == (true, true) && (self.told || !self.started)
    }

    /// Sides of one piece turned quiet. Which sides of the whole turned quiet with it.
    fn hush(&mut self, (src, dst): (bool, bool)) -> (bool, bool) {
        let before = self.quiet();
        self.loud.0 = self.loud.0.saturating_sub(src.into());
        self.loud.1 = self.loud.1.saturating_sub(dst.into());
        let now = self.quiet();
        (now.0 && !before.0, now.1 && !before.1)
    }

    /// One piece ended: what the room hears of it.
    fn outcome(&mut self, outcome: Outcome) -> Option<SenderEvent> {
        let own = outcome.quiet();
        let turned = self.hush(own);
        if self.told {
            return self.settled(turned);
        }
        let quiet = if mutant!(PieceErrorHushesSiblings) { own } else { self.quiet() };
        match outcome {
            Outcome::Done if mutant!(OnePieceIsTheWrite) => self.tell(Outcome::Done),
            Outcome::Done if !self.left.is_empty() || quiet != (true, true) => None,
            Outcome::Done if self.given_up => self.tell_given_up(),
            Outcome::Done => self.tell(Outcome::Done),
            Outcome::Failed { error, .. } | Outcome::Unresolved { error } => {
                self.left.clear();
                self.tell(match quiet {
                    (false, false) => Outcome::Unresolved { error },
                    (src_quiet, dst_quiet) => Outcome::Failed { src_quiet, dst_quiet, error },
                })
            }
        }
    }

    fn settled(&self, (src_quiet, dst_quiet): (bool, bool)) -> Option<SenderEvent> {
        let event = SenderEvent::Settlement(self.at.0, self.at.1, Settlement::Settled { src_quiet, dst_quiet });
        (src_quiet || dst_quiet).then_some(event)
    }

    /// The room ended: no more is posted.
    fn give_up(&mut self) -> Option<SenderEvent> {
        if self.left.is_empty() {
            return None;
        }
        self.left.clear();
        self.given_up = true;
        let unheard = self.started && !self.told && self.quiet() == (true, true);
        if unheard { self.tell_given_up() } else { None }
    }

    /// Every piece that was posted is quiet, and the others never will be.
    fn tell_given_up(&mut self) -> Option<SenderEvent> {
        let error = TransportError::new(TransportErrorKind::Backend, "given up before all of it was posted");
        self.tell(Outcome::Failed { src_quiet: true, dst_quiet: true, error })
    }

    fn tell(&mut self, outcome: Outcome) -> Option<SenderEvent> {
        self.told = true;
        Some(SenderEvent::Outcome(self.at.0, self.at.1, outcome))
    }
}

impl Entry {
    fn pieces_of(&mut self, chunk: u32, dest: usize) -> Option<&mut Pieces> {
        self.pieces.iter_mut().find(|p| p.at == (chunk, dest))
    }
}

impl PrefillShard {
    /// What to post next of (chunk, destination). `Err`: what the room hears instead.
    #[allow(clippy::result_large_err)] // the room's event, on its way
    pub(super) fn next_piece(
        &mut self,
        post: &Post<RoomKey>,
        pairing: &Arc<Pairing>,
    ) -> Result<Option<WritePlan>, SenderEvent> {
        let Post { key, chunk, dest } = *post;
        let Some(e) = self.rooms.get_mut(key) else { return Ok(None) };
        match e.pieces_of(chunk, dest) {
            // Some are left only while the room wants them.
            Some(p) if Arc::ptr_eq(&p.pairing, pairing) => return Ok(p.left.pop_front()),
            Some(p) if p.started => {
                let text = "decode registered other memory when a part was written already";
                return Err(SenderEvent::Rejected(chunk, dest, text.into()));
            }
            Some(_) => e.pieces.retain(|p| p.at != (chunk, dest)),
            None => {}
        }
        if !e.room.wants_post(chunk, dest) {
            return Ok(None);
        }
        let (Some(c), Some(d)) = (e.room.chunk(chunk), e.room.destinations().get(dest)) else { return Ok(None) };
        let plan = make_plan(&mut self.planner, pairing, c.spec(), d)
            .map_err(|reason| SenderEvent::Rejected(chunk, dest, reason))?;
        if plan.is_empty() {
            return Err(SenderEvent::NothingToPost(chunk, dest));
        }
        let Some(max) = self.config.max_op_bytes.and_then(NonZeroU64::new).filter(|max| plan.total_bytes() > max.get())
        else {
            return Ok(Some(plan));
        };
        let mut left = VecDeque::from(plan.split(max));
        let first = left.pop_front();
        let pairing = pairing.clone();
        let at = (chunk, dest);
        e.pieces.push(Pieces { at, pairing, left, started: false, given_up: false, loud: (0, 0), told: false });
        Ok(first)
    }

    /// A piece was not accepted; it is the next one again. One that is no piece is planned anew.
    pub(super) fn put_back(&mut self, post: &Post<RoomKey>, plan: WritePlan) {
        let pieces = self.rooms.get_mut(post.key).and_then(|e| e.pieces_of(post.chunk, post.dest));
        if let Some(p) = pieces {
            p.left.push_front(plan);
        }
    }

    /// An op was accepted: whether it is the write's first, and whether there are more to post.
    pub(super) fn accepted(&mut self, post: &Post<RoomKey>) -> (bool, bool) {
        let pieces = self.rooms.get_mut(post.key).and_then(|e| e.pieces_of(post.chunk, post.dest));
        let Some(p) = pieces else { return (true, false) };
        p.loud = (p.loud.0 + 1, p.loud.1 + 1);
        (!std::mem::replace(&mut p.started, true), !p.left.is_empty())
    }

    /// What the outcome of an op is to the room.
    pub(super) fn outcome_of(&mut self, at: &Post<RoomKey>, outcome: Outcome) -> Option<SenderEvent> {
        let e = self.rooms.get_mut(at.key)?;
        let Some(p) = e.pieces_of(at.chunk, at.dest) else {
            return Some(SenderEvent::Outcome(at.chunk, at.dest, outcome));
        };
        let event = p.outcome(outcome);
        e.pieces.retain(|p| !p.over());
        event
    }

    /// What it is to the room that these sides of an op turned quiet, its outcome being known.
    pub(super) fn settlement_of(&mut self, at: &Post<RoomKey>, turned: (bool, bool)) -> Option<SenderEvent> {
        let e = self.rooms.get_mut(at.key)?;
        let Some(p) = e.pieces_of(at.chunk, at.dest) else {
            let settlement = Settlement::Settled { src_quiet: turned.0, dst_quiet: turned.1 };
            return Some(SenderEvent::Settlement(at.chunk, at.dest, settlement));
        };
        let turned = p.hush(turned);
        let event = p.settled(turned);
        e.pieces.retain(|p| !p.over());
        event
    }

    /// Pieces of a room that has failed are not posted any more.
    pub(super) fn give_up_pieces(&mut self, key: RoomKey) {
        let Some(e) = self.rooms.get_mut(key) else { return };
        if e.pieces.is_empty() || e.room.poll() != KvPoll::Failed {
            return;
        }
        self.work.extend(e.pieces.iter_mut().filter_map(Pieces::give_up).map(|event| (key, event)));
        e.pieces.retain(|p| !p.over());
    }
}
