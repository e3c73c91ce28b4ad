//! Malformed messages, bounds, rows of the fault catalogue, and the readable print.

use std::sync::Arc;

use bytes::Bytes;
use kv_core::memory::MemoryKind;
use kv_core::wire::*;
use kv_core::{Endpoint, KvPoll, Limits};

use super::{dialects, message, minimal_registration, request, status, to_prefill};

#[test]
fn cat_f61_bad_messages_then_a_good_one() {
    use WireErrorKind::*;
    let huge: &[u8] = b"340282366920938463463374607431768211456";
    // Frames behind NIXL's guard or tag, and why they are dropped.
    let bad: [(&[&'static [u8]], WireErrorKind); 11] = [
        (&[], TooShort),
        (&[b"42"], TooShort),
        (&[b"42", b"10.0.0.7", b"41234", b"d", b"", b"0"], TooShort),
        (&[b"\xff\xfe", b"10.0.0.7", b"41234", b"d", b"", b"0", b"1"], BadInteger),
        (&[b"-1", b"10.0.0.7", b"41234", b"d", b"", b"0", b"1"], BadInteger),
        (&[huge, b"10.0.0.7", b"41234", b"d", b"", b"0", b"1"], BadInteger),
        (&[b"42", b"tcp://*;10.0.0.7", b"41234", b"d", b"", b"0", b"1"], BadText),
        (&[b"42", b"10.0.0.7", b"65536", b"d", b"", b"0", b"1"], BadInteger),
        (&[b"42", b"10.0.0.7", b"41234", b"d\0", b"", b"0", b"1"], BadText),
        (&[b"42", b"10.0.0.7", b"41234", b"d", b"\xff\xff\xff\xff", b"0", b"1"], BadInteger),
        (&[b"42", b"10.0.0.7", b"41234", b"d", b"\0\0\0", b"0", b"1"], BadArray),
    ];
    let nixl = built_in("nixl").unwrap();
    let limits = Limits::default();
    for (frames, kind) in bad {
        let mut frames = message(frames);
        frames.insert(0, Bytes::from_static(b"NixlMsgGuard"));
        assert_eq!(nixl.parse_to_prefill(&frames, &limits).unwrap_err().kind, kind, "{frames:?}");
    }
    assert_eq!(nixl.parse_to_prefill(&[], &limits).unwrap_err().kind, TooShort);
    let negative_rank = message(&[b"KV_STATUS", b"42", b"4", b"-1", b""]);
    assert_eq!(nixl.parse_to_decode(&negative_rank, &limits).unwrap_err().kind, BadInteger);
    let unknown_status = message(&[b"KV_STATUS", b"42", b"7", b"1", b""]);
    assert_eq!(nixl.parse_to_decode(&unknown_status, &limits).unwrap_err().kind, BadInteger);

    for dialect in dialects() {
        let mut frames = dialect.encode_metadata(&request()).unwrap();
        // A long message is read as far as it is known; a very long one is dropped.
        frames.resize(40, Bytes::from_static(b"more"));
        assert_eq!(to_prefill(dialect, &frames), ToPrefill::Metadata(request()), "{}", dialect.name());
        frames.resize(limits.max_frames + 1, Bytes::new());
        assert_eq!(dialect.parse_to_prefill(&frames, &limits).unwrap_err().kind, TooLarge);
    }
}

#[test]
fn r_h2_counts_over_the_limits_are_refused() {
    let limits = Limits {
        max_pages: 3,
        max_entries: 1,
        max_text_bytes: 16,
        max_peers_per_room: 2,
        max_frame_bytes: 64,
        max_message_bytes: 200,
        ..Limits::default()
    };
    for dialect in dialects() {
        let refused = |message: &Metadata| {
            dialect.parse_to_prefill(&dialect.encode_metadata(message).unwrap(), &limits).unwrap_err().kind
        };
        assert_eq!(refused(&request()), WireErrorKind::TooLarge, "four pages");
        let fits = Metadata { dst_pages: [1, 2, 3].into(), ..request() };
        assert!(dialect.parse_to_prefill(&dialect.encode_metadata(&fits).unwrap(), &limits).is_ok());
        let long = Metadata { name: "n".repeat(17), ..fits.clone() };
        assert_eq!(refused(&long), WireErrorKind::TooLarge, "a long name");
        let many = Metadata { required_dst_info_num: 3, ..fits.clone() };
        assert_eq!(refused(&many), WireErrorKind::TooLarge, "more decodes than a room may have");
        let state = Metadata { state_indices: vec![vec![], vec![]], ..fits.clone() };
        assert_eq!(refused(&state), WireErrorKind::TooLarge, "two state components");
        let wide = Metadata { dst_pages: vec![1; 17].into(), ..fits };
        assert_eq!(refused(&wide), WireErrorKind::TooLarge, "a frame of 68 bytes");
    }
}

#[test]
fn r_h2_a_long_or_broken_reason_does_not_lose_the_status() {
    let limits = Limits { max_text_bytes: 5, ..Limits::default() };
    let nixl = built_in("nixl").unwrap();
    for (reason, read) in
        [(&b"abcdefgh"[..], "abcde"), ("abcd\u{e9}".as_bytes(), "abcd"), (b"\xff\xff\xff", "\u{fffd}")]
    {
        let mut frames = nixl.encode_status(&status()).unwrap();
        frames[4] = Bytes::copy_from_slice(reason);
        match nixl.parse_to_decode(&frames, &limits).unwrap() {
            ToDecode::Status(status) => assert_eq!(status.reason.as_deref(), Some(read)),
            other => panic!("{other:?}"),
        }
    }
}

#[test]
fn r_h2_contradicting_registrations_are_refused() {
    let nixl = built_in("nixl").unwrap();
    let good = minimal_registration("nixl");
    let refused = |change: fn(&mut Registration)| {
        let mut message = good.clone();
        change(&mut message);
        nixl.encode_registration(&message).unwrap_err().kind
    };
    assert_eq!(refused(|message| message.kv_item_lens.push(1)), WireErrorKind::Inconsistent);
    assert_eq!(refused(|message| message.kv_kinds.push(MemoryKind::Dram)), WireErrorKind::Inconsistent);
    assert_eq!(refused(|message| message.dcp_rank = 1), WireErrorKind::Inconsistent);
    assert_eq!(refused(|message| message.attn_tp_size = 0), WireErrorKind::BadInteger);
    assert_eq!(refused(|message| message.kv = Buffers::Descriptors(vec![None])), WireErrorKind::Unsupported);
    assert_eq!(refused(|message| message.endpoint = Endpoint::new("10.0.0.7", 0)), WireErrorKind::BadInteger);

    let frames = nixl.encode_registration(&good).unwrap();
    let refused = |at: usize, frame: &'static [u8]| {
        let mut frames = frames.clone();
        frames[at] = Bytes::from_static(frame);
        nixl.parse_to_prefill(&frames, &Limits::default()).unwrap_err()
    };
    for (at, frame, kind) in [
        (6, &[0; 16][..], WireErrorKind::Inconsistent), // two KV entries, one length
        (10, b"0", WireErrorKind::BadInteger),          // attention TP size
        (13, &[2, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], WireErrorKind::Inconsistent), // two lists for one component
        (15, &[0; 9], WireErrorKind::BadArray),         // staging address
        (15, &[1; 8], WireErrorKind::Inconsistent),     // a ring of no bytes
        (18, b"VRAM,VRAM", WireErrorKind::Inconsistent),
        (22, b"2 2", WireErrorKind::BadInteger),
        (23, b"1", WireErrorKind::Inconsistent),
    ] {
        let error = refused(at, frame);
        assert_eq!(error.kind, kind, "{error}");
        assert!(error.what.starts_with("registration frame "), "{error}");
    }
}

#[test]
fn r_h2_aux_data_must_be_as_long_as_it_says() {
    let mori = built_in("mori").unwrap();
    let good = AuxData { room: 42, buffer_index: 3, aux_index: 11, data: Bytes::from_static(b"123") };
    let frames = mori.encode_aux_data(&good).unwrap();
    for (at, frame, kind) in [
        (2, &b"-1"[..], WireErrorKind::BadInteger),
        (2, b"65536", WireErrorKind::TooLarge),
        (3, b"-11", WireErrorKind::BadInteger),
        (4, b"\x03\0\0\0", WireErrorKind::Inconsistent), // little-endian
        (4, b"3", WireErrorKind::BadArray),
        (5, b"12", WireErrorKind::Inconsistent),
    ] {
        let mut frames = frames.clone();
        frames[at] = Bytes::from_static(frame);
        assert_eq!(mori.parse_to_decode(&frames, &Limits::default()).unwrap_err().kind, kind);
    }
}

// ---------------------------------------------------------------- rows of the catalogue

#[test]
fn cat_f24_abort_is_read_before_the_guard() {
    for dialect in dialects() {
        let frames = message(&[b"ABORT", b"42", b"10.0.0.7", b"41234", b"9"]);
        let expected = Abort { room: 42, endpoint: Some(Endpoint::new("10.0.0.7", 41234)), generation: Some(9) };
        assert_eq!(to_prefill(dialect, &frames), ToPrefill::Abort(expected), "{}", dialect.name());
    }
}

#[test]
fn cat_f19_frames_of_a_peer_without_generations() {
    for dialect in dialects() {
        let old = message(&[b"ABORT", b"42", b"10.0.0.7", b"41234"]);
        let ToPrefill::Abort(abort) = to_prefill(dialect, &old) else { panic!() };
        assert_eq!((abort.endpoint.is_some(), abort.generation), (true, None));
        // An ACK that names no generation proves nothing.
        let ack = message(&[b"ABORT_ACK", b"42", b"3"]);
        assert_eq!(dialect.parse_to_decode(&ack, &Limits::default()).unwrap_err().kind, WireErrorKind::TooShort);
    }
}

#[test]
fn cat_f39_names_with_underscores_and_other_bytes() {
    for dialect in dialects() {
        // Names are whole frames, so nothing in them can be taken for a separator.
        for name in ["a_b_c", "7_kv_0_1_3", "_", "None", "ABORT", "42", "with blank"] {
            let sent = Metadata { name: name.into(), ..request() };
            let frames = dialect.encode_metadata(&sent).unwrap();
            assert_eq!(to_prefill(dialect, &frames), ToPrefill::Metadata(sent), "{} {name}", dialect.name());
        }
        // 0.5.23 decodes names as ASCII and stops on anything else: neither sent nor taken.
        for name in ["d\u{e9}code_1", "", "a\0b", "\u{7f}", "a\nb"] {
            let sent = Metadata { name: name.into(), ..request() };
            assert_eq!(dialect.encode_metadata(&sent).unwrap_err().kind, WireErrorKind::BadText, "{name:?}");
        }
        let name_frame = if dialect.name() == "mooncake" { 3 } else { 4 };
        for name in [&b"d\xc3\xa9code_1"[..], b"\xff_1", b"", b"a\0b"] {
            let mut frames = dialect.encode_metadata(&request()).unwrap();
            frames[name_frame] = Bytes::from_static(name);
            let error = dialect.parse_to_prefill(&frames, &Limits::default()).unwrap_err();
            assert_eq!(error.kind, WireErrorKind::BadText, "{error}");
        }
    }
}

#[test]
fn cat_f70_metadata_of_15_000_pages_is_small() {
    let pages: Arc<[i32]> = (0..15_000).map(|page| page * 7919 % 1_000_003).collect();
    for dialect in dialects() {
        let sent = Metadata { dst_pages: pages.clone(), ..request() };
        let frames = dialect.encode_metadata(&sent).unwrap();
        let bytes: usize = frames.iter().map(Bytes::len).sum();
        assert!(bytes < 128_000, "{}: {bytes} bytes", dialect.name());
        assert!(bytes >= 60_000, "the pages are really in it");
        assert_eq!(to_prefill(dialect, &frames), ToPrefill::Metadata(sent));
    }
}

#[test]
fn r_h1_messages_of_older_peers_end_early() {
    for (dialect, registration, metadata) in [("nixl", 13, 8), ("mooncake", 10, 8), ("mori", 12, 7)] {
        let dialect = built_in(dialect).unwrap();
        let long = [
            (dialect.encode_registration(&minimal_registration(dialect.name())).unwrap(), registration),
            (dialect.encode_metadata(&request()).unwrap(), metadata),
        ];
        for (frames, min) in long {
            for count in 0..=frames.len() {
                let read = dialect.parse_to_prefill(&frames[..count], &Limits::default());
                match read {
                    Ok(_) => assert!(count >= min, "{count} frames read"),
                    Err(error) => assert!(count < min && error.kind == WireErrorKind::TooShort, "{count}: {error}"),
                }
            }
        }
    }
}

#[test]
fn old_decodes_without_a_dummy_flag() {
    let nixl = built_in("nixl").unwrap();
    let dummy = |pages: &[i32], prefix: &'static [u8], flag: Option<&'static [u8]>| {
        let sent = Metadata { dst_pages: pages.into(), ..request() };
        let mut frames = nixl.encode_metadata(&sent).unwrap();
        frames[9] = Bytes::from_static(prefix);
        frames.truncate(10);
        frames.extend(flag.map(Bytes::from_static));
        match to_prefill(nixl, &frames) {
            ToPrefill::Metadata(message) => (message.is_dummy, message.dst_pages.len()),
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(dummy(&[1], b"0", None), (false, 1));
    assert_eq!(dummy(&[], b"0", None), (true, 0));
    assert_eq!(dummy(&[], b"", Some(b"")), (true, 0));
    assert_eq!(dummy(&[], b"64", None), (false, 0), "a full prefix hit");
    assert_eq!(dummy(&[], b"0", Some(b"0")), (false, 0), "the flag wins");
    assert_eq!(dummy(&[1], b"0", Some(b"1")), (true, 0), "the flag wins, and no destination is left");
}

#[test]
fn describe_names_every_field() {
    let nixl = built_in("nixl").unwrap();
    let text = describe(nixl, &nixl.encode_metadata(&request()).unwrap());
    assert_eq!(
        text,
        "\
metadata (decode -> prefill, nixl)
  room                   42
  decode                 10.0.0.7:41234
  name                   decode-1
  pages                  4: 5-7, 9
  aux index              11
  decodes needed         1
  decode prefix tokens   64
  device pages           -
  11 frames, 57 bytes
    [ 0] \"NixlMsgGuard\"
    [ 1] \"42\"
    [ 2] \"10.0.0.7\"
    [ 3] \"41234\"
    [ 4] \"decode-1\"
    [ 5] 0x05000000060000000700000009000000
    [ 6] \"11\"
    [ 7] \"1\"
    [ 8] (empty)
    [ 9] \"64\"
    [10] \"0\"
"
    );
    let failed = KvStatus { status: KvPoll::Failed, reason: Some("r\u{e9}ason".into()), ..status() };
    let text = describe(nixl, &nixl.encode_status(&failed).unwrap());
    assert!(text.starts_with("status (prefill -> decode, nixl)\n"), "{text}");
    assert!(text.contains(
        "  status                 0 Failed\n  prefill rank           3\n  reason                 r\u{e9}ason\n"
    ));
    let text = describe(nixl, &nixl.encode_registration(&minimal_registration("nixl")).unwrap());
    assert!(text.contains("  KV                     1 addresses: 0x7f1000000000\n"), "{text}");
    assert!(text.contains("  KV memory              0 host, 1 device\n"), "{text}");
    let text = describe(nixl, &message(&[b"XX"]));
    assert!(
        text.contains("to decode              message frame 0 (tag): \"XX\" begins no message to decode"),
        "{text}"
    );
}
