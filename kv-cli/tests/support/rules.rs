//! What the release rules mean in a rank's numbers.

use kv_cli::driver::fleet::WorkerId;
use kv_cli::driver::protocol::RoomEnd;
use kv_cli::driver::stats::RankStats;

use super::{Drill, FIRST, LARGE, LARGE_PAGES, OTHER_PAGES, Way, kills, served, sources, wanted};

/// Nothing of a prefill may still read or write anything.
pub fn quiet(n: &RankStats) -> bool {
    ["ops_in_flight", "ops_retained", "bytes_retained", "rooms_awaiting_release"].iter().all(|name| n.get(name) == 0)
        && n.retained_oldest_s == 0.0
        && n.peers.iter().all(|p| (p.retained_ops, p.retained_bytes) == (0, 0))
}

/// Every write that was posted has ended, once.
pub fn accounted(n: &RankStats) -> bool {
    n.get("ops_posted") == n.get("ops_done") + n.get("ops_failed") + n.get("ops_unresolved")
}

/// It has heard of every room of its first decode: of others it would wait for metadata for minutes.
pub fn knows_all(n: &RankStats) -> bool {
    n.get("messages_in") > served().len() as u64
}

pub fn releases(n: &RankStats) -> (u64, u64) {
    let by_peer: u64 = n.peers.iter().map(|p| p.released_without_proof).sum();
    assert_eq!(n.get("released_without_proof"), by_peer, "one prefill rank owes each: {n:?}");
    (n.get("released_with_proof"), n.get("released_without_proof"))
}

/// The large rooms that fail at a rank, with their pages at decode.
pub fn failed(drill: &mut Drill, at: WorkerId, reason: &str) -> Vec<(u64, Vec<u32>)> {
    failed_as(drill, at, |said| said.contains(reason))
}

/// The same, with any reason that `right` takes.
pub fn failed_as(drill: &mut Drill, at: WorkerId, right: impl Fn(&str) -> bool) -> Vec<(u64, Vec<u32>)> {
    let mut failed = wanted();
    failed.retain(|(room, _)| {
        if *room == FIRST {
            return false;
        }
        match drill.end(at, *room) {
            RoomEnd::Failed { reason: said } => {
                assert!(right(&said), "{said}");
                true
            }
            RoomEnd::Success { .. } => false,
        }
    });
    failed
}

/// Move these rooms, numbers and pages as before, and look at every byte.
pub fn again(drill: &mut Drill, prefill: WorkerId, decode: WorkerId, rooms: &[(u64, Vec<u32>)]) {
    let serve: Vec<_> = rooms.iter().map(|(room, _)| (*room, LARGE_PAGES)).collect();
    drill.serve(prefill, &serve);
    drill.fetch(decode, rooms, LARGE);
    for (room, _) in rooms {
        drill.success(decode, *room);
    }
    drill.fetch_done(decode);
    for (room, pages) in rooms {
        drill.verify(decode, *room, pages, &sources(pages.len()));
    }
}

/// A prefill and a decode with [`served`] under way.
pub fn under_way(way: Way) -> (Drill, WorkerId, String, WorkerId) {
    let mut drill = Drill::with_numbers(way);
    let (prefill, at) = drill.prefill();
    let decode = drill.decode(&at);
    drill.begin(prefill, &[], decode, decode);
    (drill, prefill, at, decode)
}

/// The end of decode's process is proof that nothing is written or read for it any more; another decode is served. Whether
/// the signal came in the middle.
pub fn writes_to_a_killed_decode(way: Way) -> bool {
    let mut drill = Drill::with_numbers(way);
    let (prefill, at) = drill.prefill();
    let (doomed, other) = (drill.decode(&at), drill.decode(&at));
    drill.begin(prefill, &[(200, OTHER_PAGES)], doomed, prefill);
    drill.signal(doomed, libc::SIGKILL);
    drill.killed(doomed);
    drill.forget_numbers(prefill);
    if !knows_all(&drill.numbers(prefill)) {
        return false;
    }
    let lost = failed_as(&mut drill, prefill, |reason| kills::tells(way, reason));
    for (room, _) in &lost {
        drill.released(prefill, *room);
    }
    drill.forget_numbers(prefill);
    let settled = drill.until(prefill, "it is not quiet", quiet);
    assert_eq!(settled.get("rooms_failed"), lost.len() as u64, "{settled:?}");
    assert!(accounted(&settled), "{settled:?}");

    drill.fetch(other, &[(200, sources(16))], 1);
    drill.success(other, 200);
    drill.verify(other, 200, &sources(16), &sources(16));
    drill.forget_numbers(other);
    let of_other = drill.numbers(other);
    let counted = ["rooms_succeeded", "rooms_failed", "rooms_awaiting_release"].map(|name| of_other.get(name));
    assert_eq!((counted, releases(&of_other)), ([1, 0, 0], (0, 0)), "{of_other:?}");
    // Writes were cut off: their end was not that they were done.
    settled.get("ops_failed") + settled.get("ops_unresolved") > 0
}
