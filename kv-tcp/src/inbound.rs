//! A connection a peer opened: its hello, its requests, its bytes.

use std::io::{self, Read};
use std::net::TcpStream;
use std::ops::ControlFlow;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use crate::codec::{Malformed, Reader};
use crate::conn::ConnOut;
use crate::copy::{self, JobPart, MAX_SEGS, PullJob};
use crate::frame::{self, HEAD, Hello, Kind, MAX_SMALL, OpHead, Purpose, Status, Verdict, Welcome};
use crate::plan::{Cursor, Plan};
use crate::region::{Denied, Region};
use crate::session::{Hold, lane_of};
use crate::stats;
use crate::sys::{self, Seg};
use crate::worker::{Context, Msg, WorkerShared};

/// Bytes read at once from a connection that is between ops.
pub(crate) const READ: usize = 64 << 10;
/// Bytes read at once from a data connection that is between ops, and behind the last byte of one: the next request.
const AHEAD: usize = 4 << 10;
/// Bytes received into pages in one call.
const RECEIVE: u64 = 512 << 10;
/// Ops up to this size are copied on the spot.
const INLINE_COPY: u64 = 256 << 10;
/// After copying this much on the spot, acks go out, and further ops wait their turn.
const INLINE_BUDGET: u64 = 1 << 20;
/// Calls on one connection, and bytes of payload, before others have their turn.
const ROUNDS: usize = 8;
const TURN: u64 = 1 << 20;
/// Acks kept for a peer that does not read them, bytes.
const MAX_ACK_BYTES: usize = 4 << 20;

/// Whether the connection goes on.
type Flow = ControlFlow<()>;
const GO_ON: Flow = ControlFlow::Continue(());
const CLOSE: Flow = ControlFlow::Break(());

enum Role {
    /// Nothing heard yet.
    Stranger,
    /// Requests (on a lane's own connection) and data of a session.
    Member { hold: Hold, lane: Option<u32> },
    /// Waits for the end of a session; sends nothing more.
    Fence,
}

/// Bytes of a WRITE on their way into pages.
struct Incoming {
    head: OpHead,
    plan: Plan,
    held: Vec<Arc<Region>>,
    cursor: Cursor,
    left: u64,
    /// Why the bytes are thrown away, when they are.
    failure: Option<(Status, String)>,
}

pub(crate) struct Inbound {
    token: u64,
    out: Arc<ConnOut>,
    rest: Vec<u8>,
    role: Role,
    incoming: Option<Box<Incoming>>,
    orderly: bool,
    /// Bytes copied on the spot since the last wait.
    spent: u64,
    /// Payload bytes received since the last wait.
    moved: u64,
}

impl Inbound {
    pub fn new(me: &Arc<WorkerShared>, sock: TcpStream, token: u64) -> Self {
        let out = Arc::new(ConnOut::new(sock, Arc::clone(&me.ep), token, MAX_ACK_BYTES));
        Self { token, out, rest: Vec::new(), role: Role::Stranger, incoming: None, orderly: false, spent: 0, moved: 0 }
    }

    pub fn greeted(&self) -> bool {
        !matches!(self.role, Role::Stranger)
    }

    pub fn flush(&self) {
        self.out.flush();
    }

    /// The connection ends: with it its session, unless the source said so first.
    pub fn close(self) {
        self.out.close();
        if let Role::Member { hold, lane } = self.role {
            hold.0.leave(self.token);
            if let Some(lane) = lane {
                hold.0.drop_lane(lane);
            }
            if !self.orderly {
                hold.0.revoke();
            }
            // An op cut off in the middle ends with the hold, after the last receive call on this connection.
            drop(self.incoming);
            drop(hold);
        }
    }

    /// Read what is there, up to a fair share.
    pub fn readable(&mut self, cx: &mut Context<'_>) -> Flow {
        self.spent = 0;
        self.moved = 0;
        let mut flow = GO_ON;
        for _ in 0..ROUNDS {
            if self.moved >= TURN {
                break;
            }
            let more = if self.incoming.is_some() { self.receive(cx) } else { self.read(cx) };
            match more {
                Ok(true) => {}
                Ok(false) => break,
                Err(flow_end) => {
                    flow = flow_end;
                    break;
                }
            }
        }
        self.answer(cx);
        flow
    }

    /// A data connection: what is read ahead of a known plan is copied once more, so little is.
    fn carries_bulk(&self) -> bool {
        matches!(self.role, Role::Member { lane: None, .. })
    }

    fn answer(&mut self, cx: &mut Context<'_>) {
        self.out.send(&cx.scratch.acks);
        cx.scratch.acks.clear();
    }

    /// Read and handle frames. `Ok(true)`: there may be more.
    fn read(&mut self, cx: &mut Context<'_>) -> Result<bool, Flow> {
        let (n, asked) = if self.rest.is_empty() {
            // The common case: nothing is left over, and the worker's buffer serves every connection.
            let mut buf = std::mem::take(&mut cx.scratch.read);
            let asked = if self.carries_bulk() { AHEAD } else { READ };
            let n = (&self.out.sock).read(&mut buf[..asked]);
            let used = n.as_ref().map_or(Ok(0), |n| self.frames(cx, &buf[..*n]));
            if let (Ok(n), Ok(used)) = (&n, &used) {
                self.rest.extend_from_slice(&buf[*used..*n]);
            }
            cx.scratch.read = buf;
            used?;
            (n, asked)
        } else {
            let mut buf = std::mem::take(&mut self.rest);
            let missing = match frame::head(&buf) {
                Ok(Some((_, len))) => (HEAD + len).saturating_sub(buf.len()),
                _ => 0,
            };
            // The length was checked against its bound when the head arrived; memory grows with the bytes only.
            let asked = missing.clamp(READ, 1 << 20);
            let at = buf.len();
            buf.resize(at + asked, 0);
            let n = (&self.out.sock).read(&mut buf[at..]);
            buf.truncate(at + n.as_ref().map_or(0, |n| *n));
            let used = self.frames(cx, &buf)?;
            if used < buf.len() {
                buf.drain(..used);
                self.rest = buf;
            }
            (n, asked)
        };
        match n {
            Ok(0) => Err(CLOSE),
            Ok(n) => Ok(n == asked || self.incoming.is_some()),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(false),
            Err(_) => Err(CLOSE),
        }
    }

    /// Handle the frames at the front of `data`; returns the bytes used.
    fn frames(&mut self, cx: &mut Context<'_>, data: &[u8]) -> Result<usize, Flow> {
        let mut used = 0;
        while used < data.len() {
            match self.one(cx, &data[used..]) {
                Ok(0) => break,
                Ok(n) => used += n,
                Err(end) => {
                    if let End::Malformed(m) = end {
                        stats::add(&cx.inner.counters.frames_malformed, 1);
                        if self.greeted() {
                            tracing::warn!(error = %m, peer = self.peer_name(), "connection closed");
                        } else {
                            // Anyone can connect: strangers do not get to fill the log.
                            tracing::debug!(error = %m, "connection of a stranger closed");
                        }
                    }
                    return Err(CLOSE);
                }
            }
        }
        Ok(used)
    }

    fn peer_name(&self) -> &str {
        match &self.role {
            Role::Member { hold, .. } => &hold.0.source,
            _ => "(unknown)",
        }
    }

    /// Handle one frame, or the payload bytes, at the front of `data`. 0: it is not all there yet.
    fn one(&mut self, cx: &mut Context<'_>, data: &[u8]) -> Result<usize, End> {
        if self.incoming.is_some() {
            return self.take_in(cx, data);
        }
        let Some((kind, len)) = frame::head(data)? else { return Ok(0) };
        let max = match kind {
            Kind::Pull | Kind::Write => cx.inner.config.max_header_bytes,
            _ => MAX_SMALL,
        };
        // Before the hello, nobody makes us keep more than a hello.
        let max = if self.greeted() { max } else { MAX_SMALL };
        if len > max {
            return Err(Malformed("frame too long").into());
        }
        let Some(body) = data.get(HEAD..HEAD + len) else { return Ok(0) };
        #[cfg(test)]
        assert!(kind != Kind::Write || self.peer_name() != PANICS, "a fault for a test");
        match (&self.role, kind) {
            (Role::Stranger, Kind::Hello) => self.hello(cx, body)?,
            (Role::Member { lane: Some(_), .. }, Kind::Pull) => self.pull(cx, body)?,
            (Role::Member { .. }, Kind::Write) => self.write(cx, body)?,
            (Role::Member { .. }, Kind::Bye) => {
                self.orderly = true;
                return Err(End::Done);
            }
            _ => return Err(Malformed("frame out of place").into()),
        }
        Ok(HEAD + len)
    }

    fn hello(&mut self, cx: &mut Context<'_>, body: &[u8]) -> Result<(), End> {
        let hello = Hello::decode(body)?;
        let inner = cx.inner;
        let refuse = |verdict, text: &str| {
            stats::add(&inner.counters.handshakes_refused, 1);
            let mut bytes = Vec::new();
            Welcome { verdict, text: text.to_owned(), host: None }.encode(&mut bytes);
            self.out.send(&bytes);
            Err(End::Done)
        };
        if hello.target != inner.name {
            return refuse(Verdict::NotMe, &inner.name);
        }
        if !hello.admission.matches(&inner.admission) {
            return refuse(Verdict::Denied, "wrong admission key");
        }
        let (session, lane) = match hello.purpose {
            Purpose::Fence => {
                self.role = Role::Fence;
                inner.sessions.fence(&hello.session, &self.out);
                return Ok(());
            }
            Purpose::Open { lane } => {
                let direct = inner.try_direct(&hello);
                let pid = direct.is_ok().then_some(hello.host.pid);
                let Some(session) = inner.sessions.open(&hello, pid) else {
                    return refuse(Verdict::Denied, "too many sessions");
                };
                tracing::debug!(peer = hello.source, direct = ?direct, "session opened");
                (Some((session, direct.err().unwrap_or_default())), Some(lane))
            }
            Purpose::Lane { lane } => (inner.sessions.get(&hello.session).map(|s| (s, String::new())), Some(lane)),
            Purpose::Data => (inner.sessions.get(&hello.session).map(|s| (s, String::new())), None),
        };
        let Some((session, text)) = session else {
            return refuse(Verdict::NoSession, "no such session");
        };
        let Some(hold) = session.join(cx.me, self.token, inner.config.max_connections_per_session) else {
            return refuse(Verdict::Denied, "the session has ended or has too many connections");
        };
        if let Some(lane) = lane {
            session.set_lane(lane, &self.out);
        }
        let verdict = if session.direct.is_some() { Verdict::Direct } else { Verdict::Tcp };
        self.role = Role::Member { hold, lane };
        let mut bytes = Vec::new();
        Welcome { verdict, text, host: Some(inner.host) }.encode(&mut bytes);
        self.out.send(&bytes);
        Ok(())
    }

    /// Read an op's head and plan into the worker's scratch and open its regions.
    fn op(&self, cx: &mut Context<'_>, body: &[u8]) -> Result<(OpHead, Result<(), Denied>), End> {
        let mut r = Reader(body);
        let head = OpHead::decode(&mut r)?;
        cx.scratch.plan.decode(&mut r)?;
        r.end()?;
        let total = cx.scratch.plan.total();
        if total == 0 || total > cx.inner.config.max_op_bytes {
            return Err(Malformed("op too small or too large").into());
        }
        if head.start.checked_add(head.len).is_none_or(|end| end > total) || head.len == 0 {
            return Err(Malformed("stripe outside its op").into());
        }
        let verdict = cx.scratch.plan.authorise(&cx.inner.registry, &mut cx.scratch.held);
        if verdict.is_err() {
            // Not to keep memory alive that was unregistered.
            cx.scratch.held.clear();
            stats::add(&cx.inner.counters.ops_refused, 1);
        }
        Ok((head, verdict))
    }

    fn pull(&mut self, cx: &mut Context<'_>, body: &[u8]) -> Result<(), End> {
        let direct = match &self.role {
            Role::Member { hold, .. } => hold.0.direct,
            _ => None,
        };
        let Some(pid) = direct else { return Err(Malformed("no direct copies in this session").into()) };
        let (head, verdict) = self.op(cx, body)?;
        match verdict {
            Ok(()) => {}
            Err(Denied::Gone) => {
                frame::put_ack(&mut cx.scratch.acks, head.op, Status::Refused, GONE);
                return Ok(());
            }
            Err(Denied::Forged) => return Err(self.forged(cx, head.op)),
        }
        let s = &mut *cx.scratch;
        let total = s.plan.total();
        if total <= INLINE_COPY && self.spent < INLINE_BUDGET {
            let mut cursor = Cursor::default();
            let mut left = total;
            let mut failure = None;
            while left > 0 && failure.is_none() {
                match copy::step(pid, &s.plan, &s.held, &mut cursor, left, (&mut s.local, &mut s.remote)) {
                    Ok(n) => left -= n,
                    Err(e) => failure = Some(e.ack()),
                }
            }
            s.held.clear();
            stats::add(&cx.inner.counters.bytes_copied_in, total - left);
            match failure {
                None => frame::put_ack(&mut s.acks, head.op, Status::Done, ""),
                Some((status, text)) => frame::put_ack(&mut s.acks, head.op, status, &text),
            }
            // Answers wait for a few small ops that came together, but never for a large one.
            let before = self.spent / INLINE_COPY;
            self.spent += total;
            if self.spent / INLINE_COPY != before {
                self.answer(cx);
            }
            return Ok(());
        }
        // A session that ended meanwhile gets no answer: the fence is its answer.
        let Role::Member { hold, .. } = &self.role else { return Err(End::Done) };
        let Some(hold) = hold.0.hold() else { return Err(End::Done) };
        let helper = if total >= cx.inner.config.split_min { self.helper(cx, head.op) } else { None };
        let job = PullJob::new(
            head.op,
            pid,
            std::mem::take(&mut cx.scratch.plan),
            std::mem::take(&mut cx.scratch.held),
            Arc::clone(&self.out),
            hold,
            helper.is_some(),
        );
        if let Some(helper) = helper {
            helper.post(Msg::Job(JobPart::new(Arc::clone(&job))));
        }
        cx.jobs.push_back(JobPart::new(job));
        Ok(())
    }

    /// At most one other worker: one that has nothing to do, or else any, which will have before we are through with all
    /// that came together.
    fn helper(&self, cx: &Context<'_>, op: u64) -> Option<Arc<WorkerShared>> {
        if cx.inner.cores < 2 {
            return None;
        }
        let others = || cx.inner.workers.iter().filter(|w| !Arc::ptr_eq(w, cx.me));
        let any = || others().nth(op as usize % others().count().max(1));
        others().find(|w| w.idle()).or_else(any).cloned()
    }

    fn forged(&mut self, cx: &mut Context<'_>, op: u64) -> End {
        tracing::warn!(peer = self.peer_name(), "write refused: wrong key or outside the region");
        frame::put_ack(&mut cx.scratch.acks, op, Status::Refused, "wrong key or outside the region");
        // On the lane's own connection, which may not be this one.
        if let Role::Member { hold, lane: None } = &self.role {
            hold.0.ack(op, Status::Refused, "wrong key or outside the region");
            cx.scratch.acks.clear();
        }
        End::Done
    }

    fn write(&mut self, cx: &mut Context<'_>, body: &[u8]) -> Result<(), End> {
        let (head, verdict) = self.op(cx, body)?;
        let failure = match verdict {
            Ok(()) => None,
            Err(Denied::Gone) => Some((Status::Refused, GONE.to_owned())),
            Err(Denied::Forged) => return Err(self.forged(cx, head.op)),
        };
        let plan = std::mem::take(&mut cx.scratch.plan);
        let mut cursor = Cursor::default();
        cursor.skip(&plan, head.start);
        let held = std::mem::take(&mut cx.scratch.held);
        self.incoming = Some(Box::new(Incoming { head, plan, held, cursor, left: head.len, failure }));
        Ok(())
    }

    /// Payload that came along with frames.
    fn take_in(&mut self, cx: &mut Context<'_>, data: &[u8]) -> Result<usize, End> {
        let Some(inc) = &mut self.incoming else { return Ok(0) };
        inc.check();
        let n = inc.left.min(data.len() as u64);
        if inc.failure.is_some() {
            stats::add(&cx.inner.counters.bytes_discarded, n);
        } else {
            let mut rest = &data[..n as usize];
            while let Some(piece) = inc.cursor.next(&inc.plan, rest.len() as u64) {
                let (now, later) = rest.split_at(piece.len as usize);
                // SAFETY: the plan was authorised against `held`, which keeps the memory mapped. Contract of `MemoryOwner`:
                // nobody holds references into it, and its owner expects others to write it at any time, as another
                // process does; whoever looks meanwhile does so by means that allow for that.
                unsafe { sys::write_mem(piece.dst, now) };
                rest = later;
            }
            stats::add(&cx.inner.counters.bytes_received, n);
        }
        inc.left -= n;
        self.moved += n;
        self.landed(cx)?;
        Ok(n as usize)
    }

    /// Receive straight into the pages. `Ok(true)`: there may be more.
    fn receive(&mut self, cx: &mut Context<'_>) -> Result<bool, Flow> {
        let Some(inc) = &mut self.incoming else { return Ok(true) };
        if let Role::Member { hold, .. } = &self.role
            && hold.0.revoked()
        {
            return Err(CLOSE);
        }
        inc.check();
        let got = if inc.failure.is_some() {
            let want = inc.left.min(RECEIVE) as usize;
            cx.scratch.discard.resize(want, 0);
            (&self.out.sock).read(&mut cx.scratch.discard)
        } else {
            let segs = &mut cx.scratch.local;
            segs.clear();
            let mut ahead = inc.cursor;
            let mut room = inc.left.min(RECEIVE);
            while segs.len() < MAX_SEGS {
                let Some(piece) = ahead.next(&inc.plan, room) else { break };
                copy::push(segs, piece.dst, piece.len);
                room -= piece.len;
            }
            if room == 0 && inc.left <= RECEIVE {
                // The op ends within this call: take the start of the next request along.
                segs.push(Seg { addr: cx.scratch.read.as_mut_ptr() as usize, len: AHEAD });
            }
            // SAFETY: as in `take_in`; the last segment is our own buffer.
            unsafe { sys::recv_segs(self.out.sock.as_raw_fd(), segs) }
        };
        match got {
            Ok(0) => Err(CLOSE),
            Ok(n) => {
                let beyond = (n as u64).saturating_sub(inc.left) as usize;
                let n = n as u64 - beyond as u64;
                if inc.failure.is_some() {
                    stats::add(&cx.inner.counters.bytes_discarded, n);
                } else {
                    inc.cursor.skip(&inc.plan, n);
                    stats::add(&cx.inner.counters.bytes_received, n);
                }
                inc.left -= n;
                self.moved += n;
                self.landed(cx).map_err(|_| CLOSE)?;
                if beyond > 0 {
                    let buf = std::mem::take(&mut cx.scratch.read);
                    let used = self.frames(cx, &buf[..beyond]);
                    if let Ok(used) = used {
                        self.rest.extend_from_slice(&buf[used..beyond]);
                    }
                    cx.scratch.read = buf;
                    used?;
                }
                Ok(true)
            }
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(false),
            Err(_) => Err(CLOSE),
        }
    }

    /// Answer a stripe that is complete.
    fn landed(&mut self, cx: &mut Context<'_>) -> Result<(), End> {
        let Some(inc) = self.incoming.take_if(|inc| inc.left == 0) else { return Ok(()) };
        let Role::Member { hold, lane } = &self.role else { return Ok(()) };
        let inc = *inc;
        if inc.head.stripes == 1 && *lane == Some(lane_of(inc.head.op)) {
            // Answers to small ops that came together go out together.
            match &inc.failure {
                None => frame::put_ack(&mut cx.scratch.acks, inc.head.op, Status::Done, ""),
                Some((status, text)) => frame::put_ack(&mut cx.scratch.acks, inc.head.op, *status, text),
            }
        } else if !hold.0.landed(inc.head.op, inc.head.stripes, inc.failure) {
            return Err(Malformed("too many ops half done").into());
        }
        // Keep the memory of the plan for the next op.
        cx.scratch.plan = inc.plan;
        Ok(())
    }
}

/// A source of this name makes the handler of its writes panic.
#[cfg(test)]
pub(crate) const PANICS: &str = "makes its handler panic";

const GONE: &str = "the region is not registered any more";

impl Incoming {
    /// A region unregistered in the middle takes no further byte.
    fn check(&mut self) {
        if self.failure.is_none() && self.held.iter().any(|r| r.revoked()) {
            self.failure = Some((Status::Refused, GONE.to_owned()));
        }
    }
}

/// Why a connection is over.
enum End {
    Malformed(Malformed),
    /// Everything to be said was said.
    Done,
}

impl From<Malformed> for End {
    fn from(m: Malformed) -> Self {
        Self::Malformed(m)
    }
}
