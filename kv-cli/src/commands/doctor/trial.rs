//! A vendor's library tried out: two processes, one writes into the other's memory, which looks at every byte. What the
//! library does in there, up to a crash or a hang, is this check's result and no more.

use std::process::{Command, ExitCode};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_transfer::ids::OpId;
use kv_transfer::memory::{MemoryOwner, RegisteredRegion};
use kv_transfer::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_transfer::transport::{LaneEvent, Outcome, PeerDescriptor, SubmitError, Transport, WriteOp};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::child::{self, Failure, Other};
use super::{Check, Status};
use crate::error::{CliError, Result};
use crate::memory::KvMemory;
use crate::model::{KvKind, ModelSpec};
use crate::pattern::{PageSource, Pattern};
use crate::shape::{Rank, Shape};

/// What is tried out.
pub trait Subject {
    /// The transport's name.
    const NAME: &str;
    /// What to do about what nobody foresaw.
    const LOOK: &str;
    /// What was loaded, as it is reported.
    type Library: Clone + Serialize + DeserializeOwned;

    /// Prepare the environment, before anything else.
    fn prepare();

    /// # Errors
    /// As the library's opening has it.
    fn open() -> Result<(Arc<dyn Transport>, Self::Library)>;
}

/// The two tasks of [`child`].
fn tasks<S: Subject>() -> [String; 2] {
    ["target", "source"].map(|task| format!("{}-{task}", S::NAME))
}

/// Pages that are written, and the bytes of one: 8 MiB.
const PAGES: u32 = 16;
const PAGE_BYTES: u64 = 512 << 10;
/// How long the writes may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// What the target says first.
#[derive(Debug, Serialize, Deserialize)]
struct Opened<L> {
    library: L,
    name: String,
    metadata: Vec<u8>,
    addr: u64,
}

/// How it went.
#[derive(Clone, Debug, PartialEq)]
pub struct Trial<L> {
    /// The library, as far as it could be opened.
    pub library: Option<L>,
    /// Bytes that were written and verified, and the time of the writes.
    pub moved: Result<(u64, Duration)>,
}

impl<L> Trial<L> {
    /// What it says of the transport `S`. `described`: the library in words.
    pub fn check<S: Subject>(&self, name: &'static str, described: Option<String>) -> Check {
        match (&self.moved, described) {
            (Ok((bytes, time)), Some(library)) => {
                let mib = *bytes as f64 / f64::from(1 << 20);
                let moved = format!(
                    "{mib:.0} MiB written from process to process in {:.1} ms, every byte verified",
                    time.as_secs_f64() * 1e3
                );
                Check::new(name, Status::Ok, format!("{moved}; {library}"), "")
            }
            (Ok(_), None) => Check::new(name, Status::No, "the trial says nothing of the library", ""),
            // What cannot be had comes with its cure; a crash or a hang does not.
            (Err(e), None) if !e.hint.is_empty() => Check::new(name, Status::No, e.what.clone(), e.hint.clone()),
            (Err(e), None) => {
                Check::new(name, Status::No, format!("the library could not be tried out: {}", e.what), S::LOOK)
            }
            (Err(e), Some(library)) => {
                let fix = if e.hint.is_empty() { S::LOOK } else { &e.hint };
                Check::new(
                    name,
                    Status::No,
                    format!("a write between two processes failed: {}; {library}", e.what),
                    fix,
                )
            }
        }
    }
}

/// Try it, no longer than `patience`.
pub fn run<S: Subject>(patience: Duration) -> Trial<S::Library> {
    let mut library = None;
    let moved = moved::<S>(Instant::now() + patience, &mut library);
    Trial { library, moved }
}

fn moved<S: Subject>(deadline: Instant, library: &mut Option<S::Library>) -> Result<(u64, Duration)> {
    let exe =
        std::env::current_exe().map_err(|e| CliError::new(format!("cannot find this program's own file: {e}")))?;
    let [target, source] = tasks::<S>();
    let mut target = Other::start("process that is written to", Command::new(&exe), &target, deadline)?;
    let opened: Opened<S::Library> = target.hear()?;
    *library = Some(opened.library.clone());
    let mut source = Other::start("process that writes", Command::new(&exe), &source, deadline)?;
    source.tell(&opened);
    let seconds: f64 = source.hear()?;
    target.tell(&());
    let bytes: u64 = target.hear()?;
    Ok((bytes, Duration::try_from_secs_f64(seconds).unwrap_or_default()))
}

/// The child's part of a task, if it is one of this subject's.
pub fn child<S: Subject>(task: &str) -> Option<ExitCode> {
    let which = tasks::<S>().iter().position(|t| t == task)?;
    S::prepare();
    let done = if which == 0 { target::<S>() } else { source::<S>() };
    let said = done.or_else(|e| child::say::<()>(&Err(Failure::from(e))));
    Some(said.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS))
}

fn memory() -> Result<Arc<KvMemory>> {
    let kv = KvKind::Mha { kv_heads: 8, head_dim: 128 };
    let model = ModelSpec { name: "trial".into(), layers: 2, kv, value_bytes: 2, page_tokens: 64 };
    let memory = KvMemory::new(model.rank_geometry(Shape::default(), Rank::default())?, PAGES)?;
    if memory.len() != u64::from(PAGES) * PAGE_BYTES {
        return Err(CliError::new(format!("{} bytes to try it with", memory.len())));
    }
    Ok(Arc::new(memory))
}

fn register(transport: &dyn Transport, memory: &Arc<KvMemory>) -> Result<Arc<RegisteredRegion>> {
    let owner: Arc<dyn MemoryOwner> = memory.clone();
    transport.register(owner).map_err(|e| CliError::new(format!("cannot register memory: {e}")))
}

const PATTERN: Pattern = Pattern::Keyed { seed: 7 };

fn content(page: u32) -> PageSource {
    PageSource { id: u64::from(page) + 1, first_token: 0 }
}

fn target<S: Subject>() -> Result<()> {
    let ((transport, library), memory) = (S::open()?, memory()?);
    let region = register(&*transport, &memory)?;
    let (name, metadata) = (transport.local_name().to_owned(), transport.local_metadata().to_vec());
    child::say(&Ok(Opened { library, name, metadata, addr: region.addr() }))?;
    child::hear::<()>()?;
    for page in 0..PAGES {
        // SAFETY: the source said that its writes are done, or the process is ended before this.
        unsafe { memory.verify(PATTERN, page, content(page)) }
            .map_err(|m| CliError::new(format!("wrong bytes arrived: page {page}: {m}")))?;
    }
    child::say(&Ok(region.len()))
}

fn source<S: Subject>() -> Result<()> {
    let ((transport, _), memory) = (S::open()?, memory()?);
    for page in 0..PAGES {
        // SAFETY: nothing else has this memory yet.
        unsafe { memory.fill(PATTERN, page, content(page)) };
    }
    let region = register(&*transport, &memory)?;
    let to: Opened<S::Library> = child::hear()?;
    let seconds = write(&*transport, &region, to)?;
    child::say(&Ok(seconds))
}

/// Write the whole region; the seconds that the writes took.
fn write<L>(transport: &dyn Transport, region: &Arc<RegisteredRegion>, to: Opened<L>) -> Result<f64> {
    let failed = |what: &str, e: &dyn std::fmt::Display| CliError::new(format!("{what}: {e}"));
    let peer = PeerDescriptor {
        name: to.name,
        metadata: to.metadata.into(),
        endpoint: kv_core::Endpoint::new("127.0.0.1", 1),
        host: None,
    };
    let peer = transport.connect(&peer).map_err(|e| failed("cannot connect to another process", &e))?;
    let mut lane = transport.lane().map_err(|e| failed("no lane", &e))?;
    let (started, mut events, mut open) = (Instant::now(), Vec::new(), 0);
    for i in 0..u64::from(PAGES) {
        let entry = EntryPair {
            src_entry: 0,
            dst_entry: 0,
            src_region: region.id(),
            src_offset: i * PAGE_BYTES,
            dst_addr: to.addr + i * PAGE_BYTES,
            item_len: PAGE_BYTES,
            src_stride: PAGE_BYTES,
            dst_stride: PAGE_BYTES,
            dst_kind: region.kind(),
        };
        let runs = [Run { src: 0, dst: 0, count: 1 }];
        let plan = WritePlan::new([PlanGroup { entries: [entry].into(), runs: runs.into() }]);
        // So few are never too many in flight.
        lane.submit(WriteOp { id: OpId(i), peer, plan, regions: [Arc::clone(region)].into() }).map_err(
            |e| match e {
                SubmitError::Busy(_) => CliError::new("a write is not taken: busy"),
                SubmitError::Rejected(_, e) => failed("a write is refused", &e),
            },
        )?;
        open += 1;
    }
    while open > 0 {
        lane.poll(&mut events);
        for event in events.drain(..) {
            match event {
                LaneEvent::Outcome(_, Outcome::Done) => open -= 1,
                LaneEvent::Outcome(_, Outcome::Failed { error, .. } | Outcome::Unresolved { error }) => {
                    return Err(failed("a write failed", &error));
                }
                LaneEvent::PeerLost(_, error) => return Err(failed("the other process was lost", &error)),
                LaneEvent::Settlement(..) => {}
            }
        }
        if started.elapsed() > PATIENCE {
            return Err(CliError::new(format!("{open} of {PAGES} writes are not done after {PATIENCE:?}")));
        }
        std::thread::yield_now();
    }
    Ok(started.elapsed().as_secs_f64())
}
