//! `kvt bootstrap`: the registry, until interrupted.

use std::process::ExitCode;

use kv_core::bootstrap::{BootstrapConfig, BootstrapServer};

use crate::cli::BootstrapArgs;
use crate::driver::agreement;
use crate::error::{CliError, Result};

/// Bind a registry; the error names the address and says what to do.
pub fn bind(host: &str, port: u16) -> Result<BootstrapServer> {
    BootstrapServer::bind_with(host, port, BootstrapConfig::default(), agreement::routes()).map_err(|e| {
        CliError::new(format!("cannot listen on {}: {}", e.addr, e.source))
            .hint("choose another port (0 takes a free one), or end the program that has it")
    })
}

/// Run it.
pub fn run(args: &BootstrapArgs, json: bool) -> Result<ExitCode> {
    let server = bind(&args.host, args.port)?;
    let addr = server.local_addr();
    if json {
        println!("{}", serde_json::json!({ "ok": true, "address": addr.to_string() }));
    } else {
        println!("bootstrap server on {addr}; end it with Ctrl-C");
    }
    wait_for_signal()?;
    server.shutdown();
    Ok(ExitCode::SUCCESS)
}

/// Block until SIGINT or SIGTERM.
fn wait_for_signal() -> Result<()> {
    let fail = |e: std::io::Error| CliError::new(format!("cannot wait for signals: {e}"));
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
    use super::*;

    #[test]
    fn a_port_in_use_is_named() {
        let server = bind("127.0.0.1", 0).unwrap();
        let port = server.local_addr().port();
        let e = bind("127.0.0.1", port).err().unwrap().one_line();
        assert!(e.contains(&format!("127.0.0.1:{port}")) && e.contains("choose another port"), "{e}");
    }
}
