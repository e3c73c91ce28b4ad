//! What users hold: a manager per rank, and a sender or receiver per room.
//!
//! ```text
//! prefill rank                                    decode rank
//! PrefillManager::start(..)                       DecodeManager::start(..)
//! manager.register(..)   -> bootstrap server
//! manager.sender(room)                            manager.receiver(room, bootstrap_addr)
//!   .init(pages, aux_index)                         .init(None); .ready().await     prefill's ranks are known
//!   .send(&page_indices, ..)   one per chunk        .send_metadata(&page_indices, aux_index, ..)
//!   .wait().await              Success / Failed     .wait().await
//!   .released().await          source pages free    .released().await               pages of a failed room free
//!   .clear()                                        .clear()
//! ```
//!
//! `poll()` is one atomic load and drives nothing. Completion is pushed: waiters are woken.

mod config;
mod connector;
mod core;
mod decode;
mod dp;
mod handle;
mod live;
mod one_each;
mod prefill;
mod receiver;
mod runtime;
mod sender;

pub use config::{DecodeConfig, PrefillConfig, PrefillIdentity};
pub use decode::DecodeManager;
pub use handle::{RoomHandle, poll_many};
pub use prefill::PrefillManager;
pub use receiver::{KvReceiver, MetadataOptions};
pub use sender::{KvSender, SendOptions, SenderOptions};

use crate::ids::Room;

/// `bootstrap_host` of the fake sender and receiver (requirement A5): Success at once, nothing on the wire.
pub const FAKE_BOOTSTRAP_HOST: &str = "2.2.2.2";

/// Whether this bootstrap address is the fake one.
fn is_fake(bootstrap_addr: &str) -> bool {
    bootstrap_addr.rsplit_once(':').map_or(bootstrap_addr, |(host, _)| host) == FAKE_BOOTSTRAP_HOST
}

/// Why a manager could not be started.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ManagerError {
    /// No address peers can reach was found or named.
    #[error("no address for the control socket: {0}; name one in the config (host)")]
    LocalAddress(String),
    /// The control socket.
    #[error("control socket: {0}")]
    Control(String),
    /// The transport refused a lane.
    #[error("transport: {0}")]
    Transport(#[from] crate::transport::TransportError),
    /// Threads or descriptors ran out.
    #[error("system: {0}")]
    System(#[from] std::io::Error),
    /// The rank's own sizes make no sense, or its backend lacks what they need (A4).
    #[error("config: {0}")]
    Config(String),
    /// The directory or registry.
    #[error("bootstrap: {0}")]
    Bootstrap(String),
}

/// Why a call on a room was refused. The room itself is not changed, unless the variant says so.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RoomError {
    /// The number is in use by a live room (F40). The first one is not touched.
    #[error("room {0} is in use: clear its sender or receiver before the number is used again")]
    RoomInUse(Room),
    /// An earlier life of this number may still be written to: its pages are not released yet (F6).
    #[error(
        "room {0} was used before and prefill may still write its old pages: wait for released() of the old receiver"
    )]
    RoomDraining(Room),
    /// Too many rooms.
    #[error("{0} rooms are live, which is the limit (Limits.max_rooms)")]
    TooManyRooms(usize),
    /// `init()` was not called, or was called twice.
    #[error("room {room}: {what}")]
    Order {
        /// Which room.
        room: Room,
        /// What to do.
        what: &'static str,
    },
    /// More pages than `init()` said: no chunk would ever be the last one.
    #[error("room {room}: send() of {pages} pages after {sent} of {total}; init() named the total")]
    TooManyPages {
        /// Which room.
        room: Room,
        /// Pages of this call.
        pages: usize,
        /// Pages sent before.
        sent: u32,
        /// Pages named in `init()`.
        total: u32,
    },
    /// The last chunk was sent.
    #[error("room {room}: send() after the last chunk")]
    AfterLast {
        /// Which room.
        room: Room,
    },
    /// The backend cannot do this (A4).
    #[error("room {room}: {what} is not supported by the {backend} backend")]
    NotSupported {
        /// Which room.
        room: Room,
        /// What.
        what: &'static str,
        /// By whom.
        backend: &'static str,
    },
}
