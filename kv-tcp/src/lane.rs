//! A lane: the submitting shard's own end. It owns one connection to each peer, writes requests to it and reads
//! acknowledgements from it on the shard's own thread, because every sleeping thread crossed costs 12-18 us.

use std::collections::HashMap;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use kv_core::ids::PeerId;
use kv_core::memory::RegisteredRegion;
use kv_core::transport::{
    Lane, LaneEvent, Outcome, Settlement, SubmitError, TransportError, TransportErrorKind as ErrorKind, WriteOp,
};

use crate::codec::Malformed;
use crate::copy::{self, MAX_SEGS};
use crate::frame::{self, HEAD, Kind, OpHead, Status};
use crate::keeper::Task;
use crate::outbound::{SendJob, Stripe};
use crate::peer::{Peer, State};
use crate::plan::{Cursor, Plan};
use crate::session::LANE_SHIFT;
use crate::stats;
use crate::sys::{self, Epoll, Event, EventFd, Seg};
use crate::transport::Core;
use crate::worker::Msg;

/// Smallest part of an op that is worth a connection of its own, bytes.
const MIN_STRIPE: u64 = 256 << 10;
/// Behind a full socket, only ops up to this size are queued by copy; larger ones go by the data connections, bytes.
const QUEUED_INLINE: u64 = 4 << 10;
const WAKE: u64 = 0;
const READ: usize = 16 << 10;
/// Requests held back at most, bytes.
const HELD: usize = 16 << 10;

enum Note {
    Linked(Arc<Peer>, Arc<TcpStream>),
    Changed(Arc<Peer>),
}

/// What other threads tell a lane.
pub(crate) struct LaneShared {
    pub index: u32,
    wake: EventFd,
    pending: AtomicBool,
    inbox: Mutex<Vec<Note>>,
}

impl LaneShared {
    pub fn new(index: u32) -> io::Result<Arc<Self>> {
        Ok(Arc::new(Self { index, wake: EventFd::new()?, pending: AtomicBool::new(false), inbox: Mutex::default() }))
    }

    fn post(&self, note: Note) {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner).push(note);
        self.pending.store(true, Ordering::Release);
        self.wake.signal();
    }

    /// A connection for this lane, counted already.
    pub fn linked_already(&self, peer: &Arc<Peer>, sock: Arc<TcpStream>) {
        self.post(Note::Linked(Arc::clone(peer), sock));
    }

    /// A connection for this lane.
    pub fn linked(&self, peer: &Arc<Peer>, sock: Arc<TcpStream>) {
        peer.links.fetch_add(1, Ordering::SeqCst);
        self.linked_already(peer, sock);
    }

    /// Something about a peer has changed.
    pub fn changed(&self, peer: &Arc<Peer>) {
        self.post(Note::Changed(Arc::clone(peer)));
    }
}

/// The lane's connection to one peer.
struct Link {
    peer: Arc<Peer>,
    sock: Arc<TcpStream>,
    out: Vec<u8>,
    sent: usize,
    armed: bool,
    rest: Vec<u8>,
    flying: usize,
}

impl Link {
    /// Send what is queued, as far as the socket takes it.
    fn flush(&mut self, ep: &Epoll) -> io::Result<()> {
        while self.sent < self.out.len() {
            match (&*self.sock).write(&self.out[self.sent..]) {
                Ok(n) => self.sent += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
        }
        if self.sent == self.out.len() {
            self.out.clear();
            self.sent = 0;
        } else if self.sent > (1 << 20) {
            self.out.drain(..self.sent);
            self.sent = 0;
        }
        let arm = !self.out.is_empty();
        if arm != self.armed {
            ep.modify(self.sock.as_raw_fd(), self.peer.id.0, true, arm)?;
            self.armed = arm;
        }
        Ok(())
    }
}

/// Ops of a session that is over: their outcome is told, proof is awaited.
struct Limbo {
    peer: Arc<Peer>,
    ops: Vec<WriteOp>,
}

pub(crate) struct TcpLane {
    core: Arc<Core>,
    shared: Arc<LaneShared>,
    ep: Epoll,
    links: HashMap<PeerId, Link>,
    /// Links with requests held back, to send them together: a call a request would be most of a small op's cost.
    held: Vec<PeerId>,
    flying: HashMap<u64, WriteOp>,
    limbo: HashMap<PeerId, Limbo>,
    /// Sessions that are over, with ops whose bytes a worker is still sending.
    ending: Vec<Arc<Peer>>,
    news: Vec<LaneEvent>,
    next: u64,
    plan: Plan,
    segs: Vec<Seg>,
    events: Vec<Event>,
    buf: Vec<u8>,
}

impl TcpLane {
    pub fn new(core: Arc<Core>, shared: Arc<LaneShared>) -> io::Result<Self> {
        let ep = Epoll::new()?;
        ep.add(shared.wake.as_raw_fd(), WAKE, true, false)?;
        Ok(Self {
            next: u64::from(shared.index) << LANE_SHIFT,
            core,
            shared,
            ep,
            links: HashMap::new(),
            held: Vec::new(),
            flying: HashMap::new(),
            limbo: HashMap::new(),
            ending: Vec::new(),
            news: Vec::new(),
            plan: Plan::default(),
            segs: Vec::with_capacity(MAX_SEGS),
            events: Vec::with_capacity(128),
            buf: vec![0; READ],
        })
    }

    /// Take note of what other threads said.
    fn inbox(&mut self) {
        self.shared.wake.drain();
        self.shared.pending.store(false, Ordering::Release);
        let notes = std::mem::take(&mut *self.shared.inbox.lock().unwrap_or_else(PoisonError::into_inner));
        for note in notes {
            match note {
                Note::Linked(peer, sock) => {
                    if let Err(e) = self.ep.add(sock.as_raw_fd(), peer.id.0, true, false) {
                        self.lose(&peer, &e);
                    }
                    let link = Link {
                        peer: Arc::clone(&peer),
                        sock,
                        out: Vec::new(),
                        sent: 0,
                        armed: false,
                        rest: Vec::new(),
                        flying: 0,
                    };
                    self.links.insert(peer.id, link);
                    self.changed(&peer);
                }
                Note::Changed(peer) => self.changed(&peer),
            }
        }
    }

    fn lose(&self, peer: &Arc<Peer>, e: &dyn std::fmt::Display) {
        let text = format!("connection to {}: {e}", peer.name);
        peer.lose(&self.core.inner, TransportError::new(ErrorKind::PeerLost, text));
    }

    /// The state of a peer may have changed.
    fn changed(&mut self, peer: &Arc<Peer>) {
        let (error, settlement) = match peer.state() {
            State::Live => {
                self.close_if_done(peer.id);
                return;
            }
            State::Lost(e) => (e, None),
            State::Settled(e, s) => (e, Some(s)),
        };
        if self.links.contains_key(&peer.id) {
            // Answers that arrived before the loss count.
            self.drain(peer.id);
        }
        if let Some(link) = self.links.remove(&peer.id) {
            self.ep.remove(link.sock.as_raw_fd());
            if !peer.closing.load(Ordering::Acquire) {
                self.news.push(LaneEvent::PeerLost(peer.id, error.clone()));
            }
            if link.flying > 0 {
                self.ending.push(Arc::clone(peer));
            }
            peer.links.fetch_sub(1, Ordering::SeqCst);
            self.core.inner.keeper.post(Task::Look);
        }
        // Over TCP the source is quiet once our own sends have ended; the workers see to that at once.
        if let Some(at) = self.ending.iter().position(|p| p.id == peer.id)
            && peer.jobs.load(Ordering::SeqCst) == 0
        {
            self.ending.swap_remove(at);
            self.end(peer, &error);
        }
        if let Some(settlement) = settlement {
            self.settle(peer.id, settlement);
        }
    }

    /// Tell the outcome of everything in flight to a peer whose session is over.
    fn end(&mut self, peer: &Arc<Peer>, error: &TransportError) {
        let mut numbers: Vec<u64> = self.flying.iter().filter(|(_, op)| op.peer == peer.id).map(|(n, _)| *n).collect();
        numbers.sort_unstable();
        let ops: Vec<WriteOp> = numbers.iter().filter_map(|n| self.flying.remove(n)).collect();
        stats::add(&self.core.inner.counters.ops_unresolved, ops.len() as u64);
        for op in &ops {
            let error = error.clone();
            let outcome = match peer.direct {
                // The target may go on reading and writing.
                Ok(()) => Outcome::Unresolved { error },
                // Bytes on their way may still land.
                Err(_) => Outcome::Failed { src_quiet: true, dst_quiet: false, error },
            };
            self.news.push(LaneEvent::Outcome(op.id, outcome));
        }
        self.limbo.insert(peer.id, Limbo { peer: Arc::clone(peer), ops });
    }

    fn settle(&mut self, peer: PeerId, settlement: Settlement) {
        let Some(limbo) = self.limbo.remove(&peer) else { return };
        stats::add(&self.core.inner.counters.ops_settled, limbo.ops.len() as u64);
        limbo.peer.open.fetch_sub(limbo.ops.len(), Ordering::SeqCst);
        self.news.extend(limbo.ops.iter().map(|op| LaneEvent::Settlement(op.id, settlement)));
    }

    /// A peer that was let go is closed when its last op has ended.
    fn close_if_done(&mut self, id: PeerId) {
        let Some(link) = self.links.get(&id) else { return };
        if link.flying > 0 || !link.peer.closing.load(Ordering::Acquire) {
            return;
        }
        let Some(mut link) = self.links.remove(&id) else { return };
        frame::put(&mut link.out, Kind::Bye, |_| {});
        // Best effort: without it, the target sees the end of the stream instead.
        let _ = link.flush(&self.ep);
        self.ep.remove(link.sock.as_raw_fd());
        if link.peer.links.fetch_sub(1, Ordering::SeqCst) == 1 && link.peer.live() {
            link.peer.close_data();
            link.peer.drop_spare();
            self.core.inner.forget_peer(id);
        }
    }

    /// Read every answer that is there.
    fn drain(&mut self, id: PeerId) {
        loop {
            let Some(link) = self.links.get_mut(&id) else { return };
            let read = (&*link.sock).read(&mut self.buf);
            let peer = Arc::clone(&link.peer);
            match read {
                Ok(0) => {
                    self.lose(&peer, &"closed by the peer");
                    return;
                }
                Ok(n) => {
                    peer.heard.store(self.core.inner.now_ms(), Ordering::Relaxed);
                    if let Err(e) = self.answers(id, n) {
                        stats::add(&self.core.inner.counters.frames_malformed, 1);
                        self.lose(&peer, &e);
                        return;
                    }
                    if n < READ {
                        return;
                    }
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(e) => {
                    self.lose(&peer, &e);
                    return;
                }
            }
        }
    }

    /// Handle the frames in the first `n` bytes of the buffer.
    fn answers(&mut self, id: PeerId, n: usize) -> Result<(), Malformed> {
        let Some(link) = self.links.get_mut(&id) else { return Ok(()) };
        let held;
        let mut data: &[u8] = if link.rest.is_empty() {
            &self.buf[..n]
        } else {
            link.rest.extend_from_slice(&self.buf[..n]);
            held = std::mem::take(&mut link.rest);
            &held
        };
        while let Some((kind, body, used)) = frame::small(data)? {
            match kind {
                Kind::Ack => {
                    let (number, status, text) = frame::ack(body)?;
                    let op = match self.flying.entry(number) {
                        std::collections::hash_map::Entry::Occupied(op) if op.get().peer == id => op.remove(),
                        _ => return Err(Malformed("an answer to an op that was not asked")),
                    };
                    link.flying -= 1;
                    link.peer.open.fetch_sub(1, Ordering::SeqCst);
                    self.news.push(LaneEvent::Outcome(op.id, outcome(&self.core.inner.counters, status, text)));
                }
                Kind::Bye => {
                    // Every copy at the target has ended and its session is void: that is proof.
                    let peer = Arc::clone(&link.peer);
                    let inner = &self.core.inner;
                    let text = format!("{} shut down", peer.name);
                    peer.lose(inner, TransportError::new(ErrorKind::PeerLost, text));
                    let settlement = Settlement::Settled { src_quiet: true, dst_quiet: true };
                    inner.keeper.post(Task::Proven(peer, settlement));
                }
                _ => return Err(Malformed("an answer out of place")),
            }
            data = &data[used..];
        }
        link.rest.extend_from_slice(data);
        Ok(())
    }

    /// Whether an op of this peer may start now, and its plan filled in.
    fn admit(&mut self, op: &WriteOp) -> Result<bool, TransportError> {
        let config = &self.core.inner.config;
        let link = match self.links.get(&op.peer) {
            Some(link) if link.peer.live() && !link.peer.closing.load(Ordering::Acquire) => link,
            _ => return Err(TransportError::new(ErrorKind::PeerLost, format!("peer {} is not connected", op.peer))),
        };
        let ours = |r: &Arc<RegisteredRegion>| crate::transport::is_ours(&self.core.inner, r);
        if let Some(foreign) = op.regions.iter().find(|r| !ours(r)) {
            let text = format!("{foreign:?} is not registered with this transport");
            return Err(TransportError::new(ErrorKind::InvalidArgument, text));
        }
        self.plan
            .resolve(&op.plan, &op.regions, &link.peer.known_regions(), config.max_op_bytes)
            .map_err(|e| TransportError::new(ErrorKind::InvalidArgument, e))?;
        if self.plan.encoded_len() + 64 > config.max_header_bytes {
            return Err(TransportError::new(ErrorKind::InvalidArgument, "the plan's description is too long"));
        }
        Ok(self.flying.len() < config.max_ops_in_flight && link.out.len() - link.sent <= config.max_queued_bytes)
    }

    /// Send an admitted op. From here on it is accepted.
    fn post(&mut self, op: WriteOp) {
        let Some(link) = self.links.get_mut(&op.peer) else { return };
        let total = self.plan.total();
        let number = self.next;
        self.next += 1;
        let head = OpHead { op: number, stripes: 1, start: 0, len: total };
        link.flying += 1;
        link.peer.open.fetch_add(1, Ordering::SeqCst);
        stats::add(&self.core.inner.counters.ops_submitted, 1);
        stats::add(&self.core.inner.counters.bytes_submitted, total);
        let config = &self.core.inner.config;
        let posted = if link.peer.direct.is_ok() {
            frame::put(&mut link.out, Kind::Pull, |out| {
                head.encode(out);
                self.plan.encode(true, out);
            });
            // Only behind one in flight, whose answer brings the next `poll` even when nobody calls `flush`.
            if link.flying > 1 && link.out.len() - link.sent < HELD {
                if self.held.last() != Some(&op.peer) {
                    self.held.push(op.peer);
                }
                Ok(())
            } else {
                link.flush(&self.ep)
            }
        } else if total <= config.inline_max as u64 && (link.out.is_empty() || total <= QUEUED_INLINE) {
            frame::put(&mut link.out, Kind::Write, |out| {
                head.encode(out);
                self.plan.encode(false, out);
            });
            send_inline(link, &self.plan, &mut self.segs).and_then(|()| link.flush(&self.ep))
        } else {
            let job = SendJob::new(std::mem::take(&mut self.plan), Arc::clone(&link.peer), Arc::clone(&op.regions));
            stripe(&job, &link.peer, head);
            Ok(())
        };
        let peer = Arc::clone(&link.peer);
        self.flying.insert(number, op);
        if let Err(e) = posted {
            // Part of it may be on its way: accepted, and it ends with its session.
            self.lose(&peer, &e);
        }
    }
}

/// Payload of a small op, behind its WRITE frame: straight from memory when nothing is queued, else through the queue.
fn send_inline(link: &mut Link, plan: &Plan, segs: &mut Vec<Seg>) -> io::Result<()> {
    let mut cursor = Cursor::default();
    let mut sent = 0;
    if link.sent == 0 && !link.armed {
        segs.clear();
        segs.push(Seg { addr: link.out.as_ptr() as usize, len: link.out.len() });
        let mut ahead = cursor;
        while segs.len() < MAX_SEGS {
            let Some(piece) = ahead.next(plan, u64::MAX) else { break };
            copy::push(segs, piece.src, piece.len);
        }
        // SAFETY: the first segment is our own buffer; the plan's sources were checked against the op's regions, which
        // the caller holds.
        sent = match unsafe { sys::send_segs(link.sock.as_raw_fd(), segs) } {
            Ok(n) => n,
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => 0,
            Err(e) => return Err(e),
        };
    }
    let queued = link.out.len() - link.sent;
    let head = sent.min(queued);
    link.sent += head;
    cursor.skip(plan, (sent - head) as u64);
    while let Some(piece) = cursor.next(plan, u64::MAX) {
        // SAFETY: as above.
        unsafe { sys::read_mem(piece.src, piece.len as usize, &mut link.out) };
    }
    Ok(())
}

/// Cut an op over the peer's data connections.
fn stripe(job: &Arc<SendJob>, peer: &Peer, head: OpHead) {
    let count = (head.len / MIN_STRIPE).clamp(1, peer.data.len() as u64);
    let first = peer.next_data.fetch_add(1, Ordering::Relaxed);
    // Cut at a page's border.
    let cut = |n: u64| {
        if n == count { head.len } else { ((u128::from(head.len) * u128::from(n) / u128::from(count)) as u64) & !4095 }
    };
    for n in 0..count {
        let (start, end) = (cut(n), cut(n + 1));
        let mut bytes = Vec::with_capacity(HEAD + 64);
        frame::put(&mut bytes, Kind::Write, |out| {
            OpHead { stripes: count as u32, start, len: end - start, ..head }.encode(out);
            job.encode(out);
        });
        let (worker, token) = &peer.data[(first + n as usize) % peer.data.len()];
        worker.post(Msg::Send(*token, Stripe::new(Arc::clone(job), bytes, start, end - start)));
    }
}

fn outcome(counters: &stats::Counters, status: Status, text: &str) -> Outcome {
    let kind = match status {
        Status::Done => {
            stats::add(&counters.ops_done, 1);
            return Outcome::Done;
        }
        Status::Refused => ErrorKind::Refused,
        Status::Failed => ErrorKind::Backend,
    };
    stats::add(&counters.ops_failed, 1);
    // The target answers when nothing of the op is in progress: both sides are quiet.
    Outcome::Failed { src_quiet: true, dst_quiet: true, error: TransportError::new(kind, text) }
}

impl Lane for TcpLane {
    fn submit(&mut self, op: WriteOp) -> Result<(), SubmitError> {
        if self.shared.pending.load(Ordering::Acquire) {
            self.inbox();
            if !self.news.is_empty() {
                self.shared.wake.signal();
            }
        }
        match self.admit(&op) {
            Err(e) => return Err(SubmitError::Rejected(op, e)),
            Ok(false) => return Err(SubmitError::Busy(op)),
            Ok(true) => {}
        }
        if self.plan.total() == 0 {
            // Nothing to move is done at once.
            stats::add(&self.core.inner.counters.ops_submitted, 1);
            stats::add(&self.core.inner.counters.ops_done, 1);
            self.news.push(LaneEvent::Outcome(op.id, Outcome::Done));
            self.shared.wake.signal();
            return Ok(());
        }
        self.post(op);
        Ok(())
    }

    fn flush(&mut self) {
        while let Some(id) = self.held.pop() {
            if let Some(link) = self.links.get_mut(&id)
                && let Err(e) = link.flush(&self.ep)
            {
                let peer = Arc::clone(&link.peer);
                self.lose(&peer, &e);
            }
        }
    }

    fn poll(&mut self, out: &mut Vec<LaneEvent>) {
        self.flush();
        let mut events = std::mem::take(&mut self.events);
        events.clear();
        if let Err(e) = self.ep.wait(&mut events, Some(Duration::ZERO)) {
            tracing::error!(error = %e, "a lane cannot be polled");
        }
        for event in &events {
            if event.token == WAKE {
                self.inbox();
                continue;
            }
            let id = PeerId(event.token);
            if event.writable
                && let Some(link) = self.links.get_mut(&id)
                && let Err(e) = link.flush(&self.ep)
            {
                let peer = Arc::clone(&link.peer);
                self.lose(&peer, &e);
            }
            if event.readable {
                self.drain(id);
                self.close_if_done(id);
            }
        }
        self.events = events;
        // A loss noticed just now is told in the same call.
        if self.shared.pending.load(Ordering::Acquire) {
            self.inbox();
        }
        out.append(&mut self.news);
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.ep.as_raw_fd())
    }
}

impl Drop for TcpLane {
    fn drop(&mut self) {
        // Links that came and were never seen count too.
        self.inbox();
        let links: Vec<PeerId> = self.links.keys().copied().collect();
        for id in links {
            let Some(mut link) = self.links.remove(&id) else { continue };
            if link.flying == 0 {
                frame::put(&mut link.out, Kind::Bye, |_| {});
                let _ = link.flush(&self.ep);
            } else {
                self.lose(&link.peer, &"the lane was dropped with writes in flight");
                self.ending.push(Arc::clone(&link.peer));
            }
            link.peer.links.fetch_sub(1, Ordering::SeqCst);
            self.core.inner.keeper.post(Task::Look);
        }
        // What may still be in use outlives the lane.
        for peer in std::mem::take(&mut self.ending) {
            let number: Vec<u64> = self.flying.iter().filter(|(_, op)| op.peer == peer.id).map(|(n, _)| *n).collect();
            let ops = number.iter().filter_map(|n| self.flying.remove(n)).collect();
            self.limbo.insert(peer.id, Limbo { peer, ops });
        }
        for (_, limbo) in self.limbo.drain() {
            limbo.peer.adopt(limbo.ops);
        }
    }
}
