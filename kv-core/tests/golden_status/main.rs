//! SGLang 0.5.23's recorded state machines (`status_and_abort`, `sender_send`), step by step through the real rooms and
//! shards. A record of a fault is a negative control: ours differs, and the test says how and by which requirement.
// A test reports by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod abort;
mod conclude;
mod send;
mod status;
mod support;

use kv_testkit::vectors::{VectorFile, load};

#[test]
fn every_record_is_looked_at_or_listed() {
    let file: VectorFile = load("status_and_abort");
    for (name, count) in [
        ("update_status", 30),
        ("apply_prefill_status", 10),
        ("conclude_transfer", 7),
        ("deferred_abort_prefill", 32),
        ("deferred_abort_decode", 1),
        // Not yet: prefill's side of decode_allocation_policy = prefill_complete (protocol 11) is not offered; the
        // prefill row always says `early`, and a BOOTSTRAP message is counted as a violation.
        ("DeferredBootstrap", 1),
    ] {
        file.select("fn", name, count);
    }
    file.assert_all_used(81);
}
