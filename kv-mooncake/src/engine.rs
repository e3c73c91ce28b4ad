//! The library's engine, with its calls made safe: batches are live, codes are looked at, texts are copied.
//!
//! Batches are the exception: nothing here lets go of one by itself. Who saw every task of it end, and has proof where one
//! failed, calls [`Engine::free`]; one without proof is kept.

use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_int, c_void};
use std::time::{Duration, Instant};

use kv_core::memory::MemoryKind;
use kv_core::transport::{TransportError, TransportErrorKind as ErrorKind};
use mooncake_sys::{Api, Batch, INVALID_BATCH, P2P_HANDSHAKE, READ, Request, Segment, Status, WRITE, code_name, task};

use crate::environment;

/// A code that is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub c_int);

impl Code {
    pub fn name(self) -> &'static str {
        code_name(self.0)
    }
}

fn check(code: c_int) -> Result<(), Code> {
    if code == 0 { Ok(()) } else { Err(Code(code)) }
}

/// How a task stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Task {
    Going,
    Done,
    /// Ended, and failed.
    Failed(&'static str),
    /// It is not well, and may still end in any way.
    Astray(&'static str),
}

/// One contiguous copy.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub source: u64,
    pub target: u64,
    pub len: u64,
}

/// Bytes of ours that a first contact reads into; registered, since RDMA asks for that.
const SCRATCH: usize = 4096;
/// Bytes that a first contact reads, a connection. At most [`SCRATCH`] in all, and far from the library's limits.
const GREETINGS: usize = 48;

pub(crate) struct Engine {
    api: Api,
    handle: mooncake_sys::Engine,
    name: String,
    /// Never freed: peers may read and write it as long as the engine is there.
    scratch: u64,
}

// SAFETY: the engine's calls may come from several threads at once.
unsafe impl Send for Engine {}
// SAFETY: as above.
unsafe impl Sync for Engine {}

impl Engine {
    /// An engine that peers reach at `host`.
    pub fn new(api: Api, host: &str) -> Result<Self, TransportError> {
        let unavailable = |text: String| TransportError::new(ErrorKind::Unavailable, text);
        if api.is_for_ascend() && !environment::forces_tcp() && !has_ascend() {
            return Err(unavailable(format!(
                "{} is the build for Ascend cards, and would end this process without one; set MC_FORCE_TCP=1 to use it \
                 over TCP, or name a build for this machine's devices in KV_MOONCAKE_LIB",
                api.path().display()
            )));
        }
        if let Some(why) = environment::forbidden() {
            return Err(unavailable(why.into()));
        }
        let wrapped = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host.into() };
        let c_host = CString::new(wrapped).map_err(|e| unavailable(e.to_string()))?;
        // SAFETY: strings that end in 0.
        let handle =
            unsafe { (api.create_transfer_engine)(P2P_HANDSHAKE.as_ptr(), c_host.as_ptr(), c"".as_ptr(), 0, 1) };
        if handle.is_null() {
            return Err(unavailable(format!(
                "Mooncake cannot make an engine at {host} (no free port of 15000 to 17000, or the ports of \
                 MC_MIN_RPC_PORT to MC_MAX_RPC_PORT? its messages are on standard error)"
            )));
        }
        let mut engine = Self { api, handle, name: String::new(), scratch: 0 };
        engine.name = engine.local_name();
        if engine.name.is_empty() {
            return Err(unavailable("Mooncake does not tell its own address".into()));
        }
        let scratch = Box::leak(vec![0u8; SCRATCH].into_boxed_slice()).as_mut_ptr() as u64;
        engine.register(scratch, SCRATCH as u64, MemoryKind::Dram).map_err(|code| {
            unavailable(format!("Mooncake does not register {SCRATCH} bytes of host memory: {}", code.name()))
        })?;
        engine.scratch = scratch;
        Ok(engine)
    }

    fn local_name(&self) -> String {
        let mut text = [0u8; 256];
        // SAFETY: live engine, a place with its length; the library ends it by 0.
        let code = unsafe { (self.api.get_local_ip_and_port)(self.handle, text.as_mut_ptr().cast(), text.len()) };
        let found = CStr::from_bytes_until_nul(&text).ok().and_then(|t| t.to_str().ok());
        found.filter(|_| code == 0).unwrap_or_default().to_owned()
    }

    pub fn api(&self) -> &Api {
        &self.api
    }

    /// Its session id.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Ask a peer for its descriptor, whatever is known. It must have been looked at: see [`crate::probe`].
    pub fn open_anew(&self, name: &CStr) -> Option<Segment> {
        // SAFETY: live engine, a string that ends in 0.
        let segment = unsafe { (self.api.open_segment_no_cache)(self.handle, name.as_ptr()) };
        // 0 is our own.
        (segment > 0).then_some(segment)
    }

    pub fn register(&self, addr: u64, len: u64, memory: MemoryKind) -> Result<(), Code> {
        let location = match memory {
            // The library finds the NUMA node of each page.
            MemoryKind::Dram => c"*".to_owned(),
            MemoryKind::Vram { device } => CString::new(format!("cuda:{device}")).unwrap_or_default(),
        };
        // SAFETY: live engine; the caller holds the memory, whose range this is; a string that ends in 0.
        check(unsafe {
            (self.api.register_local_memory)(self.handle, addr as *mut c_void, len as usize, location.as_ptr(), 1)
        })
    }

    /// End a registration.
    pub fn unregister(&self, addr: u64) -> Result<(), Code> {
        // SAFETY: live engine.
        check(unsafe { (self.api.unregister_local_memory)(self.handle, addr as *mut c_void) })
    }

    /// Write pieces: a batch of as many tasks. `None`: there is no batch to be had, and nothing was started. With a code,
    /// what of it was started is not known.
    pub fn write(&self, segment: Segment, pieces: &[Piece]) -> Option<(Batch, Result<(), Code>)> {
        self.submit(segment, WRITE, pieces)
    }

    fn submit(&self, target: Segment, opcode: c_int, pieces: &[Piece]) -> Option<(Batch, Result<(), Code>)> {
        // SAFETY: live engine.
        let batch = unsafe { (self.api.allocate_batch_id)(self.handle, pieces.len()) };
        if batch == INVALID_BATCH {
            return None;
        }
        let request = |p: &Piece| Request {
            opcode,
            source: p.source as *mut c_void,
            target,
            target_offset: p.target,
            length: p.len,
        };
        let mut requests: Vec<Request> = pieces.iter().map(request).collect();
        // SAFETY: live engine and batch, requests with their count; the memory is held by the op that owns the batch.
        let code = unsafe { (self.api.submit_transfer)(self.handle, batch, requests.as_mut_ptr(), requests.len()) };
        Some((batch, check(code)))
    }

    pub fn task(&self, batch: Batch, number: u32) -> Task {
        let mut status = Status { status: -1, transferred: 0 };
        // SAFETY: live engine and batch, a place for the status.
        let code = unsafe { (self.api.get_transfer_status)(self.handle, batch, number as usize, &raw mut status) };
        match (code, status.status) {
            (0, task::WAITING | task::PENDING) => Task::Going,
            (0, task::COMPLETED) => Task::Done,
            (0, task::FAILED | task::CANCELED | task::INVALID) => Task::Failed(task::name(status.status)),
            (0, other) => Task::Astray(task::name(other)),
            // The status was not touched.
            (code, _) => Task::Astray(code_name(code)),
        }
    }

    /// Let go of a batch whose every task was seen ended.
    pub fn free(&self, batch: Batch) {
        // SAFETY: live engine and batch; it is gone after this, or the library has it and nobody else.
        let code = unsafe { (self.api.free_batch_id)(self.handle, batch) };
        if code != 0 {
            tracing::warn!(code = code_name(code), "a batch could not be let go of");
        }
    }

    /// Start to read a byte of a peer's memory on each connection to it; numbers of the tasks. What is read is of no use:
    /// connections to a process that is gone break over it, and are closed.
    pub fn poke(&self, segment: Segment, addr: u64) -> Result<(Batch, VecDeque<u32>), &'static str> {
        self.read_bytes(segment, addr, environment::connections())
    }

    fn read_bytes(&self, segment: Segment, addr: u64, n: usize) -> Result<(Batch, VecDeque<u32>), &'static str> {
        let piece = |i: usize| Piece { source: self.scratch + i as u64, target: addr, len: 1 };
        let pieces: Vec<Piece> = (0..n).map(piece).collect();
        let (batch, submitted) = self.submit(segment, READ, &pieces).ok_or("no batch")?;
        // On a code it is kept: what of it was started is not known.
        submitted.map(|()| (batch, (0..pieces.len() as u32).collect())).map_err(Code::name)
    }

    /// Read bytes of a peer's memory until all of that succeeds: then every connection leads to the peer as it is now, and is
    /// there for the first write. The library connects one at a time, and only while something waits for a connection: so there
    /// is a lot to read.
    pub fn greet(&self, segment: Segment, addr: u64, patience: Duration) -> Result<(), &'static str> {
        let until = Instant::now() + patience;
        loop {
            let (batch, tasks) = self.read_bytes(segment, addr, GREETINGS * environment::connections())?;
            let mut failed = None;
            for number in tasks {
                loop {
                    match self.task(batch, number) {
                        Task::Done => break,
                        Task::Failed(why) => {
                            failed = Some(why);
                            break;
                        }
                        // The batch is kept, and the bytes it reads into live as long as the process.
                        Task::Astray(why) => return Err(why),
                        Task::Going if Instant::now() >= until => return Err("no answer on its data port in time"),
                        Task::Going => std::thread::sleep(Duration::from_micros(100)),
                    }
                }
            }
            self.free(batch);
            match failed {
                None => return Ok(()),
                Some(why) if Instant::now() >= until => return Err(why),
                Some(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }
}

/// Whether this machine has an Ascend card.
fn has_ascend() -> bool {
    std::path::Path::new("/dev/davinci_manager").exists()
}

impl Drop for Engine {
    fn drop(&mut self) {
        // SAFETY: ours, ended once; nothing uses the engine any more.
        unsafe { (self.api.destroy_transfer_engine)(self.handle) };
    }
}
