//! Copies on one host, driven by the target: what it copies ends when it says so.

use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use crate::conn::ConnOut;
use crate::frame::{self, Status};
use crate::plan::{Cursor, Plan};
use crate::region::Region;
use crate::session::Hold;
use crate::stats;
use crate::sys::{self, Seg};
use crate::transport::Inner;

/// Segments in one call: more gains nothing.
pub(crate) const MAX_SEGS: usize = 64;
/// Bytes in one call: about 0.2 ms, so that a cancelled copy ends soon.
pub(crate) const MAX_CALL: u64 = 1 << 20;
/// Bytes a copier claims at once when several work on one op.
const CLAIM: u64 = 2 << 20;

/// Append `addr .. addr + len`, extending the last segment where it goes on.
pub(crate) fn push(segs: &mut Vec<Seg>, addr: u64, len: u64) {
    let (addr, len) = (addr as usize, len as usize);
    match segs.last_mut() {
        Some(last) if last.addr.wrapping_add(last.len) == addr => last.len += len,
        _ => segs.push(Seg { addr, len }),
    }
}

/// Why a copy did not get to its end.
#[derive(Debug)]
pub(crate) enum CopyError {
    /// The kernel refused: the source is gone or not readable there.
    Kernel(io::Error),
    /// Our own region was unregistered.
    Revoked,
}

impl CopyError {
    pub fn ack(&self) -> (Status, String) {
        match self {
            Self::Kernel(e) => (Status::Failed, format!("copy from the source: {e}")),
            Self::Revoked => (Status::Refused, "the region is not registered any more".to_owned()),
        }
    }
}

/// One call's worth of a copy of at most `max` bytes. Returns the bytes copied; 0 at the end of the plan.
///
/// `held` are the regions the plan was authorised against. `pid` was verified when the session opened. Should that
/// process end and its number be given to another before the end of its connections is noticed here, the bytes copied
/// meanwhile are another's, and nobody is told that they are good: the source that would have been is dead.
pub(crate) fn step(
    pid: u32,
    plan: &Plan,
    held: &[Arc<Region>],
    cursor: &mut Cursor,
    max: u64,
    (local, remote): (&mut Vec<Seg>, &mut Vec<Seg>),
) -> Result<u64, CopyError> {
    if held.iter().any(|r| r.revoked()) {
        return Err(CopyError::Revoked);
    }
    local.clear();
    remote.clear();
    let budget = max.min(MAX_CALL);
    let start = *cursor;
    let mut bytes = 0;
    while local.len() < MAX_SEGS && remote.len() < MAX_SEGS {
        let Some(piece) = cursor.next(plan, budget - bytes) else { break };
        push(local, piece.dst, piece.len);
        push(remote, piece.src, piece.len);
        bytes += piece.len;
    }
    if bytes == 0 {
        return Ok(0);
    }
    // SAFETY: the plan was authorised against `held`, which keeps the memory mapped; nobody holds references into
    // registered memory (contract of `MemoryOwner`).
    let copied = unsafe { sys::vm_read(pid, local, remote) }.map_err(CopyError::Kernel)? as u64;
    if copied == 0 {
        return Err(CopyError::Kernel(io::ErrorKind::UnexpectedEof.into()));
    }
    if copied < bytes {
        // A page of the source could not be read. The next call starts there and gets the reason.
        *cursor = start;
        cursor.skip(plan, copied);
    }
    Ok(copied)
}

/// One op that is copied in slices, by one worker or several. Each copier claims pieces. It is answered when every byte
/// is copied, since nobody is copying then; one that failed, when the last copier has let go and this is dropped.
pub(crate) struct PullJob {
    pub op: u64,
    pub pid: u32,
    pub plan: Plan,
    pub held: Vec<Arc<Region>>,
    pub out: Arc<ConnOut>,
    pub hold: Hold,
    claimed: AtomicU64,
    claim: u64,
    copied: AtomicU64,
    answered: AtomicBool,
    stop: AtomicBool,
    failure: Mutex<Option<(Status, String)>>,
}

impl PullJob {
    pub fn new(
        op: u64,
        pid: u32,
        plan: Plan,
        held: Vec<Arc<Region>>,
        out: Arc<ConnOut>,
        hold: Hold,
        shared: bool,
    ) -> Arc<Self> {
        let claim = if shared { CLAIM } else { plan.total().max(1) };
        Arc::new(Self {
            op,
            pid,
            plan,
            held,
            out,
            hold,
            claimed: AtomicU64::new(0),
            claim,
            copied: AtomicU64::new(0),
            answered: AtomicBool::new(false),
            stop: AtomicBool::new(false),
            failure: Mutex::default(),
        })
    }

    fn fail(&self, failure: (Status, String)) {
        self.stop.store(true, Ordering::Relaxed);
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(failure);
    }

    fn answer(&self, status: Status, text: &str) {
        if self.hold.0.revoked() || self.answered.swap(true, Ordering::AcqRel) {
            // The source counts on the fence now; or it knows.
            return;
        }
        let mut bytes = Vec::with_capacity(32);
        frame::put_ack(&mut bytes, self.op, status, text);
        self.out.send(&bytes);
    }

    /// So many bytes more are in place.
    fn landed(&self, bytes: u64) {
        // Each byte is claimed once: when all are copied, no copier is inside a call for this op.
        if self.copied.fetch_add(bytes, Ordering::AcqRel) + bytes == self.plan.total() {
            self.answer(Status::Done, "");
        }
    }
}

impl Drop for PullJob {
    fn drop(&mut self) {
        match self.failure.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            Some((status, text)) => self.answer(status, &text),
            None => self.answer(Status::Failed, "the target did not finish it"),
        }
    }
}

/// One copier's share of a job.
pub(crate) struct JobPart {
    job: Arc<PullJob>,
    cursor: Cursor,
    at: u64,
    end: u64,
}

impl JobPart {
    pub fn new(job: Arc<PullJob>) -> Self {
        Self { job, cursor: Cursor::default(), at: 0, end: 0 }
    }

    /// Copy one slice. False when there is nothing left for this copier: drop it then.
    pub fn slice(&mut self, inner: &Inner, local: &mut Vec<Seg>, remote: &mut Vec<Seg>) -> bool {
        let job = &*self.job;
        if job.stop.load(Ordering::Relaxed) || job.hold.0.revoked() {
            return false;
        }
        if self.at == self.end {
            let start = job.claimed.fetch_add(job.claim, Ordering::Relaxed);
            if start >= job.plan.total() {
                return false;
            }
            self.cursor.skip(&job.plan, start - self.at);
            self.at = start;
            self.end = job.plan.total().min(start + job.claim);
        }
        match step(job.pid, &job.plan, &job.held, &mut self.cursor, self.end - self.at, (local, remote)) {
            Ok(n) => {
                self.at += n;
                stats::add(&inner.counters.bytes_copied_in, n);
                job.landed(n);
                true
            }
            Err(e) => {
                job.fail(e.ack());
                false
            }
        }
    }
}
