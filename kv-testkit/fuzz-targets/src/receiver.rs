//! Any events into a receiver room, against a model of what decode has been told.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use kv_core::directory::{PrefillPeers, PrefillRecord};
use kv_core::ids::{PrefillRank, ProcessGeneration, Room};
use kv_core::net::Endpoint;
use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::time::Timestamp;
use kv_core::wire::{ExtPeer, KvStatus, RoomTag};

use crate::input::Input;

const RELEASE: Duration = Duration::from_secs(30);

struct Model {
    room: ReceiverRoom,
    now: Timestamp,
    generation: u64,
    policy: ReleasePolicy,
    tags: bool,
    /// How many of the first ranks are ours.
    ours: u32,
    /// Ranks of the answer, the dummies last; and how many must report.
    records: u32,
    required: u32,
    contacted: u32,
    succeeded: BTreeSet<u32>,
    /// What the ranks that said they wrote a part of the pages wrote together, and how many they are.
    parts: (PageSum, usize),
    /// A tag was wrong.
    torn: bool,
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
        let kind = i.u8();
        let release = match kind & 9 {
            0 => ReleasePolicy::AckOrTimeout(RELEASE),
            1 => ReleasePolicy::Proof,
            _ => ReleasePolicy::PerPeer(RELEASE),
        };
        let tags = kind & 2 != 0;
        let policy = Arc::new(ReceiverPolicy { waiting_timeout: Duration::from_secs(200), release });
        let records = 1 + i.below(4) as u32;
        let required = 1 + i.below(records as usize) as u32;
        let room = ReceiverRoom::new(room_number(), policy);
        Self {
            room: if tags { room.checking_tags(GENERATION, GEOMETRY) } else { room },
            now: Timestamp::ZERO,
            generation: 0,
            policy: release,
            tags,
            ours: if kind & 4 != 0 { 1 } else { records },
            records,
            required,
            contacted: 0,
            succeeded: BTreeSet::new(),
            parts: (PageSum::default(), 0),
            torn: false,
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
            ext: (rank < self.ours).then(|| ExtPeer::new(ProcessGeneration(7))),
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
                    pages: PAGES.into(),
                    aux_index: 1,
                    state_indices: Vec::new(),
                    decode_prefix_len: 0,
                    device_kv_indices: None,
                })));
            }
            5..=7 => {
                let counts = rank < self.required && self.room.published().is_some() && !self.room.poll().is_terminal();
                let is_new = counts && !self.succeeded.contains(&rank);
                if counts {
                    self.succeeded.insert(rank);
                }
                let kind = if self.tags { i.u8() } else { 0 };
                if kind < 128 {
                    return self.feed(said(rank, KvPoll::Success, None));
                }
                let tag = tag(kind % 8);
                self.torn |= is_new && matches!(kind % 8, 0..=2);
                if let (true, Some(part)) = (is_new, part(kind % 8)) {
                    self.parts.0.join(part);
                    self.parts.1 += 1;
                }
                self.feed(ReceiverEvent::StatusOf(status(rank, KvPoll::Success, None), tag));
                assert!(!self.torn || self.room.poll() == KvPoll::Failed, "a wrong tag was believed (H3)");
            }
            8 => match i.below(8) {
                0 => self.feed(said(rank, KvPoll::Failed, Some("boom"))),
                1 => self.feed(said(rank, KvPoll::Failed, None)),
                2 => self.feed(said(rank, KvPoll::Transferring, None)),
                5 => {
                    if rank < self.contacted && self.room.armed_generation().is_some() {
                        self.acked.insert(rank);
                    }
                    self.feed(ReceiverEvent::RankDead(PrefillRank(rank)));
                }
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
                    let proof = match self.policy {
                        ReleasePolicy::Proof => true,
                        ReleasePolicy::AckOrTimeout(_) => false,
                        ReleasePolicy::PerPeer(_) => self.contacted <= self.ours,
                    };
                    assert!(if *proven { all } else { late && !proof }, "released on nothing");
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
            let (sum, parts) = self.parts;
            let whole = self.succeeded.len() > parts;
            let adds_up = parts == 0 || sum == PageSum::of(0, &PAGES) || (sum == PageSum::default() && whole);
            assert!(!self.torn && adds_up, "Success over tags that do not match (H3)");
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

const GENERATION: u64 = 3;
const GEOMETRY: u64 = 5;

fn room_number() -> Room {
    Room::new(42).expect("a room number")
}

/// What is published.
const PAGES: [i32; 2] = [4, 5];

/// Nothing, the first or the second half of the pages; `None`: the whole.
fn part(kind: u8) -> Option<PageSum> {
    match kind {
        3 => Some(PageSum::default()),
        5 => Some(PageSum::of(0, &PAGES[..1])),
        6 => Some(PageSum::of(1, &PAGES[1..])),
        _ => None,
    }
}

/// The tag of a rank that wrote what was announced, with one thing changed.
fn tag(kind: u8) -> Option<RoomTag> {
    let head = TagHead {
        room: room_number(),
        generation: GENERATION + u64::from(kind == 1),
        decode_prefix_len: 0,
        geometry: GEOMETRY,
        aux_index: (kind != 4).then_some(1),
    };
    let pages = match kind {
        2 => PageSum::of(0, &[5, 4]),
        kind => part(kind).unwrap_or(PageSum::of(0, &PAGES)),
    };
    (kind != 0).then(|| pages.tag(&head))
}

fn status(rank: u32, status: KvPoll, reason: Option<&str>) -> KvStatus {
    KvStatus { room: 42, status, prefill_rank: PrefillRank(rank), reason: reason.map(str::to_owned) }
}

fn said(rank: u32, of: KvPoll, reason: Option<&str>) -> ReceiverEvent {
    ReceiverEvent::Status(status(rank, of, reason))
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
        life([2, 0, 0], &[&peers, &publish, &[0, 5, 255]]),
        life([2, 0, 0], &[&peers, &publish, &[0, 5, 128]]),
        life([10, 1, 1], &[&peers, &publish, &[0, 5, 131], &[1, 5, 255], &[0, 8, 5], &[1, 8, 5]]),
        life([10, 1, 1], &[&peers, &publish, &[0, 5, 133], &[1, 5, 134]]),
        life([12, 1, 0], &[&peers, &publish, &abort, &[0, 13, 40]]),
    ]
}
