//! `kvt peer`: one side of a room list, with the options and events of the program that runs the real SGLang
//! (`interop/` in the repository), so that either can take either side of a case.
//!
//! | file | what |
//! |---|---|
//! | `args` | the options |
//! | `store` | memory, aux rows, their pattern, and whether it arrived |
//! | `rank` | transport, managers' configs, the rank's layout |
//! | `prefill`, `decode` | the two roles: rooms in order, chunks, aborts |
//! | `input` | standard input (the gate), SIGTERM |
//! | `ranks` | a process for each rank |
//! | `events` | what is said, and the measured window |
//! | `capture` | the conversation, as a file |

pub mod args;
mod capture;
mod decode;
mod events;
mod input;
mod prefill;
mod rank;
mod ranks;
mod store;

use std::process::ExitCode;

use args::{CommonArgs, PeerCommand};

use crate::driver::agreement;
use crate::error::{CliError, Result};
use events::emit;

/// All rooms went as they should.
const GOOD: u8 = 0;
/// A room failed, or bytes were wrong.
const ROOMS_FAILED: u8 = 3;
/// The bootstrap server could not be used.
const NO_BOOTSTRAP: u8 = 4;

/// Run it. What ends it early is said as an event, too.
pub fn run(command: &PeerCommand) -> Result<ExitCode> {
    let common = command.common();
    if common.all_ranks && ranks::count(common) > 1 {
        return ranks::run(common);
    }
    let (role, result) = match command {
        PeerCommand::Prefill(args) => ("prefill", prefill::run(args)),
        PeerCommand::Decode(args) => ("decode", decode::run(args)),
        PeerCommand::Bootstrap(args) => ("bootstrap", bootstrap(args)),
    };
    if let Err(e) = &result {
        emit("error", serde_json::json!({ "role": role, "rank": rank::names(common), "reason": e.one_line() }))?;
    }
    result.map(ExitCode::from)
}

fn bootstrap(args: &CommonArgs) -> Result<u8> {
    let server = agreement::serve(&args.bootstrap_host, args.bootstrap_port)?;
    emit("ready", serde_json::json!({ "role": "bootstrap", "addr": server.local_addr().to_string() }))?;
    input::Input::start().wait_for_end();
    server.shutdown();
    Ok(GOOD)
}

/// Set the variables of `--env`.
///
/// # Safety
/// No other thread runs.
pub unsafe fn set_environment(args: &CommonArgs) -> Result<()> {
    for pair in &args.env {
        let Some((key, value)) = pair.split_once('=').filter(|(k, v)| !k.is_empty() && !v.contains('\0')) else {
            return Err(CliError::new(format!("--env {pair}")).hint("write it like UCX_TLS=tcp,self"));
        };
        // SAFETY: the caller's promise.
        unsafe { std::env::set_var(key, value) };
    }
    Ok(())
}
