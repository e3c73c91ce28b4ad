//! Which lives on decode a room of prefill belongs to (F6): a number used again never mixes them, whatever order messages
//! of the old and the new life arrive in.
//!
//! A sender is *bound* to the life whose metadata or ABORT it took. What comes later of an older life is stale; metadata
//! of a newer one is for the next sender of that number. A life that is over here is *spent*: a late or repeated message
//! of it is for nobody.

use std::collections::{HashMap, VecDeque};

use smallvec::SmallVec;

use super::*;
use crate::ids::ProcessGeneration;

/// One life of a room on one decode rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DecodeLife {
    pub endpoint: Endpoint,
    pub process: ProcessGeneration,
    pub generation: u64,
}

impl DecodeLife {
    pub fn new(endpoint: &Endpoint, life: RoomLife) -> Self {
        Self { endpoint: endpoint.clone(), process: life.process, generation: life.generation }
    }

    /// What a message with this extension speaks of, if it names a life.
    pub fn of(endpoint: &Endpoint, ext: &Extension) -> Option<Self> {
        let generation = ext.room_generation?;
        Some(Self { endpoint: endpoint.clone(), process: ext.from.process, generation })
    }

    /// A life of the same decode process.
    fn is_sibling(&self, other: &Self) -> bool {
        self.endpoint == other.endpoint && self.process == other.process
    }
}

/// Where an ABORT_ACK goes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct AckTarget {
    pub endpoint: Endpoint,
    /// The ABORT's.
    pub generation: u64,
    /// What the ABORT spoke of, when it came from a decode of ours.
    pub life: Option<DecodeLife>,
}

/// Lives that are over, for a bounded time and number of rooms.
#[derive(Debug, Default)]
pub(super) struct Spent {
    rooms: HashMap<Room, (Timestamp, SmallVec<[DecodeLife; 1]>)>,
    order: VecDeque<(Timestamp, Room)>,
}

impl Spent {
    /// The newest life of this decode process that is over.
    pub fn newest(&self, room: Room, of: &DecodeLife) -> Option<u64> {
        self.rooms.get(&room)?.1.iter().find(|l| l.is_sibling(of)).map(|l| l.generation)
    }

    pub fn insert(&mut self, room: Room, life: DecodeLife, until: Timestamp, (rooms, peers): (usize, usize)) {
        while self.order.len() >= rooms.max(1) {
            self.drop_oldest();
        }
        let (deadline, lives) = self.rooms.entry(room).or_insert_with(|| (until, SmallVec::new()));
        *deadline = until;
        match lives.iter_mut().find(|l| l.is_sibling(&life)) {
            Some(old) => old.generation = old.generation.max(life.generation),
            None => {
                if lives.len() >= peers.max(1) {
                    lives.remove(0);
                }
                lives.push(life);
            }
        }
        self.order.push_back((until, room));
    }

    fn drop_oldest(&mut self) {
        let Some((until, room)) = self.order.pop_front() else { return };
        if self.rooms.get(&room).is_some_and(|(deadline, _)| *deadline == until) {
            self.rooms.remove(&room);
        }
    }

    pub fn expire(&mut self, now: Timestamp) {
        while self.order.front().is_some_and(|(t, _)| *t <= now) {
            self.drop_oldest();
        }
    }

    pub fn poll_timeout(&self) -> Option<Timestamp> {
        // Many rooms end in a second: one look for all of them.
        self.order.front().map(|(t, _)| *t + Duration::from_secs(1))
    }

    pub fn len(&self) -> usize {
        self.order.len()
    }
}

/// What a message of a life is to the sender that has the room now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Belongs {
    /// Its own, or it names no life.
    Here,
    /// An older life's.
    Past,
    /// A newer life's, and the sender is bound to an older one.
    Future,
}

impl PrefillShard {
    /// A sender takes metadata or an ABORT of this life.
    pub(super) fn bind(&mut self, key: RoomKey, life: Option<DecodeLife>) {
        let (Some(e), Some(life)) = (self.rooms.get_mut(key), life) else { return };
        if !e.bound.contains(&life) && e.bound.len() < self.config.limits.max_peers_per_room {
            e.bound.push(life);
        }
    }

    /// Nothing that still comes of this life is for anybody.
    pub(super) fn spend(&mut self, now: Timestamp, room: Room, life: DecodeLife) {
        let limits = &self.config.limits;
        let bounds = (limits.max_early_rooms, limits.max_peers_per_room);
        self.spent.insert(room, life, now + self.config.tombstone_timeout, bounds);
    }

    pub(super) fn belongs(&self, key: RoomKey, life: Option<&DecodeLife>) -> Belongs {
        let (Some(e), Some(life)) = (self.rooms.get(key), life) else { return Belongs::Here };
        match e.bound.iter().find(|l| l.is_sibling(life)).map(|l| life.generation.cmp(&l.generation)) {
            Some(std::cmp::Ordering::Less) => Belongs::Past,
            Some(std::cmp::Ordering::Greater) => Belongs::Future,
            _ => Belongs::Here,
        }
    }

    /// Whether a life of prefill that may still write keeps this ACK back: unless everything it writes at that endpoint
    /// is known to be for other lives on decode.
    pub(super) fn keeps_back(e: &Entry, target: &AckTarget) -> bool {
        if e.room.outstanding() == 0 {
            return false;
        }
        let Some(life) = &target.life else { return true };
        let there = |d: &&Destination| !d.is_dummy && d.endpoint == life.endpoint;
        let mut any = false;
        for d in e.room.destinations().iter().filter(there) {
            any = true;
            if d.life.is_none_or(|l| DecodeLife::new(&d.endpoint, l) == *life) {
                return true;
            }
        }
        !any
    }
}
