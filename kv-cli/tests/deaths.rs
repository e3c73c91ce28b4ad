//! Ranks that die or stand still while bytes are moving, as processes, over both ways of the embedded transport.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

mod support;

use std::time::Duration;

use kv_cli::driver::fleet::FleetEvent;
use kv_cli::driver::protocol::{BootstrapAt, FromWorker, Role, RoomEnd, TcpPath};
use support::Drill;

const PATHS: [TcpPath; 2] = [TcpPath::Copy, TcpPath::Stream];

/// Rooms of 32 MiB, each with destination pages of its own.
const ROOM_PAGES: u32 = 64;

fn pages_of(n: u32) -> Vec<u32> {
    (n * ROOM_PAGES..(n + 1) * ROOM_PAGES).collect()
}

fn rooms(first: u64, n: u32) -> Vec<(u64, Vec<u32>)> {
    (0..n).map(|i| (first + u64::from(i), pages_of(i))).collect()
}

/// F51, R-D7.
#[test]
fn prefill_killed_in_the_middle_fails_its_rooms_and_is_replaced() {
    for path in PATHS {
        let mut drill = Drill::new(path);
        let (prefill, at) = drill.prefill();
        let decode = drill.decode(&at);
        let sources = pages_of(0);
        drill.fill(prefill, &sources);
        let wanted = rooms(100, 8);
        drill.serve(prefill, 100..108, &sources);
        drill.fetch(decode, &wanted, 8);
        // All eight were asked for at once, so when the first is through, the others are under way.
        let (first, end) = drill.first_end(decode);
        assert!(matches!(end, RoomEnd::Success { .. }), "{end:?}");
        drill.signal(prefill, "-KILL");
        drill.killed(prefill);
        let mut failed = 0;
        for (room, _) in wanted.iter().filter(|(room, _)| *room != first) {
            match drill.end(decode, *room) {
                RoomEnd::Success { .. } => {}
                RoomEnd::Failed { reason } => {
                    failed += 1;
                    assert!(
                        reason.contains("Lost connection with prefill instance") && reason.contains(&at),
                        "{reason}"
                    );
                }
            }
        }
        assert!(failed > 0, "{path:?}: prefill died too late for this test");
        drill.fetch_done(decode);

        // The same decode, a new prefill at the same address.
        let (prefill, again) = drill.start(Role::Prefill, BootstrapAt::Serve(at.clone()));
        assert_eq!(again, Some(at));
        drill.fill(prefill, &sources);
        drill.serve(prefill, [200], &sources);
        drill.fetch(decode, &[(200, wanted[0].1.clone())], 1);
        drill.success(decode, 200);
        drill.verify(decode, 200, &wanted[0].1, &sources);
    }
}

/// F53, F55: decode's process is proven dead, so nothing can read the source pages any more.
#[test]
fn decode_killed_in_the_middle_frees_the_pages_of_its_rooms_alone() {
    for path in PATHS {
        let mut drill = Drill::new(path);
        let (prefill, at) = drill.prefill();
        let (doomed, other) = (drill.decode(&at), drill.decode(&at));
        let sources = pages_of(0);
        drill.fill(prefill, &sources);
        let wanted = rooms(100, 8);
        drill.serve(prefill, (100..108).chain(200..202), &sources);
        drill.fetch(doomed, &wanted, 8);
        let (first, end) = drill.first_end(prefill);
        assert!(matches!(end, RoomEnd::Success { .. }), "{end:?}");
        drill.fetch(other, &[(200, pages_of(1))], 1);
        drill.signal(doomed, "-KILL");
        drill.killed(doomed);
        let mut failed = 0;
        for (room, _) in wanted.iter().filter(|(room, _)| *room != first) {
            match drill.end(prefill, *room) {
                RoomEnd::Success { .. } => {}
                RoomEnd::Failed { reason } => {
                    failed += 1;
                    assert!(reason.contains("Lost connection with decode instance"), "{reason}");
                    drill.released(prefill, *room);
                }
            }
        }
        assert!(failed > 0, "{path:?}: decode died too late for this test");
        // The room that was under way meanwhile, and one after it.
        drill.success(other, 200);
        drill.verify(other, 200, &pages_of(1), &sources);
        drill.fetch_done(other);
        drill.fetch(other, &[(201, pages_of(2))], 1);
        drill.success(other, 201);
        drill.verify(other, 201, &pages_of(2), &sources);
    }
}

/// F45-F47: silence is no proof of anything.
#[test]
fn a_stopped_decode_fails_nothing_and_releases_nothing() {
    for path in PATHS {
        let mut drill = Drill::new(path);
        let (prefill, at) = drill.prefill();
        let (stopped, other) = (drill.decode(&at), drill.decode(&at));
        let sources = pages_of(0);
        drill.fill(prefill, &sources);
        let wanted = rooms(100, 8);
        drill.serve(prefill, (100..108).chain([200]), &sources);
        drill.fetch(stopped, &wanted, 8);
        let (first, end) = drill.first_end(prefill);
        assert!(matches!(end, RoomEnd::Success { .. }), "{end:?}");
        drill.signal(stopped, "-STOP");
        // Another decode is served meanwhile.
        drill.fetch(other, &[(200, pages_of(1))], 1);
        drill.success(other, 200);
        drill.verify(other, 200, &pages_of(1), &sources);
        // Some heartbeats long.
        let said = drill.listen(Duration::from_secs(7));
        let bad = |e: &&FleetEvent| {
            matches!(
                e,
                FleetEvent::Died(..)
                    | FleetEvent::From(
                        _,
                        FromWorker::Released { .. } | FromWorker::Room { end: RoomEnd::Failed { .. }, .. }
                    )
            )
        };
        assert_eq!(said.iter().find(bad), None);
        let through =
            said.iter().filter(|e| matches!(e, FleetEvent::From(w, FromWorker::Room { .. }) if *w == prefill));
        assert!(through.count() < 7, "{path:?}: decode was stopped too late for this test");
        drill.signal(stopped, "-CONT");
        for (room, _) in &wanted {
            drill.success(stopped, *room);
        }
        drill.fetch_done(stopped);
        for (room, pages) in &wanted {
            drill.verify(stopped, *room, pages, &sources);
            if *room != first {
                drill.success(prefill, *room);
            }
        }
    }
}

/// `kill -9` of prefill while decode waits for it: nothing has moved, and still the reason is named.
#[test]
fn prefill_killed_before_it_has_the_request() {
    let mut drill = Drill::new(TcpPath::Auto);
    let (prefill, at) = drill.prefill();
    let decode = drill.decode(&at);
    let sources = pages_of(0);
    drill.fill(prefill, &sources);
    drill.serve(prefill, [100], &sources);
    drill.fetch(decode, &[(100, sources.clone())], 1);
    drill.success(decode, 100);
    drill.verify(decode, 100, &sources, &sources);
    drill.fetch_done(decode);

    // Nobody serves room 101, so decode waits when prefill dies.
    drill.fetch(decode, &[(101, sources.clone())], 1);
    drill.signal(prefill, "-KILL");
    drill.killed(prefill);
    match drill.end(decode, 101) {
        RoomEnd::Failed { reason } => assert!(reason.contains(&at) || reason.contains("prefill"), "{reason}"),
        other => panic!("{other:?}"),
    }
    drill.fetch_done(decode);

    let (prefill, again) = drill.start(Role::Prefill, BootstrapAt::Serve(at.clone()));
    assert_eq!(again, Some(at));
    drill.fill(prefill, &sources);
    drill.serve(prefill, [102], &sources);
    drill.fetch(decode, &[(102, sources.clone())], 1);
    drill.success(decode, 102);
    drill.verify(decode, 102, &sources, &sources);
}
