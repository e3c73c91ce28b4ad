//! The workers of a run: OS processes behind pipes, or threads behind channels, alike to the scheduler.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use crate::driver::engine::EngineFactory;
use crate::driver::protocol::{FromWorker, Role, ToWorker, WorkerConfig};
use crate::driver::stats::RankStats;
use crate::driver::worker;
use crate::error::{CliError, Result};

/// Number of a worker in its fleet.
pub type WorkerId = usize;

/// What a fleet reports.
#[derive(Clone, Debug, PartialEq)]
pub enum FleetEvent {
    /// A worker said something.
    From(WorkerId, FromWorker),
    /// A worker ended without being told to.
    Died(WorkerId, String),
}

enum Link {
    Process { child: Child, stdin: Option<ChildStdin> },
    Thread { commands: Option<Sender<Result<ToWorker>>>, thread: Option<std::thread::JoinHandle<()>> },
}

struct Member {
    role: Role,
    name: String,
    link: Link,
    alive: bool,
}

/// All workers of a run. Dropping it ends them.
pub struct Fleet {
    members: Vec<Member>,
    tx: Sender<FleetEvent>,
    rx: Receiver<FleetEvent>,
    /// Takes `stats` events, which then are no news to whoever waits for some.
    on_stats: Option<OnStats>,
}

/// Hears the numbers of a worker.
pub type OnStats = Box<dyn FnMut(WorkerId, &RankStats)>;

impl Default for Fleet {
    fn default() -> Self {
        Self::new()
    }
}

/// How long a worker process may take to end after it was told to, before it is killed.
const GRACE: Duration = Duration::from_secs(3);

impl Fleet {
    /// A fleet of nobody.
    pub fn new() -> Self {
        let (tx, rx) = channel();
        Self { members: Vec::new(), tx, rx, on_stats: None }
    }

    /// Hand the workers' numbers to `hear`, instead of reporting them as events.
    pub fn on_stats(&mut self, hear: OnStats) {
        self.on_stats = Some(hear);
    }

    fn name(config: &WorkerConfig) -> String {
        format!("{} {}", config.role, config.rank)
    }

    /// Start a worker as a process: this program's `prefill --worker` or `decode --worker`.
    pub fn spawn_process(&mut self, config: WorkerConfig) -> Result<WorkerId> {
        let exe =
            std::env::current_exe().map_err(|e| CliError::new(format!("cannot find this program's own file: {e}")))?;
        let mut command = Command::new(exe);
        command.arg(config.role.to_string()).arg("--worker");
        self.spawn_command(command, config)
    }

    /// Start a worker as a process of any program that speaks the worker protocol.
    pub fn spawn_command(&mut self, mut command: Command, config: WorkerConfig) -> Result<WorkerId> {
        let name = Self::name(&config);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|e| CliError::new(format!("cannot start {name}: {e}")))?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let id = self.members.len();
        let tx = self.tx.clone();
        if let Some(stdout) = stdout {
            spawn_thread(format!("kvt-events-{id}"), move || {
                for line in BufReader::new(stdout).lines() {
                    let Ok(line) = line else { break };
                    let event = match serde_json::from_str(&line) {
                        Ok(event) => FleetEvent::From(id, event),
                        Err(e) => FleetEvent::Died(id, format!("it does not speak the worker protocol: {e}: {line}")),
                    };
                    if tx.send(event).is_err() {
                        return;
                    }
                }
                // End of output: how it ended is found out by `next`.
                let _ = tx.send(FleetEvent::Died(id, String::new()));
            })?;
        }
        self.members.push(Member { role: config.role, name, link: Link::Process { child, stdin }, alive: true });
        self.send(id, &ToWorker::Configure(Box::new(config)))?;
        Ok(id)
    }

    /// Start a worker as a thread of this process.
    pub fn spawn_thread(&mut self, factory: Arc<dyn EngineFactory>, config: WorkerConfig) -> Result<WorkerId> {
        let id = self.members.len();
        let name = Self::name(&config);
        let (commands, rx) = channel();
        let tx = self.tx.clone();
        let thread = spawn_thread(format!("kvt-worker-{id}"), move || {
            // An error was emitted as an event.
            let _ = worker::run(factory.as_ref(), &rx, &mut |event| {
                tx.send(FleetEvent::From(id, event)).map_err(|_| CliError::new("the scheduler is gone"))
            });
            let _ = tx.send(FleetEvent::Died(id, "its thread ended".into()));
        })?;
        let link = Link::Thread { commands: Some(commands), thread: Some(thread) };
        self.members.push(Member { role: config.role, name, link, alive: true });
        self.send(id, &ToWorker::Configure(Box::new(config)))?;
        Ok(id)
    }

    /// What a worker is called: `prefill tp0 pp0`.
    pub fn worker_name(&self, id: WorkerId) -> &str {
        self.members.get(id).map_or("unknown worker", |m| m.name.as_str())
    }

    /// Side of a worker.
    pub fn role(&self, id: WorkerId) -> Option<Role> {
        self.members.get(id).map(|m| m.role)
    }

    /// OS process of a worker; `None` for a thread.
    pub fn process_id(&self, id: WorkerId) -> Option<u32> {
        match &self.members.get(id)?.link {
            Link::Process { child, .. } => Some(child.id()),
            Link::Thread { .. } => None,
        }
    }

    /// Workers of a side that are alive.
    pub fn alive(&self, role: Role) -> Vec<WorkerId> {
        (0..self.members.len()).filter(|&i| self.members[i].role == role && self.members[i].alive).collect()
    }

    /// Workers of a side, dead ones included.
    pub fn count(&self, role: Role) -> usize {
        self.members.iter().filter(|m| m.role == role).count()
    }

    /// Send a command. That a worker is gone shows as [`FleetEvent::Died`], not here.
    pub fn send(&mut self, id: WorkerId, command: &ToWorker) -> Result<()> {
        let Some(member) = self.members.get_mut(id) else { return Ok(()) };
        match &mut member.link {
            Link::Process { stdin: Some(stdin), .. } => {
                let mut line = serde_json::to_string(command)
                    .map_err(|e| CliError::new(format!("cannot write a command: {e}")))?;
                line.push('\n');
                let _ = stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush());
            }
            Link::Thread { commands: Some(commands), .. } => drop(commands.send(Ok(command.clone()))),
            Link::Process { .. } | Link::Thread { .. } => {}
        }
        Ok(())
    }

    /// The next event, or `None` after `timeout`.
    pub fn next(&mut self, timeout: Duration) -> Option<FleetEvent> {
        let deadline = Instant::now() + timeout;
        loop {
            match self.rx.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok(FleetEvent::Died(id, text)) => {
                    let member = self.members.get_mut(id)?;
                    if !std::mem::replace(&mut member.alive, false) {
                        continue; // known already
                    }
                    return Some(FleetEvent::Died(id, member.how_it_ended(text)));
                }
                Ok(FleetEvent::From(id, FromWorker::Stats { stats })) if self.on_stats.is_some() => {
                    if let Some(hear) = &mut self.on_stats {
                        hear(id, &stats);
                    }
                }
                Ok(event) => return Some(event),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => return None,
            }
        }
    }
}

impl Member {
    fn how_it_ended(&mut self, text: String) -> String {
        match &mut self.link {
            Link::Process { child, .. } if text.is_empty() => match child.wait() {
                Ok(status) => status.to_string(),
                Err(e) => format!("its exit status is unknown: {e}"),
            },
            _ => text,
        }
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for id in 0..self.members.len() {
            // Errors only mean that it has ended already.
            let _ = self.send(id, &ToWorker::Stop);
        }
        for member in &mut self.members {
            match &mut member.link {
                Link::Process { child, stdin } => {
                    *stdin = None; // end of input
                    let deadline = Instant::now() + GRACE;
                    while matches!(child.try_wait(), Ok(None)) {
                        if Instant::now() >= deadline {
                            let _ = child.kill();
                            let _ = child.wait();
                            break;
                        }
                        std::thread::sleep(Duration::from_millis(5));
                    }
                }
                Link::Thread { commands, thread } => {
                    *commands = None;
                    if let Some(thread) = thread.take() {
                        let _ = thread.join();
                    }
                }
            }
        }
    }
}

fn spawn_thread(name: String, f: impl FnOnce() + Send + 'static) -> Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(f).map_err(|e| CliError::new(format!("cannot start a thread: {e}")))
}
