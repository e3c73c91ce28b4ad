//! A lane: one shard's ops, and its own connection to each peer. Its calls do all the work: no thread stands behind it.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use kv_core::ids::PeerId;
use kv_core::transport::{
    Lane, LaneEvent, Outcome, Settlement, SubmitError, TransportError, TransportErrorKind as ErrorKind, WriteOp,
};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, timerfd_create, timerfd_settime};

use crate::conn::{Conn, End, Scratch};
use crate::flight::Flight;
use crate::lower::lower;
use crate::peer::{Peer, State};
use crate::stats;
use crate::transport::{Core, lock};

/// Bytes that one submission gives to the kernel; the rest goes as it makes room.
const AT_ONCE: u64 = 256 << 10;
/// Bytes that one poll gives to the kernel, a peer.
const TURN: u64 = 4 << 20;
/// Small writes are held back up to this many bytes while earlier ones to the peer are in flight.
const HOLD: u64 = 64 << 10;
const WAKE: u64 = u64::MAX;
const TIMER: u64 = u64::MAX - 1;

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
        if !self.woken.load(Ordering::Acquire) {
            return Vec::new();
        }
        // Emptied before the mark goes: a signal in between writes nothing, and its change is taken below.
        let _ = rustix::io::read(&self.wake, &mut [0u8; 8]);
        self.woken.swap(false, Ordering::AcqRel);
        std::mem::take(&mut *lock(&self.changed))
    }
}

pub(crate) struct TcpLane {
    core: Arc<Core>,
    shared: Arc<LaneShared>,
    set: OwnedFd,
    timer: OwnedFd,
    conns: HashMap<PeerId, Conn>,
    /// Ops, and their pieces, that are on a connection.
    in_flight: usize,
    pieces: usize,
    /// Their connection is gone: nothing but the death of the peer proves anything about their destination.
    retained: Vec<(Arc<Peer>, Flight)>,
    news: Vec<LaneEvent>,
    scratch: Scratch,
    ticking: bool,
    looked: Instant,
}

impl TcpLane {
    pub fn new(core: Arc<Core>, shared: Arc<LaneShared>) -> io::Result<Self> {
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK)?;
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        for (fd, token) in [(shared.wake.as_fd(), WAKE), (timer.as_fd(), TIMER)] {
            epoll::add(&set, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)?;
        }
        Ok(Self {
            core,
            shared,
            set,
            timer,
            conns: HashMap::new(),
            in_flight: 0,
            pieces: 0,
            retained: Vec::new(),
            news: Vec::new(),
            scratch: Scratch::new(),
            ticking: false,
            looked: Instant::now(),
        })
    }

    /// How often deadlines are looked at.
    fn tick(&self) -> Duration {
        (self.core.target.config.op_timeout / 8).clamp(Duration::from_millis(10), Duration::from_secs(5))
    }

    /// Have the wake descriptor tick while anything is in flight.
    fn arm_timer(&mut self) {
        let ticks = self.in_flight > 0;
        if ticks == self.ticking {
            return;
        }
        let tick = if ticks { self.tick() } else { Duration::ZERO };
        let at = Timespec { tv_sec: tick.as_secs().cast_signed(), tv_nsec: tick.subsec_nanos().into() };
        let timer = Itimerspec { it_interval: at, it_value: at };
        if let Err(e) = timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &timer) {
            tracing::error!(error = %e, "a lane's timer cannot be set");
        }
        (self.ticking, self.looked) = (ticks, Instant::now());
    }

    /// Our connection to a peer: one that was made when it was connected, or when this lane was.
    fn conn(&mut self, peer: &Arc<Peer>) -> Result<(), TransportError> {
        if self.conns.contains_key(&peer.id) {
            return Ok(());
        }
        let Some(sock) = lock(&peer.spares).pop() else {
            let text = format!("there is no connection to {} for this lane; connect to it again", peer.name);
            let error = TransportError::new(ErrorKind::PeerLost, text);
            self.core.lose(peer, error.clone());
            return Err(error);
        };
        let added = epoll::add(&self.set, &sock, epoll::EventData::new_u64(peer.id.0), epoll::EventFlags::IN);
        added.map_err(|e| TransportError::new(ErrorKind::Backend, format!("a connection to {}: {e}", peer.name)))?;
        self.conns.insert(peer.id, Conn::new(sock, Arc::clone(peer), Instant::now()));
        Ok(())
    }

    fn accept(&mut self, op: WriteOp, peer: &Arc<Peer>, pieces: Vec<crate::flight::Piece>) {
        let (counters, now) = (&self.core.target.counters, Instant::now());
        stats::add(&counters.ops_submitted, 1);
        stats::add(&counters.bytes_submitted, op.plan.total_bytes());
        let Some(conn) = self.conns.get_mut(&peer.id) else { return };
        let flight = Flight::new(op, pieces, conn.acknowledges, now);
        if flight.over() {
            // Nothing to move.
            let peer = Arc::clone(&conn.peer);
            return self.over(flight, &peer);
        }
        let idle = conn.flights.is_empty();
        if idle {
            conn.moved = now;
        }
        (self.in_flight, self.pieces) = (self.in_flight + 1, self.pieces + flight.pieces.len());
        conn.push(flight);
        conn.mark();
        if (idle || conn.pending >= HOLD) && !conn.blocked {
            self.send(peer.id, AT_ONCE);
        }
        self.arm_timer();
    }

    /// Send, and have the poll set say when there is room for more.
    fn send(&mut self, id: PeerId, most: u64) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let sent = conn.send(most, &mut self.scratch, &self.core.target.counters, Instant::now());
        match sent {
            Err(end) => self.end(id, end),
            Ok(()) => self.arm(id),
        }
    }

    fn arm(&mut self, id: PeerId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let arm = conn.pending > 0;
        if arm == conn.armed {
            return;
        }
        let flags = if arm { epoll::EventFlags::IN | epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
        match epoll::modify(&self.set, &conn.sock, epoll::EventData::new_u64(id.0), flags) {
            Ok(()) => conn.armed = arm,
            Err(e) => tracing::error!(error = %e, "a connection cannot be waited for"),
        }
    }

    fn receive(&mut self, id: PeerId) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let (peer, mut over) = (Arc::clone(&conn.peer), Vec::new());
        let received = conn.receive(&mut self.scratch, &mut over, Instant::now());
        conn.mark();
        self.all_over(over, &peer);
        if let Err(end) = received {
            self.end(id, end);
        }
    }

    fn all_over(&mut self, over: Vec<Flight>, peer: &Arc<Peer>) {
        for flight in over {
            self.left(&flight);
            self.over(flight, peer);
        }
    }

    fn left(&mut self, flight: &Flight) {
        (self.in_flight, self.pieces) = (self.in_flight - 1, self.pieces.saturating_sub(flight.pieces.len()));
    }

    /// All of it that went was answered.
    fn over(&mut self, flight: Flight, peer: &Arc<Peer>) {
        let counters = &self.core.target.counters;
        if flight.told {
            return self.settle(&flight, peer, Settlement::Settled { src_quiet: true, dst_quiet: true });
        }
        if flight.cut {
            let error = peer.lost().unwrap_or_else(|| self.late(peer));
            return self.failed(&flight, peer, error);
        }
        stats::add(&counters.ops_done, 1);
        self.news.push(LaneEvent::Outcome(flight.op.id, Outcome::Done));
        self.core.released(peer);
    }

    fn late(&self, peer: &Peer) -> TransportError {
        let timeout = self.core.target.config.op_timeout;
        let text = format!("nothing of the write to {} was acknowledged for {timeout:?}; is it stopped?", peer.name);
        TransportError::new(ErrorKind::Timeout, text)
    }

    /// It failed, and both sides are quiet.
    fn failed(&mut self, flight: &Flight, peer: &Arc<Peer>, error: TransportError) {
        if flight.told {
            return self.settle(flight, peer, Settlement::Settled { src_quiet: true, dst_quiet: true });
        }
        stats::add(&self.core.target.counters.ops_failed, 1);
        let outcome = Outcome::Failed { src_quiet: true, dst_quiet: true, error };
        self.news.push(LaneEvent::Outcome(flight.op.id, outcome));
        self.core.released(peer);
    }

    fn settle(&mut self, flight: &Flight, peer: &Arc<Peer>, settlement: Settlement) {
        self.core.settled();
        self.news.push(LaneEvent::Settlement(flight.op.id, settlement));
        self.core.released(peer);
    }

    /// Its connection is gone. We read its source no more; what the peer has of it may land for as long as it lives.
    fn keep(&mut self, flight: Flight, peer: &Arc<Peer>, error: &TransportError) {
        if peer.dead() {
            return match flight.told {
                true => self.settle(&flight, peer, Settlement::PeerGenerationDead),
                false => self.failed(&flight, peer, error.clone()),
            };
        }
        if !flight.told {
            self.core.unresolved();
            let outcome = Outcome::Failed { src_quiet: true, dst_quiet: false, error: error.clone() };
            self.news.push(LaneEvent::Outcome(flight.op.id, outcome));
        }
        self.retained.push((Arc::clone(peer), flight));
    }

    /// A connection has ended.
    fn end(&mut self, id: PeerId, end: End) {
        let Some(mut conn) = self.conns.remove(&id) else { return };
        let peer = Arc::clone(&conn.peer);
        let begun: Vec<bool> = (0..conn.flights.len()).map(|n| conn.begun(n)).collect();
        let flights: Vec<Flight> = std::mem::take(&mut conn.flights).into();
        // Closed first: from here on nothing is read from any source.
        let _ = epoll::delete(&self.set, conn.sock.as_fd());
        drop(conn);
        flights.iter().for_each(|f| self.left(f));
        let error = match end {
            // What follows a refusal is taken by nobody.
            End::Refused(error) => {
                for (n, flight) in flights.into_iter().enumerate() {
                    let text = format!("behind a write that {} refused; connect to it again", peer.name);
                    let behind = TransportError::new(ErrorKind::PeerLost, text);
                    self.failed(&flight, &peer, if n == 0 { error.clone() } else { behind });
                }
                error
            }
            End::Broken(error) => {
                for (flight, begun) in flights.into_iter().zip(begun) {
                    match begun {
                        true => self.keep(flight, &peer, &error),
                        false => self.failed(&flight, &peer, error.clone()),
                    }
                }
                error
            }
        };
        self.core.lose(&peer, error);
    }

    /// Leave out what has not begun to go to this peer.
    fn cut(&mut self, id: PeerId, error: &TransportError, which: impl Fn(&Flight) -> bool) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let (peer, mut never, mut over) = (Arc::clone(&conn.peer), Vec::new(), Vec::new());
        let before: usize = conn.flights.iter().map(|f| f.pieces.len()).sum();
        conn.cut(which, &mut never, &mut over);
        conn.mark();
        let after: usize = conn.flights.iter().map(|f| f.pieces.len()).sum();
        self.pieces = self.pieces.saturating_sub(before - after);
        self.in_flight -= never.len() + over.len();
        over.into_iter().for_each(|f| self.over(f, &peer));
        never.iter().for_each(|f| self.failed(f, &peer, error.clone()));
        self.arm(id);
    }

    /// Report what has not moved for too long. It is waited for further: its acknowledgements may come.
    fn deadlines(&mut self) {
        let now = Instant::now();
        if self.in_flight == 0 || now.saturating_duration_since(self.looked) < self.tick() {
            return;
        }
        self.looked = now;
        let timeout = self.core.target.config.op_timeout;
        for id in self.conns.keys().copied().collect::<Vec<_>>() {
            // There may be answers, and too few to be woken for.
            self.receive(id);
            let Some(conn) = self.conns.get(&id) else { continue };
            let (peer, moved) = (Arc::clone(&conn.peer), conn.moved);
            let late = |f: &Flight| !f.told && now.saturating_duration_since(f.since.max(moved)) >= timeout;
            if !conn.flights.iter().any(late) {
                continue;
            }
            let error = self.late(&peer);
            self.cut(id, &error, late);
            let Some(conn) = self.conns.get_mut(&id) else { continue };
            for flight in conn.flights.iter_mut().filter(|f| late(f)) {
                flight.told = true;
                self.core.unresolved();
                let outcome = Outcome::Unresolved { error: error.clone() };
                self.news.push(LaneEvent::Outcome(flight.op.id, outcome));
            }
        }
    }

    /// The state of a peer has changed: tell it, and what follows from it.
    fn changed(&mut self, change: &Change) {
        let (peer, id) = (&change.peer, change.peer.id);
        match peer.state() {
            State::Live => {}
            State::Lost(error) => {
                if change.lost_now {
                    self.news.push(LaneEvent::PeerLost(id, error.clone()));
                }
                // What has gone is answered, or its connection breaks.
                self.cut(id, &error, |_| true);
            }
            State::Dead(error) => {
                if change.lost_now {
                    self.news.push(LaneEvent::PeerLost(id, error.clone()));
                }
                // Its last words first.
                self.receive(id);
                self.end(id, End::Broken(error));
                let theirs: Vec<_> = self.retained.extract_if(.., |(p, _)| p.id == id).collect();
                theirs.iter().for_each(|(p, f)| self.settle(f, p, Settlement::PeerGenerationDead));
            }
        }
        if (!peer.live() || self.core.peer(id).is_none()) && self.conns.get(&id).is_some_and(|c| c.flights.is_empty()) {
            self.conns.remove(&id);
        }
    }

    fn changes(&mut self) {
        for change in self.shared.take() {
            self.changed(&change);
        }
    }
}

impl Lane for TcpLane {
    fn submit(&mut self, op: WriteOp) -> Result<(), SubmitError> {
        let not_connected = || TransportError::new(ErrorKind::PeerLost, format!("peer {} is not connected", op.peer));
        let Some(peer) = self.core.peer(op.peer) else {
            let error = not_connected();
            return Err(SubmitError::Rejected(op, error));
        };
        // Counted before the look at its state: from here on it is not forgotten under the op.
        peer.open.fetch_add(1, Ordering::SeqCst);
        let lost = peer.lost().or_else(|| peer.closing.load(Ordering::SeqCst).then(not_connected));
        let config = &self.core.target.config;
        let refused = if let Some(error) = lost {
            SubmitError::Rejected(op, error)
        } else if self.in_flight >= config.max_ops_in_flight.max(1) {
            SubmitError::Busy(op)
        } else {
            match lower(&self.core, &op, &peer) {
                Ok(pieces) if self.in_flight > 0 && self.pieces + pieces.len() > config.max_pieces_in_flight => {
                    SubmitError::Busy(op)
                }
                Ok(pieces) => match self.conn(&peer) {
                    Ok(()) => {
                        self.accept(op, &peer, pieces);
                        if !self.news.is_empty() {
                            self.shared.signal();
                        }
                        return Ok(());
                    }
                    Err(error) => SubmitError::Rejected(op, error),
                },
                Err(error) => SubmitError::Rejected(op, error),
            }
        };
        self.core.released(&peer);
        Err(refused)
    }

    fn flush(&mut self) {
        let held: Vec<PeerId> =
            self.conns.iter().filter(|(_, c)| c.pending > 0 && !c.armed).map(|(id, _)| *id).collect();
        held.into_iter().for_each(|id| self.send(id, AT_ONCE));
        if !self.news.is_empty() {
            self.shared.signal();
        }
    }

    fn poll(&mut self, out: &mut Vec<LaneEvent>) {
        self.changes();
        let mut events = [const { std::mem::MaybeUninit::<epoll::Event>::uninit() }; 64];
        // Those that are left are seen by the next poll.
        if let Ok((events, _)) = epoll::wait(&self.set, &mut events, Some(&Timespec::default())) {
            for event in events {
                match event.data.u64() {
                    WAKE => {}
                    TIMER => {
                        let _ = rustix::io::read(&self.timer, &mut [0u8; 8]);
                    }
                    id => {
                        let flags = event.flags;
                        if flags.intersects(epoll::EventFlags::OUT) {
                            self.send(PeerId(id), TURN);
                        }
                        if !flags.difference(epoll::EventFlags::OUT).is_empty() {
                            self.receive(PeerId(id));
                        }
                    }
                }
            }
        }
        self.flush();
        self.deadlines();
        // Losses that this very call noticed are told with it.
        self.changes();
        self.arm_timer();
        out.append(&mut self.news);
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.set.as_raw_fd())
    }
}

impl Drop for TcpLane {
    fn drop(&mut self) {
        for id in self.conns.keys().copied().collect::<Vec<_>>() {
            // Its last words first. What has not gone never goes; what may still land outlives the lane.
            self.receive(id);
            if let Some(conn) = self.conns.get(&id) {
                let peer = Arc::clone(&conn.peer);
                let text = format!("the lane that wrote to {} is gone", peer.name);
                let idle = conn.flights.is_empty();
                if idle {
                    self.conns.remove(&id);
                    peer.made.fetch_sub(1, Ordering::SeqCst);
                } else {
                    self.end(id, End::Broken(TransportError::new(ErrorKind::PeerLost, text)));
                }
            }
        }
        self.core.adopt(std::mem::take(&mut self.retained));
    }
}
