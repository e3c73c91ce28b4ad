//! Reading vector files, and what the three dialect files have in common.

use std::sync::Arc;

use bytes::Bytes;
use kv_core::wire::{
    Buffers, ChunkReady, Dialect, KvStatus, Metadata, Registration, StateComponent, ToDecode, ToPrefill, WireErrorKind,
};
use kv_core::{Endpoint, KvPoll, Limits, PrefillRank};
use serde_json::{Map, Value, json};

/// The id of the decode that recorded NIXL's files.
pub const AGENT: &str = "3f2b7c1e-0000-4000-8000-00000000abcd";

pub struct File {
    pub vectors: Vec<Value>,
}

impl File {
    pub fn read(text: &str) -> Self {
        let mut file: Value = serde_json::from_str(text).unwrap();
        let Value::Array(vectors) = file["vectors"].take() else { panic!("no vectors") };
        Self { vectors }
    }

    /// Run `check` over every record; it panics on one that it does not know.
    pub fn each(&self, count: usize, mut check: impl FnMut(&Value)) {
        let mut exercised = 0;
        for (index, record) in self.vectors.iter().enumerate() {
            println!("{index}: {} {}", record["name"], record["fn"]);
            check(record);
            exercised += 1;
        }
        assert_eq!(exercised, self.vectors.len());
        assert_eq!(exercised, count, "the file changed");
    }

    /// The frames of a `..._truncated_to_N_frames...` record: the first N of the basic record of its kind, not counting
    /// a guard.
    pub fn truncated(&self, backend: &str, record: &Value, guard: usize) -> Vec<Bytes> {
        let name = text(&record["name"]);
        let kind = if text(&record["message"]) == "registration_parse" { "reg" } else { "meta" };
        let base = format!("{backend}_{kind}_basic");
        let (_, rest) = name.split_once("_truncated_to_").unwrap();
        let (count, _) = rest.split_once("_frames").unwrap();
        let base = self.vectors.iter().find(|other| other["name"] == base.as_str()).unwrap();
        frames(base)[..count.parse::<usize>().unwrap() + guard].to_vec()
    }
}

pub fn text(value: &Value) -> &str {
    value.as_str().unwrap()
}

pub fn unhex(text: &str) -> Bytes {
    let digit = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).unwrap();
    (0..text.len()).step_by(2).map(digit).collect()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub fn frames(record: &Value) -> Vec<Bytes> {
    record["frames"].as_array().unwrap().iter().map(|frame| unhex(text(frame))).collect()
}

/// Frame by frame, so that a difference names its frame.
#[track_caller]
pub fn assert_frames(ours: &[Bytes], recorded: &[Bytes]) {
    for (at, (ours, recorded)) in ours.iter().zip(recorded).enumerate() {
        assert_eq!(ours, recorded, "frame {at}");
    }
    assert_eq!(ours.len(), recorded.len());
}

pub fn list<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

pub fn u64_of(value: &Value) -> u64 {
    value.as_u64().unwrap()
}

pub fn u32_of(value: &Value) -> u32 {
    u32::try_from(u64_of(value)).unwrap()
}

pub fn endpoint(host: &Value, port: &Value) -> Endpoint {
    Endpoint::new(text(host), u16::try_from(u64_of(port)).unwrap())
}

/// A registration from what `input` says and every dialect has; the caller adds the rest.
pub fn registration(input: &Value) -> Registration {
    let args = &input["kv_args"];
    let kv: Vec<u64> = list(&args["kv_data_ptrs"]);
    let kv_item_lens: Vec<u64> = list(&args["kv_item_lens"]);
    let state_ptrs: Vec<Vec<u64>> = list(&args["state_data_ptrs"]);
    let item_lens: Vec<Vec<u32>> = list(&args["state_item_lens"]);
    let dims: Vec<Vec<u32>> = list(&args["state_dim_per_tensor"]);
    let layer_ids: Vec<Vec<u32>> = list(&args["state_layer_ids"]);
    let component = |(at, ptrs): (usize, Vec<u64>)| StateComponent {
        buffers: Buffers::Addrs(ptrs),
        item_lens: item_lens[at].clone(),
        dims: dims[at].clone(),
        layer_ids: layer_ids[at].clone(),
        region_lens: Vec::new(),
    };
    Registration {
        endpoint: endpoint(&input["local_ip"], &input["rank_port"]),
        name: String::new(),
        metadata: Bytes::new(),
        kv: Buffers::Addrs(kv),
        kv_item_len: kv_item_lens.first().copied().unwrap_or(0),
        kv_item_lens,
        kv_slots: None,
        kv_kinds: Vec::new(),
        kv_layer_ids: list(&args["kv_layer_ids"]),
        aux: Buffers::Addrs(list(&args["aux_data_ptrs"])),
        state: state_ptrs.into_iter().enumerate().map(component).collect(),
        gpu_id: args["gpu_id"].as_i64().unwrap(),
        attn_tp_size: u32_of(&input["attn_tp_size"]),
        engine_rank: u32_of(&args["engine_rank"]),
        dcp_size: u32_of(&input["dcp_size"]),
        dcp_rank: u32_of(&input["dcp_rank"]),
        staging: None,
        staging_layer_ids: Vec::new(),
    }
}

/// A request's metadata; a null state component is an empty list, our type has no other.
pub fn metadata(input: &Value, name: &str) -> Metadata {
    let pages = |value: &Value| list::<Option<Vec<i32>>>(value).map(Arc::from);
    let state: Option<Vec<Option<Vec<i32>>>> = list(&input["state_indices"]);
    Metadata {
        room: u64_of(&input["bootstrap_room"]),
        endpoint: match input.get("local_ip") {
            Some(ip) => endpoint(ip, &input["rank_port"]),
            None => Endpoint::new("10.0.0.7", 41234),
        },
        name: name.into(),
        dst_pages: pages(&input["kv_indices"]).unwrap(),
        aux_index: list(&input["aux_index"]),
        required_dst_info_num: u32_of(&input["required_dst_info_num"]),
        state_indices: state.unwrap_or_default().into_iter().map(Option::unwrap_or_default).collect(),
        decode_prefix_len: list(&input["decode_prefix_len"]),
        is_dummy: list(&input["is_dummy"]),
        device_kv_indices: pages(&input["device_kv_indices"]),
    }
}

/// What SGLang's prefill record says, without its local fields.
pub fn parsed(record: &Value, local: &[&str]) -> Map<String, Value> {
    let mut map = record["parsed"].as_object().unwrap().clone();
    for name in local {
        map.remove(*name).unwrap_or_else(|| panic!("no local field {name}"));
    }
    map
}

pub fn addrs(buffers: &Buffers) -> &[u64] {
    match buffers {
        Buffers::Addrs(addrs) => addrs,
        Buffers::Descriptors(_) => panic!("descriptors"),
    }
}

pub fn column<T: serde::Serialize>(state: &[StateComponent], list: impl Fn(&StateComponent) -> &[T]) -> Value {
    if state.iter().all(|component| list(component).is_empty()) {
        return json!([]);
    }
    json!(state.iter().map(list).collect::<Vec<_>>())
}

pub fn parse_registration(dialect: &dyn Dialect, frames: &[Bytes]) -> Registration {
    match dialect.parse_to_prefill(frames, &Limits::default()).unwrap() {
        ToPrefill::Registration(message) => *message,
        other => panic!("{other:?}"),
    }
}

pub fn parse_metadata(dialect: &dyn Dialect, frames: &[Bytes]) -> Metadata {
    match dialect.parse_to_prefill(frames, &Limits::default()).unwrap() {
        ToPrefill::Metadata(message) => message,
        other => panic!("{other:?}"),
    }
}

#[track_caller]
pub fn refused_by_prefill(dialect: &dyn Dialect, frames: &[Bytes]) -> WireErrorKind {
    dialect.parse_to_prefill(frames, &Limits::default()).unwrap_err().kind
}

#[track_caller]
pub fn refused_by_decode(dialect: &dyn Dialect, frames: &[Bytes]) -> WireErrorKind {
    dialect.parse_to_decode(frames, &Limits::default()).unwrap_err().kind
}

/// A `KV_STATUS` record: what we send, to whom, and what we read.
pub fn status(dialect: &dyn Dialect, record: &Value) {
    let input = &record["input"];
    let message = KvStatus {
        room: u64_of(&input["room"]),
        status: KvPoll::from_wire(input["status"].as_i64().unwrap()).unwrap(),
        prefill_rank: PrefillRank(u32_of(&input["prefill_rank"])),
        reason: list(&input["failure_reason"]),
    };
    assert_frames(&dialect.encode_status(&message).unwrap(), &frames(record));
    let targets: Vec<(String, u16)> = list(&input["targets"]);
    let uris: Vec<String> = targets.iter().map(|(host, port)| Endpoint::new(host, *port).zmq_uri()).collect();
    assert_eq!(json!(uris), record["endpoints"]);
    status_parse(dialect, record);
}

/// A `KV_STATUS_parse` record; null means that the message is dropped.
pub fn status_parse(dialect: &dyn Dialect, record: &Value) {
    match (dialect.parse_to_decode(&frames(record), &Limits::default()), &record["parsed"]) {
        (Err(error), Value::Null) => {
            let expected = match text(&record["name"]).split_once("_status_parse_").unwrap().1 {
                "too_short" => WireErrorKind::TooShort,
                "wrong_tag" => WireErrorKind::UnknownTag,
                // Without a guard in front, what is no number names no message.
                "non_ascii" if dialect.name() == "mooncake" => WireErrorKind::UnknownTag,
                "non_ascii" => WireErrorKind::BadInteger,
                other => panic!("{other}"),
            };
            assert_eq!(error.kind, expected, "{error}");
        }
        (Ok(ToDecode::Status(status)), parsed) => {
            assert_eq!(json!([status.room, status.status as u8, status.prefill_rank.0, status.reason]), *parsed);
        }
        other => panic!("{other:?}"),
    }
}

pub fn chunk_ready(dialect: &dyn Dialect, record: &Value) {
    let input = &record["input"];
    let message = ChunkReady {
        room: u64_of(&input["room"]),
        chunk_idx: u32_of(&input["chunk_idx"]),
        page_start: u32_of(&input["page_start"]),
        num_pages: u32_of(&input["num_pages"]),
        writer_id: text(&input["writer_id"]).into(),
        prefill_rank: Some(PrefillRank(u32_of(&input["prefill_rank"]))),
    };
    assert_frames(&dialect.encode_chunk_ready(&message).unwrap(), &frames(record));
    let read = dialect.parse_to_decode(&frames(record), &Limits::default()).unwrap();
    assert_eq!(read, ToDecode::ChunkReady(message.clone()));
    // Decode needs six frames only (protocol 6.4).
    let read = dialect.parse_to_decode(&frames(record)[..6], &Limits::default()).unwrap();
    assert_eq!(read, ToDecode::ChunkReady(ChunkReady { prefill_rank: None, ..message }));
    assert_eq!(refused_by_decode(dialect, &frames(record)[..5]), WireErrorKind::TooShort);
}

pub fn aux_data(dialect: &dyn Dialect, record: &Value) {
    let input = &record["input"];
    let message = kv_core::wire::AuxData {
        room: u64_of(&input["room"]),
        buffer_index: u32_of(&input["buffer_index"]),
        aux_index: u32_of(&input["aux_index"]),
        data: unhex(text(&input["data"])),
    };
    assert_frames(&dialect.encode_aux_data(&message).unwrap(), &frames(record));
    let read = dialect.parse_to_decode(&frames(record), &Limits::default()).unwrap();
    assert_eq!(read, ToDecode::AuxData(message));
}
