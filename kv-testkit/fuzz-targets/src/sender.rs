//! Any events into a sender room, against a model of its writes that knows what may still read or write.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kv_core::ids::{OpId, ProcessGeneration, Room};
use kv_core::net::Endpoint;
use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::time::Timestamp;
use kv_core::transport::{Outcome, Settlement, TransportError, TransportErrorKind};

use crate::input::Input;

/// What a write may still do.
#[derive(Clone, Copy, Debug, Default)]
struct Op {
    ended: bool,
    done: bool,
    src_quiet: bool,
    dst_quiet: bool,
}

/// An endpoint, and which life of the room it speaks for when it is one of ours.
type Peer = (Endpoint, Option<u64>);

fn peer(d: &Destination) -> Peer {
    (d.endpoint.clone(), d.life.map(|life| life.generation))
}

struct Model {
    room: SenderRoom,
    now: Timestamp,
    policy: FailedStatusPolicy,
    /// Posts the room asked for.
    waiting: Vec<(u32, usize)>,
    ops: BTreeMap<(u32, usize), Op>,
    told: BTreeMap<(Peer, KvPoll), u32>,
    enqueued: u32,
    saw_last: bool,
    first_reason: Option<String>,
    seen: KvPoll,
    was_releasable: bool,
    cleared: bool,
    next_op: u64,
}

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut m = Model::new(input.u8());
    while !input.is_empty() {
        m.act(&mut input);
    }
    m.end();
}

fn error() -> TransportError {
    TransportError::new(TransportErrorKind::Backend, "ERR")
}

impl Model {
    fn new(kind: u8) -> Self {
        let failed_status = match kind & 9 {
            0 => FailedStatusPolicy::AtOnce,
            1 => FailedStatusPolicy::WhenSettled,
            _ => FailedStatusPolicy::PerPeer,
        };
        let policy = SenderPolicy {
            bootstrap_timeout: Duration::from_secs(300),
            failed_status,
            max_destinations: 4,
            max_chunks: if kind & 2 != 0 { 3 } else { 4096 },
        };
        let room = Room::new(42).expect("a room number");
        Self {
            room: SenderRoom::new(room, Timestamp::ZERO, Arc::new(policy)),
            now: Timestamp::ZERO,
            policy: failed_status,
            waiting: Vec::new(),
            ops: BTreeMap::new(),
            told: BTreeMap::new(),
            enqueued: 0,
            saw_last: false,
            first_reason: None,
            seen: KvPoll::Bootstrapping,
            was_releasable: false,
            cleared: false,
            next_op: 0,
        }
    }

    fn unquiet(&self) -> usize {
        self.ops.values().filter(|o| !(o.src_quiet && o.dst_quiet)).count()
    }

    fn pick(&self, i: &mut Input<'_>, of: impl Fn(&Op) -> bool) -> Option<(u32, usize)> {
        let fitting: Vec<_> = self.ops.iter().filter(|(_, o)| of(o)).map(|(k, _)| *k).collect();
        (!fitting.is_empty()).then(|| i.pick(&fitting))
    }

    fn feed(&mut self, event: SenderEvent) {
        let late_metadata = match &event {
            SenderEvent::Destination(d) if self.seen == KvPoll::Failed => Some(peer(d)),
            _ => None,
        };
        let mut effects = Vec::new();
        self.room.handle_event(self.now, event, &mut effects);
        self.check(&effects, late_metadata);
    }

    fn act(&mut self, i: &mut Input<'_>) {
        match i.below(18) {
            0 | 1 => {
                let kind = i.u8();
                // Names and endpoints need not go together.
                let (name, port, numbers) = (1 + kind % 4, 1 + u16::from(kind / 4 % 4), i.u8());
                let life = |generation| RoomLife { process: ProcessGeneration(9), generation, geometry: 5 };
                let is_dummy = kind & 64 != 0;
                self.feed(SenderEvent::Destination(Destination {
                    name: format!("d{name}").into(),
                    endpoint: Endpoint::new("10.0.0.7", port),
                    pages: if is_dummy { [].into() } else { [0, 1, 2, 3].into() },
                    aux_index: (!is_dummy).then_some(0),
                    required_dst_info_num: u32::from(numbers % 6),
                    decode_prefix_len: (kind & 128 != 0).then_some(7),
                    is_dummy,
                    writes_aux: true,
                    life: (numbers >= 128).then(|| life(u64::from(numbers / 64))),
                }));
            }
            2..=4 => {
                let kind = i.u8();
                let is_last = kind & 3 == 0;
                let before = self.room.next_chunk();
                self.feed(SenderEvent::Enqueue(ChunkSpec {
                    pages: [0].into(),
                    index_slice: 0..1,
                    is_last,
                    has_wait_event: kind & 12 == 12,
                    aux_index: Some(0),
                }));
                if self.room.next_chunk() != before {
                    self.enqueued += 1;
                    self.saw_last |= is_last;
                }
            }
            5 => {
                let result = if i.below(8) == 7 { Err("event".into()) } else { Ok(()) };
                self.feed(SenderEvent::SourceReady(i.below(6) as u32, result));
            }
            6..=9 if !self.waiting.is_empty() => self.post(i),
            10..=12 => {
                let Some(at) = self.pick(i, |o| !o.ended) else { return };
                let outcome = match i.below(8) {
                    0 => Outcome::Unresolved { error: error() },
                    n @ 1..=4 => Outcome::Failed { src_quiet: n & 1 != 0, dst_quiet: n > 2, error: error() },
                    _ => Outcome::Done,
                };
                let (src_quiet, dst_quiet) = outcome.quiet();
                self.ops.insert(at, Op { ended: true, done: outcome == Outcome::Done, src_quiet, dst_quiet });
                self.feed(SenderEvent::Outcome(at.0, at.1, outcome));
            }
            13 => {
                let Some(at) = self.pick(i, |o| o.ended && !(o.src_quiet && o.dst_quiet)) else { return };
                let settlement = match i.below(4) {
                    0 => Settlement::PeerGenerationDead,
                    n => Settlement::Settled { src_quiet: n & 1 != 0, dst_quiet: n & 2 != 0 },
                };
                let (src, dst) = settlement.quiet();
                let op = self.ops.get_mut(&at).expect("picked");
                op.src_quiet |= src;
                op.dst_quiet |= dst;
                self.feed(SenderEvent::Settlement(at.0, at.1, settlement));
            }
            14 => match i.below(8) {
                0 => self.feed(SenderEvent::Abort),
                1 => self.feed(SenderEvent::AbortedByDecode),
                2 => self.feed(SenderEvent::Fail(Failure::elsewhere())),
                3 => self.feed(SenderEvent::DestinationLost(format!("d{}", 1 + i.below(4)).into(), "gone".into())),
                4 => {
                    self.cleared = true;
                    self.feed(SenderEvent::Clear);
                }
                _ => {}
            },
            15 => self.stray(i),
            _ => {
                self.now = self.now + Duration::from_secs(i.u8().into());
                let mut effects = Vec::new();
                self.room.handle_timeout(self.now, &mut effects);
                self.check(&effects, None);
            }
        }
    }

    /// Carry out a post that the room asked for.
    fn post(&mut self, i: &mut Input<'_>) {
        let at = self.waiting.swap_remove(i.below(self.waiting.len()));
        if !self.room.wants_post(at.0, at.1) {
            assert!(self.ops.contains_key(&at) || self.room.poll().is_terminal(), "{at:?} was dropped");
            return;
        }
        assert!(!self.ops.contains_key(&at), "{at:?} is posted twice");
        match i.below(8) {
            0 => self.feed(SenderEvent::Rejected(at.0, at.1, "refused".into())),
            1 => {
                self.ops.insert(at, Op { ended: true, done: true, src_quiet: true, dst_quiet: true });
                self.feed(SenderEvent::NothingToPost(at.0, at.1));
            }
            _ => {
                self.next_op += 1;
                self.ops.insert(at, Op::default());
                self.feed(SenderEvent::Posted(at.0, at.1, OpId(self.next_op)));
            }
        }
    }

    /// News of writes that are over, or never were: nothing may come of it.
    fn stray(&mut self, i: &mut Input<'_>) {
        let at = match self.pick(i, |o| o.src_quiet && o.dst_quiet) {
            Some(at) if i.flag() => at,
            _ => (i.number32().max(self.enqueued), i.below(300)),
        };
        let (poll, outstanding) = (self.room.poll(), self.room.outstanding());
        if i.flag() {
            self.feed(SenderEvent::Outcome(
                at.0,
                at.1,
                Outcome::Failed { src_quiet: false, dst_quiet: false, error: error() },
            ));
        } else {
            self.feed(SenderEvent::Settlement(at.0, at.1, Settlement::PeerGenerationDead));
        }
        assert_eq!((self.room.poll(), self.room.outstanding()), (poll, outstanding), "stray news of {at:?}");
    }

    /// Decode must not hear of the failure yet.
    fn withheld(&self, to: &Peer) -> bool {
        let may_know = match self.policy {
            FailedStatusPolicy::AtOnce => true,
            FailedStatusPolicy::WhenSettled => false,
            FailedStatusPolicy::PerPeer => to.1.is_some(),
        };
        !may_know && self.unquiet() > 0
    }

    fn status(&mut self, to: Peer, status: KvPoll, reason: bool, late_metadata: Option<&Peer>) {
        assert!(status.is_terminal() && status == self.room.poll());
        assert_eq!(reason, status == KvPoll::Failed);
        if late_metadata == Some(&to) {
            // C6: an answer, as often as asked; but never over a write that is withheld.
            let known = self.room.destinations().iter().any(|d| !d.is_dummy && peer(d) == to);
            assert!(!(known && self.withheld(&to)), "answered over a write");
            return;
        }
        assert!(status != KvPoll::Failed || !self.withheld(&to), "told over a write that is not quiet");
        *self.told.entry((to, status)).or_default() += 1;
    }

    fn check(&mut self, effects: &[SenderEffect], late_metadata: Option<Peer>) {
        for e in effects {
            match e {
                SenderEffect::Post(chunk, dest) => self.waiting.push((*chunk, *dest)),
                SenderEffect::Status(to, status, reason) => {
                    self.status((to.clone(), None), *status, reason.is_some(), late_metadata.as_ref());
                }
                SenderEffect::StatusOf { to, life, status, reason, tag } => {
                    assert_eq!(tag.is_some(), *status == KvPoll::Success, "H3");
                    let to = (to.clone(), Some(life.generation));
                    self.status(to, *status, reason.is_some(), late_metadata.as_ref());
                }
                SenderEffect::Drained => assert_eq!(self.unquiet(), 0, "drained over a write that is not quiet"),
                _ => {}
            }
        }
        let (poll, unquiet) = (self.room.poll(), self.unquiet());
        assert!(self.told.values().all(|n| *n == 1), "told twice: {:?}", self.told);
        if self.seen.is_terminal() {
            assert_eq!(poll, self.seen, "a terminal state changed");
        }
        assert!(poll == KvPoll::Failed || poll >= self.seen, "{:?} -> {poll:?}", self.seen);
        assert!(unquiet == 0 || self.room.outstanding() > 0, "{unquiet} writes are not quiet, and nothing is counted");
        assert!(self.room.outstanding() <= 1, "one chunk at a time (B2)");
        let heard = !self.room.destinations().is_empty();
        assert!(heard || matches!(poll, KvPoll::Bootstrapping | KvPoll::Failed), "{poll:?} before any metadata");
        let reading = self.ops.values().any(|o| !o.src_quiet);
        if poll.is_terminal() {
            assert_eq!(self.room.outstanding() > 0, unquiet > 0);
            assert_eq!(self.room.releasable(), !reading);
        } else {
            assert!(!self.room.releasable());
        }
        assert!(self.room.releasable() || !self.was_releasable, "pages were taken back");
        let news = poll != self.seen || self.room.releasable() != self.was_releasable;
        assert!(effects.contains(&SenderEffect::Changed) || !news, "the handle is not told");
        self.was_releasable = self.room.releasable();
        if poll == KvPoll::Success && self.seen != KvPoll::Success {
            let real = self.room.destinations().iter().filter(|d| !d.is_dummy).count();
            // The chunk of this very event is not counted yet when it had nothing to write.
            assert!(self.saw_last || real == 0);
            assert!(self.ops.len() >= real * self.enqueued as usize, "Success without every write");
            assert!(self.ops.values().all(|o| o.done));
        }
        let reason = self.room.failure().map(|f| f.reason.to_string());
        assert_eq!(reason.is_some(), poll == KvPoll::Failed);
        assert!(self.first_reason.is_none() || reason == self.first_reason, "the first reason stays");
        self.first_reason = reason;
        assert_eq!(self.room.finished(), self.cleared && self.room.outstanding() == 0);
        self.seen = poll;
    }

    /// Everything ends: each write quiet, the room cleared. Nothing may be left.
    fn end(mut self) {
        for at in self.ops.keys().copied().collect::<Vec<_>>() {
            let op = self.ops[&at];
            if op.src_quiet && op.dst_quiet {
                continue;
            }
            self.ops.insert(at, Op { ended: true, done: !op.ended, src_quiet: true, dst_quiet: true });
            self.feed(match op.ended {
                false => SenderEvent::Outcome(at.0, at.1, Outcome::Done),
                true => SenderEvent::Settlement(at.0, at.1, Settlement::PeerGenerationDead),
            });
        }
        self.cleared = true;
        self.feed(SenderEvent::Clear);
        assert!(self.room.finished() && self.room.releasable() && self.room.outstanding() == 0);
        for d in self.room.destinations().iter().filter(|d| !d.is_dummy) {
            assert_eq!(self.told.get(&(peer(d), self.seen)), Some(&1), "{}", d.endpoint);
        }
    }
}

/// Lives that go well, fail, and are aborted over a write.
pub fn seeds() -> Vec<Vec<u8>> {
    let (metadata, chunk, last, post) = ([0, 0, 1], [2, 1], [2, 0], [6, 0, 7]);
    let done = [10, 0, 7];
    let unresolved = [10, 0, 0];
    let abort = [14, 0];
    let settle = [13, 0, 0];
    let life = |kind: u8, parts: &[&[u8]]| [&[kind][..], &parts.concat()].concat();
    vec![
        life(0, &[&metadata, &last, &post, &done, &[14, 4]]),
        life(0, &[&metadata, &chunk, &post, &done, &last, &post, &done]),
        life(1, &[&metadata, &last, &post, &unresolved, &settle, &metadata]),
        life(0, &[&metadata, &last, &post, &abort, &done, &[14, 4]]),
        life(1, &[&[0, 0, 2], &[0, 5, 2], &last, &post, &post, &unresolved, &done, &[15, 1, 0], &settle]),
        life(2, &[&metadata, &[2, 13], &[5, 0, 0], &post, &done, &[16, 255], &[16, 255]]),
        life(0, &[&[16, 255], &[16, 255], &metadata]),
    ]
}
