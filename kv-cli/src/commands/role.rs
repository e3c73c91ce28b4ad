//! `kvt prefill` and `kvt decode`: one rank of one side, the other side on another machine.

use std::net::{TcpStream, ToSocketAddrs as _};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cli::{PatternArg, RoleArgs};
use crate::commands::replay::{Bar, Workload, await_ready, finish};
use crate::driver::agreement::{self, Statement};
use crate::driver::builtin::BuiltIn;
use crate::driver::fleet::Fleet;
use crate::driver::protocol::{BootstrapAt, Role};
use crate::driver::scheduler::Scheduler;
use crate::driver::worker;
use crate::error::{CliError, Result};
use crate::leave;
use crate::out;
use crate::shape::{Rank, Shape};

/// Pools of a rank that runs alone, MiB: the same on every machine, since both sides must cut requests alike.
const DEFAULT_POOL_MIB: u64 = 1024;

/// Run it.
pub fn run(role: Role, mut args: RoleArgs, json: bool, seed: u64, pattern: PatternArg) -> Result<ExitCode> {
    if args.worker {
        // The scheduler got the error as an event and is the one to print it.
        return Ok(worker::run_stdio(&BuiltIn).map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS));
    }
    let shape = Shape { tp: args.tp_size, pp: args.pp_size, ..Shape::default() };
    let rank = Rank { tp: args.tp_rank, pp: args.pp_rank, ..Rank::default() };
    if shape.tp == 0 || shape.pp == 0 {
        return Err(CliError::new("a parallel size of 0").hint("sizes start at 1"));
    }
    shape.check_rank(rank)?;
    let bootstrap = match (args.serve_bootstrap.take(), args.bootstrap.take()) {
        (Some(_), _) if role == Role::Decode => {
            return Err(CliError::new("--serve-bootstrap is prefill's").hint("give decode --bootstrap HOST:PORT"));
        }
        (Some(at), _) => BootstrapAt::Serve(at),
        (None, Some(at)) => BootstrapAt::Connect(at),
        (None, None) => return Err(CliError::new("no registry").hint("give --bootstrap HOST:PORT")),
    };
    if let BootstrapAt::Connect(at) = &bootstrap {
        await_registry(at, Duration::from_secs(args.connect_timeout))?;
    }
    let (BootstrapAt::Connect(registry) | BootstrapAt::Serve(registry)) = bootstrap.clone();
    args.workload.pool_mib.get_or_insert(DEFAULT_POOL_MIB);
    let workload = Workload::prepare(&args.workload, shape, 1, seed, pattern)?;
    eprintln!(
        "{role} {rank}: {} requests of {}, pools of {} pages; the other side needs the same workload options",
        workload.plan.requests.len(),
        workload.model.name,
        workload.budget.pool_pages
    );
    let transport = &args.workload.transport;
    let mut fleet = Fleet::new();
    let mut config = workload.worker(role, transport, shape, rank, bootstrap, &args.host);
    if let Some(seconds) = args.stats_every {
        config.stats_every_ms = seconds * 1000;
        // Whoever does not read them will not read the result either, and that is an error.
        fleet.on_stats(Box::new(|_, stats| drop(stats.line().and_then(out::line))));
    }
    fleet.spawn_thread(Arc::new(BuiltIn), config)?;
    let served = await_ready(&mut fleet, 1)?;
    if let Some(at) = &served {
        eprintln!("bootstrap server on {at}");
    }
    let stated = workload.stated(transport, args.workload.max_tokens, shape);
    // Held until the run is over: it says that this prefill lives.
    let _statement = match role {
        Role::Prefill => {
            let at = served.unwrap_or(registry);
            // A decode that differs may come at any time before the first room is through.
            Some(Statement::new(at, rank, stated, end)?)
        }
        Role::Decode => {
            agreement::agree(&registry, rank, &stated, Duration::from_secs(args.connect_timeout))?.watch(end)?;
            None
        }
    };
    let mut bar = Bar::new(workload.plan.requests.len() as u64);
    let recorder = Scheduler::new(&mut fleet, &workload.run, &mut bar)?.run(&workload.plan);
    bar.close();
    finish(&recorder?, transport, &workload.model.name, json)
}

/// End the program from a thread beside the run.
fn end(e: CliError) {
    eprintln!("kvt: {}", e.one_line());
    leave::now(1);
}

/// Wait until something accepts connections at `at`: the two sides may be started in any order.
fn await_registry(at: &str, patience: Duration) -> Result<()> {
    let deadline = Instant::now() + patience;
    loop {
        let error = match at.to_socket_addrs() {
            Err(e) if e.kind() == std::io::ErrorKind::InvalidInput => {
                return Err(CliError::new(format!("--bootstrap {at} is no HOST:PORT: {e}"))
                    .hint("write it like 10.0.0.1:8998 or [fd00::1]:8998"));
            }
            Err(e) => e.to_string(),
            Ok(addrs) => {
                let mut last = "it has no address".to_owned();
                for addr in addrs {
                    match TcpStream::connect_timeout(&addr, CONNECT_TIMEOUT) {
                        Ok(_) => return Ok(()),
                        Err(e) => last = e.to_string(),
                    }
                }
                last
            }
        };
        if Instant::now() >= deadline {
            return Err(CliError::new(format!("the bootstrap server at {at} cannot be reached: {error}"))
                .hint("start `kvt bootstrap` or `kvt prefill --serve-bootstrap` there, or correct --bootstrap"));
        }
        std::thread::sleep(RETRY_EVERY);
    }
}

/// One try of [`await_registry`].
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const RETRY_EVERY: Duration = Duration::from_millis(200);
