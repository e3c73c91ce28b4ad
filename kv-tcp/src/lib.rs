//! The embedded transport for host memory: [`TcpTransport`] behind `kv_core::transport`. Pure Rust over the kernel's
//! own calls; used where there is no RDMA.
//!
//! ```
//! use std::sync::Arc;
//! use kv_core::transport::Transport;
//! use kv_tcp::{HostArena, TcpConfig, TcpTransport};
//!
//! let transport = TcpTransport::new(TcpConfig::loopback())?;
//! let pages = Arc::new(HostArena::new(64 << 20)?);
//! let region = transport.register(pages)?; // the registration ends with the last holder of this
//! let blob = transport.local_metadata(); // what a peer needs to write here
//! # drop((region, blob));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # Two paths
//! * **Same host, same user.** The source sends a description of the copy, and the *target* carries it out with
//!   `process_vm_readv`, up to 64 segments and 1 MiB a call. It is as fast as copying from the source's side, and the
//!   owner of the written memory itself knows when its copies have ended. At the handshake the target proves that it
//!   can, by reading a random number out of the source's memory; [`TcpTransport::peer_path`] says why not, where not.
//! * **Otherwise TCP.** Ops up to 64 KiB go over the lane's own connection, written by the submitting thread. Larger
//!   ones are striped by bytes over two or more data connections, sent from and received into the pages themselves.
//!
//! A plan travels as entries x runs, never expanded, and each op gets one acknowledgement, which the lane reads itself.
//!
//! # Who may write
//! Each region has a random 128-bit key, published in [`local_metadata`](kv_core::transport::Transport::local_metadata).
//! A request names regions by number and key; the target checks the key and every byte's place before it copies one. A
//! wrong key or place ends the session; a region that is not registered any more only fails the op. Metadata and keys
//! are secrets: whoever has them may write. They travel in the clear, as the data does: run it inside a network you trust.
//!
//! # What is proven, and how
//! | what happened | outcome | settled by |
//! |---|---|---|
//! | the target's answer | `Done`, or `Failed` with both sides quiet | |
//! | connection lost, same host | `Unresolved` | the fence, or the death of the process |
//! | connection lost, TCP | `Failed`, source quiet once our own sends have ended | the same |
//! | the target is stopped or slow | nothing is said | |
//!
//! *The fence*: a new connection asks the target to end the old session. The target closes the session's connections,
//! lets its running copies end, and only then answers; nothing of the session can write after that, whatever is still in
//! a socket. *Death*: the process's exit seen through a pidfd; or, where its pids are not ours to see, another process
//! that answers for the same endpoint, at the same address, and is on the same boot of that host; or the target's own
//! goodbye when it shuts down. What a registration merely claims settles nothing.
//! A connection is lost when it is closed or reset, or when the peer's *kernel* acknowledges nothing for
//! [`TcpConfig::dead_after`]. The kernel answers for a stopped process too, so slowness is never taken for death.
//!
//! # Threads
//! A few workers ([`TcpConfig::workers`]) and one keeper, however many peers there are. Connections to a peer: one a
//! lane, and on the TCP path [`TcpConfig::connections_per_peer`] for data; they are reused for every op.
//!
//! # What the host must allow
//! [`probe`] reports it. Yama's `ptrace_scope` 1 is lifted for this process by default ([`PtraceOptIn`]); with 2 or 3,
//! or in separate pid namespaces (containers without a shared one), TCP is used. Huge pages make copies 40 % faster:
//! [`HostArena`] asks for them, [`huge_page_bytes`] tells whether a region has them.
mod arena;
mod blob;
mod codec;
mod config;
mod conn;
mod connect;
mod copy;
mod frame;
#[cfg(feature = "fuzzing")]
#[doc(hidden)]
pub mod fuzzing;
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
#[cfg(test)]
mod succession_tests;
mod sys;
mod transport;
mod worker;

pub use arena::HostArena;
pub use config::{PtraceOptIn, SameHost, TcpConfig};
pub use host::{HostProbe, huge_page_bytes, probe};
pub use peer::{PathInfo, PathKind};
pub use stats::Stats;
pub use transport::TcpTransport;
