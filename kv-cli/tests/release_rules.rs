//! The release rules, seen from outside: ranks as processes that are killed, stopped and started again while bytes are
//! moving, and what their managers count meanwhile. A write without proof of quiescence stays counted; pages come back by
//! proof, or by policy, and then that is counted too.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

#[allow(dead_code)] // shared with other drills
mod support;

use kv_cli::driver::fleet::WorkerId;
use kv_cli::driver::protocol::{BootstrapAt, Role, RoomEnd};
use support::rules::{self, accounted, again, failed, knows_all, quiet, releases, under_way};
use support::{Drill, FIRST, LARGE_PAGES, OTHER_PAGES, PATHS, cut, sources, until_in_the_middle, wanted};

/// So many numbers in a row are some heartbeats long, and some looks for proof.
const A_WHILE: usize = 50;

/// The transport sees that the process is gone: that is proof, long before the timeout. The next prefill at the address
/// is another generation: it serves the same numbers into the same pages, and nothing of the old counts against it.
#[test]
fn r_f4_r_f6_cat_f20_cat_f54_pages_of_a_killed_prefill_come_back_by_proof_of_its_death() {
    until_in_the_middle(|path| {
        let (mut drill, prefill, at, decode) = under_way(path);
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
        assert_eq!((free.get("rooms_failed"), releases(&free)), (n, (n, 0)), "{free:?}");
        for (room, _) in &lost {
            drill.released(decode, *room);
        }
        drill.fetch_done(decode);

        let (next, at_again) = drill.start(Role::Prefill, BootstrapAt::Serve(at.clone()));
        assert_eq!(at_again, Some(at));
        drill.fill(next, &sources(72));
        again(&mut drill, next, decode, &lost);
        drill.forget_numbers(next);
        let of_next = drill.until(next, "it is not quiet", quiet);
        let counted =
            ["rooms_succeeded", "rooms_failed", "ops_failed", "ops_unresolved", "aborts_in", "messages_stale"]
                .map(|name| of_next.get(name));
        assert_eq!(counted, [n, 0, 0, 0, 0, 0], "{of_next:?}");
        assert!(accounted(&of_next), "{of_next:?}");
        drill.forget_numbers(decode);
        let of_decode = drill.numbers(decode);
        let ended = (of_decode.get("rooms_succeeded"), of_decode.get("rooms_failed"));
        assert_eq!((ended, releases(&of_decode)), ((wanted().len() as u64, n), (n, 0)), "{of_decode:?}");
        true
    });
}

/// Stop prefill in the middle, and let decode fail its rooms. The rooms; empty: it was too late.
fn stop_prefill(drill: &mut Drill, prefill: WorkerId, decode: WorkerId) -> Vec<(u64, Vec<u32>)> {
    drill.signal(prefill, libc::SIGSTOP);
    let lost = failed(drill, decode, "Lost connection with prefill instance");
    if !lost.is_empty() {
        let n = lost.len() as u64;
        let held = drill.until(decode, "not every room is held", |s| s.get("rooms_awaiting_release") == n);
        assert_eq!(releases(&held), (0, 0), "{held:?}");
        drill.fetch_done(decode);
    }
    lost
}

/// Let prefill go on: everything of the rooms that decode gave up comes to its end there. Then the same again.
fn let_prefill_go_on(drill: &mut Drill, prefill: WorkerId, decode: WorkerId, lost: &[(u64, Vec<u32>)]) {
    for (room, _) in wanted() {
        // What it had not heard of when it was stopped, it may have finished before it did.
        if let RoomEnd::Failed { reason } = drill.end(prefill, room) {
            assert!(reason.contains("Aborted"), "{reason}");
            drill.released(prefill, room);
        }
    }
    drill.forget_numbers(prefill);
    let of_prefill = drill.until(prefill, "it is not quiet", quiet);
    assert!(accounted(&of_prefill), "{of_prefill:?}");
    for (room, _) in lost {
        drill.released(decode, *room);
    }
    again(drill, prefill, decode, lost);
}

/// Silence is no proof, however long: while prefill is stopped, and the policy's time is not over, the pages that it
/// could still write to stay counted. Its own word that it writes no more frees them.
#[test]
fn r_f4_cat_f13_pages_of_a_stopped_prefill_stay_counted_until_it_acks() {
    until_in_the_middle(|path| {
        let (mut drill, prefill, _, decode) = under_way(path);
        let lost = stop_prefill(&mut drill, prefill, decode);
        let n = lost.len() as u64;
        if n == 0 {
            return false;
        }
        drill.hold(decode, A_WHILE, "held without proof", |s| {
            (s.get("rooms_awaiting_release"), releases(s)) == (n, (0, 0))
        });
        drill.signal(prefill, libc::SIGCONT);
        drill.until(decode, "rooms are held", |s| s.get("rooms_awaiting_release") == 0);
        let free = drill.numbers(decode);
        assert_eq!(releases(&free), (n, 0), "{free:?}");
        let_prefill_go_on(&mut drill, prefill, decode, &lost);
        true
    });
}

/// The embedded transport's policy: 30 s after the ABORT pages come back without proof. That is counted, by peer, and what
/// prefill says afterwards releases nothing again.
#[test]
fn r_f4_cat_f20_cat_f21_beyond_the_timeout_pages_come_back_by_policy_and_are_counted() {
    let attempt = |path| {
        let (mut drill, prefill, _, decode) = under_way(path);
        let lost = stop_prefill(&mut drill, prefill, decode);
        let n = lost.len() as u64;
        if n == 0 {
            return false;
        }
        // Nothing comes back by proof on the way there.
        drill.until(decode, "rooms are held", |s| {
            assert_eq!(s.get("released_with_proof"), 0, "{s:?}");
            s.get("rooms_awaiting_release") == 0
        });
        let free = drill.numbers(decode);
        assert_eq!(releases(&free), (0, n), "{free:?}");
        drill.signal(prefill, libc::SIGCONT);
        let_prefill_go_on(&mut drill, prefill, decode, &lost);
        drill.forget_numbers(decode);
        let of_decode = drill.numbers(decode);
        assert_eq!((of_decode.get("rooms_awaiting_release"), releases(&of_decode)), (0, (0, n)), "{of_decode:?}");
        true
    };
    // It waits most of the time: both ways at once.
    std::thread::scope(|threads| {
        for path in PATHS {
            threads.spawn(move || assert!((0..20).any(|_| attempt(path)), "{path:?}: always too late"));
        }
    });
}

/// Prefill has no timeout that would let go of a write, so that nothing is counted any more is proof: the death was seen.
#[test]
fn r_f5_cat_f55_writes_to_a_killed_decode_are_let_go_of_by_proof_of_its_death() {
    until_in_the_middle(rules::writes_to_a_killed_decode);
}

/// Stop decode in the middle; the writes that are outstanding then. 0: it was too late, or too early.
fn stop_decode(drill: &mut Drill, prefill: WorkerId, decode: WorkerId) -> u64 {
    drill.signal(decode, libc::SIGSTOP);
    drill.forget_numbers(prefill);
    // What it had answered before is heard.
    drill.hold(prefill, 5, "a stopped decode fails nothing", |s| s.get("rooms_failed") == 0);
    let stuck = drill.numbers(prefill);
    if knows_all(&stuck) { stuck.get("ops_in_flight") } else { 0 }
}

/// What a stopped decode may still read or write stays counted on prefill; it settles when decode goes on.
#[test]
fn r_f1_cat_f06_writes_to_a_stopped_decode_stay_counted_until_they_are_done() {
    until_in_the_middle(|path| {
        let (mut drill, prefill, _, decode) = under_way(path);
        let outstanding = stop_decode(&mut drill, prefill, decode);
        if outstanding == 0 {
            return false;
        }
        drill.hold(prefill, A_WHILE, "counted while decode is stopped", |s| {
            let unproven = ["rooms_failed", "ops_failed", "ops_unresolved", "peers_lost"].map(|name| s.get(name));
            (s.get("ops_in_flight"), unproven) == (outstanding, [0; 4])
        });
        drill.signal(decode, libc::SIGCONT);
        for (room, pages) in wanted().iter().filter(|(room, _)| *room != FIRST) {
            drill.success(decode, *room);
            drill.success(prefill, *room);
            assert_eq!(pages.len() as u32, LARGE_PAGES);
        }
        drill.fetch_done(decode);
        for (room, pages) in wanted() {
            drill.verify(decode, room, &pages, &sources(pages.len()));
        }
        drill.forget_numbers(prefill);
        let settled = drill.until(prefill, "it is not quiet", quiet);
        assert_eq!(settled.get("ops_posted"), settled.get("ops_done"), "{settled:?}");
        true
    });
}

/// The connections break while decode is stopped: nothing proves that it reads and writes no more. The writes are
/// retained, with their bytes and a growing age, until it answers that the session is over.
#[test]
fn r_f2_r_f5_cat_f13_writes_cut_off_from_a_stopped_decode_are_retained_until_it_answers() {
    if let Err(why) = cut::possible() {
        let name = "r_f2_r_f5_cat_f13_writes_cut_off_from_a_stopped_decode_are_retained_until_it_answers";
        return eprintln!("skipped: {name}: {why}");
    }
    until_in_the_middle(|path| {
        let mut drill = Drill::with_numbers(path);
        let (prefill, at) = drill.prefill();
        let decode = drill.decode(&at);
        let port = cut::transport_port(drill.pid(decode));
        drill.begin(prefill, &[], decode, prefill);
        let outstanding = stop_decode(&mut drill, prefill, decode);
        if outstanding == 0 {
            return false;
        }
        cut::all_to(port);
        let lost = failed(&mut drill, prefill, "");
        let n = lost.len() as u64;
        let retained = drill.until(prefill, "not every write is retained", |s| s.get("ops_retained") == outstanding);
        let bytes = retained.get("bytes_retained");
        assert!(n > 0 && bytes > 0, "{retained:?}");
        let age = std::cell::Cell::new(0.0);
        drill.hold(prefill, A_WHILE, "retained while decode is stopped", |s| {
            let of_peers = s.peers.iter().fold((0, 0), |n, p| (n.0 + p.retained_ops, n.1 + p.retained_bytes));
            (s.get("ops_in_flight"), s.get("ops_retained"), s.get("bytes_retained")) == (0, outstanding, bytes)
                && of_peers == (outstanding, bytes)
                && s.retained_oldest_s > age.replace(s.retained_oldest_s)
        });
        drill.signal(decode, libc::SIGCONT);
        drill.until(prefill, "it is not quiet", quiet);
        for (room, _) in &lost {
            drill.released(prefill, *room);
            assert!(matches!(drill.end(decode, *room), RoomEnd::Failed { .. }));
            drill.released(decode, *room);
        }
        drill.fetch_done(decode);
        drill.forget_numbers(decode);
        let of_decode = drill.numbers(decode);
        assert_eq!((of_decode.get("rooms_awaiting_release"), releases(&of_decode)), (0, (n, 0)), "{of_decode:?}");
        again(&mut drill, prefill, decode, &lost);
        drill.forget_numbers(prefill);
        assert!(accounted(&drill.until(prefill, "it is not quiet", quiet)));
        true
    });
}

/// A decode that is started while the one before it is stopped is another generation (its control socket has a port of
/// its own). It is served while the writes to the old one stay counted; the old one's end touches nothing of it.
#[test]
fn r_f6_cat_f56_a_decode_started_in_place_of_a_stopped_one_has_nothing_of_it_counted_against_it() {
    until_in_the_middle(|path| {
        let mut drill = Drill::with_numbers(path);
        let (prefill, at) = drill.prefill();
        let old = drill.decode(&at);
        drill.begin(prefill, &[(200, OTHER_PAGES)], old, prefill);
        let outstanding = stop_decode(&mut drill, prefill, old);
        if outstanding == 0 {
            return false;
        }
        let new = drill.decode(&at);
        drill.fetch(new, &[(200, sources(16))], 1);
        drill.success(new, 200);
        drill.fetch_done(new);
        drill.verify(new, 200, &sources(16), &sources(16));
        drill.forget_numbers(prefill);
        drill.hold(prefill, 5, "counted while the old one is stopped", |s| {
            (s.get("ops_in_flight"), s.get("rooms_failed")) == (outstanding, 0)
        });

        drill.signal(old, libc::SIGKILL);
        drill.killed(old);
        drill.success(prefill, 200);
        let lost = failed(&mut drill, prefill, "Lost connection with decode instance");
        assert!(!lost.is_empty(), "writes of {outstanding} rooms were outstanding");
        for (room, _) in &lost {
            drill.released(prefill, *room);
        }
        drill.forget_numbers(prefill);
        drill.until(prefill, "it is not quiet", quiet);
        // The same numbers, for the new one.
        again(&mut drill, prefill, new, &lost);
        drill.forget_numbers(prefill);
        let of_prefill = drill.until(prefill, "it is not quiet", quiet);
        assert_eq!(of_prefill.get("rooms_failed"), lost.len() as u64, "{of_prefill:?}");
        assert!(accounted(&of_prefill), "{of_prefill:?}");
        drill.forget_numbers(new);
        let of_new = drill.numbers(new);
        let counted = ["rooms_succeeded", "rooms_failed", "rooms_awaiting_release", "messages_stale"]
            .map(|name| of_new.get(name));
        assert_eq!((counted, releases(&of_new)), ([1 + lost.len() as u64, 0, 0, 0], (0, 0)), "{of_new:?}");
        true
    });
}
