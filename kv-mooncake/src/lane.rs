//! A lane: one shard's ops, and how they stand.
//!
//! The library gives no descriptor to sleep on and calls nobody back, so tasks that go on are looked at by time: a timer
//! in the lane's wake descriptor, short while an end is near, longer the longer nothing ends.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_core::ids::PeerId;
use kv_core::transport::{
    Lane, LaneEvent, Outcome, Settlement, SubmitError, TransportError, TransportErrorKind as ErrorKind, WriteOp,
};
use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::flight::{Flight, GOING_SEEN, Stand, look_again};
use crate::lower::lower;
use crate::peer::{Peer, State};
use crate::stats;
use crate::transport::{Core, lock};

/// While nothing ends, the time to the next look grows from the first to the last of these.
const FIRST_LOOK: Duration = Duration::from_micros(10);
const LAST_LOOK: Duration = Duration::from_micros(100);
/// So many tasks of a peer take longer than [`LAST_LOOK`], each of them at least some microseconds.
const DEEP: usize = 64;
/// While nothing ends, one look goes on for this long: it costs less than sleeping and waking for it.
const ONE_LOOK: Duration = Duration::from_micros(20);
/// So long after the last post or end. What takes longer is slow, or hangs.
const EAGER: Duration = Duration::from_millis(10);
/// What was reported unresolved and goes on is looked at this often.
const OVERDUE_LOOK: Duration = Duration::from_millis(10);

/// The state of a peer has changed.
#[derive(Clone)]
pub(crate) struct Change {
    pub peer: Arc<Peer>,
    /// It was live until now, and nobody let go of it: news for the manager.
    pub lost_now: bool,
}

/// What other threads tell a lane.
pub(crate) struct LaneShared {
    wake: OwnedFd,
    woken: AtomicBool,
    changed: Mutex<Vec<Change>>,
}

impl LaneShared {
    pub fn new() -> io::Result<Arc<Self>> {
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Self { wake, woken: AtomicBool::new(false), changed: Mutex::default() }))
    }

    pub fn changed(&self, change: Change) {
        lock(&self.changed).push(change);
        self.signal();
    }

    /// Make the wake descriptor readable until the next poll.
    fn signal(&self) {
        if !self.woken.swap(true, Ordering::AcqRel) {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    fn take(&self) -> Vec<Change> {
        if self.woken.load(Ordering::Acquire) {
            // Emptied before the mark goes: a signal in between writes nothing, and its change is taken below.
            let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
            self.woken.swap(false, Ordering::AcqRel);
        }
        std::mem::take(&mut *lock(&self.changed))
    }
}

/// The ops of one peer without an outcome, oldest first.
struct Queue {
    flights: VecDeque<Flight>,
    /// When something of any of them last moved.
    moved: Instant,
}

pub(crate) struct MooncakeLane {
    core: Arc<Core>,
    shared: Arc<LaneShared>,
    wake: OwnedFd,
    timer: OwnedFd,
    flying: HashMap<PeerId, Queue>,
    in_flight: usize,
    /// Reported unresolved; the library has tasks of it that were not seen to end.
    overdue: Vec<Flight>,
    /// Failed, and all of it has ended: nothing but the death of the peer proves anything.
    retained: Vec<Flight>,
    news: Vec<LaneEvent>,
    look: Duration,
    eager_until: Instant,
    next_overdue_look: Instant,
    armed: bool,
}

impl MooncakeLane {
    pub fn new(core: Arc<Core>, shared: Arc<LaneShared>) -> io::Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let wake = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for fd in [shared.wake.as_fd(), timer.as_fd()] {
            epoll::add(&wake, fd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        }
        Ok(Self {
            core,
            shared,
            wake,
            timer,
            flying: HashMap::new(),
            in_flight: 0,
            overdue: Vec::new(),
            retained: Vec::new(),
            news: Vec::new(),
            look: FIRST_LOOK,
            eager_until: Instant::now(),
            next_overdue_look: Instant::now(),
            armed: false,
        })
    }

    fn tell(&mut self, event: LaneEvent) {
        self.news.push(event);
        self.shared.signal();
    }

    /// An op is accepted: give the library what there is room for, behind what waits already.
    fn accept(&mut self, mut flight: Flight, now: Instant) {
        let counters = &self.core.counters;
        stats::add(&counters.ops_submitted, 1);
        stats::add(&counters.bytes_submitted, flight.op.plan.total_bytes());
        if flight.stand() == Stand::Done {
            // Nothing to move.
            return self.done(flight);
        }
        let queue = self.flying.entry(flight.peer.id).or_insert_with(|| Queue { flights: VecDeque::new(), moved: now });
        if queue.flights.is_empty() {
            queue.moved = now;
        }
        if !queue.flights.back().is_some_and(Flight::waits) {
            flight.post(&self.core, now);
        }
        queue.flights.push_back(flight);
        self.in_flight += 1;
        self.look = FIRST_LOOK;
        self.eager_until = now + EAGER;
        self.arm();
    }

    fn done(&mut self, flight: Flight) {
        stats::add(&self.core.counters.ops_done, 1);
        self.tell(LaneEvent::Outcome(flight.op.id, Outcome::Done));
        flight.release(&self.core);
    }

    /// All that the library had of it has arrived, and the rest never goes.
    fn cut_short(&mut self, flight: Flight, error: TransportError) {
        stats::add(&self.core.counters.ops_failed, 1);
        let outcome = Outcome::Failed { src_quiet: true, dst_quiet: true, error };
        self.tell(LaneEvent::Outcome(flight.op.id, outcome));
        flight.release(&self.core);
    }

    /// Nothing is proven about its destination, nor about its source while any of it goes on.
    fn unresolved(&mut self, mut flight: Flight, error: TransportError) {
        stats::add(&self.core.counters.ops_unresolved, 1);
        stats::add(&self.core.counters.ops_retained, 1);
        let outcome = match flight.source_is_quiet() {
            true => Outcome::Failed { src_quiet: true, dst_quiet: false, error },
            false => Outcome::Unresolved { error },
        };
        flight.told_source |= flight.source_is_quiet();
        self.tell(LaneEvent::Outcome(flight.op.id, outcome));
        self.keep(flight);
    }

    /// What was reported unresolved goes where it is looked at, or waits for a death; or it is over.
    fn keep(&mut self, mut flight: Flight) {
        match flight.stand() {
            Stand::Open => self.overdue.push(flight),
            Stand::Failed if flight.peer.dead() => self.settle(flight, Settlement::PeerGenerationDead),
            Stand::Failed => {
                // The one settlement there is: where no death can be proven, nothing better comes.
                if flight.source_is_quiet() && !flight.told_source && flight.peer.host.is_none() {
                    flight.told_source = true;
                    let settlement = Settlement::Settled { src_quiet: true, dst_quiet: false };
                    self.tell(LaneEvent::Settlement(flight.op.id, settlement));
                }
                flight.shed(&self.core);
                self.retained.push(flight);
            }
            Stand::Done | Stand::CutShort => {
                self.settle(flight, Settlement::Settled { src_quiet: true, dst_quiet: true });
            }
        }
    }

    fn settle(&mut self, flight: Flight, settlement: Settlement) {
        self.core.settled();
        self.tell(LaneEvent::Settlement(flight.op.id, settlement));
        flight.release(&self.core);
    }

    /// Look at what goes on, and give the library what there is room for now. Whether anything ended.
    fn look_at(&mut self, now: Instant) -> bool {
        let mut any = false;
        let mut ended = Vec::new();
        let timeout = self.core.op_timeout;
        for queue in self.flying.values_mut() {
            let lost = queue.flights.front().and_then(|f| f.peer.lost());
            let (mut seen, mut at, mut room, others) = (0, 0, true, ended.len());
            while at < queue.flights.len() {
                let flight = &mut queue.flights[at];
                let before = flight.since;
                if seen < GOING_SEEN {
                    flight.sweep(&self.core, &mut seen, now);
                }
                if lost.is_some() || flight.failure().is_some() {
                    flight.cut_short();
                } else if room {
                    room = flight.post(&self.core, now);
                }
                if flight.since != before {
                    queue.moved = now;
                    any = true;
                }
                // What the library has of it must move by itself; what has none waits for others to make room.
                let since = if flight.going() { flight.since } else { flight.since.max(queue.moved) };
                let late = now.saturating_duration_since(since) >= timeout;
                if late && flight.failure().is_none() {
                    flight.cut_short();
                }
                if late || flight.failure().is_some() || flight.stand() != Stand::Open {
                    let reason = flight.failure().or(lost.as_ref()).cloned();
                    ended.extend(queue.flights.remove(at).map(|f| (f, reason)));
                } else {
                    at += 1;
                }
            }
            let ended = &mut ended[others..];
            let all = || ended.iter().map(|(f, _)| f).chain(&queue.flights);
            if let Some(fresh) = all().find(|f| f.fresh()) {
                if fresh.peer.process.is_none() {
                    look_again(&self.core, all().chain(self.overdue.iter().filter(|f| f.peer.id == fresh.peer.id)));
                }
                ended.iter_mut().map(|(f, _)| f).chain(&mut queue.flights).for_each(Flight::judge);
            }
        }
        self.flying.retain(|_, queue| !queue.flights.is_empty());
        self.in_flight -= ended.len();
        any |= !ended.is_empty();
        for (flight, reason) in ended {
            let late = || {
                let text = format!("nothing of the write to {} has moved for {timeout:?}", flight.peer.name);
                TransportError::new(ErrorKind::Timeout, text)
            };
            match flight.stand() {
                Stand::Done => self.done(flight),
                Stand::CutShort => {
                    let error = reason.unwrap_or_else(late);
                    self.cut_short(flight, error);
                }
                Stand::Open | Stand::Failed => {
                    let error = flight.failure().cloned().or(reason).unwrap_or_else(late);
                    let (peer, failed) = (Arc::clone(&flight.peer), flight.failure().is_some());
                    self.unresolved(flight, error.clone());
                    if failed {
                        self.core.lose(&peer, error);
                    }
                }
            }
        }
        any
    }

    fn look_at_overdue(&mut self, now: Instant) {
        if self.overdue.is_empty() || now < self.next_overdue_look {
            return;
        }
        self.next_overdue_look = now + OVERDUE_LOOK;
        let mut overdue = std::mem::take(&mut self.overdue);
        overdue.iter_mut().for_each(|f| f.sweep(&self.core, &mut 0, now));
        if overdue.iter().any(|f| f.fresh() && f.peer.process.is_none()) {
            look_again(&self.core, overdue.iter());
        }
        overdue.iter_mut().for_each(Flight::judge);
        for flight in overdue {
            let failed = flight.failure().cloned().map(|error| (Arc::clone(&flight.peer), error));
            self.keep(flight);
            if let Some((peer, error)) = failed {
                self.core.lose(&peer, error);
            }
        }
    }

    /// The state of a peer has changed: tell it, and what follows from it.
    fn changed(&mut self, change: &Change) {
        let peer = &change.peer;
        let (error, dead) = match peer.state() {
            State::Live => return,
            State::Lost(e) => (e, false),
            State::Dead(e) => (e, true),
        };
        if change.lost_now {
            self.tell(LaneEvent::PeerLost(peer.id, error));
        }
        if dead {
            // What has not ended is looked at until it has: its memory is read from as long.
            let theirs: Vec<Flight> = self.retained.extract_if(.., |f| f.peer.id == peer.id).collect();
            theirs.into_iter().for_each(|f| self.settle(f, Settlement::PeerGenerationDead));
        }
    }

    fn changes(&mut self) -> bool {
        let changes = self.shared.take();
        changes.iter().for_each(|c| self.changed(c));
        !changes.is_empty()
    }

    /// The library has enough to do until the last of looks: what ends before is seen then, and the cores are its own.
    fn deep(&self) -> bool {
        let peers = self.flying.values().filter_map(|q| q.flights.front());
        peers.map(|f| f.peer.window.outstanding()).max().unwrap_or(0) >= DEEP
    }

    /// Have the wake descriptor say when to look next.
    fn arm(&mut self) {
        let next = match (self.in_flight > 0, self.overdue.is_empty()) {
            (true, _) => Some(self.look),
            (false, false) => Some(OVERDUE_LOOK),
            (false, true) => None,
        };
        if next.is_none() && !self.armed {
            return;
        }
        let at = next.map_or(Timespec::default(), |d| Timespec { tv_sec: 0, tv_nsec: d.subsec_nanos().max(1).into() });
        let timer = Itimerspec { it_interval: Timespec::default(), it_value: at };
        if let Err(e) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &timer) {
            tracing::error!(error = %e, "a lane's timer cannot be set");
        }
        self.armed = next.is_some();
    }
}

impl Lane for MooncakeLane {
    fn submit(&mut self, op: WriteOp) -> Result<(), SubmitError> {
        let not_connected = || format!("peer {} is not connected", op.peer);
        let rejected = |op, text| SubmitError::Rejected(op, TransportError::new(ErrorKind::PeerLost, text));
        let Some(peer) = self.core.peer(op.peer) else {
            let text = not_connected();
            return Err(rejected(op, text));
        };
        // Counted before the look at its state: from here on it is not forgotten under the op.
        peer.open.fetch_add(1, Ordering::SeqCst);
        let lost = match peer.lost() {
            Some(error) => Some(error.message),
            None => peer.closing.load(Ordering::SeqCst).then(not_connected),
        };
        let refused = if let Some(text) = lost {
            Err(rejected(op, text))
        } else if self.in_flight + self.overdue.len() >= self.core.config.max_ops_in_flight {
            Err(SubmitError::Busy(op))
        } else {
            match lower(&self.core, &op, &peer) {
                Ok(pieces) => {
                    let now = Instant::now();
                    self.accept(Flight::new(op, peer, pieces, now), now);
                    return Ok(());
                }
                Err(error) => Err(SubmitError::Rejected(op, error)),
            }
        };
        peer.open.fetch_sub(1, Ordering::SeqCst);
        self.core.forget_if_over(&peer);
        refused
    }

    fn poll(&mut self, out: &mut Vec<LaneEvent>) {
        self.changes();
        if self.in_flight > 0 || !self.overdue.is_empty() {
            let now = Instant::now();
            let mut any = self.look_at(now);
            let deep = self.deep();
            while !any && !deep && self.in_flight > 0 && now < self.eager_until && now.elapsed() < ONE_LOOK {
                std::thread::yield_now();
                any = self.look_at(Instant::now());
            }
            if any {
                self.eager_until = now + EAGER;
            }
            self.look = match (deep, any) {
                (true, _) => LAST_LOOK,
                (false, true) => FIRST_LOOK,
                (false, false) => (self.look * 2).min(LAST_LOOK),
            };
            self.look_at_overdue(now);
        }
        if self.armed {
            let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
        }
        self.arm();
        // Losses that this very call noticed are told with it.
        self.changes();
        out.append(&mut self.news);
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.wake.as_raw_fd())
    }
}

impl Drop for MooncakeLane {
    fn drop(&mut self) {
        // What may still be in use outlives the lane. What the library has not had never goes.
        let flying = std::mem::take(&mut self.flying).into_values().flat_map(|q| q.flights);
        let mut left: Vec<Flight> = flying.collect();
        left.iter_mut().for_each(Flight::cut_short);
        // The others are counted already.
        stats::add(&self.core.counters.ops_retained, left.len() as u64);
        stats::add(&self.core.counters.ops_unresolved, left.len() as u64);
        left.append(&mut self.overdue);
        left.append(&mut self.retained);
        self.core.adopt(left);
    }
}
