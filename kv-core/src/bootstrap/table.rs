//! What a bootstrap server remembers (protocol 2.1 to 2.4), without I/O or clock.
//!
//! Answers are those of 0.5.23 except where that is wrong:
//!
//! * *Ready* counts **distinct ranks**; 0.5.23 counts PUTs, so one rank that registers twice opens the server early.
//! * A row that disagrees with the rows before it is refused, naming the field and both values; 0.5.23 only looks at
//!   the allocation policy and the DSpark layout.
//! * A rank outside its own size is refused, since the table could never be complete.
//! * Rows and rooms are bounded.
//!
//! **Restart.** A rank that registers again replaces its row (a restarted process listens on a new port). A whole
//! server that comes back with *other* sizes or flags first disagrees, and is refused; but refused rows that agree
//! with each other are kept as the *successor*. When every rank of the successor has asked, the old life is over: the
//! successor becomes the table, in one step. One rank with a wrong argument never gets that far, and neither do
//! mistakes spread over more than [`TableConfig::successor_ttl`].

use std::collections::HashMap;
use std::time::Duration;

use super::types::{ParallelInfo, PrefillRow, RankAddress, RankKey};
use crate::limits::Limits;
use crate::time::Timestamp;

/// What happens when a rank that is registered is registered again **from another host** (fault F65).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OwnerPolicy {
    /// Replace the row; the caller logs it. As 0.5.23: a restarted rank may run on another host.
    #[default]
    Replace,
    /// Refuse. A new port on the same host still replaces.
    RefuseOtherHost,
}

/// Bounds and rules of a table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TableConfig {
    /// Ranks of one server.
    pub max_rows: usize,
    /// Rooms with a DP rank.
    pub max_dp_rooms: usize,
    /// Bytes of one text field.
    pub max_text_bytes: usize,
    /// Who may replace a row.
    pub owner_policy: OwnerPolicy,
    /// Age at which a sweep drops a room's DP rank, and the time between sweeps: a room is known for one to two of
    /// these. SGLang: `SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL`.
    pub dp_rank_ttl: Duration,
    /// How long refused rows are kept as the successor, counted from the last one.
    pub successor_ttl: Duration,
}

impl From<&Limits> for TableConfig {
    fn from(limits: &Limits) -> Self {
        Self {
            max_rows: limits.max_registry_rows,
            max_dp_rooms: limits.max_dp_rooms,
            max_text_bytes: limits.max_text_bytes,
            owner_policy: OwnerPolicy::default(),
            dp_rank_ttl: Duration::from_secs(120),
            successor_ttl: Duration::from_secs(300),
        }
    }
}

impl Default for TableConfig {
    fn default() -> Self {
        Self::from(&Limits::default())
    }
}

/// Why the table refuses. [`status`](Self::status) is the HTTP status, the text the body.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// 400: a rank outside its size.
    #[error("bad registration: {field} = {rank} is outside {size_field} = {size}")]
    RankOutOfRange {
        /// The rank's key.
        field: &'static str,
        /// Its value.
        rank: u32,
        /// The size's key.
        size_field: &'static str,
        /// Its value.
        size: u32,
    },
    /// 400: more ranks than the table may hold.
    #[error(
        "bad registration: dp_size x attn_cp_size x attn_tp_size x pp_size = {ranks} ranks, this server keeps at most {limit}"
    )]
    TooManyRanks {
        /// Product of the sizes.
        ranks: u64,
        /// [`TableConfig::max_rows`].
        limit: usize,
    },
    /// 400: a text that is too long.
    #[error("bad registration: {field} has {bytes} bytes, at most {limit} are taken")]
    TextTooLong {
        /// The key.
        field: &'static str,
        /// Its length.
        bytes: usize,
        /// [`TableConfig::max_text_bytes`].
        limit: usize,
    },
    /// 400: the row disagrees with the rows before it.
    #[error(
        "{}: {field} is {stored} on this server, {sent} in the row of {}; start every prefill rank with the same arguments",
        headline(field),
        name(key)
    )]
    Inconsistent {
        /// The key.
        field: &'static str,
        /// What the rows before it say.
        stored: String,
        /// What this one says.
        sent: String,
        /// Which rank sent it.
        key: RankKey,
    },
    /// 400: the rank belongs to another host ([`OwnerPolicy::RefuseOtherHost`]).
    #[error(
        "{} is registered by {stored}, refused to {sent}: this server does not hand a rank to another host",
        name(key)
    )]
    OtherOwner {
        /// Which rank.
        key: RankKey,
        /// Host that has it.
        stored: String,
        /// Host that asked.
        sent: String,
    },
    /// 503: not every rank has registered.
    #[error("Prefill server not fully registered yet ({0} workers registered).")]
    NotReady(usize),
    /// 404: no such rank.
    #[error("Bootstrap info not found for dp_rank={dp} cp_rank={cp} tp_rank={tp} pp_rank={pp}")]
    NotFound {
        /// As asked.
        dp: i128,
        /// As asked.
        cp: i128,
        /// As asked.
        tp: i128,
        /// As asked.
        pp: i128,
    },
    /// 503: no space for another room.
    #[error("DP ranks of {0} rooms are remembered already, no more are taken until some expire")]
    DpRoomsFull(usize),
}

impl TableError {
    /// The HTTP status this is answered with.
    pub fn status(&self) -> u16 {
        match self {
            Self::NotReady(_) | Self::DpRoomsFull(_) => 503,
            Self::NotFound { .. } => 404,
            _ => 400,
        }
    }
}

/// SGLang's own sentence where it has one, so that whoever searches for that finds this.
fn headline(field: &str) -> &'static str {
    match field {
        "decode_allocation_policy" => "Inconsistent prefill allocation policies",
        "dsv41_spec_layout" => "DeepSeek-V4.1 DSpark PD layout differs across prefill ranks",
        _ => "Inconsistent prefill ranks",
    }
}

fn name(key: &RankKey) -> String {
    format!("dp_rank={} cp_rank={} tp_rank={} pp_rank={}", key.dp, key.cp, key.tp, key.pp)
}

/// What a registration did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Registered {
    /// A rank that was not there.
    New,
    /// The same row again.
    Same,
    /// A row replaced: the rank restarted, or another process took its place.
    Replaced {
        /// Where it was.
        old: RankAddress,
    },
    /// The last row of a successor: the old life is gone.
    TookOver {
        /// Ranks of the old life that are dropped.
        dropped_rows: usize,
    },
}

/// Counters since the table was made.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TableStats {
    /// Rows that replaced another address.
    pub replaced: u64,
    /// Rows refused.
    pub refused: u64,
    /// Times a successor took over.
    pub takeovers: u64,
    /// DP ranks not remembered for want of space.
    pub dp_rooms_refused: u64,
}

/// One server's rows that agree with each other.
#[derive(Debug)]
struct Life {
    first: PrefillRow,
    info: ParallelInfo,
    rows: HashMap<RankKey, RankAddress>,
}

impl Life {
    fn new(row: &PrefillRow) -> Self {
        let rows = HashMap::from([(row.key(), row.address())]);
        Self { first: row.clone(), info: ParallelInfo::of(row), rows }
    }

    fn insert(&mut self, row: &PrefillRow) -> Option<RankAddress> {
        // First value that is not null wins, as in 0.5.23.
        if self.info.kv_layout.is_none() {
            self.info.kv_layout.clone_from(&row.kv_layout);
        }
        if self.info.prefill_http_port.is_none() {
            self.info.prefill_http_port = row.prefill_http_port;
        }
        self.rows.insert(row.key(), row.address())
    }

    fn is_complete(&self) -> bool {
        // Every row is inside the sizes and keys are distinct, so the count alone tells.
        u64::try_from(self.rows.len()).ok() == Some(ranks(&self.first))
    }

    /// The first field in which `row` disagrees: (field, stored, sent).
    fn conflict(&self, row: &PrefillRow) -> Option<(&'static str, String, String)> {
        let a = &self.first;
        // The two that 0.5.23 checks come first, so that its answers are the same.
        if a.dsv41_spec_layout != row.dsv41_spec_layout {
            let text =
                |v: &Option<serde_json::Value>| v.as_ref().map_or("null".to_owned(), |v| shorten(&v.to_string()));
            return Some(("dsv41_spec_layout", text(&a.dsv41_spec_layout), text(&row.dsv41_spec_layout)));
        }
        let texts = [
            ("decode_allocation_policy", &a.decode_allocation_policy, &row.decode_allocation_policy),
            ("kv_cache_dtype", &a.kv_cache_dtype, &row.kv_cache_dtype),
        ];
        let numbers = [
            ("attn_tp_size", a.attn_tp_size, row.attn_tp_size),
            ("attn_cp_size", a.attn_cp_size, row.attn_cp_size),
            ("system_dp_size", a.system_dp_size, row.system_dp_size),
            ("dp_size", a.dp_size(), row.dp_size()),
            ("pp_size", a.pp_size, row.pp_size),
            ("page_size", a.page_size, row.page_size),
        ];
        let flags = [
            ("enable_dsa_cache_layer_split", a.enable_dsa_cache_layer_split, row.enable_dsa_cache_layer_split),
            ("enable_kv_cache_sharding", a.enable_kv_cache_sharding, row.enable_kv_cache_sharding),
        ];
        if let Some((f, a, b)) = texts.into_iter().find(|(_, a, b)| a != b) {
            return Some((f, shorten(a), shorten(b)));
        }
        if let Some((f, a, b)) = numbers.into_iter().find(|(_, a, b)| a != b) {
            return Some((f, a.to_string(), b.to_string()));
        }
        if let Some((f, a, b)) = flags.into_iter().find(|(_, a, b)| a != b) {
            return Some((f, a.to_string(), b.to_string()));
        }
        if self.info.follow_bootstrap_room != ParallelInfo::of(row).follow_bootstrap_room {
            return Some(("load_balance_method", shorten(&a.load_balance_method), shorten(&row.load_balance_method)));
        }
        match (&self.info.kv_layout, &row.kv_layout) {
            (Some(a), Some(b)) if a != b => Some(("kv_layout", shorten(a), shorten(b))),
            _ => None,
        }
    }
}

fn ranks(row: &PrefillRow) -> u64 {
    [row.dp_size(), row.attn_cp_size, row.attn_tp_size, row.pp_size]
        .into_iter()
        .fold(1u64, |product, size| product.saturating_mul(u64::from(size)))
}

/// Values go into error texts, and they may be large.
fn shorten(text: &str) -> String {
    const MOST: usize = 200;
    match text.char_indices().nth(MOST) {
        Some((at, _)) => format!("{}...", &text[..at]),
        None => text.to_owned(),
    }
}

/// The rows of one prefill server, and the DP ranks of its rooms.
#[derive(Debug)]
pub struct RegistryTable {
    config: TableConfig,
    current: Option<Life>,
    successor: Option<(Life, Timestamp)>,
    dp_rooms: HashMap<u64, (u32, Timestamp)>,
    next_sweep: Option<Timestamp>,
    stats: TableStats,
}

impl RegistryTable {
    /// An empty table.
    pub fn new(config: TableConfig) -> Self {
        Self {
            config,
            current: None,
            successor: None,
            dp_rooms: HashMap::new(),
            next_sweep: None,
            stats: TableStats::default(),
        }
    }

    /// Takes one row.
    ///
    /// # Errors
    /// [`TableError`]; nothing visible changed.
    pub fn register(&mut self, now: Timestamp, row: &PrefillRow) -> Result<Registered, TableError> {
        let result = self.check(row).and_then(|()| self.place(now, row));
        match &result {
            Ok(Registered::Replaced { .. }) => self.stats.replaced += 1,
            Ok(Registered::TookOver { .. }) => self.stats.takeovers += 1,
            Ok(_) => {}
            Err(_) => self.stats.refused += 1,
        }
        result
    }

    fn check(&self, row: &PrefillRow) -> Result<(), TableError> {
        for (field, rank, size_field, size) in [
            ("attn_tp_rank", row.attn_tp_rank, "attn_tp_size", row.attn_tp_size),
            ("attn_cp_rank", row.attn_cp_rank, "attn_cp_size", row.attn_cp_size),
            ("attn_dp_rank", row.attn_dp_rank, "attn_dp_size", row.attn_dp_size),
            ("pp_rank", row.pp_rank, "pp_size", row.pp_size),
            ("system_dp_rank", row.system_dp_rank, "system_dp_size", row.system_dp_size),
        ] {
            if rank >= size {
                return Err(TableError::RankOutOfRange { field, rank, size_field, size });
            }
        }
        let (ranks, limit) = (ranks(row), self.config.max_rows);
        if usize::try_from(ranks).map_or(true, |ranks| ranks > limit) {
            return Err(TableError::TooManyRanks { ranks, limit });
        }
        let limit = self.config.max_text_bytes;
        for (field, text) in [
            ("rank_ip", Some(&row.rank_ip)),
            ("kv_cache_dtype", Some(&row.kv_cache_dtype)),
            ("kv_layout", row.kv_layout.as_ref()),
            ("load_balance_method", Some(&row.load_balance_method)),
            ("decode_allocation_policy", Some(&row.decode_allocation_policy)),
        ] {
            let bytes = text.map_or(0, String::len);
            if bytes > limit {
                return Err(TableError::TextTooLong { field, bytes, limit });
            }
        }
        Ok(())
    }

    fn place(&mut self, now: Timestamp, row: &PrefillRow) -> Result<Registered, TableError> {
        let key = row.key();
        let Some(current) = &mut self.current else {
            self.current = Some(Life::new(row));
            return Ok(Registered::New);
        };
        if let Some(old) = current.rows.get(&key)
            && self.config.owner_policy == OwnerPolicy::RefuseOtherHost
            && old.rank_ip != row.rank_ip
        {
            return Err(TableError::OtherOwner { key, stored: old.rank_ip.clone(), sent: shorten(&row.rank_ip) });
        }
        let Some((field, stored, sent)) = current.conflict(row) else {
            if let Some((successor, _)) = &mut self.successor {
                // This rank still belongs to the present life.
                successor.rows.remove(&key);
            }
            return Ok(match current.insert(row) {
                None => Registered::New,
                Some(old) if old == row.address() => Registered::Same,
                Some(old) => Registered::Replaced { old },
            });
        };
        let until = now + self.config.successor_ttl;
        match &mut self.successor {
            Some((life, expires)) if *expires > now && life.conflict(row).is_none() => {
                life.insert(row);
                *expires = until;
            }
            other => *other = Some((Life::new(row), until)),
        }
        match self.successor.take_if(|(life, _)| life.is_complete()) {
            Some((life, _)) => {
                let dropped_rows = current.rows.len();
                self.current = Some(life);
                // The old life's rooms are over with it.
                self.dp_rooms.clear();
                Ok(Registered::TookOver { dropped_rows })
            }
            None => Err(TableError::Inconsistent { field, stored, sent, key }),
        }
    }

    fn ready(&self) -> Result<&Life, TableError> {
        match &self.current {
            Some(life) if life.is_complete() => Ok(life),
            Some(life) => Err(TableError::NotReady(life.rows.len())),
            None => Err(TableError::NotReady(0)),
        }
    }

    /// Sizes and flags.
    ///
    /// # Errors
    /// [`TableError::NotReady`].
    pub fn parallel_info(&self) -> Result<&ParallelInfo, TableError> {
        self.ready().map(|life| &life.info)
    }

    /// One rank's address; the numbers are as asked, negative ones included.
    ///
    /// # Errors
    /// [`TableError::NotReady`] or [`TableError::NotFound`].
    pub fn rank_address(&self, dp: i128, cp: i128, tp: i128, pp: i128) -> Result<&RankAddress, TableError> {
        let life = self.ready()?;
        let small = |n: i128| u32::try_from(n).ok();
        let key = || Some(RankKey { dp: small(dp)?, cp: small(cp)?, tp: small(tp)?, pp: small(pp)? });
        key().and_then(|key| life.rows.get(&key)).ok_or(TableError::NotFound { dp, cp, tp, pp })
    }

    /// Remembers which DP rank serves a room; a later value replaces it.
    ///
    /// # Errors
    /// [`TableError::DpRoomsFull`].
    pub fn register_dp_rank(&mut self, now: Timestamp, room: u64, dp_rank: u32) -> Result<(), TableError> {
        self.sweep(now);
        if self.dp_rooms.len() >= self.config.max_dp_rooms && !self.dp_rooms.contains_key(&room) {
            self.stats.dp_rooms_refused += 1;
            return Err(TableError::DpRoomsFull(self.config.max_dp_rooms));
        }
        self.dp_rooms.insert(room, (dp_rank, now));
        Ok(())
    }

    /// The DP ranks of those `rooms` that are known. Asking does not consume.
    pub fn query_dp_ranks(&mut self, now: Timestamp, rooms: &[u64]) -> Vec<(u64, u32)> {
        self.sweep(now);
        rooms.iter().filter_map(|room| self.dp_rooms.get(room).map(|(rank, _)| (*room, *rank))).collect()
    }

    fn sweep(&mut self, now: Timestamp) {
        let ttl = self.config.dp_rank_ttl;
        match self.next_sweep {
            Some(at) if now < at => {}
            Some(_) => {
                self.dp_rooms.retain(|_, (_, stored)| now.since(*stored) < ttl);
                self.next_sweep = Some(now + ttl);
            }
            None => self.next_sweep = Some(now + ttl),
        }
    }

    /// Ranks registered in the present life.
    pub fn rows(&self) -> usize {
        self.current.as_ref().map_or(0, |life| life.rows.len())
    }

    /// Rooms with a DP rank.
    pub fn dp_rooms(&self) -> usize {
        self.dp_rooms.len()
    }

    /// Counters.
    pub fn stats(&self) -> TableStats {
        self.stats
    }
}

#[cfg(test)]
#[path = "table_tests.rs"]
mod tests;
