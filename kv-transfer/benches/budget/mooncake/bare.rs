//! The library driven bare, as one would who trusts everybody: batches of tasks in a window, looked at in order until each
//! is done, let go of.

use std::collections::VecDeque;
use std::ffi::{CString, c_int, c_void};
use std::time::Duration;

use kv_transfer::mooncake::prepare_environment;
use mooncake_sys::{Api, Batch, INVALID_BATCH, P2P_HANDSHAKE, Request, Segment, Status, WRITE, code_name, task};

use super::work::Piece;
use crate::Result;
use crate::pair::{HOST, PATIENCE};
use crate::sys::now_ns;

fn check(what: &str, code: c_int) -> Result<()> {
    if code == 0 { Ok(()) } else { Err(format!("bare Mooncake: {what}: {}", code_name(code)).into()) }
}

/// Tasks of a batch, tasks outstanding, and how long to rest when nothing ended (zero: yield).
#[derive(Clone, Copy)]
pub struct Way {
    pub batch: usize,
    pub window: usize,
    pub pause: Duration,
}

/// An engine. It lives as long as the process.
pub struct Bare {
    api: Api,
    engine: mooncake_sys::Engine,
}

impl Bare {
    pub fn new() -> Result<Self> {
        prepare_environment();
        let (api, host) = (Api::open(None)?, CString::new(HOST)?);
        // SAFETY: strings that end in 0.
        let engine = unsafe { (api.create_transfer_engine)(P2P_HANDSHAKE.as_ptr(), host.as_ptr(), c"".as_ptr(), 0, 1) };
        if engine.is_null() { Err("bare Mooncake: no engine".into()) } else { Ok(Self { api, engine }) }
    }

    /// Register host memory, which stays there.
    pub fn register(&self, addr: u64, len: u64) -> Result<()> {
        // SAFETY: a live engine; the caller keeps the memory for the life of the process; a string that ends in 0.
        check("register", unsafe {
            (self.api.register_local_memory)(self.engine, addr as *mut c_void, len as usize, c"*".as_ptr(), 1)
        })
    }

    pub fn open(&self, name: &str) -> Result<Segment> {
        let name = CString::new(name)?;
        // SAFETY: a live engine, a string that ends in 0.
        let segment = unsafe { (self.api.open_segment)(self.engine, name.as_ptr()) };
        if segment > 0 { Ok(segment) } else { Err("bare Mooncake: the peer cannot be opened".into()) }
    }

    fn submit(&self, target: Segment, pieces: &[Piece]) -> Result<Batch> {
        let request = |p: &Piece| Request {
            opcode: WRITE,
            source: p.from as *mut c_void,
            target,
            target_offset: p.to,
            length: p.len,
        };
        let mut requests: Vec<Request> = pieces.iter().map(request).collect();
        // SAFETY: a live engine and batch; requests with their count, of memory that stays.
        unsafe {
            let batch = (self.api.allocate_batch_id)(self.engine, requests.len());
            if batch == INVALID_BATCH {
                return Err("bare Mooncake: no batch".into());
            }
            check("submit", (self.api.submit_transfer)(self.engine, batch, requests.as_mut_ptr(), requests.len()))?;
            Ok(batch)
        }
    }

    fn done(&self, batch: Batch, number: usize) -> Result<bool> {
        let mut status = Status::default();
        // SAFETY: a live engine and batch, a place for the status.
        check("status", unsafe { (self.api.get_transfer_status)(self.engine, batch, number, &raw mut status) })?;
        match status.status {
            task::COMPLETED => Ok(true),
            task::WAITING | task::PENDING => Ok(false),
            other => Err(format!("bare Mooncake: a task ended {}", task::name(other)).into()),
        }
    }

    /// Write all of it; ns.
    pub fn write(&self, segment: Segment, pieces: &[Piece], way: Way) -> Result<u64> {
        let start = now_ns();
        let mut left = pieces.chunks(way.batch);
        let mut next = left.next();
        // Batches with their count of tasks, and of those that were seen done.
        let mut flying: VecDeque<(Batch, usize, usize)> = VecDeque::new();
        let (mut outstanding, mut moved) = (0, start);
        loop {
            while let Some(pieces) = next.filter(|p| outstanding == 0 || outstanding + p.len() <= way.window) {
                flying.push_back((self.submit(segment, pieces)?, pieces.len(), 0));
                outstanding += pieces.len();
                next = left.next();
            }
            if flying.is_empty() {
                return Ok(now_ns() - start);
            }
            let before = outstanding;
            while let Some((batch, count, done)) = flying.front_mut() {
                while *done < *count && self.done(*batch, *done)? {
                    *done += 1;
                    outstanding -= 1;
                }
                if *done < *count {
                    break;
                }
                // SAFETY: a live engine and batch, all of whose tasks were seen ended; not used any more.
                check("free", unsafe { (self.api.free_batch_id)(self.engine, *batch) })?;
                flying.pop_front();
            }
            if outstanding != before {
                moved = now_ns();
            } else if now_ns() - moved > PATIENCE.as_nanos() as u64 {
                return Err("bare Mooncake: nothing moves".into());
            } else if way.pause.is_zero() {
                std::thread::yield_now();
            } else {
                std::thread::sleep(way.pause);
            }
        }
    }
}
