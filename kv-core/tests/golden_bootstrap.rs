//! The bootstrap server and client against what SGLang 0.5.23 recorded (R-H1).
#![cfg(feature = "bootstrap")]
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use kv_core::Limits;
use kv_core::bootstrap::address::registration_addr;
use kv_core::bootstrap::client::REQUEST_TIMEOUT;
use kv_core::bootstrap::{BootstrapServer, HttpRegistry, ParallelInfo, PrefillRow, Registry};
use serde_json::Value;

/// A deadline against hangs, not a measurement.
const PATIENCE: Duration = Duration::from_secs(60);

struct Answer {
    status: u16,
    content_type: String,
    body: String,
}

/// One request on a connection of its own, written by hand, so that no client library stands between.
fn exchange(addr: SocketAddr, method: &str, path: &str, body: Option<&str>) -> Answer {
    let mut stream = TcpStream::connect_timeout(&addr, PATIENCE).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let mut head = format!("{method} {path} HTTP/1.1\r\nHost: {addr}\r\nConnection: close\r\n");
    if let Some(body) = body {
        head += &format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len());
    }
    stream.write_all(head.as_bytes()).unwrap();
    stream.write_all(b"\r\n").unwrap();
    stream.write_all(body.unwrap_or("").as_bytes()).unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let header = |name: &str| {
        let value =
            |l: &str| l.split_once(": ").filter(|(k, _)| k.eq_ignore_ascii_case(name)).map(|(_, v)| v.to_owned());
        head.lines().find_map(value)
    };
    if method != "HEAD" {
        assert_eq!(header("content-length").unwrap(), body.len().to_string());
    }
    Answer { status, content_type: header("content-type").unwrap_or_default(), body: body.to_owned() }
}

fn serve(limits: Limits) -> BootstrapServer {
    BootstrapServer::bind("127.0.0.1", 0, limits).unwrap()
}

/// Recorded bodies that are the *beginning* of ours: 0.5.23 does not say which values differ (R-A4).
const SAYS_MORE: &[&str] = &["put_policy_mismatch_400", "put_dsv41_mismatch_400"];
/// Texts of SGLang's HTTP library, of which the vectors ask for the status only. Ours are the same all the same.
const LIBRARY_TEXTS: usize = 9;

#[test]
fn r_h1_all_91_http_records_against_the_real_server() {
    let file: Value = serde_json::from_str(include_str!("../../kv-testkit/vectors/bootstrap_http.json")).unwrap();
    let records = file["vectors"].as_array().unwrap();
    assert_eq!(records.len(), 91);
    let groups = ["dp_attention_2_", "system_dp_2_", "pp_2_cp_2_", "layout_and_flags_", "old_prefill_without_"];
    let group_of = |name: &str| groups.iter().position(|g| name.starts_with(g));

    let mut server = serve(Limits::default());
    let (mut group, mut servers, mut library_texts) = (None, 1, 0);
    for record in records {
        let name = record["name"].as_str().unwrap();
        if group_of(name) != group {
            (group, servers, server) = (group_of(name), servers + 1, serve(Limits::default()));
        }
        let (request, want) = (&record["request"], &record["response"]);
        let body = match (&request["json"], &request["raw"]) {
            (Value::Null, Value::Null) => None,
            (_, Value::String(_)) if name == "body_over_1MiB_413" => {
                Some(format!("{{\"bootstrap_rooms\":[{}1]}}", "1,".repeat(600_000)))
            }
            (_, Value::String(raw)) => Some(raw.clone()),
            (json, _) => Some(json.to_string()),
        };
        let method = request["method"].as_str().unwrap();
        let got = exchange(server.local_addr(), method, request["path"].as_str().unwrap(), body.as_deref());

        let (status, text) = (want["status"].as_u64().unwrap(), want["body"].as_str().unwrap());
        assert_eq!(u64::from(got.status), status, "{name}: {}", got.body);
        assert_eq!(got.content_type, want["content_type"].as_str().unwrap(), "{name}");
        if SAYS_MORE.contains(&name) {
            assert!(got.body.starts_with(text) && got.body.len() > text.len(), "{name}: {}", got.body);
        } else if status == 200 && text.starts_with('{') {
            let values = [&got.body, text].map(|t| serde_json::from_str::<Value>(t).unwrap());
            assert_eq!(values[0], values[1], "{name}");
        } else {
            assert_eq!(got.body, text, "{name}");
        }
        library_texts += usize::from(matches!(status, 405 | 413 | 500) || name == "not_found");
    }
    assert_eq!((servers, library_texts), (6, LIBRARY_TEXTS));
}

/// Negative control for `put_reregister_same_rank` (hazard 6 of 0.5.23): a rank that registers twice does not open the
/// server for the rank that is missing.
#[test]
fn r_h1_reregistering_does_not_open_the_server_early() {
    let file: Value = serde_json::from_str(include_str!("../../kv-testkit/vectors/bootstrap_http.json")).unwrap();
    let put = &file["vectors"][7];
    assert_eq!(put["name"], "put_tp0_of_2");
    let (row, path) = (
        put["request"]["json"].to_string(),
        "/route?prefill_dp_rank=-1&prefill_cp_rank=-1&target_tp_rank=-1&target_pp_rank=-1",
    );
    let server = serve(Limits::default());
    for _ in 0..3 {
        assert_eq!(exchange(server.local_addr(), "PUT", "/route", Some(&row)).status, 200);
    }
    let info = exchange(server.local_addr(), "GET", path, None);
    // 0.5.23 counts three PUTs and answers 200.
    assert_eq!((info.status, &*info.body), (503, "Prefill server not fully registered yet (1 workers registered)."));
}

#[test]
fn methods_beyond_the_vectors() {
    let server = serve(Limits::default());
    let ask = |method: &str, path: &str| exchange(server.local_addr(), method, path, None);
    let head = ask("HEAD", "/health");
    assert_eq!((head.status, &*head.body), (200, ""));
    assert_eq!((ask("POST", "/route").status, ask("HEAD", "/route").status), (405, 405));
    assert_eq!((ask("DELETE", "/query_dp_ranks").status, ask("PUT", "/health").status), (405, 405));
    let bare = exchange(server.local_addr(), "POST", "/query_dp_ranks", Some("[]"));
    assert_eq!(bare.status, 500);
    // Bytes that are no text, and a query that is no number.
    assert_eq!(
        ask("GET", "/route?prefill_dp_rank=%FF&prefill_cp_rank=0&target_tp_rank=0&target_pp_rank=0").status,
        500
    );
}

#[test]
fn bodies_are_bounded_by_the_limits() {
    let server = serve(Limits { max_http_body: 64, ..Limits::default() });
    let body = |rooms: usize| format!("{{\"bootstrap_rooms\":[{}1]}}", "1,".repeat(rooms));
    let post = |body: &str| exchange(server.local_addr(), "POST", "/query_dp_ranks", Some(body));
    assert_eq!(post(&body(10)).status, 200);
    let refused = post(&body(40));
    assert_eq!((refused.status, &*refused.body), (413, "Maximum request body size 64 exceeded."));
    assert_eq!(exchange(server.local_addr(), "PUT", "/route", Some(&"x".repeat(200))).status, 413);
}

#[test]
fn tables_are_bounded_by_the_limits() {
    let limits = Limits { max_registry_rows: 4, max_dp_rooms: 2, ..Limits::default() };
    let server = serve(limits);
    let post = |room: u64| {
        let body = format!("{{\"bootstrap_room\":{room},\"dp_rank\":0}}");
        exchange(server.local_addr(), "POST", "/register_dp_rank", Some(&body)).status
    };
    assert_eq!([post(1), post(2), post(3), post(1)], [200, 200, 503, 200]);
    let file: Value = serde_json::from_str(include_str!("../../kv-testkit/vectors/bootstrap_http.json")).unwrap();
    let mut row = file["vectors"][7]["request"]["json"].clone();
    row["attn_tp_size"] = 8.into();
    let refused = exchange(server.local_addr(), "PUT", "/route", Some(&row.to_string()));
    assert_eq!(refused.status, 400);
    assert!(refused.body.contains("8 ranks") && refused.body.contains("at most 4"), "{}", refused.body);
}

/// What P PUTs: the same keys in the same order, at the same URL, whatever the host.
#[test]
fn r_h1_all_6_registration_payloads() {
    let text = include_str!("../../kv-testkit/vectors/bootstrap_register_payload.json");
    let file: Value = serde_json::from_str(text).unwrap();
    let records = file["vectors"].as_array().unwrap();
    assert_eq!(records.len(), 6);
    for record in records {
        let name = record["name"].as_str().unwrap();
        let [request] = record["requests"].as_array().unwrap().as_slice() else { panic!("{name}") };
        let row = match name {
            "wildcard_v4" => PrefillRow { attn_tp_size: 2, attn_tp_rank: 1, ..basic_row() },
            "multi_node" => PrefillRow { pp_size: 2, pp_rank: 1, ..basic_row() },
            "cp_tp_group_sharing" => {
                PrefillRow { attn_cp_size: 4, attn_cp_rank: 3, ..basic_row() }.with_cp_tp_group_sharing()
            }
            _ => basic_row(),
        };
        let sent = serde_json::to_string(&row).unwrap();
        assert_eq!(serde_json::from_str::<Value>(&sent).unwrap(), request["json"], "{name}");
        assert_eq!(PrefillRow::from_json(sent.as_bytes()).unwrap(), row, "{name}");
        let addr =
            registration_addr(record["host"].as_str().unwrap(), record["dist_init_addr"].as_str(), 8998).unwrap();
        assert_eq!(format!("http://{addr}/route"), request["url"].as_str().unwrap(), "{name}");
        assert_eq!(
            (request["method"].as_str(), request["timeout"].as_u64()),
            (Some("PUT"), Some(REQUEST_TIMEOUT.as_secs()))
        );
    }
}

fn basic_row() -> PrefillRow {
    PrefillRow {
        attn_tp_size: 1,
        attn_tp_rank: 0,
        attn_cp_size: 1,
        attn_cp_rank: 0,
        attn_dp_size: 1,
        attn_dp_rank: 0,
        pp_size: 1,
        pp_rank: 0,
        system_dp_size: 1,
        system_dp_rank: 0,
        rank_ip: "10.0.0.7".into(),
        rank_port: 41234,
        page_size: 16,
        kv_cache_dtype: "bfloat16".into(),
        kv_layout: None,
        dsv41_spec_layout: None,
        load_balance_method: "follow_bootstrap_room".into(),
        enable_dsa_cache_layer_split: false,
        enable_kv_cache_sharding: false,
        prefill_http_port: Some(30000),
        decode_allocation_policy: "early".into(),
        ext: None,
    }
}

/// The bytes the client puts on the wire, seen by a socket that knows no HTTP.
#[test]
fn r_h1_the_client_sends_the_recorded_body() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let seen = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let (mut text, mut buffer) = (String::new(), [0u8; 4096]);
        loop {
            let n = stream.read(&mut buffer).unwrap();
            assert!(n > 0, "{text}");
            text += std::str::from_utf8(&buffer[..n]).unwrap();
            let Some((head, body)) = text.split_once("\r\n\r\n") else { continue };
            let length = head.lines().find_map(|l| l.strip_prefix("content-length: ")).unwrap();
            if body.len() == length.parse::<usize>().unwrap() {
                break;
            }
        }
        stream.write_all(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nOK").unwrap();
        text
    });
    runtime().block_on(async { HttpRegistry::new().unwrap().register(&addr, &basic_row()).await.unwrap() });
    let text = seen.join().unwrap();
    let (head, body) = text.split_once("\r\n\r\n").unwrap();
    assert!(head.starts_with("PUT /route HTTP/1.1\r\n") && head.contains(&format!("host: {addr}")), "{head}");
    assert!(body.starts_with(r#"{"attn_tp_size":1,"attn_tp_rank":0,"#), "{body}");
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// Never a key 0.5.23's decode does not know: it would throw the whole answer away.
#[test]
fn r_h1_the_parallel_info_has_exactly_the_known_keys() {
    let known = [
        "attn_cp_size",
        "attn_tp_size",
        "decode_allocation_policy",
        "dp_size",
        "dsv41_spec_layout",
        "enable_dsa_cache_layer_split",
        "enable_kv_cache_sharding",
        "follow_bootstrap_room",
        "kv_cache_dtype",
        "kv_layout",
        "page_size",
        "pp_size",
        "prefill_http_port",
        "required_dst_info_num",
        "required_prefill_response_num",
        "target_cp_ranks",
        "target_pp_ranks",
        "target_tp_rank",
        "target_tp_ranks",
    ];
    let mut row = basic_row();
    (row.kv_layout, row.dsv41_spec_layout) = (Some("v4".into()), Some(serde_json::json!({"a": 1})));
    let info = ParallelInfo::of(&row);
    let json = serde_json::to_value(&info).unwrap();
    let mut keys: Vec<_> = json.as_object().unwrap().keys().map(String::as_str).collect();
    keys.sort_unstable();
    assert_eq!(keys, known);
    assert_eq!(ParallelInfo::from_json(json.to_string().as_bytes()), Ok(info));
    // A later server's key does not stop ours, a missing one does.
    let mut more = json.clone();
    more["kv_future"] = 1.into();
    assert!(ParallelInfo::from_json(more.to_string().as_bytes()).is_ok());
    for key in
        ["attn_tp_size", "attn_cp_size", "dp_size", "pp_size", "page_size", "kv_cache_dtype", "follow_bootstrap_room"]
    {
        let mut less = json.clone();
        less.as_object_mut().unwrap().remove(key);
        assert_eq!(ParallelInfo::from_json(less.to_string().as_bytes()), Err(format!("{key} is missing")));
    }
}
