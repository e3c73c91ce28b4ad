//! Whole runs of the program over Mooncake, ranks as processes; and what it says where Mooncake is not.
#![cfg(feature = "mooncake")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod mooncake_here;
#[allow(dead_code)] // shared with the embedded transport's runs
mod whole_run;

use std::process::{Command, Output};

use mooncake_here::available;
use serde_json::Value;
use whole_run::{CONFIG, MLA, replay_with};

fn replay(config: &str, args: &[&str]) -> Value {
    let report = replay_with(config, &[&["--transport", "mooncake"], args].concat(), &[]);
    // The library does not say what comes in, so neither does the report.
    assert_eq!((&report["transport"], &report["path"]), (&"mooncake".into(), &Value::Null), "{report}");
    report
}

fn kvt(args: &[&str], extra: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvt"));
    command.args(args).env_remove("RUST_LOG").env_remove("KV_MOONCAKE_LIB").envs(extra.iter().copied());
    command.output().unwrap()
}

/// A check of `kvt doctor` by its name.
fn doctor(extra: &[(&str, &str)], name: &str) -> Value {
    let out = kvt(&["doctor", "--json"], extra);
    // Whatever the library does happens in children.
    assert!(out.status.success(), "{out:?}");
    let report: Value = serde_json::from_slice(&out.stdout).unwrap();
    report["checks"].as_array().unwrap().iter().find(|c| c["name"] == name).cloned().unwrap_or_default()
}

#[test]
fn every_byte_of_a_trace_arrives_over_several_ranks_of_mooncake() {
    if !available("every_byte_of_a_trace_arrives_over_several_ranks_of_mooncake") {
        return;
    }
    let one = replay(CONFIG, &["--requests", "6"]);
    let many = replay(CONFIG, &["--requests", "6", "--prefill", "tp=2,pp=2", "--decode", "tp=2,pp=2"]);
    assert_eq!((&one["rooms"], &many["rooms"]), (&6.into(), &6.into()));
    assert_eq!(one["bytes"], many["bytes"], "a shape moves no byte more");
    assert!(one["prefix_tokens"].as_u64().unwrap() > 0 && one["fixed_us"].as_u64().unwrap() > 0, "{one}");
}

#[test]
fn mla_and_the_sglang_pattern_over_mooncake() {
    if !available("mla_and_the_sglang_pattern_over_mooncake") {
        return;
    }
    replay(MLA, &["--requests", "4", "--concurrency", "2", "--pages", "ordered"]);
    let shared = ["--pattern", "sglang", "--share-src", "--trace", "synthetic:tokens=1024,shared", "--requests", "4"];
    assert_eq!(replay(MLA, &shared)["prefix_tokens"], 0);
}

#[test]
fn doctor_tries_mooncake_out() {
    if !available("doctor_tries_mooncake_out") {
        return;
    }
    let library = std::env::var("KV_MOONCAKE_LIB").unwrap_or_default();
    let chosen: &[(&str, &str)] = if library.is_empty() { &[] } else { &[("KV_MOONCAKE_LIB", &library)] };
    let check = doctor(chosen, "transport: mooncake");
    assert_eq!(check["status"], "ok", "{check}");
    let detail = check["detail"].as_str().unwrap();
    for part in ["8 MiB", "every byte verified", "libtransfer_engine.so", "Mooncake ", "MC_FORCE_TCP"] {
        assert!(detail.contains(part), "{part}: {detail}");
    }
}

#[test]
fn a_mooncake_that_is_not_there_is_one_line_with_the_cure() {
    let nowhere = [("KV_MOONCAKE_LIB", "/nowhere")];
    let work = ["--requests", "1", "--max-tokens", "64", "--pool-mib", "32"];
    let out = kvt(&[&["demo", "--transport", "mooncake"], &work[..]].concat(), &nowhere);
    let said = String::from_utf8_lossy(&out.stderr);
    assert_eq!(out.status.code(), Some(1), "{said}");
    let line = said.lines().last().unwrap();
    assert!(line.starts_with("kvt: prefill tp0 pp0: cannot start the mooncake transport: "), "{line}");
    for part in ["/nowhere (KV_MOONCAKE_LIB): no such file", "cargo xtask setup mooncake", "BUILD_SHARED_LIBS"] {
        assert!(line.contains(part), "{part}: {line}");
    }
    let check = doctor(&nowhere, "transport: mooncake");
    assert_eq!(check["status"], "no", "{check}");
    assert!(check["fix"].as_str().unwrap().contains("cargo xtask setup mooncake"), "{check}");
}
