//! Random events, against a model of what decode has been told.

use std::collections::BTreeSet;

use kv_core::poll::KvPoll;
use kv_core::room::*;
use proptest::prelude::*;

use super::support::*;

struct Model {
    r: Receiver,
    proof: bool,
    succeeded: BTreeSet<u32>,
    acked: BTreeSet<u32>,
    aborts: u32,
    released: u32,
    armed_at: Option<kv_core::Timestamp>,
    first_reason: Option<String>,
    seen: KvPoll,
    was_releasable: bool,
}

/// Rank 0 and 1 must answer, rank 2 is a dummy.
fn three() -> ReceiverEvent {
    ReceiverEvent::Peers(Ok(peers_of(vec![record(0, false), record(1, false), record(2, true)], 2)))
}

impl Model {
    fn new(proof: bool) -> Self {
        let release = if proof { ReleasePolicy::Proof } else { ReleasePolicy::AckOrTimeout(RELEASE) };
        Self {
            r: Receiver::new(release),
            proof,
            succeeded: BTreeSet::new(),
            acked: BTreeSet::new(),
            aborts: 0,
            released: 0,
            armed_at: None,
            first_reason: None,
            seen: KvPoll::Bootstrapping,
            was_releasable: false,
        }
    }

    fn feed(&mut self, event: ReceiverEvent) {
        let mut effects = self.r.on(event);
        // The shard publishes at once, and tells the room how far it got.
        if let Some(i) = effects.iter().position(|e| matches!(e, ReceiverEffect::Publish(_))) {
            effects.remove(i);
            effects.extend(self.r.on(ReceiverEvent::Published { contacted: 3, error: None }));
        }
        self.check(effects);
    }

    fn act(&mut self, (kind, a, b): (u8, u8, u8)) {
        let rank = u32::from(a) % 4;
        match kind % 14 {
            0 | 1 => self.feed(three()),
            2 if b % 4 == 0 => self.feed(ReceiverEvent::Peers(Err("no".into()))),
            3 | 4 if self.r.room.poll() != KvPoll::Bootstrapping || b % 4 == 0 => {
                self.feed(ReceiverEvent::Publish(publish_spec()));
            }
            5..=7 => {
                if rank < 2 && self.r.room.published().is_some() {
                    self.succeeded.insert(rank);
                }
                self.feed(success(rank));
            }
            8 if b % 3 == 0 => self.feed(said(rank, KvPoll::Failed, Some("boom"))),
            9 | 10 => {
                let generation = u64::from(b) % 3;
                if rank < 3 && self.r.room.armed_generation() == Some(generation) {
                    self.acked.insert(rank);
                }
                self.feed(ack(rank, generation));
            }
            11 if b % 4 == 0 => self.feed(ReceiverEvent::Abort),
            12 if b % 6 == 0 => self.feed(ReceiverEvent::Clear),
            _ => {
                self.r.now = self.r.now + std::time::Duration::from_secs(u64::from(a) / 4);
                let effects = self.r.timeout();
                self.check(effects);
            }
        }
    }

    fn check(&mut self, effects: Vec<ReceiverEffect>) {
        let told = |e: &ReceiverEffect| matches!(e, ReceiverEffect::Changed | ReceiverEffect::Released { .. });
        let changed = effects.iter().any(told);
        for e in effects {
            match e {
                ReceiverEffect::Abort { contacted, generation } => {
                    self.aborts += 1;
                    assert_eq!(contacted, 3);
                    assert_eq!(generation.is_some(), self.r.room.published().is_some());
                    self.armed_at = generation.map(|_| self.r.now);
                }
                ReceiverEffect::Released { proven } => {
                    self.released += 1;
                    let all = self.acked.len() == 3;
                    let late = self.armed_at.is_some_and(|t| t + RELEASE <= self.r.now);
                    assert!(if proven { all } else { late && !self.proof }, "released on nothing");
                }
                ReceiverEffect::Publish(_) => panic!("published twice"),
                ReceiverEffect::Forget
                | ReceiverEffect::Changed
                | ReceiverEffect::Stale
                | ReceiverEffect::Violation(_) => {}
            }
        }
        let room = &self.r.room;
        let poll = room.poll();
        assert!(self.aborts <= 1 && self.released <= 1);
        if self.seen.is_terminal() {
            assert_eq!(poll, self.seen, "a terminal state changed");
        } else if poll == KvPoll::Success {
            assert_eq!(self.succeeded, BTreeSet::from([0, 1]));
        } else {
            assert!(poll == KvPoll::Failed || self.succeeded.len() < 2, "every rank reported, and it is not Success");
        }
        let knows = room.published().is_some();
        let free = match poll {
            KvPoll::Success => true,
            KvPoll::Failed => !knows || self.released == 1,
            _ => false,
        };
        assert_eq!(room.releasable(), free);
        assert!(room.releasable() || !self.was_releasable, "pages were taken back");
        let news = poll != self.seen || room.releasable() != self.was_releasable;
        assert!(changed || !news, "the handle is not told");
        self.was_releasable = room.releasable();
        let reason = room.failure().map(|f| f.reason.to_string());
        assert_eq!(reason.is_some(), poll == KvPoll::Failed);
        assert!(self.first_reason.is_none() || reason == self.first_reason, "the first reason stays");
        self.first_reason = reason;
        self.seen = poll;
    }

    /// The room is cleared, and every rank acks or time passes: nothing may be left.
    fn end(mut self) {
        self.feed(ReceiverEvent::Clear);
        if let Some(generation) = self.r.room.armed_generation() {
            for rank in 0..3 {
                self.acked.insert(rank);
                self.feed(ack(rank, generation));
            }
        }
        assert!(self.r.room.finished());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn r_b1_r_f4_random_events_never_break_a_receiver_room(
        proof: bool,
        script in prop::collection::vec(any::<(u8, u8, u8)>(), 0..60),
    ) {
        let mut m = Model::new(proof);
        script.into_iter().for_each(|step| m.act(step));
        m.end();
    }
}
