//! Batches of small writes over Mooncake's TCP wire, side by side: a minimal client of the wire (one connection, a header and
//! a payload a call, answers read by a second thread), this crate's lane, and the library behind `kv_mooncake`.
//!
//! `cargo run --release -p kv-transfer-mooncake-tcp --example small_batches -- [library|own] [rounds]`
//!
//! The target is a process of its own: the library's engine, or ours. The three take turns; medians are printed.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a program for people who measure

use std::error::Error;
use std::io::{IoSlice, Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::ids::{OpId, PeerId};
use kv_core::memory::{MemoryOwner as _, RegisteredRegion};
use kv_core::net::Endpoint;
use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_core::transport::{Lane, LaneEvent, Outcome, SubmitError, Transport, WriteOp};
use kv_mooncake::{MooncakeConfig, MooncakeTransport};
use kv_mooncake_tcp::{MooncakeTcpConfig, MooncakeTcpTransport};
use kv_testkit::TestMemory;
use kv_testkit::conformance::{NoFaults, RemoteTarget, Target as _, serve_stdio};
use mooncake_wire::{Status, Write};

const CHILD: &str = "KV_SMALL_BATCHES_CHILD";
const MEMORY: usize = 256 << 20;

fn library() -> Result<Arc<dyn Transport>, Box<dyn Error>> {
    let config = MooncakeConfig { host: Some("127.0.0.1".into()), max_op_bytes: MEMORY as u64, ..Default::default() };
    Ok(Arc::new(MooncakeTransport::new(config)?))
}

fn own() -> Result<Arc<dyn Transport>, Box<dyn Error>> {
    let config = MooncakeTcpConfig { max_op_bytes: MEMORY as u64, ..MooncakeTcpConfig::loopback() };
    Ok(Arc::new(MooncakeTcpTransport::new(config)?))
}

/// The minimal client: writes `n` pieces of `len` bytes, and returns when all are acknowledged.
fn minimal(stream: &mut TcpStream, memory: &[u8], addr: u64, n: usize, len: usize) {
    let mut answers = stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        let mut send = || {
            for (i, payload) in memory.chunks(len).take(n).enumerate() {
                let head = Write { addr: addr + (i * len) as u64, len: len as u64, acknowledged: true }.encode();
                let mut parts = [IoSlice::new(&head), IoSlice::new(payload)];
                let mut parts = &mut parts[..];
                while !parts.is_empty() {
                    let n = stream.write_vectored(parts).unwrap();
                    IoSlice::advance_slices(&mut parts, n);
                }
            }
        };
        let sender = if n > 1 { Some(scope.spawn(send)) } else { (send(), None).1 };
        let mut words = vec![0; 8 * n];
        answers.read_exact(&mut words).unwrap();
        assert!(words.chunks(8).all(|w| Status::decode(w.try_into().unwrap()) == Ok(Status::Ok)));
        sender.into_iter().for_each(|s| s.join().unwrap());
    });
}

/// A lane of ours, with its memory.
struct Side {
    lane: Box<dyn Lane>,
    peer: PeerId,
    region: Arc<RegisteredRegion>,
    next: u64,
}

impl Side {
    fn new(
        transport: &Arc<dyn Transport>,
        memory: Arc<TestMemory>,
        target: &mut RemoteTarget,
    ) -> Result<Self, Box<dyn Error>> {
        let lane = transport.lane()?;
        let peer = transport.connect(&target.descriptor()?)?;
        Ok(Self { lane, peer, region: transport.register(memory)?, next: 0 })
    }

    /// The same as one op. The pieces are separate ones for the plan: a stride of one byte more on our side.
    fn write(&mut self, addr: u64, n: usize, len: usize) {
        self.next += 1;
        let entry = EntryPair {
            src_entry: 0,
            dst_entry: 0,
            src_region: self.region.id(),
            src_offset: 0,
            dst_addr: addr,
            item_len: len as u64,
            src_stride: len as u64 + 1,
            dst_stride: len as u64,
            dst_kind: Default::default(),
        };
        let runs = [Run { src: 0, dst: 0, count: n as u32 }];
        let plan = WritePlan::new([PlanGroup { entries: [entry].into(), runs: runs.into() }]);
        let mut op =
            Some(WriteOp { id: OpId(self.next), peer: self.peer, plan, regions: [self.region.clone()].into() });
        let mut news = Vec::new();
        loop {
            #[allow(clippy::result_large_err)] // the op comes back whole
            let submitted = op.take().map(|op| self.lane.submit(op));
            match submitted {
                None | Some(Ok(())) => {}
                Some(Err(SubmitError::Busy(back))) => op = Some(back),
                Some(Err(e)) => panic!("{e:?}"),
            }
            self.lane.poll(&mut news);
            match news.pop() {
                Some(LaneEvent::Outcome(_, Outcome::Done)) => return,
                Some(other) => panic!("{other:?}"),
                None => wait(self.lane.wake_fd().unwrap()),
            }
        }
    }
}

/// As a shard sleeps.
fn wait(fd: std::os::fd::RawFd) {
    // SAFETY: the lane lives, and with it its descriptor.
    let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) };
    let mut fds = [rustix::event::PollFd::new(&fd, rustix::event::PollFlags::IN)];
    rustix::event::poll(&mut fds, None).unwrap();
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e3
}

fn main() -> Result<(), Box<dyn Error>> {
    if let Ok(kind) = std::env::var(CHILD) {
        let transport = if kind == "own" { own()? } else { library()? };
        return Ok(serve_stdio(transport, Endpoint::new("127.0.0.1", 1), NoFaults)?);
    }
    let kind = std::env::args().nth(1).unwrap_or_else(|| "library".into());
    let rounds: usize = std::env::args().nth(2).map_or(Ok(15), |n| n.parse())?;
    let mut command = Command::new(std::env::current_exe()?);
    command.env(CHILD, &kind);
    let mut target = RemoteTarget::spawn(command)?;
    let block = target.alloc(MEMORY, true)?;
    let name = target.descriptor()?.name;
    let port = kv_testkit::mooncake::describe(&name)?["tcp_data_port"].as_u64().unwrap_or(0) as u16;
    let mut stream = TcpStream::connect(("127.0.0.1", port))?;
    stream.set_nodelay(true)?;

    let memory = TestMemory::patterned(MEMORY + (1 << 20), 1);
    // SAFETY: lives to the end of the program, and nobody writes it any more.
    let bytes = unsafe { std::slice::from_raw_parts(memory.base() as *const u8, MEMORY) };
    let ours = own()?;
    let mut ours = Side::new(&ours, memory.clone(), &mut target)?;
    let mut theirs = match library() {
        Ok(library) => Some(Side::new(&library, memory.clone(), &mut target)?),
        Err(e) => (println!("without the library's column: {e}"), None).1,
    };
    println!("target: {kind}; medians of {rounds} rounds, ms");
    println!("{:>16} {:>15} {:>15} {:>15}", "batch", "minimal client", "kv-mooncake-tcp", "kv-mooncake");
    for (n, kib) in [(1, 4), (100, 4), (1000, 4), (4000, 4), (2000, 16), (1000, 64), (4000, 64)] {
        let (len, mut times) = (kib << 10, [const { Vec::new() }; 3]);
        for _ in 0..rounds {
            let mut time = |which: usize, f: &mut dyn FnMut()| {
                let begun = Instant::now();
                f();
                times[which].push(begun.elapsed());
            };
            time(0, &mut || minimal(&mut stream, bytes, block.addr, n, len));
            time(1, &mut || ours.write(block.addr, n, len));
            if let Some(theirs) = &mut theirs {
                time(2, &mut || theirs.write(block.addr, n, len));
            }
        }
        let [a, b, c] = times;
        let c = if c.is_empty() { "-".into() } else { format!("{:.3}", median(c)) };
        println!("{:>16} {:>15.3} {:>15.3} {c:>15}", format!("{n} x {kib} KiB"), median(a), median(b));
    }
    Ok(())
}
