//! The dialects: frames in, messages out, and back.

use bytes::Bytes;
use kv_core::control::Multipart;
use kv_core::hooks::TCP_GUARD;
use kv_core::ids::ProcessGeneration;
use kv_core::limits::Limits;
use kv_core::wire::ext::{ExtPeer, Extension, MessageKind, RoomTag};
use kv_core::wire::message::*;
use kv_core::wire::{Dialect, MooncakeDialect, MoriDialect, NixlDialect, describe};
use kv_testkit::vectors;

use crate::input::{Input, put_frames};

/// What the first frames and the fields look for.
pub const WORDS: &[&[u8]] = &[
    b"KV_STATUS",
    b"ABORT",
    b"ABORT_ACK",
    b"CHUNK_READY",
    b"STAGING_REQ",
    b"STAGING_RSP",
    b"WATERMARK",
    b"AUX_DATA",
    b"BOOTSTRAP",
    b"NixlMsgGuard",
    b"MoriMsgGuard",
    b"KvTcpMsgGuard",
    b"None",
    b"10.0.0.7",
    b"fd00::7",
    b"-1",
    b"-2",
    b"42",
    b"18446744073709551615",
    b"18446744073709551616",
    b"4294967296",
    b"VRAM",
    b"DRAM",
    b"true",
    b"\0KVX1\x01",
    b"\x01\x10",
    b"\x02\x08",
    b"\x03\x15",
    b"\x04\x01\x01",
    b"\x05\0",
    b"\x63\x02ab",
    b"\0KVX1\x01\x07\0\0\0\0\0\0\0\x05\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
];

/// Bounds that small inputs reach.
fn tight() -> Limits {
    Limits {
        max_frames: 24,
        max_frame_bytes: 256,
        max_message_bytes: 1024,
        max_pages: 8,
        max_entries: 4,
        max_text_bytes: 24,
        max_peers_per_room: 4,
        ..Limits::default()
    }
}

pub fn nixl(data: &[u8]) {
    run(&NixlDialect::new(), data);
}

pub fn mooncake(data: &[u8]) {
    run(&MooncakeDialect, data);
}

pub fn mori(data: &[u8]) {
    run(&MoriDialect, data);
}

pub fn tcp(data: &[u8]) {
    run(&NixlDialect::with_guard(TCP_GUARD), data);
}

fn run(dialect: &dyn Dialect, data: &[u8]) {
    let mut input = Input::new(data);
    let limits = if input.flag() { tight() } else { Limits::default() };
    let frames = input.frames();
    let prefill = dialect.parse_to_prefill(&frames, &limits);
    let decode = dialect.parse_to_decode(&frames, &limits);
    let text = describe(dialect, &frames);
    assert!(text.ends_with('\n') && text.len() < 4096 + 2048 * (1 + frames.len()), "{} bytes of text", text.len());
    for kind in KINDS {
        if let Ok(Some(extension)) = dialect.extension(kind, &frames) {
            assert_eq!(Extension::parse(&extension.encode()), Ok(Some(extension)), "H4");
        }
    }
    if let Ok(message) = prefill {
        within(&message, &limits);
        survives(&message, |m| to_prefill(dialect, m), |f| dialect.parse_to_prefill(f, &Limits::default()));
        let sent = to_prefill(dialect, &message);
        extended(dialect, message.kind(), sent, |f| dialect.parse_to_prefill(f, &Limits::default()));
    }
    if let Ok(message) = decode {
        survives(&message, |m| to_decode(dialect, m), |f| dialect.parse_to_decode(f, &Limits::default()));
        let sent = to_decode(dialect, &message);
        extended(dialect, message.kind(), sent, |f| dialect.parse_to_decode(f, &Limits::default()));
    }
}

const KINDS: [MessageKind; 11] = [
    MessageKind::Registration,
    MessageKind::Metadata,
    MessageKind::Status,
    MessageKind::ChunkReady,
    MessageKind::StagingReq,
    MessageKind::StagingRsp,
    MessageKind::Watermark,
    MessageKind::Abort,
    MessageKind::AbortAck,
    MessageKind::AuxData,
    MessageKind::Bootstrap,
];

fn extension() -> Extension {
    let peer = ExtPeer::new(ProcessGeneration(7));
    let tag = RoomTag { head: 1, pages: 2, count: 3, wrote_aux: true };
    Extension { to: Some(ProcessGeneration(8)), room_generation: Some(9), tag: Some(tag), ..Extension::from(peer) }
}

/// An extension behind a message changes nothing for whoever does not know it, and is read by whoever does (H4).
fn extended<M: std::fmt::Debug + PartialEq>(
    dialect: &dyn Dialect,
    kind: MessageKind,
    sent: Result<Multipart, WireError>,
    parse: impl Fn(&[Bytes]) -> Result<M, WireError>,
) {
    let Ok(plain) = sent else { return };
    let mut with = plain.clone();
    dialect.attach_extension(kind, &mut with, &extension()).expect("a message of ours takes an extension");
    assert_eq!(dialect.extension(kind, &with), Ok(Some(extension())), "{with:?}");
    assert_eq!(parse(&with), parse(&plain), "{with:?}");
}

/// What we would send for a message that we took is taken again, and is sent alike from then on.
fn survives<M: std::fmt::Debug>(
    message: &M,
    encode: impl Fn(&M) -> Result<Multipart, WireError>,
    parse: impl Fn(&[Bytes]) -> Result<M, WireError>,
) {
    let Ok(sent) = encode(message) else { return };
    let again = match parse(&sent) {
        Ok(again) => again,
        Err(e) => panic!("{e} in what we sent for {message:?}"),
    };
    match encode(&again) {
        Ok(same) => assert_eq!(same, sent, "{message:?} became {again:?}"),
        Err(e) => panic!("{e}: {message:?} became {again:?}"),
    }
}

fn to_prefill(d: &dyn Dialect, message: &ToPrefill) -> Result<Multipart, WireError> {
    match message {
        ToPrefill::Registration(m) => d.encode_registration(m),
        ToPrefill::Metadata(m) => d.encode_metadata(m),
        ToPrefill::Abort(m) => d.encode_abort(m),
        ToPrefill::StagingRsp(m) => d.encode_staging_rsp(m),
        ToPrefill::Watermark(m) => d.encode_watermark(m),
        ToPrefill::Bootstrap(m) => d.encode_bootstrap(m),
        other => panic!("a message that this target does not know: {other:?}"),
    }
}

fn to_decode(d: &dyn Dialect, message: &ToDecode) -> Result<Multipart, WireError> {
    match message {
        ToDecode::Status(m) => d.encode_status(m),
        ToDecode::ChunkReady(m) => d.encode_chunk_ready(m),
        ToDecode::StagingReq(m) => d.encode_staging_req(m),
        ToDecode::AbortAck(m) => d.encode_abort_ack(m),
        ToDecode::AuxData(m) => d.encode_aux_data(m),
        other => panic!("a message that this target does not know: {other:?}"),
    }
}

/// What a parser lets through is within the limits (H2).
fn within(message: &ToPrefill, limits: &Limits) {
    match message {
        ToPrefill::Registration(r) => {
            for n in [r.kv.len(), r.aux.len(), r.state.len(), r.kv_item_lens.len(), r.kv_kinds.len()] {
                assert!(n <= limits.max_entries, "{n} entries: {r:?}");
            }
            assert!(r.name.len() <= limits.max_text_bytes && r.metadata.len() <= limits.max_frame_bytes);
            assert!(r.dcp_rank < r.dcp_size && r.attn_tp_size > 0);
        }
        ToPrefill::Metadata(m) => {
            assert!(m.dst_pages.len() <= limits.max_pages && m.state_indices.len() <= limits.max_entries);
            assert!(m.dst_pages.iter().chain(m.state_indices.iter().flatten()).all(|i| *i >= 0));
            assert!(m.name.len() <= limits.max_text_bytes && m.endpoint.host().len() <= limits.max_text_bytes);
            assert!((1..=limits.max_peers_per_room).contains(&(m.required_dst_info_num as usize)));
        }
        _ => {}
    }
}

/// The recorded messages of this dialect, and those that all share.
pub fn seeds(file: &str) -> Vec<Vec<u8>> {
    let messages = [file, "zmq_common"].into_iter().flat_map(|name| {
        let file = vectors::load(name);
        let records: Vec<_> = file.records().filter(|r| r.has("frames")).collect();
        records.into_iter().map(|r| r.frames("frames")).collect::<Vec<_>>()
    });
    let messages: Vec<Vec<Bytes>> = messages.collect();
    // The same with an extension, where ours would put it.
    let dialect: &dyn Dialect = match file {
        "zmq_mooncake" => &MooncakeDialect,
        "zmq_mori" => &MoriDialect,
        _ => &const { NixlDialect::new() },
    };
    let extended = messages.iter().step_by(4).filter_map(|frames| {
        let kind = match (
            dialect.parse_to_prefill(frames, &Limits::default()),
            dialect.parse_to_decode(frames, &Limits::default()),
        ) {
            (Ok(message), _) => message.kind(),
            (_, Ok(message)) => message.kind(),
            _ => return None,
        };
        let mut with = frames.iter().cloned().collect();
        dialect.attach_extension(kind, &mut with, &extension()).ok()?;
        Some(seed(&with))
    });
    let extended: Vec<_> = extended.collect();
    messages.iter().map(|frames| seed(frames)).chain(extended).collect()
}

/// NIXL's, behind the guard of the embedded transport.
pub fn tcp_seeds() -> Vec<Vec<u8>> {
    let guarded = |data: Vec<u8>| {
        let mut frames = Input::new(&data[1..]).frames();
        if let Some(first) = frames.first_mut().filter(|f| f.as_ref() == NixlDialect::new().guard().as_bytes()) {
            *first = Bytes::from_static(TCP_GUARD.as_bytes());
        }
        seed(&frames)
    };
    seeds("zmq_nixl").into_iter().map(guarded).collect()
}

fn seed(frames: &[Bytes]) -> Vec<u8> {
    let mut out = vec![0];
    put_frames(&mut out, frames);
    out
}
