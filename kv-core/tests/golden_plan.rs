//! Index arithmetic and transfer descriptors against SGLang 0.5.23's own answers.
#![allow(clippy::unwrap_used, clippy::expect_used)] // a test that cannot set up fails

mod support;

use std::collections::BTreeMap;

use kv_core::ids::RegionId;
use kv_core::layout::{
    AttentionKind, CompressedList, LayoutError, LayoutSpec, LocalLayout, Pairing, build_transfer_entry_pairs,
    compressed_offsets, remap_draft_layer_ids,
};
use kv_core::plan::{EntryPair, PlanError, PlanGroup, Planner, Run, WritePlan, find_runs, flat_indices, kind_segments};
use kv_core::topology::{cp_rank_page_bounds, filter_for_cp_rank, filter_for_shard_rank};
use serde_json::{Value, json};
use support::*;

fn count(done: &mut BTreeMap<&'static str, usize>, what: &'static str) {
    *done.entry(what).or_default() += 1;
}

fn runs_of(v: &Value) -> Result<Vec<Run>, PlanError> {
    let mut runs = vec![Run { src: 9, dst: 9, count: 9 }];
    find_runs(&pages(&v["src"]), &pages(&v["dst"]), &mut runs).map(|()| runs)
}

fn mori_plan(v: &Value) -> Value {
    let runs = runs_of(v).unwrap();
    let pair = EntryPair {
        src_entry: 0,
        dst_entry: 0,
        src_region: RegionId(0),
        src_offset: 0,
        dst_addr: 0,
        item_len: 100,
        src_stride: 100,
        dst_stride: 100,
        dst_kind: Default::default(),
    };
    let plan = WritePlan::new([PlanGroup { entries: [pair].into(), runs: runs.clone().into() }]);
    let spans: Vec<_> = plan.spans().collect();
    json!({
        "fn": v["fn"], "src": v["src"], "dst": v["dst"],
        "src_starts": runs.iter().map(|r| r.src).collect::<Vec<_>>(),
        "dst_starts": runs.iter().map(|r| r.dst).collect::<Vec<_>>(),
        "counts": runs.iter().map(|r| r.count).collect::<Vec<_>>(),
        "materialize_item_len_100": {
            "local_offsets": spans.iter().map(|s| s.src_offset).collect::<Vec<_>>(),
            "remote_offsets": spans.iter().map(|s| s.dst_addr).collect::<Vec<_>>(),
            "sizes": spans.iter().map(|s| s.len).collect::<Vec<_>>(),
        },
    })
}

fn expand(start: u32, count: u32) -> Vec<u32> {
    (start..start + count).collect()
}

#[test]
fn grouping_and_indices() {
    let mut done = BTreeMap::new();
    let mut later = BTreeMap::new();
    let records = vectors(include_str!("../../kv-testkit/vectors/grouping_and_indices.json"));
    for (i, v) in records.iter().enumerate() {
        let n = |key: &str| num(&v[key]);
        match v["fn"].as_str().unwrap() {
            "group_concurrent_contiguous" => {
                count(&mut done, "group");
                match runs_of(v) {
                    Err(e) => {
                        assert_eq!(e, PlanError::UnequalLengths { src: 2, dst: 1 });
                        assert!(v["error"].is_string(), "record {i}");
                    }
                    Ok(runs) => {
                        let src: Vec<_> = runs.iter().map(|r| expand(r.src, r.count)).collect();
                        let dst: Vec<_> = runs.iter().map(|r| expand(r.dst, r.count)).collect();
                        assert_eq!((json!(src), json!(dst)), (v["src_groups"].clone(), v["dst_groups"].clone()));
                    }
                }
            }
            "mori_GroupedIndexPlan.from_indices" => {
                count(&mut done, "mori grouped");
                if v["error"].is_string() {
                    // The common grouping moves nothing (records 1, 2); Mori refuses, and so does the planner.
                    let (src, dst) = (pages(&v["src"]), pages(&v["dst"]));
                    assert_eq!(runs_of(v), Ok(vec![]), "record {i}");
                    let spec = LayoutSpec { attention: AttentionKind::Mla, ..Default::default() };
                    let theirs = peer(&registration(&[1 << 20], 8, &[]));
                    let pairing = Pairing::new(&local(&[(4096, 8)], &[], 16, spec), &theirs).unwrap();
                    let e = Planner::new().plan_chunk(&pairing, &src, &dst).unwrap_err();
                    assert_eq!(e, PlanError::UnequalLengths { src: src.len(), dst: dst.len() }, "record {i}");
                } else {
                    assert_eq!(&mori_plan(v), v, "record {i}");
                }
            }
            "nixl_repeat_indices_over_layers" => {
                count(&mut done, "flat");
                let out = flat_indices(&pages(&v["indices"]), n("num_layers"), n("layer_length").into());
                assert_eq!(json!(out), v["out"], "record {i}");
            }
            "nixl_num_kv_slots" => {
                count(&mut done, "slots");
                let lens = u64s(&v["kv_data_lens"]);
                let entries = lens.iter().zip(u64s(&v["kv_item_lens"])).zip(0u32..);
                let spec = LayoutSpec {
                    attention: AttentionKind::Mla,
                    kv: entries.map(|((&len, item), r)| entry(r, len, item)).collect(),
                    ..Default::default()
                };
                let regions = lens.iter().zip(0u32..).map(|(&len, r)| region(r, 4096, len));
                assert_eq!(json!(LocalLayout::new(spec, regions).unwrap().kv_slots()), v["out"], "record {i}");
            }
            "nixl_kv_xfer_mem_segments" => {
                count(&mut done, "segments");
                let texts = |key: &str| -> Vec<String> { serde_json::from_value(v[key].clone()).unwrap() };
                let (src, dst) = (texts("src"), texts("dst"));
                let pairs: Vec<_> = src.iter().map(String::as_str).zip(dst.iter().map(String::as_str)).collect();
                let out: Vec<_> = kind_segments(&pairs)
                    .into_iter()
                    .map(|(range, (s, d))| {
                        json!({"start": range.start, "end": range.end, "src_mem_kind": s, "dst_mem_kind": d})
                    })
                    .collect();
                assert_eq!(json!(out), v["out"], "record {i}");
            }
            "_get_cp_rank_page_bounds" => {
                count(&mut done, "cp bounds");
                let out = cp_rank_page_bounds(n("total_pages").into(), n("cp_rank"), n("cp_size")).unwrap();
                assert_eq!(json!([out.start, out.end]), v["out"], "record {i}");
            }
            "filter_kv_indices_for_cp_rank" => {
                count(&mut done, "cp filter");
                let list = pages(&v["kv_indices"]);
                let start = v["index_slice"][0].as_u64().unwrap();
                let total = n("total_pages").into();
                let out = filter_for_cp_rank(&list, start, total, n("cp_rank"), n("cp_size")).unwrap();
                assert_eq!(json!(out.pages), v["out_indices"], "record {i}");
                assert_eq!(json!([out.positions.start, out.positions.end]), v["out_slice"], "record {i}");
            }
            "filter_kv_indices_for_shard_rank" => {
                count(&mut done, "shard filter");
                let start = v["index_slice"][0].as_u64().unwrap();
                let list = pages(&v["kv_indices"]);
                let out = filter_for_shard_rank(&list, start, n("shard_rank"), n("shard_size")).unwrap();
                assert_eq!(json!(out.local_pages), v["out_local_indices"], "record {i}");
                assert_eq!(json!(out.positions), v["out_positions"], "record {i}");
            }
            "build_transfer_entry_pairs" => {
                count(&mut done, "entry pairs");
                let out = build_transfer_entry_pairs(
                    &u32s(&v["src_layer_ids"]),
                    &u32s(&v["dst_layer_ids"]),
                    n("n_src"),
                    n("n_dst"),
                    v["allow_positional_fallback"].as_bool().unwrap(),
                );
                match out {
                    Ok(pairs) => assert_eq!(json!(pairs), v["out"], "record {i}"),
                    Err(e) => assert!(v["out"]["error"].is_string(), "record {i}: {e}"),
                }
            }
            "_remap_draft_layer_ids" => {
                count(&mut done, "draft ids");
                let out = remap_draft_layer_ids(&u32s(&v["layer_ids"]), n("num_hidden_layers"));
                assert_eq!(json!(out), v["out"], "record {i}");
            }
            // Head slices, DCP relayout and the staging grid belong to the step for different shapes on the two sides.
            "nixl_expand_page_indices_for_slice" => count(&mut later, "head slices"),
            "build_dcp_token_transfer_plan" => count(&mut later, "DCP relayout"),
            "compute_grid_segments" | "staging_grid_tokens" => count(&mut later, "staging grid"),
            other => panic!("record {i}: {other} is new"),
        }
    }
    assert_eq!(
        done,
        BTreeMap::from([
            ("group", 13),
            ("mori grouped", 12),
            ("flat", 3),
            ("slots", 3),
            ("segments", 3),
            ("cp bounds", 6),
            ("cp filter", 5),
            ("shard filter", 3),
            ("entry pairs", 10),
            ("draft ids", 2),
        ])
    );
    assert_eq!(later, BTreeMap::from([("head slices", 3), ("DCP relayout", 6), ("staging grid", 9)]));
    assert_eq!(records.len(), 60 + 18);
}

/// `(address, item_len)` of our KV entries in a Mooncake record.
fn kv_entries(input: &Value) -> Vec<(u64, u64)> {
    let ptrs = u64s(&input["src_kv_ptrs"]);
    let lens = match &input["item_lens"] {
        Value::Null => vec![input["item_len"].as_u64().unwrap(); ptrs.len()],
        lens => u64s(lens),
    };
    ptrs.into_iter().zip(lens).collect()
}

/// What the record says about our stage, with what its README adds.
fn stage(name: &str, input: &Value) -> LayoutSpec {
    let mla = name.starts_with("mla_");
    let pp = matches!(name, "mha_pp_stage_start2_of_4_decode_pp1" | "mla_pp_stage1_of_3" | "mla_pp_with_draft_suffix");
    LayoutSpec {
        attention: if mla { AttentionKind::Mla } else { AttentionKind::Mha },
        kv: input.get("src_layer_ids").map_or(vec![], |ids| layers(&u32s(ids))),
        num_draft_entries: input.get("num_draft_entries").map_or(0, num),
        pp_size: if pp { 2 } else { 1 },
        pp_rank: u32::from(pp),
        prefill_start_layer: input.get("prefill_start_layer").map_or(0, num),
        ..Default::default()
    }
}

fn calls(plans: &[WritePlan], local: &LocalLayout) -> Value {
    let base = |id: RegionId| local.regions().iter().find(|r| r.id() == id).unwrap().addr();
    let mut out = vec![];
    for plan in plans {
        let spans: Vec<_> = plan.spans().collect();
        assert_eq!(plan.descriptor_count(), spans.len() as u64);
        assert_eq!(plan.total_bytes(), spans.iter().map(|s| s.len).sum::<u64>());
        let mut again = vec![];
        plan.for_each_span(|s| again.push(s));
        assert_eq!(again, spans);
        out.push(json!({
            "session": "s",
            "src": spans.iter().map(|s| base(s.src_region) + s.src_offset).collect::<Vec<_>>(),
            "dst": spans.iter().map(|s| s.dst_addr).collect::<Vec<_>>(),
            "len": spans.iter().map(|s| s.len).collect::<Vec<_>>(),
        }));
    }
    json!(out)
}

fn kv_record(name: &str, v: &Value) {
    let input = &v["input"];
    let entries = kv_entries(input);
    let local = local(&entries, &[], 16, stage(name, input));
    let mut theirs = registration(&u64s(&input["dst_kv_ptrs"]), entries[0].1, &[]);
    if theirs.kv.len() == entries.len() {
        theirs.kv_item_lens = entries.iter().map(|e| e.1).collect();
    }
    theirs.kv_layer_ids = input.get("dst_layer_ids").map_or(vec![], u32s);
    let pairing = Pairing::new(&local, &peer(&theirs)).unwrap();
    let (src, dst) = (pages(&input["src_pages"]), pages(&input["dst_pages"]));
    let batch = input.get("SGLANG_MOONCAKE_MAX_TRANSFER_BATCH_INDICES").map_or(src.len(), |n| num(n) as usize);
    let mut planner = Planner::new();
    let plans: Vec<_> = src
        .chunks(batch)
        .zip(dst.chunks(batch))
        .map(|(src, dst)| planner.plan_chunk(&pairing, src, dst).unwrap())
        .collect();
    assert_eq!(calls(&plans, &local), v["calls"], "{name}");
}

fn compressed_record(v: &Value) {
    let input = &v["input"];
    let ratios = u32s(&input["mla_compression_ratios"]);
    let layers = num(&input["prefill_layers"][0])..num(&input["prefill_layers"][1]);
    let n_dst = num(&input["n_dst"]);
    let list = match input["state_type"].as_str() {
        None => CompressedList::Kv,
        Some("swa") => CompressedList::Swa,
        Some("c128_state") => CompressedList::C128State,
        Some("swa_ring") => CompressedList::SwaRing,
        Some(other) => panic!("{other} is new"),
    };
    let out = compressed_offsets(&ratios, layers.clone(), list, n_dst).unwrap();
    assert_eq!(json!(out), v["out"]["dst_selected_offsets"], "{v}");
    if list != CompressedList::Kv {
        return;
    }
    let spec = LayoutSpec {
        attention: AttentionKind::Mla,
        pp_size: 3,
        pp_rank: 1,
        prefill_start_layer: layers.start,
        prefill_end_layer: Some(layers.end),
        mla_compression_ratios: ratios,
        ..Default::default()
    };
    let local = local(&[(4096, 8), (8192, 8), (12288, 8)], &[], 16, spec);
    let addrs: Vec<u64> = (1..=u64::from(n_dst)).map(|i| i << 20).collect();
    let pairing = Pairing::new(&local, &peer(&registration(&addrs, 8, &[])));
    if n_dst == 6 {
        let theirs: Vec<_> = pairing.unwrap().kv().iter().map(|p| p.dst_entry).collect();
        assert_eq!(theirs, out);
    } else {
        // Negative control: 0.5.23 reads a KV list of 7 by the rule for SWA state and picks entries of another kind.
        let e = pairing.unwrap_err();
        assert!(matches!(e, LayoutError::Unplaceable { ours: 3, theirs: 7, .. }), "{e}");
    }
}

fn replicated_record(v: &Value) {
    let spec = LayoutSpec {
        attention: AttentionKind::HybridMla,
        attn_tp_size: num(&v["src_tp"]),
        engine_rank: num(&v["local"]),
        ..Default::default()
    };
    let mut theirs = registration(&[1 << 20], 8, &[]);
    theirs.attn_tp_size = num(&v["dst_tp"]);
    match Pairing::new(&local(&[(4096, 8)], &[], 16, spec), &peer(&theirs)) {
        Ok(pairing) => assert_eq!(json!(pairing.elected_kv_writer()), v["out"], "{v}"),
        Err(e) => {
            assert!(v["out"].is_string());
            assert_eq!(e, LayoutError::TpIndivisible { ours: 3, theirs: 2 });
        }
    }
}

#[test]
fn descriptors() {
    let mut done = BTreeMap::new();
    let mut later = BTreeMap::new();
    let records = vectors(include_str!("../../kv-testkit/vectors/descriptors.json"));
    let aux = records.iter().find(|v| v["name"] == "aux_rdma_equal").unwrap().clone();
    for (i, v) in records.iter().enumerate() {
        match v["name"].as_str().unwrap() {
            name if name.starts_with("mha_") || name == "layer_id_pairing" => {
                count(&mut done, "mha");
                kv_record(name, v);
            }
            name if name.starts_with("mla_") => {
                count(&mut done, "mla");
                kv_record(name, v);
            }
            "get_mla_kv_ptrs_with_pp_compressed" => {
                count(&mut done, "compressed mla");
                compressed_record(v);
            }
            "should_send_replicated_state" => {
                count(&mut done, "elected writer");
                replicated_record(v);
            }
            "aux_rdma_equal" | "aux_rdma_decode_has_fewer" => {
                count(&mut done, "aux");
                let ours: Vec<_> =
                    u64s(&aux["input"]["src"]).into_iter().zip(u64s(&aux["input"]["item_lens"])).collect();
                let local = local(&[], &ours, 8, LayoutSpec::default());
                let theirs = registration(&[], 0, &u64s(&v["input"]["dst"]));
                let pairing = Pairing::new(&local, &peer(&theirs)).unwrap();
                assert_eq!(pairing.aux_unpaired(), (3 - theirs.aux.len() as u32, 0));
                let (src, dst) = (num(&v["input"]["prefill_aux_index"]), num(&v["input"]["dst_aux_index"]));
                let plan = Planner::new().plan_aux(&pairing, src, dst).unwrap();
                assert_eq!(calls(&[plan], &local), v["calls"], "record {i}");
            }
            // Head slices and state components belong to the step for different shapes on the two sides.
            name if name.contains("_slice_") && !name.contains("mamba") && !name.contains("swa") => {
                count(&mut later, "head slices");
            }
            "swa_head_slice_blocks_p2_d1" => count(&mut later, "swa state"),
            "mamba_slice_byte_blocks" | "mamba_state_whole" => count(&mut later, "mamba state"),
            "get_dsa_tail_state_indices" | "build_dsa_tail_transfer_blocks" | "slice_dsa_tail_dst_ptrs_for_pp" => {
                count(&mut later, "dsa state");
            }
            other => panic!("record {i}: {other} is new"),
        }
    }
    assert_eq!(
        done,
        BTreeMap::from([("mha", 6), ("mla", 3), ("compressed mla", 7), ("elected writer", 5), ("aux", 2)])
    );
    assert_eq!(later, BTreeMap::from([("head slices", 21), ("swa state", 1), ("mamba state", 8), ("dsa state", 13)]));
    assert_eq!(records.len(), 23 + 43);
}
