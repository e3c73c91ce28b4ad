//! Typed control messages, the union of what the three dialects carry.

use std::sync::Arc;

use bytes::Bytes;

use super::ext::MessageKind;
use crate::ids::PrefillRank;
use crate::memory::MemoryKind;
use crate::net::Endpoint;
use crate::poll::KvPoll;

/// Where a list of a peer's buffers is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Buffers {
    /// Absolute addresses (NIXL, Mooncake, TCP).
    Addrs(Vec<u64>),
    /// Opaque packed descriptors, `None` = elided (Mori).
    Descriptors(Vec<Option<Bytes>>),
}

impl Buffers {
    /// How many.
    pub fn len(&self) -> usize {
        match self {
            Self::Addrs(v) => v.len(),
            Self::Descriptors(v) => v.len(),
        }
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// One state component of a registration; what a dialect does not carry is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StateComponent {
    /// Its tensors.
    pub buffers: Buffers,
    /// Bytes of one item of each tensor.
    pub item_lens: Vec<u32>,
    /// The dimension sliced over TP, per tensor.
    pub dims: Vec<u32>,
    /// Layer id of each tensor.
    pub layer_ids: Vec<u32>,
    /// Bytes of each tensor's whole region (NIXL).
    pub region_lens: Vec<u64>,
}

/// D → P, once per connection-pool key: decode's geometry and addresses (protocol 6.1).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Registration {
    /// Decode's PULL socket.
    pub endpoint: Endpoint,
    /// Agent name (NIXL, TCP) or session id (Mooncake). Empty for Mori, whose engine key is inside `metadata`.
    pub name: String,
    /// Agent metadata (NIXL, TCP) or packed EngineDesc (Mori); empty for Mooncake.
    pub metadata: Bytes,
    /// KV buffers, one per layer and K/V: all K, then all V; MLA one per layer; draft entries last.
    pub kv: Buffers,
    /// Bytes of one page of each KV entry; same length as `kv`, or empty when the peer did not say.
    pub kv_item_lens: Vec<u64>,
    /// First KV entry's page bytes; 0 when there is no KV entry.
    pub kv_item_len: u64,
    /// Pages per KV entry (NIXL, TCP frame 17); `None` when unknown.
    pub kv_slots: Option<u64>,
    /// Memory kind of each KV entry; empty = all device memory (NIXL, TCP).
    pub kv_kinds: Vec<MemoryKind>,
    /// Layer id of each KV entry; empty when not sent.
    pub kv_layer_ids: Vec<u32>,
    /// Aux buffers.
    pub aux: Buffers,
    /// State components, paired by position.
    pub state: Vec<StateComponent>,
    /// Device number (NIXL, Mori, TCP).
    pub gpu_id: i64,
    /// Decode's attention TP size.
    pub attn_tp_size: u32,
    /// Decode's TP rank.
    pub engine_rank: u32,
    /// Decode's DCP size.
    pub dcp_size: u32,
    /// Decode's DCP rank.
    pub dcp_rank: u32,
    /// Staging ring, when decode has one.
    pub staging: Option<StagingBase>,
    /// Layer ids of staging slots (Mooncake).
    pub staging_layer_ids: Vec<u64>,
}

/// Decode's staging ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingBase {
    /// First byte's address.
    pub addr: u64,
    /// Length in bytes.
    pub len: u64,
}

/// D → P, once per request and P rank: where this room's KV goes (protocol 6.2).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Metadata {
    /// `bootstrap_room`.
    pub room: u64,
    /// Decode's PULL socket.
    pub endpoint: Endpoint,
    /// Decode's agent name, session id or engine key: the id P counts distinct decodes by.
    pub name: String,
    /// Destination pages, paired with the sent pages by position.
    pub dst_pages: Arc<[i32]>,
    /// Metadata slot; `None` when empty (dummy, or none).
    pub aux_index: Option<u32>,
    /// How many distinct decodes this P rank must hear from.
    pub required_dst_info_num: u32,
    /// Destination state indices per component.
    pub state_indices: Vec<Vec<i32>>,
    /// Tokens decode already has; `None` when the frame is absent (or empty, Mori).
    pub decode_prefix_len: Option<u64>,
    /// This P rank writes nothing for the room and reports to nobody.
    pub is_dummy: bool,
    /// HiSparse device pages (Mooncake).
    pub device_kv_indices: Option<Arc<[i32]>>,
}

/// P → D: a room's status on one P rank (protocol 6.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KvStatus {
    /// `bootstrap_room`.
    pub room: u64,
    /// 0 Failed, 4 Success (2 under prefill_complete).
    pub status: KvPoll,
    /// Who reports.
    pub prefill_rank: PrefillRank,
    /// Why it failed; `None` when the frame is absent or empty.
    pub reason: Option<String>,
}

/// P → D: a staged chunk is in decode's ring (protocol 6.4).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChunkReady {
    /// `bootstrap_room`.
    pub room: u64,
    /// Which grid chunk.
    pub chunk_idx: u32,
    /// First page, relative to the request's sent pages.
    pub page_start: u32,
    /// Pages in it.
    pub num_pages: u32,
    /// Decode's own id as P knows it.
    pub writer_id: String,
    /// Which P rank wrote; `None` when the frame is absent.
    pub prefill_rank: Option<PrefillRank>,
}

/// P → D: a request for ring space (protocol 6.5).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagingReq {
    /// `bootstrap_room`.
    pub room: u64,
    /// Which grid chunk.
    pub chunk_idx: u32,
    /// Pages in it.
    pub num_pages: u32,
    /// Decode's id as P knows it.
    pub session_id: String,
    /// Requester's PP rank (Mooncake).
    pub requester_pp_rank: Option<u32>,
}

/// D → P: where in the ring a chunk goes (protocol 6.6).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StagingRsp {
    /// `bootstrap_room`.
    pub room: u64,
    /// Which grid chunk.
    pub chunk_idx: u32,
    /// Byte offset in the ring; -2 = can never fit.
    pub offset: i64,
    /// Ring round.
    pub round: i64,
    /// `offset` + size.
    pub end: i64,
    /// Decode's id.
    pub session_id: String,
}

/// D → P: how far the ring is free (protocol 6.7).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Watermark {
    /// Ring round.
    pub round: i64,
    /// Byte offset of the oldest live allocation.
    pub tail: i64,
    /// Decode's id; empty when absent.
    pub session_id: String,
}

/// D → P: stop this room (protocol 6.8).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Abort {
    /// `bootstrap_room`.
    pub room: u64,
    /// Where an ACK goes; `None` when absent or malformed.
    pub endpoint: Option<Endpoint>,
    /// Set when decode holds pages until the ACK.
    pub generation: Option<u64>,
}

/// P → D: no write of this room can land any more (protocol 6.9).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AbortAck {
    /// `bootstrap_room`.
    pub room: u64,
    /// Who drained.
    pub prefill_rank: PrefillRank,
    /// The ABORT's generation.
    pub generation: u64,
}

/// P → D: one aux row by message (protocol 6.10).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AuxData {
    /// `bootstrap_room`.
    pub room: u64,
    /// Which aux buffer.
    pub buffer_index: u32,
    /// Which slot.
    pub aux_index: u32,
    /// The row.
    pub data: Bytes,
}

/// D → P: decode is there, before it allocates (policy prefill_complete, protocol 6.11).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BootstrapHello {
    /// `bootstrap_room`.
    pub room: u64,
    /// Decode's PULL socket.
    pub endpoint: Endpoint,
}

/// What arrives on prefill's PULL socket.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ToPrefill {
    /// Decode's geometry.
    Registration(Box<Registration>),
    /// A room's destinations.
    Metadata(Metadata),
    /// Stop a room.
    Abort(Abort),
    /// Ring space granted.
    StagingRsp(StagingRsp),
    /// Ring space freed.
    Watermark(Watermark),
    /// Decode is there.
    Bootstrap(BootstrapHello),
}

/// What arrives on decode's PULL socket.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ToDecode {
    /// A room's status on one rank.
    Status(KvStatus),
    /// A staged chunk arrived.
    ChunkReady(ChunkReady),
    /// Ring space wanted.
    StagingReq(StagingReq),
    /// A room is drained on one rank.
    AbortAck(AbortAck),
    /// One aux row.
    AuxData(AuxData),
}

impl ToPrefill {
    /// What kind of message it is.
    pub fn kind(&self) -> MessageKind {
        match self {
            Self::Registration(_) => MessageKind::Registration,
            Self::Metadata(_) => MessageKind::Metadata,
            Self::Abort(_) => MessageKind::Abort,
            Self::StagingRsp(_) => MessageKind::StagingRsp,
            Self::Watermark(_) => MessageKind::Watermark,
            Self::Bootstrap(_) => MessageKind::Bootstrap,
        }
    }
}

impl ToDecode {
    /// What kind of message it is.
    pub fn kind(&self) -> MessageKind {
        match self {
            Self::Status(_) => MessageKind::Status,
            Self::ChunkReady(_) => MessageKind::ChunkReady,
            Self::StagingReq(_) => MessageKind::StagingReq,
            Self::AbortAck(_) => MessageKind::AbortAck,
            Self::AuxData(_) => MessageKind::AuxData,
        }
    }
}

/// Why a message was not understood. Messages are dropped and counted by [`WireError::kind`], never fatal.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {detail}")]
pub struct WireError {
    /// One word per kind, for counters and for logging each kind once.
    pub kind: WireErrorKind,
    /// Which message or frame (`registration frame 5 (agent metadata)`).
    pub what: String,
    /// What is wrong with it.
    pub detail: String,
}

/// Kinds of malformed messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum WireErrorKind {
    /// First frame names nothing known, or the guard is missing.
    UnknownTag,
    /// Too few frames.
    TooShort,
    /// Not an integer, or out of range.
    BadInteger,
    /// Not text.
    BadText,
    /// A packed array's length or header is wrong.
    BadArray,
    /// Over a limit.
    TooLarge,
    /// Frames contradict each other.
    Inconsistent,
    /// The dialect cannot say this (when encoding).
    Unsupported,
}
