//! The directory seam: how a decode shard learns prefill's ranks and their health, without doing I/O itself.
//!
//! A shard calls [`Directory::request`] and goes on; answers come back as [`DirectoryEvent`]s among its inputs. The
//! HTTP directory (feature `bootstrap`) answers from a thread of its own, caches per address, asks once for many
//! rooms (single-flight), and watches the health of each address it handed out.

pub mod cache;
pub mod compat;
pub mod heartbeat;
#[cfg(feature = "bootstrap")]
pub mod http;
#[cfg(feature = "bootstrap")]
mod queue;
mod server_state;

use std::sync::Arc;

use crate::ids::{PrefillRank, Room};
use crate::net::Endpoint;
use crate::wire::ExtPeer;

pub use cache::{DirectoryConfig, DirectoryCore};
pub use compat::{DecodeProfile, NixlEntries};
pub use heartbeat::HeartbeatConfig;
#[cfg(feature = "bootstrap")]
pub use http::{DirectoryHandle, EventSink, HttpDirectory};

/// One prefill rank a decode rank talks to.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PrefillRecord {
    /// Its PULL socket.
    pub endpoint: Endpoint,
    /// Its number in status and ACK messages.
    pub rank: PrefillRank,
    /// CP rank.
    pub cp_rank: u32,
    /// TP rank.
    pub tp_rank: u32,
    /// PP rank.
    pub pp_rank: u32,
    /// It gets metadata, writes nothing and reports to nobody.
    pub is_dummy: bool,
    /// It is one of ours, as its registry says.
    pub ext: Option<ExtPeer>,
}

/// Everything a decode rank needs to know about one prefill server, for one connection-pool key.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct PrefillPeers {
    /// `host:port` of the bootstrap server.
    pub bootstrap_addr: String,
    /// `"{addr}_{dp}_{cp}_{target_tp_rank}"`: registration goes out once per key.
    pub pool_key: String,
    /// In connection order: registration, metadata and ABORT go to all of them, dummies included.
    pub records: Vec<PrefillRecord>,
    /// Travels in metadata.
    pub required_dst_info_num: u32,
    /// How many distinct ranks must report Success.
    pub required_prefill_response_num: u32,
    /// Changes when the address was lost and fetched anew: a new generation is registered again.
    pub generation: u64,
}

/// What a shard asks for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectoryRequest {
    /// Decode: the peers for a room. One [`DirectoryEvent::Peers`] follows.
    Peers {
        /// Comes back in the answer.
        token: u64,
        /// For `room mod dp_size` and for error texts.
        room: Room,
        /// `host:port` of the bootstrap server, IPv6 bracketed.
        bootstrap_addr: String,
        /// From the request, when it names one.
        prefill_dp_rank: Option<u32>,
    },
    /// Decode: the peers of `pool_key` did not take messages, or their connection broke; fetch them anew next time.
    Forget {
        /// Which key.
        pool_key: String,
    },
    /// Prefill: tell the registry which DP rank serves a room. One [`DirectoryEvent::DpRankRegistered`] follows.
    RegisterDpRank {
        /// Comes back in the answer.
        token: u64,
        /// Which server.
        bootstrap_addr: String,
        /// Which room.
        room: Room,
        /// Which rank.
        dp_rank: u32,
    },
    /// Prefill: no longer. A question that was not asked yet is not asked; of one that is under way nothing is heard.
    CancelDpRank {
        /// Of the [`RegisterDpRank`](Self::RegisterDpRank).
        token: u64,
    },
}

/// What a directory reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DirectoryEvent {
    /// Answer to [`DirectoryRequest::Peers`].
    Peers {
        /// From the request.
        token: u64,
        /// The peers, or the reason recorded on the room: it names the address, the rank and what to do.
        result: Result<Arc<PrefillPeers>, String>,
    },
    /// Answer to [`DirectoryRequest::RegisterDpRank`].
    DpRankRegistered {
        /// From the request.
        token: u64,
        /// The registry knows the rank now, or why not.
        result: Result<(), String>,
    },
    /// The server missed its heartbeats: everything cached for it is dropped, its rooms fail (protocol 7.5).
    NodeLost {
        /// Which server.
        bootstrap_addr: String,
        /// `Lost connection with prefill instance (bootstrap_addr: ..)`.
        reason: String,
    },
}

/// Takes requests; never blocks.
pub trait Directory: Send {
    /// Start a request.
    fn request(&mut self, request: DirectoryRequest);
}
