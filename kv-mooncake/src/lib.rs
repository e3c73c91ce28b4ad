//! The Mooncake transfer engine as a transport of `kv_core`: [`MooncakeTransport`] with [`MooncakeHooks`], for fleets of
//! SGLang 0.5.23 whose engine it is.
//!
//! ```no_run
//! use std::sync::Arc;
//! use kv_core::transport::Transport;
//! use kv_mooncake::{MooncakeConfig, MooncakeTransport};
//!
//! // An error, with every place that was looked at, where the library is not installed.
//! let transport = Arc::new(MooncakeTransport::new(MooncakeConfig::default())?);
//! println!("{:?} is {}", transport.library(), transport.local_name()); // 10.0.0.7:15592
//! # Ok::<(), kv_core::transport::TransportError>(())
//! ```
//!
//! # The library
//! `libtransfer_engine.so` is opened at run time: building needs nothing, and without it everything else works. It is looked
//! for at [`MooncakeConfig::library`]; else at `KV_MOONCAKE_LIB`; else where `cargo xtask setup mooncake` puts it, among the
//! packages of the Python installations, and on the loader's path ([`places`]). Its environment is set before it is opened,
//! never over the user's: [`prepare_environment`].
//!
//! Most builds do not have it: of the wheels on PyPI only `mooncake-transfer-engine-npu` does, made for Ascend cards and,
//! with `MC_FORCE_TCP`, good for TCP on any x86_64 with glibc 2.35. `pip install mooncake-transfer-engine` gives Python's
//! `engine.so` alone; a host with nothing else builds Mooncake with `-DBUILD_SHARED_LIBS=ON`. `mooncake-sys` has the table.
//!
//! A session id, `host:port`, is the whole of a peer's name and metadata. What it registered is asked of it at that port.
//!
//! # What is proven, and how
//! Over TCP a peer acknowledges a task when its last byte is in its memory; peers that do not (before 0.3.12) are refused.
//! Every task of every batch is looked at until it has ended, and its code first.
//!
//! | what happened | outcome | settled by |
//! |---|---|---|
//! | every task was acknowledged | `Done` | |
//! | a task failed, and all of the op has ended (TCP) | `Failed`: the source is quiet, the destination is not; the peer is lost, the rest of the op never goes, memory is kept | the death of the peer's process |
//! | a task failed, and others go on | `Unresolved`; the peer is lost as above | the same, once every task has ended; of a peer that does not say which process it is the source alone, then |
//! | the peer is lost, or nothing moved, while a part had not gone and all that had was acknowledged | `Failed`, both sides quiet | |
//! | nothing moved for [`MooncakeConfig::op_timeout`] | `Unresolved`, looked at further | acknowledgements; else as above |
//! | acknowledged after the peer was lost | as a task that failed: it may have been its successor's word | as above |
//!
//! A failed task proves nothing about its destination: its last bytes may lie in the socket of a stopped peer, which reads
//! them when it goes on. Its source is another matter over TCP: the library calls a task failed only when its socket is closed
//! and the last write to that has returned.
//!
//! An acknowledgement is believed when, after it was seen, the peer's process still ran; where that cannot be seen from here,
//! when no task to the peer had failed until then.
//!
//! *Death* is seen through a handle on the process, where it runs on this host and said which it is (peers of ours do, in
//! the extension of their registration); or it follows from a successor at the same address, on the same boot of the same
//! host. Peers of 0.5.23 say nothing of the kind: that their pages are quiet is never told, and what failed towards them is
//! counted until this process ends ([`Stats::ops_retained`]). Our own pages are free when the library has ended the tasks.
//!
//! # Generations
//! The wire has no word for them: a process that restarts on the same ports, with memory at the same addresses, takes what
//! was meant for the one before. So:
//! * Each [`connect`](kv_core::transport::Transport::connect) asks the peer for its descriptor anew. Another port, or none of
//!   the buffers that were there, is another generation. After a failure the library must ask, too
//!   (`openSegmentNoCache`). No verdict outlives the attempt: a peer that is back is connected at once.
//! * A new generation is read from, until each of the library's connections leads to it: none is made later, while all is well.
//! * After [`MooncakeConfig::confirm_after`] of silence one task goes alone; a connection to a process that is gone breaks it,
//!   and nothing follows.
//! * A range that the peer did not register is refused here, before it costs a connection.
//! * What is known to be dead gets nothing.
//!
//! A restart on the same ports takes 60 s, while a connection of ours to the old process is there: the library does not ask the
//! kernel for a port that is in use. One window stays: of several tasks that the library has *queued* when a peer dies, it
//! offers the rest to whoever listens on the data port then, at once where all its connections broke together, as when a host
//! comes back. That is a port out of 2000, and an address under ASLR; what is acknowledged then is not believed, with one
//! exception: a lane does not see at once that another lane's task has failed. Who pins ports and addresses, and lets the kernel
//! hand ports over sooner, closes it with [`MooncakeConfig::max_tasks_per_peer`] of 1.
//!
//! # What the library does that this crate is built around (0.3.13.post1)
//! * More than 2048 tasks to one peer fail, and may wait for ever. So there are never more than
//!   [`MooncakeConfig::max_tasks_per_peer`], over all batches and lanes; longer ops go piece by piece.
//! * A descriptor with members of odd types ends the process that reads it. So it is read and checked here first. A peer that
//!   answers twice, well and then ill, still can: nothing authenticates the handshake port, so keep strangers from it. They
//!   can also end a process by asking oddly: nothing here stands before the library's own listener.
//! * Ending a registration refuses writes that begin later; one that has begun goes on. So memory that a peer may know stays
//!   mapped for the life of the process ([`MooncakeConfig::keep_exported`]).
//! * It calls a batch busy until each task was seen ended, and cannot cancel. So a batch is let go of when all have arrived, or
//!   after a death.
//! * What it knows of a peer it never asks again by itself. See above.
//! * It holds its connections to a process that is gone until it uses them. So they are used once more where a death is seen,
//!   and break.
//! * Ending an engine takes up to a second, and a Go runtime stays. The library is never closed.
//!
//! # Never run
//! RDMA, device memory, ROCm, IPv6, aarch64, and a library built from source: the machines this was made on have none.
//! Device memory goes by its pointer, registered at `cuda:N`; the build for Ascend refuses it. Over RDMA connections are not
//! opened ahead, a first write makes them; and what a failed task proves there was not looked at, so it proves nothing at all.
mod config;
mod connect;
mod engine;
mod environment;
mod flight;
mod hooks;
mod keeper;
mod lane;
mod library;
mod lower;
mod peer;
mod probe;
mod stats;
mod transport;
mod window;

pub use config::MooncakeConfig;
pub use environment::prepare_environment;
pub use hooks::MooncakeHooks;
pub use library::LibraryInfo;
pub use mooncake_sys::{Place, places};
pub use stats::Stats;
pub use transport::MooncakeTransport;
