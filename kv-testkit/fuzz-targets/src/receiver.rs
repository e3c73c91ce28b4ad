//! Any events into a receiver room, against a model of what decode has been told.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kv_core::directory::{PrefillPeers, PrefillRecord};
use kv_core::ids::{PrefillRank, Room};
use kv_core::net::Endpoint;
use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::time::Timestamp;
use kv_core::wire::KvStatus;

use crate::input::Input;

const RELEASE: Duration = Duration::from_secs(30);

struct Model {
    room: ReceiverRoom,
    now: Timestamp,
    generation: u64,
    proof: bool,
    /// Ranks of the answer, the dummies last; and how many must report.
    records: u32,
    required: u32,
    contacted: u32,
    succeeded: BTreeSet<u32>,
    acked: BTreeSet<u32>,
    aborts: u32,
    released: u32,
    armed_at: Option<Timestamp>,
    first_reason: Option<String>,
    seen: KvPoll,
    was_releasable: bool,
    /// The next publication reaches so many records, and then meets this error.
    reach: (u32, Option<String>),
}

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let mut m = Model::new(&mut input);
    while !input.is_empty() {
        m.act(&mut input);
    }
    m.end();
}

impl Model {
    fn new(i: &mut Input<'_>) -> Self {
        let proof = i.flag();
        let release = if proof { ReleasePolicy::Proof } else { ReleasePolicy::AckOrTimeout(RELEASE) };
        let policy = Arc::new(ReceiverPolicy { waiting_timeout: Duration::from_secs(200), release });
        let records = 1 + i.below(4) as u32;
        let required = 1 + i.below(records as usize) as u32;
        Self {
            room: ReceiverRoom::new(Room::new(42).expect("a room number"), policy),
            now: Timestamp::ZERO,
            generation: 0,
            proof,
            records,
            required,
            contacted: 0,
            succeeded: BTreeSet::new(),
            acked: BTreeSet::new(),
            aborts: 0,
            released: 0,
            armed_at: None,
            first_reason: None,
            seen: KvPoll::Bootstrapping,
            was_releasable: false,
            reach: (records, None),
        }
    }

    fn peers(&self) -> ReceiverEvent {
        let record = |rank: u32| PrefillRecord {
            endpoint: Endpoint::new("10.0.0.7", 9000 + rank as u16),
            rank: PrefillRank(rank),
            cp_rank: 0,
            tp_rank: rank,
            pp_rank: 0,
            is_dummy: rank >= self.required,
        };
        ReceiverEvent::Peers(Ok(Arc::new(PrefillPeers {
            bootstrap_addr: "p:8998".into(),
            pool_key: "p:8998_0_0_0".into(),
            records: (0..self.records).map(record).collect(),
            required_dst_info_num: 1,
            required_prefill_response_num: self.required,
            generation: 1,
        })))
    }

    fn feed(&mut self, event: ReceiverEvent) {
        let mut effects = Vec::new();
        self.room.handle_event(self.now, event, &mut self.generation, &mut effects);
        // The shard publishes at once, and tells the room how far it got.
        if let Some(at) = effects.iter().position(|e| matches!(e, ReceiverEffect::Publish(_))) {
            effects.remove(at);
            assert_eq!(self.contacted, 0, "published twice");
            let (contacted, error) = self.reach.clone();
            self.contacted = contacted;
            let event = ReceiverEvent::Published { contacted: contacted as usize, error };
            self.room.handle_event(self.now, event, &mut self.generation, &mut effects);
        }
        self.check(&effects);
    }

    fn act(&mut self, i: &mut Input<'_>) {
        let rank = i.below(6) as u32;
        match i.below(14) {
            0 | 1 => self.feed(self.peers()),
            2 if i.below(4) == 3 => self.feed(ReceiverEvent::Peers(Err("no".into()))),
            3 | 4 => {
                let kind = i.u8();
                self.reach = match kind % 8 {
                    0 => (u32::from(kind / 8) % (self.records + 1), Some("unreachable".into())),
                    1 => (0, None),
                    _ => (self.records, None),
                };
                self.feed(ReceiverEvent::Publish(Box::new(PublishSpec {
                    pages: [4, 5].into(),
                    aux_index: 1,
                    state_indices: Vec::new(),
                    decode_prefix_len: 0,
                    device_kv_indices: None,
                })));
            }
            5..=7 => {
                if rank < self.required && self.room.published().is_some() && !self.room.poll().is_terminal() {
                    self.succeeded.insert(rank);
                }
                self.feed(said(rank, KvPoll::Success, None));
            }
            8 => match i.below(8) {
                0 => self.feed(said(rank, KvPoll::Failed, Some("boom"))),
                1 => self.feed(said(rank, KvPoll::Failed, None)),
                2 => self.feed(said(rank, KvPoll::Transferring, None)),
                3 => self.feed(ReceiverEvent::NodeLost("lost".into())),
                4 => self.feed(ReceiverEvent::Fail(Failure::elsewhere())),
                _ => {}
            },
            9 | 10 => {
                let generation = i.below(3) as u64;
                if rank < self.contacted && self.room.armed_generation() == Some(generation) {
                    self.acked.insert(rank);
                }
                self.feed(ReceiverEvent::AbortAck(PrefillRank(rank), generation));
            }
            11 if i.below(4) == 3 => self.feed(ReceiverEvent::Abort),
            12 if i.below(4) == 3 => self.feed(ReceiverEvent::Clear),
            _ => {
                self.now = self.now + Duration::from_secs(i.u8().into());
                let mut effects = Vec::new();
                self.room.handle_timeout(self.now, &mut self.generation, &mut effects);
                self.check(&effects);
            }
        }
    }

    fn check(&mut self, effects: &[ReceiverEffect]) {
        for e in effects {
            match e {
                ReceiverEffect::Abort { contacted, generation } => {
                    self.aborts += 1;
                    let knows = self.contacted > 0;
                    assert_eq!(generation.is_some(), knows);
                    assert_eq!(*contacted, if knows { self.contacted } else { self.records } as usize);
                    self.armed_at = generation.map(|_| self.now);
                }
                ReceiverEffect::Released { proven } => {
                    self.released += 1;
                    let all = self.acked.len() as u32 == self.contacted;
                    let late = self.armed_at.is_some_and(|t| t + RELEASE <= self.now);
                    assert!(if *proven { all } else { late && !self.proof }, "released on nothing");
                }
                ReceiverEffect::Publish(_) => panic!("published twice"),
                _ => {}
            }
        }
        let room = &self.room;
        let poll = room.poll();
        assert!(self.aborts <= 1 && self.released <= 1);
        if self.seen.is_terminal() {
            assert_eq!(poll, self.seen, "a terminal state changed");
        } else if poll == KvPoll::Success {
            assert_eq!(self.succeeded.len() as u32, self.required, "Success without every rank (B1)");
        } else if poll != KvPoll::Failed {
            assert!((self.succeeded.len() as u32) < self.required, "every rank reported, and it is not Success");
        }
        let free = match poll {
            KvPoll::Success => true,
            KvPoll::Failed => self.contacted == 0 || self.released == 1,
            _ => false,
        };
        assert_eq!(room.releasable(), free);
        assert!(room.releasable() || !self.was_releasable, "pages were taken back");
        let told = |e: &ReceiverEffect| matches!(e, ReceiverEffect::Changed | ReceiverEffect::Released { .. });
        let news = poll != self.seen || room.releasable() != self.was_releasable;
        assert!(effects.iter().any(told) || !news, "the handle is not told");
        self.was_releasable = room.releasable();
        let reason = room.failure().map(|f| f.reason.to_string());
        assert_eq!(reason.is_some(), poll == KvPoll::Failed);
        assert!(self.first_reason.is_none() || reason == self.first_reason, "the first reason stays");
        self.first_reason = reason;
        self.seen = poll;
    }

    /// The room is cleared, and every rank acks: nothing may be left.
    fn end(mut self) {
        self.feed(ReceiverEvent::Clear);
        if let Some(generation) = self.room.armed_generation() {
            for rank in 0..self.contacted {
                self.acked.insert(rank);
                self.feed(ReceiverEvent::AbortAck(PrefillRank(rank), generation));
            }
        }
        assert!(self.room.finished());
    }
}

fn said(rank: u32, status: KvPoll, reason: Option<&str>) -> ReceiverEvent {
    let reason = reason.map(str::to_owned);
    ReceiverEvent::Status(KvStatus { room: 42, status, prefill_rank: PrefillRank(rank), reason })
}

/// Lives that go well, are aborted and acked, released by time, and published in part.
pub fn seeds() -> Vec<Vec<u8>> {
    let (peers, publish, success) = ([0, 0], [0, 3, 2], [0, 5]);
    let abort = [0, 11, 3];
    let ack = |rank: u8| [rank, 9, 1];
    let life = |kind: [u8; 3], parts: &[&[u8]]| [&kind[..], &parts.concat()].concat();
    vec![
        life([0, 0, 0], &[&peers, &publish, &success]),
        life([1, 1, 1], &[&peers, &publish, &success, &[1, 5], &[0, 12, 3]]),
        life([1, 2, 1], &[&peers, &publish, &abort, &ack(0), &ack(1), &ack(2)]),
        life([0, 2, 1], &[&peers, &publish, &abort, &[0, 13, 255], &ack(0)]),
        life([0, 2, 0], &[&peers, &[0, 3, 8], &ack(0)]),
        life([0, 0, 0], &[&peers, &publish, &[0, 13, 255], &[0, 8, 0]]),
        life([1, 0, 0], &[&[0, 2, 3], &peers]),
    ]
}
