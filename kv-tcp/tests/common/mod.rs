//! Two ends of a transfer, in one process or two.
#![allow(dead_code)] // every test binary uses its own part
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests, outside `#[test]` functions

use std::collections::HashMap;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::ids::{OpId, PeerId, RegionId};
use kv_core::memory::RegisteredRegion;
use kv_core::net::Endpoint;
use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_core::transport::{
    Lane, LaneEvent, Outcome, PeerDescriptor, Settlement, SubmitError, Transport, TransportError, WriteOp,
};
use kv_tcp::{HostArena, SameHost, TcpConfig, TcpTransport};

/// Only hangs end here.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub fn direct() -> TcpConfig {
    TcpConfig::loopback()
}

pub fn tcp() -> TcpConfig {
    TcpConfig { same_host: SameHost::Off, ..TcpConfig::loopback() }
}

/// A transport with one registered arena.
pub struct Side {
    pub transport: TcpTransport,
    pub arena: Arc<HostArena>,
    pub region: Option<Arc<RegisteredRegion>>,
}

impl Side {
    pub fn new(config: TcpConfig, len: usize) -> Self {
        let transport = TcpTransport::new(config).unwrap();
        let arena = Arc::new(HostArena::new(len).unwrap());
        let region = Some(transport.register(arena.clone()).unwrap());
        Self { transport, arena, region }
    }

    pub fn base(&self) -> u64 {
        self.arena.as_ptr() as u64
    }

    pub fn descriptor(&self, endpoint_port: u16) -> PeerDescriptor {
        PeerDescriptor {
            name: self.transport.local_name().to_owned(),
            metadata: self.transport.local_metadata(),
            endpoint: Endpoint::new("127.0.0.1", endpoint_port),
            host: None,
        }
    }

    pub fn connect(&self, peer: &PeerDescriptor) -> PeerId {
        self.transport.connect(peer).unwrap()
    }

    pub fn op(&self, id: u64, peer: PeerId, plan: WritePlan) -> WriteOp {
        WriteOp { id: OpId(id), peer, plan, regions: Arc::new([self.region.clone().unwrap()]) }
    }

    pub fn fill(&self, seed: u64) {
        fill(&self.arena, 0, kv_core::memory::MemoryOwner::len(&*self.arena) as usize, seed);
    }
}

/// A lane and everything it said.
pub struct Ear {
    pub lane: Box<dyn Lane>,
    pub outcomes: HashMap<OpId, Outcome>,
    pub settlements: HashMap<OpId, Settlement>,
    pub lost: Vec<(PeerId, TransportError)>,
}

impl Ear {
    pub fn new(side: &Side) -> Self {
        Self {
            lane: side.transport.lane().unwrap(),
            outcomes: HashMap::new(),
            settlements: HashMap::new(),
            lost: Vec::new(),
        }
    }

    /// Take what is there, waiting up to `wait` for something.
    pub fn listen(&mut self, wait: Duration) {
        let fd = self.lane.wake_fd().unwrap();
        let mut p = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one valid pollfd.
        unsafe { libc::poll(&raw mut p, 1, wait.as_millis() as i32) };
        let mut news = Vec::new();
        self.lane.poll(&mut news);
        for event in news {
            match event {
                LaneEvent::Outcome(id, o) => assert!(self.outcomes.insert(id, o).is_none(), "two outcomes of {id}"),
                LaneEvent::Settlement(id, s) => {
                    assert!(self.outcomes.contains_key(&id), "settled before its outcome");
                    assert!(self.settlements.insert(id, s).is_none(), "two settlements of {id}");
                }
                LaneEvent::PeerLost(id, e) => self.lost.push((id, e)),
            }
        }
    }

    pub fn until(&mut self, what: &str, mut done: impl FnMut(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !done(self) {
            assert!(Instant::now() < end, "never: {what}; {:?} {:?} {:?}", self.outcomes, self.settlements, self.lost);
            self.listen(Duration::from_millis(200));
        }
    }

    pub fn outcome(&mut self, id: u64) -> Outcome {
        self.until("an outcome", |e| e.outcomes.contains_key(&OpId(id)));
        self.outcomes[&OpId(id)].clone()
    }

    pub fn settlement(&mut self, id: u64) -> Settlement {
        self.until("a settlement", |e| e.settlements.contains_key(&OpId(id)));
        self.settlements[&OpId(id)]
    }

    pub fn submit(&mut self, op: WriteOp) {
        self.lane.submit(op).unwrap();
    }

    /// Submit, waiting while the lane is busy.
    pub fn push(&mut self, mut op: WriteOp) {
        loop {
            match self.lane.submit(op) {
                Ok(()) => return,
                Err(SubmitError::Busy(back)) => {
                    op = back;
                    self.listen(Duration::from_millis(200));
                }
                Err(e) => panic!("{e:?}"),
            }
        }
    }
}

/// xorshift: the same everywhere.
pub struct Rng(pub u64);

impl Rng {
    pub fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }

    pub fn shuffled(&mut self, n: usize) -> Vec<u32> {
        let mut v: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            v.swap(i, self.below(i as u64 + 1) as usize);
        }
        v
    }
}

pub fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut v = Vec::with_capacity(len + 8);
    while v.len() < len {
        v.extend_from_slice(&rng.next().to_le_bytes());
    }
    v.truncate(len);
    v
}

pub fn fill(arena: &HostArena, offset: usize, len: usize, seed: u64) {
    arena.write_at(offset, &pattern(len, seed));
}

pub fn hash(bytes: &[u8]) -> u64 {
    bytes.chunks(8).fold(0xcbf2_9ce4_8422_2325, |h: u64, c| {
        let mut w = [0; 8];
        w[..c.len()].copy_from_slice(c);
        (h ^ u64::from_le_bytes(w)).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(23)
    })
}

pub fn entry(region: RegionId, src_offset: u64, dst_addr: u64, item_len: u64) -> EntryPair {
    EntryPair {
        src_entry: 0,
        dst_entry: 0,
        src_region: region,
        src_offset,
        dst_addr,
        item_len,
        src_stride: item_len,
        dst_stride: item_len,
        dst_kind: Default::default(),
    }
}

pub fn run(src: u32, dst: u32, count: u32) -> Run {
    Run { src, dst, count }
}

pub fn plan(entries: &[EntryPair], runs: &[Run]) -> WritePlan {
    WritePlan::new([PlanGroup { entries: entries.into(), runs: runs.into() }])
}

/// One contiguous piece.
pub fn piece(side: &Side, src: u64, dst_addr: u64, len: u64) -> WritePlan {
    plan(&[entry(side.region.as_ref().unwrap().id(), src, dst_addr, len)], &[run(0, 0, 1)])
}

/// What the destination must hold after `plan`: `before` with every span copied from `src`.
pub fn expected(plan: &WritePlan, src: &[u8], mut before: Vec<u8>, dst_base: u64) -> Vec<u8> {
    for s in plan.spans() {
        let (from, to, n) = (s.src_offset as usize, (s.dst_addr - dst_base) as usize, s.len as usize);
        before[to..to + n].copy_from_slice(&src[from..from + n]);
    }
    before
}

pub fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

pub fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

// ---- the other process ----

const ENV: &str = "KV_TCP_TEST_CHILD";

/// Call from a test named `child_main`: the body of the other process, or nothing.
pub fn child_main() {
    let Ok(spec) = std::env::var(ENV) else { return };
    let (mode, len) = spec.split_once(' ').unwrap();
    let config = if mode == "tcp" { tcp() } else { direct() };
    if mode == "unprivileged" {
        drop_privileges();
        // SAFETY: plain integers. Changing the user takes this away; files of this process would not be its own.
        assert_eq!(unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 1) }, 0);
    }
    let mut side = Side::new(config, len.parse().unwrap());
    let say = |text: String| {
        let mut out = std::io::stdout().lock();
        writeln!(out, "@{text}").unwrap();
        out.flush().unwrap();
    };
    let hex: String = side.transport.local_metadata().iter().map(|b| format!("{b:02x}")).collect();
    say(format!("{} {} {hex}", side.transport.local_name(), side.base()));
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let n = |i: usize| words[i].parse::<usize>().unwrap();
        match words[0] {
            "fill" => {
                fill(&side.arena, n(1), n(2), n(3) as u64);
                say("ok".into());
            }
            "hash" => say(hash(&side.arena.to_vec(n(1), n(2))).to_string()),
            "unregister" => {
                side.region = None;
                say("ok".into());
            }
            "stats" => say(format!("{:?}", side.transport.stats())),
            "quit" => break,
            other => panic!("{other}"),
        }
    }
    drop(side);
    std::process::exit(0);
}

/// Root may read everyone's memory; for a test of the rules, be somebody else. No change for other users.
pub fn drop_privileges() {
    // SAFETY: plain integers.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setgid(65534), 0);
            assert_eq!(libc::setuid(65534), 0);
        }
    }
}

pub struct Other {
    child: Child,
    stdin: Option<ChildStdin>,
    stdout: BufReader<ChildStdout>,
    pub base: u64,
    pub descriptor: PeerDescriptor,
}

impl Other {
    /// Start the other process: a target with an arena of `len` bytes.
    pub fn start(mode: &str, len: usize, port: u16) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "child_main", "--nocapture", "--test-threads=1"])
            .env(ENV, format!("{mode} {len}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdin = child.stdin.take();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        let descriptor = PeerDescriptor {
            name: String::new(),
            metadata: Vec::new().into(),
            endpoint: Endpoint::new("127.0.0.1", port),
            host: None,
        };
        let mut other = Self { child, stdin, stdout, base: 0, descriptor };
        let line = other.hear();
        let words: Vec<&str> = line.split(' ').collect();
        other.descriptor.name = words[0].to_owned();
        other.base = words[1].parse().unwrap();
        let hex = words[2].as_bytes();
        let bytes: Vec<u8> =
            hex.chunks(2).map(|c| u8::from_str_radix(std::str::from_utf8(c).unwrap(), 16).unwrap()).collect();
        other.descriptor.metadata = bytes.into();
        other
    }

    fn hear(&mut self) -> String {
        loop {
            let mut line = String::new();
            assert!(self.stdout.read_line(&mut line).unwrap() > 0, "the other process ended");
            // The test harness writes its own words, some without a line's end.
            if let Some((_, said)) = line.split_once('@') {
                return said.trim_end().to_owned();
            }
        }
    }

    pub fn ask(&mut self, what: &str) -> String {
        writeln!(self.stdin.as_mut().unwrap(), "{what}").unwrap();
        self.hear()
    }

    pub fn hash(&mut self, offset: usize, len: usize) -> u64 {
        self.ask(&format!("hash {offset} {len}")).parse().unwrap()
    }

    pub fn signal(&self, signal: i32) {
        // SAFETY: our own child, not yet waited for.
        assert_eq!(unsafe { libc::kill(self.child.id() as i32, signal) }, 0);
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Let it end in order.
    pub fn quit(&mut self) {
        writeln!(self.stdin.as_mut().unwrap(), "quit").unwrap();
        self.child.wait().unwrap();
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
