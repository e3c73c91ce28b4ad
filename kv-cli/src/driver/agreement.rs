//! Whether `kvt prefill` and `kvt decode` were started with the same workload.
//!
//! They derive requests, rooms and waves from it without talking to each other; were it to differ, they would wait for
//! each other's rooms. So each states what it runs at the registry, under a route of its own beside SGLang's, and looks
//! at what the other stated. A registry that is not kvt's has no such route: then nothing is compared here.
//!
//! | route | method | |
//! |---|---|---|
//! | `/kvt/workload/prefill`, `/kvt/workload/decode` | PUT | state; prefill's clears decode's of before |
//! | as above | GET | 200 what was stated, 204 nothing yet |

use std::io::{Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs as _};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use axum::Router;
use axum::extract::{DefaultBodyLimit, Path, State};
use axum::http::StatusCode;
use axum::routing::put;
use kv_core::bootstrap::{BootstrapConfig, BootstrapServer};
use serde::{Deserialize, Serialize};

use crate::driver::protocol::Role;
use crate::error::{CliError, Result};

/// Longest statement, bytes.
const MAX_BODY: usize = 16 << 10;
/// One request to the registry.
const HTTP_TIMEOUT: Duration = Duration::from_secs(5);
/// Between two looks.
const LOOK_EVERY: Duration = Duration::from_millis(200);

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
            "start both sides with the same --model, --trace, --requests, --max-tokens, --pool-mib, \
             --page-tokens, --seed, --pattern and sizes",
        ))
    }
}

#[derive(Default)]
struct Board {
    prefill: Option<String>,
    decode: Option<String>,
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
        .route("/kvt/workload/{role}", put(set).get(get))
        .layer(DefaultBodyLimit::max(MAX_BODY))
        .with_state(Shared::default())
}

async fn set(State(board): State<Shared>, Path(role): Path<String>, body: String) -> StatusCode {
    let mut board = board.lock().unwrap_or_else(PoisonError::into_inner);
    match role.as_str() {
        "prefill" => *board = Board { prefill: Some(body), decode: None },
        "decode" => board.decode = Some(body),
        _ => return StatusCode::NOT_FOUND,
    }
    StatusCode::OK
}

async fn get(State(board): State<Shared>, Path(role): Path<String>) -> (StatusCode, String) {
    let board = board.lock().unwrap_or_else(PoisonError::into_inner);
    let stated = match role.as_str() {
        "prefill" => &board.prefill,
        "decode" => &board.decode,
        _ => return (StatusCode::NOT_FOUND, String::new()),
    };
    stated.clone().map_or((StatusCode::NO_CONTENT, String::new()), |text| (StatusCode::OK, text))
}

/// One HTTP request; status and body.
fn http(at: &str, method: &str, role: Role, body: &str) -> std::io::Result<(u16, String)> {
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
            "{method} /kvt/workload/{role} HTTP/1.1\r\nHost: {at}\r\nConnection: close\r\nContent-Type: text/plain\r\n\
             Content-Length: {}\r\n\r\n",
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

/// State what this side runs.
///
/// # Errors
/// The registry does not answer.
pub fn state(at: &str, role: Role, stated: &Stated) -> Result<()> {
    let text = serde_json::to_string(stated).map_err(|e| CliError::new(format!("cannot state the workload: {e}")))?;
    http(at, "PUT", role, &text).map(drop).map_err(|e| unreachable(at, e))
}

/// What the other side stated; `None`: nothing yet. Whether the registry knows the route is `Err` of the inner result.
fn look(at: &str, role: Role) -> std::io::Result<std::result::Result<Option<Stated>, ()>> {
    let (status, body) = http(at, "GET", role, "")?;
    match status {
        200 => Ok(serde_json::from_str(&body).map(Some).map_err(drop)),
        204 => Ok(Ok(None)),
        _ => Ok(Err(())),
    }
}

/// Decode: wait for prefill's statement and compare. Ours is stated in either case, so that prefill ends too.
///
/// # Errors
/// What differs; no prefill came in time; the registry does not answer.
pub fn agree(at: &str, ours: &Stated, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        match look(at, Role::Prefill) {
            Ok(Ok(Some(theirs))) => {
                state(at, Role::Decode, ours)?;
                return Stated::compare(&theirs, ours);
            }
            Ok(Err(())) => {
                tracing::info!("the registry at {at} is not kvt's: workloads are not compared");
                return Ok(());
            }
            Ok(Ok(None)) if Instant::now() < deadline => std::thread::sleep(LOOK_EVERY),
            Ok(Ok(None)) => {
                return Err(CliError::new(format!("no prefill came to the registry at {at} within {patience:?}"))
                    .hint("start `kvt prefill`, or wait longer with --connect-timeout"));
            }
            Err(e) => return Err(unreachable(at, e)),
        }
    }
}

/// Prefill: look in the background until a decode stated its workload; `differs` hears what is wrong with it.
///
/// # Errors
/// No thread.
pub fn watch(at: String, ours: Stated, differs: impl FnOnce(CliError) + Send + 'static) -> Result<()> {
    let look_on = move || {
        loop {
            match look(&at, Role::Decode) {
                Ok(Ok(Some(theirs))) => {
                    if let Err(e) = Stated::compare(&ours, &theirs) {
                        differs(e);
                    }
                    return;
                }
                Ok(Err(())) => return,
                // A registry that is away for a moment is not the workload's business.
                Ok(Ok(None)) | Err(_) => std::thread::sleep(LOOK_EVERY),
            }
        }
    };
    std::thread::Builder::new()
        .name("kvt-agreement".into())
        .spawn(look_on)
        .map(drop)
        .map_err(|e| CliError::new(format!("cannot start a thread: {e}")))
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

    #[test]
    fn both_sides_hear_of_it() {
        let server = bind("127.0.0.1", 0).unwrap();
        let at = server.local_addr().to_string();
        let none = agree(&at, &stated(4), Duration::ZERO).unwrap_err();
        assert!(none.what.contains("no prefill came"), "{none}");
        state(&at, Role::Prefill, &stated(4)).unwrap();
        let (tx, heard) = std::sync::mpsc::channel();
        watch(at.clone(), stated(4), move |e| tx.send(e).unwrap()).unwrap();
        let decode = agree(&at, &stated(6), Duration::from_secs(60)).unwrap_err();
        assert_eq!(heard.recv_timeout(Duration::from_secs(60)), Ok(decode));
        // A new prefill starts with a clean board.
        state(&at, Role::Prefill, &stated(4)).unwrap();
        assert_eq!(look(&at, Role::Decode).unwrap(), Ok(None));
        agree(&at, &stated(4), Duration::from_secs(60)).unwrap();
    }

    #[test]
    fn a_registry_without_the_route_compares_nothing() {
        let server = BootstrapServer::bind("127.0.0.1", 0, BootstrapConfig::default()).unwrap();
        agree(&server.local_addr().to_string(), &stated(4), Duration::ZERO).unwrap();
    }
}
