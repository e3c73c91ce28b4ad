//! Project tasks: `cargo xtask ci | setup | demo | interop | golden | bench | model | fuzz | sim`.

mod bench;
mod ci;
mod fuzz;
mod golden;
mod interop;
mod model;
mod setup;
mod sh;
mod sim;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tasks of this project.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Everything a change must pass. The last line counts the tests.
    Ci(ci::CiArgs),
    /// Fetch the libraries that backends load, pinned, into the target directory; their paths. Default: all backends.
    /// `interop` sets up SGLang for `cargo xtask interop`.
    Setup(setup::SetupArgs),
    /// Build kvt and run `kvt demo`; what follows is passed on.
    Demo {
        /// Arguments of `kvt demo`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run our prefill and decode against SGLang's own; a table of cases. Sets up SGLang first when it is not here.
    Interop(interop::InteropArgs),
    /// Check the golden vectors against their manifest, then run the golden tests.
    Golden(golden::GoldenArgs),
    /// Fuzz every parser, the bootstrap routes, the rooms and the shards, each target for some time.
    Fuzz(fuzz::FuzzArgs),
    /// Explore the rooms in every order of events, full size, and put the known faults back; Markdown tables.
    Model,
    /// Simulate fleets under faults (`kvt sim`, release build); what follows is passed on. Default: a new seed, 1,000,000
    /// room lives.
    Sim {
        /// Arguments of `kvt sim`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run the budget benchmarks; what follows is passed on. `--json`: the last line is an array of rows.
    Bench {
        /// Arguments of the benchmark program.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

fn main() -> ExitCode {
    let result = sh::workspace_root().and_then(|root| {
        std::env::set_current_dir(&root).map_err(|e| format!("cannot go to {}: {e}", root.display()))?;
        match Cli::parse().task {
            Task::Ci(args) => ci::run(&args),
            Task::Setup(args) => setup::run(&args),
            Task::Demo { args } => demo(&args),
            Task::Interop(args) => interop::run(&args),
            Task::Golden(args) => golden::run(&args),
            Task::Fuzz(args) => fuzz::run(&args),
            Task::Model => model::run(),
            Task::Sim { args } => sim::run(&args),
            Task::Bench { args } => bench::run(&args),
        }
    });
    match result {
        Ok(code) => code,
        Err(e) => {
            eprintln!("xtask: {e}");
            ExitCode::FAILURE
        }
    }
}

fn demo(args: &[String]) -> sh::Result<ExitCode> {
    let mut command = sh::cargo(["run", "--profile", "quick", "--locked", "-p", "kv-transfer-cli", "--bin", "kvt"]);
    command.args(["--", "demo"]).args(args);
    eprintln!("building kvt ...");
    sh::status(&mut command)
}
