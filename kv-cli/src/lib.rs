//! The parts of the program `kvt`: run, replay, measure and diagnose KV-cache transfers.

use std::process::ExitCode;

pub mod cli;
pub mod commands;
pub mod driver;
pub mod error;
pub mod hf_config;
pub mod leave;
#[cfg(any(feature = "nixl", feature = "mooncake"))]
pub mod library;
pub mod memory;
pub mod model;
#[cfg(feature = "mooncake")]
pub mod mooncake;
#[cfg(feature = "nixl")]
pub mod nixl;
pub mod out;
pub mod pattern;
pub mod peer;
pub mod plan_requests;
pub mod pool;
pub mod report;
pub mod shape;
pub mod trace;

/// Run a parsed command line.
///
/// # Errors
/// What ended the command; the caller prints it on one line and exits non-zero.
pub fn run(cli: cli::Cli) -> error::Result<ExitCode> {
    use cli::{Command, WireCommand};
    use driver::protocol::Role;
    let cli::Cli { json, seed, pattern, command } = cli;
    match command {
        Command::Bootstrap(args) => commands::bootstrap::run(&args, json),
        Command::Prefill(args) => commands::role::run(Role::Prefill, args, json, seed, pattern),
        Command::Decode(args) => commands::role::run(Role::Decode, args, json, seed, pattern),
        Command::Demo(args) => commands::replay::demo(args, json, seed, pattern),
        Command::Replay(args) => commands::replay::replay(&args, json, seed, pattern),
        #[cfg(feature = "sim")]
        Command::Sim(args) => commands::sim::run(&args, json, seed),
        Command::Peer(command) => peer::run(&command),
        Command::Doctor => commands::doctor::run(json),
        Command::Wire(WireCommand::Decode(args)) => commands::wire_decode::run(&args, json),
    }
}
