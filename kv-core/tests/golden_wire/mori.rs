//! `zmq_mori.json`. Descriptors are opaque placeholders in the file; only their envelope is real.

use bytes::Bytes;
use kv_core::Endpoint;
use kv_core::wire::{Buffers, Dialect, Metadata, MoriDialect, Registration};
use serde_json::{Map, Value, json};

use super::support::*;

const KEY: &str = "io-decode-dp0-tp1-pid77-10.0.0.7-deadbeef";

fn descriptor(name: String) -> Option<Bytes> {
    Some(Bytes::from(name))
}

fn input_registration(record: &Value) -> Registration {
    let input = &record["input"];
    let mut message = registration(input);
    message.metadata = Bytes::from_static(b"<EngineDesc msgpack bytes>");
    let named = |prefix: &str, count: usize| (0..count).map(|at| descriptor(format!("{prefix}{at}"))).collect();
    message.kv = Buffers::Descriptors(named("kv", message.kv.len()));
    message.aux = Buffers::Descriptors(named("aux", message.aux.len()));
    let lens: Vec<Vec<u64>> = list(&input["kv_args"]["state_data_lens"]);
    for (component, lens) in message.state.iter_mut().zip(lens) {
        // A tensor of no bytes is elided.
        let item = |(at, len): (usize, &u64)| if *len == 0 { None } else { descriptor(format!("st{at}")) };
        component.buffers = Buffers::Descriptors(lens.iter().enumerate().map(item).collect());
    }
    message
}

fn blobs(buffers: &Buffers) -> Value {
    match buffers {
        Buffers::Descriptors(items) => json!(items.iter().map(|item| item.as_deref().map(hex)).collect::<Vec<_>>()),
        Buffers::Addrs(_) => panic!("addresses"),
    }
}

fn registration_view(message: &Registration) -> Map<String, Value> {
    let state = &message.state;
    let view = json!({
        "endpoint": message.endpoint.host(),
        "dst_port": message.endpoint.port(),
        // The key is inside the descriptor, which only the engine reads.
        "engine_desc": {"key": KEY, "packed": hex(&message.metadata)},
        "dst_kv_mem_descs": blobs(&message.kv),
        "dst_aux_mem_descs": blobs(&message.aux),
        "dst_state_mem_descs": state.iter().map(|component| blobs(&component.buffers)).collect::<Vec<_>>(),
        "gpu_id": message.gpu_id,
        "decode_tp_size": message.attn_tp_size,
        "decode_tp_rank": message.engine_rank,
        "dst_kv_item_len": message.kv_item_len,
        "dst_state_item_lens": column(state, |component| &component.item_lens),
        "dst_state_dim_per_tensor": column(state, |component| &component.dims),
        "dst_dcp_size": message.dcp_size,
        "dst_dcp_rank": message.dcp_rank,
        "dst_state_layer_ids": column(state, |component| &component.layer_ids),
        "dst_kv_layer_ids": message.kv_layer_ids,
    });
    view.as_object().unwrap().clone()
}

fn metadata_view(message: &Metadata) -> Map<String, Value> {
    let view = json!({
        "room": message.room,
        "endpoint": message.endpoint.host(),
        "dst_port": message.endpoint.port(),
        "engine_key": message.name,
        "dst_kv_indices": &message.dst_pages[..],
        "dst_aux_index": message.aux_index.map_or(-1, i64::from),
        "dst_state_indices": message.state_indices,
        "required_dst_info_num": message.required_dst_info_num,
        "is_dummy": message.is_dummy,
        "decode_prefix_len": message.decode_prefix_len,
    });
    view.as_object().unwrap().clone()
}

const LOCAL: [&str; 2] = ["requires_dcp_relayout", "dcp_token_item_lens"];

fn check(file: &File, record: &Value) {
    let dialect = MoriDialect;
    match text(&record["message"]) {
        "registration" => {
            let ours = dialect.encode_registration(&input_registration(record)).unwrap();
            assert_frames(&ours, &frames(record));
            assert_eq!(registration_view(&parse_registration(&dialect, &ours)), parsed(record, &LOCAL));
        }
        "registration_parse" => {
            let message = parse_registration(&dialect, &file.truncated("mori", record, 1));
            assert_eq!(registration_view(&message), parsed(record, &LOCAL));
        }
        "metadata" => match text(&record["name"]) {
            // Fault of 0.5.23: a dummy with a prefix hit is read as a real peer, so that prefill reports Success for a
            // rank that decode never asked. Ours reads it as the dummy it is, and sends dummies without the prefix
            // length, so that a 0.5.23 prefill reads them right as well. Nothing else differs.
            "mori_meta_dummy_with_prefix" => {
                assert_eq!(record["input"]["is_dummy"], true);
                assert_eq!(record["parsed"]["is_dummy"], false);
                let recorded = frames(record);
                let mut expected = parsed(record, &[]);
                expected.insert("is_dummy".into(), true.into());
                assert_eq!(metadata_view(&parse_metadata(&dialect, &recorded)), expected);
                let ours = dialect.encode_metadata(&metadata(&record["input"], KEY)).unwrap();
                assert_frames(&ours[..9], &recorded[..9]);
                assert_eq!((&ours[9][..], &recorded[9][..]), (&b""[..], &b"64"[..]));
                assert!(parse_metadata(&dialect, &ours).is_dummy);
            }
            _ => {
                let ours = dialect.encode_metadata(&metadata(&record["input"], KEY)).unwrap();
                assert_frames(&ours, &frames(record));
                assert_eq!(metadata_view(&parse_metadata(&dialect, &ours)), parsed(record, &[]));
            }
        },
        "metadata_parse" => {
            let message = parse_metadata(&dialect, &file.truncated("mori", record, 1));
            assert_eq!(metadata_view(&message), parsed(record, &[]));
        }
        "KV_STATUS" => status(&dialect, record),
        "KV_STATUS_parse" => status_parse(&dialect, record),
        "AUX_DATA" => {
            aux_data(&dialect, record);
            assert_eq!(Endpoint::new("fd00::7", 41234).zmq_uri(), text(&record["endpoint"]));
        }
        other => panic!("nothing checks {other}"),
    }
}

#[test]
fn r_h1_every_mori_record() {
    let file = File::read(include_str!("../../../kv-testkit/vectors/zmq_mori.json"));
    file.each(33, |record| check(&file, record));
}
