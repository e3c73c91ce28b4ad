//! The JSON of the bootstrap server (protocol 2.1 to 2.4), and the seam behind which another directory can stand in.

use async_trait::async_trait;
use serde::Serialize;
use serde_json::{Map, Value};

use super::coerce;
use crate::ids::Room;
use crate::net::Endpoint;
use crate::wire::ExtPeer;
use crate::wire::ext::BOOTSTRAP_KEY;

/// The allocation policy of SGLang's default; a row that names none has this one.
pub const POLICY_EARLY: &str = "early";
/// Decode allocates only after prefill finished (protocol section 11).
pub const POLICY_PREFILL_COMPLETE: &str = "prefill_complete";
/// The load balance method under which a room's DP rank is `room mod dp_size`.
pub const FOLLOW_BOOTSTRAP_ROOM: &str = "follow_bootstrap_room";

/// What one prefill rank PUTs to `/route` (protocol 2.1). All keys are always sent, in this order, absent ones as null.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PrefillRow {
    /// Attention TP ranks.
    pub attn_tp_size: u32,
    /// This rank among them.
    pub attn_tp_rank: u32,
    /// Attention CP ranks.
    pub attn_cp_size: u32,
    /// This rank among them.
    pub attn_cp_rank: u32,
    /// Attention DP groups.
    pub attn_dp_size: u32,
    /// This rank's group.
    pub attn_dp_rank: u32,
    /// Pipeline stages.
    pub pp_size: u32,
    /// This rank's stage.
    pub pp_rank: u32,
    /// Data-parallel replicas of the whole server.
    pub system_dp_size: u32,
    /// This rank's replica.
    pub system_dp_rank: u32,
    /// Host of the manager's PULL socket.
    pub rank_ip: String,
    /// Port of the manager's PULL socket.
    pub rank_port: u16,
    /// Tokens a page.
    pub page_size: u32,
    /// Element type of the KV cache.
    pub kv_cache_dtype: String,
    /// Layout tag; decode compares it when both sides have one.
    pub kv_layout: Option<String>,
    /// Opaque layout record; decode compares it when either side has one.
    pub dsv41_spec_layout: Option<Value>,
    /// How DP ranks are chosen; [`FOLLOW_BOOTSTRAP_ROOM`] means by room.
    pub load_balance_method: String,
    /// Each CP rank holds some layers only.
    pub enable_dsa_cache_layer_split: bool,
    /// Pages are spread over the ranks.
    pub enable_kv_cache_sharding: bool,
    /// Port of the server's own HTTP interface.
    pub prefill_http_port: Option<u16>,
    /// When decode allocates: [`POLICY_EARLY`] or [`POLICY_PREFILL_COMPLETE`].
    pub decode_allocation_policy: String,
    /// This rank is ours, and can do more than 0.5.23 (requirement H4). The one key that 0.5.23 does not know; its server
    /// ignores it.
    #[serde(rename = "kv_ext", skip_serializing_if = "Option::is_none", serialize_with = "as_text")]
    pub ext: Option<ExtPeer>,
}

fn as_text<S: serde::Serializer>(ext: &Option<ExtPeer>, serializer: S) -> Result<S::Ok, S::Error> {
    ext.map(ExtPeer::to_text).serialize(serializer)
}

/// Why a row cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RowError {
    /// Not JSON, a required key is missing or has the wrong type: SGLang answers 500.
    #[error("malformed registration: {0}")]
    Malformed(String),
    /// A value no rank can have; ours alone, answered 400.
    #[error("bad registration: {field} = {value}: {want}")]
    Invalid {
        /// The key.
        field: &'static str,
        /// What was sent.
        value: String,
        /// What is allowed.
        want: &'static str,
    },
}

impl PrefillRow {
    /// A row from a request body, whatever its content type. Unknown keys are ignored.
    ///
    /// # Errors
    /// [`RowError`] naming the key.
    pub fn from_json(body: &[u8]) -> Result<Self, RowError> {
        let value: Value = serde_json::from_slice(body).map_err(|e| RowError::Malformed(e.to_string()))?;
        let Value::Object(map) = value else { return Err(RowError::Malformed("the body is not an object".into())) };
        let f = Fields(&map);
        Ok(Self {
            attn_tp_size: f.size("attn_tp_size")?,
            attn_tp_rank: f.rank("attn_tp_rank")?,
            attn_cp_size: f.size("attn_cp_size")?,
            attn_cp_rank: f.rank("attn_cp_rank")?,
            attn_dp_size: f.size("attn_dp_size")?,
            attn_dp_rank: f.rank("attn_dp_rank")?,
            pp_size: f.size("pp_size")?,
            pp_rank: f.rank("pp_rank")?,
            system_dp_size: f.size("system_dp_size")?,
            system_dp_rank: f.rank("system_dp_rank")?,
            rank_ip: f.required_text("rank_ip")?,
            rank_port: f.port("rank_port", f.required("rank_port")?)?,
            page_size: f.page_size()?,
            kv_cache_dtype: f.required_text("kv_cache_dtype")?,
            kv_layout: f.optional_text("kv_layout")?,
            dsv41_spec_layout: f.present("dsv41_spec_layout").cloned(),
            load_balance_method: f
                .optional_text("load_balance_method")?
                .unwrap_or_else(|| FOLLOW_BOOTSTRAP_ROOM.to_owned()),
            enable_dsa_cache_layer_split: f.flag("enable_dsa_cache_layer_split"),
            enable_kv_cache_sharding: f.flag("enable_kv_cache_sharding"),
            prefill_http_port: f.present("prefill_http_port").map(|v| f.port("prefill_http_port", v)).transpose()?,
            decode_allocation_policy: f
                .optional_text("decode_allocation_policy")?
                .unwrap_or_else(|| POLICY_EARLY.to_owned()),
            ext: f.present(BOOTSTRAP_KEY).and_then(Value::as_str).and_then(ExtPeer::from_text),
        })
    }

    /// DP groups decode sees: `attn_dp_size` of a single server, else `system_dp_size`.
    pub fn dp_size(&self) -> u32 {
        if self.system_dp_size == 1 { self.attn_dp_size } else { self.system_dp_size }
    }

    /// Which table slot this row fills.
    pub fn key(&self) -> RankKey {
        RankKey {
            dp: if self.system_dp_size == 1 { self.attn_dp_rank } else { self.system_dp_rank },
            cp: self.attn_cp_rank,
            tp: self.attn_tp_rank,
            pp: self.pp_rank,
        }
    }

    /// Where this rank's manager listens.
    pub fn address(&self) -> RankAddress {
        RankAddress { rank_ip: self.rank_ip.clone(), rank_port: self.rank_port, ext: self.ext }
    }

    /// With CP-TP group sharing the CP ranks are advertised as TP ranks: tp = (cp_size, cp_rank), cp = (1, 0).
    #[must_use]
    pub fn with_cp_tp_group_sharing(mut self) -> Self {
        (self.attn_tp_size, self.attn_tp_rank) = (self.attn_cp_size, self.attn_cp_rank);
        (self.attn_cp_size, self.attn_cp_rank) = (1, 0);
        self
    }
}

/// A peer whose word cannot be read is not ours.
fn ext_of(value: &Value) -> Option<ExtPeer> {
    value.get(BOOTSTRAP_KEY).and_then(Value::as_str).and_then(ExtPeer::from_text)
}

/// Reads the keys of one row, naming the key in every error.
struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    fn required(&self, field: &'static str) -> Result<&'a Value, RowError> {
        self.0.get(field).ok_or_else(|| RowError::Malformed(format!("{field} is missing")))
    }

    fn present(&self, field: &'static str) -> Option<&'a Value> {
        self.0.get(field).filter(|v| !v.is_null())
    }

    fn small(&self, field: &'static str, want: &'static str, min: u32) -> Result<u32, RowError> {
        let value = self.required(field)?;
        let number = match value {
            Value::Number(_) => coerce::int(value),
            _ => None,
        };
        let Some(number) = number else {
            return Err(RowError::Malformed(format!("{field} = {value} is not a number")));
        };
        match u32::try_from(number) {
            Ok(number) if number >= min && i32::try_from(number).is_ok() => Ok(number),
            _ => Err(RowError::Invalid { field, value: value.to_string(), want }),
        }
    }

    fn size(&self, field: &'static str) -> Result<u32, RowError> {
        self.small(field, "a size is at least 1", 1)
    }

    fn rank(&self, field: &'static str) -> Result<u32, RowError> {
        self.small(field, "a rank is at least 0", 0)
    }

    fn page_size(&self) -> Result<u32, RowError> {
        let (field, value) = ("page_size", self.required("page_size")?);
        let tokens =
            coerce::int(value).ok_or_else(|| RowError::Malformed(format!("{field} = {value} is not a number")))?;
        match u32::try_from(tokens) {
            Ok(tokens) if tokens > 0 => Ok(tokens),
            _ => Err(RowError::Invalid { field, value: value.to_string(), want: "a page holds at least one token" }),
        }
    }

    fn port(&self, field: &'static str, value: &Value) -> Result<u16, RowError> {
        let port =
            coerce::int(value).ok_or_else(|| RowError::Malformed(format!("{field} = {value} is not a number")))?;
        match u16::try_from(port) {
            Ok(port) if port > 0 => Ok(port),
            _ => Err(RowError::Invalid { field, value: value.to_string(), want: "a port is 1 to 65535" }),
        }
    }

    fn required_text(&self, field: &'static str) -> Result<String, RowError> {
        match self.required(field)? {
            Value::String(s) if s.is_empty() => {
                Err(RowError::Invalid { field, value: "\"\"".into(), want: "a text that is not empty" })
            }
            Value::String(s) => Ok(s.clone()),
            value => Err(RowError::Malformed(format!("{field} = {value} is not a string"))),
        }
    }

    fn optional_text(&self, field: &'static str) -> Result<Option<String>, RowError> {
        match self.present(field) {
            None => Ok(None),
            Some(Value::String(s)) => Ok(Some(s.clone())),
            Some(value) => Err(RowError::Malformed(format!("{field} = {value} is not a string"))),
        }
    }

    fn flag(&self, field: &'static str) -> bool {
        self.present(field).is_some_and(coerce::truth)
    }
}

/// The answer to GET `/route` with four times -1 (protocol 2.3).
///
/// 0.5.23 rejects the whole answer when it holds a key that is not in this list, so nothing may ever be added here;
/// extensions go into the per-rank answer. `kv_layout` and `dsv41_spec_layout` are left out when null, every other
/// key is always there.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ParallelInfo {
    /// Attention TP ranks.
    pub attn_tp_size: u32,
    /// Attention CP ranks.
    pub attn_cp_size: u32,
    /// DP groups.
    pub dp_size: u32,
    /// Pipeline stages.
    pub pp_size: u32,
    /// Tokens a page.
    pub page_size: Option<u32>,
    /// Element type of the KV cache.
    pub kv_cache_dtype: Option<String>,
    /// A room's DP rank is `room mod dp_size`.
    pub follow_bootstrap_room: bool,
    /// Each CP rank holds some layers only.
    pub enable_dsa_cache_layer_split: bool,
    /// Layout tag.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_layout: Option<String>,
    /// Opaque layout record.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dsv41_spec_layout: Option<Value>,
    /// When decode allocates.
    pub decode_allocation_policy: String,
    /// Pages are spread over the ranks.
    pub enable_kv_cache_sharding: bool,
    /// Port of the server's own HTTP interface.
    pub prefill_http_port: Option<u16>,
    #[serde(flatten)]
    reserved: AlwaysNull,
}

/// The six keys the server always sends as null: decode fills them in for itself.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
struct AlwaysNull {
    target_tp_rank: (),
    target_tp_ranks: (),
    target_cp_ranks: (),
    target_pp_ranks: (),
    required_dst_info_num: (),
    required_prefill_response_num: (),
}

impl ParallelInfo {
    /// The answer of a server whose first row was `row`.
    pub fn of(row: &PrefillRow) -> Self {
        Self {
            attn_tp_size: row.attn_tp_size,
            attn_cp_size: row.attn_cp_size,
            dp_size: row.dp_size(),
            pp_size: row.pp_size,
            page_size: Some(row.page_size),
            kv_cache_dtype: Some(row.kv_cache_dtype.clone()),
            follow_bootstrap_room: row.load_balance_method == FOLLOW_BOOTSTRAP_ROOM,
            enable_dsa_cache_layer_split: row.enable_dsa_cache_layer_split,
            kv_layout: row.kv_layout.clone(),
            dsv41_spec_layout: row.dsv41_spec_layout.clone(),
            decode_allocation_policy: row.decode_allocation_policy.clone(),
            enable_kv_cache_sharding: row.enable_kv_cache_sharding,
            prefill_http_port: row.prefill_http_port,
            reserved: AlwaysNull::default(),
        }
    }

    /// Reads an answer with SGLang's coercions. Keys we do not know are ignored, unlike 0.5.23, so that a later server
    /// can be talked to.
    ///
    /// # Errors
    /// A text naming the key that is missing or has no meaning.
    pub fn from_json(body: &[u8]) -> Result<Self, String> {
        let value: Value = serde_json::from_slice(body).map_err(|e| e.to_string())?;
        let Value::Object(map) = value else { return Err("the answer is not an object".into()) };
        let required = |key: &str| map.get(key).ok_or_else(|| format!("{key} is missing"));
        let present = |key: &str| map.get(key).filter(|v| !v.is_null());
        let number = |key: &str, value: &Value| {
            coerce::int(value)
                .and_then(|n| u32::try_from(n).ok())
                .ok_or_else(|| format!("{key} = {value} is not a number"))
        };
        let size = |key: &str| match number(key, required(key)?)? {
            0 => Err(format!("{key} = 0: a size is at least 1")),
            n => Ok(n),
        };
        let text = |key: &str| {
            present(key).map(|v| coerce::text(v).ok_or_else(|| format!("{key} = {v} is not a text"))).transpose()
        };
        required("page_size")?;
        required("kv_cache_dtype")?;
        Ok(Self {
            attn_tp_size: size("attn_tp_size")?,
            attn_cp_size: size("attn_cp_size")?,
            dp_size: size("dp_size")?,
            pp_size: size("pp_size")?,
            page_size: present("page_size").map(|v| number("page_size", v)).transpose()?,
            kv_cache_dtype: text("kv_cache_dtype")?,
            follow_bootstrap_room: coerce::truth(required("follow_bootstrap_room")?),
            enable_dsa_cache_layer_split: present("enable_dsa_cache_layer_split").is_some_and(coerce::truth),
            kv_layout: text("kv_layout")?,
            dsv41_spec_layout: present("dsv41_spec_layout").cloned(),
            decode_allocation_policy: text("decode_allocation_policy")?.unwrap_or_else(|| POLICY_EARLY.to_owned()),
            enable_kv_cache_sharding: present("enable_kv_cache_sharding").is_some_and(coerce::truth),
            // Only re-bootstrap after retraction uses it; a port out of range means "none".
            prefill_http_port: present("prefill_http_port")
                .and_then(coerce::int)
                .and_then(|p| u16::try_from(p).ok())
                .filter(|p| *p > 0),
            reserved: AlwaysNull::default(),
        })
    }
}

/// One slot of the table, and one per-rank GET.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RankKey {
    /// DP group.
    pub dp: u32,
    /// CP rank.
    pub cp: u32,
    /// TP rank.
    pub tp: u32,
    /// PP rank.
    pub pp: u32,
}

/// The answer to a per-rank GET. Further keys are allowed there; those that are not ours are ignored.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct RankAddress {
    /// Host of the manager's PULL socket.
    pub rank_ip: String,
    /// Its port.
    pub rank_port: u16,
    /// What the rank said of itself; 0.5.23's server drops it, and then the rank is taken for one of 0.5.23.
    #[serde(rename = "kv_ext", skip_serializing_if = "Option::is_none", serialize_with = "as_text")]
    pub ext: Option<ExtPeer>,
}

impl RankAddress {
    /// Reads an answer.
    ///
    /// # Errors
    /// A text naming the key that is missing or has no meaning.
    pub fn from_json(body: &[u8]) -> Result<Self, String> {
        let value: Value = serde_json::from_slice(body).map_err(|e| e.to_string())?;
        let rank_ip = match value.get("rank_ip") {
            Some(Value::String(ip)) if !ip.is_empty() => ip.clone(),
            other => return Err(format!("rank_ip is {}", other.unwrap_or(&Value::Null))),
        };
        let port = value.get("rank_port").unwrap_or(&Value::Null);
        let rank_port = coerce::int(port)
            .and_then(|p| u16::try_from(p).ok())
            .filter(|p| *p > 0)
            .ok_or_else(|| format!("rank_port is {port}"))?;
        Ok(Self { rank_ip, rank_port, ext: ext_of(&value) })
    }

    /// As a control endpoint.
    pub fn endpoint(&self) -> Endpoint {
        Endpoint::new(&self.rank_ip, self.rank_port)
    }
}

/// Body of POST `/register_dp_rank` (protocol 2.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RegisterDpRank {
    /// Which room.
    pub bootstrap_room: u64,
    /// Which DP rank serves it.
    pub dp_rank: u32,
}

impl RegisterDpRank {
    /// Reads a body; numbers and numeric strings are taken.
    ///
    /// # Errors
    /// [`RowError::Malformed`] naming the key.
    pub fn from_json(body: &[u8]) -> Result<Self, RowError> {
        let value: Value = serde_json::from_slice(body).map_err(|e| RowError::Malformed(e.to_string()))?;
        let field = |key: &str| value.get(key).and_then(coerce::int);
        let bootstrap_room = field("bootstrap_room").and_then(|n| u64::try_from(n).ok());
        let dp_rank = field("dp_rank").and_then(|n| u32::try_from(n).ok());
        match (bootstrap_room, dp_rank) {
            (Some(bootstrap_room), Some(dp_rank)) => Ok(Self { bootstrap_room, dp_rank }),
            (None, _) => Err(RowError::Malformed("bootstrap_room is not an unsigned number".into())),
            (_, None) => Err(RowError::Malformed("dp_rank is not an unsigned number".into())),
        }
    }
}

/// Body of POST `/query_dp_ranks` (protocol 2.4).
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct QueryDpRanks {
    /// Which rooms.
    pub bootstrap_rooms: Vec<u64>,
}

impl QueryDpRanks {
    /// Reads a body; numbers and numeric strings are taken.
    ///
    /// # Errors
    /// [`RowError::Malformed`] naming the first room that is none.
    pub fn from_json(body: &[u8]) -> Result<Self, RowError> {
        let value: Value = serde_json::from_slice(body).map_err(|e| RowError::Malformed(e.to_string()))?;
        let Some(Value::Array(rooms)) = value.get("bootstrap_rooms") else {
            return Err(RowError::Malformed("bootstrap_rooms is not a list".into()));
        };
        let room = |v: &Value| {
            coerce::int(v)
                .and_then(|n| u64::try_from(n).ok())
                .ok_or_else(|| RowError::Malformed(format!("bootstrap_rooms: {v} is not a room")))
        };
        Ok(Self { bootstrap_rooms: rooms.iter().map(room).collect::<Result<_, _>>()? })
    }
}

/// Reads the answer to `/query_dp_ranks`: an object from room (text) to DP rank. Rooms the server does not know are
/// absent.
///
/// # Errors
/// A text naming the entry that has no meaning.
pub fn dp_ranks_from_json(body: &[u8]) -> Result<Vec<(Room, u32)>, String> {
    let value: Value = serde_json::from_slice(body).map_err(|e| e.to_string())?;
    let Value::Object(map) = value else { return Err("the answer is not an object".into()) };
    map.iter()
        .map(|(room, rank)| {
            let number = coerce::int_from_str(room).and_then(|n| u64::try_from(n).ok()).and_then(Room::new);
            let dp_rank = coerce::int(rank).and_then(|n| u32::try_from(n).ok());
            number.zip(dp_rank).ok_or_else(|| format!("{room:?}: {rank} is not a room with its DP rank"))
        })
        .collect()
}

/// Why a registry did not answer as asked. `detail` names the cause in words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegistryError {
    /// Not every rank has registered yet (503): ask again.
    #[error("{0}")]
    NotReady(String),
    /// The server has no such entry (404).
    #[error("{0}")]
    NotFound(String),
    /// The server refused (any other status).
    #[error("status {status}: {detail}")]
    Refused {
        /// HTTP status.
        status: u16,
        /// The server's text.
        detail: String,
    },
    /// No answer: not reachable, timed out, closed half way.
    #[error("{0}")]
    Unreachable(String),
    /// An answer that cannot be read.
    #[error("unreadable answer: {0}")]
    Malformed(String),
}

/// A directory of prefill ranks. `addr` is the server's `host:port`, IPv6 bracketed.
///
/// `HttpRegistry` (feature `bootstrap`) speaks to SGLang's bootstrap server or ours; something else, such as
/// a key-value store, can stand in.
#[async_trait]
pub trait Registry: Send + Sync {
    /// Prefill: publish one rank.
    async fn register(&self, addr: &str, row: &PrefillRow) -> Result<(), RegistryError>;

    /// Sizes and flags of the whole server; [`RegistryError::NotReady`] until every rank has registered.
    async fn parallel_info(&self, addr: &str) -> Result<ParallelInfo, RegistryError>;

    /// Where one rank's manager listens.
    async fn rank_address(&self, addr: &str, key: RankKey) -> Result<RankAddress, RegistryError>;

    /// Prefill: remember which DP rank serves a room.
    async fn register_dp_rank(&self, addr: &str, room: Room, dp_rank: u32) -> Result<(), RegistryError>;

    /// The DP ranks of those `rooms` that are known.
    async fn query_dp_ranks(&self, addr: &str, rooms: &[Room]) -> Result<Vec<(Room, u32)>, RegistryError>;

    /// Whether the server lives.
    async fn health(&self, addr: &str) -> Result<(), RegistryError>;
}
