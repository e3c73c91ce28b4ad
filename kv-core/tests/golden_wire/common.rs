//! `zmq_common.json`: messages that are the same in every dialect.

use kv_core::wire::{
    Abort, AbortAck, BootstrapHello, Dialect, MooncakeDialect, MoriDialect, NixlDialect, ToDecode, ToPrefill,
    WireErrorKind,
};
use kv_core::{Endpoint, Limits, PrefillRank};
use serde_json::{Value, json};

use super::support::*;

fn abort_view(message: &Abort) -> Value {
    json!({
        "room": message.room,
        "decode_ip": message.endpoint.as_ref().map(Endpoint::host),
        "decode_port": message.endpoint.as_ref().map(Endpoint::port),
        "generation": message.generation,
    })
}

fn abort_parse(dialect: &dyn Dialect, record: &Value) {
    let frames = frames(record);
    match dialect.parse_to_prefill(&frames, &Limits::default()) {
        Ok(ToPrefill::Abort(message)) => {
            assert_eq!(abort_view(&message), record["parsed"]);
            if let Some(target) = record.get("ack_target") {
                let ours = message.endpoint.zip(message.generation);
                let ours = ours.map(|(endpoint, generation)| json!([endpoint.host(), endpoint.port(), generation]));
                assert_eq!(json!(ours), *target);
            }
        }
        Ok(other) => panic!("{other:?}"),
        Err(error) => {
            assert!(record["parsed"].is_null(), "{error}");
            let kind = if frames.len() < 2 { WireErrorKind::TooShort } else { WireErrorKind::BadInteger };
            assert_eq!(error.kind, kind);
        }
    }
}

fn abort(dialect: &dyn Dialect, record: &Value) {
    let input = &record["input"];
    let message = Abort {
        room: u64_of(&input["room"]),
        endpoint: input.get("decode_ip").map(|ip| endpoint(ip, &input["decode_port"])),
        generation: input.get("generation").map(u64_of),
    };
    assert_frames(&dialect.encode_abort(&message).unwrap(), &frames(record));
    abort_parse(dialect, record);
}

/// An ACK without a generation counts for nothing in 0.5.23 (protocol 6.9), so ours has no such message: it is not
/// sent, and dropped when it comes.
fn ack_parse(dialect: &dyn Dialect, record: &Value) {
    let frames = frames(record);
    match dialect.parse_to_decode(&frames, &Limits::default()) {
        Ok(ToDecode::AbortAck(message)) => {
            let view = json!({
                "room": message.room,
                "prefill_rank": message.prefill_rank.0,
                "generation": message.generation,
            });
            assert_eq!(view, record["parsed"]);
        }
        Ok(other) => panic!("{other:?}"),
        Err(error) => {
            assert!(record["parsed"].is_null() || record["parsed"]["generation"].is_null(), "{error}");
            let kind = if frames.len() < 4 { WireErrorKind::TooShort } else { WireErrorKind::BadInteger };
            assert_eq!(error.kind, kind);
        }
    }
}

fn ack(dialect: &dyn Dialect, record: &Value) {
    let input = &record["input"];
    let generation = input.get("generation").map(u64_of);
    let message = AbortAck {
        room: u64_of(&input["room"]),
        prefill_rank: PrefillRank(u32_of(&input["prefill_rank"])),
        generation: generation.unwrap_or(1),
    };
    let ours = dialect.encode_abort_ack(&message).unwrap();
    let known = if generation.is_some() { ours.len() } else { 3 };
    assert_frames(&ours[..known], &frames(record));
    ack_parse(dialect, record);
}

fn bootstrap(dialect: &dyn Dialect, record: &Value) {
    let input = &record["input"];
    let message = BootstrapHello { room: u64_of(&input["room"]), endpoint: endpoint(&input["ip"], &input["port"]) };
    assert_frames(&dialect.encode_bootstrap(&message).unwrap(), &frames(record));
    let read = dialect.parse_to_prefill(&frames(record), &Limits::default()).unwrap();
    assert_eq!(read, ToPrefill::Bootstrap(message));
}

fn network_address(record: &Value) {
    let (host, port): (String, u16) = list(&record["input"]);
    let endpoint = Endpoint::new(&host, port);
    assert_eq!(endpoint.zmq_uri(), text(&record["to_tcp"]));
    assert_eq!(endpoint.to_string(), text(&record["to_host_port"]));
    assert_eq!(format!("http://{endpoint}"), text(&record["to_url"]));
    assert_eq!(record["is_ipv6"], endpoint.is_ipv6());
}

#[test]
fn r_h1_every_common_record_in_every_dialect() {
    let tcp = NixlDialect::with_guard("KvTcpMsgGuard");
    let dialects: [&dyn Dialect; 4] = [&NixlDialect::new(), &tcp, &MooncakeDialect, &MoriDialect];
    File::read(include_str!("../../../kv-testkit/vectors/zmq_common.json")).each(22, |record| {
        let check: fn(&dyn Dialect, &Value) = match record.get("message").map(text) {
            Some("ABORT") => abort,
            Some("ABORT_parse") => abort_parse,
            Some("ABORT_ACK") => ack,
            Some("ABORT_ACK_parse") => ack_parse,
            Some("BOOTSTRAP") => bootstrap,
            None if record["name"] == "network_address" => return network_address(record),
            other => panic!("nothing checks {other:?}"),
        };
        dialects.into_iter().for_each(|dialect| check(dialect, record));
    });
}
