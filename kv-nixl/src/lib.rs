//! NIXL as a transport of `kv_core`: [`NixlTransport`] with [`NixlHooks`]. It speaks with NIXL workers of SGLang 0.5.23 in
//! both roles.
//!
//! ```no_run
//! use std::sync::Arc;
//! use kv_core::transport::Transport;
//! use kv_nixl::{NixlConfig, NixlTransport};
//!
//! // An error, with every place that was looked at, where the library is not installed.
//! let transport = Arc::new(NixlTransport::new(NixlConfig::default())?);
//! println!("{:?}", transport.library());
//! # Ok::<(), kv_core::transport::TransportError>(())
//! ```
//!
//! # The library
//! `libnixl_capi.so` of NIXL 1.5 is opened at run time: building needs nothing, and without it everything else works. It
//! is looked for at [`NixlConfig::library`]; else at `KV_NIXL_LIB`; else where `cargo xtask setup nixl` puts it, among the
//! packages of the Python installations (`pip install --no-deps nixl-cu12==1.5.1`), and on the loader's path ([`places`]).
//! Its environment is set before it is opened, never over the user's: [`prepare_environment`].
//!
//! UCX decides how bytes go. Between processes of one host the kernel copies (CMA), inside the post; elsewhere RDMA or
//! TCP. `UCX_TLS` and the other variables of UCX count as ever. UCX's signal handling, too: it takes SIGHUP for debugging.
//!
//! # What is proven, and how
//! The library is asked again and again how a transfer stands. Of its answers one proves something:
//!
//! | what happened | outcome | settled by |
//! |---|---|---|
//! | success | `Done` | |
//! | an error of a post or a transfer | `Unresolved`; the peer is lost, its endpoint closed, its memory and ours kept | the death of the peer's process |
//! | in progress for [`NixlConfig::op_timeout`] (a stopped peer: its kernel answers for it) | `Unresolved`, looked at further | success; else as above |
//! | the peer's process ends | `Unresolved` for what is in flight | the same event, once our endpoint is closed |
//!
//! *Death* is seen through a handle on the process, where it runs on this host and said which it is (peers of ours do, in
//! the extension of their registration); or it follows from a successor at the same address, on the same boot of the same
//! host. Peers of 0.5.23 say nothing of the kind: what failed towards them is kept until this process ends, and counted
//! ([`Stats::ops_retained`]).
//!
//! # What the library does that this crate is built around (1.5.1, each with a test)
//! * Releasing a transfer in progress succeeds and stops nothing: bytes written to the buffer later still arrive. So a
//!   handle is let go of on success, or after a death, and never else.
//! * Ending a registration does not take access back, and a write that comes in over TCP to memory that is gone kills the
//!   *target*. So memory that a peer may know stays mapped for the life of the process
//!   ([`NixlConfig::keep_exported`]).
//! * After one error an endpoint fails everything. So it is closed, and made anew when a room needs the peer.
//! * Metadata that it reads half makes it refuse the whole for ever. So it is checked before the library sees it.
//! * Shared-memory transports cannot tell that a peer died. So they are not used, unless [`PeerErrors::Ignored`].
//! * An agent with a transfer to a dead peer over shared memory cannot be ended. So it is kept.
//! * The progress thread spins on a core by default. So it gets a delay, which costs nothing: it wakes for events.
//!
//! Reads, notifications and the library's own metadata exchange are not used: decode learns of the end from prefill's
//! status message, as in 0.5.23.
//!
//! # Descriptor lists
//! Pages are merged to runs by the plan, and ops cut to [`NixlConfig::max_op_bytes`]. Where an op has many runs of an entry (a
//! layer's K or V), they go by lists prepared once, ours for all peers and the peer's for its generation, as far as
//! [`NixlConfig::prepared_descriptors`] allows; all else by lists made for the op. BENCHMARKS.md has both beside the library
//! driven bare.
//!
//! # Never run
//! On RDMA devices, with device memory, or on ROCm: the machines this was made on have none. Device memory takes the same
//! way as host memory, under its own kind and number; ops of mixed kinds are cut to one transfer a pair of kinds.
mod agent;
mod config;
mod environment;
mod hooks;
mod keeper;
mod lane;
mod library;
mod lower;
mod metadata;
mod peer;
mod prepared;
mod stats;
mod transport;

pub use config::{NixlConfig, PeerErrors};
pub use environment::prepare_environment;
pub use hooks::NixlHooks;
pub use library::LibraryInfo;
pub use nixl_capi_sys::{Place, places};
pub use stats::Stats;
pub use transport::NixlTransport;
