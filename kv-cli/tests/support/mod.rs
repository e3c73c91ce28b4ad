//! Ranks as processes, told what to do one command at a time.

use std::process::Command;
use std::time::Duration;

use kv_cli::driver::fleet::{Fleet, FleetEvent, WorkerId};
use kv_cli::driver::protocol::{
    BootstrapAt, FetchRoom, FilledPage, FromWorker, Role, RoomEnd, ServeRoom, TcpPath, ToWorker, WorkerConfig,
};
use kv_cli::model::{KvKind, ModelSpec};
use kv_cli::pattern::{PageSource, Pattern};
use kv_cli::shape::{Rank, Shape};

/// Far above every timeout that matters here: only a hang reaches it.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// The shortest heartbeat there is; two misses lose a prefill server.
pub const HEARTBEAT_S: u64 = 2;
/// Pages in every pool: 256 MiB.
pub const POOL_PAGES: u32 = 512;

fn config(role: Role, bootstrap: BootstrapAt, tcp_path: TcpPath) -> WorkerConfig {
    WorkerConfig {
        role,
        transport: "tcp".into(),
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
    }
}

/// A fleet, and what it said that nobody has asked for yet.
pub struct Drill {
    fleet: Fleet,
    path: TcpPath,
    said: Vec<FleetEvent>,
}

impl Drill {
    pub fn new(path: TcpPath) -> Self {
        Self { fleet: Fleet::new(), path, said: Vec::new() }
    }

    /// Start a rank; its number, and its registry when it runs one.
    pub fn start(&mut self, role: Role, bootstrap: BootstrapAt) -> (WorkerId, Option<String>) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvt"));
        command.args([role.to_string().as_str(), "--worker"]);
        let id = self.fleet.spawn_command(command, config(role, bootstrap, self.path)).unwrap();
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

    pub fn signal(&self, worker: WorkerId, signal: libc::c_int) {
        let pid = self.fleet.process_id(worker).unwrap();
        // SAFETY: no pointers; the process is a child of ours that was not waited for, so the number is its own.
        assert_eq!(unsafe { libc::kill(pid as libc::pid_t, signal) }, 0);
    }

    /// The first event that `wanted` takes, of those said already or still to come.
    pub fn expect<T>(&mut self, what: &str, mut wanted: impl FnMut(&FleetEvent) -> Option<T>) -> T {
        let mut heard = 0;
        loop {
            while heard < self.said.len() {
                if let Some(found) = wanted(&self.said[heard]) {
                    self.said.remove(heard);
                    return found;
                }
                heard += 1;
            }
            match self.fleet.next(PATIENCE) {
                Some(FleetEvent::From(_, FromWorker::Error { what, hint })) => panic!("{what}; {hint}"),
                Some(event) => self.said.push(event),
                None => panic!("no such event: {what}; said: {:?}", self.said),
            }
        }
    }

    /// Everything said and not asked for, after `quiet` of listening.
    pub fn listen(&mut self, quiet: Duration) -> &[FleetEvent] {
        let until = std::time::Instant::now() + quiet;
        loop {
            let left = until.saturating_duration_since(std::time::Instant::now());
            match self.fleet.next(left) {
                Some(event) => self.said.push(event),
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
