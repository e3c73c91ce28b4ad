//! The program `kvt`.

use std::io;
use std::process::ExitCode;

use clap::Parser as _;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    if let Some(code) = kv_cli::commands::doctor::probe_child() {
        return code;
    }
    let cli = kv_cli::cli::Cli::parse();
    // Standard output is for results (and, in a worker, for events).
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new("warn"));
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(io::stderr).init();
    match kv_cli::run(cli) {
        Ok(code) => code,
        Err(e) => {
            eprintln!("kvt: {}", e.one_line());
            ExitCode::FAILURE
        }
    }
}
