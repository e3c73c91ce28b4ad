//! The frame itself: round trips, strangers, bounds; and its place in each dialect.

use bytes::Bytes;
use kv_core::control::Multipart;
use kv_core::host::HostIdentity;
use kv_core::ids::ProcessGeneration;
use kv_core::wire::ext::{MAGIC, MAX_LEN};
use kv_core::wire::*;
use kv_core::{Endpoint, KvPoll, Limits, PrefillRank};
use proptest::prelude::*;
use proptest::{collection, option};

fn peer() -> impl Strategy<Value = ExtPeer> {
    (1..=u8::MAX, any::<u64>(), 1..=u128::MAX).prop_map(|(version, capabilities, process)| ExtPeer {
        version,
        capabilities: ExtCapabilities(capabilities),
        process: ProcessGeneration(process),
    })
}

fn any_extension() -> impl Strategy<Value = Extension> {
    let tag = (any::<u64>(), any::<u64>(), any::<u32>(), any::<bool>());
    let fields = (
        option::of(any::<u128>()),
        option::of(any::<u64>()),
        option::of(tag),
        option::of(any::<bool>()),
        any::<bool>(),
        option::of(any::<[[u8; 20]; 2]>()),
    );
    (peer(), fields).prop_map(|(from, (to, room_generation, tag, aux_writer, register_again, host))| Extension {
        from,
        to: to.map(ProcessGeneration),
        room_generation,
        tag: tag.map(|(head, pages, count, wrote_aux)| RoomTag { head, pages, count, wrote_aux }),
        aux_writer,
        register_again,
        host: host.and_then(|h| h.concat().try_into().ok()).map(HostIdentity::from_bytes),
    })
}

fn dialects() -> [Box<dyn Dialect>; 4] {
    let tcp = NixlDialect::with_guard("KvTcpMsgGuard");
    [Box::new(NixlDialect::new()), Box::new(tcp), Box::new(MooncakeDialect), Box::new(MoriDialect)]
}

proptest! {
    #[test]
    fn r_h4_every_extension_comes_back(ext in any_extension()) {
        let frame = ext.encode();
        prop_assert!(frame.len() <= MAX_LEN);
        prop_assert_eq!(Extension::parse(&frame), Ok(Some(ext)));
        prop_assert_eq!(ExtPeer::from_text(&ext.from.to_text()), Some(ext.from));
    }

    /// Whatever comes is an extension, an error, or nothing; what is cut off is never an extension with less in it.
    #[test]
    fn r_h2_any_bytes_are_read_or_refused(bytes in collection::vec(any::<u8>(), 0..600)) {
        let _ = Extension::parse(&bytes);
        let with_magic: Vec<u8> = MAGIC.iter().chain(&bytes).copied().collect();
        let parsed = Extension::parse(&with_magic);
        prop_assert!(parsed != Ok(None));
        if let Ok(Some(ext)) = parsed {
            prop_assert!(with_magic.len() <= MAX_LEN);
            prop_assert_eq!(Extension::parse(&ext.encode()), Ok(Some(ext)));
        }
        let _ = ExtPeer::from_text(&String::from_utf8_lossy(&bytes));
    }

    #[test]
    fn r_h4_fields_of_later_versions_are_skipped(ext in any_extension(), kind in 7..=u8::MAX, more in collection::vec(any::<u8>(), 0..200)) {
        let mut frame = ext.encode().to_vec();
        frame.extend([kind, more.len() as u8]);
        frame.extend(&more);
        prop_assert_eq!(Extension::parse(&frame), Ok(Some(ext)));
        // Cut anywhere inside the last field, it cannot be read.
        let whole = frame.len();
        for len in ext.encode().len() + 1..whole {
            prop_assert!(Extension::parse(&frame[..len]).is_err());
        }
    }
}

#[test]
fn r_h4_the_extension_stands_behind_the_full_frame_count_of_each_dialect() {
    let endpoint = Endpoint::new("10.0.0.7", 5000);
    let ext = Extension { room_generation: Some(9), ..Extension::from(ExtPeer::new(ProcessGeneration(3))) };
    let counts = [("nixl", 11_usize, 5_usize), ("tcp", 11, 5), ("mooncake", 10, 4), ("mori", 10, 5)];
    for (dialect, (name, metadata_frames, status_frames)) in dialects().iter().zip(counts) {
        assert_eq!(dialect.name(), name);
        let limits = Limits::default();
        let metadata = Metadata {
            room: 42,
            endpoint: endpoint.clone(),
            name: "d1".into(),
            dst_pages: [1, 2].into(),
            aux_index: Some(3),
            required_dst_info_num: 1,
            state_indices: Vec::new(),
            decode_prefix_len: Some(5),
            is_dummy: false,
            device_kv_indices: None,
        };
        let status = |reason: Option<&str>| KvStatus {
            room: 42,
            status: KvPoll::Failed,
            prefill_rank: PrefillRank(1),
            reason: reason.map(Into::into),
        };
        let abort = |endpoint: Option<Endpoint>, generation| Abort { room: 42, endpoint, generation };
        let to_prefill = [
            (MessageKind::Metadata, dialect.encode_metadata(&metadata), metadata_frames),
            (MessageKind::Abort, dialect.encode_abort(&abort(Some(endpoint.clone()), Some(4))), 5),
            (MessageKind::Abort, dialect.encode_abort(&abort(Some(endpoint.clone()), None)), 5),
            (MessageKind::Abort, dialect.encode_abort(&abort(None, None)), 5),
        ];
        let ack = AbortAck { room: 42, prefill_rank: PrefillRank(1), generation: 4 };
        let to_decode = [
            (MessageKind::Status, dialect.encode_status(&status(None)), status_frames),
            (MessageKind::Status, dialect.encode_status(&status(Some("why"))), status_frames),
            (MessageKind::AbortAck, dialect.encode_abort_ack(&ack), 4),
        ];
        let attach = |kind, plain: &Multipart, full| {
            let mut frames = plain.clone();
            dialect.attach_extension(kind, &mut frames, &ext).unwrap();
            assert_eq!(frames.len(), full + 1, "{name} {kind:?}");
            assert_eq!(frames[..plain.len()], plain[..], "{name} {kind:?}");
            assert_eq!(dialect.extension(kind, &frames), Ok(Some(ext)), "{name} {kind:?}");
            assert_eq!(dialect.extension(kind, plain), Ok(None), "{name} {kind:?}");
            // Something else in its place means nothing.
            let mut other = frames.clone();
            *other.last_mut().unwrap() = Bytes::from_static(b"later");
            assert_eq!(dialect.extension(kind, &other), Ok(None), "{name} {kind:?}");
            frames
        };
        for (kind, plain, full) in to_prefill {
            let plain = plain.unwrap();
            let frames = attach(kind, &plain, full);
            let read = |frames: &Multipart| dialect.parse_to_prefill(frames, &limits).unwrap();
            assert_eq!(read(&frames), read(&plain), "{name} {kind:?}: the same message");
            assert_eq!(read(&frames).kind(), kind);
        }
        for (kind, plain, full) in to_decode {
            let plain = plain.unwrap();
            let frames = attach(kind, &plain, full);
            let read = |frames: &Multipart| dialect.parse_to_decode(frames, &limits).unwrap();
            assert_eq!(read(&frames), read(&plain), "{name} {kind:?}: the same message");
            assert_eq!(read(&frames).kind(), kind);
        }
    }
}

#[test]
fn what_cannot_be_ours_is_not_taken_for_ours() {
    for text in ["", "1", "1:7", "0:7:1", "1:7:0", "x:7:1", "1:-7:1", "1:7:+1", "256:7:1", "1:11112222333344445:1"] {
        assert_eq!(ExtPeer::from_text(text), None, "{text}");
    }
    assert!(ExtPeer::from_text("2:7:1:more").is_some(), "later versions put more behind it");
    assert_eq!(Extension::parse(b""), Ok(None));
    assert_eq!(Extension::parse(b"\0KVX2......"), Ok(None));
    assert!(Extension::parse(MAGIC).is_err());
    assert_ne!(ProcessGeneration::here().0, 0);
    assert_eq!(ProcessGeneration::here(), ProcessGeneration::here());
}
