//! Move the KV cache of large-language-model requests from prefill to decode workers.
//!
//! One lifecycle for every transport, byte-compatible with SGLang 0.5.23 on the wire. Pick a transport with a cargo
//! feature; without any, this crate is the protocol alone.
//!
//! | feature | transport | needs |
//! |---|---|---|
//! | `tcp` (default) | [`tcp`]: host memory; same host by the kernel's vectored copy, across hosts by striped TCP | nothing |
//! | `nixl` | `kv_transfer::nixl`: host memory, and device memory (never run) over NIXL and UCX; speaks with SGLang's NIXL workers | `libnixl_capi.so` 1.5 at run time (`pip install --no-deps nixl-cu12==1.5.1`); building needs nothing |
//! | `mooncake` | `kv_transfer::mooncake`: host memory over Mooncake's TCP; RDMA and device memory (never run); speaks with SGLang's Mooncake workers | `libtransfer_engine.so` from 0.3.12 on at run time (`cargo xtask setup mooncake`, or a build with `-DBUILD_SHARED_LIBS=ON`); building needs nothing |
//! | `mooncake-tcp` | `kv_transfer::mooncake_tcp`: host memory over Mooncake's TCP wire, in Rust; works with the library's engines | nothing |
//!
//! # Both sides, in short
//!
//! ```no_run
//! # #[cfg(feature = "tcp")] fn f() -> Result<(), Box<dyn std::error::Error>> {
//! use std::sync::Arc;
//! use kv_transfer::hooks::TcpHooks;
//! use kv_transfer::layout::{AttentionKind, EntryDesc, LayoutSpec, LocalLayout};
//! use kv_transfer::manager::{DecodeConfig, DecodeManager, MetadataOptions};
//! use kv_transfer::tcp::{HostArena, TcpConfig, TcpTransport};
//! use kv_transfer::transport::Transport;
//! use kv_transfer::{KvPoll, Room};
//!
//! // One arena holds 2 MLA layers of 1024 pages (64 tokens x 1152 bytes), then 64 metadata rows of 64 bytes.
//! let (page, pages) = (64 * 1152, 1024);
//! let arena = Arc::new(HostArena::new(2 * pages * page + 64 * 64)?);
//! let transport = Arc::new(TcpTransport::new(TcpConfig::default())?);
//! let region = transport.register(arena.clone())?;
//! let entry = |offset, len, item_len| EntryDesc {
//!     region: region.id(), offset: offset as u64, len: len as u64, item_len: item_len as u64, layer_id: None,
//! };
//! let spec = LayoutSpec {
//!     kv: vec![entry(0, pages * page, page), entry(pages * page, pages * page, page)],
//!     aux: vec![entry(2 * pages * page, 64 * 64, 64)],
//!     page_size: 64,
//!     kv_cache_dtype: "bfloat16".into(),
//!     attention: AttentionKind::Mla,
//!     ..LayoutSpec::default()
//! };
//! let layout = LocalLayout::new(spec, [region])?;
//!
//! // Decode: ask for a request's KV, into pages 7, 8 and 9 and metadata row 0.
//! let decode = DecodeManager::start(DecodeConfig::default(), transport, Arc::new(TcpHooks::new()), layout)?;
//! let receiver = decode.receiver(Room::new(42).ok_or("0 is not a room")?, "10.0.0.7:8998")?;
//! receiver.init(None)?;
//! receiver.ready_timeout(std::time::Duration::from_secs(30));
//! receiver.send_metadata(&[7, 8, 9], 0, MetadataOptions::default())?;
//! match receiver.wait_timeout(std::time::Duration::from_secs(300)) {
//!     KvPoll::Success => println!("every byte is in place"),
//!     _ => println!("{:?}", receiver.failure()),
//! }
//! # Ok(()) }
//! ```
//!
//! The two sides in full, with threads and shutdown: `examples/prefill.rs` and `examples/decode.rs`.
//!
//! # Memory rules
//!
//! * A **source page** may be reused when its sender is [`releasable`](manager::KvSender::releasable).
//! * A **destination page** may be given to someone else when its receiver is
//!   [`releasable`](manager::KvReceiver::releasable). After Success that is at once; after a failure, when every
//!   contacted prefill rank has acknowledged that it writes no more, or the release policy gave up waiting.
//! * Registered memory stays registered while anything may still write to it, whatever handles you drop.

pub use kv_core::*;

#[cfg(feature = "tcp")]
pub use kv_tcp as tcp;

#[cfg(feature = "nixl")]
pub use kv_nixl as nixl;

#[cfg(feature = "mooncake")]
pub use kv_mooncake as mooncake;

#[cfg(feature = "mooncake-tcp")]
pub use kv_mooncake_tcp as mooncake_tcp;
