//! The registry client and the directory against real servers over loopback.
#![cfg(feature = "bootstrap")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use kv_core::bootstrap::client::ClientTimeouts;
use kv_core::bootstrap::{
    BootstrapServer, HttpRegistry, ParallelInfo, PrefillRow, RankAddress, RankKey, RegistrationConfig, Registry,
    RegistryError, register_prefill_rank,
};
use kv_core::directory::{
    DecodeProfile, Directory, DirectoryConfig, DirectoryEvent, DirectoryRequest, HeartbeatConfig, HttpDirectory,
    PrefillPeers,
};
use kv_core::topology::DecodeRank;
use kv_core::{Limits, Room};

/// A deadline against hangs, not a measurement.
const PATIENCE: Duration = Duration::from_secs(60);

fn row(tp: (u32, u32), port: u16) -> PrefillRow {
    PrefillRow {
        attn_tp_size: tp.0,
        attn_tp_rank: tp.1,
        attn_cp_size: 1,
        attn_cp_rank: 0,
        attn_dp_size: 1,
        attn_dp_rank: 0,
        pp_size: 1,
        pp_rank: 0,
        system_dp_size: 1,
        system_dp_rank: 0,
        rank_ip: "10.0.0.7".into(),
        rank_port: port,
        page_size: 16,
        kv_cache_dtype: "bfloat16".into(),
        kv_layout: None,
        dsv41_spec_layout: None,
        load_balance_method: "follow_bootstrap_room".into(),
        enable_dsa_cache_layer_split: false,
        enable_kv_cache_sharding: false,
        prefill_http_port: None,
        decode_allocation_policy: "early".into(),
        ext: None,
    }
}

fn server() -> BootstrapServer {
    BootstrapServer::bind("127.0.0.1", 0, Limits::default()).unwrap()
}

fn register(server: &BootstrapServer, row: &PrefillRow) {
    let config = RegistrationConfig::new(&server.local_addr().ip().to_string(), server.local_addr().port());
    register_prefill_rank(&config, row).unwrap();
}

/// Fast clocks, so that tests do not sleep.
fn config() -> DirectoryConfig {
    DirectoryConfig {
        min_refetch: Duration::from_millis(5),
        dp_query_interval: Duration::from_millis(5),
        ..DirectoryConfig::decode(DecodeProfile::new(DecodeRank::default(), 16, "bfloat16"))
    }
}

/// Counts what goes over the wire.
struct Counting {
    inner: HttpRegistry,
    calls: Mutex<HashMap<&'static str, usize>>,
}

impl Counting {
    fn new() -> Arc<Self> {
        Arc::new(Self { inner: HttpRegistry::new().unwrap(), calls: Mutex::default() })
    }

    fn count(&self, what: &'static str) {
        *self.calls.lock().unwrap().entry(what).or_default() += 1;
    }

    fn counted(&self, what: &str) -> usize {
        self.calls.lock().unwrap().get(what).copied().unwrap_or(0)
    }
}

#[async_trait]
impl Registry for Counting {
    async fn register(&self, addr: &str, row: &PrefillRow) -> Result<(), RegistryError> {
        self.inner.register(addr, row).await
    }
    async fn parallel_info(&self, addr: &str) -> Result<ParallelInfo, RegistryError> {
        self.count("info");
        self.inner.parallel_info(addr).await
    }
    async fn rank_address(&self, addr: &str, key: RankKey) -> Result<RankAddress, RegistryError> {
        self.count("address");
        self.inner.rank_address(addr, key).await
    }
    async fn register_dp_rank(&self, addr: &str, room: Room, dp_rank: u32) -> Result<(), RegistryError> {
        self.inner.register_dp_rank(addr, room, dp_rank).await
    }
    async fn query_dp_ranks(&self, addr: &str, rooms: &[Room]) -> Result<Vec<(Room, u32)>, RegistryError> {
        self.count("query");
        self.inner.query_dp_ranks(addr, rooms).await
    }
    async fn health(&self, addr: &str) -> Result<(), RegistryError> {
        self.count("health");
        self.inner.health(addr).await
    }
}

struct Bench {
    directory: HttpDirectory,
    events: mpsc::Receiver<DirectoryEvent>,
    registry: Arc<Counting>,
}

impl Bench {
    fn new(config: DirectoryConfig) -> Self {
        let (sink, events) = mpsc::channel();
        let sink = Mutex::new(sink);
        let registry = Counting::new();
        let sink = Box::new(move |event| drop(sink.lock().unwrap().send(event)));
        let directory = HttpDirectory::with_registry(config, registry.clone(), sink).unwrap();
        Self { directory, events, registry }
    }

    fn ask(&mut self, addr: &str, room: u64) {
        let room = Room::new(room).unwrap();
        let bootstrap_addr = addr.to_owned();
        self.directory.request(DirectoryRequest::Peers {
            token: room.get(),
            room,
            bootstrap_addr,
            prefill_dp_rank: None,
        });
    }

    /// Waits until `what` was asked `times` times.
    fn until(&self, what: &str, times: usize) {
        let deadline = Instant::now() + PATIENCE;
        while self.registry.counted(what) < times {
            assert!(Instant::now() < deadline, "{what} was asked {} times", self.registry.counted(what));
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn event(&self) -> DirectoryEvent {
        self.events.recv_timeout(PATIENCE).unwrap()
    }

    fn answer(&self) -> Result<Arc<PrefillPeers>, String> {
        match self.event() {
            DirectoryEvent::Peers { result, .. } => result,
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn cat_f75_a_thousand_rooms_to_one_new_peer_fetch_its_topology_once() {
    let server = server();
    register(&server, &row((2, 0), 7000));
    register(&server, &row((2, 1), 7001));
    let mut bench = Bench::new(config());
    let addr = server.local_addr().to_string();
    (1..=1000).for_each(|room| bench.ask(&addr, room));
    for _ in 1..=1000 {
        let peers = bench.answer().unwrap();
        let ports: Vec<_> = peers.records.iter().map(|r| r.endpoint.port()).collect();
        assert_eq!((ports, peers.required_prefill_response_num), (vec![7000, 7001], 2));
    }
    assert_eq!((bench.registry.counted("info"), bench.registry.counted("address")), (1, 2));
}

#[test]
fn cat_f66_ipv6_loopback_server_and_client() {
    // A machine without IPv6 cannot show this; say so instead of passing silently.
    if TcpListener::bind("[::1]:0").is_err() {
        eprintln!("SKIPPED: this machine has no IPv6 loopback");
        return;
    }
    let server = BootstrapServer::bind("[::1]", 0, Limits::default()).unwrap();
    let port = server.local_addr().port();
    assert!(server.local_addr().is_ipv6());
    // A wildcard host registers at the loopback address of its own family.
    register_prefill_rank(&RegistrationConfig::new("::", port), &row((1, 0), 7000)).unwrap();
    let mut bench = Bench::new(config());
    // Once plain, once with a zone, which no URL can hold.
    for (room, addr) in [(1, format!("[::1]:{port}")), (2, format!("[::1%1]:{port}"))] {
        bench.ask(&addr, room);
        let peers = bench.answer().unwrap();
        assert_eq!((peers.pool_key.clone(), peers.records[0].endpoint.port()), (format!("{addr}_0_0_0"), 7000));
    }
}

#[test]
fn a_port_in_use_is_one_clear_error() {
    let first = server();
    let error = BootstrapServer::bind("127.0.0.1", first.local_addr().port(), Limits::default()).unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(&first.local_addr().to_string()) && text.contains("--disaggregation-bootstrap-port"),
        "{text}"
    );
    let port = first.local_addr().port();
    first.shutdown();
    BootstrapServer::bind("127.0.0.1", port, Limits::default()).expect("the port is free again");
}

#[test]
fn an_unreachable_bootstrap_names_address_attempts_time_and_what_to_do() {
    let gone = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut bench = Bench::new(DirectoryConfig { max_attempts: 3, ..config() });
    bench.ask(&gone, 1);
    let reason = bench.answer().unwrap_err();
    for part in [gone.as_str(), "3 attempts in", "refused", "--disaggregation-bootstrap-port"] {
        assert!(reason.contains(part), "{reason}");
    }
    assert_eq!(bench.registry.counted("info"), 3);
}

#[test]
fn a_server_that_becomes_ready_serves_the_rooms_that_wait() {
    let server = server();
    register(&server, &row((2, 0), 7000));
    let mut bench = Bench::new(DirectoryConfig { max_attempts: u32::MAX, ..config() });
    bench.ask(&server.local_addr().to_string(), 1);
    bench.until("info", 3);
    register(&server, &row((2, 1), 7001));
    assert_eq!(bench.answer().unwrap().records.len(), 2);
}

#[test]
fn r_d7_a_server_that_died_is_reported_and_its_successor_found() {
    let first = server();
    register(&first, &row((1, 0), 7000));
    let port = first.local_addr().port();
    let addr = first.local_addr().to_string();
    let heartbeat = HeartbeatConfig { interval: HeartbeatConfig::MIN_INTERVAL, max_failure: 1 };
    let mut bench = Bench::new(DirectoryConfig { heartbeat, ..config() });
    bench.ask(&addr, 1);
    let old = bench.answer().unwrap();
    first.shutdown();
    assert_eq!(
        bench.event(),
        DirectoryEvent::NodeLost {
            bootstrap_addr: addr.clone(),
            reason: format!("Lost connection with prefill instance (bootstrap_addr: {addr})"),
        }
    );
    let probes = bench.registry.counted("health");
    let second = BootstrapServer::bind("127.0.0.1", port, Limits::default()).unwrap();
    register(&second, &row((1, 0), 7100));
    bench.ask(&addr, 2);
    let new = bench.answer().unwrap();
    assert_eq!((new.pool_key.as_str(), new.records[0].endpoint.port()), (old.pool_key.as_str(), 7100));
    assert_ne!(new.generation, old.generation);
    assert_eq!(bench.registry.counted("health"), probes, "a lost server is not probed (F53)");
}

#[test]
fn rooms_are_served_by_the_dp_rank_that_claims_them() {
    let server = server();
    for dp in 0..2 {
        let row = row((1, 0), 7000 + dp as u16);
        let row = PrefillRow { attn_dp_size: 2, attn_dp_rank: dp, load_balance_method: "round_robin".into(), ..row };
        register(&server, &row);
    }
    let addr = server.local_addr().to_string();
    let mut decode = Bench::new(config());
    decode.ask(&addr, 8);
    decode.until("query", 2);
    let mut prefill = Bench::new(DirectoryConfig::prefill());
    prefill.directory.request(DirectoryRequest::RegisterDpRank {
        token: 3,
        bootstrap_addr: addr,
        room: Room::new(8).unwrap(),
        dp_rank: 1,
    });
    assert_eq!(prefill.event(), DirectoryEvent::DpRankRegistered { token: 3, result: Ok(()) });
    assert_eq!(decode.answer().unwrap().records[0].endpoint.port(), 7001);
}

#[test]
fn cat_f72_an_incompatible_prefill_fails_the_room_by_name() {
    let server = server();
    register(&server, &PrefillRow { page_size: 32, ..row((1, 0), 7000) });
    let mut bench = Bench::new(config());
    bench.ask(&server.local_addr().to_string(), 1);
    let reason = bench.answer().unwrap_err();
    assert!(reason.contains("page_size is 32 on prefill and 16 on decode"), "{reason}");
}

/// R-A4 on the registering side: the error a prefill operator sees names the field and both values.
#[test]
fn r_a4_a_refused_registration_says_why_and_was_tried_as_often_as_asked() {
    let server = server();
    register(&server, &row((2, 0), 7000));
    let mut config = RegistrationConfig::new("127.0.0.1", server.local_addr().port());
    config.attempts = 1;
    let bad = PrefillRow { page_size: 64, ..row((2, 1), 7001) };
    let text = register_prefill_rank(&config, &bad).unwrap_err().to_string();
    for part in [&*server.local_addr().to_string(), "page_size is 16", "64 in the row", "tp_rank=1"] {
        assert!(text.contains(part), "{text}");
    }
    // From inside a runtime, where blocking calls usually panic.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { register_prefill_rank(&config, &row((2, 1), 7001)) }).unwrap();
    assert_eq!((server.rows(), server.stats().refused), (2, 1));
}

#[test]
fn registration_is_tried_again_until_the_server_answers() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let refusals = Arc::new(AtomicUsize::new(0));
    let seen = Arc::clone(&refusals);
    let server = std::thread::spawn(move || {
        for answer in
            ["HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK"]
        {
            let (mut stream, _) = listener.accept().unwrap();
            let mut buffer = [0; 4096];
            let _ = stream.read(&mut buffer).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
            seen.fetch_add(1, Ordering::SeqCst);
        }
    });
    let config = RegistrationConfig { jitter: 0.0, ..RegistrationConfig::new("0.0.0.0", port) };
    register_prefill_rank(&config, &row((1, 0), 7000)).unwrap();
    server.join().unwrap();
    assert_eq!(refusals.load(Ordering::SeqCst), 2);
}

#[test]
fn answers_that_make_no_sense_are_typed_errors() {
    type Expected = fn(&RegistryError) -> bool;
    let answers: [(&str, Expected); 6] = [
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{]", |e| matches!(e, RegistryError::Malformed(_))),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", |e| matches!(e, RegistryError::Malformed(_))),
        ("HTTP/1.1 200 OK\r\nContent-Length: 20\r\n\r\n{}", |e| matches!(e, RegistryError::Unreachable(_))),
        ("HTTP/1.1 302 Found\r\nLocation: http://192.0.2.1/\r\nContent-Length: 0\r\n\r\n", |e| {
            matches!(e, RegistryError::Refused { status: 302, .. })
        }),
        ("not HTTP at all\r\n\r\n", |e| matches!(e, RegistryError::Unreachable(_))),
        ("", |e| matches!(e, RegistryError::Unreachable(_))),
    ];
    for (answer, expected) in answers {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap().to_string();
        let server = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.read(&mut [0; 4096]).unwrap();
            stream.write_all(answer.as_bytes()).unwrap();
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let error = runtime.block_on(async { HttpRegistry::new().unwrap().parallel_info(&addr).await }).unwrap_err();
        server.join().unwrap();
        assert!(expected(&error), "{answer:?}: {error:?}");
    }
}

#[test]
fn a_silent_server_runs_into_the_time_limit() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let short = Duration::from_millis(50);
    let timeouts = ClientTimeouts { request: short, health_connect: short, health_read: short };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let registry = HttpRegistry::with_timeouts(timeouts).unwrap();
        let error = registry.parallel_info(&addr).await.unwrap_err();
        assert_eq!(error, RegistryError::Unreachable("no answer within 0.05 s".into()));
        assert!(matches!(registry.health(&addr).await, Err(RegistryError::Unreachable(_))));
    });
}

/// A caller is never blocked: what does not fit, or comes too late, is answered with an error.
#[test]
fn a_directory_that_cannot_take_a_request_answers_at_once() {
    let bench = Bench::new(config());
    let mut handle = bench.directory.handle();
    let events = bench.events;
    drop(bench.directory);
    let room = Room::new(1).unwrap();
    handle.request(DirectoryRequest::Peers { token: 1, room, bootstrap_addr: "p:1".into(), prefill_dp_rank: None });
    let want = Err("Could not ask bootstrap_addr: p:1: the directory has ended".to_owned());
    assert_eq!(events.recv_timeout(PATIENCE).unwrap(), DirectoryEvent::Peers { token: 1, result: want });
}

#[test]
fn a_directory_that_is_full_answers_at_once() {
    let limits = Limits { max_rooms: 1, ..Limits::default() };
    let (sink, events) = mpsc::channel();
    let (gate, closed) = mpsc::channel::<()>();
    let (sink, closed) = (Mutex::new(sink), Mutex::new(closed));
    let mut directory = HttpDirectory::new(
        DirectoryConfig { limits, ..config() },
        Box::new(move |event| {
            sink.lock().unwrap().send((std::thread::current().name() == Some("kv-directory"), event)).unwrap();
            if std::thread::current().name() == Some("kv-directory") {
                // Holds the directory's thread until the test ends.
                let _ = closed.lock().unwrap().recv();
            }
        }),
    )
    .unwrap();
    let mut ask = |token| {
        let room = Room::new(token).unwrap();
        directory.request(DirectoryRequest::Peers { token, room, bootstrap_addr: "bad".into(), prefill_dp_rank: None });
    };
    ask(1);
    let (from_directory, _) = events.recv_timeout(PATIENCE).unwrap();
    assert!(from_directory);
    ask(2);
    ask(3);
    let want = Err("Could not ask bootstrap_addr: bad: 1 requests are queued already".to_owned());
    assert_eq!(events.recv_timeout(PATIENCE).unwrap(), (false, DirectoryEvent::Peers { token: 3, result: want }));
    drop(gate);
}
