//! Rooms that are given up. Of three rooms 101 is; the others succeed.

use super::super::case::Outcome::{Either, Failed};
use super::super::case::{Case, Fail, Mark, Step, When, Who};
use super::super::program::Program::{Ours, Sglang};

/// What SGLang's decode may say instead of its own reason: prefill's answer to its ABORT overwrites that (hazard 4).
const OVERWRITTEN: &str = "Aborted by decode-side abort notification.";
/// The side that aborts says so.
const ABORTED: Fail = Fail::says(&["Aborted by AbortReq.", OVERWRITTEN], &["aborted by abortreq."]);
/// Prefill says that decode aborted.
const BY_DECODE: Fail = Fail::says(&["Aborted by decode-side abort notification."], &["abort"]);
const TIMED_OUT: Fail = Fail::says(&["timed out", OVERWRITTEN], &["timed out"]);
/// What decode says of a failure that prefill told it of.
const TOLD: Fail = Fail::says(&["abort", "Abort"], &["abort"]);

const SILENT: &str = "SGLang's prefill tells decode nothing; its timeout ends the room";

pub fn cases() -> Vec<Case> {
    vec![
        by_prefill("abort-prefill-unsent", "prefill aborts a room before its first chunk", "--abort-at before-send"),
        by_prefill("abort-prefill-chunk-2", "prefill aborts a room after two chunks", "--abort-at after-chunk:2"),
        by_decode(
            "abort-decode-waiting",
            "decode aborts a room before its metadata: ABORT without generation",
            "",
            "--d-abort-at before-metadata",
            ABORTED,
        ),
        by_decode(
            "abort-decode-hanging",
            "decode aborts a room of which prefill stopped sending: ABORT with generation, ABORT_ACK",
            "--chunk-pages 4 --abort-at hang:2 --abort-rooms 101",
            "--d-abort-at after-metadata:300",
            ABORTED.ack_between(0.0, 5000.0),
        ),
        by_decode(
            "abort-decode-transferring",
            "decode aborts a room between its chunks",
            "--chunk-pages 1 --chunk-delay-ms 60",
            "--d-abort-at after-metadata:400",
            ABORTED.ack_between(0.0, 5000.0),
        ),
        Case::new("abort-decode-two-acks", "prefill TP 2, MLA: the dummy rank's ACK counts too")
            .prefill("--tp-size 2 --chunk-pages 4 --abort-at hang:2 --abort-rooms 101")
            .decode("--d-abort-at after-metadata:300 --d-abort-rooms 101 --d-linger 1")
            .rule(Who::Decode, "101", Failed(ABORTED.ack_between(0.0, 5000.0).acks(2)))
            .rule(Who::Prefill, "101", Either(BY_DECODE)),
        Case::new("abort-ack-awaited", "a prefill that stands still gives no ACK; decode waits for it")
            .prefill("--chunk-pages 4 --abort-at hang:2 --abort-rooms 101")
            .decode("--d-abort-at after-metadata:3000 --d-abort-rooms 101")
            .script(&[
                Step::Start(Who::Prefill),
                Step::Seen(Who::Prefill, Mark::Ready),
                Step::Start(Who::Decode),
                Step::Seen(Who::Prefill, Mark::Room(100)),
                Step::Seen(Who::Prefill, Mark::Room(102)),
                // The chunks that 101 has are written.
                Step::Pause(0.5),
                Step::Stop(Who::Prefill),
                Step::Pause(5.0),
                Step::Continue(Who::Prefill),
            ])
            .rule(Who::Decode, "101", Failed(ABORTED.ack_between(1000.0, 9000.0)))
            .rule(Who::Prefill, "101", Failed(BY_DECODE)),
        Case::new("abort-then-more", "rooms after an aborted one succeed, one after the other")
            .both("--rooms 100:6 --concurrency 1")
            .prefill("--chunk-pages 4 --abort-at hang:2 --abort-rooms 101,103")
            .decode("--d-abort-at after-metadata:300 --d-abort-rooms 101,103")
            .rule(Who::Decode, "101,103", Failed(ABORTED.acked()))
            .rule(Who::Prefill, "101,103", Failed(BY_DECODE)),
        Case::new("abort-rooms-16", "every second of 16 rooms is aborted while chunks are written")
            .both("--rooms 100:16 --layers 8")
            .prefill("--chunk-pages 1 --chunk-delay-ms 30")
            .decode("--d-abort-at after-metadata:200 --d-abort-rooms 100,102,104,106,108,110,112,114")
            .rule(Who::Decode, EVEN, Failed(ABORTED.ack_between(0.0, 5000.0)))
            .rule(Who::Prefill, EVEN, Failed(BY_DECODE)),
        Case::new("timeout-decode", "prefill stops sending: decode gives up after 3 s, pages are back on ACK")
            .prefill("--chunk-pages 4 --abort-at hang:2 --abort-rooms 101")
            .decode("--wait-timeout 3")
            .rule(Who::Decode, "101", Failed(TIMED_OUT.ack_between(0.0, 5000.0).by_ms(6000.0)))
            .rule(Who::Prefill, "101", Failed(BY_DECODE)),
        Case::new("timeout-prefill", "decode's metadata comes after prefill gave up")
            .both("--rooms 100:1")
            .prefill("--boot-timeout 2")
            .decode("--hold 4 --wait-timeout 3")
            .rule(Who::Prefill, "", Failed(TIMED_OUT))
            .rule_when(When::Prefill(Sglang), Who::Decode, "", Failed(TIMED_OUT))
            .rule_when(When::Prefill(Ours), Who::Decode, "", Failed(Fail::says(&["timed out"], &["timed out"])))
            .note(When::Prefill(Sglang), SILENT),
    ]
}

const EVEN: &str = "100,102,104,106,108,110,112,114";

/// Prefill aborts 101. Ours tells decode; SGLang's does not.
fn by_prefill(name: &'static str, shows: &'static str, options: &str) -> Case {
    Case::new(name, shows)
        .prefill(&format!("--chunk-pages 4 --abort-rooms 101 {options}"))
        .decode("--wait-timeout 4")
        .rule(Who::Prefill, "101", Failed(ABORTED))
        .rule_when(When::Prefill(Sglang), Who::Decode, "101", Failed(TIMED_OUT.acked()))
        .rule_when(When::Prefill(Ours), Who::Decode, "101", Failed(TOLD.by_ms(2500.0)))
        .note(When::Prefill(Sglang), SILENT)
}

/// Decode aborts 101.
fn by_decode(name: &'static str, shows: &'static str, prefill: &str, decode: &str, fail: Fail) -> Case {
    Case::new(name, shows)
        .prefill(prefill)
        .decode(&format!("--d-abort-rooms 101 {decode}"))
        .rule(Who::Decode, "101", Failed(fail))
        .rule(Who::Prefill, "101", Failed(BY_DECODE))
}
