//! The program `kvt`.

use std::io;
use std::process::ExitCode;

use clap::Parser as _;
use kv_cli::leave;
use tracing_subscriber::filter::{LevelFilter, Targets};
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::util::SubscriberInitExt as _;

fn main() -> ExitCode {
    if let Some(code) = kv_cli::commands::doctor::probe_child() {
        return leave::with(code);
    }
    let cli = kv_cli::cli::Cli::parse();
    // While this is the only thread.
    if let kv_cli::cli::Command::Peer(command) = &cli.command {
        // SAFETY: no thread was started yet.
        if let Err(e) = unsafe { kv_cli::peer::set_environment(command.common()) } {
            eprintln!("kvt: {}", e.one_line());
            return ExitCode::FAILURE;
        }
    }
    #[cfg(feature = "nixl")]
    if cli.command.may_open("nixl") {
        kv_transfer::nixl::prepare_environment();
    }
    #[cfg(feature = "mooncake")]
    if cli.command.may_open("mooncake") {
        kv_transfer::mooncake::prepare_environment();
    }
    // Standard output is for results (and, in a worker, for events).
    // RUST_LOG: a level, or `target=level` by commas.
    let filter = std::env::var("RUST_LOG").ok().and_then(|text| text.parse::<Targets>().ok());
    // A simulation provokes every warning there is.
    let level = if cli.command.is_simulation() { LevelFilter::OFF } else { LevelFilter::WARN };
    let filter = filter.unwrap_or_else(|| Targets::new().with_default(level));
    tracing_subscriber::registry().with(tracing_subscriber::fmt::layer().with_writer(io::stderr)).with(filter).init();
    leave::with(match kv_cli::run(cli) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("kvt: {}", e.one_line());
            ExitCode::FAILURE
        }
    })
}
