//! Ranks that are killed while bytes are moving, over any transport. Each gives whether the signal came in the middle.

use kv_cli::driver::protocol::{BootstrapAt, Role, RoomEnd};

use super::{Drill, OTHER_PAGES, Way, sources, wanted};

/// Its rooms fail with the reason, and decode goes on with the next prefill at the address (F51, R-D7).
pub fn prefill(way: Way) -> bool {
    let mut drill = Drill::new(way);
    let (prefill, at) = drill.prefill();
    let decode = drill.decode(&at);
    drill.begin(prefill, &[], decode, decode);
    drill.signal(prefill, libc::SIGKILL);
    drill.killed(prefill);
    let mut failed = 0;
    for (room, _) in wanted().iter().skip(1) {
        if let RoomEnd::Failed { reason } = drill.end(decode, *room) {
            failed += 1;
            assert!(reason.contains("Lost connection with prefill instance") && reason.contains(&at), "{reason}");
        }
    }
    drill.fetch_done(decode);

    // The same decode, a new prefill at the same address.
    let (prefill, again) = drill.start(Role::Prefill, BootstrapAt::Serve(at.clone()));
    assert_eq!(again, Some(at));
    drill.fill(prefill, &sources(8));
    drill.serve(prefill, &[(200, 8)]);
    // Pages that no failed room has: those are held.
    let pages: Vec<u32> = (504..512).collect();
    drill.fetch(decode, &[(200, pages.clone())], 1);
    drill.success(decode, 200);
    drill.verify(decode, 200, &pages, &sources(8));
    failed > 0
}

/// F53, F55: decode's process is proven dead, so nothing can read the source pages any more.
pub fn decode(way: Way) -> bool {
    let mut drill = Drill::new(way);
    let (prefill, at) = drill.prefill();
    let (doomed, other) = (drill.decode(&at), drill.decode(&at));
    drill.begin(prefill, &[(200, OTHER_PAGES), (201, OTHER_PAGES)], doomed, prefill);
    drill.signal(doomed, libc::SIGKILL);
    let (a, b) = (sources(16), (16..32).collect::<Vec<u32>>());
    drill.fetch(other, &[(200, a.clone())], 1);
    drill.killed(doomed);
    let mut failed = 0;
    for (room, _) in wanted().iter().skip(1) {
        if let RoomEnd::Failed { reason } = drill.end(prefill, *room) {
            failed += 1;
            assert!(tells(way, &reason), "{reason}");
            drill.released(prefill, *room);
        }
    }
    // The room that was under way meanwhile, and one after it.
    drill.success(other, 200);
    drill.verify(other, 200, &a, &sources(16));
    drill.fetch_done(other);
    drill.fetch(other, &[(201, b.clone())], 1);
    drill.success(other, 201);
    drill.verify(other, 201, &b, &sources(16));
    failed > 0
}

/// A loss that is seen, or a write that fails, whichever is noticed first: NIXL's library says of a failed write no more
/// than that it failed.
pub fn tells(way: Way, reason: &str) -> bool {
    let failed = matches!(way, Way::Nixl(_)) && reason.starts_with("Failed to send kv chunk ");
    failed || reason.contains("Lost connection with decode instance")
}
