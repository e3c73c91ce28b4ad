//! `kvt peer` against itself over the embedded transport: what the runs beside the real SGLang rely on.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, ExitStatus, Stdio};

use serde_json::Value;

const SMALL: &str = "--backend tcp --layers 2 --pages 4 --page-size 4 --item-len 1024 --heartbeat 2";

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// A peer that runs.
struct Peer {
    child: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
    seen: Vec<Value>,
}

impl Peer {
    fn start(role: &str, port: u16, options: &str) -> Self {
        // Prefill has no heartbeat.
        let small = if role == "decode" { SMALL } else { SMALL.trim_end_matches("--heartbeat 2") };
        let words = format!("{small} --bootstrap-port {port} {options}");
        let mut child = Command::new(env!("CARGO_BIN_EXE_kvt"))
            .args(["peer", role])
            .args(words.split_whitespace())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        Self { child, lines, seen: Vec::new() }
    }

    /// Read up to an event of this name.
    fn until(&mut self, event: &str) -> Value {
        loop {
            let line = self.lines.next().unwrap_or_else(|| panic!("no '{event}' after {:?}", self.seen)).unwrap();
            let value: Value = serde_json::from_str(&line).unwrap();
            self.seen.push(value.clone());
            if value["event"] == event {
                return value;
            }
        }
    }

    fn say(&mut self) {
        self.child.stdin.as_mut().unwrap().write_all(b"go\n").unwrap();
    }

    /// Its status, and all it said.
    fn end(mut self) -> (ExitStatus, Vec<Value>) {
        for line in self.lines.by_ref() {
            self.seen.push(serde_json::from_str(&line.unwrap()).unwrap());
        }
        (self.child.wait().unwrap(), self.seen)
    }
}

fn rooms(events: &[Value], status: &str) -> Vec<u64> {
    let mut rooms: Vec<u64> = events
        .iter()
        .filter(|e| e["event"] == "room" && e["status"] == status)
        .map(|e| e["room"].as_u64().unwrap())
        .collect();
    rooms.sort_unstable();
    rooms
}

/// Both sides; decode's end, then prefill's.
fn pair(common: &str, prefill: &str, decode: &str) -> [(ExitStatus, Vec<Value>); 2] {
    let port = free_port();
    let mut p = Peer::start("prefill", port, &format!("{common} {prefill}"));
    p.until("ready");
    let d = Peer::start("decode", port, &format!("{common} {decode}"));
    [d.end(), p.end()]
}

#[test]
fn chunks_prefixes_and_page_orders_arrive_whole() {
    let common = "--rooms 100:3 --attn mha --heads 4 --page-order shuffled --aux checksum";
    let [(d, said), (p, served)] = pair(common, "--chunk-pages 1", "--decode-prefix-pages 1");
    assert_eq!((d.code(), p.code()), (Some(0), Some(0)), "{said:?} {served:?}");
    assert_eq!(rooms(&said, "Success"), [100, 101, 102]);
    assert!(said.iter().filter(|e| e["event"] == "room").all(|e| e["verified"] == true));
    let summary = said.iter().find(|e| e["event"] == "summary").unwrap();
    // Three rooms of 3 pages x 4 buffers x 1 KiB.
    assert_eq!((summary["success"].as_u64(), summary["bytes"].as_u64()), (Some(3), Some(36_864)), "{summary}");
    assert!(served.iter().filter(|e| e["event"] == "room").all(|e| e["chunks_sent"] == 3), "{served:?}");
}

#[test]
fn the_verifier_objects_to_a_spoiled_byte() {
    for (spoil, corrupt) in [("kv", 1), ("aux", 1), ("stray", 1)] {
        let [(d, said), _] = pair("--rooms 100:2", "", &format!("--self-test-corrupt {spoil}"));
        let summary = said.iter().find(|e| e["event"] == "summary").unwrap();
        assert_eq!((d.code(), summary["corrupt"].as_u64()), (Some(3), Some(corrupt)), "{spoil}: {said:?}");
    }
    // Other bytes than were asked for.
    let [(d, said), _] = pair("--rooms 100:2", "--share-src", "");
    assert_eq!(d.code(), Some(3), "{said:?}");
}

#[test]
fn an_abort_is_told_with_its_reason_and_its_ack() {
    let abort = "--d-abort-at after-metadata:200 --d-abort-rooms 101";
    let [(d, said), (p, served)] = pair("--rooms 100:3", "--chunk-pages 1 --abort-at hang:2 --abort-rooms 101", abort);
    assert_eq!((d.code(), p.code()), (Some(3), Some(3)));
    assert_eq!((rooms(&said, "Success"), rooms(&said, "Failed")), (vec![100, 102], vec![101]));
    let failed = said.iter().find(|e| e["room"] == 101).unwrap();
    assert_eq!((failed["reason"].as_str(), failed["abort_ack"].as_bool()), (Some("Aborted by AbortReq."), Some(true)));
    assert_eq!(failed["required_acks"], 1, "one of ours has a frame more: {failed}");
    let failed = served.iter().find(|e| e["room"] == 101).unwrap();
    assert_eq!(failed["reason"], "Aborted by decode-side abort notification.");
}

#[test]
fn the_gate_holds_rooms_back_until_a_line_comes() {
    let port = free_port();
    let mut p = Peer::start("prefill", port, "--rooms 100:4 --gate 2");
    p.until("ready");
    let mut d = Peer::start("decode", port, "--rooms 100:4 --gate 2");
    assert_eq!((p.until("gate")["room"].as_u64(), d.until("gate")["room"].as_u64()), (Some(102), Some(102)));
    assert_eq!(rooms(&p.seen, "Success"), [100, 101]);
    d.say();
    p.say();
    let ((d, said), (p, _)) = (d.end(), p.end());
    assert_eq!((d.code(), p.code(), rooms(&said, "Success").len()), (Some(0), Some(0), 4));
}

#[test]
fn a_peer_kills_itself_as_kill_9_does() {
    let port = free_port();
    let mut p = Peer::start("prefill", port, "--rooms 100:2 --chunk-pages 1 --abort-at kill:2 --abort-rooms 101");
    p.until("ready");
    let d = Peer::start("decode", port, "--rooms 100:2");
    let ((p, served), (d, said)) = (p.end(), d.end());
    assert_eq!(p.signal(), Some(9));
    assert_eq!(served.last().unwrap()["event"], "kill");
    // Room 100 may have gone with it.
    assert_eq!(d.code(), Some(3));
    assert!(rooms(&said, "Failed").contains(&101), "{said:?}");
}

#[test]
fn every_rank_is_a_process_and_the_worst_status_counts() {
    let common = "--rooms 100:4 --tp-size 2 --all-ranks --attn mha --heads 4";
    let [(d, said), (p, served)] = pair(common, "--dp-size 2 --load-balance-method round_robin --linger 3", "");
    assert_eq!((d.code(), p.code()), (Some(0), Some(0)), "{said:?} {served:?}");
    // Each room at both of decode's ranks, and at two of prefill's four.
    assert_eq!((rooms(&said, "Success").len(), rooms(&served, "Success").len()), (8, 8));
}

#[test]
fn every_rank_hears_sigterm_and_says_how_it_went() {
    let port = free_port();
    let mut p = Peer::start("prefill", port, "--rooms 100:1 --tp-size 2 --all-ranks --serve");
    p.until("ready");
    p.until("ready");
    let pid = p.child.id().cast_signed();
    // SAFETY: no pointers; the child was not waited for.
    assert_eq!(unsafe { libc::kill(pid, libc::SIGTERM) }, 0);
    let (status, said) = p.end();
    assert_eq!(said.iter().filter(|e| e["event"] == "summary").count(), 2, "{said:?}");
    assert_eq!(status.code(), Some(3), "its room never came: {said:?}");
}

/// As the program around SGLang is told its times.
#[test]
fn times_come_from_sglangs_variables_where_no_option_says_otherwise() {
    let started = std::time::Instant::now();
    let variable = "--env SGLANG_DISAGGREGATION_WAITING_TIMEOUT=1";
    let [(d, said), _] = pair("--rooms 100:1", "--abort-at hang:0", variable);
    assert_eq!(d.code(), Some(3));
    let room = said.iter().find(|e| e["room"] == 100 && e["event"] == "room").unwrap();
    assert!(room["reason"].as_str().unwrap().contains("timed out"), "{room}");
    assert!(started.elapsed().as_secs() < 100, "the default is 300 s");
    let odd = "--env SGLANG_DISAGGREGATION_WAITING_TIMEOUT=soon";
    let (status, said) = Peer::start("decode", free_port(), &format!("--rooms 1:1 {odd}")).end();
    let error = said.iter().find(|e| e["event"] == "error").unwrap();
    assert_eq!(status.code(), Some(1));
    assert!(error["reason"].as_str().unwrap().contains("SGLANG_DISAGGREGATION_WAITING_TIMEOUT=soon"), "{error}");
}

#[test]
fn the_conversation_is_captured_and_printed() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().display();
    let [(d, said), _] = pair("--rooms 100:2", "", &format!("--capture {path}"));
    assert_eq!(d.code(), Some(0), "{said:?}");
    let out = Command::new(env!("CARGO_BIN_EXE_kvt"))
        .args(["wire", "decode", "--dialect", "tcp", &path.to_string()])
        .output()
        .unwrap();
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(out.status.success());
    for words in ["send tcp://127.0.0.1:", "registration (decode", "metadata (decode", "recv", "status (prefill"] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn what_cannot_run_is_said_with_a_status_of_its_own() {
    let port = free_port();
    let (none, said) = Peer::start("decode", port, "--rooms 1:1 --connect-timeout 0.2").end();
    assert_eq!((none.code(), said.last().unwrap()["event"].as_str()), (Some(4), Some("error")));
    for (options, says) in
        [("--backend quic", "not built into"), ("--pool-pages 2", "--pool-pages 2"), ("--host-ip 192.0.2.1", "address")]
    {
        let (status, said) = Peer::start("decode", port, options).end();
        let error = said.iter().find(|e| e["event"] == "error").unwrap();
        assert_eq!(status.code(), Some(1), "{options}");
        assert!(error["reason"].as_str().unwrap().contains(says), "{options}: {error}");
    }
    let usage = Command::new(env!("CARGO_BIN_EXE_kvt")).args(["peer", "prefill", "--rooms", "0:1"]).output().unwrap();
    assert_eq!(usage.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&usage.stderr).contains("room 0"), "{usage:?}");
}
