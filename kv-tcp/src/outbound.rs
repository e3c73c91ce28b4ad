//! A data connection to a peer: stripes of ops, sent straight from registered memory.

use std::collections::VecDeque;
use std::io::{self, Read};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use kv_core::memory::RegisteredRegion;
use kv_core::transport::{TransportError, TransportErrorKind};

use crate::copy::{self, MAX_SEGS};
use crate::peer::Peer;
use crate::plan::{Cursor, Plan};
use crate::sys::{self, Epoll, Seg};
use crate::transport::Inner;

/// Bytes sent in one call.
const SEND: u64 = 256 << 10;
/// Calls before other connections have their turn.
const CALLS: usize = 4;

/// The bytes of one op, shared by its stripes. While one exists, the source is in use; when the last one is dropped,
/// the peer's count of them says so.
pub(crate) struct SendJob {
    plan: Plan,
    peer: Arc<Peer>,
    /// Keeps the memory mapped while we send from it.
    _regions: Arc<[Arc<RegisteredRegion>]>,
}

impl SendJob {
    pub fn new(plan: Plan, peer: Arc<Peer>, regions: Arc<[Arc<RegisteredRegion>]>) -> Arc<Self> {
        peer.jobs.fetch_add(1, Ordering::SeqCst);
        Arc::new(Self { plan, peer, _regions: regions })
    }

    /// The plan's wire form, without our addresses.
    pub fn encode(&self, out: &mut Vec<u8>) {
        self.plan.encode(false, out);
    }
}

impl Drop for SendJob {
    fn drop(&mut self) {
        if self.peer.jobs.fetch_sub(1, Ordering::SeqCst) == 1 {
            self.peer.sends_ended();
        }
    }
}

/// A part of an op on its way over one connection.
pub(crate) struct Stripe {
    job: Arc<SendJob>,
    /// The WRITE frame.
    head: Vec<u8>,
    head_sent: usize,
    cursor: Cursor,
    left: u64,
}

impl Stripe {
    pub fn new(job: Arc<SendJob>, head: Vec<u8>, start: u64, len: u64) -> Self {
        let mut cursor = Cursor::default();
        cursor.skip(&job.plan, start);
        Self { job, head, head_sent: 0, cursor, left: len }
    }
}

pub(crate) struct Outbound {
    token: u64,
    sock: Arc<TcpStream>,
    peer: Arc<Peer>,
    queue: VecDeque<Stripe>,
    armed: bool,
}

impl Outbound {
    pub fn new(token: u64, sock: Arc<TcpStream>, peer: Arc<Peer>) -> Self {
        Self { token, sock, peer, queue: VecDeque::new(), armed: false }
    }

    pub fn fd(&self) -> RawFd {
        self.sock.as_raw_fd()
    }

    pub fn start(&mut self, ep: &Epoll) -> io::Result<()> {
        ep.add(self.fd(), self.token, true, false)
    }

    pub fn push(&mut self, stripe: Stripe) {
        self.queue.push_back(stripe);
    }

    /// The target says nothing here: something to read is the end, or an error.
    pub fn readable(&mut self) -> io::Result<()> {
        match (&*self.sock).read(&mut [0; 1]) {
            Ok(0) => Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "data where none is due")),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Ok(()),
            Err(e) => Err(e),
        }
    }

    /// Send a fair share of what is queued.
    pub fn drive(&mut self, ep: &Epoll, segs: &mut Vec<Seg>) -> io::Result<()> {
        let mut calls = 0;
        while calls < CALLS {
            let Some(stripe) = self.queue.front_mut() else { break };
            match stripe.send(&self.sock, segs) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
            calls += 1;
            if stripe.left == 0 && stripe.head_sent == stripe.head.len() {
                self.queue.pop_front();
            }
        }
        let arm = !self.queue.is_empty();
        if arm != self.armed {
            ep.modify(self.fd(), self.token, true, arm)?;
            self.armed = arm;
        }
        Ok(())
    }

    /// The connection failed: nothing is sent any more, and the peer is lost.
    pub fn lost(self, inner: &Arc<Inner>, error: &io::Error) {
        let peer = Arc::clone(&self.peer);
        drop(self);
        let text = format!("data connection to {}: {error}", peer.name);
        peer.lose(inner, TransportError::new(TransportErrorKind::PeerLost, text));
    }
}

impl Stripe {
    fn send(&mut self, sock: &TcpStream, segs: &mut Vec<Seg>) -> io::Result<()> {
        segs.clear();
        let head = &self.head[self.head_sent..];
        if !head.is_empty() {
            segs.push(Seg { addr: head.as_ptr() as usize, len: head.len() });
        }
        let mut ahead = self.cursor;
        let mut room = self.left.min(SEND);
        while segs.len() < MAX_SEGS {
            let Some(piece) = ahead.next(&self.job.plan, room) else { break };
            copy::push(segs, piece.src, piece.len);
            room -= piece.len;
        }
        // SAFETY: the head is our own buffer; the plan's sources were checked against `regions`, which the job keeps
        // registered and mapped.
        let n = unsafe { sys::send_segs(sock.as_raw_fd(), segs) }?;
        let of_head = n.min(head.len());
        self.head_sent += of_head;
        let payload = (n - of_head) as u64;
        self.cursor.skip(&self.job.plan, payload);
        self.left -= payload;
        Ok(())
    }
}
