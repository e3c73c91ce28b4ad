//! The HTTP client of a bootstrap server, SGLang's or ours (protocol 2.5).

use std::fmt::Write as _;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Client, RequestBuilder, Response, StatusCode, header};
use serde::Serialize;

use super::address::{AddressError, join_host_port, registration_addr, split_host_port};
use super::types::{
    ParallelInfo, PrefillRow, QueryDpRanks, RankAddress, RankKey, RegisterDpRank, Registry, RegistryError,
    dp_ranks_from_json,
};
use crate::ids::Room;

/// Every request but the health check, from connecting to the last byte.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// The health check: connecting.
pub const HEALTH_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The health check: waiting for each piece of the answer.
pub const HEALTH_READ_TIMEOUT: Duration = Duration::from_secs(3);
/// How often a prefill rank tries to register.
pub const REGISTRATION_ATTEMPTS: u32 = 5;
/// Names of link-local addresses end so inside URLs, which cannot hold a zone.
const ZONE_SUFFIX: &str = ".ipv6-zone.invalid";
/// Largest answer read, bytes.
const MAX_ANSWER: usize = 8 << 20;
/// Of a refusal's text, this much is kept.
const MAX_DETAIL: usize = 1024;

/// Time limits of an [`HttpRegistry`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientTimeouts {
    /// Whole request.
    pub request: Duration,
    /// Health check: connecting.
    pub health_connect: Duration,
    /// Health check: waiting for a piece of the answer.
    pub health_read: Duration,
}

impl Default for ClientTimeouts {
    fn default() -> Self {
        Self { request: REQUEST_TIMEOUT, health_connect: HEALTH_CONNECT_TIMEOUT, health_read: HEALTH_READ_TIMEOUT }
    }
}

/// A [`Registry`] over HTTP: keep-alive connections, no proxy from the environment, no redirects.
///
/// Connections belong to the tokio runtime that opened them: use one `HttpRegistry` per runtime.
#[derive(Clone, Debug)]
pub struct HttpRegistry {
    client: Client,
    health: Client,
    timeouts: ClientTimeouts,
}

impl HttpRegistry {
    /// A client with SGLang's time limits.
    ///
    /// # Errors
    /// [`RegistryError::Unreachable`] when the HTTP library cannot start.
    pub fn new() -> Result<Self, RegistryError> {
        Self::with_timeouts(ClientTimeouts::default())
    }

    /// A client with time limits of one's own.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn with_timeouts(timeouts: ClientTimeouts) -> Result<Self, RegistryError> {
        let base = || {
            Client::builder()
                .no_proxy()
                .redirect(reqwest::redirect::Policy::none())
                .dns_resolver(Arc::new(SystemResolver))
                .tcp_nodelay(true)
        };
        let build = |b: reqwest::ClientBuilder| {
            b.build().map_err(|e| RegistryError::Unreachable(format!("the HTTP client cannot start: {}", causes(&e))))
        };
        let client = build(base().timeout(timeouts.request))?;
        let health = build(base().connect_timeout(timeouts.health_connect).read_timeout(timeouts.health_read))?;
        Ok(Self { client, health, timeouts })
    }

    async fn send(&self, request: RequestBuilder) -> Result<Vec<u8>, RegistryError> {
        let response = request.send().await.map_err(|e| self.unreachable(&e))?;
        let status = response.status();
        let body = self.read(response).await?;
        if status == StatusCode::OK {
            return Ok(body);
        }
        let detail: String = String::from_utf8_lossy(&body).chars().take(MAX_DETAIL).collect();
        Err(match status {
            StatusCode::SERVICE_UNAVAILABLE => RegistryError::NotReady(detail),
            StatusCode::NOT_FOUND => RegistryError::NotFound(detail),
            _ => RegistryError::Refused { status: status.as_u16(), detail },
        })
    }

    async fn read(&self, mut response: Response) -> Result<Vec<u8>, RegistryError> {
        let mut body = Vec::new();
        while let Some(piece) = response.chunk().await.map_err(|e| self.unreachable(&e))? {
            if body.len() + piece.len() > MAX_ANSWER {
                return Err(RegistryError::Malformed(format!("the answer has more than {MAX_ANSWER} bytes")));
            }
            body.extend_from_slice(&piece);
        }
        Ok(body)
    }

    fn unreachable(&self, error: &reqwest::Error) -> RegistryError {
        RegistryError::Unreachable(if error.is_timeout() {
            format!("no answer within {} s", self.timeouts.request.as_secs_f32())
        } else {
            causes(error)
        })
    }

    fn get(&self, addr: &str, path: &str) -> Result<RequestBuilder, RegistryError> {
        let (url, host) = url(addr, path)?;
        Ok(self.client.get(url).header(header::HOST, host))
    }

    fn post<T: Serialize>(&self, addr: &str, path: &str, body: &T) -> Result<RequestBuilder, RegistryError> {
        let (url, host) = url(addr, path)?;
        Ok(self.client.post(url).header(header::HOST, host).json(body))
    }
}

/// An error with all its causes; the outermost alone says only "error sending request".
fn causes(error: &dyn std::error::Error) -> String {
    let mut text = String::new();
    let mut next = Some(error);
    while let Some(error) = next {
        let part = error.to_string();
        // reqwest's own line holds the URL, which the caller names already.
        if !part.starts_with("error sending request") && !text.contains(&part) {
            let _ = write!(text, "{}{part}", if text.is_empty() { "" } else { ": " });
        }
        next = error.source();
    }
    if text.is_empty() { error.to_string() } else { text }
}

/// (URL, `Host` header) for `addr`. A zone (`fe80::1%eth0`) has no place in a URL, so such a host travels to the
/// resolver inside a made-up name; the header drops it, since it means something on this machine only.
fn url(addr: &str, path: &str) -> Result<(String, String), RegistryError> {
    let bad = |e: AddressError| RegistryError::Unreachable(e.to_string());
    let (host, port) = split_host_port(addr).map_err(bad)?;
    let Some((plain, _)) = host.split_once('%') else {
        let authority = join_host_port(host, port);
        return Ok((format!("http://{authority}{path}"), authority));
    };
    let mut hidden = String::new();
    for (at, byte) in host.bytes().enumerate() {
        // Labels of a name have at most 63 characters.
        let dot = if at > 0 && at % 30 == 0 { "." } else { "" };
        let _ = write!(hidden, "{dot}{byte:02x}");
    }
    Ok((format!("http://{hidden}{ZONE_SUFFIX}:{port}{path}"), join_host_port(plain, port)))
}

/// The zoned address inside a made-up name.
fn hidden_zone(name: &str) -> Option<String> {
    let hex: String = name.strip_suffix(ZONE_SUFFIX)?.chars().filter(|c| *c != '.').collect();
    let byte = |at: usize| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
    let bytes: Option<Vec<u8>> = (0..hex.len()).step_by(2).map(byte).collect();
    String::from_utf8(bytes?).ok()
}

/// The system's resolver, for names of either family and for zones.
struct SystemResolver;

impl Resolve for SystemResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let host = hidden_zone(name.as_str()).unwrap_or_else(|| name.as_str().to_owned());
        Box::pin(async move {
            let addrs: Vec<SocketAddr> = tokio::net::lookup_host((host.as_str(), 0)).await?.collect();
            Ok(Box::new(addrs.into_iter()) as Addrs)
        })
    }
}

fn route_path(dp: i64, cp: i64, tp: i64, pp: i64) -> String {
    format!("/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}")
}

#[async_trait]
impl Registry for HttpRegistry {
    async fn register(&self, addr: &str, row: &PrefillRow) -> Result<(), RegistryError> {
        let (url, host) = url(addr, "/route")?;
        self.send(self.client.put(url).header(header::HOST, host).json(row)).await.map(drop)
    }

    async fn parallel_info(&self, addr: &str) -> Result<ParallelInfo, RegistryError> {
        let body = self.send(self.get(addr, &route_path(-1, -1, -1, -1))?).await?;
        ParallelInfo::from_json(&body).map_err(RegistryError::Malformed)
    }

    async fn rank_address(&self, addr: &str, key: RankKey) -> Result<RankAddress, RegistryError> {
        let path = route_path(key.dp.into(), key.cp.into(), key.tp.into(), key.pp.into());
        let body = self.send(self.get(addr, &path)?).await?;
        RankAddress::from_json(&body).map_err(RegistryError::Malformed)
    }

    async fn register_dp_rank(&self, addr: &str, room: Room, dp_rank: u32) -> Result<(), RegistryError> {
        let body = RegisterDpRank { bootstrap_room: room.get(), dp_rank };
        self.send(self.post(addr, "/register_dp_rank", &body)?).await.map(drop)
    }

    async fn query_dp_ranks(&self, addr: &str, rooms: &[Room]) -> Result<Vec<(Room, u32)>, RegistryError> {
        let body = QueryDpRanks { bootstrap_rooms: rooms.iter().map(|room| room.get()).collect() };
        let body = self.send(self.post(addr, "/query_dp_ranks", &body)?).await?;
        dp_ranks_from_json(&body).map_err(RegistryError::Malformed)
    }

    async fn health(&self, addr: &str) -> Result<(), RegistryError> {
        let (url, host) = url(addr, "/health")?;
        let response = self.health.get(url).header(header::HOST, host).send().await;
        let response = response.map_err(|e| RegistryError::Unreachable(causes(&e)))?;
        let status = response.status();
        // Read to the end, so that the connection can be used again.
        self.read(response).await?;
        match status {
            StatusCode::OK => Ok(()),
            _ => Err(RegistryError::Refused { status: status.as_u16(), detail: "health check".into() }),
        }
    }
}

/// How long a prefill rank sleeps after its `attempt`th try (from 0): `min(2^attempt, 30)` seconds, times 0.75 to 1.0.
/// `fraction` (0 to 1) spreads the ranks of one server; SGLang takes the fraction of its monotonic clock.
pub fn registration_backoff(attempt: u32, fraction: f64) -> Duration {
    let base = f64::from(1u32.checked_shl(attempt).unwrap_or(u32::MAX).min(30));
    let fraction = if fraction.is_finite() { fraction.clamp(0.0, 1.0) } else { 0.0 };
    Duration::from_secs_f64(base * (0.75 + 0.25 * fraction))
}

/// Where and how a prefill rank registers.
#[derive(Clone, Debug, PartialEq)]
pub struct RegistrationConfig {
    /// The server's listen host (`--host`); a wildcard means this machine.
    pub host: String,
    /// `--dist-init-addr` of a server on several nodes.
    pub dist_init_addr: Option<String>,
    /// `--disaggregation-bootstrap-port`.
    pub port: u16,
    /// How often to try.
    pub attempts: u32,
    /// Spreads the retries of many ranks, 0 to 1.
    pub jitter: f64,
    /// Limit of one try.
    pub timeout: Duration,
}

impl RegistrationConfig {
    /// SGLang's rules for this host and port.
    pub fn new(host: &str, port: u16) -> Self {
        Self {
            host: host.to_owned(),
            dist_init_addr: None,
            port,
            attempts: REGISTRATION_ATTEMPTS,
            jitter: 0.5,
            timeout: REQUEST_TIMEOUT,
        }
    }

    /// `host:port` of the server that is registered with.
    ///
    /// # Errors
    /// [`AddressError`].
    pub fn addr(&self) -> Result<String, AddressError> {
        registration_addr(&self.host, self.dist_init_addr.as_deref(), self.port)
    }
}

/// A rank could not register.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "prefill rank could not register with the bootstrap server {addr}, {attempts} attempts: {last}; no decode can find this rank"
)]
pub struct RegistrationError {
    /// Which server.
    pub addr: String,
    /// How often it was tried.
    pub attempts: u32,
    /// What happened last.
    pub last: RegistryError,
}

/// Registers `row` with up to `config.attempts` tries; blocks until done. Safe to call from inside a tokio runtime.
///
/// A refusal is tried again as well: a server that restarts with other sizes is let in when all its ranks have asked
/// (see [`table`](super::table)).
///
/// # Errors
/// [`RegistrationError`] with the last cause.
pub fn register_prefill_rank(config: &RegistrationConfig, row: &PrefillRow) -> Result<(), RegistrationError> {
    let fail = |addr: &str, attempts, last| RegistrationError { addr: addr.to_owned(), attempts, last };
    let addr = config.addr().map_err(|e| fail(&e.text, 0, RegistryError::Unreachable(e.to_string())))?;
    let work = || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|e| fail(&addr, 0, RegistryError::Unreachable(e.to_string())))?;
        let result = runtime.block_on(async {
            let timeouts = ClientTimeouts { request: config.timeout, ..ClientTimeouts::default() };
            let registry = HttpRegistry::with_timeouts(timeouts).map_err(|e| fail(&addr, 0, e))?;
            register_with_retries(&registry, &addr, row, config.attempts, config.jitter).await
        });
        // A name lookup that hangs must not hold the caller.
        runtime.shutdown_background();
        result
    };
    // A thread of its own, since blocking inside a caller's runtime is not allowed.
    let outcome = std::thread::scope(|scope| scope.spawn(work).join());
    outcome.unwrap_or_else(|_| Err(fail(&addr, 0, RegistryError::Unreachable("the registration thread died".into()))))
}

/// As [`register_prefill_rank`], over any [`Registry`], on the caller's runtime.
///
/// # Errors
/// [`RegistrationError`] with the last cause.
pub async fn register_with_retries(
    registry: &dyn Registry,
    addr: &str,
    row: &PrefillRow,
    attempts: u32,
    jitter: f64,
) -> Result<(), RegistrationError> {
    let attempts = attempts.max(1);
    let mut attempt = 0;
    loop {
        let last = match registry.register(addr, row).await {
            Ok(()) => return Ok(()),
            Err(e) => e,
        };
        tracing::warn!(addr, attempt, error = %last, "prefill rank could not register");
        attempt += 1;
        if attempt >= attempts {
            return Err(RegistrationError { addr: addr.to_owned(), attempts, last });
        }
        tokio::time::sleep(registration_backoff(attempt - 1, jitter)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_up_to_thirty_seconds() {
        let seconds = |attempt, fraction| registration_backoff(attempt, fraction).as_secs_f64();
        assert_eq!([0, 1, 2, 3, 4, 5, 31, 99].map(|i| seconds(i, 1.0)), [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]);
        assert_eq!([0, 1, 5].map(|i| seconds(i, 0.0)), [0.75, 1.5, 22.5]);
        assert_eq!((seconds(0, 0.5), seconds(0, 7.0), seconds(0, f64::NAN)), (0.875, 1.0, 0.75));
    }

    #[test]
    fn cat_f66_urls_of_every_host_form() {
        for (addr, want, host) in [
            ("10.0.0.7:8998", "http://10.0.0.7:8998/x", "10.0.0.7:8998"),
            ("[::1]:80", "http://[::1]:80/x", "[::1]:80"),
            ("p.example:1", "http://p.example:1/x", "p.example:1"),
            ("[fe80::1%e]:1", "http://666538303a3a312565.ipv6-zone.invalid:1/x", "[fe80::1]:1"),
        ] {
            assert_eq!(url(addr, "/x"), Ok((want.to_owned(), host.to_owned())), "{addr}");
        }
        let (long, _) = url("[fe80:1111:2222:3333:4444:5555:6666:7777%enp129s0f0np0]:1", "/").unwrap();
        let name = long.trim_start_matches("http://").trim_end_matches(":1/");
        assert!(name.split('.').all(|label| label.len() < 64), "{name}");
        assert_eq!(hidden_zone(name).as_deref(), Some("fe80:1111:2222:3333:4444:5555:6666:7777%enp129s0f0np0"));
        assert!(matches!(url("::1:80", "/"), Err(RegistryError::Unreachable(_))));
        assert_eq!(hidden_zone("p.example"), None);
    }
}
