//! What holds for every message and for no message at all: round trips, random frames, bounds (R-H1, R-H2).

// Helpers outside `#[test]` functions may panic as well: they are part of the tests.
#![allow(clippy::unwrap_used)]

#[path = "wire/properties.rs"]
mod properties;
#[path = "wire/robustness.rs"]
mod robustness;

use bytes::Bytes;
use kv_core::control::Multipart;
use kv_core::memory::MemoryKind;
use kv_core::wire::*;
use kv_core::{Endpoint, KvPoll, Limits, PrefillRank};

static TCP: NixlDialect = NixlDialect::with_guard("KvTcpMsgGuard");

fn dialects() -> [&'static dyn Dialect; 4] {
    [built_in("nixl").unwrap(), built_in("mooncake").unwrap(), built_in("mori").unwrap(), &TCP]
}

fn to_prefill(dialect: &dyn Dialect, frames: &[Bytes]) -> ToPrefill {
    dialect.parse_to_prefill(frames, &Limits::default()).unwrap()
}

fn to_decode(dialect: &dyn Dialect, frames: &[Bytes]) -> ToDecode {
    dialect.parse_to_decode(frames, &Limits::default()).unwrap()
}

fn request() -> Metadata {
    Metadata {
        room: 42,
        endpoint: Endpoint::new("10.0.0.7", 41234),
        name: "decode-1".into(),
        dst_pages: [5, 6, 7, 9].into(),
        aux_index: Some(11),
        required_dst_info_num: 1,
        state_indices: vec![],
        decode_prefix_len: Some(64),
        is_dummy: false,
        device_kv_indices: None,
    }
}

fn status() -> KvStatus {
    KvStatus { room: 42, status: KvPoll::Success, prefill_rank: PrefillRank(3), reason: None }
}

fn message(frames: &[&'static [u8]]) -> Multipart {
    frames.iter().map(|frame| Bytes::from_static(frame)).collect()
}

fn minimal_registration(dialect: &str) -> Registration {
    let mori = dialect == "mori";
    let buffers = |addr| match mori {
        true => Buffers::Descriptors(vec![Some(Bytes::from_static(b"descriptor"))]),
        false => Buffers::Addrs(vec![addr]),
    };
    Registration {
        endpoint: Endpoint::new("10.0.0.7", 41234),
        name: "decode-1".into(),
        metadata: Bytes::from_static(b"blob"),
        kv: buffers(0x7f10_0000_0000),
        kv_item_lens: vec![4096],
        kv_item_len: 4096,
        kv_slots: Some(16),
        kv_kinds: vec![MemoryKind::Vram { device: 3 }],
        kv_layer_ids: vec![0],
        aux: buffers(0x5500_0000_1000),
        state: vec![StateComponent {
            buffers: buffers(0x7f30_0000_0000),
            item_lens: vec![100],
            dims: vec![8],
            layer_ids: vec![1],
            region_lens: vec![1000],
        }],
        gpu_id: 3,
        attn_tp_size: 1,
        engine_rank: 0,
        dcp_size: 1,
        dcp_rank: 0,
        staging: None,
        staging_layer_ids: vec![],
    }
}
