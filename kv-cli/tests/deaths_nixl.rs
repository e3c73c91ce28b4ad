//! Ranks that are killed while bytes are moving over NIXL: as `deaths.rs` has it for the embedded transport.
#![cfg(feature = "nixl")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod nixl_here;
#[allow(dead_code)] // shared with other drills
mod support;

use kv_cli::driver::protocol::{BootstrapAt, Role};
use nixl_here::available;
use support::rules::{again, failed, releases, under_way};
use support::{Way, kills, rules, sources, until_in_the_middle_of};

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

#[test]
fn r_f5_cat_f55_writes_to_a_killed_decode_are_let_go_of_by_proof_of_its_death_over_nixl() {
    if available("r_f5_cat_f55_writes_to_a_killed_decode_are_let_go_of_by_proof_of_its_death_over_nixl") {
        WAYS.into_iter().for_each(|way| until_in_the_middle_of(way, rules::writes_to_a_killed_decode));
    }
}

/// The library says nothing of writes that come in, so the end of prefill's process is no proof here: the pages stay held
/// for the 30 s of the policy, and their release is counted as one without proof. Then they are used again.
#[test]
fn r_f4_cat_f20_pages_of_a_killed_prefill_come_back_by_policy_and_are_counted_over_nixl() {
    if !available("r_f4_cat_f20_pages_of_a_killed_prefill_come_back_by_policy_and_are_counted_over_nixl") {
        return;
    }
    let attempt = |way| {
        let (mut drill, prefill, at, decode) = under_way(way);
        drill.signal(prefill, libc::SIGKILL);
        drill.killed(prefill);
        let lost = failed(&mut drill, decode, "Lost connection with prefill instance");
        let n = lost.len() as u64;
        if n == 0 {
            return false;
        }
        let held = drill.until(decode, "not every room is held", |s| s.get("rooms_awaiting_release") == n);
        assert_eq!(releases(&held), (0, 0), "{held:?}");
        drill.until(decode, "rooms are held", |s| s.get("rooms_awaiting_release") == 0);
        let free = drill.numbers(decode);
        assert_eq!((free.get("rooms_failed"), releases(&free)), (n, (0, n)), "{free:?}");
        for (room, _) in &lost {
            drill.released(decode, *room);
        }
        drill.fetch_done(decode);

        let (next, _) = drill.start(Role::Prefill, BootstrapAt::Serve(at));
        drill.fill(next, &sources(72));
        again(&mut drill, next, decode, &lost);
        true
    };
    // It waits most of the time: both ways at once.
    std::thread::scope(|threads| {
        for way in WAYS {
            threads.spawn(move || until_in_the_middle_of(way, attempt));
        }
    });
}
