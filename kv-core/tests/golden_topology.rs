//! Rank mapping and rank numbers against SGLang 0.5.23's own answers.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test that cannot set up fails

use kv_core::PrefillRank;
use kv_core::topology::{DecodeRank, MAX_PARALLEL_SIZE, PrefillSizes, RankMapping, TopologyError, prefill_unique_rank};
use proptest::prelude::*;
use serde_json::{Value, json};

fn vectors(text: &str) -> Vec<Value> {
    let file: Value = serde_json::from_str(text).unwrap();
    file["vectors"].as_array().unwrap().clone()
}

fn u(v: &Value, key: &str) -> u32 {
    u32::try_from(v[key].as_u64().unwrap_or_else(|| panic!("{key} in {v}"))).unwrap()
}

fn inputs(v: &Value) -> (PrefillSizes, DecodeRank) {
    let (p, d) = (&v["prefill"], &v["decode"]);
    let flag = |v: &Value, key: &str| v[key].as_bool().unwrap();
    (
        PrefillSizes {
            attn_tp_size: u(p, "attn_tp_size"),
            attn_cp_size: u(p, "attn_cp_size"),
            dp_size: 1,
            pp_size: u(p, "pp_size"),
            enable_dsa_cache_layer_split: flag(p, "enable_dsa_cache_layer_split"),
            enable_kv_cache_sharding: flag(p, "enable_kv_cache_sharding"),
        },
        DecodeRank {
            attn_tp_size: u(d, "attn_tp_size"),
            attn_cp_size: u(d, "attn_cp_size"),
            engine_rank: u(d, "engine_rank"),
            pp_size: u(d, "pp_size"),
            pp_rank: u(d, "pp_rank"),
            is_mla: flag(d, "is_mla_backend"),
            is_hybrid_mla: flag(d, "is_hybrid_mla_backend"),
            all_cp: flag(d, "enable_all_cp_ranks_for_transfer"),
        },
    )
}

#[test]
fn rank_mapping_matches_every_record() {
    let (mut equal, mut refused) = (0, vec![]);
    for (i, v) in vectors(include_str!("../../kv-testkit/vectors/rank_mapping.json")).iter().enumerate() {
        let (p, d) = inputs(v);
        let m = match RankMapping::resolve(&p, &d) {
            Ok(m) => m,
            Err(e) => {
                refused.push((i, e));
                continue;
            }
        };
        let connections: Vec<_> = m.connections();
        let mut keys = m.pool_keys("p:8998", 0);
        keys.sort();
        let ours = json!({
            "prefill": v["prefill"], "decode": v["decode"],
            "target_tp_rank": m.target_tp_rank,
            "target_tp_ranks": m.target_tp_ranks,
            "target_cp_ranks": m.target_cp_ranks,
            "target_pp_ranks": m.target_pp_ranks,
            "required_dst_info_num": m.required_dst_info_num,
            "required_prefill_response_num": m.required_prefill_response_num,
            "connections_in_order": connections.iter()
                .map(|c| json!({"cp": c.cp, "tp": c.tp, "pp": c.pp, "is_dummy": c.is_dummy})).collect::<Vec<_>>(),
            "connection_pool_keys": keys,
            "abort_required_acks": connections.len(),
        });
        assert_eq!(&ours, v, "record {i}");
        let expected = m.expected_ranks();
        assert_eq!(expected.len(), m.required_prefill_response_num as usize, "record {i}");
        equal += 1;
    }
    assert_eq!(equal, 274);
    assert_eq!(
        refused,
        vec![
            (273, TopologyError::ShardingTp { prefill: 4, decode: 2 }),
            (275, TopologyError::Pp { prefill: 1, decode: 2 }),
            (276, TopologyError::Pp { prefill: 4, decode: 2 }),
            // Negative controls: 0.5.23 accepts these three (278 targets a rank that does not exist).
            (277, TopologyError::TpIndivisible { prefill: 3, decode: 2 }),
            (278, TopologyError::TpIndivisible { prefill: 2, decode: 3 }),
            (279, TopologyError::Rank { field: "decode engine_rank", rank: 5, size: 2 }),
        ]
    );
}

#[test]
fn r_g2_refusals_name_both_sizes() {
    let text = |pt, dt| {
        let p = PrefillSizes { attn_tp_size: pt, ..Default::default() };
        let d = DecodeRank { attn_tp_size: dt, ..Default::default() };
        RankMapping::resolve(&p, &d).unwrap_err().to_string()
    };
    assert_eq!(text(3, 2), "prefill attn_tp_size 3 and decode attn_tp_size 2: one must divide the other");
    assert_eq!(text(0, 2), "prefill attn_tp_size is 0; it must be between 1 and 4096");
    assert_eq!(text(1, u32::MAX), "decode attn_tp_size is 4294967295; it must be between 1 and 4096");
}

#[test]
fn sizes_from_a_reply_never_allocate_without_bound() {
    let p = PrefillSizes { attn_tp_size: 64, attn_cp_size: 64, pp_size: 64, ..Default::default() };
    let d = DecodeRank { all_cp: true, ..Default::default() };
    assert_eq!(RankMapping::resolve(&p, &d), Err(TopologyError::TooManyConnections { tp: 64, cp: 64, pp: 64 }));
    let m = MAX_PARALLEL_SIZE;
    let p = PrefillSizes { attn_tp_size: m, attn_cp_size: m, pp_size: m, ..Default::default() };
    assert_eq!(RankMapping::resolve(&p, &d), Err(TopologyError::TooManyRanks { tp: m, cp: m, pp: m }));
}

#[test]
fn prefill_unique_rank_matches_every_record() {
    let records = vectors(include_str!("../../kv-testkit/vectors/prefill_unique_rank.json"));
    for v in &records {
        let pair = |key: &str| (v[key][0].as_u64().unwrap() as u32, v[key][1].as_u64().unwrap() as u32);
        assert_eq!(
            prefill_unique_rank(pair("tp").0, pair("cp"), pair("pp")),
            Ok(PrefillRank(u(v, "unique_rank"))),
            "{v}"
        );
    }
    assert_eq!(records.len(), 26);
}

proptest! {
    /// Every decode rank of a deployment: the answers it waits for can all come (B1), every prefill rank that must
    /// hear from n decode ranks hears from exactly n, and no rank outside the deployment is contacted.
    #[test]
    fn r_g1_both_sides_count_the_same(
        (pt, dt) in (0u32..4, 0u32..4).prop_map(|(a, b)| (1 << a, 1 << b)),
        pc in 1u32..4, pp in 1u32..4, same_pp: bool,
        kind in 0u8..3, all_cp: bool, split: bool, sharding: bool,
    ) {
        let p = PrefillSizes {
            attn_tp_size: pt, attn_cp_size: pc, pp_size: pp,
            enable_dsa_cache_layer_split: split, enable_kv_cache_sharding: sharding, ..Default::default()
        };
        let dpp = if same_pp { pp } else { 1 };
        let mut heard = std::collections::HashMap::<_, u32>::new();
        let mut wanted = 0;
        for engine_rank in 0..dt {
            for pp_rank in 0..dpp {
                let d = DecodeRank {
                    attn_tp_size: dt, engine_rank, pp_size: dpp, pp_rank,
                    is_mla: kind == 1, is_hybrid_mla: kind == 2, all_cp, ..Default::default()
                };
                let m = match RankMapping::resolve(&p, &d) {
                    Ok(m) => m,
                    Err(e) => {
                        prop_assert_eq!(e, TopologyError::ShardingTp { prefill: pt, decode: dt });
                        return Ok(());
                    }
                };
                wanted = m.required_dst_info_num;
                let mut expected = m.expected_ranks();
                prop_assert_eq!(expected.len() as u32, m.required_prefill_response_num);
                expected.dedup();
                prop_assert_eq!(expected.len() as u32, m.required_prefill_response_num, "ranks are distinct");
                for c in m.connections() {
                    prop_assert!(c.tp < pt && c.cp < pc && c.pp < pp);
                    prop_assert_eq!(m.rank_of(&c), prefill_unique_rank(c.tp, (c.cp, pc), (c.pp, pp)).unwrap());
                    *heard.entry(m.rank_of(&c)).or_default() += 1;
                }
            }
        }
        for (rank, n) in heard {
            prop_assert_eq!(n, wanted, "{:?}", rank);
        }
    }
}
