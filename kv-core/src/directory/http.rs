//! Runs a [`DirectoryCore`] on a thread of its own, against a [`Registry`] (by default over HTTP).

use std::io;
use std::sync::Arc;
use std::thread::JoinHandle;

use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;

use super::cache::{Answer, Call, CallId, DirectoryConfig, DirectoryCore, Effect};
use super::queue::CallQueue;
use super::{Directory, DirectoryEvent, DirectoryRequest};
use crate::bootstrap::client::HttpRegistry;
use crate::bootstrap::types::{Registry, RegistryError};
use crate::time::{Clock, MonotonicClock};

/// Takes what a directory reports. Called from the directory's thread, or from the caller of
/// [`Directory::request`] when that cannot take the request: it must not block for long, nor wait for the caller.
pub type EventSink = Box<dyn Fn(DirectoryEvent) + Send + Sync>;

/// Requests taken in one go, before answers are looked at again.
const REQUEST_BATCH: usize = 1024;

/// A directory over bootstrap servers. Dropping it ends its thread; rooms that wait then get no answer.
#[derive(Debug)]
pub struct HttpDirectory {
    handle: DirectoryHandle,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl HttpDirectory {
    /// Starts the thread, with SGLang's time limits for requests.
    ///
    /// # Errors
    /// The thread or the HTTP library could not start.
    pub fn new(config: DirectoryConfig, sink: EventSink) -> io::Result<Self> {
        let registry = HttpRegistry::new().map_err(io::Error::other)?;
        Self::with_registry(config, Arc::new(registry), sink)
    }

    /// Starts the thread over a registry of one's own.
    ///
    /// # Errors
    /// The thread could not start.
    pub fn with_registry(config: DirectoryConfig, registry: Arc<dyn Registry>, sink: EventSink) -> io::Result<Self> {
        let sink: Arc<dyn Fn(DirectoryEvent) + Send + Sync> = Arc::from(sink);
        let (requests, inbox) = mpsc::channel(config.limits.max_rooms.max(1));
        let (stop, stopped) = oneshot::channel();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let handle = DirectoryHandle { requests, sink: Arc::clone(&sink) };
        let thread = std::thread::Builder::new().name("kv-directory".into()).spawn(move || {
            let driver = Driver {
                core: DirectoryCore::new(config),
                registry,
                sink,
                inbox,
                running: JoinSet::new(),
                queue: CallQueue::default(),
            };
            runtime.block_on(driver.run(stopped));
            // A name lookup that hangs must not hold whoever drops the directory.
            runtime.shutdown_background();
        })?;
        Ok(Self { handle, stop: Some(stop), thread: Some(thread) })
    }

    /// Another way in, for a shard.
    pub fn handle(&self) -> DirectoryHandle {
        self.handle.clone()
    }
}

impl Directory for HttpDirectory {
    fn request(&mut self, request: DirectoryRequest) {
        self.handle.request(request);
    }
}

impl Drop for HttpDirectory {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            // The sink may own the directory.
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

/// Sends requests to an [`HttpDirectory`]; never blocks.
#[derive(Clone)]
pub struct DirectoryHandle {
    requests: mpsc::Sender<DirectoryRequest>,
    sink: Arc<dyn Fn(DirectoryEvent) + Send + Sync>,
}

impl std::fmt::Debug for DirectoryHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DirectoryHandle").field("free", &self.requests.capacity()).finish_non_exhaustive()
    }
}

impl Directory for DirectoryHandle {
    fn request(&mut self, request: DirectoryRequest) {
        let (request, why) = match self.requests.try_send(request) {
            Ok(()) => return,
            Err(TrySendError::Full(request)) => {
                (request, format!("{} requests are queued already", self.requests.max_capacity()))
            }
            Err(TrySendError::Closed(request)) => (request, "the directory has ended".to_owned()),
        };
        match request {
            DirectoryRequest::Peers { token, bootstrap_addr, .. } => {
                let result = Err(format!("Could not ask bootstrap_addr: {bootstrap_addr}: {why}"));
                (self.sink)(DirectoryEvent::Peers { token, result });
            }
            DirectoryRequest::RegisterDpRank { token, .. } => {
                (self.sink)(DirectoryEvent::DpRankRegistered { token, result: Err(why) });
            }
            request @ (DirectoryRequest::Forget { .. } | DirectoryRequest::CancelDpRank { .. }) => {
                tracing::warn!(?request, why, "directory request dropped")
            }
        }
    }
}

struct Driver {
    core: DirectoryCore,
    registry: Arc<dyn Registry>,
    sink: Arc<dyn Fn(DirectoryEvent) + Send + Sync>,
    inbox: mpsc::Receiver<DirectoryRequest>,
    /// With the registry whose turn it was; health checks wait for none, so that they are never late.
    running: JoinSet<(CallId, Option<Arc<str>>, Answer)>,
    queue: CallQueue,
}

impl Driver {
    async fn run(mut self, mut stopped: oneshot::Receiver<()>) {
        let clock = MonotonicClock::new();
        loop {
            self.run_effects();
            let now = clock.now();
            let due = self.core.poll_timeout().map(|at| at.since(now));
            let timer = async {
                match due {
                    Some(due) => tokio::time::sleep(due).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                _ = &mut stopped => return,
                Some(done) = self.running.join_next(), if !self.running.is_empty() => {
                    // The call itself runs in a task of its own, so this one neither panics nor is cancelled.
                    if let Ok((id, turn, answer)) = done {
                        turn.into_iter().for_each(|addr| self.queue.done(addr));
                        self.core.handle_answer(clock.now(), id, answer);
                    }
                },
                request = self.inbox.recv() => {
                    let Some(request) = request else { return };
                    let now = clock.now();
                    self.core.handle_request(now, request);
                    for _ in 1..REQUEST_BATCH {
                        let Ok(request) = self.inbox.try_recv() else { break };
                        self.core.handle_request(now, request);
                    }
                },
                () = timer => {},
            }
            let now = clock.now();
            if self.core.poll_timeout().is_some_and(|at| at <= now) {
                self.core.handle_timeout(now);
            }
        }
    }

    fn run_effects(&mut self) {
        while let Some(effect) = self.core.poll_effect() {
            match effect {
                Effect::Event(event) => (self.sink)(event),
                Effect::Call { id, addr, call: Call::Health } => self.start(id, addr, Call::Health, None),
                Effect::Call { id, addr, call } => self.queue.push(id, addr, call),
                Effect::Cancel { id, addr } => self.queue.cancel(id, addr),
            }
        }
        while let Some((id, addr, call)) = self.queue.pop() {
            let turn = Some(Arc::clone(&addr));
            self.start(id, addr, call, turn);
        }
    }

    fn start(&mut self, id: CallId, addr: Arc<str>, call: Call, turn: Option<Arc<str>>) {
        let registry = Arc::clone(&self.registry);
        self.running.spawn(async move {
            let failed = answer_of(&call, RegistryError::Unreachable("the registry client panicked".into()));
            let answer = tokio::spawn(async move { ask(&*registry, &addr, call).await }).await;
            (id, turn, answer.unwrap_or(failed))
        });
    }
}

async fn ask(registry: &dyn Registry, addr: &str, call: Call) -> Answer {
    match call {
        Call::ParallelInfo => Answer::ParallelInfo(registry.parallel_info(addr).await),
        Call::RankAddress(key) => Answer::RankAddress(registry.rank_address(addr, key).await),
        Call::QueryDpRanks(rooms) => Answer::QueryDpRanks(registry.query_dp_ranks(addr, &rooms).await),
        Call::RegisterDpRank(room, rank) => Answer::RegisterDpRank(registry.register_dp_rank(addr, room, rank).await),
        Call::Health => Answer::Health(registry.health(addr).await),
    }
}

fn answer_of(call: &Call, error: RegistryError) -> Answer {
    match call {
        Call::ParallelInfo => Answer::ParallelInfo(Err(error)),
        Call::RankAddress(_) => Answer::RankAddress(Err(error)),
        Call::QueryDpRanks(_) => Answer::QueryDpRanks(Err(error)),
        Call::RegisterDpRank(..) => Answer::RegisterDpRank(Err(error)),
        Call::Health => Answer::Health(Err(error)),
    }
}
