//! The engines this program was built with.

use std::sync::Arc;

use crate::driver::engine::{DecodeEngine, EngineFactory, PrefillStart};
use crate::driver::managed::{self, Backend};
use crate::driver::protocol::{TcpPath, WorkerConfig};
use crate::error::{CliError, Result};
use crate::memory::KvMemory;

/// Picks the engine by the name of the transport.
#[derive(Clone, Copy, Debug, Default)]
pub struct BuiltIn;

/// Names of the transports that are built in.
pub const TRANSPORTS: &[&str] = &[
    #[cfg(feature = "tcp")]
    "tcp",
    #[cfg(feature = "nixl")]
    "nixl",
    #[cfg(feature = "mooncake")]
    "mooncake",
];

/// A transport by its name. `host`: the address that peers reach this rank at.
///
/// # Errors
/// It is not built in, or cannot start here.
pub fn backend(transport: &str, host: &str, path: TcpPath) -> Result<Backend> {
    #[cfg(not(any(feature = "tcp", feature = "mooncake")))]
    let _ = host;
    #[cfg(not(feature = "tcp"))]
    let _ = path;
    match transport {
        #[cfg(feature = "tcp")]
        "tcp" => tcp(host, path),
        #[cfg(feature = "nixl")]
        "nixl" => nixl(),
        #[cfg(feature = "mooncake")]
        "mooncake" => mooncake(host),
        name => {
            let known = if TRANSPORTS.is_empty() { "none".to_owned() } else { TRANSPORTS.join(", ") };
            Err(CliError::new(format!("transport '{name}' is not built into this program"))
                .hint(format!("built in: {known}; `kvt doctor` says what works here")))
        }
    }
}

#[cfg(feature = "tcp")]
fn tcp(host: &str, path: TcpPath) -> Result<Backend> {
    use crate::driver::protocol::Arrived;
    use kv_transfer::tcp::{SameHost, TcpConfig, TcpTransport};
    let ip = host.trim_start_matches('[').trim_end_matches(']').parse::<std::net::IpAddr>();
    let mut tcp = TcpConfig {
        same_host: match path {
            TcpPath::Auto => SameHost::Auto,
            TcpPath::Copy => SameHost::Only,
            TcpPath::Stream => SameHost::Off,
        },
        ..TcpConfig::default()
    };
    if let Ok(ip) = ip {
        // Peers come to the address the control socket has, too.
        tcp.bind = (ip, 0).into();
    }
    let transport = TcpTransport::new(tcp)
        .map_err(|e| CliError::new(format!("cannot start the tcp transport: {e}")).hint_by_cause(""))?;
    let transport = Arc::new(transport);
    let counted = Arc::clone(&transport);
    let arrived = move || {
        let stats = counted.stats();
        Arrived { copied: stats.bytes_copied_in, streamed: stats.bytes_received }
    };
    Ok(Backend { transport, hooks: Arc::new(kv_transfer::hooks::TcpHooks::new()), arrived: Box::new(arrived) })
}

/// The library does not say what comes in, nor by which way: nothing is counted as arrived.
#[cfg(feature = "nixl")]
fn nixl() -> Result<Backend> {
    use crate::driver::protocol::Arrived;
    Ok(Backend {
        transport: Arc::new(crate::nixl::open()?),
        hooks: Arc::new(kv_transfer::nixl::NixlHooks::new()),
        arrived: Box::new(Arrived::default),
    })
}

/// As NIXL.
#[cfg(feature = "mooncake")]
fn mooncake(host: &str) -> Result<Backend> {
    use crate::driver::protocol::Arrived;
    Ok(Backend {
        transport: Arc::new(crate::mooncake::open(host)?),
        hooks: Arc::new(kv_transfer::mooncake::MooncakeHooks::new()),
        arrived: Box::new(Arrived::default),
    })
}

impl EngineFactory for BuiltIn {
    fn prefill(&self, config: &WorkerConfig, memory: Arc<KvMemory>) -> Result<PrefillStart> {
        managed::prefill(config, backend(&config.transport, &config.host, config.tcp_path)?, &memory)
    }

    fn decode(&self, config: &WorkerConfig, memory: Arc<KvMemory>) -> Result<Box<dyn DecodeEngine>> {
        managed::decode(config, backend(&config.transport, &config.host, config.tcp_path)?, &memory)
    }
}
