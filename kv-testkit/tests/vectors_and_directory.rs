//! The loader on real files, and the fake directory's shapes against them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::Duration;

use kv_core::directory::{Directory as _, DirectoryEvent, DirectoryRequest};
use kv_core::ids::Room;
use kv_testkit::directory::{Answer, Shape};
use kv_testkit::{FakeDirectory, ManualClock, vectors};

#[test]
fn r_g1_shapes_agree_with_the_golden_rank_mapping() {
    let file = vectors::load("rank_mapping");
    assert_eq!(file.len(), 280);
    let mut checked = 0;
    for r in file.records().filter(|r| !r.has("assertion")) {
        let (p, d) = (r.object("prefill"), r.object("decode"));
        let n = |o: &vectors::Record, key: &str| u32::try_from(o.u64(key)).unwrap();
        // What the builder does not model: sharding, layer split, and hybrid MLA (which forces all CP ranks).
        let (pt, dt) = (n(&p, "attn_tp_size"), n(&d, "attn_tp_size"));
        let modelled = !p.bool("enable_dsa_cache_layer_split") && !p.bool("enable_kv_cache_sharding");
        if !modelled || (pt % dt != 0 && dt % pt != 0) {
            continue;
        }
        let shape = Shape {
            prefill_tp: pt,
            prefill_cp: n(&p, "attn_cp_size"),
            prefill_pp: n(&p, "pp_size"),
            decode_tp: dt,
            decode_rank: n(&d, "engine_rank"),
            decode_pp: n(&d, "pp_size"),
            decode_pp_rank: n(&d, "pp_rank"),
            mla: d.bool("is_mla_backend"),
            all_cp: d.bool("enable_all_cp_ranks_for_transfer") || d.bool("is_hybrid_mla_backend"),
            ..Shape::default()
        };
        let peers = shape.peers();
        assert_eq!(peers.required_dst_info_num, n(&r, "required_dst_info_num"), "{r}");
        assert_eq!(peers.required_prefill_response_num, n(&r, "required_prefill_response_num"), "{r}");
        let got: Vec<_> = peers.records.iter().map(|c| (c.cp_rank, c.tp_rank, c.pp_rank, c.is_dummy)).collect();
        let number = |c: &serde_json::Value, k: &str| u32::try_from(c[k].as_u64().unwrap()).unwrap();
        let row = |c| (number(c, "cp"), number(c, "tp"), number(c, "pp"), c["is_dummy"].as_bool().unwrap());
        assert_eq!(got, r.list("connections_in_order").iter().map(row).collect::<Vec<_>>(), "{r}");
        assert!(r.list("connection_pool_keys").iter().any(|k| *k == peers.pool_key), "{r}: {}", peers.pool_key);
        checked += 1;
    }
    assert!(checked > 200, "only {checked} records were in the builder's reach");
    file.assert_all_used(280);
}

#[test]
fn prefill_rank_numbers_agree_with_the_golden_ones() {
    let file = vectors::load("prefill_unique_rank");
    for r in file.records() {
        let pair = |k| (r.u64s(k)[0] as u32, r.u64s(k)[1] as u32);
        let ((tp, prefill_tp), (cp, prefill_cp), (pp, prefill_pp)) = (pair("tp"), pair("cp"), pair("pp"));
        let shape = Shape { prefill_tp, prefill_cp, prefill_pp, ..Shape::default() };
        assert_eq!(u64::from(shape.prefill_rank(tp, cp, pp).0), r.u64("unique_rank"), "{r}");
    }
    file.assert_all_used(26);
}

#[test]
#[should_panic(expected = "no_such_file.json")]
fn a_missing_file_fails() {
    let _ = vectors::load("no_such_file");
}

fn ask(token: u64) -> DirectoryRequest {
    let room = Room::new(7).unwrap();
    DirectoryRequest::Peers { token, room, bootstrap_addr: "p:8998".into(), prefill_dp_rank: None }
}

#[test]
fn answers_come_in_time_and_generations_change() {
    let clock = ManualClock::new();
    let dir = FakeDirectory::new(&clock);
    let mut engine_side = dir.clone();
    engine_side.request(ask(1));
    assert!(matches!(&dir.take_events()[..], [DirectoryEvent::Peers { token: 1, result: Err(_) }]));

    dir.serve(&Shape::tp(4, 2, 1));
    let generation = |event: &DirectoryEvent| match event {
        DirectoryEvent::Peers { result: Ok(p), .. } => p.generation,
        other => panic!("{other:?}"),
    };
    engine_side.request(ask(2));
    engine_side.request(ask(3));
    let events = dir.take_events();
    assert_eq!((generation(&events[0]), generation(&events[1]), dir.fetches()), (1, 1, 1));

    engine_side.request(DirectoryRequest::Forget { pool_key: "p:8998_0_0_2".into() });
    engine_side.request(ask(4));
    assert_eq!(generation(&dir.take_events()[0]), 2);

    dir.node_lost("p:8998");
    assert!(matches!(&dir.take_events()[..], [DirectoryEvent::NodeLost { .. }]));
    dir.answer_after("p:8998", Duration::from_secs(1), Answer::Refused("down".into()));
    engine_side.request(ask(5));
    assert_eq!(dir.take_events(), []);
    assert_eq!(dir.next_due(), Some(clock.now() + Duration::from_secs(1)));
    clock.advance(Duration::from_secs(1));
    assert_eq!(dir.take_events(), [DirectoryEvent::Peers { token: 5, result: Err("down".into()) }]);
    dir.answer("p:8998", Answer::Never);
    engine_side.request(ask(6));
    assert_eq!((dir.next_due(), dir.requests().len()), (None, 7));
}
