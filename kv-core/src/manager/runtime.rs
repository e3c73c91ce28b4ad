//! The thread that calls a shard, and the callers that run it inline.
//!
//! A shard is locked by whoever runs it. A caller pushes its command to the queue, then tries the lock: if it is free
//! the caller runs the shard itself, which spares a thread to wake (12-18 us on an idle virtual machine); if it is
//! taken, the holder looks at the queue again after it unlocked, so no command is left behind. Transports whose
//! `submit` blocks are never run inline.

use std::cell::Cell;
use std::os::fd::RawFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering, fence};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::control::wake::WakeFd;
use crate::control::zmq::{ZmqControl, ZmqError, ZmqInbox};
use crate::control::{ControlPlane, Multipart};
use crate::engine::{DecodeCommand, DecodeShard, EventQueue, NextWake, PrefillCommand, PrefillShard, RoomEvent};
use crate::time::{Clock, Timestamp};

/// A shard as the thread sees it.
pub(super) trait Step: Send + 'static {
    type Command: Send;
    fn step(&mut self, now: Timestamp, control: &mut dyn ControlPlane, commands: &mut Vec<Self::Command>) -> NextWake;
    fn lane_fd(&self) -> Option<RawFd> {
        None
    }
}

impl Step for PrefillShard {
    type Command = PrefillCommand;
    fn step(&mut self, now: Timestamp, control: &mut dyn ControlPlane, commands: &mut Vec<PrefillCommand>) -> NextWake {
        PrefillShard::step(self, now, control, commands)
    }
    fn lane_fd(&self) -> Option<RawFd> {
        PrefillShard::lane_fd(self)
    }
}

impl Step for DecodeShard {
    type Command = DecodeCommand;
    fn step(&mut self, now: Timestamp, control: &mut dyn ControlPlane, commands: &mut Vec<DecodeCommand>) -> NextWake {
        DecodeShard::step(self, now, control, commands)
    }
}

struct Runner<S: Step> {
    shard: S,
    control: ZmqControl,
    commands: Vec<S::Command>,
    /// What the last step asked for, whoever ran it.
    next: NextWake,
}

/// A shard with its queue and its thread.
pub(super) struct Engine<S: Step> {
    queue: Mutex<Vec<S::Command>>,
    cell: Mutex<Option<Runner<S>>>,
    wake: Arc<WakeFd>,
    inline: bool,
    clock: Arc<dyn Clock>,
    stop: AtomicBool,
    /// When the thread will wake by itself, ns; 0 while it is awake.
    sleeps_until: AtomicU64,
    /// The thread is about to run the shard: what is queued by then, it takes.
    thread_waits: AtomicBool,
    /// The lane has a descriptor that wakes the thread.
    lane_wakes: AtomicBool,
    /// News of all rooms, for a reader that subscribed.
    events: OnceLock<Events>,
}

/// The queue a reader drains, and the descriptor it sleeps on.
struct Events {
    queue: Arc<EventQueue>,
    fd: Arc<WakeFd>,
}

/// A lane without a wake fd is looked at this often while writes are in flight.
const LANE_POLL: Duration = Duration::from_micros(50);
const MAX_MESSAGES: usize = 256;
/// Commands in the queue beyond which a caller waits for the shard.
const MAX_QUEUE: usize = 1024;
/// Other callers' commands that one caller carries out before it leaves them to the thread.
const MAX_INLINE_STEPS: usize = 16;
/// After a step that panicked, the next one comes with the next input, or after this time.
const AFTER_PANIC: Duration = Duration::from_millis(100);

thread_local! {
    /// This thread runs a shard: a waker that calls back into a handle must not wait for it.
    static IN_STEP: Cell<bool> = const { Cell::new(false) };
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    // A panic in one step must not stop the others (F62): the data is still usable.
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<S: Step> Engine<S> {
    /// An engine without its shard yet: the shard's own parts (directory, connector) need the engine to hand results
    /// back to. Commands wait in the queue until [`Self::start`].
    pub(super) fn new(inline: bool, clock: Arc<dyn Clock>) -> std::io::Result<Arc<Self>> {
        Ok(Arc::new(Self {
            queue: Mutex::new(Vec::new()),
            cell: Mutex::new(None),
            wake: Arc::new(WakeFd::new()?),
            inline,
            clock,
            stop: AtomicBool::new(false),
            sleeps_until: AtomicU64::new(0),
            thread_waits: AtomicBool::new(false),
            lane_wakes: AtomicBool::new(false),
            events: OnceLock::new(),
        }))
    }

    /// The shard's clock.
    pub(super) fn now(&self) -> Timestamp {
        self.clock.now()
    }

    /// Wakes the thread.
    pub(super) fn waker(&self) -> Arc<WakeFd> {
        self.wake.clone()
    }

    /// Give the shard its thread.
    pub(super) fn start(
        self: &Arc<Self>,
        name: &str,
        shard: S,
        control: ZmqControl,
        inbox: ZmqInbox,
    ) -> std::io::Result<JoinHandle<()>> {
        *lock(&self.cell) = Some(Runner { shard, control, commands: Vec::new(), next: NextWake::default() });
        let engine = self.clone();
        std::thread::Builder::new().name(name.to_owned()).spawn(move || engine.run(inbox))
    }

    /// Collect the news of all rooms made from now on; the descriptor turns readable when there is some.
    pub(super) fn subscribe(&self) -> std::io::Result<RawFd> {
        if self.events.get().is_none() {
            let fd = Arc::new(WakeFd::new()?);
            fd.arm();
            let waker = fd.clone();
            let queue = Arc::new(EventQueue::new(Box::new(move || {
                waker.wake();
            })));
            // Another thread may have been faster; its queue is the one.
            let _ = self.events.set(Events { queue, fd });
        }
        self.events.get().map(|e| e.fd.fd()).ok_or_else(|| std::io::Error::other("no event queue"))
    }

    /// Where rooms put their news, if anybody reads it.
    pub(super) fn events(&self) -> Option<Arc<EventQueue>> {
        self.events.get().map(|e| e.queue.clone())
    }

    /// Append the news since the last call.
    pub(super) fn drain_events(&self, out: &mut Vec<RoomEvent>) {
        if let Some(events) = self.events.get() {
            // Armed before the look, so that what comes after it wakes again.
            events.fd.disarm();
            events.fd.arm();
            events.queue.drain(out);
        }
    }

    /// Queue a command; [`kick`](Self::kick) has it carried out. Never blocks.
    pub(super) fn enqueue(&self, command: S::Command) {
        lock(&self.queue).push(command);
    }

    /// See to it that what is queued is carried out: here, or by the thread. Takes no longer than one step.
    pub(super) fn kick(&self) {
        if self.inline {
            self.run_inline();
        } else {
            self.wake.wake();
        }
    }

    /// Hand over a command from a thread that must not run the shard (it is called by the shard, or by a runtime).
    pub(super) fn post(&self, command: S::Command) {
        self.enqueue(command);
        self.wake.wake();
    }

    /// End the thread, then the shard: not with the last holder of the engine, which may be one of the shard's own
    /// helpers (its directory hands results back through a weak reference), and could not wait for itself.
    pub(super) fn stop(&self, thread: Option<JoinHandle<()>>) {
        self.stop.store(true, Ordering::Release);
        self.wake.wake();
        if let Some(t) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = t.join();
        }
        let cell = lock(&self.cell).take();
        drop(cell);
    }

    fn run_inline(&self) {
        for _ in 0..MAX_INLINE_STEPS {
            // Pairs with the fence in `run`: either the thread is seen to wait, and then it finds the command, or not.
            fence(Ordering::SeqCst);
            // Callers that are faster than the shard wait their turn, so that the queue stays short.
            let crowded = lock(&self.queue).len() > MAX_QUEUE && !IN_STEP.get();
            if self.thread_waits.load(Ordering::SeqCst) && !crowded {
                return;
            }
            let mut cell = match self.cell.try_lock() {
                Ok(cell) => cell,
                Err(TryLockError::Poisoned(e)) => e.into_inner(),
                Err(TryLockError::WouldBlock) if crowded => lock(&self.cell),
                Err(TryLockError::WouldBlock) => return,
            };
            let next = self.step(&mut cell, &mut Vec::new());
            // Under the cell's lock: the thread reads `next` and says how long it sleeps under it, too.
            let wakes_at = self.sleeps_until.load(Ordering::Acquire);
            let sooner = next.at.is_some_and(|at| at.as_nanos() < wakes_at);
            if next.again || sooner || (next.in_flight && !self.lane_wakes.load(Ordering::Relaxed)) {
                self.wake.wake();
            }
            drop(cell);
            if lock(&self.queue).is_empty() {
                return;
            }
        }
        self.wake.wake();
    }

    fn step(&self, cell: &mut Option<Runner<S>>, messages: &mut Vec<Multipart>) -> NextWake {
        let Some(cell) = cell else { return NextWake::default() };
        for m in messages.drain(..) {
            cell.control.push_incoming(m);
        }
        std::mem::swap(&mut *lock(&self.queue), &mut cell.commands);
        let now = self.clock.now();
        IN_STEP.set(true);
        let result = catch_unwind(AssertUnwindSafe(|| cell.shard.step(now, &mut cell.control, &mut cell.commands)));
        IN_STEP.set(false);
        cell.commands.clear();
        if let Some(events) = self.events.get() {
            events.queue.flush();
        }
        cell.next = result.unwrap_or_else(|_| {
            tracing::error!("a step of the shard panicked; its input is lost, other rooms go on");
            // Not at once: a panic that repeats must not eat a core.
            NextWake { at: Some(now + AFTER_PANIC), ..NextWake::default() }
        });
        cell.next
    }

    fn run(self: Arc<Self>, mut inbox: ZmqInbox) {
        let (lane_fd, control_fd) =
            lock(&self.cell).as_ref().map_or((None, None), |c| (c.shard.lane_fd(), c.control.outbox().fd()));
        let fds: Vec<RawFd> = [Some(self.wake.fd()), lane_fd, control_fd].into_iter().flatten().collect();
        self.lane_wakes.store(lane_fd.is_some(), Ordering::Relaxed);
        let mut messages = Vec::new();
        while !self.stop.load(Ordering::Acquire) {
            if let Err(error) = inbox.recv(MAX_MESSAGES, &mut messages) {
                tracing::error!("the control socket cannot be read: {error}");
                std::thread::sleep(Duration::from_millis(10));
            }
            let full = messages.len() >= MAX_MESSAGES;
            // Callers that run the shard inline must not keep its thread, which alone reads messages, out of it.
            self.thread_waits.store(true, Ordering::SeqCst);
            let mut cell = lock(&self.cell);
            self.thread_waits.store(false, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            let next = self.step(&mut cell, &mut messages);
            drop(cell);
            if full || next.again {
                continue;
            }
            self.wake.arm();
            // A caller may have stepped the shard meanwhile: its wish counts, and it must see how long we sleep.
            let next = {
                let cell = lock(&self.cell);
                let next = cell.as_ref().map_or(next, |c| c.next);
                self.sleeps_until.store(next.at.map_or(u64::MAX, Timestamp::as_nanos), Ordering::Release);
                next
            };
            let mut timeout = next.at.map(|at| at.since(self.clock.now()));
            if next.again {
                timeout = Some(Duration::ZERO);
            } else if next.in_flight && lane_fd.is_none() {
                timeout = Some(timeout.unwrap_or(LANE_POLL).min(LANE_POLL));
            }
            if !lock(&self.queue).is_empty() || self.stop.load(Ordering::Acquire) {
                self.wake.disarm();
                self.sleeps_until.store(0, Ordering::Release);
                continue;
            }
            if let Err(error) = self.wait(&mut inbox, &fds, timeout, next.look_until) {
                tracing::error!("the shard cannot wait for input: {error}");
                std::thread::sleep(Duration::from_millis(10));
            }
            self.wake.disarm();
            self.sleeps_until.store(0, Ordering::Release);
        }
    }

    /// Sleep until there is input; look for it first, up to `look_until`.
    fn wait(
        &self,
        inbox: &mut ZmqInbox,
        fds: &[RawFd],
        timeout: Option<Duration>,
        look_until: Option<Timestamp>,
    ) -> Result<(), ZmqError> {
        while look_until.is_some_and(|until| self.clock.now() < until) {
            let ready = inbox.wait(fds, Some(Duration::ZERO))?;
            if ready.inbox || !ready.fds.is_empty() {
                return Ok(());
            }
            std::hint::spin_loop();
        }
        inbox.wait(fds, timeout).map(drop)
    }
}
