//! Which room numbers are taken (F40, F6).

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use super::RoomError;
use crate::engine::RoomShared;
use crate::ids::Room;

#[derive(Debug)]
struct Taken {
    life: u64,
    /// Its handle is gone, its pages are not free.
    draining: bool,
}

/// Room numbers in use, and the counter of lives.
#[derive(Debug)]
pub(super) struct LiveRooms {
    taken: Mutex<HashMap<Room, Taken>>,
    max: usize,
    next_life: AtomicU64,
}

impl LiveRooms {
    pub(super) fn new(max: usize) -> Self {
        Self { taken: Mutex::new(HashMap::new()), max, next_life: AtomicU64::new(1) }
    }

    /// Take a number: the life it gets.
    pub(super) fn take(&self, room: Room) -> Result<u64, RoomError> {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        match taken.get(&room) {
            Some(t) if t.draining => return Err(RoomError::RoomDraining(room)),
            Some(_) => return Err(RoomError::RoomInUse(room)),
            None => {}
        }
        if taken.len() >= self.max {
            return Err(RoomError::TooManyRooms(taken.len()));
        }
        let life = self.next_life.fetch_add(1, Ordering::Relaxed);
        taken.insert(room, Taken { life, draining: false });
        Ok(life)
    }

    /// The handle is done with it. With `hold`, the number stays taken until the shard says it is free. `enqueue` puts
    /// the clear into the shard's queue before anybody can take the number and queue its next life.
    pub(super) fn give_back(&self, room: &RoomShared, hold: bool, enqueue: impl FnOnce()) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(t) = taken.get_mut(&room.room()).filter(|t| t.life == room.life()) {
            if hold {
                t.draining = true;
            } else {
                taken.remove(&room.room());
            }
        }
        enqueue();
    }

    /// The shard is done with it.
    pub(super) fn freed(&self, room: &RoomShared) {
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        if taken.get(&room.room()).is_some_and(|t| t.life == room.life() && t.draining) {
            taken.remove(&room.room());
        }
    }
}
