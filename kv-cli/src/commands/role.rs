//! `kvt prefill` and `kvt decode`: one rank of one side, the other side on another machine.

use std::process::ExitCode;
use std::sync::Arc;

use crate::cli::{PatternArg, RoleArgs};
use crate::commands::replay::{Bar, Workload, await_ready, finish};
use crate::driver::builtin::BuiltIn;
use crate::driver::fleet::Fleet;
use crate::driver::protocol::{BootstrapAt, Role};
use crate::driver::scheduler::Scheduler;
use crate::driver::worker;
use crate::error::{CliError, Result};
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
    args.workload.pool_mib.get_or_insert(DEFAULT_POOL_MIB);
    let workload = Workload::prepare(&args.workload, shape, 1, seed, pattern)?;
    eprintln!(
        "{role} {rank}: {} requests of {}, pools of {} pages; the other side needs the same --trace, --model, \
         --requests, --max-tokens, --pool-mib, --seed and --pattern",
        workload.plan.requests.len(),
        workload.model.name,
        workload.budget.pool_pages
    );
    let transport = &args.workload.transport;
    let mut fleet = Fleet::new();
    fleet.spawn_thread(Arc::new(BuiltIn), workload.worker(role, transport, shape, rank, bootstrap, &args.host))?;
    if let Some(at) = await_ready(&mut fleet, 1)? {
        eprintln!("bootstrap server on {at}");
    }
    let mut bar = Bar::new(workload.plan.requests.len() as u64);
    let recorder = Scheduler::new(&mut fleet, &workload.run, &mut bar)?.run(&workload.plan);
    bar.close();
    finish(&recorder?, transport, &workload.model.name, json)
}
