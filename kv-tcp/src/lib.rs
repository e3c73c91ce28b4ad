//! The embedded transport for host memory.
mod arena;
mod blob;
mod codec;
mod config;
mod conn;
mod connect;
mod copy;
mod frame;
mod host;
#[cfg(test)]
mod hostile_tests;
mod inbound;
mod keeper;
mod lane;
mod outbound;
mod peer;
mod plan;
mod region;
mod session;
mod stats;
mod sys;
mod transport;
mod worker;

pub use arena::HostArena;
pub use config::{PtraceOptIn, SameHost, TcpConfig};
pub use host::{HostProbe, huge_page_bytes, probe};
pub use peer::{PathInfo, PathKind};
pub use stats::Stats;
pub use transport::TcpTransport;
