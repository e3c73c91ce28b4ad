//! The brain of a run: pools, prefix caches and books of both sides.
//!
//! On two machines each side runs its own scheduler with a fleet of that side only. Both come to the same waves (see
//! [`plan_requests`](crate::plan_requests)); what they need to know of each other travels in the rooms themselves.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use crate::driver::fleet::{Fleet, FleetEvent, WorkerId};
use crate::driver::protocol::{FetchRoom, FilledPage, FromWorker, Role, RoomEnd, ServeRoom, ToWorker};
use crate::error::{CliError, Result};
use crate::pattern::{PageSource, Pattern};
use crate::plan_requests::{PROBE_ROOMS, Plan, PlannedRequest, chunk_pages, gate_room};
use crate::pool::{CachedPool, Lease, PageOrder, PagePool};
use crate::report::Recorder;
use crate::trace::BLOCK_TOKENS;

/// What a run does beyond its plan.
#[derive(Clone, Debug)]
pub struct RunConfig {
    /// Tokens in a page.
    pub page_tokens: u32,
    /// Pages in the pool of every rank.
    pub pool_pages: u32,
    /// Bytes of a page over all ranks of one side.
    pub side_page_bytes: u64,
    /// Which pages are handed out.
    pub order: PageOrder,
    /// Seed of the pools.
    pub seed: u64,
    /// What pages hold.
    pub pattern: Pattern,
    /// All requests read the same source pages ([`Pattern::Sglang`] only).
    pub share_src: bool,
    /// Decode keeps a prefix cache.
    pub prefix_cache: bool,
    /// Rooms in flight at a time.
    pub concurrency: u32,
    /// Measure the fixed overhead of a room first.
    pub probe: bool,
    /// No event at all for this long ends the run.
    pub stall: Duration,
}

/// What people see while a run goes on.
pub trait Progress {
    /// A phase begins: `filling`, `moving`, `verifying`.
    fn phase(&mut self, what: &str);
    /// A request has failed; [`ended`](Self::ended) follows.
    fn failed(&mut self, room: u64, reason: &str);
    /// `n` more requests have ended, after moving `bytes`.
    fn ended(&mut self, n: u64, bytes: u64);
}

/// No progress.
impl Progress for () {
    fn phase(&mut self, _what: &str) {}
    fn failed(&mut self, _room: u64, _reason: &str) {}
    fn ended(&mut self, _n: u64, _bytes: u64) {}
}

/// A room's books during one wave.
#[derive(Default)]
struct RoomBook {
    /// Counting ranks where it ended.
    ended: usize,
    /// Slowest rank.
    latency: Duration,
    /// Pages that moved.
    pages: u64,
    /// Ranks where it ended in Success: they hold nothing.
    done: HashSet<WorkerId>,
    failed: Option<String>,
}

struct InFlight<'a> {
    request: &'a PlannedRequest,
    prefill: Option<Lease>,
    decode: Option<Lease>,
}

/// Pages of a failed room: kept until every rank that served it says that nothing can touch them.
struct Held {
    waiting_for: HashSet<WorkerId>,
    prefill: Option<Lease>,
    decode: Option<Lease>,
}

/// Runs a [`Plan`] on a [`Fleet`].
pub struct Scheduler<'a> {
    fleet: &'a mut Fleet,
    config: &'a RunConfig,
    progress: &'a mut dyn Progress,
    prefill: CachedPool,
    decode: CachedPool,
    held: HashMap<u64, Held>,
    recorder: Recorder,
    /// Last error event of a worker, until its death is seen.
    last_words: HashMap<WorkerId, String>,
    /// Why no more waves can run.
    broken: Option<String>,
    /// Room ends seen in this command, decode's (or prefill's, where there is no decode).
    books: HashMap<u64, RoomBook>,
    /// Prefill ranks that are through with the running `serve`.
    served: HashSet<WorkerId>,
    /// Released events that came before the books were closed.
    released: HashSet<(WorkerId, u64)>,
}

impl<'a> Scheduler<'a> {
    /// A scheduler over workers that are ready.
    pub fn new(fleet: &'a mut Fleet, config: &'a RunConfig, progress: &'a mut dyn Progress) -> Result<Self> {
        let pool = |salt: u64, cache| {
            let pages = PagePool::new(config.pool_pages, config.order, config.seed ^ salt);
            CachedPool::new(pages, (BLOCK_TOKENS / config.page_tokens) as usize, cache)
        };
        // Prefill keeps filled blocks too, so that each is filled once. A room-keyed pattern allows neither cache,
        // except when all requests share their source.
        let keyed = matches!(config.pattern, Pattern::Keyed { .. });
        Ok(Self {
            prefill: pool(0, keyed || config.share_src),
            decode: pool(0x5EED, keyed && config.prefix_cache),
            fleet,
            config,
            progress,
            held: HashMap::new(),
            recorder: Recorder::new()?,
            last_words: HashMap::new(),
            broken: None,
            books: HashMap::new(),
            served: HashSet::new(),
            released: HashSet::new(),
        })
    }

    /// Run it all. An error is a fault of the set-up or of this program; rooms that fail are in the recorder.
    pub fn run(mut self, plan: &Plan) -> Result<Recorder> {
        self.recorder.clamped = plan.clamped() as u64;
        if self.config.probe {
            self.probe()?;
        }
        let mut done = 0;
        for (number, wave) in plan.waves.iter().enumerate() {
            if self.broken.is_some() {
                break;
            }
            self.wave(number, &plan.requests[wave.clone()])?;
            done = wave.end;
        }
        if let Some(cause) = self.broken.take() {
            let left = plan.requests.len() - done;
            self.recorder.note(cause.clone());
            if left > 0 {
                self.recorder.failed += left as u64;
                self.recorder.note(format!("{left} requests were not run: {cause}"));
            }
            if self.recorder.failed == 0 {
                self.recorder.failed = 1;
            }
        }
        Ok(self.recorder)
    }

    fn probe(&mut self) -> Result<()> {
        self.progress.phase("connecting");
        let rooms: Vec<u64> = (1..=PROBE_ROOMS).collect();
        let serve = rooms.iter().map(|&room| ServeRoom { room, pages: Vec::new() }).collect();
        let fetch: Vec<_> = rooms.iter().map(|&room| FetchRoom { room, prefix_tokens: 0, pages: Vec::new() }).collect();
        self.books.clear();
        self.serve(serve)?;
        self.fetch(fetch, 1)?;
        self.finish_serving()?;
        self.recorder.prefill_cpu_s = 0.0;
        // The first room also pays for the connections: it is no measure of a room.
        for (i, room) in rooms.iter().enumerate() {
            match self.books.remove(room) {
                Some(RoomBook { failed: None, latency, .. }) if i > 0 && self.fleet.count(Role::Decode) > 0 => {
                    self.recorder.probe(latency)
                }
                Some(RoomBook { failed: None, .. }) => {}
                Some(RoomBook { failed: Some(reason), .. }) => self.give_up(format!("first contact failed: {reason}")),
                None => {}
            }
        }
        Ok(())
    }

    fn wave(&mut self, number: usize, requests: &[PlannedRequest]) -> Result<()> {
        let flights = self.admit(requests)?;
        self.progress.phase("filling");
        self.fill(&flights)?;

        let pages = |lease: &Option<Lease>| lease.as_ref().map_or(Vec::new(), |l| l.pages().to_vec());
        let gate = gate_room(number);
        let mut serve = vec![ServeRoom { room: gate, pages: Vec::new() }];
        serve.extend(flights.iter().map(|f| ServeRoom { room: f.request.room.get(), pages: pages(&f.prefill) }));
        let fetch = flights
            .iter()
            .map(|f| FetchRoom {
                room: f.request.room.get(),
                prefix_tokens: f.decode.as_ref().map_or(0, |l| l.prefix_pages() as u64)
                    * u64::from(self.config.page_tokens),
                pages: f.decode.as_ref().map_or(Vec::new(), |l| l.suffix().to_vec()),
            })
            .collect();

        self.books.clear();
        self.progress.phase("moving");
        let started = Instant::now();
        self.serve(serve)?;
        self.fetch(vec![FetchRoom { room: gate, prefix_tokens: 0, pages: Vec::new() }], 1)?;
        let (seconds, cpu) = self.fetch(fetch, self.config.concurrency)?;
        self.recorder.window += Duration::from_secs_f64(seconds);
        self.recorder.decode_cpu_s += cpu;
        self.finish_serving()?;
        if self.fleet.count(Role::Decode) == 0 {
            self.recorder.window += started.elapsed();
        }
        if let Some(RoomBook { failed: Some(reason), .. }) = self.books.remove(&gate) {
            self.recorder.note(format!("gate of wave {number} failed: {reason}"));
        }
        self.progress.phase("verifying");
        for flight in flights {
            self.close(flight)?;
        }
        Ok(())
    }

    /// Pages for every request of a wave, on both sides.
    fn admit<'r>(&mut self, requests: &'r [PlannedRequest]) -> Result<Vec<InFlight<'r>>> {
        let has = [Role::Prefill, Role::Decode].map(|role| self.fleet.count(role) > 0);
        let mut flights = Vec::new();
        for request in requests {
            let pages = request.pages as usize;
            let mut take = |pool: fn(&mut Self) -> &mut CachedPool| loop {
                // Requests of a shared source all name the same blocks; those of a room-keyed pattern name none.
                if let Some(lease) = pool(self).admit(request.full_blocks(), pages) {
                    return Ok(lease);
                }
                // Only pages of failed rooms can be missing: a wave fits by construction.
                self.await_release()?;
            };
            let mut prefill = if has[0] { Some(take(|s| &mut s.prefill)?) } else { None };
            let decode = if has[1] { Some(take(|s| &mut s.decode)?) } else { None };
            if let Some(lease) = &decode {
                self.recorder.prefix_tokens += lease.prefix_pages() as u64 * u64::from(self.config.page_tokens);
            }
            // Filled before anything reads it, so later requests of this wave may share it at once.
            if let Some(lease) = &mut prefill {
                self.prefill.commit(lease);
            }
            flights.push(InFlight { request, prefill, decode });
        }
        Ok(flights)
    }

    fn sources(&self, request: &PlannedRequest) -> Vec<PageSource> {
        request.sources(self.config.pattern, self.config.page_tokens, self.config.share_src)
    }

    fn fill(&mut self, flights: &[InFlight<'_>]) -> Result<()> {
        let mut pages = Vec::new();
        for flight in flights {
            let sources = self.sources(flight.request);
            if let Some(lease) = &flight.prefill {
                let new = lease.pages().iter().zip(sources).skip(lease.prefix_pages());
                pages.extend(new.map(|(&page, source)| FilledPage { page, source }));
            }
        }
        if pages.is_empty() {
            return Ok(());
        }
        let workers = self.tell(Role::Prefill, &ToWorker::Fill { pages })?;
        let mut slowest = 0f64;
        self.until(workers, |_, _, event| match event {
            FromWorker::Filled { seconds, .. } => {
                slowest = slowest.max(seconds);
                Ok(true)
            }
            other => Err(unexpected("fill", &other)),
        })?;
        self.recorder.fill += Duration::from_secs_f64(slowest);
        Ok(())
    }

    fn serve(&mut self, rooms: Vec<ServeRoom>) -> Result<()> {
        self.served.clear();
        let chunk_pages = chunk_pages(self.config.page_tokens);
        let workers = self.tell(Role::Prefill, &ToWorker::Serve { rooms, chunk_pages })?;
        self.until(workers, |s, id, event| match event {
            FromWorker::Serving => Ok(true),
            other => s.room_event(id, other).map(|()| false),
        })
    }

    fn finish_serving(&mut self) -> Result<()> {
        if self.fleet.count(Role::Decode) > 0 && self.fleet.alive(Role::Decode).is_empty() {
            return Ok(()); // nobody will ever ask for these rooms
        }
        let mut workers = self.fleet.alive(Role::Prefill);
        workers.retain(|id| !self.served.contains(id));
        self.until(workers, |s, id, event| {
            let done = matches!(event, FromWorker::ServeDone { .. });
            s.room_event(id, event).map(|()| done)
        })
    }

    /// Seconds of the slowest rank, CPU seconds of all.
    fn fetch(&mut self, rooms: Vec<FetchRoom>, concurrency: u32) -> Result<(f64, f64)> {
        let workers = self.tell(Role::Decode, &ToWorker::Fetch { rooms, concurrency })?;
        let (mut slowest, mut cpu) = (0f64, 0.0);
        self.until(workers, |s, id, event| match event {
            FromWorker::FetchDone { seconds, cpu_s, arrived } => {
                s.recorder.arrived += arrived;
                slowest = slowest.max(seconds);
                cpu += cpu_s;
                Ok(true)
            }
            other => s.room_event(id, other).map(|()| false),
        })?;
        Ok((slowest, cpu))
    }

    /// The books of one request: verify, keep or free its pages, record.
    fn close(&mut self, flight: InFlight<'_>) -> Result<()> {
        let room = flight.request.room.get();
        // The side that counts is decode; a prefill alone counts its own rooms.
        let role = if self.fleet.count(Role::Decode) > 0 { Role::Decode } else { Role::Prefill };
        let book = self.books.remove(&room).unwrap_or_default();
        let all_ended = book.ended == self.fleet.count(role);
        let failed = match book.failed {
            Some(reason) => Some(reason),
            None if !all_ended => Some(self.broken.clone().unwrap_or_else(|| "it did not end on every rank".into())),
            None => None,
        };
        let InFlight { request, prefill, mut decode } = flight;
        if let Some(reason) = failed {
            self.recorder.failure(room, &reason);
            self.progress.failed(room, &reason);
            self.progress.ended(1, 0);
            let mut waiting_for: HashSet<_> =
                [Role::Prefill, Role::Decode].iter().flat_map(|r| self.fleet.alive(*r)).collect();
            waiting_for.retain(|id| !self.released.contains(&(*id, room)) && !book.done.contains(id));
            self.held.insert(room, Held { waiting_for, prefill, decode });
            return self.give_back();
        }
        let bytes = book.pages * self.config.side_page_bytes;
        self.recorder.success(book.latency, bytes);
        if let Some(lease) = &mut decode {
            let pages =
                lease.pages().iter().zip(self.sources(request)).map(|(&page, source)| FilledPage { page, source });
            let corrupt = self.verify(room, pages.collect())?;
            if corrupt == 0 {
                self.decode.commit(lease);
            }
        }
        self.progress.ended(1, bytes);
        self.free(prefill, decode)
    }

    fn verify(&mut self, room: u64, pages: Vec<FilledPage>) -> Result<u64> {
        let workers = self.tell(Role::Decode, &ToWorker::Verify { room, pages })?;
        let (mut corrupt, mut slowest) = (0, 0f64);
        self.until(workers, |s, id, event| match event {
            FromWorker::Verified { corrupt: bad, first, seconds, .. } => {
                corrupt += bad;
                slowest = slowest.max(seconds);
                if let Some(first) = first {
                    let name = s.fleet.worker_name(id).to_owned();
                    s.recorder.note(format!("room {room}: {bad} corrupt pages on {name}: {first}"));
                }
                Ok(true)
            }
            other => s.room_event(id, other).map(|()| false),
        })?;
        self.recorder.corrupt += corrupt;
        self.recorder.verify += Duration::from_secs_f64(slowest);
        Ok(corrupt)
    }

    fn free(&mut self, prefill: Option<Lease>, decode: Option<Lease>) -> Result<()> {
        let refused = |e: crate::pool::NotOwned| CliError::new(format!("page books are wrong: {e}"));
        if let Some(lease) = prefill {
            self.prefill.release(lease).map_err(refused)?;
        }
        if let Some(lease) = decode {
            self.decode.release(lease).map_err(refused)?;
        }
        Ok(())
    }

    /// Pages of failed rooms that every rank let go of.
    fn give_back(&mut self) -> Result<()> {
        let free: Vec<u64> = self.held.iter().filter(|(_, h)| h.waiting_for.is_empty()).map(|(r, _)| *r).collect();
        for room in free {
            if let Some(held) = self.held.remove(&room) {
                self.free(held.prefill, held.decode)?;
            }
        }
        Ok(())
    }

    fn await_release(&mut self) -> Result<()> {
        if self.held.is_empty() {
            return Err(CliError::new("page books are wrong: a wave does not fit though no room is held"));
        }
        match self.fleet.next(self.config.stall) {
            Some(event) => self.any_event(event).map(|_| ()),
            None => Err(CliError::new(format!(
                "the pages of {} failed rooms are still held after {:?}",
                self.held.len(),
                self.config.stall
            ))
            .hint("nothing proves that no write to them is under way; start again")),
        }
    }

    fn tell(&mut self, role: Role, command: &ToWorker) -> Result<Vec<WorkerId>> {
        let workers = self.fleet.alive(role);
        for &id in &workers {
            self.fleet.send(id, command)?;
        }
        Ok(workers)
    }

    /// Wait until `answer` said `true` once for each of `workers`, or they died.
    fn until(
        &mut self,
        workers: Vec<WorkerId>,
        mut answer: impl FnMut(&mut Self, WorkerId, FromWorker) -> Result<bool>,
    ) -> Result<()> {
        let mut open: HashSet<WorkerId> = workers.into_iter().collect();
        while !open.is_empty() {
            let Some(event) = self.fleet.next(self.config.stall) else {
                let names: Vec<_> = open.iter().map(|id| self.fleet.worker_name(*id).to_owned()).collect();
                return Err(CliError::new(format!("no news from {} for {:?}", names.join(", "), self.config.stall))
                    .hint("run it again with RUST_LOG=debug"));
            };
            match event {
                FleetEvent::From(id, event @ (FromWorker::Error { .. } | FromWorker::Released { .. })) => {
                    self.room_event(id, event)?;
                }
                FleetEvent::From(id, event) => {
                    if answer(self, id, event)? {
                        open.remove(&id);
                    }
                }
                died @ FleetEvent::Died(id, _) => {
                    self.any_event(died)?;
                    open.remove(&id);
                }
            }
        }
        Ok(())
    }

    fn any_event(&mut self, event: FleetEvent) -> Result<()> {
        match event {
            FleetEvent::From(id, event) => self.room_event(id, event),
            FleetEvent::Died(id, how) => {
                let how = self.last_words.remove(&id).unwrap_or(how);
                let cause = format!("{} ended: {how}", self.fleet.worker_name(id));
                self.give_up(cause);
                // What a dead rank held is nobody's any more.
                for held in self.held.values_mut() {
                    held.waiting_for.remove(&id);
                }
                self.give_back()
            }
        }
    }

    fn give_up(&mut self, cause: String) {
        self.broken.get_or_insert(cause);
    }

    /// Events that may come during any command.
    fn room_event(&mut self, id: WorkerId, event: FromWorker) -> Result<()> {
        match event {
            FromWorker::Room { room, end } => {
                let counts = self.fleet.count(Role::Decode) == 0 || self.fleet.role(id) == Some(Role::Decode);
                let book = self.books.entry(room).or_default();
                if counts {
                    book.ended += 1;
                }
                match end {
                    RoomEnd::Success { latency_ns, pages } => {
                        book.done.insert(id);
                        if counts {
                            book.latency = book.latency.max(Duration::from_nanos(latency_ns));
                            book.pages = book.pages.max(pages);
                        }
                    }
                    // The first cause stays, whichever side saw it.
                    RoomEnd::Failed { reason } => drop(book.failed.get_or_insert(reason)),
                }
                Ok(())
            }
            FromWorker::Released { room } => {
                match self.held.get_mut(&room) {
                    Some(held) => drop(held.waiting_for.remove(&id)),
                    None => drop(self.released.insert((id, room))),
                }
                self.give_back()
            }
            FromWorker::ServeDone { cpu_s } => {
                self.recorder.prefill_cpu_s += cpu_s;
                self.served.insert(id);
                Ok(())
            }
            FromWorker::Error { what, hint } => {
                self.last_words.insert(id, CliError { what, hint }.one_line());
                Ok(())
            }
            other => Err(unexpected("room", &other)),
        }
    }
}

fn unexpected(during: &str, event: &FromWorker) -> CliError {
    CliError::new(format!("a worker answered out of turn (during {during}): {event:?}"))
}
