//! Who learns of whom, and who gets which bytes.

use std::sync::Arc;

use kv_core::bootstrap::types::{FOLLOW_BOOTSTRAP_ROOM, POLICY_EARLY, PrefillRow, RankAddress};
use kv_core::control::Multipart;
use kv_core::ids::ProcessGeneration;
use kv_core::wire::ExtPeer;
use kv_testkit::directory::Answer;

use super::*;

/// A room that succeeds, one that prefill fails, one that decode aborts: every frame of it.
fn conversation(spec: WorldSpec, sglangs_registry: bool) -> Vec<Multipart> {
    let mut w = World::new(spec);
    if sglangs_registry {
        let shape = w.spec.shape.clone();
        w.d[0].directory.answer(&shape.bootstrap_addr, Answer::Peers(Arc::new(shape.peers())));
    }
    let spy = Spy::on(&w);
    for (room, end_it) in [(7, 0), (8, 1), (9, 2)] {
        let (s, r) = w.open(room, &[4]);
        match end_it {
            0 => w.send(0, &s[0], &[0], 0, true),
            1 => w.abort_p(0, &s[0]),
            _ => w.abort_d(0, &r[0]),
        }
        w.run();
        assert_eq!((polls(&s), polls(&r)), if end_it == 0 { (vec![4], vec![4]) } else { (vec![0], vec![0]) });
        assert!(r[0].releasable());
        end(&mut w, &s, &r);
    }
    let frames = spy.all().into_iter().map(|f| {
        let registration = is_registration(&f);
        let mut frames = f.frames;
        if registration {
            // Where memory happens to be.
            frames[5..8].fill(Default::default());
        }
        frames
    });
    frames.collect()
}

#[test]
fn r_h1_a_peer_without_the_extension_gets_the_bytes_of_0_5_23() {
    let spec = |prefill_ext, decode_ext| WorldSpec { prefill_ext, decode_ext, ..WorldSpec::default() };
    let plain = conversation(spec(false, false), false);
    assert!(plain.iter().all(|frames| extension(frames).is_none()));
    assert_eq!(conversation(spec(true, false), false), plain, "decode is of 0.5.23");
    assert_eq!(conversation(spec(false, true), false), plain, "prefill is of 0.5.23");
    assert_eq!(conversation(spec(true, true), true), plain, "both are ours, and the registry is not");
}

#[test]
fn r_h4_between_two_of_ours_every_message_carries_it_and_says_the_same_otherwise() {
    let plain = conversation(WorldSpec { prefill_ext: false, ..WorldSpec::default() }, false);
    let ours = conversation(WorldSpec::default(), false);
    assert_eq!(ours.len(), plain.len());
    for (ours, plain) in ours.iter().zip(&plain) {
        let ext = extension(ours).expect("an extension");
        assert_eq!(ours[..plain.len()], plain[..]);
        assert!(ours[plain.len()..ours.len() - 1].iter().all(|pad| pad.is_empty()));
        assert!(ext.to.is_some_and(|to| to != ext.from.process), "{ext:?}");
        let registration = plain.get(1).is_some_and(|f| f == "None");
        assert_eq!(ext.room_generation.is_some(), !registration, "{ext:?}");
    }
}

#[test]
fn r_h2_an_extension_that_cannot_be_read_drops_its_message() {
    let mut w = world();
    let spy = Spy::on(&w);
    let (s, r) = w.open(7, &[4]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    let mut bad = spy.last(is_status).frames;
    let last = bad.len() - 1;
    bad[last] = bad[last].slice(..20);
    w.net.inject(&w.d[0].endpoint, bad.clone());
    bad[0] = "KvTcpMsgGuard".into();
    w.run();
    assert_eq!(w.d[0].stats.messages_malformed.get(), 1);
    end(&mut w, &s, &r);
}

fn row(ext: Option<ExtPeer>) -> PrefillRow {
    PrefillRow {
        attn_tp_size: 1,
        attn_tp_rank: 0,
        attn_cp_size: 1,
        attn_cp_rank: 0,
        attn_dp_size: 1,
        attn_dp_rank: 0,
        pp_size: 1,
        pp_rank: 0,
        system_dp_size: 1,
        system_dp_rank: 0,
        rank_ip: "10.0.0.1".into(),
        rank_port: 9000,
        page_size: 16,
        kv_cache_dtype: "auto".into(),
        kv_layout: None,
        dsv41_spec_layout: None,
        load_balance_method: FOLLOW_BOOTSTRAP_ROOM.into(),
        enable_dsa_cache_layer_split: false,
        enable_kv_cache_sharding: false,
        prefill_http_port: None,
        decode_allocation_policy: POLICY_EARLY.into(),
        ext,
    }
}

#[test]
fn r_h4_a_row_says_it_and_the_per_rank_answer_repeats_it() {
    let us = Some(ExtPeer::new(ProcessGeneration(0xab)));
    let json = serde_json::to_vec(&row(us)).unwrap();
    let read = PrefillRow::from_json(&json).unwrap();
    assert_eq!(read, row(us));
    let answer = serde_json::to_vec(&read.address()).unwrap();
    assert_eq!(RankAddress::from_json(&answer).unwrap().ext, us);
    let value: serde_json::Value = serde_json::from_slice(&answer).unwrap();
    assert_eq!(value["kv_ext"], "1:7:000000000000000000000000000000ab");
    // Never in the answer for the whole server: 0.5.23 refuses an answer with a key it does not know.
    let info = serde_json::to_string(&kv_core::bootstrap::types::ParallelInfo::of(&read)).unwrap();
    assert!(!info.contains("kv_ext"));
    // Without it the row is 0.5.23's, key by key.
    let plain = serde_json::to_string(&row(None)).unwrap();
    assert!(!plain.contains("kv_ext"));
    assert!(!serde_json::to_string(&row(None).address()).unwrap().contains("kv_ext"));
    // What cannot be read is not ours, and no reason to refuse the rank.
    for bad in ["\"1:2\"", "7", "null", "{}"] {
        let json = plain.replacen('{', &format!("{{\"kv_ext\":{bad},"), 1);
        assert_eq!(PrefillRow::from_json(json.as_bytes()).unwrap(), row(None), "{bad}");
    }
}
