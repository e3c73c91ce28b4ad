//! Whole runs of the program over the embedded transport, ranks as processes.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::io::Write as _;
use std::process::Command;

/// A model small enough for a debug build: 4 layers, 4 KV heads of 16 values.
const CONFIG: &str =
    r#"{"name":"tiny","num_hidden_layers":4,"num_key_value_heads":4,"head_dim":16,"dtype":"bfloat16"}"#;
const MLA: &str =
    r#"{"name":"tiny-mla","num_hidden_layers":4,"kv_lora_rank":48,"qk_rope_head_dim":16,"dtype":"bfloat16"}"#;

fn replay(config: &str, args: &[&str]) -> serde_json::Value {
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    file.write_all(config.as_bytes()).unwrap();
    let out = Command::new(env!("CARGO_BIN_EXE_kvt"))
        .args(["replay", "--json", "--pool-mib", "16", "--model", file.path().to_str().unwrap()])
        .args(args)
        .output()
        .unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let last = stdout.lines().last().unwrap_or_else(|| panic!("no output: {stderr}"));
    let report: serde_json::Value = serde_json::from_str(last).unwrap();
    assert_eq!(out.status.success(), report["ok"] == true, "{stderr}");
    assert_eq!(report["ok"], true, "{report}\n{stderr}");
    assert_eq!((&report["failed"], &report["corrupt"]), (&0.into(), &0.into()));
    report
}

#[test]
fn every_byte_of_a_trace_arrives_over_several_ranks() {
    let one = replay(CONFIG, &["--requests", "6"]);
    let many = replay(CONFIG, &["--requests", "6", "--prefill", "tp=2,pp=2", "--decode", "tp=2,pp=2"]);
    assert_eq!((&one["rooms"], &many["rooms"]), (&6.into(), &6.into()));
    assert_eq!(one["bytes"], many["bytes"], "a shape moves no byte more");
    assert!(one["prefix_tokens"].as_u64().unwrap() > 0 && one["fixed_us"].as_u64().unwrap() > 0, "{one}");
}

#[test]
fn mla_and_the_sglang_pattern() {
    replay(MLA, &["--requests", "4", "--concurrency", "2", "--pages", "ordered"]);
    let shared = ["--pattern", "sglang", "--share-src", "--trace", "synthetic:tokens=1024,shared", "--requests", "4"];
    let report = replay(MLA, &shared);
    assert_eq!(report["prefix_tokens"], 0);
}
