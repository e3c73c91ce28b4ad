//! What a handle and the shard share about one room: one word to poll, one event to wait on.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use super::waiters::Waiters;
use crate::ids::Room;
use crate::poll::KvPoll;
use crate::room::Failure;

const POLL_MASK: u32 = 0b111;
const RELEASABLE: u32 = 1 << 3;
const QUEUED: u32 = 1 << 4;

/// A change of one room, as [`EventQueue::drain`] hands it out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoomEvent {
    /// Which room.
    pub room: Room,
    /// What `poll()` shows.
    pub poll: KvPoll,
    /// Whether its pages are free.
    pub releasable: bool,
}

/// State shared by one room's handle and its shard. The shard alone writes it.
pub struct RoomShared {
    room: Room,
    life: u64,
    word: AtomicU32,
    decode_prefix_len: AtomicU64,
    waiters: Waiters,
    failure: OnceLock<Failure>,
    latency: OnceLock<(Duration, Duration)>,
    queue: Option<Arc<EventQueue>>,
}

impl RoomShared {
    /// A room in Bootstrapping. `life` tells this life of the number from any other.
    pub fn new(room: Room, life: u64, queue: Option<Arc<EventQueue>>) -> Arc<Self> {
        Arc::new(Self {
            room,
            life,
            word: AtomicU32::new(KvPoll::Bootstrapping as u32),
            decode_prefix_len: AtomicU64::new(0),
            waiters: Waiters::default(),
            failure: OnceLock::new(),
            latency: OnceLock::new(),
            queue,
        })
    }

    /// Its number.
    pub fn room(&self) -> Room {
        self.room
    }

    /// Which life of the number.
    pub fn life(&self) -> u64 {
        self.life
    }

    /// One atomic load.
    pub fn poll(&self) -> KvPoll {
        KvPoll::from_wire(i64::from(self.word.load(Ordering::Acquire) & POLL_MASK)).unwrap_or(KvPoll::Failed)
    }

    /// Whether its pages are free.
    pub fn releasable(&self) -> bool {
        self.word.load(Ordering::Acquire) & RELEASABLE != 0
    }

    /// Why it failed, once it did.
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.get()
    }

    /// Prefill: tokens decode already has; known from WaitingForInput on.
    pub fn decode_prefix_len(&self) -> u64 {
        self.decode_prefix_len.load(Ordering::Acquire)
    }

    pub(crate) fn set_decode_prefix_len(&self, tokens: u64) {
        self.decode_prefix_len.store(tokens, Ordering::Release);
    }

    /// From the first enqueue, and from the last chunk's enqueue, to Success (C7).
    pub fn latency(&self) -> Option<(Duration, Duration)> {
        self.latency.get().copied()
    }

    /// The shard's news. Wakes every waiter when something changed.
    pub(crate) fn publish(
        self: &Arc<Self>,
        poll: KvPoll,
        releasable: bool,
        failure: Option<&Failure>,
        latency: Option<(Duration, Duration)>,
    ) {
        if let Some(f) = failure {
            let _ = self.failure.set(f.clone());
        }
        if let Some(l) = latency {
            let _ = self.latency.set(l);
        }
        let new = poll as u32 | if releasable { RELEASABLE } else { 0 };
        if self.word.load(Ordering::Relaxed) & (POLL_MASK | RELEASABLE) == new {
            return;
        }
        match &self.queue {
            // A swap, since `drain` takes the mark off meanwhile.
            Some(q) => {
                if self.word.swap(new | QUEUED, Ordering::AcqRel) & QUEUED == 0 {
                    q.push(self.clone());
                }
            }
            None => self.word.store(new, Ordering::Release),
        }
        self.waiters.wake_all();
    }

    /// A room that ends before its shard ever heard of it.
    #[cfg(all(feature = "control", feature = "bootstrap"))]
    pub(crate) fn conclude_unstarted(self: &Arc<Self>) {
        self.publish(KvPoll::Failed, true, Some(&Failure::here("cleared before init()")), None);
        // Not within a step of the shard, which would flush.
        if let Some(q) = &self.queue {
            q.flush();
        }
    }

    /// Wait until `done` holds.
    pub async fn wait_for(&self, done: impl Fn(&Self) -> bool) {
        self.waiters.wait(|| done(self)).await;
    }

    /// Block until `done` holds or the time is over; tells which.
    pub fn wait_for_timeout(&self, timeout: Duration, done: impl Fn(&Self) -> bool) -> bool {
        // A completion that is a few microseconds away is cheaper to spin for than to sleep for.
        for _ in 0..64 {
            if done(self) {
                return true;
            }
            std::hint::spin_loop();
        }
        self.waiters.wait_blocking(std::time::Instant::now().checked_add(timeout), || done(self))
    }
}

/// Changes of many rooms in one place, for engines that step hundreds of rooms: each room stands in it at most once,
/// with its newest state.
///
/// Readers are told by [`flush`](Self::flush), once a step of the shard and not once a room: a wake costs more than
/// everything else that is done for a small room.
pub struct EventQueue {
    rooms: Mutex<VecDeque<Arc<RoomShared>>>,
    notify: Box<dyn Fn() + Send + Sync>,
    /// There is news that nobody was told of.
    untold: AtomicBool,
    /// The reader has drained since it was told last.
    armed: AtomicBool,
}

impl EventQueue {
    /// `notify` is called by [`flush`](Self::flush) when there is news, once between two drains (for an eventfd).
    pub fn new(notify: Box<dyn Fn() + Send + Sync>) -> Self {
        Self {
            rooms: Mutex::new(VecDeque::new()),
            notify,
            untold: AtomicBool::new(false),
            armed: AtomicBool::new(true),
        }
    }

    fn push(&self, room: Arc<RoomShared>) {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner).push_back(room);
        self.untold.store(true, Ordering::Release);
    }

    /// Tell the reader, if there is news since the last call. Whoever steps a shard calls it after the step.
    pub fn flush(&self) {
        let news = self.untold.load(Ordering::Acquire) && self.untold.swap(false, Ordering::AcqRel);
        // A reader that was told and has not drained yet will see this too.
        if news && self.armed.swap(false, Ordering::AcqRel) {
            (self.notify)();
        }
    }

    /// Append what changed since the last call.
    pub fn drain(&self, out: &mut Vec<RoomEvent>) {
        // Before the look: what comes after it is told again.
        self.untold.store(false, Ordering::Release);
        self.armed.store(true, Ordering::Release);
        let rooms = std::mem::take(&mut *self.rooms.lock().unwrap_or_else(PoisonError::into_inner));
        out.extend(rooms.into_iter().map(|r| {
            let word = r.word.fetch_and(!QUEUED, Ordering::AcqRel);
            RoomEvent {
                room: r.room,
                poll: KvPoll::from_wire(i64::from(word & POLL_MASK)).unwrap_or(KvPoll::Failed),
                releasable: word & RELEASABLE != 0,
            }
        }));
    }
}
