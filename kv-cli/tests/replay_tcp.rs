//! Whole runs of the program over the embedded transport, ranks as processes.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod whole_run;

use whole_run::{CONFIG, MLA, replay};

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
