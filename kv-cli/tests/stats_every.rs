//! `--stats-every`: what a rank of two machines counts, on standard output before the result.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, Command, Stdio};

use kv_cli::driver::stats::RankStats;
use serde_json::Value;

/// A model small enough for a debug build.
const CONFIG: &str =
    r#"{"name":"tiny","num_hidden_layers":4,"num_key_value_heads":4,"head_dim":16,"dtype":"bfloat16"}"#;

fn kvt(model: &str, args: &[&str]) -> Child {
    let common = ["--json", "--model", model, "--pool-mib", "16", "--requests", "4", "--stats-every", "1"];
    Command::new(env!("CARGO_BIN_EXE_kvt"))
        .args([args, &common].concat())
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap()
}

/// The numbers it said, and the result: the last line, and one alone.
fn said(stdout: &[u8]) -> (Vec<RankStats>, Value) {
    let mut lines: Vec<Value> =
        String::from_utf8_lossy(stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let result = lines.pop().unwrap();
    assert_eq!(result["ok"], true, "{result}");
    let numbers = lines.into_iter().map(|mut line| {
        assert_eq!(line.as_object().unwrap().len(), 1, "{line}");
        serde_json::from_value(line["stats"].take()).unwrap()
    });
    (numbers.collect(), result)
}

#[test]
fn r_i1_numbers_come_before_the_result_and_the_result_is_the_last_line() {
    let mut model = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    model.write_all(CONFIG.as_bytes()).unwrap();
    let model = model.path().to_str().unwrap();
    let mut prefill = kvt(model, &["prefill", "--serve-bootstrap", "127.0.0.1:0"]);
    let mut lines = BufReader::new(prefill.stderr.take().unwrap()).lines();
    let at = lines.find_map(|line| line.unwrap().strip_prefix("bootstrap server on ").map(str::to_owned)).unwrap();
    let rest = std::thread::spawn(move || lines.map_while(Result::ok).count());
    let decode = kvt(model, &["decode", "--bootstrap", &at]).wait_with_output().unwrap();
    let prefill = prefill.wait_with_output().unwrap();
    rest.join().unwrap();
    for out in [&decode, &prefill] {
        let (numbers, result) = said(&out.stdout);
        let last = numbers.last().unwrap();
        // Rooms that carry no request are counted too.
        assert!(last.get("rooms_succeeded") > result["rooms"].as_u64().unwrap(), "{last:?}");
        let held = ["rooms_failed", "rooms_awaiting_release", "ops_in_flight", "ops_retained"].map(|n| last.get(n));
        assert_eq!((held, last.retained_oldest_s), ([0; 4], 0.0), "{last:?}");
    }
}
