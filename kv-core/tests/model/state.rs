//! One state of the universe: the real rooms, and as little as possible around them.

use std::sync::Arc;

use kv_core::poll::KvPoll;
use kv_core::room::{Destination, ReceiverRoom, SenderRoom};

use crate::setup::Budget;

/// A write, as it really is; the rooms know only what was reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Op {
    /// Who writes.
    pub p: u8,
    /// In which life of its room.
    pub life: u8,
    /// Which chunk.
    pub chunk: u32,
    /// To whom.
    pub d: u8,
    /// Into the pages of which of its lives.
    pub d_life: u8,
    /// The destination's place in the sender room.
    pub dest: usize,
    /// It may read the source.
    pub reading: bool,
    /// A byte of it may land.
    pub may_land: bool,
    /// Every byte of it is in place.
    pub landed: bool,
    /// Its one outcome was reported.
    pub told: bool,
}

impl Op {
    /// Nothing is left to happen to it.
    pub fn closed(&self) -> bool {
        self.told && !self.reading && !self.may_land
    }
}

/// A message on its way.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Msg {
    Metadata { d: u8, p: u8, d_life: u8 },
    Abort { d: u8, p: u8, generation: Option<u64>, d_life: u8 },
    Status { p: u8, d: u8, status: u8, reason: Option<Arc<str>> },
    Ack { p: u8, d: u8, generation: u64 },
}

impl Msg {
    /// From (true: prefill) whom to whom.
    pub fn channel(&self) -> (bool, u8, u8) {
        match *self {
            Self::Metadata { d, p, .. } | Self::Abort { d, p, .. } => (false, d, p),
            Self::Status { p, d, .. } | Self::Ack { p, d, .. } => (true, p, d),
        }
    }
}

/// A life of a room on prefill.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SenderLife {
    /// Gone when it is cleared and drained.
    pub room: Option<SenderRoom>,
    /// Messages find it: its handle was not cleared.
    pub named: bool,
    /// `send()` calls made.
    pub sent: u8,
    /// Posts the lane has not taken yet.
    pub posts: Vec<(u32, usize)>,
}

/// What a prefill shard keeps about this room number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Prefill {
    pub lives: Vec<SenderLife>,
    /// ABORTs to answer: decode, generation, and the life that sent it.
    pub pending_acks: Vec<(u8, u64, u8)>,
    /// Metadata without a sender, or why it is answered Failed.
    pub early: Vec<Destination>,
    pub early_failed: Option<Arc<str>>,
    pub tombstone: Option<Arc<str>>,
}

/// A life of a room on decode.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ReceiverLife {
    /// Gone when it is cleared and its pages are free.
    pub room: Option<ReceiverRoom>,
    pub named: bool,
    /// Its pages were given back by policy, not by proof.
    pub without_proof: bool,
    /// How often its pages were given back.
    pub freed: u8,
}

/// What a decode shard keeps about this room number.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Decode {
    pub lives: Vec<ReceiverLife>,
    pub generation: u64,
}

/// What was seen on the way and cannot be seen in a state. All of it stays empty, unless a rule is broken; but `acked`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Seen {
    /// ABORT_ACKs sent: prefill, decode, decode's life.
    pub acked: Vec<(u8, u8, u8)>,
    pub terminal_left: bool,
    pub cause_changed: bool,
    pub resurrected: bool,
    pub pages_taken_back: bool,
    pub told_too_early: bool,
}

/// See the [module](self).
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct State {
    pub p: Vec<Prefill>,
    pub d: Vec<Decode>,
    /// In order of sending, or sorted where order does not matter.
    pub net: Vec<Msg>,
    /// Sorted.
    pub ops: Vec<Op>,
    pub budget: Budget,
    pub seen: Seen,
}

impl State {
    pub fn sender(&self, p: u8, life: u8) -> Option<&SenderRoom> {
        self.p[usize::from(p)].lives.get(usize::from(life))?.room.as_ref()
    }

    pub fn receiver(&self, d: u8, life: u8) -> Option<&ReceiverRoom> {
        self.d[usize::from(d)].lives.get(usize::from(life))?.room.as_ref()
    }

    /// Every sender room that exists: prefill, life, room.
    pub fn senders(&self) -> impl Iterator<Item = (u8, u8, &SenderRoom)> {
        (0..)
            .zip(&self.p)
            .flat_map(|(p, node)| (0..).zip(&node.lives).filter_map(move |(life, l)| Some((p, life, l.room.as_ref()?))))
    }

    /// Every receiver room that exists: decode, life, room.
    pub fn receivers(&self) -> impl Iterator<Item = (u8, u8, &ReceiverRoom)> {
        (0..)
            .zip(&self.d)
            .flat_map(|(d, node)| (0..).zip(&node.lives).filter_map(move |(life, l)| Some((d, life, l.room.as_ref()?))))
    }

    /// The life that messages find.
    pub fn named_sender(&self, p: u8) -> Option<u8> {
        let lives = &self.p[usize::from(p)].lives;
        lives.last().is_some_and(|l| l.named).then(|| lives.len() as u8 - 1)
    }

    /// The life that messages find.
    pub fn named_receiver(&self, d: u8) -> Option<u8> {
        let lives = &self.d[usize::from(d)].lives;
        lives.last().is_some_and(|l| l.named).then(|| lives.len() as u8 - 1)
    }

    /// The pages of this life of a decode rank are free again.
    pub fn pages_free(&self, d: u8, life: u8) -> bool {
        self.receiver(d, life).is_none_or(|r| r.releasable())
    }

    /// The source pages of this life of a prefill rank are free again.
    pub fn source_free(&self, p: u8, life: u8) -> bool {
        self.sender(p, life).is_none_or(|r| r.releasable())
    }
}

pub fn wire(status: KvPoll) -> u8 {
    status as u8
}
