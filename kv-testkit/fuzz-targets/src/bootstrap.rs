//! The bootstrap registry: its JSON from both sides, and its routes.

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request};
use kv_core::bootstrap::server::{BootstrapConfig, router};
use kv_core::bootstrap::types::*;
use kv_core::bootstrap::{RegistryTable, TableConfig, address};
use kv_core::ids::ProcessGeneration;
use kv_core::time::Timestamp;
use kv_core::wire::ExtPeer;
use kv_testkit::vectors;
use serde_json::Value;
use tower::ServiceExt as _;

use crate::input::Input;

/// Keys and values of the JSON.
pub const WORDS: &[&[u8]] = &[
    b"\"attn_tp_size\":",
    b"\"attn_tp_rank\":",
    b"\"attn_cp_size\":",
    b"\"attn_dp_size\":",
    b"\"pp_size\":",
    b"\"system_dp_size\":",
    b"\"rank_ip\":",
    b"\"rank_port\":",
    b"\"page_size\":",
    b"\"kv_cache_dtype\":",
    b"\"kv_layout\":",
    b"\"dsv41_spec_layout\":",
    b"\"load_balance_method\":",
    b"\"follow_bootstrap_room\"",
    b"\"decode_allocation_policy\":",
    b"\"bootstrap_room\":",
    b"\"bootstrap_rooms\":[",
    b"\"dp_rank\":",
    b"null",
    b"true",
    b"1e300",
    b"-1",
    b"\"1_0\"",
    b"prefill_dp_rank=",
    b"target_tp_rank=",
    b"%2d1",
    b"[::1]:",
    b"fe80::1%e",
];

/// One body, by the parser that the first byte names.
pub fn json(data: &[u8]) {
    let mut input = Input::new(data);
    let kind = input.below(9);
    let body = input.rest();
    match kind {
        0 => {
            if let Ok(row) = PrefillRow::from_json(body) {
                let text = serde_json::to_vec(&row).expect("a row is JSON");
                assert_eq!(PrefillRow::from_json(&text).as_ref(), Ok(&row));
                let info = serde_json::to_vec(&ParallelInfo::of(&row)).expect("an answer is JSON");
                ParallelInfo::from_json(&info).expect("the answer of a server with a good row");
            }
        }
        1 => {
            if let Ok(info) = ParallelInfo::from_json(body) {
                let text = serde_json::to_vec(&info).expect("an answer is JSON");
                assert_eq!(ParallelInfo::from_json(&text), Ok(info));
            }
        }
        2 => {
            if let Ok(found) = RankAddress::from_json(body) {
                let text = serde_json::to_vec(&found).expect("an answer is JSON");
                assert_eq!(RankAddress::from_json(&text).as_ref(), Ok(&found));
                assert_eq!(found.endpoint().port(), found.rank_port);
            }
        }
        3 => {
            if let Ok(entry) = RegisterDpRank::from_json(body) {
                let text = serde_json::to_vec(&entry).expect("a body is JSON");
                assert_eq!(RegisterDpRank::from_json(&text), Ok(entry));
            }
        }
        4 => {
            if let Ok(query) = QueryDpRanks::from_json(body) {
                let text = serde_json::to_vec(&query).expect("a body is JSON");
                assert_eq!(QueryDpRanks::from_json(&text), Ok(query));
            }
        }
        5 => drop(dp_ranks_from_json(body)),
        6 => {
            if let Ok(text) = std::str::from_utf8(body)
                && let Ok((host, port)) = address::split_host_port(text)
            {
                let joined = address::join_host_port(host, port);
                assert_eq!(address::split_host_port(&joined), Ok((host, port)), "{text:?} -> {joined:?}");
                let registered = address::registration_addr("::", Some(text), port).expect("a good address");
                assert!(address::split_host_port(&registered).is_ok(), "{registered:?}");
            }
        }
        7 => table(body),
        _ => {
            if let Some(peer) = ExtPeer::from_text(&String::from_utf8_lossy(body)) {
                assert_eq!(ExtPeer::from_text(&peer.to_text()), Some(peer));
            }
        }
    }
}

/// Rows, a line each, put into a small table.
fn table(body: &[u8]) {
    let config = TableConfig { max_rows: 8, max_dp_rooms: 4, max_text_bytes: 64, ..TableConfig::default() };
    let mut table = RegistryTable::new(config);
    let mut now = Timestamp::ZERO;
    for line in body.split(|b| *b == b'\n') {
        now = now + std::time::Duration::from_secs(line.len() as u64);
        if let Ok(row) = PrefillRow::from_json(line)
            && table.register(now, &row).is_ok()
            && table.parallel_info().is_ok()
        {
            let key = row.key();
            let [dp, cp, tp, pp] = [key.dp, key.cp, key.tp, key.pp].map(i128::from);
            assert_eq!(table.rank_address(dp, cp, tp, pp), Ok(&row.address()), "a ready table has what was just put");
        }
        if let Ok(entry) = RegisterDpRank::from_json(line) {
            let known = table.register_dp_rank(now, entry.bootstrap_room, entry.dp_rank).is_ok();
            let found = table.query_dp_ranks(now, &[entry.bootstrap_room]);
            assert!(!known || found == [(entry.bootstrap_room, entry.dp_rank)]);
        }
        assert!(table.rows() <= 8 && table.dp_rooms() <= 4);
    }
}

fn config() -> BootstrapConfig {
    let table = TableConfig { max_rows: 8, max_dp_rooms: 4, max_text_bytes: 64, ..TableConfig::default() };
    BootstrapConfig { max_body: 4096, table }
}

thread_local! {
    static RUNTIME: tokio::runtime::Runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
}

/// Requests, a line each, to one server: method (of a list), path and query, a tab, and the body.
pub fn http(data: &[u8]) {
    RUNTIME.with(|runtime| runtime.block_on(requests(data)));
}

const METHODS: [Method; 6] = [Method::GET, Method::PUT, Method::POST, Method::HEAD, Method::DELETE, Method::PATCH];

async fn requests(data: &[u8]) {
    let app = router(config());
    for line in data.split(|b| *b == b'\n').take(64) {
        let Some((method, rest)) = line.split_first() else { continue };
        let method = METHODS[usize::from(*method) % METHODS.len()].clone();
        let (path, body) = match rest.iter().position(|b| *b == b'\t') {
            Some(at) => (&rest[..at], &rest[at + 1..]),
            None => (rest, &rest[..0]),
        };
        let request = Request::builder().method(&method).uri(path).body(Body::from(body.to_vec()));
        // The HTTP library refuses such a line before any handler sees it.
        let Ok(request) = request else { continue };
        let answer = exchange(&app, request).await;
        assert!(answer != 500 || path.starts_with(b"/"), "{method} {path:?}");
        assert!([200, 400, 404, 405, 413, 500, 503].contains(&answer), "{answer} to {method} {path:?}");
    }
    let health = Request::builder().uri("/health").body(Body::empty()).expect("a request");
    assert_eq!(exchange(&app, health).await, 200, "it is still there");
}

async fn exchange(app: &Router, request: Request<Body>) -> u16 {
    let Ok(answer) = app.clone().oneshot(request).await;
    let status = answer.status().as_u16();
    let is_json = answer.headers().get("content-type").is_some_and(|t| t.as_bytes().starts_with(b"application/json"));
    let body = axum::body::to_bytes(answer.into_body(), 1 << 20).await.expect("a whole answer");
    if is_json && status == 200 && !body.is_empty() {
        serde_json::from_slice::<Value>(&body).expect("an answer that says it is JSON");
    }
    status
}

fn row(change: &[(&str, Value)]) -> Vec<u8> {
    let file = vectors::load("bootstrap_register_payload");
    let mut row = file.get(0).list("requests")[0]["json"].clone();
    for (key, value) in change {
        row[*key] = value.clone();
    }
    row.to_string().into_bytes()
}

/// Recorded bodies and answers, each by its own parser.
pub fn json_seeds() -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    let file = vectors::load("bootstrap_register_payload");
    for record in file.records() {
        for request in record.list("requests") {
            let body = request["json"].to_string();
            if body.contains("rank_ip") {
                out.push([b"\0", body.as_bytes()].concat());
            }
        }
    }
    let file = vectors::load("bootstrap_http");
    for record in file.records() {
        let (request, response) = (record.field("request"), record.field("response"));
        let path = request["path"].as_str().unwrap_or_default();
        let sent = request["json"].to_string();
        let answer = match &response["body"] {
            Value::String(text) => text.clone(),
            value => value.to_string(),
        };
        let kinds: &[(u8, &str)] = match path {
            "/register_dp_rank" => &[(3, &sent)],
            "/query_dp_ranks" => &[(4, &sent), (5, &answer)],
            p if p.starts_with("/route?") => &[(1, &answer), (2, &answer)],
            _ => &[(0, &sent)],
        };
        out.extend(kinds.iter().map(|(kind, text)| [&[*kind][..], text.as_bytes()].concat()));
    }
    for text in ["10.0.0.7:8998", "[::1]:80", "[fe80::1%eth0]:1", "p.example:65535"] {
        out.push([b"\x06", text.as_bytes()].concat());
    }
    out.push([b"\x08", ExtPeer::new(ProcessGeneration(u128::MAX)).to_text().as_bytes()].concat());
    // Two ranks of one server, then another server, then a room.
    let rows = [
        row(&[("attn_tp_rank", 0.into())]),
        row(&[("attn_tp_rank", 1.into())]),
        row(&[("attn_tp_size", 1.into()), ("attn_tp_rank", 0.into())]),
        br#"{"bootstrap_room":7,"dp_rank":1}"#.to_vec(),
    ];
    out.push([b"\x07", &rows.join(&b'\n')[..]].concat());
    out
}

/// The recorded exchange, in pieces, and a registration with everything asked afterwards.
pub fn http_seeds() -> Vec<Vec<u8>> {
    let line = |method: &str, path: &str, body: &str| {
        let method = METHODS.iter().position(|m| m.as_str() == method).unwrap_or(0) as u8;
        [&[method][..], path.as_bytes(), b"\t", body.as_bytes()].concat()
    };
    let file = vectors::load("bootstrap_http");
    let lines: Vec<Vec<u8>> = file
        .records()
        .map(|record| {
            let request = record.field("request");
            let text = |key: &str| request[key].as_str().unwrap_or_default().to_owned();
            let body = if request["json"].is_null() { text("raw") } else { request["json"].to_string() };
            line(&text("method"), &text("path"), &body.replace('\n', " "))
        })
        .collect();
    let mut out: Vec<_> = lines.chunks(8).map(|chunk| chunk.join(&b'\n')).collect();
    let put = |rank: u32| {
        let row = row(&[("attn_tp_rank", rank.into())]);
        line("PUT", "/route", &String::from_utf8_lossy(&row))
    };
    let get = |numbers: [i32; 4]| {
        let [dp, cp, tp, pp] = numbers;
        let path = format!("/route?prefill_dp_rank={dp}&prefill_cp_rank={cp}&target_tp_rank={tp}&target_pp_rank={pp}");
        line("GET", &path, "")
    };
    let room = line("POST", "/register_dp_rank", r#"{"bootstrap_room":7,"dp_rank":1}"#);
    let ask = line("POST", "/query_dp_ranks", r#"{"bootstrap_rooms":[7,"8"]}"#);
    out.push([put(0), put(1), get([-1; 4]), get([0, 0, 1, 0]), room, ask].join(&b'\n'));
    out
}
