//! Bytes as the libraries of 0.3.13.post1 and 0.3.14 send and take them.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

use mooncake_wire::{BadOpcode, Buffer, Descriptor, Kind, Opcode, Read, Request, Status, Write, handshake};

fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(|b| !b.is_ascii_whitespace()).collect();
    digits.chunks(2).map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap()).collect()
}

#[test]
fn r_h2_a_request_is_length_address_opcode_and_seven_bytes_of_nothing() {
    let write = Write { addr: 0x7f5e_8a40_0000, len: 0x1000, acknowledged: true };
    assert_eq!(write.encode().to_vec(), hex("0010000000000000 0000408a5e7f0000 81 00000000000000"));
    let read = Read { addr: 0x7f5e_8a40_0001, len: 1, acknowledged: false };
    assert_eq!(read.encode().to_vec(), hex("0100000000000000 0100408a5e7f0000 00 00000000000000"));
    // C++ sends its padding as it finds it.
    let garbage: [u8; 24] = hex("0010000000000000 0000408a5e7f0000 01 a5deadbeef00ff").try_into().unwrap();
    let want = Request { op: Opcode::Write, addr: 0x7f5e_8a40_0000, len: 0x1000, acknowledged: false };
    assert_eq!(Request::decode(&garbage), Ok(want));
    for odd in [2, 0x7f, 0x82, 0xff] {
        let mut header = write.encode();
        header[16] = odd;
        assert_eq!(Request::decode(&header), Err(BadOpcode(odd)));
    }
}

#[test]
fn r_h2_a_status_is_a_code_under_a_magic() {
    assert_eq!(Status::Ok.encode().to_vec(), hex("00000000 5654434d"));
    assert_eq!(Status::Rejected.encode().to_vec(), hex("01000000 5654434d"));
    assert_eq!(Status::decode(0x4D43_5456_0000_0007u64.to_le_bytes()), Ok(Status::Unknown(7)));
    for odd in [0, 1, 0x4D43_5457_0000_0000, u64::MAX] {
        assert_eq!(Status::decode(odd.to_le_bytes()).unwrap_err().0, odd);
    }
}

#[test]
fn r_h2_a_frame_counts_its_kind() {
    assert_eq!(handshake::frame(Some(Kind::Probe), b"{}"), hex("0300000000000000 03 7b7d"));
    assert_eq!(handshake::frame(None, b"{}"), hex("0200000000000000 7b7d"));
    assert_eq!(handshake::split(b"\x01{}"), Some((Some(Kind::Metadata), &b"{}"[..])));
    assert_eq!(handshake::split(b"{}"), Some((None, &b"{}"[..])));
    assert_eq!(handshake::split(b""), None);
    assert_eq!(handshake::body_len(3u64.to_le_bytes(), 4), Ok(3));
    for odd in [0, 5, u64::MAX] {
        assert_eq!(handshake::body_len(odd.to_le_bytes(), 4).unwrap_err().len, odd);
    }
}

#[test]
fn answers_have_the_kind_of_their_question() {
    for kind in [None, Some(Kind::Connection), Some(Kind::Metadata), Some(Kind::Notify), Some(Kind::Probe)] {
        let answer = handshake::answer(kind, r#"{"name":"h:9"}"#);
        let len = handshake::body_len(answer[..8].try_into().unwrap(), handshake::MAX_LEN).unwrap();
        assert_eq!(len, answer.len() - 8);
        let (said, json) = handshake::split(&answer[8..]).unwrap();
        assert_eq!(said, kind);
        let value: serde_json::Value = serde_json::from_slice(json).unwrap();
        match kind {
            None | Some(Kind::Metadata) => assert_eq!(value["name"], "h:9"),
            Some(Kind::Notify) => assert_eq!(value["notify_msg"], "success"),
            Some(Kind::Probe) => assert_eq!(value["status"], "success"),
            Some(Kind::Connection) => assert!(value["qp_num"].as_array().unwrap().is_empty()),
        }
    }
}

/// As 0.3.13.post1 and, with `metadata_version`, 0.3.14 say it; the HEAD between them has no `tcp_data_host`.
#[test]
fn descriptors_of_the_libraries_are_read() {
    let said = r#"{"buffers":[{"addr":140044186681344,"length":67108864,"name":"127.0.0.1:15592"}],
        "metadata_version":0,"name":"127.0.0.1:15592","protocol":"tcp","rdma_server_name":"",
        "tcp_data_host":"127.0.0.1","tcp_data_port":15381,"tcp_proto_version":2,"timestamp":"2026-11-29 10:00:00"}"#;
    let found = Descriptor::parse(said.as_bytes(), "127.0.0.1:15592").unwrap();
    let buffer = Buffer { addr: 140_044_186_681_344, len: 64 << 20 };
    assert_eq!(found, Descriptor::tcp("127.0.0.1:15592", Some("127.0.0.1"), 15381, 2, [buffer]));
    let without = said.replace(r#""tcp_data_host":"127.0.0.1","#, "");
    assert_eq!(Descriptor::parse(without.as_bytes(), "127.0.0.1:15592").unwrap().data_host, None);
}
