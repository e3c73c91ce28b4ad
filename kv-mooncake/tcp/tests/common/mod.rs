//! What the live tests share: a source over our transport, and targets in processes of their own.
#![allow(dead_code)] // every test binary uses its own part
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests, outside `#[test]` functions

use std::collections::BTreeMap;
use std::os::fd::BorrowedFd;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::ids::{OpId, PeerId};
use kv_core::memory::{MemoryOwner as _, RegisteredRegion};
use kv_core::net::Endpoint;
use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_core::transport::{Lane, LaneEvent, Outcome, PeerDescriptor, Settlement, SubmitError, Transport, WriteOp};
use kv_mooncake::{MooncakeConfig, MooncakeTransport};
use kv_mooncake_tcp::{MooncakeTcpConfig, MooncakeTcpTransport};
use kv_testkit::TestMemory;
use kv_testkit::conformance::{Block, NoFaults, RemoteTarget, Target, serve_stdio};

/// Tells a process that it is a target: the port of its control endpoint.
pub const CHILD: &str = "KV_MOONCAKE_TEST_CHILD";
/// Only hangs end here.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn config() -> MooncakeTcpConfig {
    MooncakeTcpConfig::loopback()
}

fn library_config() -> MooncakeConfig {
    MooncakeConfig { host: Some("127.0.0.1".into()), ..MooncakeConfig::default() }
}

/// Mooncake's own library, in this process.
pub fn library() -> MooncakeTransport {
    MooncakeTransport::new(library_config()).unwrap()
}

/// Whether the library is here. Without it the test says that it passes over itself, or fails where the library is asked
/// for.
pub fn available(test: &str) -> bool {
    let Err(error) = MooncakeTransport::new(library_config()) else { return true };
    let required = std::env::var("KV_REQUIRE_BACKENDS").unwrap_or_default();
    assert!(!required.split(',').any(|b| b.trim() == "mooncake"), "mooncake is required: {error}");
    println!("skipped: {test}: {error}");
    false
}

/// A process of this program that runs one test as a target.
pub fn target_command(test: &str, what: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, what);
    command
}

/// The body of a target's process, when this is one: ours, or the library's with `library` before the port.
pub fn serve_if_child() {
    let Ok(what) = std::env::var(CHILD) else { return };
    let (kind, port) = what.rsplit_once(' ').unwrap_or(("", &what));
    let transport: Arc<dyn Transport> = match kind {
        "library" => Arc::new(library()),
        _ => Arc::new(MooncakeTcpTransport::new(config()).unwrap()),
    };
    serve_stdio(transport, Endpoint::new("127.0.0.1", port.parse().unwrap()), NoFaults).unwrap();
}

/// Break every connection of this process to `port`, as a cut cable and both kernels' timeouts would.
pub fn sever(port: u16) {
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let Ok(fd) = entry.file_name().to_string_lossy().parse() else { continue };
        // SAFETY: used at once; a descriptor that was closed meanwhile is an error, and one that was opened anew under the
        // number leads elsewhere but by a chance that tests can take.
        let sock = unsafe { BorrowedFd::borrow_raw(fd) };
        let sock = socket2::SockRef::from(&sock);
        let leads_there = sock.peer_addr().is_ok_and(|a| a.as_socket().is_some_and(|a| a.port() == port));
        if leads_there {
            let _ = sock.shutdown(std::net::Shutdown::Both);
        }
    }
}

/// A target with one registered block.
pub struct Remote {
    pub process: RemoteTarget,
    pub block: Block,
    pub descriptor: PeerDescriptor,
}

impl Remote {
    pub fn new(port: u16, len: usize) -> Self {
        Self::spawn(target_command("child_entry_point", &port.to_string()), len).unwrap()
    }

    /// The target that `command` starts; none when it ends without a word.
    pub fn spawn(command: Command, len: usize) -> Option<Self> {
        let mut process = RemoteTarget::spawn(command).unwrap();
        let block = process.alloc(len, true).ok()?;
        let descriptor = process.descriptor().ok()?;
        Some(Self { process, block, descriptor })
    }

    pub fn bytes(&mut self, at: usize, len: usize) -> Vec<u8> {
        self.process.read(self.block.id, at, len).unwrap()
    }
}

/// What is known of an op.
#[derive(Clone, Debug, Default)]
pub struct Seen {
    pub outcome: Option<Outcome>,
    pub settlement: Option<Settlement>,
}

/// Our side: a transport, a lane, a registered block.
pub struct Source {
    pub transport: MooncakeTcpTransport,
    pub lane: Box<dyn Lane>,
    pub memory: Arc<TestMemory>,
    pub region: Option<Arc<RegisteredRegion>>,
    pub seen: BTreeMap<OpId, Seen>,
    pub lost: Vec<PeerId>,
    next: u64,
}

impl Source {
    pub fn new(config: MooncakeTcpConfig, len: usize) -> Self {
        let transport = MooncakeTcpTransport::new(config).unwrap();
        let lane = transport.lane().unwrap();
        let memory = TestMemory::new(len);
        let bytes: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        memory.write(0, &bytes);
        let region = Some(transport.register(memory.clone()).unwrap());
        Self { transport, lane, memory, region, seen: BTreeMap::new(), lost: Vec::new(), next: 1 }
    }

    pub fn connect(&self, descriptor: &PeerDescriptor) -> PeerId {
        self.transport.connect(descriptor).unwrap()
    }

    /// Write `len` bytes from `at` to `addr`.
    #[allow(clippy::result_large_err)] // the op comes back whole
    pub fn try_write(&mut self, peer: PeerId, at: u64, addr: u64, len: u64) -> Result<OpId, SubmitError> {
        let region = self.region.clone().expect("the region was let go");
        let entry = EntryPair {
            src_entry: 0,
            dst_entry: 0,
            src_region: region.id(),
            src_offset: at,
            dst_addr: addr,
            item_len: len,
            src_stride: len,
            dst_stride: len,
            dst_kind: Default::default(),
        };
        let runs = [Run { src: 0, dst: 0, count: 1 }];
        let plan = WritePlan::new([PlanGroup { entries: [entry].into(), runs: runs.into() }]);
        self.submit(peer, plan)
    }

    #[allow(clippy::result_large_err)] // the op comes back whole
    pub fn submit(&mut self, peer: PeerId, plan: WritePlan) -> Result<OpId, SubmitError> {
        let region = self.region.clone().expect("the region was let go");
        let id = OpId(self.next);
        self.next += 1;
        self.lane.submit(WriteOp { id, peer, plan, regions: [region].into() })?;
        self.seen.insert(id, Seen::default());
        Ok(id)
    }

    pub fn write(&mut self, peer: PeerId, at: u64, addr: u64, len: u64) -> OpId {
        self.try_write(peer, at, addr, len).unwrap()
    }

    pub fn poll(&mut self) {
        let mut events = Vec::new();
        self.lane.poll(&mut events);
        for event in events {
            match event {
                LaneEvent::PeerLost(peer, _) => self.lost.push(peer),
                LaneEvent::Outcome(id, outcome) => {
                    let old = self.seen.get_mut(&id).unwrap().outcome.replace(outcome);
                    assert_eq!(old, None, "a second outcome of {id:?}");
                }
                LaneEvent::Settlement(id, settlement) => {
                    let seen = self.seen.get_mut(&id).unwrap();
                    assert!(seen.outcome.is_some(), "{id:?} settled before it had an outcome");
                    assert_eq!(seen.settlement.replace(settlement), None, "{id:?} settled twice");
                }
            }
        }
    }

    /// Poll until `done`.
    pub fn until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let start = Instant::now();
        loop {
            self.poll();
            if done(self) {
                return;
            }
            assert!(start.elapsed() < PATIENCE, "waited in vain for {what}: {:?}", self.seen);
            std::thread::sleep(Duration::from_micros(200));
        }
    }

    /// Poll for a while: for what must not come.
    pub fn watch(&mut self, time: Duration) {
        let start = Instant::now();
        while start.elapsed() < time {
            self.poll();
            std::thread::sleep(Duration::from_micros(500));
        }
    }

    pub fn outcome(&mut self, id: OpId) -> Outcome {
        self.until("an outcome", |s| s.seen[&id].outcome.is_some());
        self.seen[&id].outcome.clone().unwrap()
    }

    pub fn settlement(&mut self, id: OpId) -> Settlement {
        self.until("a settlement", |s| s.seen[&id].settlement.is_some());
        self.seen[&id].settlement.unwrap()
    }

    /// The op is unresolved, for `why`.
    pub fn is_unresolved(&mut self, id: OpId) -> String {
        match self.outcome(id) {
            Outcome::Unresolved { error } => error.to_string(),
            other => panic!("{id:?} ended {other:?}"),
        }
    }

    /// A small write to `peer` arrives.
    pub fn reaches(&mut self, peer: PeerId, target: &mut Remote) {
        let id = self.write(peer, 0, target.block.addr, 4096);
        assert_eq!(self.outcome(id), Outcome::Done);
        assert_eq!(target.bytes(0, 4096), self.memory.read(0, 4096));
    }

    pub fn base(&self) -> u64 {
        self.memory.base()
    }
}
