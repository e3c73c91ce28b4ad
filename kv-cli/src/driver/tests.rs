//! Whole runs over the loopback engine: workers are threads.

use std::sync::Arc;
use std::time::Duration;

use crate::driver::fleet::{Fleet, FleetEvent};
use crate::driver::loopback::{Faults, Loopback};
use crate::driver::protocol::{BootstrapAt, FilledPage, FromWorker, Role, TcpPath, ToWorker, WorkerConfig};
use crate::driver::scheduler::{RunConfig, Scheduler};
use crate::model::{KvKind, ModelSpec};
use crate::pattern::{PageSource, Pattern};
use crate::plan_requests::{FIRST_ROOM, Plan, side_page_bytes};
use crate::pool::PageOrder;
use crate::report::Recorder;
use crate::shape::Shape;
use crate::trace::{TraceRequest, TraceSource};

const POOL_PAGES: u32 = 64;

fn model() -> ModelSpec {
    let kv = KvKind::Mha { kv_heads: 2, head_dim: 8 };
    ModelSpec { name: "tiny".into(), layers: 3, kv, value_bytes: 2, page_tokens: 64 }
}

fn config(pattern: Pattern, shape: Shape) -> RunConfig {
    RunConfig {
        page_tokens: 64,
        pool_pages: POOL_PAGES,
        side_page_bytes: side_page_bytes(&model(), shape).unwrap(),
        order: PageOrder::Shuffled,
        seed: 3,
        pattern,
        share_src: false,
        prefix_cache: true,
        concurrency: 3,
        probe: true,
        stall: Duration::from_secs(60),
    }
}

fn worker(role: Role, run: &RunConfig, shape: Shape, rank: crate::shape::Rank) -> WorkerConfig {
    WorkerConfig {
        role,
        transport: "loopback".into(),
        model: model(),
        shape,
        rank,
        pool_pages: run.pool_pages,
        pattern: run.pattern,
        bootstrap: BootstrapAt::Connect("loopback:0".into()),
        host: "127.0.0.1".into(),
        tcp_path: TcpPath::default(),
        heartbeat_s: 5,
        stats_every_ms: 0,
    }
}

fn fleet(loopback: &Loopback, run: &RunConfig, shape: Shape, roles: &[Role]) -> Fleet {
    let mut fleet = Fleet::new();
    let mut starting = 0;
    for role in roles {
        for rank in shape.all_ranks() {
            fleet.spawn_thread(Arc::new(loopback.clone()), worker(*role, run, shape, rank)).unwrap();
            starting += 1;
        }
    }
    while starting > 0 {
        match fleet.next(Duration::from_secs(60)) {
            Some(FleetEvent::From(_, FromWorker::Ready { .. })) => starting -= 1,
            other => panic!("{other:?}"),
        }
    }
    fleet
}

fn run(loopback: &Loopback, run: &RunConfig, shape: Shape, roles: &[Role], plan: &Plan) -> Recorder {
    let mut fleet = fleet(loopback, run, shape, roles);
    Scheduler::new(&mut fleet, run, &mut ()).unwrap().run(plan).unwrap()
}

const BOTH: [Role; 2] = [Role::Prefill, Role::Decode];
const KEYED: Pattern = Pattern::Keyed { seed: 9 };

fn trace_plan(n: usize) -> Plan {
    let requests = TraceSource::open(None).unwrap().first(n).unwrap();
    Plan::new(&requests, 64, POOL_PAGES, None).unwrap()
}

fn short(tokens: u32, blocks: &[u64]) -> TraceRequest {
    TraceRequest { timestamp_ms: 0, input_tokens: tokens, output_tokens: 1, blocks: blocks.to_vec() }
}

#[test]
fn a_trace_arrives_whole_whatever_the_shape() {
    let plan = trace_plan(12);
    assert!(plan.clamped() > 0);
    let shapes = [Shape::default(), Shape { tp: 2, pp: 3, ..Shape::default() }];
    let reports = shapes.map(|shape| {
        let recorder = run(&Loopback::default(), &config(KEYED, shape), shape, &BOTH, &plan);
        recorder.report("loopback", "tiny")
    });
    for report in &reports {
        assert_eq!((report.ok, report.rooms, report.failed, report.corrupt), (true, 12, 0, 0));
        assert!(report.prefix_tokens > 0, "block 0 leads every request of the trace");
        let pages: u64 = plan.requests.iter().map(|r| u64::from(r.pages)).sum();
        let sent = pages - report.prefix_tokens / 64;
        assert_eq!(report.bytes, sent * side_page_bytes(&model(), Shape::default()).unwrap());
    }
    assert_eq!(reports[0].bytes, reports[1].bytes, "a shape moves no byte more");
}

#[test]
fn the_sglang_pattern_is_keyed_by_room_and_caches_nothing() {
    let recorder =
        run(&Loopback::default(), &config(Pattern::Sglang, Shape::default()), Shape::default(), &BOTH, &trace_plan(6));
    let report = recorder.report("loopback", "tiny");
    assert_eq!((report.ok, report.rooms, report.prefix_tokens), (true, 6, 0));
}

#[test]
fn a_request_that_decode_has_whole_still_ends() {
    // 1024 tokens = two full blocks, 16 pages: four requests a wave of 64 pages.
    let requests = vec![short(1024, &[1, 2]); 9];
    let plan = Plan::new(&requests, 64, POOL_PAGES, None).unwrap();
    assert_eq!(plan.waves, vec![0..4, 4..8, 8..9]);
    let recorder = run(&Loopback::default(), &config(KEYED, Shape::default()), Shape::default(), &BOTH, &plan);
    assert_eq!((recorder.rooms, recorder.failed, recorder.corrupt), (9, 0, 0));
    assert_eq!(recorder.prefix_tokens, 5 * 1024, "the first wave sends, the others have it");
}

#[test]
fn a_wrong_byte_is_found_named_and_not_cached() {
    let requests = vec![short(4096, &[1, 2, 3, 4, 5, 6, 7, 8]); 2];
    let plan = Plan::new(&requests, 64, POOL_PAGES, None).unwrap();
    let faults = Faults { corrupt: [FIRST_ROOM].into(), ..Faults::default() };
    let recorder = run(&Loopback::new(faults), &config(KEYED, Shape::default()), Shape::default(), &BOTH, &plan);
    assert_eq!((recorder.rooms, recorder.corrupt, recorder.prefix_tokens), (2, 1, 0));
    assert!(!recorder.report("loopback", "tiny").ok);
    let note = &recorder.notes[0];
    assert!(note.contains("1 corrupt pages on decode tp0 pp0") && note.contains("layer 0 K token 0"), "{note}");
}

#[test]
fn a_failed_room_is_named_and_its_pages_come_back() {
    // Each request takes the whole pool, so the third needs the pages of the failed second.
    let requests: Vec<_> = (0..3u64).map(|i| short(4096, &(i * 8..i * 8 + 8).collect::<Vec<_>>())).collect();
    let plan = Plan::new(&requests, 64, POOL_PAGES, None).unwrap();
    let faults = Faults { fail: [(FIRST_ROOM + 1, "peer is gone".into())].into(), ..Faults::default() };
    let recorder = run(&Loopback::new(faults), &config(KEYED, Shape::default()), Shape::default(), &BOTH, &plan);
    assert_eq!((recorder.rooms, recorder.failed, recorder.corrupt), (2, 1, 0));
    assert!(recorder.notes[0].contains(&format!("room {} failed: peer is gone", FIRST_ROOM + 1)));
}

#[test]
fn two_schedulers_that_never_talk_serve_one_another() {
    let (loopback, plan) = (Loopback::default(), trace_plan(10));
    let side = |role| {
        let (loopback, plan) = (loopback.clone(), plan.clone());
        std::thread::spawn(move || run(&loopback, &config(KEYED, Shape::default()), Shape::default(), &[role], &plan))
    };
    let (prefill, decode) = (side(Role::Prefill), side(Role::Decode));
    let (prefill, decode) = (prefill.join().unwrap(), decode.join().unwrap());
    assert_eq!((decode.rooms, decode.failed, decode.corrupt), (10, 0, 0));
    assert_eq!((prefill.rooms, prefill.failed, prefill.bytes), (10, 0, decode.bytes));
    assert!(decode.prefix_tokens > 0);
}

#[test]
fn a_dead_decode_fails_its_rooms_and_the_rest_of_the_run() {
    let plan = trace_plan(6);
    let run = config(KEYED, Shape::default());
    let mut fleet = fleet(&Loopback::default(), &run, Shape::default(), &BOTH);
    // No such page: the worker says so and ends.
    let pages = vec![FilledPage { page: POOL_PAGES, source: PageSource { id: 0, first_token: 0 } }];
    fleet.send(1, &ToWorker::Verify { room: 1, pages }).unwrap();
    let recorder = Scheduler::new(&mut fleet, &run, &mut ()).unwrap().run(&plan).unwrap();
    assert_eq!(recorder.rooms, 0);
    assert!(recorder.failed >= 6, "{}", recorder.failed);
    let cause = recorder.notes.iter().find(|n| n.contains("decode tp0 pp0 ended")).unwrap();
    assert!(cause.contains("page 64 is outside the pool of 64"), "{cause}");
    assert!(!recorder.report("loopback", "tiny").ok);
}

#[test]
fn a_process_that_dies_is_reported_with_its_status() {
    let run = config(KEYED, Shape::default());
    let mut fleet = Fleet::new();
    let mut command = std::process::Command::new("sh");
    command.args(["-c", "read line; exit 7"]);
    let id = fleet.spawn_command(command, worker(Role::Decode, &run, Shape::default(), Default::default())).unwrap();
    match fleet.next(Duration::from_secs(60)) {
        Some(FleetEvent::Died(died, how)) => assert_eq!((died, how.as_str()), (id, "exit status: 7")),
        other => panic!("{other:?}"),
    }
    assert!(fleet.alive(Role::Decode).is_empty());
}
