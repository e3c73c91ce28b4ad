//! One rank: memory and engine, doing what it is told.

use std::collections::HashSet;
use std::io::{BufRead, Write};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use crate::driver::engine::{DecodeEngine, EngineEvent, EngineFactory, PrefillEngine};
use crate::driver::protocol::{FetchRoom, FilledPage, FromWorker, Role, RoomEnd, ServeRoom, ToWorker, WorkerConfig};
use crate::driver::stats::RankStats;
use crate::error::{CliError, Result};
use crate::memory::KvMemory;
use crate::pattern::Pattern;

/// How long a worker waits for its engine before it looks whether its scheduler is still there.
const TICK: Duration = Duration::from_millis(100);

/// Run a worker process: commands on standard input, events on standard output.
pub fn run_stdio(factory: &dyn EngineFactory) -> Result<()> {
    let (tx, commands) = channel();
    // Not joined: it may sit in `read` when the process ends.
    std::thread::Builder::new()
        .name("kvt-commands".into())
        .spawn(move || {
            for line in std::io::stdin().lock().lines() {
                let Ok(line) = line else { return };
                let command =
                    serde_json::from_str(&line).map_err(|e| CliError::new(format!("a command is not understood: {e}")));
                if tx.send(command).is_err() {
                    return;
                }
            }
        })
        .map_err(|e| CliError::new(format!("cannot start a thread: {e}")))?;
    let mut stdout = std::io::stdout();
    run(factory, &commands, &mut |event| {
        let mut line =
            serde_json::to_string(&event).map_err(|e| CliError::new(format!("cannot write an event: {e}")))?;
        line.push('\n');
        stdout
            .write_all(line.as_bytes())
            .and_then(|()| stdout.flush())
            .map_err(|e| CliError::new(format!("the scheduler is gone: {e}")))
    })
}

/// Where events go.
pub type Emit<'a> = dyn FnMut(FromWorker) -> Result<()> + 'a;

/// Run a worker until it is told to stop, its scheduler is gone, or something breaks. What breaks is also an
/// [`FromWorker::Error`] event.
pub fn run(factory: &dyn EngineFactory, commands: &Receiver<Result<ToWorker>>, emit: &mut Emit<'_>) -> Result<()> {
    let result = serve_commands(factory, commands, emit);
    if let Err(e) = &result {
        // The scheduler may be gone: then nobody listens, and the error is returned all the same.
        let _ = emit(FromWorker::Error { what: e.what.clone(), hint: e.hint.clone() });
    }
    result
}

enum Side {
    Prefill(Box<dyn PrefillEngine>),
    Decode(Box<dyn DecodeEngine>),
}

impl Side {
    fn wait(&mut self, timeout: Duration, out: &mut Vec<EngineEvent>) -> Result<()> {
        match self {
            Self::Prefill(engine) => engine.wait(timeout, out),
            Self::Decode(engine) => engine.wait(timeout, out),
        }
    }

    fn prefill(&mut self) -> Result<&mut dyn PrefillEngine> {
        match self {
            Self::Prefill(engine) => Ok(engine.as_mut()),
            Self::Decode(_) => Err(CliError::new("a decode rank was told to do prefill's work")),
        }
    }

    fn decode(&mut self) -> Result<&mut dyn DecodeEngine> {
        match self {
            Self::Decode(engine) => Ok(engine.as_mut()),
            Self::Prefill(_) => Err(CliError::new("a prefill rank was told to do decode's work")),
        }
    }
}

fn serve_commands(
    factory: &dyn EngineFactory,
    commands: &Receiver<Result<ToWorker>>,
    emit: &mut Emit<'_>,
) -> Result<()> {
    let config = match commands.recv() {
        Ok(command) => match command? {
            ToWorker::Configure(config) => config,
            _ => return Err(CliError::new("the first command to a worker is not 'configure'")),
        },
        Err(_) => return Ok(()),
    };
    let mut worker = Worker::start(factory, &config, emit)?;
    loop {
        match commands.recv_timeout(TICK) {
            Ok(command) => match command? {
                ToWorker::Configure(_) => return Err(CliError::new("a worker was configured twice")),
                ToWorker::Fill { pages } => worker.fill(&pages, emit)?,
                ToWorker::Serve { rooms, chunk_pages } => worker.serve(&rooms, chunk_pages, commands, emit)?,
                ToWorker::Fetch { rooms, concurrency } => worker.fetch(rooms, concurrency, commands, emit)?,
                ToWorker::Verify { room, pages } => worker.verify(room, &pages, emit)?,
                ToWorker::Stop => return Ok(()),
            },
            // Between waves: failed rooms may be released.
            Err(RecvTimeoutError::Timeout) => worker.drain(Duration::ZERO, emit)?,
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
    }
}

struct Worker {
    side: Side,
    memory: Arc<KvMemory>,
    pattern: Pattern,
    /// Rooms of the running command that have not ended.
    open: HashSet<u64>,
    events: Vec<EngineEvent>,
    /// Commands that came while another ran.
    stopped: bool,
    /// How often its numbers are said, and when next; `None`: never.
    stats: Option<(Duration, Instant)>,
}

impl Side {
    fn stats(&self) -> RankStats {
        match self {
            Self::Prefill(engine) => engine.stats(),
            Self::Decode(engine) => engine.stats(),
        }
    }
}

impl Worker {
    fn start(factory: &dyn EngineFactory, config: &WorkerConfig, emit: &mut Emit<'_>) -> Result<Self> {
        let geometry = config.model.rank_geometry(config.shape, config.rank)?;
        let memory = Arc::new(KvMemory::new(geometry, config.pool_pages)?);
        memory.populate();
        let (side, bootstrap) = match config.role {
            Role::Prefill => {
                let start = factory.prefill(config, Arc::clone(&memory))?;
                (Side::Prefill(start.engine), start.bootstrap)
            }
            Role::Decode => (Side::Decode(factory.decode(config, Arc::clone(&memory))?), None),
        };
        let pool_bytes = memory.entry_len() * u64::from(memory.geometry().entries());
        emit(FromWorker::Ready { bootstrap, pool_bytes })?;
        let (open, events) = (HashSet::new(), Vec::new());
        let stats = (config.stats_every_ms > 0).then(|| (Duration::from_millis(config.stats_every_ms), Instant::now()));
        Ok(Self { side, memory, pattern: config.pattern, open, events, stopped: false, stats })
    }

    /// Say the numbers, when they are wanted: by the clock, or now.
    fn say_stats(&mut self, now: bool, emit: &mut Emit<'_>) -> Result<()> {
        let Some((every, next)) = &mut self.stats else { return Ok(()) };
        if !now && *next > Instant::now() {
            return Ok(());
        }
        *next = Instant::now() + *every;
        emit(FromWorker::Stats { stats: Box::new(self.side.stats()) })
    }

    fn fill(&self, pages: &[FilledPage], emit: &mut Emit<'_>) -> Result<()> {
        let started = Instant::now();
        self.check(pages)?;
        // SAFETY: the scheduler fills only pages that no room has, and sends no room before this is answered.
        let bytes = pages.iter().map(|p| unsafe { self.memory.fill(self.pattern, p.page, p.source) }).sum();
        emit(FromWorker::Filled { bytes, seconds: started.elapsed().as_secs_f64() })
    }

    fn verify(&self, room: u64, pages: &[FilledPage], emit: &mut Emit<'_>) -> Result<()> {
        let started = Instant::now();
        self.check(pages)?;
        let (mut corrupt, mut first) = (0, None);
        for p in pages {
            // SAFETY: the room of these pages ended in Success, so nothing writes them any more.
            if let Err(m) = unsafe { self.memory.verify(self.pattern, p.page, p.source) } {
                corrupt += 1;
                first.get_or_insert_with(|| format!("page {} (source {}): {m}", p.page, p.source.id));
            }
        }
        let seconds = started.elapsed().as_secs_f64();
        emit(FromWorker::Verified { room, pages: pages.len() as u64, corrupt, first, seconds })
    }

    fn check(&self, pages: &[FilledPage]) -> Result<()> {
        match pages.iter().find(|p| p.page >= self.memory.pages()) {
            Some(p) => Err(CliError::new(format!("page {} is outside the pool of {}", p.page, self.memory.pages()))),
            None => Ok(()),
        }
    }

    fn serve(
        &mut self,
        rooms: &[ServeRoom],
        chunk_pages: u32,
        commands: &Receiver<Result<ToWorker>>,
        emit: &mut Emit<'_>,
    ) -> Result<()> {
        let cpu = cpu_seconds();
        for room in rooms {
            self.side.prefill()?.serve(room, chunk_pages)?;
            self.open.insert(room.room);
        }
        emit(FromWorker::Serving)?;
        while !self.open.is_empty() && self.connected(commands)? {
            self.drain(TICK, emit)?;
        }
        self.say_stats(true, emit)?;
        emit(FromWorker::ServeDone { cpu_s: cpu_seconds() - cpu })
    }

    fn fetch(
        &mut self,
        rooms: Vec<FetchRoom>,
        concurrency: u32,
        commands: &Receiver<Result<ToWorker>>,
        emit: &mut Emit<'_>,
    ) -> Result<()> {
        let (started, cpu, before) = (Instant::now(), cpu_seconds(), self.side.decode()?.arrived());
        let mut waiting = rooms.into_iter().peekable();
        while (waiting.peek().is_some() || !self.open.is_empty()) && self.connected(commands)? {
            while self.open.len() < concurrency.max(1) as usize {
                let Some(room) = waiting.next() else { break };
                self.side.decode()?.fetch(&room)?;
                self.open.insert(room.room);
            }
            self.drain(TICK, emit)?;
        }
        let (seconds, cpu_s) = (started.elapsed().as_secs_f64(), cpu_seconds() - cpu);
        self.say_stats(true, emit)?;
        emit(FromWorker::FetchDone { seconds, cpu_s, arrived: self.side.decode()?.arrived().since(before) })
    }

    /// Whether somebody still wants the answer. A command in the middle of another is a fault of the scheduler.
    fn connected(&mut self, commands: &Receiver<Result<ToWorker>>) -> Result<bool> {
        match commands.try_recv() {
            Err(TryRecvError::Empty) => {}
            Err(TryRecvError::Disconnected) | Ok(Ok(ToWorker::Stop)) => self.stopped = true,
            Ok(Ok(_)) => return Err(CliError::new("a command came while another was running")),
            Ok(Err(e)) => return Err(e),
        }
        if self.stopped { Err(CliError::new("the scheduler is gone")) } else { Ok(true) }
    }

    fn drain(&mut self, timeout: Duration, emit: &mut Emit<'_>) -> Result<()> {
        self.side.wait(timeout, &mut self.events)?;
        for event in self.events.drain(..) {
            match event {
                EngineEvent::Done { room, latency, pages } => {
                    self.open.remove(&room);
                    let latency_ns = u64::try_from(latency.as_nanos()).unwrap_or(u64::MAX);
                    emit(FromWorker::Room { room, end: RoomEnd::Success { latency_ns, pages } })?;
                }
                EngineEvent::Failed { room, reason } => {
                    self.open.remove(&room);
                    emit(FromWorker::Room { room, end: RoomEnd::Failed { reason } })?;
                }
                EngineEvent::Released { room } => emit(FromWorker::Released { room })?,
            }
        }
        self.say_stats(false, emit)
    }
}

/// User and system CPU time of this process, seconds.
pub fn cpu_seconds() -> f64 {
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    // SAFETY: `getrusage` writes one whole `rusage`; all zeroes is a valid one should it fail.
    let usage = unsafe {
        libc::getrusage(libc::RUSAGE_SELF, usage.as_mut_ptr());
        usage.assume_init()
    };
    let seconds = |t: libc::timeval| t.tv_sec as f64 + t.tv_usec as f64 / 1e6;
    seconds(usage.ru_utime) + seconds(usage.ru_stime)
}
