//! The budget table of the architecture, measured: each row beside its floor in the same run.
//!
//! ```text
//! cargo xtask bench [ROW..] [--quick] [--rounds N] [--json] [--markdown]
//! cargo bench -p kv-transfer --bench budget -- [the same]
//! ```
//!
//! `ROW` is a part of a row's name. Ours and the floor take turns (A B A B ..), and medians are compared, so that a
//! change of the machine's mood hits both. Where two processes talk in production, two processes talk here: the program
//! starts itself again in a role, and that process dies with this one. CPU time is that of both processes.
#![allow(missing_docs)] // a program, not a library

mod bulk;
mod child;
mod completion;
mod exchange;
mod geometry;
mod idle;
mod lane;
mod layer;
#[cfg(feature = "mooncake")]
mod mooncake;
#[cfg(feature = "nixl")]
mod nixl;
#[cfg(any(feature = "mooncake", feature = "nixl"))]
mod own_lane;
mod pair;
mod plan;
mod report;
mod rooms;
mod same_host;
mod stats;
mod stub;
mod sys;
#[cfg(any(feature = "mooncake", feature = "nixl"))]
mod target;
mod tcp;
mod vm;

use std::process::ExitCode;

use child::Link;
use report::Report;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

/// What was asked for on the command line.
#[derive(Default)]
struct Options {
    rows: Vec<String>,
    quick: bool,
    json: bool,
    markdown: bool,
    rounds: Option<usize>,
}

impl Options {
    /// Whether a row is wanted.
    fn wants(&self, row: &str) -> bool {
        self.rows.is_empty() || self.rows.iter().any(|part| row.contains(part.as_str()))
    }

    /// How often ours and the floor take turns.
    fn rounds(&self, full: usize) -> usize {
        self.rounds.unwrap_or(if self.quick { 2 } else { full }).max(1)
    }

    /// How much a turn does.
    fn count(&self, full: usize) -> usize {
        if self.quick { (full / 10).max(1) } else { full }
    }
}

/// Rows measured together.
struct Group {
    rows: &'static [&'static str],
    run: fn(&Options, &mut Report) -> Result<()>,
}

const GROUPS: &[Group] = &[
    Group { rows: completion::ROWS, run: completion::run },
    Group { rows: rooms::ROWS, run: rooms::run },
    Group { rows: plan::ROWS, run: plan::run },
    Group { rows: same_host::ROWS, run: same_host::run },
    Group { rows: tcp::ROWS, run: tcp::run },
    Group { rows: layer::ROWS, run: layer::run },
    Group { rows: idle::ROWS, run: idle::run },
    Group { rows: geometry::ROWS, run: geometry::run },
];

/// More rows and roles, where the feature `nixl` is on.
#[cfg(feature = "nixl")]
const NIXL: (&[Group], &[(&str, Role)]) = (nixl::GROUPS, nixl::ROLES);
#[cfg(not(feature = "nixl"))]
const NIXL: (&[Group], &[(&str, Role)]) = (&[], &[]);

/// The same of `mooncake`.
#[cfg(feature = "mooncake")]
const MOONCAKE: (&[Group], &[(&str, Role)]) = (mooncake::GROUPS, mooncake::ROLES);
#[cfg(not(feature = "mooncake"))]
const MOONCAKE: (&[Group], &[(&str, Role)]) = (&[], &[]);

fn groups() -> impl Iterator<Item = &'static Group> {
    GROUPS.iter().chain(NIXL.0).chain(MOONCAKE.0)
}

type Role = fn(&mut Link) -> Result<()>;

const ROLES: &[(&str, Role)] = &[
    (completion::ROLE, completion::role),
    (rooms::ROLE, rooms::role),
    (lane::ROLE, lane::role),
    (bulk::ROLE, bulk::role),
    (idle::SENDERS, idle::senders),
    (idle::RECEIVERS, idle::receivers),
];

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let mut options = Options::default();
    let mut bench = false;
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--bench" => bench = true,
            "--quick" => options.quick = true,
            "--json" => options.json = true,
            "--markdown" => options.markdown = true,
            "--rounds" => match args.next().and_then(|n| n.parse().ok()) {
                Some(n) => options.rounds = Some(n),
                None => return usage("--rounds needs a number"),
            },
            "--role" => {
                let role = args.next().unwrap_or_default();
                let Some((_, run)) = ROLES.iter().chain(NIXL.1).chain(MOONCAKE.1).find(|(name, _)| *name == role)
                else {
                    return usage(&format!("there is no role {role}"));
                };
                return finish(run(&mut Link::new()));
            }
            row if !row.starts_with('-') => options.rows.push(row.to_owned()),
            other => return usage(&format!("what is {other}?")),
        }
    }
    if !bench {
        // `cargo test --all-targets` runs benchmarks too, without this mark; minutes of measuring are no test.
        println!("benchmarks run with `cargo bench` or `cargo xtask bench`");
        return ExitCode::SUCCESS;
    }
    finish(measure(&options))
}

fn usage(what: &str) -> ExitCode {
    eprintln!("{what}\nusage: [ROW..] [--quick] [--rounds N] [--json] [--markdown]");
    ExitCode::from(2)
}

fn finish(result: Result<()>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e}");
            ExitCode::FAILURE
        }
    }
}

fn measure(options: &Options) -> Result<()> {
    sys::allow_copies();
    println!("{}; load {:.2} at the start", sys::machine(), sys::load());
    let (start, mut report) = (std::time::Instant::now(), Report::default());
    for group in groups() {
        if group.rows.iter().any(|row| options.wants(row)) {
            (group.run)(options, &mut report)?;
        }
    }
    if report.is_empty() {
        let all: Vec<&str> = groups().flat_map(|g| g.rows).copied().collect();
        return Err(format!("no row is called so; there are: {}", all.join(", ")).into());
    }
    println!("{:.0} s; load {:.2} at the end", start.elapsed().as_secs_f64(), sys::load());
    if options.markdown {
        println!("\n{}", report.markdown());
    }
    if options.json {
        println!("{}", report.json());
    }
    Ok(())
}
