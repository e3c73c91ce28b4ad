//! Ranks that are killed while bytes are moving over NIXL: as `deaths.rs` has it for the embedded transport.
#![cfg(feature = "nixl")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod nixl_here;
#[allow(dead_code)] // shared with other drills
mod support;

use nixl_here::available;
use support::{Way, kills, until_in_the_middle_of};

/// Copies of the kernel, which end within the post; and UCX's tcp, whose transfers are under way after it.
const WAYS: [Way; 2] = [Way::Nixl(None), Way::Nixl(Some("tcp"))];

/// F51, R-D7. The survivor goes on with the next prefill at the address.
#[test]
fn prefill_killed_in_the_middle_fails_its_rooms_and_is_replaced_over_nixl() {
    if available("prefill_killed_in_the_middle_fails_its_rooms_and_is_replaced_over_nixl") {
        WAYS.into_iter().for_each(|way| until_in_the_middle_of(way, kills::prefill));
    }
}

/// F53, F55. The end of decode's process is seen, so its rooms' source pages are free, and other decodes are served.
#[test]
fn decode_killed_in_the_middle_frees_the_pages_of_its_rooms_alone_over_nixl() {
    if available("decode_killed_in_the_middle_frees_the_pages_of_its_rooms_alone_over_nixl") {
        WAYS.into_iter().for_each(|way| until_in_the_middle_of(way, kills::decode));
    }
}
