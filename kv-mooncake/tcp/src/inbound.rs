//! A data connection that a peer opened here: its requests, one after the other, in the order of its stream.
//!
//! Bytes come in runs of the scratch buffer, which all connections share; what does not fit into it goes from the kernel
//! straight into the registered block. Answers are collected and sent once a run.

use std::io::{self, Write as _};
use std::net::{Shutdown, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mooncake_wire::{HEADER_LEN, Opcode, Request, Status};

use crate::registry::{Region, Registry};
use crate::stats::{self, Counters};
use crate::sys::{self, Seg, not_now};

/// Bytes read at a time into the scratch buffer.
pub(crate) const SCRATCH: usize = 256 << 10;
/// Bytes that go into or out of a block in one call: so long the end of its registration waits.
const SLICE: usize = 1 << 20;
/// Calls before other connections have their turn.
const CALLS: usize = 4;
/// Answers kept for a peer that does not read them; beyond it nothing more is read of it.
const MOST_OUT: usize = 64 << 10;
/// A refused peer may go on sending for so long: closed at once, it might never see why.
const LINGER: Duration = Duration::from_secs(2);

enum State {
    /// Between requests, or within a header.
    Header,
    /// Payload on its way into a block.
    Into { region: Arc<Region>, at: u64, left: u64, acknowledged: bool },
    /// Payload on its way out of one.
    OutOf { region: Arc<Region>, at: u64, left: u64 },
    /// Refused: what comes is thrown away.
    Refused { until: Instant },
}

/// What a connection waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Wants {
    pub read: bool,
    pub write: bool,
}

/// What its requests are carried out on.
pub(crate) struct Memory<'a> {
    pub registry: &'a Registry,
    pub counters: &'a Counters,
    pub scratch: &'a mut [u8],
}

pub(crate) struct Inbound {
    pub sock: TcpStream,
    pub wants: Wants,
    state: State,
    head: [u8; HEADER_LEN],
    head_len: usize,
    /// Read, and not looked at, because an answer must go first.
    rest: Vec<u8>,
    out: Vec<u8>,
    out_sent: usize,
}

impl Inbound {
    pub fn new(sock: TcpStream) -> Self {
        Self {
            sock,
            wants: Wants { read: true, write: false },
            state: State::Header,
            head: [0; HEADER_LEN],
            head_len: 0,
            rest: Vec::new(),
            out: Vec::new(),
            out_sent: 0,
        }
    }

    /// When it must be over.
    pub fn deadline(&self) -> Option<Instant> {
        match self.state {
            State::Refused { until } => Some(until),
            _ => None,
        }
    }

    /// Do a fair share. An error ends the connection.
    pub fn drive(&mut self, memory: &mut Memory<'_>) -> io::Result<()> {
        for _ in 0..CALLS {
            if !self.answer(memory)? {
                break;
            }
            if !self.rest.is_empty() {
                let rest = std::mem::take(&mut self.rest);
                self.consume(&rest, memory)?;
                continue;
            }
            match self.receive(memory) {
                Ok(()) => {}
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => break,
                Err(e) => return Err(e),
            }
        }
        let open = self.answer(memory)?;
        self.wants = Wants { read: open, write: !open || !self.rest.is_empty() };
        Ok(())
    }

    /// Send what answers there are. Whether requests may be read on.
    fn answer(&mut self, memory: &mut Memory<'_>) -> io::Result<bool> {
        while self.out_sent < self.out.len() {
            match (&self.sock).write(&self.out[self.out_sent..]) {
                Ok(n) => self.out_sent += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let waits = self.out.len() - self.out_sent;
                    return Ok(waits < MOST_OUT && !matches!(self.state, State::OutOf { .. } | State::Refused { .. }));
                }
                Err(e) => return Err(e),
            }
        }
        self.out.clear();
        self.out_sent = 0;
        for _ in 0..CALLS {
            let State::OutOf { region, at, left } = &mut self.state else { break };
            let seg = Seg { addr: *at as usize, len: (*left).min(SLICE as u64) as usize };
            let sock = &self.sock;
            // SAFETY: inside the region, which is registered, and so mapped, while it is touched.
            match region.touch(|| unsafe { sys::send(sock, &[seg]) }) {
                // There is no way to say so within an answer.
                None => return Err(io::Error::other("the registration ended while the peer read")),
                Some(Err(e)) if not_now(&e) => return Ok(false),
                Some(Err(e)) => return Err(e),
                Some(Ok(n)) => {
                    *at += n as u64;
                    *left -= n as u64;
                    stats::add(&memory.counters.bytes_read_out, n as u64);
                    if *left == 0 {
                        stats::add(&memory.counters.requests_served, 1);
                        self.state = State::Header;
                    }
                }
            }
        }
        match self.state {
            State::OutOf { .. } => Ok(false),
            State::Refused { .. } => {
                let _ = self.sock.shutdown(Shutdown::Write);
                Ok(true)
            }
            _ => Ok(true),
        }
    }

    /// One call of the kernel: payload to where it belongs, what follows it into the scratch buffer.
    fn receive(&mut self, memory: &mut Memory<'_>) -> io::Result<()> {
        let sock = &self.sock;
        let scratch = Seg::of_mut(memory.scratch);
        let (into, got) = match &self.state {
            State::Into { region, at, left, .. } => {
                let direct = Seg { addr: *at as usize, len: (*left).min(SLICE as u64) as usize };
                let all = [direct, scratch];
                // Nothing may follow a payload that does not fit.
                let segs = if direct.len as u64 == *left { &all[..] } else { &all[..1] };
                // SAFETY: the first inside the region, which is registered, and so mapped, while it is touched; the second
                // is a buffer of our own.
                match region.touch(|| unsafe { sys::receive(sock, segs) }) {
                    None => return self.revoked(memory),
                    Some(got) => (direct.len, got?),
                }
            }
            // SAFETY: a buffer of our own.
            _ => (0, unsafe { sys::receive(sock, &[scratch]) }?),
        };
        if got == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let direct = got.min(into);
        self.arrived(direct, memory);
        let behind = std::mem::take(&mut memory.scratch);
        let consumed = self.consume(&behind[..got - direct], memory);
        memory.scratch = behind;
        consumed
    }

    /// So many bytes of the payload have come.
    fn arrived(&mut self, n: usize, memory: &mut Memory<'_>) {
        let State::Into { at, left, acknowledged, .. } = &mut self.state else { return };
        *at += n as u64;
        *left -= n as u64;
        stats::add(&memory.counters.bytes_received, n as u64);
        if *left == 0 {
            stats::add(&memory.counters.requests_served, 1);
            if *acknowledged {
                self.out.extend_from_slice(&Status::Ok.encode());
            }
            self.state = State::Header;
        }
    }

    /// Take what was read.
    fn consume(&mut self, mut bytes: &[u8], memory: &mut Memory<'_>) -> io::Result<()> {
        while !bytes.is_empty() {
            match &self.state {
                State::Header => {
                    let n = (HEADER_LEN - self.head_len).min(bytes.len());
                    self.head[self.head_len..self.head_len + n].copy_from_slice(&bytes[..n]);
                    self.head_len += n;
                    bytes = &bytes[n..];
                    if self.head_len == HEADER_LEN {
                        self.head_len = 0;
                        self.request(memory)?;
                    }
                }
                State::Into { region, at, left, .. } => {
                    let n = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                    // SAFETY: inside the region, which is registered, and so mapped, while it is touched.
                    if region.touch(|| unsafe { sys::write_mem(*at as usize, &bytes[..n]) }).is_none() {
                        return self.revoked(memory);
                    }
                    bytes = &bytes[n..];
                    self.arrived(n, memory);
                }
                // The answer goes first.
                State::OutOf { .. } => {
                    self.rest = bytes.to_vec();
                    return Ok(());
                }
                State::Refused { .. } => return Ok(()),
            }
        }
        Ok(())
    }

    fn request(&mut self, memory: &mut Memory<'_>) -> io::Result<()> {
        let request = Request::decode(&self.head).map_err(|e| {
            stats::add(&memory.counters.requests_malformed, 1);
            io::Error::new(io::ErrorKind::InvalidData, e)
        })?;
        let Some(region) = memory.registry.find(request.addr, request.len) else {
            tracing::debug!(?request, "a range that is not registered here");
            self.refuse(request.acknowledged, memory);
            return Ok(());
        };
        let (at, left, acknowledged) = (request.addr, request.len, request.acknowledged);
        self.state = match request.op {
            Opcode::Write => State::Into { region, at, left, acknowledged },
            Opcode::Read => {
                if acknowledged {
                    self.out.extend_from_slice(&Status::Ok.encode());
                }
                State::OutOf { region, at, left }
            }
        };
        Ok(())
    }

    /// The registration has ended in the midst of a write.
    fn revoked(&mut self, memory: &mut Memory<'_>) -> io::Result<()> {
        let acknowledged = matches!(self.state, State::Into { acknowledged: true, .. });
        self.refuse(acknowledged, memory);
        Ok(())
    }

    fn refuse(&mut self, acknowledged: bool, memory: &mut Memory<'_>) {
        stats::add(&memory.counters.requests_refused, 1);
        if acknowledged {
            self.out.extend_from_slice(&Status::Rejected.encode());
        }
        self.state = State::Refused { until: Instant::now() + LINGER };
    }
}
