//! Mooncake's TCP wire without Mooncake: [`MooncakeTcpTransport`] speaks it in Rust, as initiator and as target, and works
//! with the library's engines in both directions. For hosts that have no `libtransfer_engine.so`; host memory and TCP alone.
//!
//! ```
//! use std::sync::Arc;
//! use kv_core::transport::Transport;
//! use kv_mooncake_tcp::{MooncakeTcpConfig, MooncakeTcpTransport};
//!
//! let transport = Arc::new(MooncakeTcpTransport::new(MooncakeTcpConfig::loopback())?);
//! println!("{}", transport.local_name()); // 127.0.0.1:39127: all that a peer needs to know
//! # Ok::<(), kv_core::transport::TransportError>(())
//! ```
//!
//! The wire itself is in `mooncake_wire`. Compared with `kv_mooncake`, which drives the library: requests of a lane go over
//! one connection, one behind the other, without a wait between them, and nothing is limited to 2048 tasks; a registration
//! that has ended is closed for certain; a peer that sends nonsense ends no process. It has no RDMA and no device memory.
//!
//! # Who may write
//! Nobody is authenticated: the wire has no word for it. Whoever reaches the data port may write and read what is registered,
//! and nothing else: each range must lie inside one registered block. Run it inside a network you trust.
//!
//! # What is proven, and how
//! A target of version 2 of the wire (Mooncake from 0.3.12 on) acknowledges each write when its last byte is in memory.
//! Towards one of version 1 a byte is read behind the writes of each op: a target takes the requests of a connection in the
//! order of its stream, so its answer is theirs.
//!
//! | what happened | outcome | settled by |
//! |---|---|---|
//! | every request was acknowledged | `Done` | |
//! | the peer refused a request | `Failed`, both sides quiet: it takes nothing that follows | |
//! | the connection broke before anything of the op had gone | `Failed`, both sides quiet | |
//! | it broke later | `Failed`, source quiet: the kernel has its own copy of what was sent | the death of the peer's process |
//! | nothing moved for [`MooncakeTcpConfig::op_timeout`] | `Unresolved`; what had not begun to go never goes | acknowledgements; else as above |
//! | the peer answered what makes no sense | as a connection that broke | |
//!
//! What is not settled is kept: counted ([`Stats::ops_retained`]), with its memory registered. A connection that closes proves
//! nothing: what the peer's kernel holds of it a stopped process reads when it goes on.
//!
//! *Death* is seen through a handle on the process, where it runs on this host and said which it is (peers of ours do, in the
//! extension of their registration); or it follows from a successor at the same address, on the same boot of the same host.
//! Peers of 0.5.23 say nothing of the kind: what failed towards them is kept until this process ends.
//!
//! # Generations
//! A process that restarts on the same ports would take what was meant for the one before. So connections are made only
//! while a peer is connected, and none is used before an older one to the same peer has answered once more: then its process
//! was there when the younger ones were taken. A connection that broke is never made anew behind a generation's back.
//!
//! # Never run
//! IPv6; two hosts; version 1 against anything but the test kit's peer: not against a library from before 0.3.12.
mod config;
mod conn;
mod connect;
mod dial;
mod flight;
mod greeting;
mod hooks;
mod inbound;
mod lane;
mod lower;
mod peer;
mod registry;
mod service;
mod stats;
mod sys;
mod transport;

pub use config::MooncakeTcpConfig;
pub use hooks::MooncakeTcpHooks;
pub use stats::Stats;
pub use transport::MooncakeTcpTransport;
