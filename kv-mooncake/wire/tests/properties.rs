//! Whatever comes from outside is read or refused, and what we say is what we read.

use mooncake_wire::{Buffer, Descriptor, Opcode, Request, Status, handshake, session};
use proptest::prelude::*;
use serde_json::Value;

/// JSON of any shape, often with the names a descriptor has.
fn any_json() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        "[a-z0-9:.]{0,12}".prop_map(Value::from),
        Just(Value::from("tcp")),
    ];
    let name = prop_oneof![
        Just("name".to_owned()),
        Just("protocol".to_owned()),
        Just("buffers".to_owned()),
        Just("addr".to_owned()),
        Just("length".to_owned()),
        Just("tcp_data_port".to_owned()),
        Just("tcp_proto_version".to_owned()),
        "[a-z_]{0,8}",
    ];
    leaf.prop_recursive(3, 64, 8, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((name.clone(), inner), 0..8)
                .prop_map(|members| Value::Object(members.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn r_h2_every_header_is_read_as_it_was_written_or_refused(bytes in any::<[u8; 24]>()) {
        if let Ok(request) = Request::decode(&bytes) {
            let again = request.encode();
            prop_assert_eq!(&again[..17], &bytes[..17]);
            prop_assert_eq!(Request::decode(&again), Ok(request));
        } else {
            prop_assert!(bytes[16] & 0x7f > 1);
        }
    }

    #[test]
    fn r_h2_requests_come_back(write in any::<bool>(), addr in any::<u64>(), len in any::<u64>(), acknowledged in any::<bool>()) {
        let request = Request { op: if write { Opcode::Write } else { Opcode::Read }, addr, len, acknowledged };
        prop_assert_eq!(Request::decode(&request.encode()), Ok(request));
    }

    #[test]
    fn r_h2_every_word_is_a_status_or_none(word in any::<u64>(), code in any::<u32>()) {
        let known = Status::decode(word.to_le_bytes());
        prop_assert_eq!(known.map(|s| u64::from_le_bytes(s.encode())), known.map(|_| word));
        let word = 0x4D43_5456u64 << 32 | u64::from(code);
        prop_assert_eq!(Status::decode(word.to_le_bytes()).map(Status::encode), Ok(word.to_le_bytes()));
    }

    #[test]
    fn r_h2_no_body_and_no_json_makes_the_reader_panic(body in prop::collection::vec(any::<u8>(), 0..64), json in any_json()) {
        let _ = handshake::split(&body);
        let _ = Descriptor::parse(&body, "h:9");
        let _ = Descriptor::check(&json, "h:9");
        let _ = session(&String::from_utf8_lossy(&body));
    }

    #[test]
    fn a_descriptor_reads_back_and_holds_exactly_its_buffers(
        buffers in prop::collection::vec((1u64..1 << 47, 1u64..1 << 40), 0..8), port in 1u16.., version in 0i64..4,
        addr in any::<u64>(), len in 1u64..1 << 41,
    ) {
        let of = buffers.iter().map(|&(addr, len)| Buffer { addr, len });
        let ours = Descriptor::tcp("h:9", Some("h"), port, version, of);
        let read = Descriptor::parse(ours.to_json().to_string().as_bytes(), "h:9");
        prop_assert_eq!(read.as_ref(), Ok(&ours));
        let inside = |&(at, size): &(u64, u64), addr: u64, len: u64| at <= addr && addr.checked_add(len).is_some_and(|end| end <= at + size);
        for &(at, size) in &buffers {
            for (a, l) in [(at, size), (at, size + 1), (at + size, 1), (at.wrapping_sub(1), 2), (addr, len)] {
                prop_assert_eq!(ours.holds(a, l), buffers.iter().any(|b| inside(b, a, l)));
            }
        }
    }
}
