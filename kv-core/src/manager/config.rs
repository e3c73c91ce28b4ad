//! What a manager is told at its start. Defaults are SGLang 0.5.23's.

use std::sync::Arc;
use std::time::Duration;

use crate::bootstrap::types::FOLLOW_BOOTSTRAP_ROOM;
use crate::control::ControlTap;
use crate::control::zmq::Implementation;
use crate::limits::Limits;
use crate::topology::DecodeRank;

/// Where a prefill rank stands among its peers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillIdentity {
    /// Attention TP ranks, and this one.
    pub attn_tp: (u32, u32),
    /// Attention CP ranks, and this one.
    pub attn_cp: (u32, u32),
    /// Attention DP groups, and this one's.
    pub attn_dp: (u32, u32),
    /// Pipeline stages, and this one's.
    pub pp: (u32, u32),
    /// Replicas of the whole server, and this one's.
    pub system_dp: (u32, u32),
}

impl PrefillIdentity {
    /// DP ranks of the server as decode counts them, and this one: replicas of the whole server, or attention DP groups
    /// where there is one server.
    pub fn dp(&self) -> (u32, u32) {
        if self.system_dp.0 == 1 { self.attn_dp } else { self.system_dp }
    }
}

impl Default for PrefillIdentity {
    /// The only rank.
    fn default() -> Self {
        Self { attn_tp: (1, 0), attn_cp: (1, 0), attn_dp: (1, 0), pp: (1, 0), system_dp: (1, 0) }
    }
}

/// A prefill rank.
#[derive(Clone, Debug)]
pub struct PrefillConfig {
    /// Address of the control socket as decode reaches it; `None`: found out.
    pub host: Option<String>,
    /// Who implements the control sockets.
    pub zmq: Implementation,
    /// Bounds.
    pub limits: Limits,
    /// Bootstrapping lasts at most this long (300 s).
    pub bootstrap_timeout: Duration,
    /// Metadata for a room without a sender is kept this long (300 s), then decode is told.
    pub early_timeout: Duration,
    /// Late metadata of a failed and cleared room is answered this long (300 s).
    pub tombstone_timeout: Duration,
    /// Its place.
    pub identity: PrefillIdentity,
    /// How the server gives requests to its DP ranks (`--load-balance-method`). Under
    /// [`FOLLOW_BOOTSTRAP_ROOM`] decode takes `room mod` DP ranks; under any other each room's rank is registered at the
    /// request's bootstrap server, where decode looks it up.
    pub load_balance_method: String,
    /// Register each room's rank under [`FOLLOW_BOOTSTRAP_ROOM`], too
    /// (`SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK`); decode must look it up
    /// ([`DecodeConfig::force_query_dp_rank`]).
    pub force_register_dp_rank: bool,
    /// Hears every control message of this rank.
    pub tap: Option<Arc<dyn ControlTap>>,
}

impl Default for PrefillConfig {
    fn default() -> Self {
        let five_minutes = Duration::from_secs(300);
        Self {
            host: None,
            zmq: Implementation::default(),
            limits: Limits::default(),
            bootstrap_timeout: five_minutes,
            early_timeout: five_minutes,
            tombstone_timeout: five_minutes,
            identity: PrefillIdentity::default(),
            load_balance_method: FOLLOW_BOOTSTRAP_ROOM.to_owned(),
            force_register_dp_rank: false,
            tap: None,
        }
    }
}

/// A decode rank.
#[derive(Clone, Debug)]
pub struct DecodeConfig {
    /// Address of the control socket as prefill reaches it; `None`: found out.
    pub host: Option<String>,
    /// Who implements the control sockets.
    pub zmq: Implementation,
    /// Bounds.
    pub limits: Limits,
    /// From `send_metadata()` to Success at most this long (300 s). And before: so long a room waits for a prefill DP rank
    /// to say at the registry that it serves it, where that must be looked up.
    pub waiting_timeout: Duration,
    /// Its place and attention kind.
    pub rank: DecodeRank,
    /// Between two looks at a prefill server's `/health` (5 s, at least 2 s).
    pub heartbeat_interval: Duration,
    /// Misses in a row after which a prefill server is lost (2).
    pub heartbeat_max_failure: u32,
    /// Look up which DP rank of prefill serves a room, although its number says so
    /// (`SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK`); prefill must register it
    /// ([`PrefillConfig::force_register_dp_rank`]).
    pub force_query_dp_rank: bool,
    /// Hears every control message of this rank.
    pub tap: Option<Arc<dyn ControlTap>>,
}

impl Default for DecodeConfig {
    fn default() -> Self {
        Self {
            host: None,
            zmq: Implementation::default(),
            limits: Limits::default(),
            waiting_timeout: Duration::from_secs(300),
            rank: DecodeRank::default(),
            heartbeat_interval: Duration::from_secs(5),
            heartbeat_max_failure: 2,
            force_query_dp_rank: false,
            tap: None,
        }
    }
}
