//! Ranks that die or stand still while bytes are moving, as processes, over both ways of the embedded transport.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

#[allow(dead_code)] // shared with other drills
mod support;

use std::time::Duration;

use kv_cli::driver::fleet::FleetEvent;
use kv_cli::driver::protocol::{BootstrapAt, FromWorker, Role, RoomEnd, TcpPath};
use support::{Drill, FIRST, LARGE, OTHER_PAGES, Way, kills, sources, until_in_the_middle, wanted};

/// F51, R-D7.
#[test]
fn prefill_killed_in_the_middle_fails_its_rooms_and_is_replaced() {
    until_in_the_middle(kills::prefill);
}

/// F53, F55.
#[test]
fn decode_killed_in_the_middle_frees_the_pages_of_its_rooms_alone() {
    until_in_the_middle(kills::decode);
}

/// Silence proves nothing: what a stopped process may still read or write stays its own.
#[test]
fn a_stopped_decode_fails_nothing_and_releases_nothing() {
    until_in_the_middle(|path| {
        let mut drill = Drill::new(path);
        let (prefill, at) = drill.prefill();
        let (stopped, other) = (drill.decode(&at), drill.decode(&at));
        drill.begin(prefill, &[(200, OTHER_PAGES)], stopped, prefill);
        drill.signal(stopped, libc::SIGSTOP);
        // Another decode is served meanwhile.
        drill.fetch(other, &[(200, sources(16))], 1);
        drill.success(other, 200);
        drill.verify(other, 200, &sources(16), &sources(16));
        // Some heartbeats long.
        let said = drill.listen(Duration::from_secs(3 * support::HEARTBEAT_S));
        let bad = |e: &&FleetEvent| {
            let failed = |e: &FromWorker| matches!(e, FromWorker::Room { end: RoomEnd::Failed { .. }, .. });
            match e {
                FleetEvent::Died(..) | FleetEvent::From(_, FromWorker::Released { .. }) => true,
                FleetEvent::From(_, event) => failed(event),
            }
        };
        assert_eq!(said.iter().find(bad), None);
        let through = said.iter().filter(
            |e| matches!(e, FleetEvent::From(w, FromWorker::Room { room, .. }) if *w == prefill && *room != 200),
        );
        let in_the_middle = through.count() < LARGE as usize;
        drill.signal(stopped, libc::SIGCONT);
        for (room, _) in &wanted() {
            drill.success(stopped, *room);
        }
        drill.fetch_done(stopped);
        for (room, pages) in wanted() {
            drill.verify(stopped, room, &pages, &sources(pages.len()));
            if room != FIRST {
                drill.success(prefill, room);
            }
        }
        in_the_middle
    });
}

/// `kill -9` of prefill while decode waits for it: nothing has moved, and still the reason is named.
#[test]
fn prefill_killed_before_it_has_the_request() {
    let mut drill = Drill::new(Way::Tcp(TcpPath::Auto));
    let (prefill, at) = drill.prefill();
    let decode = drill.decode(&at);
    let pages = sources(8);
    drill.fill(prefill, &pages);
    drill.serve(prefill, &[(100, 8)]);
    drill.fetch(decode, &[(100, pages.clone())], 1);
    drill.success(decode, 100);
    drill.verify(decode, 100, &pages, &pages);
    drill.fetch_done(decode);

    // Nobody serves room 101, so decode waits when prefill dies.
    drill.fetch(decode, &[(101, pages.clone())], 1);
    drill.signal(prefill, libc::SIGKILL);
    drill.killed(prefill);
    match drill.end(decode, 101) {
        RoomEnd::Failed { reason } => assert!(reason.contains(&at) || reason.contains("prefill"), "{reason}"),
        other => panic!("{other:?}"),
    }
    drill.fetch_done(decode);

    let (prefill, again) = drill.start(Role::Prefill, BootstrapAt::Serve(at.clone()));
    assert_eq!(again, Some(at));
    drill.fill(prefill, &pages);
    drill.serve(prefill, &[(102, 8)]);
    drill.fetch(decode, &[(102, (8..16).collect())], 1);
    drill.success(decode, 102);
    drill.verify(decode, 102, &(8..16).collect::<Vec<_>>(), &pages);
}
