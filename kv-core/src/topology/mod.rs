//! Which prefill ranks a decode rank contacts (protocol section 3).
//!
//! Pure arithmetic over the parallel sizes of both sides. Unlike SGLang 0.5.23, sizes that do not divide are refused
//! by name (requirement G2), and so is a rank that its own size does not have.

mod pages;

use crate::ids::PrefillRank;

pub use pages::{ChunkPart, ShardPart, cp_rank_page_bounds, filter_for_cp_rank, filter_for_shard_rank};

/// Largest value of any one parallel size. Sizes come out of a peer's HTTP reply, so they bound what is allocated.
pub const MAX_PARALLEL_SIZE: u32 = 4096;
/// Most prefill ranks one decode rank may contact (TP x CP x PP).
pub const MAX_CONNECTIONS: u32 = 65_536;
/// Most ranks of one prefill deployment (TP x CP x PP); keeps every [`PrefillRank`] in 32 bits.
pub const MAX_PREFILL_RANKS: u32 = 1 << 24;

/// Parallel sizes of a prefill deployment, as its bootstrap server reports them (protocol 2.3).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PrefillSizes {
    /// Attention TP size.
    pub attn_tp_size: u32,
    /// Attention CP size.
    pub attn_cp_size: u32,
    /// DP size.
    pub dp_size: u32,
    /// PP size.
    pub pp_size: u32,
    /// Each CP rank holds layers of its own.
    pub enable_dsa_cache_layer_split: bool,
    /// Each rank holds pages of its own.
    pub enable_kv_cache_sharding: bool,
}

impl Default for PrefillSizes {
    fn default() -> Self {
        Self {
            attn_tp_size: 1,
            attn_cp_size: 1,
            dp_size: 1,
            pp_size: 1,
            enable_dsa_cache_layer_split: false,
            enable_kv_cache_sharding: false,
        }
    }
}

/// One decode rank: its sizes, its place and its attention kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DecodeRank {
    /// Attention TP size.
    pub attn_tp_size: u32,
    /// Attention CP size; only 1 is supported on decode.
    pub attn_cp_size: u32,
    /// Rank within the attention TP group (`tp_rank % attn_tp_size`), below `attn_tp_size`.
    pub engine_rank: u32,
    /// PP size: equal to prefill's, or 1.
    pub pp_size: u32,
    /// PP rank, below `pp_size`.
    pub pp_rank: u32,
    /// Plain MLA: every TP rank holds the same KV.
    pub is_mla: bool,
    /// MLA beside other attention: the state may differ between TP ranks, so no rank is a dummy.
    pub is_hybrid_mla: bool,
    /// Take KV from every CP rank (`SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER`). Hybrid MLA implies it.
    pub all_cp: bool,
}

impl Default for DecodeRank {
    fn default() -> Self {
        Self {
            attn_tp_size: 1,
            attn_cp_size: 1,
            engine_rank: 0,
            pp_size: 1,
            pp_rank: 0,
            is_mla: false,
            is_hybrid_mla: false,
            all_cp: false,
        }
    }
}

/// Why two deployments cannot be mapped onto each other.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TopologyError {
    /// A size that is 0 or larger than [`MAX_PARALLEL_SIZE`].
    #[error("{field} is {value}; it must be between 1 and {MAX_PARALLEL_SIZE}")]
    Size {
        /// Which size (`prefill attn_tp_size`).
        field: &'static str,
        /// Its value.
        value: u32,
    },
    /// A rank that its size does not have.
    #[error("{field} is {rank}, but its size is {size}")]
    Rank {
        /// Which rank.
        field: &'static str,
        /// Its value.
        rank: u32,
        /// The size it must be below.
        size: u32,
    },
    /// Neither attention TP size divides the other (requirement G2).
    #[error("prefill attn_tp_size {prefill} and decode attn_tp_size {decode}: one must divide the other")]
    TpIndivisible {
        /// Prefill's.
        prefill: u32,
        /// Decode's.
        decode: u32,
    },
    /// Page sharding of MLA KV pairs rank with rank.
    #[error("enable_kv_cache_sharding with MLA needs equal attn_tp_size, got prefill {prefill} and decode {decode}")]
    ShardingTp {
        /// Prefill's.
        prefill: u32,
        /// Decode's.
        decode: u32,
    },
    /// Decode's PP size is neither prefill's nor 1.
    #[error("decode pp_size {decode} must be prefill's pp_size {prefill}, or 1")]
    Pp {
        /// Prefill's.
        prefill: u32,
        /// Decode's.
        decode: u32,
    },
    /// Context parallelism on decode.
    #[error("decode attn_cp_size is {0}; only 1 is supported")]
    DecodeCp(u32),
    /// More ranks than [`MAX_PREFILL_RANKS`].
    #[error("{tp} TP x {cp} CP x {pp} PP prefill ranks are more than {MAX_PREFILL_RANKS}")]
    TooManyRanks {
        /// Prefill's TP size.
        tp: u32,
        /// Prefill's CP size.
        cp: u32,
        /// Prefill's PP size.
        pp: u32,
    },
    /// More connections than [`MAX_CONNECTIONS`].
    #[error("{tp} TP x {cp} CP x {pp} PP prefill ranks to contact are more than {MAX_CONNECTIONS}")]
    TooManyConnections {
        /// TP ranks to contact.
        tp: u32,
        /// CP ranks to contact.
        cp: u32,
        /// PP ranks to contact.
        pp: u32,
    },
}

/// One prefill rank to contact.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Connection {
    /// Attention CP rank.
    pub cp: u32,
    /// Attention TP rank.
    pub tp: u32,
    /// PP rank.
    pub pp: u32,
    /// It gets metadata, so that it leaves Bootstrapping, but writes nothing and reports to nobody.
    pub is_dummy: bool,
}

/// Which ranks a decode rank contacts and how many answers each side waits for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMapping {
    /// The TP rank that writes, `None` when all of [`Self::target_tp_ranks`] hold different pages (sharding).
    pub target_tp_rank: Option<u32>,
    /// TP ranks to contact, ascending.
    pub target_tp_ranks: Vec<u32>,
    /// CP ranks to contact, ascending.
    pub target_cp_ranks: Vec<u32>,
    /// PP ranks to contact, ascending (contacted in the reverse order).
    pub target_pp_ranks: Vec<u32>,
    /// How many distinct decode ranks a prefill rank must hear from; travels in every metadata message.
    pub required_dst_info_num: u32,
    /// How many distinct prefill ranks must report Success; stays on decode.
    pub required_prefill_response_num: u32,
    is_mla: bool,
    prefill_cp_size: u32,
    prefill_pp_size: u32,
}

impl RankMapping {
    /// The mapping for one decode rank.
    ///
    /// # Errors
    /// [`TopologyError`] names the sizes that do not fit.
    pub fn resolve(prefill: &PrefillSizes, decode: &DecodeRank) -> Result<Self, TopologyError> {
        check_size("prefill attn_tp_size", prefill.attn_tp_size)?;
        check_size("prefill attn_cp_size", prefill.attn_cp_size)?;
        check_size("prefill dp_size", prefill.dp_size)?;
        check_size("prefill pp_size", prefill.pp_size)?;
        check_size("decode attn_tp_size", decode.attn_tp_size)?;
        check_size("decode pp_size", decode.pp_size)?;
        if decode.attn_cp_size != 1 {
            return Err(TopologyError::DecodeCp(decode.attn_cp_size));
        }
        check_rank("decode engine_rank", decode.engine_rank, decode.attn_tp_size)?;
        check_rank("decode pp_rank", decode.pp_rank, decode.pp_size)?;

        let (pt, pc, pp) = (prefill.attn_tp_size, prefill.attn_cp_size, prefill.pp_size);
        let (dt, dpp, r) = (decode.attn_tp_size, decode.pp_size, decode.engine_rank);
        if u64::from(pt) * u64::from(pc) * u64::from(pp) > u64::from(MAX_PREFILL_RANKS) {
            return Err(TopologyError::TooManyRanks { tp: pt, cp: pc, pp });
        }
        // The counts are checked as a product before any list of ranks is made.
        let tp_count = if decode.is_mla && prefill.enable_kv_cache_sharding && pc == 1 {
            if dt != pt {
                return Err(TopologyError::ShardingTp { prefill: pt, decode: dt });
            }
            pt
        } else if !pt.max(dt).is_multiple_of(pt.min(dt)) {
            return Err(TopologyError::TpIndivisible { prefill: pt, decode: dt });
        } else {
            (pt / dt).max(1)
        };
        let every_cp = decode.all_cp
            || decode.is_hybrid_mla
            || prefill.enable_dsa_cache_layer_split
            || prefill.enable_kv_cache_sharding;
        let cp_count = if every_cp { pc } else { 1 };
        let pp_count = if dpp == pp {
            1
        } else if dpp == 1 {
            pp
        } else {
            return Err(TopologyError::Pp { prefill: pp, decode: dpp });
        };
        let connections = u64::from(tp_count) * u64::from(cp_count) * u64::from(pp_count);
        if connections > u64::from(MAX_CONNECTIONS) {
            return Err(TopologyError::TooManyConnections { tp: tp_count, cp: cp_count, pp: pp_count });
        }

        let sharded = decode.is_mla && prefill.enable_kv_cache_sharding && pc == 1;
        let (target_tp_rank, target_tp_ranks, required_dst_info_num, tp_responses) = if sharded {
            (None, (0..pt).collect(), dt, pt)
        } else if dt >= pt {
            let per_prefill = dt / pt;
            let target = r / per_prefill;
            (Some(target), vec![target], per_prefill, 1)
        } else {
            let first = r * tp_count;
            // Plain MLA: the ranks hold the same bytes, one of them writes. Hybrid MLA hears from all.
            let responses = if decode.is_mla { 1 } else { tp_count };
            (Some(first), (first..first + tp_count).collect(), 1, responses)
        };
        let target_pp_ranks = if dpp == pp { vec![decode.pp_rank] } else { (0..pp).collect() };
        Ok(Self {
            target_tp_rank,
            target_tp_ranks,
            target_cp_ranks: (0..cp_count).collect(),
            target_pp_ranks,
            required_dst_info_num,
            // At most MAX_CONNECTIONS, so it fits.
            required_prefill_response_num: tp_responses * cp_count * pp_count,
            is_mla: decode.is_mla,
            prefill_cp_size: pc,
            prefill_pp_size: pp,
        })
    }

    /// The ranks to contact, in the order in which decode asks for their addresses, registers and sends: by CP, then
    /// TP, then PP from the last to the first.
    pub fn connections(&self) -> Vec<Connection> {
        let mut out =
            Vec::with_capacity(self.target_cp_ranks.len() * self.target_tp_ranks.len() * self.target_pp_ranks.len());
        for &cp in &self.target_cp_ranks {
            for &tp in &self.target_tp_ranks {
                let is_dummy = self.is_mla && self.target_tp_rank.is_some_and(|target| target != tp);
                for &pp in self.target_pp_ranks.iter().rev() {
                    out.push(Connection { cp, tp, pp, is_dummy });
                }
            }
        }
        out
    }

    /// SGLang's connection-pool key of one CP rank: `"{addr}_{dp}_{cp}_{target_tp_rank}"`, with the text `None` when
    /// there is no single target. Records of one key are registered with together.
    pub fn pool_key(&self, addr: &str, dp: u32, cp: u32) -> String {
        match self.target_tp_rank {
            Some(tp) => format!("{addr}_{dp}_{cp}_{tp}"),
            None => format!("{addr}_{dp}_{cp}_None"),
        }
    }

    /// The pool keys of all contacted CP ranks, in CP order.
    pub fn pool_keys(&self, addr: &str, dp: u32) -> Vec<String> {
        self.target_cp_ranks.iter().map(|&cp| self.pool_key(addr, dp, cp)).collect()
    }

    /// The number a contacted rank puts into its status and ACK messages.
    ///
    /// With prefill's CP-TP group sharing the advertised TP and CP pairs are swapped, while a rank numbers itself by
    /// its real ones; the two agree as sets whenever all ranks are contacted, and always for `pp_size` 1.
    pub fn rank_of(&self, connection: &Connection) -> PrefillRank {
        // `resolve` bounds the deployment; saturating, because a caller may make a connection of its own.
        let per_tp = self.prefill_pp_size * self.prefill_cp_size;
        let place = connection.pp.saturating_mul(self.prefill_cp_size).saturating_add(connection.cp);
        PrefillRank(connection.tp.saturating_mul(per_tp).saturating_add(place))
    }

    /// The ranks whose Success counts: the contacted ones that are no dummies, ascending. Exactly
    /// [`Self::required_prefill_response_num`] of them (requirement B1: a status from any other rank is a violation).
    pub fn expected_ranks(&self) -> Vec<PrefillRank> {
        let mut out: Vec<_> = self.connections().iter().filter(|c| !c.is_dummy).map(|c| self.rank_of(c)).collect();
        out.sort_unstable();
        out
    }
}

/// A prefill rank's own number in status and ACK messages: `tp * (pp_size * cp_size) + pp * cp_size + cp`.
///
/// `cp` and `pp` are `(rank, size)`.
///
/// # Errors
/// A size out of range, a rank that its size does not have, or a number beyond 32 bits.
pub fn prefill_unique_rank(
    attn_tp_rank: u32,
    (cp_rank, cp_size): (u32, u32),
    (pp_rank, pp_size): (u32, u32),
) -> Result<PrefillRank, TopologyError> {
    check_size("attn_cp_size", cp_size)?;
    check_size("pp_size", pp_size)?;
    check_rank("attn_cp_rank", cp_rank, cp_size)?;
    check_rank("pp_rank", pp_rank, pp_size)?;
    check_rank("attn_tp_rank", attn_tp_rank, MAX_PARALLEL_SIZE)?;
    let n = u64::from(attn_tp_rank) * u64::from(pp_size * cp_size) + u64::from(pp_rank * cp_size + cp_rank);
    u32::try_from(n).map(PrefillRank).map_err(|_| TopologyError::Rank {
        field: "attn_tp_rank",
        rank: attn_tp_rank,
        size: u32::MAX / (pp_size * cp_size),
    })
}

/// Whether a prefill CP rank only goes through the motions: decode never contacts it, its sender starts in
/// WaitingForInput and succeeds at the last chunk without writing.
pub fn is_dummy_cp_rank(all_cp: bool, cp_tp_sharing: bool, attn_cp_size: u32, attn_cp_rank: u32) -> bool {
    !all_cp && !cp_tp_sharing && attn_cp_size > 1 && attn_cp_rank != 0
}

fn check_size(field: &'static str, value: u32) -> Result<(), TopologyError> {
    if (1..=MAX_PARALLEL_SIZE).contains(&value) { Ok(()) } else { Err(TopologyError::Size { field, value }) }
}

fn check_rank(field: &'static str, rank: u32, size: u32) -> Result<(), TopologyError> {
    if rank < size { Ok(()) } else { Err(TopologyError::Rank { field, rank, size }) }
}
