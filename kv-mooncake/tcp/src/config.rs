//! How a transport is set up.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// Settings of a [`MooncakeTcpTransport`](crate::MooncakeTcpTransport).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MooncakeTcpConfig {
    /// The address peers reach this host at; it becomes the first half of the session id. `None`: as SGLang finds it
    /// ([`local_ip`](kv_core::control::local_ip::local_ip)).
    pub host: Option<String>,
    /// Where the handshake port listens; port 0 takes a free one. Its port is the second half of the session id.
    pub bind: SocketAddr,
    /// The data port, at the same address; 0 takes a free one.
    pub data_port: u16,
    /// Largest op, bytes.
    pub max_op_bytes: u64,
    /// Ops of one lane without an outcome; more are `Busy`.
    pub max_ops_in_flight: usize,
    /// Contiguous copies of those ops; more are `Busy`, but for one op alone.
    pub max_pieces_in_flight: usize,
    /// An op of which nothing has moved for this time is reported unresolved, and its acknowledgements are waited for further.
    pub op_timeout: Duration,
    /// How long a peer may take to answer for itself when it is connected: all of it, handshake and data port.
    pub connect_timeout: Duration,
    /// A connection whose peer's *kernel* acknowledges nothing for this long is lost. A stopped process's kernel still does.
    pub dead_after: Duration,
    /// Data connections that peers may have here; further ones are closed.
    pub max_connections: usize,
    /// Handshakes that peers may have here at a time; further ones are closed.
    pub max_handshakes: usize,
    /// How long a peer may take to ask, and to close when it was answered or refused.
    pub handshake_timeout: Duration,
}

impl Default for MooncakeTcpConfig {
    fn default() -> Self {
        Self {
            host: None,
            bind: SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), 0),
            data_port: 0,
            max_op_bytes: 16 << 20,
            max_ops_in_flight: 1024,
            max_pieces_in_flight: 64 << 10,
            op_timeout: Duration::from_secs(65),
            connect_timeout: Duration::from_secs(5),
            dead_after: Duration::from_secs(30),
            max_connections: 1024,
            max_handshakes: 64,
            handshake_timeout: Duration::from_secs(5),
        }
    }
}

impl MooncakeTcpConfig {
    /// Defaults on the loopback address: for tests and single-host use.
    pub fn loopback() -> Self {
        let bind = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);
        Self { host: Some("127.0.0.1".into()), bind, ..Self::default() }
    }
}
