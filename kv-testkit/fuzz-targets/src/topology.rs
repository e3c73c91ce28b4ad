//! Rank mappings of any sizes: refused by name, or consistent.

use kv_core::topology::*;
use kv_testkit::vectors;

use crate::input::Input;

fn size(input: &mut Input<'_>) -> u32 {
    match input.u8() {
        n @ 0..=239 => u32::from(n % 64),
        _ => input.number32(),
    }
}

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let i = &mut input;
    let prefill = PrefillSizes {
        attn_tp_size: size(i),
        attn_cp_size: size(i),
        dp_size: 1 + size(i) % 8,
        pp_size: size(i),
        enable_dsa_cache_layer_split: i.flag(),
        enable_kv_cache_sharding: i.flag(),
    };
    let decode = DecodeRank {
        attn_tp_size: size(i),
        attn_cp_size: i.pick(&[1, 1, 1, 0, 2]),
        engine_rank: size(i),
        pp_size: size(i),
        pp_rank: size(i),
        is_mla: i.flag(),
        is_hybrid_mla: i.flag(),
        all_cp: i.flag(),
    };
    if let Ok(mapping) = RankMapping::resolve(&prefill, &decode) {
        check(&prefill, &decode, &mapping);
    }
    pages(i);
}

fn check(prefill: &PrefillSizes, decode: &DecodeRank, m: &RankMapping) {
    let connections = m.connections();
    assert!(!connections.is_empty() && connections.len() <= MAX_CONNECTIONS as usize);
    let mut seen = connections.clone();
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen.len(), connections.len(), "a rank is contacted twice: {prefill:?} {decode:?}");
    for c in &connections {
        assert!(c.tp < prefill.attn_tp_size && c.cp < prefill.attn_cp_size && c.pp < prefill.pp_size, "{c:?}");
        let rank = prefill_unique_rank(c.tp, (c.cp, prefill.attn_cp_size), (c.pp, prefill.pp_size));
        assert_eq!(rank, Ok(m.rank_of(c)), "{prefill:?} {c:?}");
    }
    let expected = m.expected_ranks();
    assert!(expected.is_sorted_by(|a, b| a < b));
    assert!(m.required_dst_info_num >= 1 && m.required_prefill_response_num >= 1);
    // Never more answers than ranks that give one: such a room could not end.
    assert!(m.required_prefill_response_num as usize <= expected.len(), "{prefill:?} {decode:?} {m:?}");
    assert_eq!(m.pool_keys("a", 0).len(), m.target_cp_ranks.len());
}

/// Pages split over ranks: every page goes to one rank, and keeps its place.
fn pages(i: &mut Input<'_>) {
    let (start, size) = (u64::from(i.u8()), 1 + u32::from(i.u8()) % 9);
    let total = i.number();
    let pages: Vec<i32> = i.bytes(64).iter().map(|b| i32::from(*b)).collect();
    let (mut cp, mut shard) = (0, 0);
    let mut end = 0;
    for rank in 0..size {
        let bounds = cp_rank_page_bounds(total, rank, size).expect("a rank of its size");
        assert_eq!(bounds.start, end);
        end = bounds.end;
        let part = filter_for_cp_rank(&pages, start, total, rank, size).expect("a rank of its size");
        assert_eq!(part.positions.end - part.positions.start, part.pages.len() as u64);
        cp += part.pages.len();
        let part = filter_for_shard_rank(&pages, start, rank, size).expect("a rank of its size");
        for (page, at) in part.local_pages.iter().zip(&part.positions) {
            assert_eq!(pages[(at - start) as usize], page * size as i32 + rank as i32);
        }
        shard += part.local_pages.len();
    }
    assert_eq!(end, total);
    assert_eq!(shard, pages.len());
    assert!(cp <= pages.len() && (size > 1 || cp == pages.len()));
    let _ = cp_rank_page_bounds(total, i.number32(), i.number32());
}

/// Every recorded mapping.
pub fn seeds() -> Vec<Vec<u8>> {
    let file = vectors::load("rank_mapping");
    let seed = |record: vectors::Record| {
        let (p, d) = (record.object("prefill"), record.object("decode"));
        let n = |r: &vectors::Record, key: &str| r.u64(key).min(63) as u8;
        let b = |r: &vectors::Record, key: &str| u8::from(r.bool(key));
        vec![
            n(&p, "attn_tp_size"),
            n(&p, "attn_cp_size"),
            0,
            n(&p, "pp_size"),
            b(&p, "enable_dsa_cache_layer_split"),
            b(&p, "enable_kv_cache_sharding"),
            n(&d, "attn_tp_size"),
            0,
            n(&d, "engine_rank"),
            n(&d, "pp_size"),
            n(&d, "pp_rank"),
            b(&d, "is_mla_backend"),
            b(&d, "is_hybrid_mla_backend"),
            b(&d, "enable_all_cp_ranks_for_transfer"),
            3,
            2,
            9,
            1,
            2,
            3,
        ]
    };
    file.records().step_by(7).map(seed).collect()
}
