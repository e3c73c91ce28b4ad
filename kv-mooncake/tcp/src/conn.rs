//! A lane's connection to a peer: requests go out one behind the other, answers come back in the same order.

use std::collections::VecDeque;
use std::io::{self, Read as _};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use kv_core::transport::{TransportError, TransportErrorKind as ErrorKind};
use mooncake_wire::{HEADER_LEN, STATUS_LEN, Status};

use crate::flight::Flight;
use crate::peer::Peer;
use crate::stats::{self, Counters};
use crate::sys::{self, MAX_SEGS, Seg, not_now};

/// Bytes of one call.
const CALL: u64 = 1 << 20;
/// Bytes of answers read at a time.
const ANSWERS: usize = 16 << 10;

/// Answers at most that are waited for together.
const TOGETHER: usize = 32;
/// Fewer are not worth a call of the kernel.
const FEW: usize = 4;

/// How a connection ended.
pub(crate) enum End {
    /// The peer refused the first flight, and by the rules of the wire takes nothing that follows it.
    Refused(TransportError),
    /// Nothing is known of what was not answered.
    Broken(TransportError),
}

/// Memory that a lane's connections use one after the other.
pub(crate) struct Scratch {
    heads: Vec<[u8; HEADER_LEN]>,
    segs: Vec<Seg>,
    answers: Vec<u8>,
}

impl Scratch {
    pub fn new() -> Self {
        Self {
            heads: vec![[0; HEADER_LEN]; MAX_SEGS / 2],
            segs: Vec::with_capacity(MAX_SEGS),
            answers: vec![0; ANSWERS],
        }
    }
}

pub(crate) struct Conn {
    pub sock: TcpStream,
    pub peer: Arc<Peer>,
    /// The wire of version 2.
    pub acknowledges: bool,
    /// Oldest first; none is over.
    pub flights: VecDeque<Flight>,
    /// The first flight that has not gone whole.
    sending: usize,
    /// Bytes of its next piece that have gone.
    part: u64,
    /// Bytes that have not gone.
    pub pending: u64,
    status: [u8; STATUS_LEN],
    status_len: usize,
    /// Answers that wake us: a target sends them one by one, and being woken for each costs more than what it says.
    mark: usize,
    /// The socket takes nothing more now.
    pub blocked: bool,
    /// What the lane's poll set waits for: room as well.
    pub armed: bool,
    /// When something last went, or was answered.
    pub moved: Instant,
}

impl Conn {
    pub fn new(sock: TcpStream, peer: Arc<Peer>, now: Instant) -> Self {
        let acknowledges = peer.described().acknowledges();
        Self {
            sock,
            peer,
            acknowledges,
            flights: VecDeque::new(),
            sending: 0,
            part: 0,
            pending: 0,
            status: [0; STATUS_LEN],
            status_len: 0,
            mark: 1,
            blocked: false,
            armed: false,
            moved: now,
        }
    }

    pub fn push(&mut self, flight: Flight) {
        self.pending += flight.pieces.iter().map(|p| p.wire()).sum::<u64>();
        self.flights.push_back(flight);
    }

    fn broken(&self, what: impl std::fmt::Display) -> End {
        let text = format!("the connection to {}: {what}; connect to it again", self.peer.name);
        End::Broken(TransportError::new(ErrorKind::PeerLost, text))
    }

    /// Give the kernel what it takes, up to about `most` bytes.
    pub fn send(&mut self, most: u64, scratch: &mut Scratch, counters: &Counters, now: Instant) -> Result<(), End> {
        let mut turn = 0;
        self.blocked = false;
        while turn < most && self.pending > 0 {
            self.gather(scratch);
            // SAFETY: headers are buffers of our own, filled and not touched until this returns; payload lies in regions
            // that its op holds registered, and mapped, and was checked against their bounds.
            match unsafe { sys::send(&self.sock, &scratch.segs) } {
                Ok(n) => {
                    turn += n as u64;
                    stats::add(&counters.requests_sent, self.gone(n as u64));
                    self.moved = now;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if not_now(&e) => {
                    self.blocked = true;
                    break;
                }
                Err(e) => return Err(self.broken(format_args!("cannot be written to: {e}"))),
            }
        }
        Ok(())
    }

    /// The next bytes of the stream.
    fn gather(&self, scratch: &mut Scratch) {
        scratch.segs.clear();
        let (mut bytes, mut part, mut heads) = (0, self.part, scratch.heads.iter_mut());
        'all: for flight in self.flights.range(self.sending..) {
            for piece in &flight.pieces[flight.sent..] {
                if bytes >= CALL {
                    break 'all;
                }
                let Some(head) = heads.next() else { break 'all };
                *head = piece.header(self.acknowledges);
                let of_head = (part as usize).min(HEADER_LEN);
                if of_head < HEADER_LEN {
                    scratch.segs.push(Seg::of(&head[of_head..]));
                }
                let of_payload = part - of_head as u64;
                let len = (piece.payload() - of_payload).min(CALL);
                if len > 0 {
                    scratch.segs.push(Seg { addr: (piece.source + of_payload) as usize, len: len as usize });
                }
                bytes += len + HEADER_LEN as u64;
                if len < piece.payload() - of_payload {
                    break 'all;
                }
                part = 0;
            }
        }
    }

    /// So many bytes have gone; how many requests are whole with them.
    fn gone(&mut self, mut n: u64) -> u64 {
        self.pending -= n;
        let mut whole = 0;
        while n > 0 {
            let Some(flight) = self.flights.get_mut(self.sending) else { break };
            let missing = flight.pieces[flight.sent].wire() - self.part;
            if n < missing {
                self.part += n;
                break;
            }
            n -= missing;
            self.part = 0;
            flight.sent += 1;
            whole += 1;
            if !flight.waits() {
                self.sending += 1;
            }
        }
        whole
    }

    /// Take what was answered. Flights that are over go to `over`, also where it ends.
    pub fn receive(&mut self, scratch: &mut Scratch, over: &mut Vec<Flight>, now: Instant) -> Result<(), End> {
        loop {
            let n = match (&self.sock).read(&mut scratch.answers) {
                Ok(0) => return Err(self.broken("closed by the peer")),
                Ok(n) => n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => continue,
                Err(e) if not_now(&e) => return Ok(()),
                Err(e) => return Err(self.broken(format_args!("cannot be read from: {e}"))),
            };
            self.moved = now;
            let mut bytes = &scratch.answers[..n];
            while !bytes.is_empty() {
                let taken = if self.acknowledges { self.status(bytes)? } else { 1 };
                bytes = &bytes[taken..];
                if self.status_len == 0 {
                    self.answered(over)?;
                }
            }
            if n < scratch.answers.len() {
                return Ok(());
            }
        }
    }

    /// Take bytes of a status; how many.
    fn status(&mut self, bytes: &[u8]) -> Result<usize, End> {
        let n = (STATUS_LEN - self.status_len).min(bytes.len());
        self.status[self.status_len..self.status_len + n].copy_from_slice(&bytes[..n]);
        self.status_len += n;
        if self.status_len < STATUS_LEN {
            return Ok(n);
        }
        self.status_len = 0;
        match Status::decode(self.status) {
            Ok(Status::Ok) => Ok(n),
            // Only of a request that has gone: anything else is nobody's word.
            Ok(Status::Rejected)
                if self.flights.front().is_some_and(|f| f.answered < f.sent || self.part_of_front()) =>
            {
                let text = format!(
                    "{} refuses a write: it lies in nothing that is registered there now; connect to it again",
                    self.peer.name
                );
                Err(End::Refused(TransportError::new(ErrorKind::Refused, text)))
            }
            Ok(other) => Err(self.broken(format_args!("the peer answers {other:?}, which is not due"))),
            Err(e) => Err(self.broken(format_args!("the peer answers what cannot be read: {e}"))),
        }
    }

    /// Whether the first flight's next piece has gone in part: a target refuses at the header.
    fn part_of_front(&self) -> bool {
        self.sending == 0 && self.part >= HEADER_LEN as u64
    }

    fn answered(&mut self, over: &mut Vec<Flight>) -> Result<(), End> {
        let result = match self.flights.front_mut() {
            Some(flight) => flight.answer(self.acknowledges),
            None => Err("an answer where nothing was asked"),
        };
        result.map_err(|what| self.broken(format_args!("the peer sent {what}")))?;
        if self.flights.front().is_some_and(Flight::over) {
            over.extend(self.flights.pop_front());
            self.sending = self.sending.saturating_sub(1);
        }
        Ok(())
    }

    /// Leave out what has not begun to go, of the flights that `which` holds for. Those of which nothing has gone go to
    /// `never`, those of which all that has gone was answered to `over`.
    pub fn cut(&mut self, which: impl Fn(&Flight) -> bool, never: &mut Vec<Flight>, over: &mut Vec<Flight>) {
        let mut kept = VecDeque::with_capacity(self.flights.len());
        for (n, mut flight) in std::mem::take(&mut self.flights).into_iter().enumerate() {
            let part = n == self.sending && self.part > 0;
            let begun = !which(&flight) || flight.cut(part);
            match (begun, flight.over()) {
                (true, false) => kept.push_back(flight),
                (true, true) => over.push(flight),
                (false, _) => never.push(flight),
            }
        }
        self.flights = kept;
        self.sending = self.flights.iter().position(Flight::waits).unwrap_or(self.flights.len());
        let left: u64 = self.flights.iter().flat_map(|f| &f.pieces[f.sent..]).map(|p| p.wire()).sum();
        self.pending = left - self.part;
    }

    /// Be woken when the first flight is over, or when a good part of its answers are there.
    pub fn mark(&mut self) {
        let due = self.flights.front().map_or(1, |f| f.pieces.len() - f.answered);
        let mark = if !self.acknowledges || due <= FEW { 1 } else { due.min(TOGETHER) };
        if mark != self.mark {
            self.mark = mark;
            // Of the last one, its first byte: a part of it may have been read already.
            sys::readable_from(&self.sock, ((mark - 1) * STATUS_LEN + 1) as i32);
        }
    }

    /// Whether anything of this flight has gone.
    pub fn begun(&self, n: usize) -> bool {
        self.flights[n].sent > 0 || (n == self.sending && self.part > 0)
    }
}
