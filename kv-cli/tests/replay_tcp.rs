//! Whole runs of the program over the embedded transport, ranks as processes.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::io::Write as _;
use std::process::Command;
use std::time::Duration;

use kv_cli::driver::fleet::{Fleet, FleetEvent, WorkerId};
use kv_cli::driver::protocol::{
    BootstrapAt, FetchRoom, FilledPage, FromWorker, Role, RoomEnd, ServeRoom, TcpPath, ToWorker, WorkerConfig,
};
use kv_cli::model::{KvKind, ModelSpec};
use kv_cli::pattern::{PageSource, Pattern};
use kv_cli::shape::{Rank, Shape};

/// A model small enough for a debug build: 4 layers, 4 KV heads of 16 values.
const CONFIG: &str =
    r#"{"name":"tiny","num_hidden_layers":4,"num_key_value_heads":4,"head_dim":16,"dtype":"bfloat16"}"#;
const MLA: &str =
    r#"{"name":"tiny-mla","num_hidden_layers":4,"kv_lora_rank":48,"qk_rope_head_dim":16,"dtype":"bfloat16"}"#;

fn replay(config: &str, args: &[&str]) -> serde_json::Value {
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    file.write_all(config.as_bytes()).unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_kvt"))
        .args(["replay", "--json", "--pool-mib", "16", "--model", file.path().to_str().unwrap()])
        .args(args)
        .output()
        .unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let last = stdout.lines().last().unwrap_or_else(|| panic!("no output: {stderr}"));
    let report: serde_json::Value = serde_json::from_str(last).unwrap();
    assert_eq!(out.status.success(), report["ok"] == true, "{stderr}");
    assert_eq!(report["ok"], true, "{report}\n{stderr}");
    assert_eq!((&report["failed"], &report["corrupt"]), (&0.into(), &0.into()));
    report
}

#[test]
fn every_byte_of_a_trace_arrives_over_several_ranks() {
    let one = replay(CONFIG, &["--requests", "6"]);
    let many = replay(CONFIG, &["--requests", "6", "--prefill", "tp=2,pp=2", "--decode", "tp=2,pp=2"]);
    assert_eq!((&one["rooms"], &many["rooms"]), (&6.into(), &6.into()));
    assert_eq!(one["bytes"], many["bytes"], "a shape moves no byte more");
    assert!(one["prefix_tokens"].as_u64().unwrap() > 0 && one["fixed_us"].as_u64().unwrap() > 0, "{one}");
}

#[test]
fn mla_and_the_sglang_pattern() {
    replay(MLA, &["--requests", "4", "--concurrency", "2", "--pages", "ordered"]);
    let shared = ["--pattern", "sglang", "--share-src", "--trace", "synthetic:tokens=1024,shared", "--requests", "4"];
    let report = replay(MLA, &shared);
    assert_eq!(report["prefix_tokens"], 0);
}

const POOL_PAGES: u32 = 64;

fn config(role: Role, bootstrap: BootstrapAt) -> WorkerConfig {
    WorkerConfig {
        role,
        transport: "tcp".into(),
        model: ModelSpec {
            name: "tiny".into(),
            layers: 4,
            kv: KvKind::Mha { kv_heads: 4, head_dim: 16 },
            value_bytes: 2,
            page_tokens: 64,
        },
        shape: Shape::default(),
        rank: Rank::default(),
        pool_pages: POOL_PAGES,
        pattern: Pattern::Keyed { seed: 5 },
        bootstrap,
        host: "127.0.0.1".into(),
        tcp_path: TcpPath::Auto,
        heartbeat_s: 5,
    }
}

fn spawn(fleet: &mut Fleet, role: Role, bootstrap: BootstrapAt) -> (WorkerId, Option<String>) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvt"));
    command.args([role.to_string().as_str(), "--worker"]);
    let id = fleet.spawn_command(command, config(role, bootstrap)).unwrap();
    match expect(fleet, |e| matches!(e, FleetEvent::From(w, FromWorker::Ready { .. }) if *w == id)) {
        FleetEvent::From(_, FromWorker::Ready { bootstrap, .. }) => (id, bootstrap),
        other => panic!("{other:?}"),
    }
}

/// The first event that is wanted; a minute is far above every timeout that matters here.
fn expect(fleet: &mut Fleet, wanted: impl Fn(&FleetEvent) -> bool) -> FleetEvent {
    loop {
        match fleet.next(Duration::from_secs(60)) {
            Some(event) if wanted(&event) => return event,
            Some(FleetEvent::From(_, FromWorker::Error { what, hint })) => panic!("{what}; {hint}"),
            Some(_) => {}
            None => panic!("no such event"),
        }
    }
}

fn end_of(fleet: &mut Fleet, worker: WorkerId, room: u64) -> RoomEnd {
    let of_room = |e: &FleetEvent| matches!(e, FleetEvent::From(w, FromWorker::Room { room: r, .. }) if (*w, *r) == (worker, room));
    match expect(fleet, of_room) {
        FleetEvent::From(_, FromWorker::Room { end, .. }) => end,
        other => panic!("{other:?}"),
    }
}

/// `kill -9` of prefill while decode waits for it: the room fails with a named reason; a new prefill on the same address
/// serves new requests without a restart of decode.
#[test]
fn decode_outlives_a_killed_prefill() {
    let mut fleet = Fleet::new();
    let (prefill, at) = spawn(&mut fleet, Role::Prefill, BootstrapAt::Serve("127.0.0.1:0".into()));
    let at = at.unwrap();
    let (decode, _) = spawn(&mut fleet, Role::Decode, BootstrapAt::Connect(at.clone()));
    let pages: Vec<u32> = (0..8).collect();
    let fetch = |room| ToWorker::Fetch {
        rooms: vec![FetchRoom { room, prefix_tokens: 0, pages: pages.clone() }],
        concurrency: 1,
    };
    let content: Vec<_> =
        pages.iter().map(|&page| FilledPage { page, source: PageSource { id: 3, first_token: page * 64 } }).collect();
    let serve = |fleet: &mut Fleet, prefill, room| {
        fleet.send(prefill, &ToWorker::Fill { pages: content.clone() }).unwrap();
        let rooms = vec![ServeRoom { room, pages: pages.clone() }];
        fleet.send(prefill, &ToWorker::Serve { rooms, chunk_pages: 3 }).unwrap();
    };
    let verified = |fleet: &mut Fleet, room| {
        fleet.send(decode, &ToWorker::Verify { room, pages: content.clone() }).unwrap();
        match expect(fleet, |e| matches!(e, FleetEvent::From(_, FromWorker::Verified { .. }))) {
            FleetEvent::From(_, FromWorker::Verified { pages, corrupt, .. }) => assert_eq!((pages, corrupt), (8, 0)),
            other => panic!("{other:?}"),
        }
    };

    serve(&mut fleet, prefill, 100);
    fleet.send(decode, &fetch(100)).unwrap();
    assert!(matches!(end_of(&mut fleet, decode, 100), RoomEnd::Success { pages: 8, .. }));
    verified(&mut fleet, 100);

    // Nobody serves room 101, so decode waits when prefill dies.
    fleet.send(decode, &fetch(101)).unwrap();
    let pid = fleet.process_id(prefill).unwrap().to_string();
    assert!(Command::new("kill").args(["-9", &pid]).status().unwrap().success());
    let died = expect(&mut fleet, |e| matches!(e, FleetEvent::Died(..)));
    assert!(matches!(&died, FleetEvent::Died(id, how) if *id == prefill && how.contains("signal: 9")), "{died:?}");
    match end_of(&mut fleet, decode, 101) {
        RoomEnd::Failed { reason } => assert!(reason.contains(&at) || reason.contains("prefill"), "{reason}"),
        other => panic!("{other:?}"),
    }

    let (prefill, again) = spawn(&mut fleet, Role::Prefill, BootstrapAt::Serve(at.clone()));
    assert_eq!(again, Some(at));
    serve(&mut fleet, prefill, 102);
    fleet.send(decode, &fetch(102)).unwrap();
    assert!(matches!(end_of(&mut fleet, decode, 102), RoomEnd::Success { pages: 8, .. }));
    verified(&mut fleet, 102);
}
