//! Round trips of generated messages, and random frames.

use std::sync::Arc;

use bytes::Bytes;
use kv_core::memory::MemoryKind;
use kv_core::wire::*;
use kv_core::{Endpoint, KvPoll, Limits, PrefillRank};
use proptest::prelude::*;
use proptest::{collection, option, sample};

use super::{dialects, minimal_registration, status, to_decode, to_prefill};

// ---------------------------------------------------------------- every message comes back

fn id() -> impl Strategy<Value = String> {
    "[ -~]{1,40}"
}

fn endpoint() -> impl Strategy<Value = Endpoint> {
    let hosts = vec!["10.0.0.7", "fd00::7", "fe80::1%eth0", "my-host.example", "h_1"];
    (sample::select(hosts), 1..=u16::MAX).prop_map(|(host, port)| Endpoint::new(host, port))
}

fn indices(max: usize) -> impl Strategy<Value = Vec<i32>> {
    collection::vec(0..=i32::MAX, 0..max)
}

fn blob() -> impl Strategy<Value = Bytes> {
    collection::vec(any::<u8>(), 0..300).prop_map(Bytes::from)
}

fn kv_entries() -> impl Strategy<Value = (Vec<u64>, Vec<Bytes>, bool, bool, bool)> {
    (collection::vec(any::<u64>(), 0..20), collection::vec(blob(), 20), any::<bool>(), any::<bool>(), any::<bool>())
}

/// Tensors (addresses, descriptors or elided), what is known of each, dims and layer ids.
type State = (Vec<(u64, Option<Bytes>, u32, u64)>, bool, Vec<u32>, Vec<u32>);

fn state() -> impl Strategy<Value = Vec<State>> {
    let tensor = (any::<u64>(), option::of(blob()), any::<u32>(), any::<u64>());
    let ids = || collection::vec(any::<u32>(), 0..4);
    collection::vec((collection::vec(tensor, 0..4), any::<bool>(), ids(), ids()), 0..4)
}

fn registration(dialect: &'static str) -> impl Strategy<Value = Registration> {
    let (nixl, mooncake, mori) = (dialect == "nixl" || dialect == "tcp", dialect == "mooncake", dialect == "mori");
    let geometry = (0..1000u32, 1..1000u32, any::<u32>(), 1..9u32, 0..9u32);
    let staging = option::of((1..u64::MAX / 2, 1..u64::MAX / 2));
    let rest = (endpoint(), id(), blob(), geometry, staging, option::of(any::<u64>()));
    let lists = (kv_entries(), collection::vec(any::<u64>(), 0..9), state(), collection::vec(any::<u64>(), 0..9));
    (rest, lists).prop_map(move |(rest, lists)| {
        let (endpoint, name, metadata, (gpu, attn_tp_size, engine_rank, dcp_size, dcp_rank), staging, kv_slots) = rest;
        let ((kv, blobs, with_lens, with_kinds, with_ids), aux, state, staging_layer_ids) = lists;
        let some = |blobs: &[Bytes], count| blobs.iter().take(count).cloned().map(Some).collect();
        let buffers = |addrs: &[u64]| match mori {
            true => Buffers::Descriptors(some(&blobs, addrs.len())),
            false => Buffers::Addrs(addrs.to_vec()),
        };
        let kind =
            |addr: &u64| if addr.is_multiple_of(2) { MemoryKind::Dram } else { MemoryKind::Vram { device: gpu } };
        let kv_item_len = kv.first().map_or(0, |addr| addr >> 3);
        let with_regions = nixl && with_kinds;
        let component = |(tensors, known, dims, layer_ids): State| StateComponent {
            buffers: match mori {
                true => Buffers::Descriptors(tensors.iter().map(|tensor| tensor.1.clone()).collect()),
                false => Buffers::Addrs(tensors.iter().map(|tensor| tensor.0).collect()),
            },
            item_lens: tensors.iter().filter(|_| known).map(|tensor| tensor.2).collect(),
            dims,
            layer_ids,
            region_lens: tensors.iter().filter(|_| with_regions).map(|tensor| tensor.3).collect(),
        };
        Registration {
            endpoint,
            name: if mori { String::new() } else { name },
            metadata: if mooncake { Bytes::new() } else { metadata },
            kv: buffers(&kv),
            // NIXL's decode always says; the reader fills in what an older one did not.
            kv_item_lens: kv.iter().filter(|_| nixl || (mooncake && with_lens)).map(|addr| addr >> 3).collect(),
            kv_item_len,
            kv_slots: kv_slots.filter(|_| nixl),
            kv_kinds: kv.iter().filter(|_| nixl && with_kinds).map(kind).collect(),
            kv_layer_ids: kv.iter().filter(|_| with_ids).map(|addr| *addr as u32).collect(),
            aux: buffers(&aux),
            state: state.into_iter().map(component).collect(),
            gpu_id: if mooncake { 0 } else { gpu.into() },
            attn_tp_size,
            engine_rank,
            dcp_size,
            dcp_rank: dcp_rank % dcp_size,
            staging: staging.filter(|_| !mori).map(|(addr, len)| StagingBase { addr, len }),
            staging_layer_ids: if mooncake { staging_layer_ids } else { Vec::new() },
        }
    })
}

prop_compose! {
    fn metadata()(
        room in any::<u64>(), endpoint in endpoint(), name in id(), pages in indices(50), aux in option::of(any::<u32>()),
        required in 1..=256u32, state_indices in collection::vec(indices(5), 0..4),
        prefix in option::of(any::<u64>()), is_dummy in any::<bool>(), device in option::of(indices(5)),
    ) -> Metadata {
        Metadata {
            room, endpoint, name, dst_pages: pages.into(), aux_index: aux, required_dst_info_num: required, state_indices,
            decode_prefix_len: prefix, is_dummy, device_kv_indices: device.map(Arc::from),
        }
    }
}

/// What is left of a metadata message after a trip through this dialect; `None` when it must be refused.
fn carried(dialect: &str, mut message: Metadata) -> Option<Metadata> {
    if message.is_dummy {
        message.dst_pages = Arc::default();
        message.state_indices.clear();
        message.device_kv_indices = None;
    }
    message.device_kv_indices = message.device_kv_indices.filter(|pages| dialect == "mooncake" && !pages.is_empty());
    match dialect {
        "mori" => {
            if message.is_dummy {
                message.aux_index = None;
                message.decode_prefix_len = None;
            } else if message.aux_index.is_none() && message.dst_pages.is_empty() {
                return None;
            }
            message.decode_prefix_len = message.decode_prefix_len.filter(|len| *len > 0);
        }
        _ => {
            if dialect == "mooncake" && message.is_dummy {
                message.aux_index = None;
            } else if message.aux_index.is_none() {
                return None;
            }
            message.decode_prefix_len = Some(message.decode_prefix_len.unwrap_or(0));
        }
    }
    Some(message)
}

const COUNT: std::ops::Range<u32> = 0..1 << 20;

prop_compose! {
    fn kv_status()(
        room in any::<u64>(), status in 0..=4i64, rank in any::<u32>(), reason in option::of(".{1,40}"),
    ) -> KvStatus {
        KvStatus { room, status: KvPoll::from_wire(status).unwrap(), prefill_rank: PrefillRank(rank), reason }
    }
}

proptest! {
    #[test]
    fn r_h1_registrations_come_back(
        nixl in registration("nixl"), mooncake in registration("mooncake"), mori in registration("mori"),
    ) {
        for (dialect, message) in dialects().into_iter().zip([&nixl, &mooncake, &mori, &nixl]) {
            let frames = dialect.encode_registration(message).unwrap();
            prop_assert_eq!(to_prefill(dialect, &frames), ToPrefill::Registration(Box::new(message.clone())));
        }
    }

    #[test]
    fn r_h1_metadata_comes_back_or_is_refused(message in metadata()) {
        for dialect in dialects() {
            match (carried(dialect.name(), message.clone()), dialect.encode_metadata(&message)) {
                (Some(message), Ok(frames)) => {
                    prop_assert_eq!(to_prefill(dialect, &frames), ToPrefill::Metadata(message));
                }
                (None, Err(error)) => prop_assert_eq!(error.kind, WireErrorKind::Unsupported),
                (expected, got) => prop_assert!(false, "{}: {expected:?} {got:?}", dialect.name()),
            }
        }
    }

    #[test]
    fn r_h1_statuses_come_back(message in kv_status()) {
        for dialect in dialects() {
            let frames = dialect.encode_status(&message).unwrap();
            let reason = message.reason.clone().filter(|_| dialect.name() != "mooncake");
            prop_assert_eq!(to_decode(dialect, &frames), ToDecode::Status(KvStatus { reason, ..message.clone() }));
        }
    }

    #[test]
    fn r_h1_staging_messages_come_back(
        room in any::<u64>(), chunk_idx in COUNT, page_start in COUNT, num_pages in COUNT, id in id(),
        rank in option::of(any::<u32>()), ring in (-2..1000i64, any::<i64>(), 1000..i64::MAX),
    ) {
        let writer = rank.map(PrefillRank);
        let ready = ChunkReady { room, chunk_idx, page_start, num_pages, writer_id: id.clone(), prefill_rank: writer };
        let req = StagingReq { room, chunk_idx, num_pages, session_id: id.clone(), requester_pp_rank: rank };
        let (offset, round, end) = ring;
        let rsp = StagingRsp { room, chunk_idx, offset, round, end, session_id: id.clone() };
        let mark = Watermark { round, tail: end, session_id: if rank.is_some() { id } else { String::new() } };
        for dialect in dialects() {
            let encoded = (
                dialect.encode_chunk_ready(&ready), dialect.encode_staging_req(&req),
                dialect.encode_staging_rsp(&rsp), dialect.encode_watermark(&mark),
            );
            if dialect.name() == "mori" {
                let kinds = [encoded.0, encoded.1, encoded.2, encoded.3].map(|refused| refused.unwrap_err().kind);
                prop_assert_eq!(kinds, [WireErrorKind::Unsupported; 4]);
                continue;
            }
            // NIXL never says which PP rank asks.
            let asked = req.requester_pp_rank.filter(|_| dialect.name() == "mooncake");
            let asked = StagingReq { requester_pp_rank: asked, ..req.clone() };
            prop_assert_eq!(to_decode(dialect, &encoded.0.unwrap()), ToDecode::ChunkReady(ready.clone()));
            prop_assert_eq!(to_decode(dialect, &encoded.1.unwrap()), ToDecode::StagingReq(asked));
            prop_assert_eq!(to_prefill(dialect, &encoded.2.unwrap()), ToPrefill::StagingRsp(rsp.clone()));
            prop_assert_eq!(to_prefill(dialect, &encoded.3.unwrap()), ToPrefill::Watermark(mark.clone()));
        }
    }

    #[test]
    fn r_h1_control_messages_come_back(
        room in any::<u64>(), from in option::of(endpoint()), generation in option::of(any::<u64>()), hello in endpoint(),
        rank in any::<u32>(), buffer_index in 0..1u32 << 16, aux_index in any::<u32>(), data in blob(),
    ) {
        // A generation without an address is not sent.
        let abort = Abort { room, endpoint: from.clone(), generation: generation.filter(|_| from.is_some()) };
        let ack = AbortAck { room, prefill_rank: PrefillRank(rank), generation: generation.unwrap_or(0) };
        let hello = BootstrapHello { room, endpoint: hello };
        let aux = AuxData { room, buffer_index, aux_index, data };
        for dialect in dialects() {
            let frames = dialect.encode_abort(&Abort { generation, ..abort.clone() }).unwrap();
            prop_assert_eq!(to_prefill(dialect, &frames), ToPrefill::Abort(abort.clone()));
            prop_assert_eq!(to_decode(dialect, &dialect.encode_abort_ack(&ack).unwrap()), ToDecode::AbortAck(ack.clone()));
            let frames = dialect.encode_bootstrap(&hello).unwrap();
            prop_assert_eq!(to_prefill(dialect, &frames), ToPrefill::Bootstrap(hello.clone()));
            match dialect.encode_aux_data(&aux) {
                Ok(frames) => prop_assert_eq!(to_decode(dialect, &frames), ToDecode::AuxData(aux.clone())),
                Err(error) => {
                    prop_assert_eq!(error.kind, WireErrorKind::Unsupported);
                    prop_assert!(matches!(dialect.name(), "nixl" | "tcp"));
                }
            }
        }
    }
}

// ---------------------------------------------------------------- no message at all

fn any_frame() -> impl Strategy<Value = Bytes> {
    let words: [&'static [u8]; 30] = [
        b"NixlMsgGuard",
        b"KvTcpMsgGuard",
        b"MoriMsgGuard",
        b"None",
        b"ABORT",
        b"ABORT_ACK",
        b"AUX_DATA",
        b"BOOTSTRAP",
        b"CHUNK_READY",
        b"STAGING_REQ",
        b"STAGING_RSP",
        b"WATERMARK",
        b"KV_STATUS",
        b"",
        b"0",
        b"1",
        b"-1",
        b"42",
        b"10.0.0.7",
        b"fd00::7",
        b"41234",
        b"99999999999999999999999999999999999999999999",
        b"\xff\xfe",
        b"a\0b",
        b"VRAM,DRAM",
        b"\x01\0\0\0\xff\xff\xff\xff",
        b"\xff\xff\xff\xff",
        b"\xdd\xff\xff\xff\xff",
        b"\x91\xc4\x01",
        b"\0\0\0\x80",
    ];
    prop_oneof![
        4 => sample::select(words.to_vec()).prop_map(Bytes::from_static),
        2 => any::<i64>().prop_map(|int| Bytes::from(int.to_string())),
        2 => collection::vec(any::<u8>(), 0..64).prop_map(Bytes::from),
    ]
}

/// Read it every way there is; nothing may panic, and the answer is a message or an error with its text.
fn read_every_way(frames: &[Bytes]) {
    let small = Limits { max_pages: 3, max_entries: 2, max_text_bytes: 8, max_frames: 20, ..Limits::default() };
    for dialect in dialects() {
        for limits in [&Limits::default(), &small] {
            for error in [dialect.parse_to_prefill(frames, limits).err(), dialect.parse_to_decode(frames, limits).err()]
            {
                assert!(error.is_none_or(|error| !error.what.is_empty() && !error.detail.is_empty()));
            }
        }
        assert!(describe(dialect, frames).ends_with('\n'));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2048))]

    #[test]
    fn cat_f61_random_frames_never_panic(frames in collection::vec(any_frame(), 0..=40)) {
        read_every_way(&frames);
    }

    #[test]
    fn cat_f61_a_good_message_with_some_bad_frames_never_panics(
        which in 0..4usize, message in metadata(), kind in 0..4u8, bad in collection::vec((0..25usize, any_frame()), 1..4),
        keep in 0..30usize,
    ) {
        let dialect = dialects()[which];
        let mut frames = match kind {
            0 => dialect.encode_metadata(&message).unwrap_or_default(),
            1 => dialect.encode_status(&status()).unwrap(),
            2 => dialect.encode_registration(&minimal_registration(dialect.name())).unwrap(),
            _ => dialect.encode_abort(&Abort { room: 1, endpoint: Some(message.endpoint), generation: Some(1) }).unwrap(),
        };
        frames.truncate(keep);
        for (at, frame) in bad {
            if let Some(place) = frames.get_mut(at) {
                *place = frame;
            }
        }
        read_every_way(&frames);
    }
}
