//! `zmq_nixl.json`.

use kv_core::memory::MemoryKind;
use kv_core::wire::{Dialect, Metadata, NixlDialect, Registration, StagingBase, WireErrorKind};
use serde_json::{Map, Value, json};

use super::support::*;

const LOCAL: [&str; 5] = [
    "requires_dcp_relayout",
    "dcp_token_item_lens",
    "dcp_dst_region_indices",
    "dst_homogeneous_mem_kind",
    "kv_xfer_segments",
];

fn input_registration(record: &Value) -> Registration {
    let input = &record["input"];
    let args = &input["kv_args"];
    let mut message = registration(input);
    let lens: Vec<u64> = list(&args["kv_data_lens"]);
    message.kv_slots = Some(lens.iter().zip(&message.kv_item_lens).map(|(len, item)| len / item).min().unwrap_or(0));
    let device = u32::try_from(message.gpu_id).unwrap();
    let kinds: Vec<String> = list(&input["kv_data_mem_kinds"]);
    message.kv_kinds =
        kinds.iter().map(|kind| if kind == "VRAM" { MemoryKind::Vram { device } } else { MemoryKind::Dram }).collect();
    let region_lens: Vec<Vec<u64>> = list(&args["state_data_lens"]);
    for (component, lens) in message.state.iter_mut().zip(region_lens) {
        component.region_lens = lens;
    }
    message.name = text(&input["agent_name"]).into();
    message.metadata = unhex(text(&input["agent_metadata"]));
    if record["name"] == "nixl_reg_staging" {
        message.staging = Some(StagingBase { addr: 0x7f90_0000_0000, len: 4_294_967_296 });
    }
    message
}

fn registration_view(message: &Registration) -> Map<String, Value> {
    let kind = |kind: &MemoryKind| match kind {
        MemoryKind::Dram => "DRAM",
        MemoryKind::Vram { device } => {
            assert_eq!(i64::from(*device), message.gpu_id);
            "VRAM"
        }
    };
    let kinds: Vec<&str> = match message.kv_kinds[..] {
        [] => vec!["VRAM"; message.kv.len()],
        ref kinds => kinds.iter().map(kind).collect(),
    };
    let state = &message.state;
    let view = json!({
        "room": "None",
        "endpoint": message.endpoint.host(),
        "dst_port": message.endpoint.port(),
        "agent_name": message.name,
        "agent_metadata": {"hex": hex(&message.metadata)},
        "dst_kv_ptrs": addrs(&message.kv),
        "dst_kv_mem_kinds": kinds,
        "dst_aux_ptrs": addrs(&message.aux),
        "dst_state_data_ptrs": column(state, |component| addrs(&component.buffers)),
        "gpu_id": message.gpu_id,
        "decode_tp_size": message.attn_tp_size,
        "decode_tp_rank": message.engine_rank,
        "dst_kv_item_len": message.kv_item_len,
        "dst_kv_item_lens": message.kv_item_lens,
        "dst_kv_layer_ids": message.kv_layer_ids,
        "dst_dcp_size": message.dcp_size,
        "dst_dcp_rank": message.dcp_rank,
        "dst_num_slots": message.kv_slots,
        "dst_state_item_lens": column(state, |component| &component.item_lens),
        "dst_state_dim_per_tensor": column(state, |component| &component.dims),
        "dst_state_layer_ids": column(state, |component| &component.layer_ids),
        "dst_state_data_lens": column(state, |component| &component.region_lens),
        "staging_base_ptr": message.staging.map_or(0, |ring| ring.addr),
        "staging_total_size": message.staging.map_or(0, |ring| ring.len),
    });
    view.as_object().unwrap().clone()
}

fn metadata_view(message: &Metadata) -> Map<String, Value> {
    let view = json!({
        "room": message.room,
        "endpoint": message.endpoint.host(),
        "dst_port": message.endpoint.port(),
        "agent_name": message.name,
        "dst_kv_indices": &message.dst_pages[..],
        "dst_aux_index": message.aux_index,
        "required_dst_info_num": message.required_dst_info_num,
        "dst_state_indices": message.state_indices,
        "decode_prefix_len": message.decode_prefix_len,
        "is_dummy": message.is_dummy,
    });
    view.as_object().unwrap().clone()
}

fn check(file: &File, record: &Value) {
    let dialect = NixlDialect::new();
    match text(&record["message"]) {
        "registration" => {
            let ours = dialect.encode_registration(&input_registration(record)).unwrap();
            assert_frames(&ours, &frames(record));
            assert_eq!(registration_view(&parse_registration(&dialect, &ours)), parsed(record, &LOCAL));
            // The embedded TCP transport differs by the guard alone.
            let tcp = NixlDialect::with_guard("KvTcpMsgGuard");
            let theirs = tcp.encode_registration(&input_registration(record)).unwrap();
            assert_eq!(theirs[0], "KvTcpMsgGuard");
            assert_frames(&theirs[1..], &frames(record)[1..]);
            assert_eq!(parse_registration(&tcp, &theirs), parse_registration(&dialect, &ours));
            assert_eq!(refused_by_prefill(&dialect, &theirs), WireErrorKind::UnknownTag);
        }
        "registration_parse" => {
            let frames = file.truncated("nixl", record, 1);
            if record["parsed"]["error"].is_string() {
                assert_eq!(frames.len(), 12);
                assert_eq!(refused_by_prefill(&dialect, &frames), WireErrorKind::TooShort);
            } else {
                let message = parse_registration(&dialect, &frames);
                assert_eq!(registration_view(&message), parsed(record, &LOCAL));
            }
        }
        "metadata" => match text(&record["name"]) {
            // Fault of 0.5.23: decode without a metadata slot sends `None`, which stops prefill's thread. Ours does not
            // send it, and drops it as a bad integer when it comes.
            "nixl_meta_aux_none" => {
                assert!(record["parse_error"].is_string());
                let message = metadata(&record["input"], AGENT);
                assert_eq!(dialect.encode_metadata(&message).unwrap_err().kind, WireErrorKind::Unsupported);
                assert_eq!(refused_by_prefill(&dialect, &frames(record)), WireErrorKind::BadInteger);
            }
            // Fault of 0.5.23: an array of 64-bit indices is sent as it is and read as twice as many. Our indices are
            // i32, so 8 bytes go out for two pages. What arrives bears no mark of its width, so it reads the same here.
            "nixl_meta_int64_indices" => {
                let message = metadata(&record["input"], AGENT);
                let ours = dialect.encode_metadata(&message).unwrap();
                let recorded = frames(record);
                assert_ne!(ours[5], recorded[5]);
                assert_eq!(hex(&ours[5]), "0100000002000000");
                assert_frames(&ours[..5], &recorded[..5]);
                assert_frames(&ours[6..], &recorded[6..]);
                assert_eq!(parse_metadata(&dialect, &ours).dst_pages[..], [1, 2]);
                assert_eq!(metadata_view(&parse_metadata(&dialect, &recorded)), parsed(record, &["staging"]));
            }
            _ => {
                let ours = dialect.encode_metadata(&metadata(&record["input"], AGENT)).unwrap();
                assert_frames(&ours, &frames(record));
                assert_eq!(metadata_view(&parse_metadata(&dialect, &ours)), parsed(record, &["staging"]));
            }
        },
        "metadata_parse" => {
            let message = parse_metadata(&dialect, &file.truncated("nixl", record, 1));
            assert_eq!(metadata_view(&message), parsed(record, &["staging"]));
        }
        "KV_STATUS" => status(&dialect, record),
        "KV_STATUS_parse" => status_parse(&dialect, record),
        "CHUNK_READY" => chunk_ready(&dialect, record),
        other => panic!("nothing checks {other}"),
    }
}

#[test]
fn r_h1_every_nixl_record() {
    let file = File::read(include_str!("../../../kv-testkit/vectors/zmq_nixl.json"));
    file.each(46, |record| check(&file, record));
}
