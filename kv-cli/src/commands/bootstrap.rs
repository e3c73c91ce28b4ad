//! `kvt bootstrap`: the registry, until interrupted.

use std::process::ExitCode;

use crate::cli::BootstrapArgs;
use crate::driver::agreement;
use crate::error::{CliError, Result};
use crate::out;

/// Run it.
pub fn run(args: &BootstrapArgs, json: bool) -> Result<ExitCode> {
    let server = agreement::serve(&args.host, args.port)?;
    let addr = server.local_addr();
    if json {
        out::line(serde_json::json!({ "ok": true, "address": addr.to_string() }))?;
    } else {
        out::line(format_args!("bootstrap server on {addr}; end it with Ctrl-C"))?;
    }
    wait_for_signal()?;
    server.shutdown();
    Ok(ExitCode::SUCCESS)
}

/// Block until SIGINT or SIGTERM.
fn wait_for_signal() -> Result<()> {
    let fail = |e: std::io::Error| CliError::new(format!("cannot wait for signals: {e}")).hint_by_cause("");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(fail)?;
    runtime.block_on(async {
        let mut term = tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()).map_err(fail)?;
        tokio::select! {
            r = tokio::signal::ctrl_c() => r.map_err(fail),
            _ = term.recv() => Ok(()),
        }
    })
}

#[cfg(test)]
mod tests {
    use crate::driver::agreement::serve as bind;

    #[test]
    fn a_port_in_use_is_named() {
        let server = bind("127.0.0.1", 0).unwrap();
        let port = server.local_addr().port();
        let e = bind("127.0.0.1", port).err().unwrap().one_line();
        assert!(e.contains(&format!("127.0.0.1:{port}")) && e.contains("choose another port"), "{e}");
    }
}
