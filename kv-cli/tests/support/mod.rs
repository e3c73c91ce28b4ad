//! Ranks as processes, told what to do one command at a time.

pub mod cut;
pub mod kills;
pub mod rules;

use std::collections::{HashMap, VecDeque};
use std::process::Command;
use std::time::{Duration, Instant};

use kv_cli::driver::fleet::{Fleet, FleetEvent, WorkerId};
use kv_cli::driver::protocol::{
    BootstrapAt, FetchRoom, FilledPage, FromWorker, Role, RoomEnd, ServeRoom, TcpPath, ToWorker, WorkerConfig,
};
use kv_cli::driver::stats::RankStats;
use kv_cli::model::{KvKind, ModelSpec};
use kv_cli::pattern::{PageSource, Pattern};
use kv_cli::shape::{Rank, Shape};

/// Far above every timeout that matters here: only a hang reaches it.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// The shortest heartbeat there is; two misses lose a prefill server.
pub const HEARTBEAT_S: u64 = 2;
/// Pages in every pool: 256 MiB.
pub const POOL_PAGES: u32 = 512;

/// How the ranks of a drill move bytes.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    /// The embedded transport, by this path.
    Tcp(TcpPath),
    /// NIXL, with this value of `UCX_TLS`.
    Nixl(Option<&'static str>),
}

/// Both ways of the embedded transport on one host.
pub const PATHS: [Way; 2] = [Way::Tcp(TcpPath::Copy), Way::Tcp(TcpPath::Stream)];

impl Way {
    /// A rank's process.
    fn command(self, role: Role) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvt"));
        command.args([role.to_string().as_str(), "--worker"]);
        if let Self::Nixl(tls) = self {
            // Of the many errors that NIXL logs when a peer dies none is news.
            command.env_remove("UCX_TLS").env("NIXL_LOG_LEVEL", "FATAL");
            command.envs(tls.map(|tls| ("UCX_TLS", tls)));
        }
        command
    }
}

/// A room of one page and [`LARGE`] of 36 MiB, all asked for at once, the small one last: when it is through, prefill
/// knows of the large ones, and they are under way.
pub const FIRST: u64 = 100;
pub const LARGE: u32 = 7;
pub const LARGE_PAGES: u32 = 72;
/// What other decodes ask for.
pub const OTHER_PAGES: u32 = 16;

/// Rooms as prefill serves them.
pub fn served() -> Vec<(u64, u32)> {
    let large = (0..LARGE).map(|i| (FIRST + 1 + u64::from(i), LARGE_PAGES));
    [(FIRST, 1)].into_iter().chain(large).collect()
}

/// The same rooms as decode asks for them, each with pages of its own.
pub fn wanted() -> Vec<(u64, Vec<u32>)> {
    let large = (0..LARGE).map(|i| (FIRST + 1 + u64::from(i), (1 + i * LARGE_PAGES..).take(72).collect()));
    [(FIRST, vec![0])].into_iter().chain(large).collect()
}

/// In this order.
pub fn asked() -> Vec<(u64, Vec<u32>)> {
    let mut rooms = wanted();
    rooms.rotate_left(1);
    rooms
}

/// The first `n` pages.
pub fn sources(n: usize) -> Vec<u32> {
    (0..n as u32).collect()
}

/// On a machine with little time for this program, all may be over before the signal is sent. That tests nothing, so
/// it is done again.
pub fn until_in_the_middle(attempt: impl Fn(Way) -> bool) {
    PATHS.into_iter().for_each(|way| until_in_the_middle_of(way, &attempt));
}

/// The same over one way.
pub fn until_in_the_middle_of(way: Way, attempt: impl Fn(Way) -> bool) {
    assert!((0..20).any(|_| attempt(way)), "{way:?}: the signal was too late every time");
}

fn config(role: Role, bootstrap: BootstrapAt, way: Way, stats_every_ms: u64) -> WorkerConfig {
    let (transport, tcp_path) = match way {
        Way::Tcp(path) => ("tcp", path),
        Way::Nixl(_) => ("nixl", TcpPath::default()),
    };
    WorkerConfig {
        role,
        transport: transport.into(),
        // 512 KiB a page.
        model: ModelSpec {
            name: "small".into(),
            layers: 4,
            kv: KvKind::Mha { kv_heads: 4, head_dim: 128 },
            value_bytes: 2,
            page_tokens: 64,
        },
        shape: Shape::default(),
        rank: Rank::default(),
        pool_pages: POOL_PAGES,
        pattern: Pattern::Keyed { seed: 5 },
        bootstrap,
        host: "127.0.0.1".into(),
        tcp_path,
        heartbeat_s: HEARTBEAT_S,
        stats_every_ms,
    }
}

/// A fleet, and what it said that nobody has asked for yet.
pub struct Drill {
    fleet: Fleet,
    way: Way,
    said: Vec<FleetEvent>,
    stats_every_ms: u64,
    /// Numbers that nobody has looked at yet, oldest first.
    numbers: HashMap<WorkerId, VecDeque<RankStats>>,
}

impl Drill {
    pub fn new(way: Way) -> Self {
        Self { fleet: Fleet::new(), way, said: Vec::new(), stats_every_ms: 0, numbers: HashMap::new() }
    }

    /// One whose ranks say what they count, ten times a second.
    pub fn with_numbers(way: Way) -> Self {
        Self { stats_every_ms: 100, ..Self::new(way) }
    }

    fn hear(&mut self, event: FleetEvent) {
        match event {
            FleetEvent::From(_, FromWorker::Error { what, hint }) => panic!("{what}; {hint}"),
            FleetEvent::From(id, FromWorker::Stats { stats }) => self.numbers.entry(id).or_default().push_back(*stats),
            event => self.said.push(event),
        }
    }

    /// The next numbers of a worker that nobody has looked at.
    pub fn numbers(&mut self, worker: WorkerId) -> RankStats {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(numbers) = self.numbers.get_mut(&worker).and_then(VecDeque::pop_front) {
                return numbers;
            }
            match self.fleet.next(deadline.saturating_duration_since(Instant::now())) {
                Some(event) => self.hear(event),
                None => panic!("worker {worker} says no numbers; said: {:?}", self.said),
            }
        }
    }

    /// Forget the numbers of a worker that were said before.
    pub fn forget_numbers(&mut self, worker: WorkerId) {
        while let Some(event) = self.fleet.next(Duration::ZERO) {
            self.hear(event);
        }
        self.numbers.remove(&worker);
        // One may have been on its way.
        self.numbers(worker);
    }

    /// Wait for numbers that `wanted` takes. They must come before patience is over.
    pub fn until(&mut self, worker: WorkerId, what: &str, wanted: impl Fn(&RankStats) -> bool) -> RankStats {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let numbers = self.numbers(worker);
            if wanted(&numbers) {
                return numbers;
            }
            assert!(Instant::now() < deadline, "{what}: still {numbers:?}");
        }
    }

    /// `said` times in a row the numbers of a worker must be as `wanted`.
    pub fn hold(&mut self, worker: WorkerId, said: usize, what: &str, wanted: impl Fn(&RankStats) -> bool) {
        for i in 0..said {
            let numbers = self.numbers(worker);
            assert!(wanted(&numbers), "{what}: not so the {i}th time: {numbers:?}");
        }
    }

    /// Start a rank; its number, and its registry when it runs one.
    pub fn start(&mut self, role: Role, bootstrap: BootstrapAt) -> (WorkerId, Option<String>) {
        let config = config(role, bootstrap, self.way, self.stats_every_ms);
        let id = self.fleet.spawn_command(self.way.command(role), config).unwrap();
        self.expect("ready", |event| match event {
            FleetEvent::From(w, FromWorker::Ready { bootstrap, .. }) if *w == id => Some((id, bootstrap.clone())),
            _ => None,
        })
    }

    /// A prefill that runs the registry, anywhere; its registry.
    pub fn prefill(&mut self) -> (WorkerId, String) {
        let (id, at) = self.start(Role::Prefill, BootstrapAt::Serve("127.0.0.1:0".into()));
        (id, at.unwrap())
    }

    pub fn decode(&mut self, at: &str) -> WorkerId {
        self.start(Role::Decode, BootstrapAt::Connect(at.into())).0
    }

    pub fn pid(&self, worker: WorkerId) -> u32 {
        self.fleet.process_id(worker).unwrap()
    }

    pub fn signal(&self, worker: WorkerId, signal: libc::c_int) {
        let pid = self.pid(worker);
        // SAFETY: no pointers; the process is a child of ours that was not waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(pid as libc::pid_t, signal) }, 0);
    }

    /// The first event that `wanted` takes, of those said already or still to come.
    pub fn expect<T>(&mut self, what: &str, mut wanted: impl FnMut(&FleetEvent) -> Option<T>) -> T {
        // Numbers that come all the time are not what is waited for.
        let deadline = Instant::now() + PATIENCE;
        let mut heard = 0;
        loop {
            while heard < self.said.len() {
                if let Some(found) = wanted(&self.said[heard]) {
                    self.said.remove(heard);
                    return found;
                }
                heard += 1;
            }
            match self.fleet.next(deadline.saturating_duration_since(Instant::now())) {
                Some(event) => self.hear(event),
                None => panic!("no such event: {what}; said: {:?}", self.said),
            }
        }
    }

    /// Everything said and not asked for, after `quiet` of listening.
    pub fn listen(&mut self, quiet: Duration) -> &[FleetEvent] {
        let until = Instant::now() + quiet;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            match self.fleet.next(left) {
                Some(event) => self.hear(event),
                None => return &self.said,
            }
        }
    }

    pub fn killed(&mut self, worker: WorkerId) {
        let how = self.expect("death", |e| match e {
            FleetEvent::Died(w, how) if *w == worker => Some(how.clone()),
            _ => None,
        });
        assert!(how.contains("signal: 9"), "{how}");
    }

    /// How a room ended at a worker.
    pub fn end(&mut self, worker: WorkerId, room: u64) -> RoomEnd {
        self.expect(&format!("end of room {room}"), |e| match e {
            FleetEvent::From(w, FromWorker::Room { room: r, end }) if (*w, *r) == (worker, room) => Some(end.clone()),
            _ => None,
        })
    }

    pub fn success(&mut self, worker: WorkerId, room: u64) {
        match self.end(worker, room) {
            RoomEnd::Success { .. } => {}
            failed => panic!("room {room}: {failed:?}"),
        }
    }

    pub fn released(&mut self, worker: WorkerId, room: u64) {
        self.expect(&format!("release of room {room}"), |e| {
            matches!(e, FleetEvent::From(w, FromWorker::Released { room: r }) if (*w, *r) == (worker, room))
                .then_some(())
        });
    }

    /// Write their content into prefill's pages.
    pub fn fill(&mut self, prefill: WorkerId, pages: &[u32]) {
        self.fleet.send(prefill, &ToWorker::Fill { pages: content(pages, pages) }).unwrap();
        self.expect("filled", |e| {
            matches!(e, FleetEvent::From(w, FromWorker::Filled { .. }) if *w == prefill).then_some(())
        });
    }

    /// Open these rooms at prefill, each over so many of the first pages, in chunks of 16.
    pub fn serve(&mut self, prefill: WorkerId, rooms: &[(u64, u32)]) {
        let rooms = rooms.iter().map(|&(room, n)| ServeRoom { room, pages: (0..n).collect() }).collect();
        self.fleet.send(prefill, &ToWorker::Serve { rooms, chunk_pages: 16 }).unwrap();
        self.expect("serving", |e| {
            matches!(e, FleetEvent::From(w, FromWorker::Serving) if *w == prefill).then_some(())
        });
    }

    /// Ask for rooms, each into pages of its own.
    pub fn fetch(&mut self, decode: WorkerId, rooms: &[(u64, Vec<u32>)], concurrency: u32) {
        let rooms = rooms.iter().map(|(room, pages)| FetchRoom { room: *room, prefix_tokens: 0, pages: pages.clone() });
        self.fleet.send(decode, &ToWorker::Fetch { rooms: rooms.collect(), concurrency }).unwrap();
    }

    /// Prefill serves the usual rooms and `more`; `decode` asks for the usual ones, and `seen` has the first of them: the
    /// large one is on its way, or will be soon.
    pub fn begin(&mut self, prefill: WorkerId, more: &[(u64, u32)], decode: WorkerId, seen: WorkerId) {
        self.fill(prefill, &sources(72));
        self.serve(prefill, &[&served()[..], more].concat());
        self.fetch(decode, &asked(), LARGE + 1);
        self.success(seen, FIRST);
    }

    pub fn fetch_done(&mut self, decode: WorkerId) {
        self.expect("fetch_done", |e| {
            matches!(e, FleetEvent::From(w, FromWorker::FetchDone { .. }) if *w == decode).then_some(())
        });
    }

    /// Every byte of a room that ended in Success: `pages` hold what prefill's `sources` hold.
    pub fn verify(&mut self, decode: WorkerId, room: u64, pages: &[u32], sources: &[u32]) {
        self.fleet.send(decode, &ToWorker::Verify { room, pages: content(pages, sources) }).unwrap();
        let (seen, corrupt) = self.expect("verified", |e| match e {
            FleetEvent::From(w, FromWorker::Verified { room: r, pages, corrupt, .. }) if (*w, *r) == (decode, room) => {
                Some((*pages, *corrupt))
            }
            _ => None,
        });
        assert_eq!((seen, corrupt), (pages.len() as u64, 0), "room {room}");
    }
}

/// Page `sources[i]` of prefill holds block `sources[i]`; where it is to be found.
fn content(pages: &[u32], sources: &[u32]) -> Vec<FilledPage> {
    let pairs = pages.iter().zip(sources);
    pairs
        .map(|(&page, &from)| FilledPage { page, source: PageSource { id: u64::from(from) + 1, first_token: 0 } })
        .collect()
}
