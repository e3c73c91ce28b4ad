//! Whether a prefill server fits a decode rank (protocol 2.5; requirements A4, G2; faults F71, F72): checked once per
//! server, before anything is sent to it.

use serde_json::Value;

use crate::bootstrap::types::{POLICY_EARLY, ParallelInfo};
use crate::topology::{DecodeRank, PrefillSizes, RankMapping, TopologyError};

/// What a decode rank is, as far as prefill must agree with it.
#[derive(Clone, Debug, PartialEq)]
pub struct DecodeProfile {
    /// Sizes, place and attention kind.
    pub rank: DecodeRank,
    /// Tokens a page.
    pub page_size: u32,
    /// Element type of the KV cache.
    pub kv_cache_dtype: String,
    /// Layout tag; compared when both sides have one.
    pub kv_layout: Option<String>,
    /// Opaque layout record; compared when either side has one.
    pub dsv41_spec_layout: Option<Value>,
    /// When this decode allocates.
    pub decode_allocation_policy: String,
    /// Decode context parallelism.
    pub dcp_size: u32,
    /// A state kind that needs equal attention TP on both sides, by name (MiniMax index state; MXFP8 block scales of
    /// non-MLA models).
    pub equal_attn_tp: Option<String>,
    /// What its registration says of the KV entries, when it speaks NIXL's dialect.
    pub nixl: Option<NixlEntries>,
}

/// KV entries of a decode rank, as far as NIXL prefill ranks of 0.5.23 care.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NixlEntries {
    /// Some are in host memory.
    pub host_memory: bool,
    /// They have layer ids.
    pub layer_ids: bool,
}

impl DecodeProfile {
    /// A decode rank with SGLang's defaults for everything that is not named.
    pub fn new(rank: DecodeRank, page_size: u32, kv_cache_dtype: &str) -> Self {
        Self {
            rank,
            page_size,
            kv_cache_dtype: kv_cache_dtype.to_owned(),
            kv_layout: None,
            dsv41_spec_layout: None,
            decode_allocation_policy: POLICY_EARLY.to_owned(),
            dcp_size: 1,
            equal_attn_tp: None,
            nixl: None,
        }
    }
}

/// The two sides do not fit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Incompatible {
    /// A setting that must be the same differs.
    #[error("{field} is {prefill} on prefill and {decode} on decode; start both sides with the same value")]
    Field {
        /// Which setting.
        field: &'static str,
        /// Prefill's value.
        prefill: String,
        /// Decode's value.
        decode: String,
    },
    /// A state kind cannot be cut between different attention TP sizes.
    #[error("attn_tp_size is {prefill} on prefill and {decode} on decode, but {state} state needs them equal")]
    StateTp {
        /// The state kind.
        state: String,
        /// Prefill's value.
        prefill: u32,
        /// Decode's value.
        decode: u32,
    },
    /// Decode context parallelism with a prefill that cannot feed it.
    #[error("dcp_size is {dcp_size} on decode, which needs {needs}, but {field} is {value}")]
    Dcp {
        /// Decode's DCP size.
        dcp_size: u32,
        /// What it needs.
        needs: &'static str,
        /// What stands against it.
        field: &'static str,
        /// Its value.
        value: String,
    },
    /// The registration would stop the rank that gets it.
    #[error(
        "a NIXL prefill rank of SGLang 0.5.23 stops serving every decode when one registers with {what}, so this one does \
         not (attn_tp_size {} and pp_size {} on prefill, {} and {} on decode): make the sizes equal. A prefill rank of ours \
         behind SGLang's bootstrap server looks the same; it is known behind ours", prefill.0, prefill.1, decode.0, decode.1
    )]
    Fatal {
        /// What it cannot take.
        what: &'static str,
        /// Prefill's attention TP and PP size.
        prefill: (u32, u32),
        /// Decode's.
        decode: (u32, u32),
    },
    /// The sizes cannot be mapped.
    #[error("{0}")]
    Topology(#[from] TopologyError),
}

/// The mapping of `decode` onto the server that reported `info`.
///
/// # Errors
/// [`Incompatible`], naming the field and both values.
pub fn check(decode: &DecodeProfile, info: &ParallelInfo) -> Result<RankMapping, Incompatible> {
    let differ = |field, prefill: &str, decode: &str| {
        Err(Incompatible::Field { field, prefill: prefill.to_owned(), decode: decode.to_owned() })
    };
    // A prefill that names no page size or type is not held to one, as in 0.5.23.
    if let Some(page_size) = info.page_size.filter(|p| *p != decode.page_size) {
        return differ("page_size", &page_size.to_string(), &decode.page_size.to_string());
    }
    if let Some(dtype) = info.kv_cache_dtype.as_ref().filter(|d| **d != decode.kv_cache_dtype) {
        return differ("kv_cache_dtype", dtype, &decode.kv_cache_dtype);
    }
    if let (Some(p), Some(d)) = (&info.kv_layout, &decode.kv_layout)
        && p != d
    {
        return differ("kv_layout", p, d);
    }
    if info.dsv41_spec_layout != decode.dsv41_spec_layout {
        let text = |v: &Option<Value>| v.as_ref().map_or("null".to_owned(), Value::to_string);
        return differ("dsv41_spec_layout", &text(&info.dsv41_spec_layout), &text(&decode.dsv41_spec_layout));
    }
    if info.decode_allocation_policy != decode.decode_allocation_policy {
        return differ("decode_allocation_policy", &info.decode_allocation_policy, &decode.decode_allocation_policy);
    }
    if let Some(state) = &decode.equal_attn_tp
        && info.attn_tp_size != decode.rank.attn_tp_size
    {
        let (prefill, decode) = (info.attn_tp_size, decode.rank.attn_tp_size);
        return Err(Incompatible::StateTp { state: state.clone(), prefill, decode });
    }
    if decode.dcp_size > 1 {
        let dcp =
            |needs, field, value: String| Err(Incompatible::Dcp { dcp_size: decode.dcp_size, needs, field, value });
        if !decode.rank.is_mla && !decode.rank.is_hybrid_mla {
            return dcp("MLA or hybrid MLA", "the model's attention", "neither".into());
        }
        if info.attn_cp_size != 1 {
            return dcp("attn_cp_size 1 on prefill", "attn_cp_size", info.attn_cp_size.to_string());
        }
        if info.enable_kv_cache_sharding {
            return dcp("a prefill without page sharding", "enable_kv_cache_sharding", "true".into());
        }
    }
    Ok(RankMapping::resolve(&sizes(info), &decode.rank)?)
}

/// What ranks of that server that are not known to be ours survive. The thread of a NIXL prefill rank of 0.5.23 that reads
/// registrations ends with the first one that it cannot take (`_prepare_payload_xfer`), and with it the rank: 0.5.23's
/// hazard, but the message is ours.
///
/// # Errors
/// [`Incompatible::Fatal`]. What cannot be known here (fewer KV entries than prefill has, other item lengths, layer ids on
/// one side only) is not found.
pub fn check_0_5_23(decode: &DecodeProfile, info: &ParallelInfo) -> Result<(), Incompatible> {
    let Some(entries) = decode.nixl else { return Ok(()) };
    let rank = &decode.rank;
    let (prefill, decode) = ((info.attn_tp_size, info.pp_size), (rank.attn_tp_size, rank.pp_size));
    let fatal = |what| Err(Incompatible::Fatal { what, prefill, decode });
    // Head slices of unequal TP, which 0.5.23 writes to device memory only.
    let sliced = !rank.is_mla && !rank.is_hybrid_mla && prefill.0 != decode.0;
    // Decode has the entries of all stages.
    let more_entries = prefill.1 != decode.1;
    if entries.host_memory && sliced {
        return fatal("KV in host memory and another attention TP size (MHA)");
    }
    if entries.host_memory && more_entries {
        return fatal("KV in host memory and another PP size");
    }
    if more_entries && !entries.layer_ids && !sliced && !rank.is_mla {
        return fatal("KV entries without layer ids and another PP size (MHA, hybrid MLA)");
    }
    Ok(())
}

fn sizes(info: &ParallelInfo) -> PrefillSizes {
    PrefillSizes {
        attn_tp_size: info.attn_tp_size,
        attn_cp_size: info.attn_cp_size,
        dp_size: info.dp_size,
        pp_size: info.pp_size,
        enable_dsa_cache_layer_split: info.enable_dsa_cache_layer_split,
        enable_kv_cache_sharding: info.enable_kv_cache_sharding,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn info(change: impl FnOnce(&mut Value)) -> ParallelInfo {
        let mut value = json!({
            "attn_tp_size": 2, "attn_cp_size": 1, "dp_size": 1, "pp_size": 1, "page_size": 16,
            "kv_cache_dtype": "bfloat16", "follow_bootstrap_room": true, "kv_layout": "v4",
        });
        change(&mut value);
        ParallelInfo::from_json(value.to_string().as_bytes()).unwrap()
    }

    fn decode() -> DecodeProfile {
        let rank = DecodeRank { attn_tp_size: 2, ..DecodeRank::default() };
        DecodeProfile { kv_layout: Some("v4".into()), ..DecodeProfile::new(rank, 16, "bfloat16") }
    }

    /// R-A4: each field flipped in turn is refused, naming the field and both values.
    #[test]
    fn cat_f72_each_flipped_field_is_refused_by_name() {
        assert!(check(&decode(), &info(|_| {})).is_ok());
        for (field, prefill, own) in [
            ("page_size", json!(32), "16"),
            ("kv_cache_dtype", json!("fp8_e4m3"), "bfloat16"),
            ("kv_layout", json!("v5"), "v4"),
            ("dsv41_spec_layout", json!({"a": 1}), "null"),
            ("decode_allocation_policy", json!("prefill_complete"), "early"),
        ] {
            let error = check(&decode(), &info(|v| v[field] = prefill.clone())).unwrap_err();
            let prefill = prefill.as_str().map_or_else(|| prefill.to_string(), str::to_owned);
            assert_eq!(error, Incompatible::Field { field, prefill, decode: own.into() });
        }
        // What prefill does not say is not compared.
        for field in ["page_size", "kv_cache_dtype", "kv_layout"] {
            assert!(check(&decode(), &info(|v| v[field] = Value::Null)).is_ok(), "{field}");
        }
    }

    /// As 0.5.23's own function answers, called with these geometries.
    #[test]
    fn r_h1_registrations_that_would_stop_a_prefill_of_0_5_23_are_refused() {
        let fits = |kind: (bool, bool), tp: (u32, u32), pp: (u32, u32), host_memory, layer_ids| {
            let rank = DecodeRank {
                attn_tp_size: tp.1,
                pp_size: pp.1,
                is_mla: kind.0,
                is_hybrid_mla: kind.1,
                ..DecodeRank::default()
            };
            let nixl = Some(NixlEntries { host_memory, layer_ids });
            let decode = DecodeProfile { nixl, ..DecodeProfile::new(rank, 16, "bfloat16") };
            let info = info(|v| (v["attn_tp_size"], v["pp_size"]) = (json!(tp.0), json!(pp.0)));
            let fits = check_0_5_23(&decode, &info);
            assert!(check_0_5_23(&DecodeProfile { nixl: None, ..decode }, &info).is_ok());
            fits.is_ok()
        };
        let (mla, hybrid, mha) = ((true, false), (false, true), (false, false));
        let (host, device, ids, none) = (true, false, true, false);
        for (kind, tp, pp, memory, layer_ids, want) in [
            (mla, (1, 1), (1, 1), host, none, true),
            (mla, (2, 1), (1, 1), host, none, true),
            (mha, (1, 1), (1, 1), host, none, true),
            (mha, (2, 1), (1, 1), host, none, false),
            (mha, (2, 1), (1, 1), device, none, true),
            (mha, (1, 2), (1, 1), host, none, false),
            (hybrid, (2, 1), (1, 1), host, none, true),
            (mla, (1, 1), (2, 1), host, none, false),
            (mla, (1, 1), (2, 1), device, none, true),
            (mla, (1, 1), (2, 2), host, none, true),
            (hybrid, (1, 1), (2, 1), device, none, false),
            (hybrid, (1, 1), (2, 1), device, ids, true),
            (mha, (1, 1), (2, 1), device, none, false),
            (mha, (1, 1), (2, 1), device, ids, true),
            (mha, (1, 1), (2, 1), host, ids, false),
            (mha, (2, 1), (2, 1), device, none, true),
        ] {
            assert_eq!(
                fits(kind, tp, pp, memory, layer_ids),
                want,
                "{kind:?} tp {tp:?} pp {pp:?} {memory} {layer_ids}"
            );
        }
    }

    #[test]
    fn cat_f71_topologies_that_cannot_work_are_refused_by_name() {
        let text =
            |decode: &DecodeProfile, change: fn(&mut Value)| check(decode, &info(change)).unwrap_err().to_string();
        let odd = text(&decode(), |v| v["attn_tp_size"] = json!(3));
        assert!(odd.contains("attn_tp_size 3") && odd.contains("attn_tp_size 2"), "{odd}");

        let mut dcp = decode();
        dcp.dcp_size = 8;
        assert!(text(&dcp, |_| {}).contains("dcp_size is 8 on decode"));
        dcp.rank.is_mla = true;
        assert!(check(&dcp, &info(|_| {})).is_ok());
        assert!(text(&dcp, |v| v["attn_cp_size"] = json!(2)).contains("attn_cp_size is 2"));
        assert!(
            text(&dcp, |v| v["enable_kv_cache_sharding"] = json!(true)).contains("enable_kv_cache_sharding is true")
        );

        let mut state = decode();
        state.equal_attn_tp = Some("minimax_index".into());
        let error = text(&state, |v| v["attn_tp_size"] = json!(4));
        assert_eq!(error, "attn_tp_size is 4 on prefill and 2 on decode, but minimax_index state needs them equal");
    }
}
