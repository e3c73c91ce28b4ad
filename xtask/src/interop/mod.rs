//! `cargo xtask interop`: our prefill and decode, live, against SGLang's own.
//!
//! Each case is played with processes on this machine: `kvt peer` on our side, SGLang's unedited classes behind
//! `python -m sglang_peer` on the other. Both take the same options and print the same events.

mod case;
mod cases;
mod event;
mod frames;
mod judge;
mod launch;
mod options;
mod perf;
mod play;
mod port;
mod process;
mod program;
mod row;
mod run;
mod server;
mod vectors;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use case::Case;
pub use program::{Backend, Direction};
pub use row::{Counts, Row, Verdict};
use run::Plan;

use crate::sh::Result;

#[derive(Debug, clap::Args)]
pub struct InteropArgs {
    /// Only these backends.
    #[arg(long, value_name = "NAME", value_delimiter = ',', default_value = "nixl")]
    backend: Vec<Backend>,
    /// Only cases of this name, or whose names start with it; several times.
    #[arg(long, value_name = "NAME")]
    case: Vec<String>,
    /// mixed: `sglang>ours` and `ours>sglang` (prefill>decode); controls: `sglang>sglang` and `ours>ours`; all; or one of the four.
    #[arg(long, value_name = "NAME", default_value = "mixed", value_parser = directions)]
    direction: Directions,
    /// Say at the end, in one line of JSON, what came of each case.
    #[arg(long)]
    json: bool,
    /// List the cases, and run nothing.
    #[arg(long)]
    list: bool,
    /// Measure both programs side by side instead; minutes, and 14 GB of memory.
    #[arg(long)]
    perf: bool,
    /// --perf: smaller rounds, to see that it runs.
    #[arg(long, requires = "perf")]
    quick: bool,
    /// Keep every control message of the cases, a file an actor, in this folder.
    #[arg(long, value_name = "FOLDER", num_args = 0..=1, default_missing_value = "target/interop/record")]
    record: Option<PathBuf>,
    /// Record the conversations that the golden tests read, anew.
    #[arg(long, conflicts_with_all = ["perf", "case", "direction", "record"])]
    vectors: bool,
    /// Cases at the same time.
    #[arg(long, value_name = "N")]
    jobs: Option<usize>,
}

/// What `--direction` says.
#[derive(Debug, Clone)]
struct Directions(Vec<Direction>);

fn directions(text: &str) -> Result<Directions> {
    Direction::parse(text).map(Directions)
}

pub fn run(args: &InteropArgs) -> Result<ExitCode> {
    let cases = choose(&args.case)?;
    if args.list {
        cases.iter().for_each(|c| println!("{:<28} {}", c.name, c.shows));
        return Ok(ExitCode::SUCCESS);
    }
    if args.perf {
        // One after the other: each is a table of its own.
        let mut worst = ExitCode::SUCCESS;
        for backend in &args.backend {
            if perf::run(*backend, args.quick, args.json)? != ExitCode::SUCCESS {
                worst = ExitCode::FAILURE;
            }
        }
        return Ok(worst);
    }
    let mut plan = Plan {
        cases,
        directions: args.direction.0.clone(),
        backends: args.backend.clone(),
        record: args.record.clone(),
        jobs: args.jobs,
        again: false,
    };
    if args.vectors {
        plan.cases = vectors::cases(plan.cases);
        plan.record = Some(vectors::folder()?);
    }
    let rows = run::all(&plan)?;
    println!("{}", row::table(&rows));
    let counts = Counts::of(&rows);
    println!("{} passed, {} failed, {} n/a", counts.passed, counts.failed, counts.not);
    if args.json {
        let rows: Vec<_> = rows.iter().map(Row::json).collect();
        println!(
            "{}",
            serde_json::json!({"passed": counts.passed, "failed": counts.failed, "na": counts.not, "rows": rows})
        );
    }
    if let (true, Some(record), 0) = (args.vectors, &plan.record, counts.failed) {
        for backend in &plan.backends {
            let n = vectors::write(record, *backend, Path::new("kv-testkit/vectors"))?;
            println!("{n} conversations over {}; now `cargo xtask golden --bless`", backend.name());
        }
    }
    Ok(if counts.failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// All cases, in the directions that interoperate, for `cargo xtask ci --full`.
pub fn mixed(backends: Vec<Backend>) -> Result<Vec<Row>> {
    let (cases, directions) = (cases::all(), Direction::MIXED.to_vec());
    let plan = Plan { cases, directions, backends, record: None, jobs: None, again: true };
    run::all(&plan)
}

fn choose(names: &[String]) -> Result<Vec<Case>> {
    let all = cases::all();
    // A whole name means that case alone, though others start with it.
    let fits = |case: &Case, name: &str| {
        if all.iter().any(|c| c.name == name) { case.name == name } else { case.name.starts_with(name) }
    };
    if let Some(odd) = names.iter().find(|n| !all.iter().any(|c| fits(c, n))) {
        return Err(format!("no case '{odd}'; `cargo xtask interop --list` names them all"));
    }
    Ok(all.iter().filter(|c| names.is_empty() || names.iter().any(|n| fits(c, n))).cloned().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cases_are_chosen_by_name_and_by_start() {
        assert_eq!(choose(&[]).unwrap().len(), cases::all().len());
        let one: Vec<_> = choose(&["mha".into()]).unwrap().iter().map(|c| c.name).collect();
        assert_eq!(one, ["mha"]);
        assert!(choose(&["kill-".into()]).unwrap().len() > 3);
        assert!(choose(&["nothing".into()]).unwrap_err().contains("--list"));
    }
}
