//! Processes that die, and others that take their place.

use super::super::case::Outcome::{Any, Either, Failed};
use super::super::case::{Case, End, Fail, Mark, Step, Who};

/// What decode says of a prefill that died.
const LOST: Fail =
    Fail::says(&["Lost connection with prefill instance"], &["lost", "died", "dead", "gone", "heartbeat"]);
/// What decode says of a room that starts when prefill is gone.
const DOWN: Fail = Fail::says(&["is healthy before, but now it is down", "Lost connection", "Could not fetch"], &[]);
const TIMED_OUT: Fail = Fail::says(&["timed out"], &["timed out"]);

pub fn cases() -> Vec<Case> {
    use Step::{Close, Ended, Kill, Open, Pause, Seen, Start};
    vec![
        Case::new("kill-prefill-transferring", "prefill dies after two chunks of a room")
            .prefill("--chunk-pages 4 --chunk-delay-ms 50 --abort-at kill:2 --abort-rooms 101")
            .decode("--heartbeat 2 --release-timeout 3")
            .rule(Who::Prefill, "", Any)
            .ends(Who::Prefill, End::Killed)
            .rule(Who::Decode, "101", Failed(LOST.unacked(2500.0, 9000.0)))
            .rule(Who::Decode, "", Either(LOST)),
        Case::new("kill-prefill-unasked", "prefill dies before decode's metadata")
            .decode("--heartbeat 2 --hold 4 --release-timeout 3")
            .script(&[
                Start(Who::Prefill),
                Seen(Who::Prefill, Mark::Ready),
                Start(Who::Decode),
                Seen(Who::Decode, Mark::Ready),
                Pause(1.5),
                Kill(Who::Prefill),
            ])
            .rule(Who::Prefill, "", Any)
            .ends(Who::Prefill, End::Killed)
            .rule(Who::Decode, "", Failed(LOST)),
        Case::new("kill-prefill-idle", "prefill dies between rooms; the next ones fail, and do not hang")
            .both("--rooms 100:4")
            .prefill("--rooms 100:2")
            .decode("--heartbeat 2 --gate 2 --release-timeout 3")
            .script(&[
                Start(Who::Prefill),
                Seen(Who::Prefill, Mark::Ready),
                Start(Who::Decode),
                Seen(Who::Decode, Mark::Gate),
                Kill(Who::Prefill),
                Ended(Who::Prefill),
                Open(Who::Decode),
            ])
            .ends(Who::Prefill, End::Killed)
            .rule(Who::Decode, "102:2", Failed(DOWN)),
        Case::new("kill-decode-unasked", "decode dies before its metadata; another decode comes")
            .both("--rooms 100:4")
            .prefill("--boot-timeout 5")
            .decode("--rooms 100:2 --hold 10")
            .again(Who::Decode2, "--rooms 102:2 --hold 0")
            .script(&[
                Start(Who::Prefill),
                Seen(Who::Prefill, Mark::Ready),
                Start(Who::Decode),
                Seen(Who::Decode, Mark::Ready),
                Pause(1.5),
                Kill(Who::Decode),
                Ended(Who::Decode),
                Start(Who::Decode2),
            ])
            .rule(Who::Decode, "", Any)
            .ends(Who::Decode, End::Killed)
            .rule(Who::Prefill, "100:2", Failed(TIMED_OUT)),
        Case::new("kill-decode-transferring", "decode dies between chunks; another decode comes")
            .both("--rooms 100:4")
            .prefill("--chunk-pages 1 --chunk-delay-ms 250 --boot-timeout 15")
            .decode("--rooms 100:2 --d-abort-at kill:2000")
            .again(Who::Decode2, "--rooms 102:2 --d-abort-at none")
            .script(&[
                Start(Who::Prefill),
                Seen(Who::Prefill, Mark::Ready),
                Start(Who::Decode),
                Ended(Who::Decode),
                Start(Who::Decode2),
            ])
            .rule(Who::Decode, "", Any)
            .ends(Who::Decode, End::Killed)
            .rule(Who::Prefill, "100:2", Failed(Fail::ANY)),
        Case::new("kill-decode-idle", "decode dies between rooms; another decode comes")
            .both("--rooms 100:4")
            .decode("--rooms 100:3 --gate 2")
            .again(Who::Decode2, "--rooms 102:2 --gate 2")
            .script(&[
                Start(Who::Prefill),
                Seen(Who::Prefill, Mark::Ready),
                Start(Who::Decode),
                Seen(Who::Decode, Mark::Gate),
                Kill(Who::Decode),
                Ended(Who::Decode),
                Start(Who::Decode2),
            ])
            .rule(Who::Decode, "", Any)
            .ends(Who::Decode, End::Killed),
        Case::new("restart-decode", "decode ends and comes back; prefill stays")
            .both("--rooms 100:4")
            .decode("--rooms 100:2")
            .again(Who::Decode2, "--rooms 102:2")
            .script(&[
                Start(Who::Prefill),
                Seen(Who::Prefill, Mark::Ready),
                Start(Who::Decode),
                Ended(Who::Decode),
                Start(Who::Decode2),
            ]),
        Case::new("restart-prefill", "prefill ends and comes back at once on its port; decode stays")
            .both("--rooms 100:4")
            .prefill("--rooms 100:2")
            .decode("--heartbeat 2 --gate 2")
            .again(Who::Prefill2, "--rooms 102:2")
            .script(&[
                Start(Who::Prefill),
                Seen(Who::Prefill, Mark::Ready),
                Start(Who::Decode),
                Seen(Who::Decode, Mark::Gate),
                Seen(Who::Prefill, Mark::Room(100)),
                Seen(Who::Prefill, Mark::Room(101)),
                Close(Who::Prefill),
                Ended(Who::Prefill),
                // SGLang's decode knows a prefill anew only after it missed two heartbeats.
                Pause(7.0),
                Start(Who::Prefill2),
                Seen(Who::Prefill2, Mark::Ready),
                Open(Who::Decode),
            ]),
        Case::new("restart-prefill-killed", "prefill is killed and comes back on its port; decode stays")
            .both("--rooms 100:4")
            .prefill("--rooms 100:2")
            .decode("--heartbeat 2 --gate 2")
            .again(Who::Prefill2, "--rooms 102:2")
            .script(&[
                Start(Who::Prefill),
                Seen(Who::Prefill, Mark::Ready),
                Start(Who::Decode),
                Seen(Who::Decode, Mark::Gate),
                Kill(Who::Prefill),
                Ended(Who::Prefill),
                Pause(7.0),
                Start(Who::Prefill2),
                Seen(Who::Prefill2, Mark::Ready),
                Open(Who::Decode),
            ])
            .ends(Who::Prefill, End::Killed),
    ]
}
