//! The bootstrap server: SGLang 0.5.23's routes on a thread of their own.
//!
//! | route | method | |
//! |---|---|---|
//! | `/health` | GET, HEAD | 200 `OK` |
//! | `/route` | PUT | register one prefill rank |
//! | `/route` | GET | parallel info, or one rank's address |
//! | `/register_dp_rank`, `/query_dp_ranks` | POST | which DP rank serves a room |
//!
//! There is no authentication: whoever reaches the port can register ranks. Bind it to an address of the cluster's own
//! network, and consider [`OwnerPolicy::RefuseOtherHost`](super::table::OwnerPolicy).

use std::future::poll_fn;
use std::io;
use std::net::{SocketAddr, ToSocketAddrs};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, HttpBody};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::Response;
use axum::routing::{any, get, post};
use serde::Serialize;
use tokio::net::{TcpListener, TcpSocket};
use tokio::sync::oneshot;

use super::coerce;
use super::table::{Registered, RegistryTable, TableConfig, TableError, TableStats};
use super::types::{PrefillRow, QueryDpRanks, RegisterDpRank, RowError};
use crate::limits::Limits;
use crate::time::{Clock, MonotonicClock, Timestamp};

const TEXT: &str = "text/plain; charset=utf-8";
const JSON: &str = "application/json; charset=utf-8";
/// A body that trickles in longer than this is given up.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections that are still busy this long after shutdown began are cut.
const SHUTDOWN_GRACE: Duration = Duration::from_secs(1);

/// How a server behaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootstrapConfig {
    /// Largest request body, bytes; above it the answer is 413.
    pub max_body: usize,
    /// The table's bounds and rules.
    pub table: TableConfig,
}

impl From<&Limits> for BootstrapConfig {
    fn from(limits: &Limits) -> Self {
        Self { max_body: limits.max_http_body, table: TableConfig::from(limits) }
    }
}

impl From<Limits> for BootstrapConfig {
    fn from(limits: Limits) -> Self {
        Self::from(&limits)
    }
}

impl Default for BootstrapConfig {
    fn default() -> Self {
        Self::from(&Limits::default())
    }
}

/// The server could not start.
#[derive(Debug, thiserror::Error)]
#[error("the bootstrap server cannot listen on {addr}: {source}{}", hint(source))]
pub struct BindError {
    /// Where it should have listened.
    pub addr: String,
    /// What the operating system said.
    pub source: io::Error,
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrInUse => {
            "; another server holds the port: stop it, or choose another --disaggregation-bootstrap-port"
        }
        io::ErrorKind::AddrNotAvailable => "; no interface of this machine has that address",
        io::ErrorKind::PermissionDenied => "; ports below 1024 need a privilege",
        _ => "",
    }
}

struct Shared {
    table: Mutex<RegistryTable>,
    clock: MonotonicClock,
    max_body: usize,
}

impl Shared {
    fn table(&self) -> MutexGuard<'_, RegistryTable> {
        // The table never panics half way through a change that matters more than going on.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Timestamp {
        self.clock.now()
    }
}

/// A running bootstrap server. Usable from synchronous code; dropping it closes the port and ends its thread.
pub struct BootstrapServer {
    local_addr: SocketAddr,
    shared: Arc<Shared>,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl BootstrapServer {
    /// Listens on `host:port` and serves from a thread of its own. Port 0 takes a free one, see
    /// [`local_addr`](Self::local_addr). IPv6 hosts may be bracketed or not; `::` also takes IPv4 where the system
    /// allows it.
    ///
    /// # Errors
    /// [`BindError`]: the name does not resolve, or none of its addresses can be bound.
    pub fn bind(host: &str, port: u16, config: impl Into<BootstrapConfig>) -> Result<Self, BindError> {
        Self::bind_with(host, port, config, Router::new())
    }

    /// As [`bind`](Self::bind), with routes of the caller's own beside SGLang's. They bound their bodies themselves.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind_with(
        host: &str,
        port: u16,
        config: impl Into<BootstrapConfig>,
        routes: Router,
    ) -> Result<Self, BindError> {
        let shown = super::address::join_host_port(host, port);
        let fail = |source| BindError { addr: shown.clone(), source };
        let addrs: Vec<_> = (super::address::unbracketed(host), port).to_socket_addrs().map_err(fail)?.collect();
        Self::start(addrs, config.into(), routes).map_err(fail)
    }

    /// As [`bind`](Self::bind), at a socket address.
    ///
    /// # Errors
    /// [`BindError`].
    pub fn bind_addr(addr: SocketAddr, config: impl Into<BootstrapConfig>) -> Result<Self, BindError> {
        Self::start(vec![addr], config.into(), Router::new())
            .map_err(|source| BindError { addr: addr.to_string(), source })
    }

    fn start(addrs: Vec<SocketAddr>, config: BootstrapConfig, routes: Router) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            table: Mutex::new(RegistryTable::new(config.table)),
            clock: MonotonicClock::new(),
            max_body: config.max_body,
        });
        let (stop, stopped) = oneshot::channel();
        let (started, starting) = mpsc::sync_channel(1);
        let state = Arc::clone(&shared);
        let thread = std::thread::Builder::new().name("kv-bootstrap".into()).spawn(move || {
            let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
                Ok(runtime) => runtime,
                Err(e) => return drop(started.send(Err(e))),
            };
            runtime.block_on(async move {
                match listen(&addrs).and_then(|l| l.local_addr().map(|addr| (l, addr))) {
                    Ok((listener, addr)) => {
                        let _ = started.send(Ok(addr));
                        serve(listener, state, routes, stopped).await;
                    }
                    Err(e) => drop(started.send(Err(e))),
                }
            });
            runtime.shutdown_background();
        })?;
        let local_addr =
            starting.recv().unwrap_or_else(|_| Err(io::Error::other("the server's thread ended before it listened")));
        match local_addr {
            Ok(local_addr) => Ok(Self { local_addr, shared, stop: Some(stop), thread: Some(thread) }),
            Err(e) => {
                let _ = thread.join();
                Err(e)
            }
        }
    }

    /// Where it listens.
    pub fn local_addr(&self) -> SocketAddr {
        self.local_addr
    }

    /// Ranks registered now.
    pub fn rows(&self) -> usize {
        self.shared.table().rows()
    }

    /// The table's counters.
    pub fn stats(&self) -> TableStats {
        self.shared.table().stats()
    }

    /// Stops listening, lets requests under way finish for a short time, and ends the thread.
    pub fn shutdown(mut self) {
        self.stop_and_join();
    }

    fn stop_and_join(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Drop for BootstrapServer {
    fn drop(&mut self) {
        self.stop_and_join();
    }
}

impl std::fmt::Debug for BootstrapServer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BootstrapServer").field("local_addr", &self.local_addr).finish_non_exhaustive()
    }
}

fn listen(addrs: &[SocketAddr]) -> io::Result<TcpListener> {
    let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
    for addr in addrs {
        let socket = if addr.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() };
        // A large backlog: every decode rank of a fleet may ask in the same second.
        let listener = socket.and_then(|socket| {
            socket.set_reuseaddr(true)?;
            socket.bind(*addr)?;
            socket.listen(4096)
        });
        match listener {
            Ok(listener) => return Ok(listener),
            Err(e) => last = e,
        }
    }
    Err(last)
}

/// The routes of an empty server, without a socket: what the fuzz targets call.
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub fn router(config: BootstrapConfig) -> Router {
    app(Arc::new(Shared {
        table: Mutex::new(RegistryTable::new(config.table)),
        clock: MonotonicClock::new(),
        max_body: config.max_body,
    }))
}

fn app(state: Arc<Shared>) -> Router {
    Router::new()
        .route("/health", get(health))
        .route("/route", any(route))
        .route("/register_dp_rank", post(register_dp_rank))
        .route("/query_dp_ranks", post(query_dp_ranks))
        .fallback(async || reply(404, TEXT, "404: Not Found"))
        .method_not_allowed_fallback(async || reply(405, TEXT, "405: Method Not Allowed"))
        .with_state(state)
}

async fn serve(listener: TcpListener, state: Arc<Shared>, routes: Router, stopped: oneshot::Receiver<()>) {
    let app = app(state).merge(routes);
    let (quiesce, quiesced) = oneshot::channel::<()>();
    let server = axum::serve(listener, app).with_graceful_shutdown(async {
        let _ = quiesced.await;
    });
    let stop = async {
        let _ = stopped.await;
        let _ = quiesce.send(());
        tokio::time::sleep(SHUTDOWN_GRACE).await;
    };
    tokio::select! {
        result = server => if let Err(error) = result {
            tracing::error!(%error, "the bootstrap server ended");
        },
        () = stop => {},
    }
}

fn reply(status: u16, content_type: &'static str, body: impl Into<Body>) -> Response {
    let mut response = Response::new(body.into());
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    response
}

fn ok() -> Response {
    reply(200, TEXT, "OK")
}

fn json(value: &impl Serialize) -> Response {
    match serde_json::to_vec(value) {
        Ok(body) => reply(200, JSON, body),
        Err(e) => trouble(&e.to_string()),
    }
}

/// 500 with the text of SGLang's HTTP library, which does not say why; the log does.
fn trouble(why: &str) -> Response {
    tracing::warn!(why, "bootstrap request refused with 500");
    reply(500, TEXT, "500 Internal Server Error\n\nServer got itself in trouble")
}

fn refused(error: &TableError) -> Response {
    reply(error.status(), TEXT, error.to_string())
}

fn bad_row(error: &RowError) -> Response {
    match error {
        RowError::Malformed(why) => trouble(why),
        RowError::Invalid { .. } => {
            tracing::warn!(%error, "bootstrap row refused");
            reply(400, TEXT, error.to_string())
        }
    }
}

async fn health() -> Response {
    ok()
}

async fn route(State(state): State<Arc<Shared>>, request: Request) -> Response {
    match *request.method() {
        Method::PUT => match read_body(request.into_body(), state.max_body).await {
            Ok(body) => put_route(&state, &body),
            Err(error) => error.into(),
        },
        Method::GET => get_route(&state, request.uri().query().unwrap_or("")),
        // Its content type is what 0.5.23 sends.
        _ => reply(405, JSON, "Method not allowed"),
    }
}

fn put_route(state: &Shared, body: &[u8]) -> Response {
    let row = match PrefillRow::from_json(body) {
        Ok(row) => row,
        Err(error) => return bad_row(&error),
    };
    let result = state.table().register(state.now(), &row);
    let (key, rank_ip, rank_port) = (row.key(), &row.rank_ip, row.rank_port);
    match result {
        Ok(Registered::New | Registered::Same) => {
            tracing::info!(?key, rank_ip, rank_port, "prefill rank registered");
        }
        Ok(Registered::Replaced { old }) => {
            tracing::warn!(?key, rank_ip, rank_port, ?old, "prefill rank registered anew, its old address is dropped");
        }
        Ok(Registered::TookOver { dropped_rows }) => {
            tracing::warn!(?key, rank_ip, dropped_rows, "a restarted prefill server replaced the old one");
        }
        Err(error) => {
            tracing::warn!(?key, rank_ip, rank_port, %error, "prefill rank refused");
            return refused(&error);
        }
    }
    ok()
}

fn get_route(state: &Shared, query: &str) -> Response {
    let mut numbers = [0i128; 4];
    let keys = ["prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"];
    let values = keys.map(|key| query_value(query, key).filter(|v| !v.is_empty()));
    if values.iter().any(Option::is_none) {
        return reply(400, TEXT, "Missing inputs for bootstrap server.");
    }
    for ((number, value), key) in numbers.iter_mut().zip(values.iter().flatten()).zip(keys) {
        match coerce::int_from_str(value) {
            Some(n) => *number = n,
            None => return trouble(&format!("{key} is not a number")),
        }
    }
    let table = state.table();
    let [dp, cp, tp, pp] = numbers;
    if numbers == [-1; 4] {
        table.parallel_info().map_or_else(|e| refused(&e), json)
    } else {
        table.rank_address(dp, cp, tp, pp).map_or_else(|e| refused(&e), json)
    }
}

async fn register_dp_rank(State(state): State<Arc<Shared>>, request: Request) -> Response {
    let body = match read_body(request.into_body(), state.max_body).await {
        Ok(body) => body,
        Err(error) => return error.into(),
    };
    let entry = match RegisterDpRank::from_json(&body) {
        Ok(entry) => entry,
        Err(error) => return bad_row(&error),
    };
    let result = state.table().register_dp_rank(state.now(), entry.bootstrap_room, entry.dp_rank);
    result.map_or_else(|e| refused(&e), |()| ok())
}

async fn query_dp_ranks(State(state): State<Arc<Shared>>, request: Request) -> Response {
    let body = match read_body(request.into_body(), state.max_body).await {
        Ok(body) => body,
        Err(error) => return error.into(),
    };
    let query = match QueryDpRanks::from_json(&body) {
        Ok(query) => query,
        Err(error) => return bad_row(&error),
    };
    let known = state.table().query_dp_ranks(state.now(), &query.bootstrap_rooms);
    let map: serde_json::Map<_, _> = known.into_iter().map(|(room, rank)| (room.to_string(), rank.into())).collect();
    json(&map)
}

/// Why a body was not read.
enum BodyError {
    Broken,
    TooLarge(usize),
    TooSlow,
}

impl From<BodyError> for Response {
    fn from(error: BodyError) -> Self {
        match error {
            BodyError::Broken => reply(400, TEXT, "400: Bad Request"),
            BodyError::TooLarge(limit) => reply(413, TEXT, format!("Maximum request body size {limit} exceeded.")),
            BodyError::TooSlow => reply(408, TEXT, "408: Request Timeout"),
        }
    }
}

/// The body, at most `limit` bytes. What is over is read and thrown away (up to a bound), since a client that is still
/// writing would otherwise see a reset connection instead of the 413.
async fn read_body(mut body: Body, limit: usize) -> Result<Vec<u8>, BodyError> {
    let read = async {
        let (mut bytes, mut total) = (Vec::new(), 0usize);
        while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
            let Ok(data) = frame.map_err(|_| BodyError::Broken)?.into_data() else { continue };
            total = total.saturating_add(data.len());
            if total <= limit {
                bytes.extend_from_slice(&data);
            } else if total > limit.saturating_mul(8) {
                break;
            } else {
                bytes = Vec::new();
            }
        }
        if total > limit { Err(BodyError::TooLarge(limit)) } else { Ok(bytes) }
    };
    tokio::time::timeout(BODY_TIMEOUT, read).await.unwrap_or(Err(BodyError::TooSlow))
}

/// The first value of `key` in a query string, decoded.
fn query_value(query: &str, key: &str) -> Option<String> {
    query.split('&').find_map(|pair| {
        let (k, v) = pair.split_once('=').unwrap_or((pair, ""));
        (decode(k) == key).then(|| decode(v))
    })
}

/// Form decoding: `+` is a space, `%41` a byte.
fn decode(text: &str) -> String {
    let hex = |b: Option<&u8>| b.and_then(|b| char::from(*b).to_digit(16));
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        at += 1;
        match (byte, hex(bytes.get(at)), hex(bytes.get(at + 1))) {
            (b'+', ..) => out.push(b' '),
            (b'%', Some(high), Some(low)) => {
                out.push((high * 16 + low) as u8);
                at += 2;
            }
            _ => out.push(byte),
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_strings_are_decoded() {
        assert_eq!(query_value("a=1&b=%2d1&c=+2%20&a=3", "a").as_deref(), Some("1"));
        assert_eq!(query_value("a=1&b=%2d1", "b").as_deref(), Some("-1"));
        assert_eq!(query_value("c=+2%20", "c").as_deref(), Some(" 2 "));
        assert_eq!(query_value("a=%zz%", "a").as_deref(), Some("%zz%"));
        assert_eq!(query_value("a", "a").as_deref(), Some(""));
        assert_eq!(query_value("a=1", "b"), None);
    }
}
