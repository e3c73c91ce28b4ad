//! Whole runs of the program over NIXL, ranks as processes; and what it says where NIXL is not.
#![cfg(feature = "nixl")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod nixl_here;
#[allow(dead_code)] // shared with the embedded transport's runs
mod whole_run;

use std::process::{Command, Output};

use nixl_here::available;
use serde_json::Value;
use whole_run::{CONFIG, MLA, replay_with};

/// What opening the library in this process may have set is left to the program.
fn env(tls: Option<&'static str>) -> [(&'static str, Option<&'static str>); 3] {
    [("UCX_TLS", tls), ("UCX_MODULES", None), ("UCX_LOG_FILE", None)]
}

fn replay(config: &str, args: &[&str], tls: Option<&'static str>) -> Value {
    let report = replay_with(config, &[&["--transport", "nixl"], args].concat(), &env(tls));
    // The library does not say by which way bytes came, so neither does the report.
    assert_eq!((&report["transport"], &report["path"]), (&"nixl".into(), &Value::Null), "{report}");
    report
}

fn kvt(args: &[&str], extra: &[(&str, &str)]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvt"));
    command.args(args);
    ["RUST_LOG", "KV_NIXL_LIB"].into_iter().chain(env(None).map(|(name, _)| name)).for_each(|name| {
        command.env_remove(name);
    });
    command.envs(extra.iter().copied());
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
fn every_byte_of_a_trace_arrives_over_several_ranks() {
    if !available("every_byte_of_a_trace_arrives_over_several_ranks") {
        return;
    }
    for tls in [None, Some("tcp")] {
        let one = replay(CONFIG, &["--requests", "6"], tls);
        let many = replay(CONFIG, &["--requests", "6", "--prefill", "tp=2,pp=2", "--decode", "tp=2,pp=2"], tls);
        assert_eq!((&one["rooms"], &many["rooms"]), (&6.into(), &6.into()));
        assert_eq!(one["bytes"], many["bytes"], "a shape moves no byte more");
        assert!(one["prefix_tokens"].as_u64().unwrap() > 0 && one["fixed_us"].as_u64().unwrap() > 0, "{one}");
    }
}

#[test]
fn mla_and_the_sglang_pattern_over_nixl() {
    if !available("mla_and_the_sglang_pattern_over_nixl") {
        return;
    }
    replay(MLA, &["--requests", "4", "--concurrency", "2", "--pages", "ordered"], None);
    let shared = ["--pattern", "sglang", "--share-src", "--trace", "synthetic:tokens=1024,shared", "--requests", "4"];
    let report = replay(MLA, &shared, Some("tcp"));
    assert_eq!(report["prefix_tokens"], 0);
}

#[test]
fn the_demo_runs_over_nixl_and_its_table_names_it() {
    if !available("the_demo_runs_over_nixl_and_its_table_names_it") {
        return;
    }
    let small = ["--requests", "3", "--max-tokens", "256", "--pool-mib", "64"];
    let out = kvt(&[&["demo", "--transport", "nixl"], &small[..]].concat(), &[]);
    let (table, said) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    assert_eq!(out.status.code(), Some(0), "{said}");
    // Nothing of the library's is between the lines of the result.
    assert!(table.starts_with("model ") && table.contains("every byte verified"), "{table}");
    assert!(table.lines().any(|l| l.split_whitespace().eq(["transport", "nixl"])), "{table}");
}

#[test]
fn doctor_tries_it_out() {
    if !available("doctor_tries_it_out") {
        return;
    }
    let library = std::env::var("KV_NIXL_LIB").unwrap_or_default();
    let chosen: &[(&str, &str)] = if library.is_empty() { &[] } else { &[("KV_NIXL_LIB", &library)] };
    let check = doctor(chosen, "transport: nixl");
    assert_eq!(check["status"], "ok", "{check}");
    let detail = check["detail"].as_str().unwrap();
    for part in ["8 MiB", "every byte verified", "libnixl_capi.so", "plugins: ", "UCX", "UCX_TLS not set"] {
        assert!(detail.contains(part), "{part}: {detail}");
    }
    // A way that leaves UCX nothing to start with is named with its cure.
    let check = doctor(&[chosen, &[("UCX_TLS", "cma")]].concat(), "transport: nixl");
    assert_eq!(
        (&check["status"], &check["fix"]),
        (&"no".into(), &"unset UCX_TLS, or put tcp into it".into()),
        "{check}"
    );
}

#[test]
fn a_library_that_is_not_there_is_one_line_with_the_cure() {
    let nowhere = [("KV_NIXL_LIB", "/nowhere")];
    let work = ["--requests", "1", "--max-tokens", "64", "--pool-mib", "32"];
    for args in [
        &["demo", "--transport", "nixl"][..],
        &["replay", "--transport", "nixl", "--json"],
        &["prefill", "--transport", "nixl", "--serve-bootstrap", "127.0.0.1:0"],
    ] {
        let out = kvt(&[args, &work].concat(), &nowhere);
        let said = String::from_utf8_lossy(&out.stderr);
        assert_eq!(out.status.code(), Some(1), "{said}");
        let line = said.lines().last().unwrap();
        assert!(line.starts_with("kvt: prefill tp0 pp0: cannot start the nixl transport: "), "{line}");
        for part in
            ["/nowhere (KV_NIXL_LIB): no such file", "cargo xtask setup nixl", "pip install --no-deps nixl-cu12==1.5.1"]
        {
            assert!(line.contains(part), "{part}: {line}");
        }
    }
    let check = doctor(&nowhere, "transport: nixl");
    assert_eq!(check["status"], "no", "{check}");
    assert!(check["detail"].as_str().unwrap().contains("/nowhere (KV_NIXL_LIB): no such file"), "{check}");
    assert!(check["fix"].as_str().unwrap().contains("cargo xtask setup nixl"), "{check}");
}

#[cfg(feature = "tcp")]
#[test]
fn the_embedded_transport_does_without_the_library() {
    let args = ["--requests", "2", "--transport", "tcp"];
    let report = replay_with(CONFIG, &args, &[("KV_NIXL_LIB", Some("/nowhere"))]);
    assert_eq!(report["transport"], "tcp");
}
