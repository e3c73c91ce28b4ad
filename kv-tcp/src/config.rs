//! Settings of the transport.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::Duration;

/// Whether two processes on one host copy directly.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SameHost {
    /// Where both sides can: the target tries it out at every handshake, and TCP is used where it does not work.
    #[default]
    Auto,
    /// Always TCP.
    Off,
    /// Never TCP: a peer whose memory cannot be read directly is refused, with the reason. For drills and tests.
    Only,
}

/// What to do where Yama lets only a parent read a process's memory (`ptrace_scope` 1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PtraceOptIn {
    /// Allow every process of the same user (`PR_SET_PTRACER_ANY`), which is the rule on hosts without Yama. The kernel
    /// keeps one named reader a process only, and a prefill worker has many decode peers, so naming them is no choice.
    #[default]
    Any,
    /// Change nothing; peers use TCP then.
    Off,
}

/// Settings of a [`TcpTransport`](crate::TcpTransport). The defaults suit a worker in a fleet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TcpConfig {
    /// Where to listen for peers' data; port 0 takes a free one. The default is every address, IPv6 and IPv4.
    pub bind: SocketAddr,
    /// Addresses to publish, in order of preference. Empty: the bound address, or every interface's when that is
    /// unspecified.
    pub advertise: Vec<IpAddr>,
    /// Threads that move data, however many peers there are. 0: one a core, at least 2 and at most 4.
    pub workers: usize,
    /// Data connections to each peer on the TCP path.
    pub connections_per_peer: usize,
    /// Whether to copy directly on one host.
    pub same_host: SameHost,
    /// Whether to lift Yama's rule for this process.
    pub ptrace_opt_in: PtraceOptIn,
    /// Kernel send and receive buffer of each data connection, bytes; `None` leaves the kernel's own.
    pub socket_buffer: Option<usize>,
    /// Ops up to this many bytes are written by the submitting thread itself on the TCP path, bytes.
    pub inline_max: usize,
    /// Ops from this many bytes on are copied by a second worker too.
    pub split_min: u64,
    /// Ops in flight on one lane; more are `Busy`.
    pub max_ops_in_flight: usize,
    /// Bytes of requests that wait for room in one socket of a lane; more are `Busy`.
    pub max_queued_bytes: usize,
    /// Largest op, bytes.
    pub max_op_bytes: u64,
    /// Largest request header, bytes: entries x 44 + runs x 12.
    pub max_header_bytes: usize,
    /// Sessions accepted from peers.
    pub max_sessions: usize,
    /// Connections in one session.
    pub max_connections_per_session: usize,
    /// Connections that have not said who they are yet.
    pub max_handshakes: usize,
    /// Time for one connection attempt and its handshake. `connect` makes one to each address of the peer until one
    /// answers, then one a data connection and lane; `lane` makes one a peer. Both block their caller for that long,
    /// and nobody else.
    pub connect_timeout: Duration,
    /// A connection whose peer's *kernel* acknowledges nothing for this long is lost. A stopped process's kernel still
    /// acknowledges, so slowness never ends a connection.
    pub dead_after: Duration,
    /// Idle time before the kernel probes a silent connection.
    pub keepalive: Duration,
    /// After this long without an answer, the transport stops trying to fence a lost session by itself (catalogue F53).
    /// A later `connect` to the peer tries again.
    pub fence_for: Duration,
}

impl Default for TcpConfig {
    fn default() -> Self {
        Self {
            bind: SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), 0),
            advertise: Vec::new(),
            workers: 0,
            connections_per_peer: 2,
            same_host: SameHost::Auto,
            ptrace_opt_in: PtraceOptIn::Any,
            socket_buffer: Some(512 << 10),
            inline_max: 64 << 10,
            split_min: 4 << 20,
            max_ops_in_flight: 1024,
            max_queued_bytes: 4 << 20,
            max_op_bytes: 1 << 40,
            max_header_bytes: 64 << 20,
            max_sessions: 16_384,
            max_connections_per_session: 128,
            max_handshakes: 1024,
            connect_timeout: Duration::from_secs(5),
            dead_after: Duration::from_secs(30),
            keepalive: Duration::from_secs(10),
            fence_for: Duration::from_secs(120),
        }
    }
}

impl TcpConfig {
    /// Defaults on the loopback address: for tests and single-host use.
    pub fn loopback() -> Self {
        Self { bind: SocketAddr::from(([127, 0, 0, 1], 0)), ..Self::default() }
    }

    pub(crate) fn worker_count(&self) -> usize {
        if self.workers == 0 { crate::sys::cores().clamp(2, 4) } else { self.workers.max(1) }
    }
}
