//! A lane: one shard's posts, and how they stand.
//!
//! The library gives no descriptor to sleep on and calls nobody back, so transfers in progress are looked at by time: a
//! timer in the lane's wake descriptor, short while an end is near, longer the longer nothing ends. A copy between
//! processes of one host is over when its post returns, and is never looked at.

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
use smallvec::SmallVec;

use crate::agent::{Code, Progress, Request};
use crate::lower::lower;
use crate::peer::{Peer, State};
use crate::stats;
use crate::transport::{Core, lock};

/// While nothing ends, the time to the next look grows from the first to the last of these.
const FIRST_LOOK: Duration = Duration::from_micros(10);
const LAST_LOOK: Duration = Duration::from_micros(100);
/// While nothing ends, one look goes on for this long: looking is what moves a transfer over TCP along, and costs less than
/// sleeping and waking for it (BENCHMARKS.md, NIXL).
const ONE_LOOK: Duration = Duration::from_micros(20);
/// So long after the last post or end. What takes longer is slow, or hangs.
const EAGER: Duration = Duration::from_millis(10);
/// Ops beyond their time are looked at this often.
const OVERDUE_LOOK: Duration = Duration::from_millis(10);
/// Ops of one peer that are found in progress before the others of it are left for the next look: they mostly end in the
/// order in which they began.
const IN_PROGRESS_SEEN: usize = 4;

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

/// An op that was posted, with its transfers: one for each pair of memory kinds.
pub(crate) struct Flight {
    pub op: WriteOp,
    pub peer: Arc<Peer>,
    pub requests: SmallVec<[Request; 1]>,
    /// A transfer of it is in progress, as far as the library ever said.
    pub going: bool,
    since: Instant,
}

/// How an accepted op stands after its post.
enum Posted {
    /// Done, and its outcome is told.
    Over,
    /// In progress, or unresolved.
    Open,
}

pub(crate) struct NixlLane {
    core: Arc<Core>,
    shared: Arc<LaneShared>,
    wake: OwnedFd,
    timer: OwnedFd,
    /// In progress, oldest first.
    flying: HashMap<PeerId, VecDeque<Flight>>,
    in_flight: usize,
    /// In progress beyond their time: reported unresolved, and looked at further.
    overdue: Vec<Flight>,
    /// Failed: nothing but the death of the peer proves anything about them.
    retained: Vec<Flight>,
    news: Vec<LaneEvent>,
    look: Duration,
    eager_until: Instant,
    next_overdue_look: Instant,
    armed: bool,
}

impl NixlLane {
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

    /// Post the transfers of an accepted op, and sort it by how they stand.
    #[allow(clippy::result_large_err)] // the op comes back whole, so that nothing is lost
    fn post(
        &mut self,
        op: WriteOp,
        peer: &Arc<Peer>,
        mut requests: SmallVec<[Request; 1]>,
    ) -> Result<Posted, SubmitError> {
        let counters = &self.core.counters;
        let (mut started, mut failed) = (0, None);
        let mut going: SmallVec<[Request; 1]> = SmallVec::new();
        let mut rest = requests.drain(..);
        for request in rest.by_ref() {
            match self.core.agent.post(&request) {
                Progress::Done => self.core.agent.release(request),
                Progress::Going => going.push(request),
                // The library knows the peer under another generation by now, and has started nothing.
                Progress::Failed(code) if code.0 == nixl_capi_sys::status::NOT_FOUND && started == 0 => {
                    self.core.agent.release(request);
                    rest.for_each(|r| self.core.agent.release(r));
                    let text = format!("{} was replaced", peer.name.to_string_lossy());
                    return Err(SubmitError::Rejected(op, TransportError::new(ErrorKind::PeerLost, text)));
                }
                Progress::Failed(code) => {
                    // Parts of it may be on their way.
                    going.push(request);
                    failed = Some(code);
                    break;
                }
            }
            started += 1;
        }
        // Behind a failure: never started.
        rest.for_each(|r| self.core.agent.release(r));
        stats::add(&counters.ops_submitted, 1);
        stats::add(&counters.bytes_submitted, op.plan.total_bytes());
        if failed.is_none() && going.is_empty() {
            stats::add(&counters.ops_done, 1);
            self.tell(LaneEvent::Outcome(op.id, Outcome::Done));
            return Ok(Posted::Over);
        }
        let in_progress = going.len() > usize::from(failed.is_some());
        let flight = Flight { op, peer: Arc::clone(peer), requests: going, going: in_progress, since: Instant::now() };
        if let Some(code) = failed {
            self.fail(flight, code);
            self.landed(peer);
        } else {
            self.in_flight += 1;
            self.look = FIRST_LOOK;
            self.eager_until = flight.since + EAGER;
            self.flying.entry(flight.peer.id).or_default().push_back(flight);
            self.arm();
        }
        Ok(Posted::Open)
    }

    /// A transfer of it failed. That proves nothing, about the others of the op nor about the parts of this one.
    fn fail(&mut self, flight: Flight, code: Code) {
        let error = match flight.peer.state() {
            // The endpoint was closed under it, for this reason.
            State::Lost(error) | State::Dead(error) if code.0 == nixl_capi_sys::status::NOT_FOUND => error,
            _ => {
                let text = format!("write to {}: {}", flight.peer.name.to_string_lossy(), code.name());
                TransportError::new(ErrorKind::Backend, text)
            }
        };
        self.unresolved(&flight, error.clone());
        let peer = Arc::clone(&flight.peer);
        self.retained.push(flight);
        self.core.lose(&peer, error);
    }

    fn unresolved(&mut self, flight: &Flight, error: TransportError) {
        stats::add(&self.core.counters.ops_unresolved, 1);
        stats::add(&self.core.counters.ops_retained, 1);
        self.tell(LaneEvent::Outcome(flight.op.id, Outcome::Unresolved { error }));
    }

    /// Proof came for an op that was reported unresolved.
    fn settle(&mut self, flight: Flight, settlement: Settlement) {
        self.core.settled();
        self.tell(LaneEvent::Settlement(flight.op.id, settlement));
        let peer = Arc::clone(&flight.peer);
        self.core.bury(flight);
        self.ended(&peer);
    }

    /// An op of this peer cannot end well any more, or has.
    fn landed(&self, peer: &Arc<Peer>) {
        peer.flying.fetch_sub(1, Ordering::SeqCst);
        self.core.landed(peer);
    }

    fn ended(&self, peer: &Arc<Peer>) {
        peer.open.fetch_sub(1, Ordering::SeqCst);
        self.core.forget_if_over(peer);
    }

    /// How the transfers of an op stand: done ones are let go of; all are looked at.
    pub fn sweep(core: &Core, flight: &mut Flight) -> Progress {
        let (mut worst, mut going) = (Progress::Done, false);
        let mut left: SmallVec<[Request; 1]> = SmallVec::new();
        for request in flight.requests.drain(..) {
            match core.agent.status(&request) {
                Progress::Done => core.agent.release(request),
                Progress::Going => {
                    left.push(request);
                    going = true;
                    if worst == Progress::Done {
                        worst = Progress::Going;
                    }
                }
                Progress::Failed(code) => {
                    left.push(request);
                    worst = Progress::Failed(code);
                    // The endpoint was closed: that says nothing of the transfer.
                    going |= flight.going && code.0 == nixl_capi_sys::status::NOT_FOUND;
                }
            }
        }
        flight.requests = left;
        flight.going = going;
        worst
    }

    /// Look at what is in progress. Whether anything ended.
    fn look_at(&mut self, now: Instant) -> bool {
        let mut ended = Vec::new();
        let timeout = self.core.config.op_timeout;
        for queue in self.flying.values_mut() {
            let (mut seen, mut at) = (0, 0);
            while at < queue.len() && seen < IN_PROGRESS_SEEN {
                match Self::sweep(&self.core, &mut queue[at]) {
                    Progress::Going if now.duration_since(queue[at].since) < timeout => {
                        seen += 1;
                        at += 1;
                    }
                    progress => ended.extend(queue.remove(at).map(|f| (f, progress))),
                }
            }
        }
        self.flying.retain(|_, queue| !queue.is_empty());
        self.in_flight -= ended.len();
        let any = !ended.is_empty();
        for (flight, progress) in ended {
            match progress {
                Progress::Done => {
                    stats::add(&self.core.counters.ops_done, 1);
                    self.tell(LaneEvent::Outcome(flight.op.id, Outcome::Done));
                    self.landed(&flight.peer);
                    self.ended(&flight.peer);
                }
                Progress::Failed(code) => {
                    let peer = Arc::clone(&flight.peer);
                    self.fail(flight, code);
                    self.landed(&peer);
                }
                Progress::Going => {
                    let name = flight.peer.name.to_string_lossy();
                    let text = format!("write to {name} is still in progress after {timeout:?}");
                    self.unresolved(&flight, TransportError::new(ErrorKind::Timeout, text));
                    self.overdue.push(flight);
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
        for mut flight in std::mem::take(&mut self.overdue) {
            match Self::sweep(&self.core, &mut flight) {
                Progress::Done => {
                    self.landed(&flight.peer);
                    self.settle(flight, Settlement::Settled { src_quiet: true, dst_quiet: true });
                }
                Progress::Going => self.overdue.push(flight),
                Progress::Failed(code) => {
                    let text = format!("write to {}: {}", flight.peer.name.to_string_lossy(), code.name());
                    let peer = Arc::clone(&flight.peer);
                    self.retained.push(flight);
                    self.core.lose(&peer, TransportError::new(ErrorKind::Backend, text));
                    self.landed(&peer);
                }
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
            self.tell(LaneEvent::PeerLost(peer.id, error.clone()));
        }
        if !dead {
            return;
        }
        // The endpoint is closed: the library has nothing more to say about these.
        for flight in self.flying.remove(&peer.id).into_iter().flatten() {
            self.in_flight -= 1;
            peer.flying.fetch_sub(1, Ordering::SeqCst);
            self.unresolved(&flight, error.clone());
            self.retained.push(flight);
        }
        let theirs = |f: &mut Flight| f.peer.id == peer.id;
        let mut settled: Vec<Flight> = self.retained.extract_if(.., theirs).collect();
        let overdue: Vec<Flight> = self.overdue.extract_if(.., theirs).collect();
        peer.flying.fetch_sub(overdue.len(), Ordering::SeqCst);
        settled.extend(overdue);
        for flight in settled {
            self.settle(flight, Settlement::PeerGenerationDead);
        }
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

impl Lane for NixlLane {
    fn submit(&mut self, op: WriteOp) -> Result<(), SubmitError> {
        let not_connected = || format!("peer {} is not connected", op.peer);
        let Some(peer) = self.core.peer(op.peer) else {
            let error = TransportError::new(ErrorKind::PeerLost, not_connected());
            return Err(SubmitError::Rejected(op, error));
        };
        // Counted before the look at its state: from here on it is not forgotten, nor its endpoint closed, under the op.
        peer.open.fetch_add(1, Ordering::SeqCst);
        peer.flying.fetch_add(1, Ordering::SeqCst);
        let lost = match peer.state() {
            State::Lost(error) | State::Dead(error) => Some(error.message),
            State::Live if peer.closing.load(Ordering::SeqCst) => Some(not_connected()),
            State::Live => None,
        };
        let submitted = if let Some(text) = lost {
            Err(SubmitError::Rejected(op, TransportError::new(ErrorKind::PeerLost, text)))
        } else if self.in_flight + self.overdue.len() >= self.core.config.max_ops_in_flight {
            Err(SubmitError::Busy(op))
        } else {
            match lower(&self.core, &op, &peer) {
                Ok(requests) => self.post(op, &peer, requests),
                Err(error) => Err(SubmitError::Rejected(op, peer.lost().unwrap_or(error))),
            }
        };
        if !matches!(submitted, Ok(Posted::Open)) {
            self.landed(&peer);
            self.ended(&peer);
        }
        submitted.map(drop)
    }

    fn poll(&mut self, out: &mut Vec<LaneEvent>) {
        for change in self.shared.take() {
            self.changed(&change);
        }
        if self.in_flight > 0 || !self.overdue.is_empty() {
            let now = Instant::now();
            let mut any = self.look_at(now);
            while !any && self.in_flight > 0 && now < self.eager_until && now.elapsed() < ONE_LOOK {
                std::thread::yield_now();
                any = self.look_at(now);
            }
            if any {
                self.eager_until = now + EAGER;
            }
            self.look = if any { FIRST_LOOK } else { (self.look * 2).min(LAST_LOOK) };
            self.look_at_overdue(now);
        }
        if self.armed {
            let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
        }
        self.arm();
        // Losses that this very call noticed are told with it.
        for change in self.shared.take() {
            self.changed(&change);
        }
        out.append(&mut self.news);
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.wake.as_raw_fd())
    }
}

impl Drop for NixlLane {
    fn drop(&mut self) {
        // What may still be in use outlives the lane.
        let flying: Vec<Flight> = std::mem::take(&mut self.flying).into_values().flatten().collect();
        // The others are counted already.
        stats::add(&self.core.counters.ops_retained, flying.len() as u64);
        stats::add(&self.core.counters.ops_unresolved, flying.len() as u64);
        for flight in &self.retained {
            // The keeper cannot tell these from those that may end well.
            flight.peer.flying.fetch_add(1, Ordering::SeqCst);
        }
        let left = flying.into_iter().chain(std::mem::take(&mut self.overdue));
        self.core.adopt(left.chain(std::mem::take(&mut self.retained)).collect());
    }
}
