//! `kvt replay` and `kvt demo`: both sides on this machine, each rank a process.

use std::io::IsTerminal as _;
use std::process::ExitCode;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::{DemoArgs, PatternArg, ReplayArgs, WorkloadArgs};
use crate::driver::agreement::Stated;
use crate::driver::fleet::{Fleet, FleetEvent};
use crate::driver::protocol::{BootstrapAt, FromWorker, Role, TcpPath, WorkerConfig};
use crate::driver::scheduler::{Progress, RunConfig, Scheduler};
use crate::error::{CliError, Result};
use crate::memory::mem_available;
use crate::model::{KvKind, ModelSpec};
use crate::out;
use crate::pattern::Pattern;
use crate::plan_requests::{Budget, Plan};
use crate::report::Recorder;
use crate::shape::{Rank, Shape};
use crate::trace::{BLOCK_TOKENS, TraceSource};

/// How long a rank may take from its start until it is ready for peers: first touch of its memory is most of it.
pub const START_TIMEOUT: Duration = Duration::from_secs(180);
/// No news at all for this long ends a run: longer than every timeout of a room.
const STALL: Duration = Duration::from_secs(420);

/// A workload that was read, checked and planned.
pub struct Workload {
    /// Model.
    pub model: ModelSpec,
    /// Requests in waves.
    pub plan: Plan,
    /// Pools.
    pub budget: Budget,
    /// How it runs.
    pub run: RunConfig,
    /// How the embedded transport moves bytes.
    pub tcp_path: TcpPath,
    /// Seconds between decode's looks at prefill.
    pub heartbeat_s: u64,
}

impl Workload {
    /// Read, check and plan; says aloud on standard error what is cut. `sides` run on this machine.
    pub fn prepare(args: &WorkloadArgs, shape: Shape, sides: u32, seed: u64, pattern: PatternArg) -> Result<Self> {
        if args.page_tokens == 0 || !BLOCK_TOKENS.is_multiple_of(args.page_tokens) {
            return Err(CliError::new(format!("--page-tokens {} does not divide {BLOCK_TOKENS}", args.page_tokens))
                .hint("a trace's blocks are 512 tokens: use 1, 2, 4 .. 512"));
        }
        let model = ModelSpec { page_tokens: args.page_tokens, ..ModelSpec::resolve(&args.model)? };
        for rank in shape.all_ranks() {
            model.rank_geometry(shape, rank)?;
        }
        if args.requests == 0 {
            return Err(CliError::new("--requests 0 leaves nothing to do").hint("give 1 or more"));
        }
        if args.concurrency == 0 {
            return Err(CliError::new("--concurrency 0 lets no room run").hint("give 1 or more"));
        }
        if args.max_tokens == Some(0) {
            return Err(CliError::new("--max-tokens 0 cuts every request to nothing").hint("give 1 or more"));
        }
        if args.share_src && pattern != PatternArg::Sglang {
            return Err(CliError::new("--share-src is for --pattern sglang").hint(
                "the keyed pattern shares source pages by block hash already: use --trace synthetic:tokens=N,shared",
            ));
        }
        let requests = TraceSource::open(args.trace.as_deref())?.first(args.requests)?;
        if requests.len() < args.requests {
            eprintln!("note: the trace holds {} requests, not {}", requests.len(), args.requests);
        }
        let budget = Budget::new(&model, shape, mem_available()?, args.pool_mib, sides)?;
        let plan = Plan::new(&requests, model.page_tokens, budget.pool_pages, args.max_tokens)?;
        if let Some(notice) = plan.clamp_notice(budget.pool_pages, args.max_tokens) {
            eprintln!("{notice}");
        }
        let pattern = match pattern {
            PatternArg::Keyed => Pattern::Keyed { seed },
            PatternArg::Sglang => Pattern::Sglang,
        };
        let run = RunConfig {
            page_tokens: model.page_tokens,
            pool_pages: budget.pool_pages,
            side_page_bytes: budget.page_bytes,
            order: args.pages,
            seed,
            pattern,
            share_src: args.share_src,
            prefix_cache: !args.no_prefix_cache,
            concurrency: args.concurrency,
            probe: !args.no_probe,
            stall: STALL,
        };
        Ok(Self { model, plan, budget, run, tcp_path: args.tcp_path, heartbeat_s: args.heartbeat_s })
    }

    /// What both sides of two machines must have alike, by name.
    pub fn stated(&self, transport: &str, max_tokens: Option<u32>, shape: Shape) -> Stated {
        let model = &self.model;
        let mut fields = vec![
            ("transport", transport.to_owned()),
            ("model", model.name.clone()),
            ("layers", model.layers.to_string()),
            ("page_size", model.page_tokens.to_string()),
            ("bytes a value", model.value_bytes.to_string()),
        ];
        match model.kv {
            KvKind::Mha { kv_heads, head_dim } => fields.extend([
                ("attention", "MHA".to_owned()),
                ("kv_heads", kv_heads.to_string()),
                ("head_dim", head_dim.to_string()),
            ]),
            KvKind::Mla { kv_lora_rank, rope_dim } => fields.extend([
                ("attention", "MLA".to_owned()),
                ("kv_lora_rank", kv_lora_rank.to_string()),
                ("qk_rope_head_dim", rope_dim.to_string()),
            ]),
        }
        fields.extend([
            ("tp_size", shape.tp.to_string()),
            ("pp_size", shape.pp.to_string()),
            ("pool pages", self.run.pool_pages.to_string()),
            ("requests", self.plan.requests.len().to_string()),
            ("max-tokens", max_tokens.map_or("none".to_owned(), |n| n.to_string())),
            ("trace digest", format!("{:016x}", self.plan.digest())),
            ("share-src", self.run.share_src.to_string()),
            ("probe", self.run.probe.to_string()),
        ]);
        fields.push(match self.run.pattern {
            Pattern::Keyed { seed } => ("pattern", format!("keyed, seed {seed}")),
            Pattern::Sglang => ("pattern", "sglang".to_owned()),
        });
        Stated::new(fields)
    }

    /// Configuration of one rank.
    pub fn worker(
        &self,
        role: Role,
        transport: &str,
        shape: Shape,
        rank: Rank,
        bootstrap: BootstrapAt,
        host: &str,
    ) -> WorkerConfig {
        WorkerConfig {
            role,
            transport: transport.to_owned(),
            model: self.model.clone(),
            shape,
            rank,
            pool_pages: self.budget.pool_pages,
            pattern: self.run.pattern,
            bootstrap,
            host: host.to_owned(),
            tcp_path: self.tcp_path,
            heartbeat_s: self.heartbeat_s,
            stats_every_ms: 0,
        }
    }
}

/// `kvt demo`.
pub fn demo(args: DemoArgs, json: bool, seed: u64, pattern: PatternArg) -> Result<ExitCode> {
    let DemoArgs { workload } = args;
    let (prefill, decode) = (Shape::default(), Shape::default());
    replay(&ReplayArgs { workload, prefill, decode, host: "127.0.0.1".into(), bootstrap_port: 0 }, json, seed, pattern)
}

/// `kvt replay`.
pub fn replay(args: &ReplayArgs, json: bool, seed: u64, pattern: PatternArg) -> Result<ExitCode> {
    Shape::check_pair(args.prefill, args.decode)?;
    let workload = Workload::prepare(&args.workload, args.prefill, 2, seed, pattern)?;
    eprintln!(
        "{} requests of {} in {} waves (a wave: requests whose pages fit the pools together); pools of {} pages ({} MiB \
         a side)",
        workload.plan.requests.len(),
        workload.model.name,
        workload.plan.waves.len(),
        workload.budget.pool_pages,
        workload.budget.side_bytes >> 20
    );
    let transport = &args.workload.transport;
    let host = &args.host;
    let mut fleet = Fleet::new();

    // Rank 0 of prefill runs the registry, as SGLang's prefill server does; the others need its address.
    let mut ranks = args.prefill.all_ranks().into_iter();
    let serve = BootstrapAt::Serve(kv_core::Endpoint::new(host, args.bootstrap_port).to_string());
    let first = ranks.next().unwrap_or_default();
    fleet.spawn_process(workload.worker(Role::Prefill, transport, args.prefill, first, serve, host))?;
    let bootstrap = await_ready(&mut fleet, 1)?
        .ok_or_else(|| CliError::new("the first prefill rank does not say where its registry is"))?;
    let connect = || BootstrapAt::Connect(bootstrap.clone());
    let mut started = 0;
    for rank in ranks {
        fleet.spawn_process(workload.worker(Role::Prefill, transport, args.prefill, rank, connect(), host))?;
        started += 1;
    }
    for rank in args.decode.all_ranks() {
        fleet.spawn_process(workload.worker(Role::Decode, transport, args.decode, rank, connect(), host))?;
        started += 1;
    }
    await_ready(&mut fleet, started)?;

    let mut bar = Bar::new(workload.plan.requests.len() as u64);
    let recorder = Scheduler::new(&mut fleet, &workload.run, &mut bar)?.run(&workload.plan);
    bar.close();
    finish(&recorder?, transport, &workload.model.name, json)
}

/// Wait until `n` workers are ready; the registry's address, when one runs it.
pub fn await_ready(fleet: &mut Fleet, n: usize) -> Result<Option<String>> {
    let (mut ready, mut registry) = (0, None);
    while ready < n {
        match fleet.next(START_TIMEOUT) {
            Some(FleetEvent::From(_, FromWorker::Ready { bootstrap, .. })) => {
                ready += 1;
                registry = registry.or(bootstrap);
            }
            Some(FleetEvent::From(id, FromWorker::Error { what, hint })) => {
                return Err(CliError::new(format!("{}: {what}", fleet.worker_name(id))).hint(hint));
            }
            Some(FleetEvent::Died(id, how)) => {
                // Killed by a signal it says nothing: a library's fault, or a lack of memory.
                let silent = how.contains("signal");
                return Err(CliError::new(format!("{} ended before it was ready: {how}", fleet.worker_name(id)))
                    .hint(if silent { "`kvt doctor` tries out what is here" } else { "its own message is above" }));
            }
            Some(FleetEvent::From(id, event)) => {
                return Err(CliError::new(format!("{} answered out of turn: {event:?}", fleet.worker_name(id))));
            }
            None => {
                return Err(CliError::new(format!("{} of {n} ranks were not ready in {START_TIMEOUT:?}", n - ready))
                    .hint("run it again with RUST_LOG=debug"));
            }
        }
    }
    Ok(registry)
}

/// Print the closing table or JSON; the exit code says whether all was well.
pub fn finish(recorder: &Recorder, transport: &str, model: &str, json: bool) -> Result<ExitCode> {
    let report = recorder.report(transport, model);
    if json {
        for note in &recorder.notes {
            eprintln!("{note}");
        }
        out::line(report.json()?)?;
    } else {
        out::text(&report.table(recorder))?;
    }
    Ok(if report.ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Progress on standard error: a bar on a terminal, else a line every few seconds.
pub struct Bar {
    bar: ProgressBar,
    phase: String,
    bytes: u64,
    failed: u64,
    lines: Option<std::time::Instant>,
}

/// Time between lines where standard error is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

impl Bar {
    /// A bar over `requests`.
    pub fn new(requests: u64) -> Self {
        let bar = ProgressBar::with_draw_target(Some(requests), ProgressDrawTarget::stderr());
        if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} requests, {elapsed} {wide_msg}") {
            bar.set_style(style);
        }
        bar.enable_steady_tick(Duration::from_millis(250));
        let lines = (!std::io::stderr().is_terminal()).then(std::time::Instant::now);
        Self { bar, phase: String::new(), bytes: 0, failed: 0, lines }
    }

    /// Take it off the screen.
    pub fn close(&self) {
        self.bar.finish_and_clear();
    }

    fn show(&mut self) {
        let failed = if self.failed > 0 { format!("{} failed, ", self.failed) } else { String::new() };
        let message = format!("{failed}{:.2} GB moved, {}", self.bytes as f64 / 1e9, self.phase);
        if let Some(last) = self.lines.as_mut().filter(|last| last.elapsed() >= LINE_EVERY) {
            *last = std::time::Instant::now();
            eprintln!("{}/{} requests, {message}", self.bar.position(), self.bar.length().unwrap_or(0));
        }
        self.bar.set_message(message);
    }
}

impl Progress for Bar {
    fn phase(&mut self, what: &str) {
        what.clone_into(&mut self.phase);
        self.show();
    }

    fn failed(&mut self, room: u64, reason: &str) {
        self.failed += 1;
        if self.failed == 1 {
            self.bar.suspend(|| eprintln!("the first request failed, room {room}: {reason}"));
        }
    }

    fn ended(&mut self, n: u64, bytes: u64) {
        self.bytes += bytes;
        self.bar.inc(n);
        self.show();
    }
}
