use std::time::Duration;

use super::*;
use serde_json::json;

fn row(tp: (u32, u32)) -> PrefillRow {
    PrefillRow {
        attn_tp_size: tp.0,
        attn_tp_rank: tp.1,
        attn_cp_size: 1,
        attn_cp_rank: 0,
        attn_dp_size: 1,
        attn_dp_rank: 0,
        pp_size: 1,
        pp_rank: 0,
        system_dp_size: 1,
        system_dp_rank: 0,
        rank_ip: format!("10.0.0.{}", tp.1),
        rank_port: 20_000,
        page_size: 16,
        kv_cache_dtype: "bfloat16".into(),
        kv_layout: None,
        dsv41_spec_layout: None,
        load_balance_method: "follow_bootstrap_room".into(),
        enable_dsa_cache_layer_split: false,
        enable_kv_cache_sharding: false,
        prefill_http_port: None,
        decode_allocation_policy: "early".into(),
        ext: None,
    }
}

const T0: Timestamp = Timestamp::ZERO;

fn table_with(rows: &[PrefillRow]) -> RegistryTable {
    let mut table = RegistryTable::new(TableConfig::default());
    for row in rows {
        table.register(T0, row).unwrap();
    }
    table
}

#[test]
fn readiness_counts_distinct_ranks() {
    let mut table = table_with(&[row((2, 0))]);
    assert_eq!(table.register(T0, &row((2, 0))), Ok(Registered::Same));
    assert_eq!(table.register(T0, &row((2, 0))), Ok(Registered::Same));
    assert_eq!(table.parallel_info(), Err(TableError::NotReady(1)));
    assert_eq!(table.rank_address(0, 0, 0, 0), Err(TableError::NotReady(1)));
    assert_eq!(table.register(T0, &row((2, 1))), Ok(Registered::New));
    assert_eq!(table.parallel_info().map(|i| i.attn_tp_size), Ok(2));
}

#[test]
fn a_restarted_rank_replaces_its_row() {
    let mut table = table_with(&[row((2, 0)), row((2, 1))]);
    let mut again = row((2, 1));
    again.rank_port = 31_000;
    let old = row((2, 1)).address();
    assert_eq!(table.register(T0, &again), Ok(Registered::Replaced { old }));
    assert_eq!(table.rank_address(0, 0, 1, 0).map(|a| a.rank_port), Ok(31_000));
    assert_eq!((table.rows(), table.stats().replaced), (2, 1));
}

#[test]
fn cat_f65_a_duplicate_owner_is_replaced_or_refused_by_policy() {
    let mut stranger = row((2, 1));
    stranger.rank_ip = "10.6.6.6".into();
    let mut restarted = row((2, 1));
    restarted.rank_port = 1;

    let mut open = table_with(&[row((2, 0)), row((2, 1))]);
    let old = row((2, 1)).address();
    assert_eq!(open.register(T0, &stranger), Ok(Registered::Replaced { old }));

    let mut strict =
        RegistryTable::new(TableConfig { owner_policy: OwnerPolicy::RefuseOtherHost, ..TableConfig::default() });
    strict.register(T0, &row((2, 0))).unwrap();
    strict.register(T0, &row((2, 1))).unwrap();
    let key = RankKey { dp: 0, cp: 0, tp: 1, pp: 0 };
    assert_eq!(
        strict.register(T0, &stranger),
        Err(TableError::OtherOwner { key, stored: "10.0.0.1".into(), sent: "10.6.6.6".into() })
    );
    // Nor by way of another configuration.
    stranger.page_size = 32;
    assert!(matches!(strict.register(T0, &stranger), Err(TableError::OtherOwner { .. })));
    assert!(matches!(strict.register(T0, &restarted), Ok(Registered::Replaced { .. })));
}

/// Every field that all ranks share, flipped in turn (R-A4, F72): refused, naming the field and both values.
#[test]
fn cat_f72_an_inconsistent_row_is_refused_by_name() {
    type Flip = fn(&mut PrefillRow);
    let flips: [(&str, &str, &str, Flip); 12] = [
        ("attn_tp_size", "2", "4", |r| r.attn_tp_size = 4),
        ("attn_cp_size", "1", "2", |r| r.attn_cp_size = 2),
        ("dp_size", "1", "2", |r| r.attn_dp_size = 2),
        ("system_dp_size", "1", "2", |r| r.system_dp_size = 2),
        ("pp_size", "1", "2", |r| r.pp_size = 2),
        ("page_size", "16", "32", |r| r.page_size = 32),
        ("kv_cache_dtype", "bfloat16", "fp8_e4m3", |r| r.kv_cache_dtype = "fp8_e4m3".into()),
        ("kv_layout", "v4", "v5", |r| r.kv_layout = Some("v5".into())),
        ("decode_allocation_policy", "early", "prefill_complete", |r| {
            r.decode_allocation_policy = "prefill_complete".into();
        }),
        ("load_balance_method", "follow_bootstrap_room", "round_robin", |r| {
            r.load_balance_method = "round_robin".into();
        }),
        ("enable_dsa_cache_layer_split", "false", "true", |r| r.enable_dsa_cache_layer_split = true),
        ("enable_kv_cache_sharding", "false", "true", |r| r.enable_kv_cache_sharding = true),
    ];
    for (field, stored, sent, flip) in flips {
        let mut first = row((2, 0));
        first.kv_layout = Some("v4".into());
        let mut table = table_with(std::slice::from_ref(&first));
        let mut other = row((2, 1));
        flip(&mut other);
        let error = table.register(T0, &other).unwrap_err();
        let TableError::Inconsistent { field: f, stored: a, sent: b, .. } = &error else { panic!("{field}: {error}") };
        assert_eq!((*f, a.as_str(), b.as_str()), (field, stored, sent));
        assert_eq!(error.status(), 400);
        for part in [field, stored, sent, "tp_rank=1"] {
            assert!(error.to_string().contains(part), "{error}");
        }
        assert_eq!((table.rows(), table.stats().refused), (1, 1));
    }
    let mut other = row((2, 1));
    other.dsv41_spec_layout = Some(json!({"a": 1}));
    let error = table_with(&[row((2, 0))]).register(T0, &other).unwrap_err().to_string();
    assert!(error.starts_with("DeepSeek-V4.1 DSpark PD layout differs across prefill ranks"), "{error}");
}

#[test]
fn null_layout_and_http_port_are_filled_in_by_the_first_that_has_them() {
    let mut second = row((2, 1));
    (second.kv_layout, second.prefill_http_port) = (Some("v4".into()), Some(30_000));
    let table = table_with(&[row((2, 0)), second]);
    let info = table.parallel_info().unwrap();
    assert_eq!((info.kv_layout.as_deref(), info.prefill_http_port), (Some("v4"), Some(30_000)));
}

#[test]
fn a_restarted_server_with_other_sizes_takes_over_when_all_its_ranks_have_asked() {
    let mut table = table_with(&[row((2, 0)), row((2, 1))]);
    table.register_dp_rank(T0, 7, 0).unwrap();
    let new: Vec<_> = (0..4).map(|r| row((4, r))).collect();
    for row in &new[..3] {
        assert!(matches!(table.register(T0, row), Err(TableError::Inconsistent { field: "attn_tp_size", .. })));
        assert_eq!(table.parallel_info().map(|i| i.attn_tp_size), Ok(2), "the old life serves until then");
    }
    assert_eq!(table.register(T0, &new[3]), Ok(Registered::TookOver { dropped_rows: 2 }));
    assert_eq!(table.parallel_info().map(|i| i.attn_tp_size), Ok(4));
    assert_eq!((table.rows(), table.dp_rooms()), (4, 0));
    assert_eq!(table.register(T0, &new[0]), Ok(Registered::Same));
}

/// Negative control: what must *not* take over.
#[test]
fn one_wrong_rank_never_takes_over() {
    let mut wrong = row((2, 1));
    wrong.page_size = 32;
    let mut table = table_with(&[row((2, 0)), row((2, 1))]);
    for attempt in 0..5 {
        assert!(table.register(T0, &wrong).is_err(), "attempt {attempt}");
    }
    // Its sibling made the same mistake, but long before or after.
    let mut sibling = row((2, 0));
    sibling.page_size = 32;
    assert!(table.register(T0 + Duration::from_secs(301), &sibling).is_err());
    // A rank that comes back to the present configuration leaves the successor.
    table.register(T0 + Duration::from_secs(302), &row((2, 0))).unwrap();
    assert!(table.register(T0 + Duration::from_secs(303), &wrong).is_err());
    assert_eq!(table.parallel_info().map(|i| i.page_size), Ok(Some(16)));
}

#[test]
fn a_first_rank_with_a_wrong_argument_does_not_block_the_server_for_ever() {
    let mut wrong = row((2, 0));
    wrong.page_size = 32;
    let mut table = table_with(&[wrong]);
    assert!(table.register(T0, &row((2, 1))).is_err());
    assert_eq!(table.register(T0, &row((2, 0))), Ok(Registered::TookOver { dropped_rows: 1 }));
    assert_eq!(table.parallel_info().map(|i| i.page_size), Ok(Some(16)));
}

#[test]
fn ranks_outside_their_size_and_servers_too_large_are_refused() {
    let mut table = RegistryTable::new(TableConfig { max_rows: 8, ..TableConfig::default() });
    let error = table.register(T0, &row((2, 2))).unwrap_err();
    assert_eq!(
        error,
        TableError::RankOutOfRange { field: "attn_tp_rank", rank: 2, size_field: "attn_tp_size", size: 2 }
    );
    assert_eq!(table.register(T0, &row((9, 0))), Err(TableError::TooManyRanks { ranks: 9, limit: 8 }));
    let mut huge = row((i32::MAX as u32, 0));
    (huge.attn_cp_size, huge.pp_size, huge.attn_dp_size) = (i32::MAX as u32, i32::MAX as u32, i32::MAX as u32);
    assert!(matches!(table.register(T0, &huge), Err(TableError::TooManyRanks { ranks: u64::MAX, .. })));
    let mut long = row((2, 0));
    long.rank_ip = "x".repeat(5000);
    assert!(matches!(table.register(T0, &long), Err(TableError::TextTooLong { field: "rank_ip", bytes: 5000, .. })));
    assert_eq!((table.rows(), table.stats().refused), (0, 4));
}

#[test]
fn dp_ranks_live_for_one_to_two_intervals_and_are_bounded() {
    let at = |s: u64| T0 + Duration::from_secs(s);
    let mut table = RegistryTable::new(TableConfig { max_dp_rooms: 2, ..TableConfig::default() });
    table.register_dp_rank(at(0), 7, 3).unwrap();
    table.register_dp_rank(at(1), 8, 1).unwrap();
    assert_eq!(table.register_dp_rank(at(2), 9, 1), Err(TableError::DpRoomsFull(2)));
    table.register_dp_rank(at(2), 7, 0).unwrap();
    assert_eq!(table.query_dp_ranks(at(3), &[7, 8, 9]), [(7, 0), (8, 1)]);
    // The sweep at 120 s takes neither; the one at 240 s takes both.
    assert_eq!(table.query_dp_ranks(at(120), &[7, 8]), [(7, 0), (8, 1)]);
    assert_eq!(table.query_dp_ranks(at(239), &[7, 8]).len(), 2);
    assert_eq!(table.query_dp_ranks(at(240), &[7, 8]), []);
    table.register_dp_rank(at(241), 9, 1).unwrap();
    assert_eq!((table.dp_rooms(), table.stats().dp_rooms_refused), (1, 1));
}

#[test]
fn rows_are_read_as_python_reads_them() {
    let mut body = serde_json::to_value(row((2, 1))).unwrap();
    body["rank_port"] = json!(" 20001 ");
    body["page_size"] = json!("64");
    body["prefill_http_port"] = json!("31000");
    body["some_later_key"] = json!([1]);
    let read = |v: &serde_json::Value| PrefillRow::from_json(v.to_string().as_bytes());
    let row = read(&body).unwrap();
    assert_eq!((row.rank_port, row.page_size, row.prefill_http_port), (20_001, 64, Some(31_000)));
    for (field, value, invalid) in [
        ("rank_port", json!(0), true),
        ("rank_port", json!(65_536), true),
        ("rank_port", json!(-1), true),
        ("attn_tp_size", json!(0), true),
        ("attn_tp_size", json!(1u64 << 31), true),
        ("attn_tp_rank", json!(-1), true),
        ("page_size", json!(0), true),
        ("rank_ip", json!(""), true),
        ("rank_ip", json!(null), false),
        ("attn_tp_size", json!("two"), false),
        ("kv_cache_dtype", json!(16), false),
        ("kv_layout", json!(4), false),
        ("rank_port", json!("http"), false),
    ] {
        let mut bad = body.clone();
        bad[field] = value;
        let error = read(&bad).unwrap_err();
        assert_eq!(matches!(error, super::super::RowError::Invalid { .. }), invalid, "{error}");
        assert!(error.to_string().contains(field), "{error}");
    }
}
