//! Random events, against a model of the writes that says what may still read or write.

use std::collections::BTreeMap;

use kv_core::ids::OpId;
use kv_core::net::Endpoint;
use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::transport::{Outcome, Settlement};
use proptest::prelude::*;

use super::support::*;

/// What a write may still do.
#[derive(Clone, Copy, Debug, Default)]
struct Op {
    ended: bool,
    done: bool,
    src_quiet: bool,
    dst_quiet: bool,
}

struct Model {
    s: Sender,
    when_settled: bool,
    waiting: Vec<(u32, usize)>,
    ops: BTreeMap<(u32, usize), Op>,
    told: BTreeMap<(Endpoint, KvPoll), u32>,
    enqueued: u32,
    last_enqueued: bool,
    first_reason: Option<String>,
    seen: KvPoll,
    was_releasable: bool,
    cleared: bool,
    next_op: u64,
}

impl Model {
    fn new(when_settled: bool) -> Self {
        Self {
            s: if when_settled { Sender::towards_0523() } else { Sender::ours() },
            when_settled,
            waiting: Vec::new(),
            ops: BTreeMap::new(),
            told: BTreeMap::new(),
            enqueued: 0,
            last_enqueued: false,
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

    fn pick(&self, of: impl Fn(&Op) -> bool, n: u8) -> Option<(u32, usize)> {
        let fitting: Vec<_> = self.ops.iter().filter(|(_, o)| of(o)).map(|(k, _)| *k).collect();
        fitting.get(usize::from(n) % fitting.len().max(1)).copied()
    }

    fn feed(&mut self, event: SenderEvent) {
        let late_metadata = match &event {
            SenderEvent::Destination(d) if self.seen == KvPoll::Failed => Some(d.endpoint.clone()),
            _ => None,
        };
        let effects = self.s.on(event);
        self.check(effects, late_metadata);
    }

    fn act(&mut self, (kind, a, b): (u8, u8, u8)) {
        let some = |x: u8| u32::from(x) % 3;
        match kind % 17 {
            0 | 1 => {
                let make = if b % 4 == 0 { dummy } else { destination };
                self.feed(SenderEvent::Destination(make(1 + u16::from(a) % 3, 1 + some(b))));
            }
            2..=4 => {
                let is_last = b % 3 == 0;
                if !self.s.room.poll().is_terminal() && !self.last_enqueued {
                    self.enqueued += 1;
                    self.last_enqueued = is_last;
                }
                self.feed(SenderEvent::Enqueue(ChunkSpec { has_wait_event: a % 4 == 0, ..chunk(is_last) }));
            }
            5 => {
                let result = if b % 8 == 0 { Err("event".into()) } else { Ok(()) };
                self.feed(SenderEvent::SourceReady(u32::from(a) % 6, result));
            }
            6..=9 if !self.waiting.is_empty() => {
                let at = self.waiting.swap_remove(usize::from(a) % self.waiting.len());
                if !self.s.room.wants_post(at.0, at.1) {
                    assert!(self.ops.contains_key(&at) || self.s.room.poll().is_terminal(), "{at:?} was dropped");
                    return;
                }
                assert!(!self.ops.contains_key(&at), "{at:?} is posted twice");
                match b % 8 {
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
            10..=12 => {
                let Some(at) = self.pick(|o| !o.ended, a) else { return };
                let outcome = match b % 6 {
                    0 => unresolved(),
                    1 => failed(b % 4 < 2, b % 16 < 8),
                    _ => Outcome::Done,
                };
                let (src_quiet, dst_quiet) = outcome.quiet();
                self.ops.insert(at, Op { ended: true, done: outcome == Outcome::Done, src_quiet, dst_quiet });
                self.feed(SenderEvent::Outcome(at.0, at.1, outcome));
            }
            13 => {
                let Some(at) = self.pick(|o| o.ended && !(o.src_quiet && o.dst_quiet), a) else { return };
                let settlement = match b % 4 {
                    0 => Settlement::PeerGenerationDead,
                    n => Settlement::Settled { src_quiet: n & 1 != 0, dst_quiet: n & 2 != 0 },
                };
                let (src, dst) = settlement.quiet();
                let op = self.ops.get_mut(&at).unwrap();
                op.src_quiet |= src;
                op.dst_quiet |= dst;
                self.feed(SenderEvent::Settlement(at.0, at.1, settlement));
            }
            14 if b % 4 == 0 => self.feed(if a % 2 == 0 { SenderEvent::Abort } else { SenderEvent::AbortedByDecode }),
            15 if b % 4 == 0 => {
                self.feed(SenderEvent::DestinationLost(format!("d{}", 1 + a % 3).into(), "gone".into()));
            }
            16 if b % 6 == 0 => {
                self.cleared = true;
                self.feed(SenderEvent::Clear);
            }
            _ => {
                self.s.now = self.s.now + std::time::Duration::from_secs(u64::from(a) / 8);
                let effects = self.s.timeout();
                self.check(effects, None);
            }
        }
    }

    fn check(&mut self, effects: Vec<SenderEffect>, late_metadata: Option<Endpoint>) {
        let changed = effects.contains(&SenderEffect::Changed);
        for e in effects {
            match e {
                SenderEffect::Post(chunk, dest) => self.waiting.push((chunk, dest)),
                SenderEffect::Status(to, status, reason) => {
                    assert!(status.is_terminal() && status == self.s.room.poll());
                    assert_eq!(reason.is_some(), status == KvPoll::Failed);
                    if late_metadata.as_ref() == Some(&to) {
                        // C6: an answer, as often as asked; but never over a write that is withheld.
                        let known = self.s.room.destinations().iter().any(|d| !d.is_dummy && d.endpoint == to);
                        assert!(!(self.when_settled && known && self.unquiet() > 0), "answered over a write");
                        continue;
                    }
                    *self.told.entry((to, status)).or_default() += 1;
                    assert!(
                        status != KvPoll::Failed || !self.when_settled || self.unquiet() == 0,
                        "told over a write that is not quiet"
                    );
                }
                SenderEffect::StatusOf { .. } => panic!("no decode named a life"),
                SenderEffect::Drained => assert_eq!(self.unquiet(), 0, "drained over a write that is not quiet"),
                SenderEffect::Changed => {}
            }
        }
        let room = &self.s.room;
        let (poll, unquiet) = (room.poll(), self.unquiet());
        assert!(self.told.values().all(|n| *n == 1), "told twice: {:?}", self.told);
        if self.seen.is_terminal() {
            assert_eq!(poll, self.seen, "a terminal state changed");
        }
        assert!(poll == KvPoll::Failed || poll >= self.seen, "{:?} -> {poll:?}", self.seen);
        assert!(unquiet == 0 || room.outstanding() > 0, "{unquiet} writes are not quiet, and nothing is counted");
        assert!(room.outstanding() <= 1, "one chunk at a time (B2)");
        if poll.is_terminal() {
            assert_eq!(room.outstanding() > 0, unquiet > 0);
            let reading = self.ops.values().any(|o| !o.src_quiet);
            assert_eq!(room.releasable(), !reading);
        } else {
            assert!(!room.releasable());
        }
        assert!(room.releasable() || !self.was_releasable, "pages were taken back");
        let news = poll != self.seen || room.releasable() != self.was_releasable;
        assert!(changed || !news, "the handle is not told");
        self.was_releasable = room.releasable();
        if poll == KvPoll::Success {
            assert!(self.last_enqueued);
            let real = room.destinations().iter().filter(|d| !d.is_dummy).count();
            assert_eq!(self.ops.len(), real * self.enqueued as usize, "Success without every write");
            assert!(self.ops.values().all(|o| o.done));
        }
        let reason = room.failure().map(|f| f.reason.to_string());
        assert_eq!(reason.is_some(), poll == KvPoll::Failed);
        if self.first_reason.is_some() {
            assert_eq!(reason, self.first_reason, "the first reason stays");
        }
        self.first_reason = reason;
        assert_eq!(room.finished(), self.cleared && unquiet == 0 && room.outstanding() == 0);
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
                true => SenderEvent::Settlement(at.0, at.1, SETTLED),
            });
        }
        self.cleared = true;
        self.feed(SenderEvent::Clear);
        assert!(self.s.room.finished() && self.s.room.releasable() && self.s.room.outstanding() == 0);
        // Whoever is known was told once, Success or Failed.
        for d in self.s.room.destinations().iter().filter(|d| !d.is_dummy) {
            assert_eq!(self.told.get(&(d.endpoint.clone(), self.seen)), Some(&1), "{}", d.endpoint);
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn r_f1_r_b2_random_events_never_break_a_sender_room(
        when_settled: bool,
        script in prop::collection::vec(any::<(u8, u8, u8)>(), 0..80),
    ) {
        let mut m = Model::new(when_settled);
        script.into_iter().for_each(|step| m.act(step));
        m.end();
    }
}
