//! Whether `kvt prefill` and `kvt decode` were started with the same workload, and for each other.
//!
//! They derive requests, rooms and waves from it without talking to each other; were it to differ, they would wait for
//! each other's rooms. So each rank states what it runs at the registry, under routes of their own beside SGLang's, and
//! looks at what the same rank of the other side stated. A registry that is not kvt's has no such route: then nothing
//! is compared here.
//!
//! A registry outlives the prefills that register at it. So prefill's statement counts only while its process beats,
//! and goes when the process ends. A prefill serves one decode: the first to claim it has it for good.
//!
//! | route | method | |
//! |---|---|---|
//! | `/kvt/workload/prefill/RANK` | PUT | state; the claim on the prefill of before goes |
//! | | POST | a sign of life; 409 when another prefill has stated since, 410 when none is known |
//! | | DELETE | the prefill ends, and the claim on it |
//! | `/kvt/workload/decode/RANK` | PUT | claim the prefill; 409 when another decode has it, 410 when it is gone |
//! | both | GET | 200 what was stated, 204 nothing yet |
//!
//! Bodies are `Record`s as JSON; POST and DELETE carry the owner alone.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::routing::put;
use kv_core::bootstrap::{BootstrapConfig, BootstrapServer};
use serde::{Deserialize, Serialize};

use crate::driver::protocol::Role;
use crate::error::{CliError, Result};
use crate::shape::Rank;

/// Longest statement, bytes.
const MAX_BODY: usize = 16 << 10;
/// One request to the registry.
const HTTP_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two looks, and between two of prefill's signs of life.
const LOOK_EVERY: Duration = Duration::from_millis(200);
/// A prefill that states something gets this long to show that it lives, should the caller's patience be shorter.
const PROOF: Duration = Duration::from_secs(2);
/// A prefill that gives no sign of life for this long is taken for dead.
const LEASE: Duration = Duration::from_secs(30);
/// Most ranks of one side.
const MAX_RANKS: usize = 1024;

/// Names and values that must be the same on both sides, in the order they are to be named in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stated(Vec<(String, String)>);

impl Stated {
    /// From names and values.
    pub fn new(fields: Vec<(&str, String)>) -> Self {
        Self(fields.into_iter().map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// # Errors
    /// Every name whose values differ, with both values.
    pub fn compare(prefill: &Self, decode: &Self) -> Result<()> {
        let value = |of: &Self, name: &str| of.0.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
        let names = prefill.0.iter().chain(&decode.0).map(|(n, _)| n);
        let mut seen = Vec::new();
        let mut differ = Vec::new();
        for name in names {
            if seen.contains(&name) {
                continue;
            }
            seen.push(name);
            // What one side alone has follows from another difference, such as another kind of attention.
            if let (Some(p), Some(d)) = (value(prefill, name), value(decode, name))
                && p != d
            {
                differ.push(format!("{name} is {p} on prefill and {d} on decode"));
            }
        }
        if differ.is_empty() && prefill.0.len() != decode.0.len() {
            differ.push("prefill and decode are different versions of this program".into());
        }
        if differ.is_empty() {
            return Ok(());
        }
        Err(CliError::new(differ.join(", ")).hint(
            "start both sides with the same --transport, --model, --trace, --requests, --max-tokens, --pool-mib, \
             --page-tokens, --seed, --pattern and sizes",
        ))
    }
}

/// What one rank stated.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// The process, for as long as it lives.
    owner: String,
    /// Decode: the prefill that is claimed.
    #[serde(default)]
    of: String,
    /// Prefill: signs of life so far. The registry counts them.
    #[serde(default)]
    beats: u64,
    stated: Stated,
}

/// A name that no other process has.
fn new_owner() -> String {
    let random = RandomState::new().hash_one(Instant::now());
    format!("{}-{random:016x}", std::process::id())
}

/// What was stated, by rank.
#[derive(Default)]
struct Board {
    prefill: HashMap<String, Record>,
    decode: HashMap<String, Record>,
}

/// A registry with these routes; the error names the address and says what to do.
pub fn serve(host: &str, port: u16) -> Result<BootstrapServer> {
    BootstrapServer::bind_with(host, port, BootstrapConfig::default(), routes()).map_err(|e| {
        CliError::new(format!("cannot listen on {}: {}", e.addr, e.source))
            .hint_by_cause("choose another port (0 takes a free one), or end the program that has it")
    })
}

type Shared = Arc<Mutex<Board>>;

/// The routes, with nothing stated yet.
pub fn routes() -> Router {
    Router::new()
        .route("/kvt/workload/prefill/{rank}", put(set_prefill).post(beat).delete(end).get(get_prefill))
        .route("/kvt/workload/decode/{rank}", put(claim).get(get_decode))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Shared::default())
}

impl Board {
    fn set_prefill(&mut self, rank: String, record: Record) -> StatusCode {
        if self.prefill.len() >= MAX_RANKS && !self.prefill.contains_key(&rank) {
            return StatusCode::INSUFFICIENT_STORAGE;
        }
        self.decode.remove(&rank);
        self.prefill.insert(rank, Record { beats: 0, ..record });
        StatusCode::OK
    }

    fn beat(&mut self, rank: &str, owner: &str) -> StatusCode {
        match self.prefill.get_mut(rank) {
            Some(record) if record.owner == owner => {
                record.beats += 1;
                StatusCode::OK
            }
            Some(_) => StatusCode::CONFLICT,
            None => StatusCode::GONE,
        }
    }

    fn end(&mut self, rank: &str, owner: &str) -> StatusCode {
        if self.prefill.get(rank).is_some_and(|r| r.owner == owner) {
            self.prefill.remove(rank);
            self.decode.remove(rank);
        }
        StatusCode::OK
    }

    fn claim(&mut self, rank: String, record: Record) -> StatusCode {
        // A claim is kept only beside a prefill, so there are no more of them than of those.
        if self.prefill.get(&rank).is_none_or(|p| p.owner != record.of) {
            return StatusCode::GONE;
        }
        if self.decode.get(&rank).is_some_and(|d| d.owner != record.owner) {
            return StatusCode::CONFLICT;
        }
        self.decode.insert(rank, record);
        StatusCode::OK
    }
}

fn with<T>(board: &Shared, f: impl FnOnce(&mut Board) -> T) -> T {
    f(&mut board.lock().unwrap_or_else(PoisonError::into_inner))
}

async fn set_prefill(State(board): State<Shared>, Path(rank): Path<String>, body: String) -> StatusCode {
    serde_json::from_str(&body).map_or(StatusCode::BAD_REQUEST, |record| with(&board, |b| b.set_prefill(rank, record)))
}

async fn claim(State(board): State<Shared>, Path(rank): Path<String>, body: String) -> StatusCode {
    serde_json::from_str(&body).map_or(StatusCode::BAD_REQUEST, |record| with(&board, |b| b.claim(rank, record)))
}

async fn beat(State(board): State<Shared>, Path(rank): Path<String>, owner: String) -> StatusCode {
    with(&board, |b| b.beat(&rank, &owner))
}

async fn end(State(board): State<Shared>, Path(rank): Path<String>, owner: String) -> StatusCode {
    with(&board, |b| b.end(&rank, &owner))
}

async fn get_prefill(State(board): State<Shared>, Path(rank): Path<String>) -> (StatusCode, String) {
    answer(with(&board, |b| b.prefill.get(&rank).cloned()))
}

async fn get_decode(State(board): State<Shared>, Path(rank): Path<String>) -> (StatusCode, String) {
    answer(with(&board, |b| b.decode.get(&rank).cloned()))
}

fn answer(record: Option<Record>) -> (StatusCode, String) {
    match record.map(|r| serde_json::to_string(&r)) {
        None => (StatusCode::NO_CONTENT, String::new()),
        Some(Ok(text)) => (StatusCode::OK, text),
        Some(Err(e)) => (StatusCode::INTERNAL_SERVER_ERROR, e.to_string()),
    }
}

/// One HTTP request; status and body.
fn http(at: &str, method: &str, role: Role, rank: Rank, body: &str) -> std::io::Result<(u16, String)> {
    let addrs = at.to_socket_addrs()?;
    let mut last = std::io::Error::new(std::io::ErrorKind::NotFound, "it has no address");
    for addr in addrs {
        let mut sock = match TcpStream::connect_timeout(&addr, HTTP_TIMEOUT) {
            Ok(sock) => sock,
            Err(e) => {
                last = e;
                continue;
            }
        };
        sock.set_read_timeout(Some(HTTP_TIMEOUT))?;
        sock.set_write_timeout(Some(HTTP_TIMEOUT))?;
        let head = format!(
            "{method} /kvt/workload/{role}/tp{}-pp{} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\nContent-Type: text/plain\r\n\
             Content-Length: {}\r\n\r\n",
            rank.tp,
            rank.pp,
            body.len()
        );
        sock.write_all(head.as_bytes())?;
        sock.write_all(body.as_bytes())?;
        let mut answer = Vec::new();
        sock.take(2 * MAX_BODY as u64).read_to_end(&mut answer)?;
        let answer = String::from_utf8_lossy(&answer);
        let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&*answer, ""));
        let status = head.split(' ').nth(1).and_then(|s| s.parse().ok());
        let invalid = || std::io::Error::new(std::io::ErrorKind::InvalidData, "its answer is not HTTP");
        return Ok((status.ok_or_else(invalid)?, body.to_owned()));
    }
    Err(last)
}

fn unreachable(at: &str, e: std::io::Error) -> CliError {
    if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut) {
        let what = format!("what listens at {at} does not answer within {HTTP_TIMEOUT:?}");
        return CliError::new(what).hint("is it a bootstrap server? correct --bootstrap");
    }
    CliError::new(format!("the bootstrap server at {at} does not answer: {e}"))
}

fn text(record: &Record) -> Result<String> {
    serde_json::to_string(record).map_err(|e| CliError::new(format!("cannot state the workload: {e}")))
}

/// What a rank stated; `None`: nothing yet. Whether the registry knows the route is `Err` of the inner result.
fn look(at: &str, role: Role, rank: Rank) -> std::io::Result<std::result::Result<Option<Record>, ()>> {
    let (status, body) = http(at, "GET", role, rank, "")?;
    match status {
        200 => Ok(serde_json::from_str(&body).map(Some).map_err(drop)),
        204 => Ok(Ok(None)),
        _ => Ok(Err(())),
    }
}

/// Decode: wait for a prefill that lives, claim it and compare. It hears of our workload in either case, so that it
/// ends too.
///
/// # Errors
/// What differs; no prefill that lives came in time; another decode has it; the registry does not answer.
pub fn agree(at: &str, rank: Rank, ours: &Stated, patience: Duration) -> Result<Agreed> {
    let owner = new_owner();
    let started = Instant::now();
    // The prefill that was seen last, and its signs of life then. One more proves that it lives now.
    let mut seen: Option<Record> = None;
    loop {
        let theirs = match look(at, Role::Prefill, rank).map_err(|e| unreachable(at, e))? {
            Ok(theirs) => theirs,
            Err(()) => {
                tracing::info!("the registry at {at} is not kvt's: workloads are not compared");
                return Ok(Agreed(None));
            }
        };
        match (&seen, theirs) {
            (Some(before), Some(now)) if before.owner == now.owner => {
                if now.beats != before.beats {
                    let claim = Record { owner: owner.clone(), of: now.owner.clone(), beats: 0, stated: ours.clone() };
                    match http(at, "PUT", Role::Decode, rank, &text(&claim)?).map_err(|e| unreachable(at, e))?.0 {
                        200 => {
                            Stated::compare(&now.stated, ours)?;
                            return Ok(Agreed(Some((at.to_owned(), rank, now))));
                        }
                        409 => {
                            return Err(CliError::new(format!(
                                "another decode {rank} has the prefill at the registry {at}: a prefill serves one"
                            ))
                            .hint("start one prefill for each decode, each pair with a registry of its own"));
                        }
                        // It ended between the look and the claim.
                        _ => seen = None,
                    }
                }
            }
            (_, theirs) => seen = theirs,
        }
        let patience = if seen.is_some() { patience.max(PROOF) } else { patience };
        if started.elapsed() >= patience {
            let what = match seen {
                Some(_) => format!("the prefill that was at the registry {at} has ended: no sign of life"),
                None => format!("no prefill {rank} came to the registry {at}"),
            };
            return Err(CliError::new(format!("{what} within {patience:?}"))
                .hint("start `kvt prefill`, or wait longer with --connect-timeout"));
        }
        std::thread::sleep(LOOK_EVERY);
    }
}

/// A prefill that a decode has claimed.
#[derive(Debug)]
pub struct Agreed(Option<(String, Rank, Record)>);

impl Agreed {
    /// Watch in the background that it lives; `lost` hears when it does not. Nothing is said of a prefill that ended
    /// in order, or that another took the place of: what that means for a room, its transport knows.
    ///
    /// # Errors
    /// No thread.
    pub fn watch(self, lost: impl FnOnce(CliError) + Send + 'static) -> Result<()> {
        self.watch_for(LEASE, lost)
    }

    fn watch_for(self, lease: Duration, lost: impl FnOnce(CliError) + Send + 'static) -> Result<()> {
        let Some((at, rank, mut last)) = self.0 else { return Ok(()) };
        spawn(move || {
            let mut since = Instant::now();
            loop {
                std::thread::sleep(LOOK_EVERY);
                match look(&at, Role::Prefill, rank) {
                    Ok(Ok(Some(now))) if now.owner == last.owner => {
                        if now.beats != last.beats {
                            (last, since) = (now, Instant::now());
                        } else if since.elapsed() >= lease {
                            let what = format!("prefill {rank} gave no sign of life for {lease:?}: it has ended");
                            return lost(CliError::new(what).hint("its own message says why; start both sides again"));
                        }
                    }
                    Ok(_) => return,
                    // A registry that is away says nothing of prefill. The heartbeat of rooms looks at it too.
                    Err(_) => since = Instant::now(),
                }
            }
        })
        .map(drop)
    }
}

fn spawn(f: impl FnOnce() + Send + 'static) -> Result<JoinHandle<()>> {
    std::thread::Builder::new()
        .name("kvt-agreement".into())
        .spawn(f)
        .map_err(|e| CliError::new(format!("cannot start a thread: {e}")))
}

/// Prefill's statement at the registry, kept alive in the background. Dropping it takes it away.
pub struct Statement {
    /// Dropped first: ends the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Statement {
    /// State what this prefill rank runs; `fails` hears of a decode that runs something else, and of another prefill
    /// that took this one's place.
    ///
    /// # Errors
    /// The registry does not answer; no thread.
    pub fn new(at: String, rank: Rank, ours: Stated, fails: impl FnOnce(CliError) + Send + 'static) -> Result<Self> {
        let record = Record { owner: new_owner(), of: String::new(), beats: 0, stated: ours };
        let body = text(&record)?;
        http(&at, "PUT", Role::Prefill, rank, &body).map_err(|e| unreachable(&at, e))?;
        let (stop, stopped) = channel();
        let thread = spawn(move || {
            let mut agreed = false;
            while stopped.recv_timeout(LOOK_EVERY) == Err(RecvTimeoutError::Timeout) {
                // A registry that is away for a moment is not the workload's business.
                match http(&at, "POST", Role::Prefill, rank, &record.owner) {
                    Ok((409, _)) => {
                        let what = format!("another prefill {rank} took this one's place at the registry {at}");
                        return fails(CliError::new(what).hint("give each pair a registry of its own"));
                    }
                    // The registry was started again.
                    Ok((410, _)) => drop(http(&at, "PUT", Role::Prefill, rank, &body)),
                    Ok((404 | 405, _)) => return,
                    Ok(_) | Err(_) => {}
                }
                if !agreed && let Ok(Ok(Some(theirs))) = look(&at, Role::Decode, rank) {
                    agreed = true;
                    if let Err(e) = Stated::compare(&record.stated, &theirs.stated) {
                        return fails(e);
                    }
                }
            }
            // A registry that does not answer has forgotten it, or will see that nothing beats.
            drop(http(&at, "DELETE", Role::Prefill, rank, &record.owner));
        })?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Statement {
    fn drop(&mut self) {
        self.stop = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::serve as bind;
    use super::*;

    fn stated(layers: u32) -> Stated {
        Stated::new(vec![("model", "m".into()), ("layers", layers.to_string())])
    }

    #[test]
    fn every_difference_is_named_with_both_values() {
        assert_eq!(Stated::compare(&stated(4), &stated(4)), Ok(()));
        let other = Stated::new(vec![("model", "n".into()), ("layers", "6".into()), ("x", "1".into())]);
        assert_eq!(
            Stated::compare(&stated(4), &other).unwrap_err().what,
            "model is m on prefill and n on decode, layers is 4 on prefill and 6 on decode"
        );
        let more = Stated::new(vec![("model", "m".into()), ("layers", "4".into()), ("x", "1".into())]);
        assert!(Stated::compare(&stated(4), &more).unwrap_err().what.contains("different versions"));
    }

    const RANK: Rank = Rank { tp: 0, pp: 0, cp: 0, dp: 0 };
    const PATIENCE: Duration = Duration::from_secs(60);

    fn statement(at: &str, layers: u32) -> (Statement, std::sync::mpsc::Receiver<CliError>) {
        let (tx, heard) = channel();
        // One that hears nothing more is a test that has ended.
        let fails = move |e| drop(tx.send(e));
        (Statement::new(at.to_owned(), RANK, stated(layers), fails).unwrap(), heard)
    }

    #[test]
    fn both_sides_hear_of_it() {
        let server = bind("127.0.0.1", 0).unwrap();
        let at = server.local_addr().to_string();
        let none = agree(&at, RANK, &stated(4), Duration::ZERO).unwrap_err();
        assert!(none.what.contains("no prefill tp0 pp0 came"), "{none}");
        let (prefill, heard) = statement(&at, 4);
        let decode = agree(&at, RANK, &stated(6), PATIENCE).unwrap_err();
        assert_eq!(heard.recv_timeout(PATIENCE), Ok(decode));
        drop(prefill);
        // A new prefill starts with a clean board.
        let (_prefill, _heard) = statement(&at, 4);
        assert_eq!(look(&at, Role::Decode, RANK).unwrap(), Ok(None));
        agree(&at, RANK, &stated(4), PATIENCE).unwrap();
    }

    #[test]
    fn a_prefill_serves_one_decode_of_each_rank() {
        let server = bind("127.0.0.1", 0).unwrap();
        let at = server.local_addr().to_string();
        let (_prefill, heard) = statement(&at, 4);
        agree(&at, RANK, &stated(4), PATIENCE).unwrap();
        // Also one that differs is only told that it came second: prefill goes on.
        for layers in [4, 6] {
            let e = agree(&at, RANK, &stated(layers), PATIENCE).unwrap_err().one_line();
            assert!(e.contains("another decode tp0 pp0 has the prefill at the registry"), "{e}");
        }
        assert!(heard.try_recv().is_err());
    }

    #[test]
    fn a_prefill_that_ended_is_none() {
        let server = bind("127.0.0.1", 0).unwrap();
        let at = server.local_addr().to_string();
        let (prefill, _heard) = statement(&at, 4);
        drop(prefill);
        let e = agree(&at, RANK, &stated(4), Duration::ZERO).unwrap_err();
        assert!(e.what.contains("no prefill tp0 pp0 came to the registry"), "{e}");
        // Killed: nobody took its statement away, and nobody beats.
        let dead = Record { owner: "dead".into(), of: String::new(), beats: 7, stated: stated(4) };
        http(&at, "PUT", Role::Prefill, RANK, &text(&dead).unwrap()).unwrap();
        let e = agree(&at, RANK, &stated(4), Duration::ZERO).unwrap_err();
        assert!(e.what.contains("has ended: no sign of life"), "{e}");
        // The next one takes its place.
        let (_prefill, heard) = statement(&at, 4);
        agree(&at, RANK, &stated(4), PATIENCE).unwrap();
        http(&at, "PUT", Role::Prefill, RANK, &text(&dead).unwrap()).unwrap();
        let e = heard.recv_timeout(PATIENCE).unwrap();
        assert!(e.what.contains("another prefill tp0 pp0 took this one's place"), "{e}");
    }

    #[test]
    fn a_prefill_that_dies_after_the_claim_is_heard_of_and_one_that_ends_in_order_is_not() {
        let server = bind("127.0.0.1", 0).unwrap();
        let at = server.local_addr().to_string();
        let watch = |record: Record| {
            let (tx, heard) = channel();
            let agreed = Agreed(Some((at.clone(), RANK, record)));
            agreed.watch_for(Duration::ZERO, move |e| drop(tx.send(e))).unwrap();
            heard
        };
        let dead = Record { owner: "dead".into(), of: String::new(), beats: 0, stated: stated(4) };
        http(&at, "PUT", Role::Prefill, RANK, &text(&dead).unwrap()).unwrap();
        let e = watch(dead.clone()).recv_timeout(PATIENCE).unwrap();
        assert!(e.what.contains("prefill tp0 pp0 gave no sign of life"), "{e}");
        http(&at, "DELETE", Role::Prefill, RANK, "dead").unwrap();
        // The watch ends without a word, which closes its end of the channel.
        assert_eq!(watch(dead).recv_timeout(PATIENCE), Err(RecvTimeoutError::Disconnected));
    }

    #[test]
    fn a_registry_without_the_route_compares_nothing() {
        let server = BootstrapServer::bind("127.0.0.1", 0, BootstrapConfig::default()).unwrap();
        let at = server.local_addr().to_string();
        assert!(agree(&at, RANK, &stated(4), Duration::ZERO).unwrap().0.is_none());
        let (_prefill, _heard) = statement(&at, 4);
    }
}
