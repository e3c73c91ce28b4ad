//! Rooms whose DP rank decode looks up: prefill registers it, in time and not for ever.

use std::time::Duration;

use kv_core::directory::{DirectoryEvent, DirectoryRequest};
use kv_core::engine::{Claim, PrefillCommand};
use kv_core::poll::KvPoll;
use kv_testkit::FakeDirectory;

use super::support::*;

/// A world whose prefill rank 0 has a registry, and a room that it claimed there.
fn claimed(spec: WorldSpec) -> (World, FakeDirectory, Room) {
    let mut w = World::new(spec);
    let registry = FakeDirectory::new(&w.clock);
    w.p[0].shard.set_directory(Box::new(registry.clone()));
    let s = w.sender(0, 7);
    let claim = Claim { bootstrap_addr: "p:8998".into(), dp_rank: 1 };
    w.p[0].push(PrefillCommand::Claim(s.clone(), claim));
    w.run();
    (w, registry, s)
}

/// Tokens of the questions so far; each is for room 7 and rank 1.
fn asked(registry: &FakeDirectory) -> Vec<u64> {
    let token = |r: &DirectoryRequest| match r {
        DirectoryRequest::RegisterDpRank { token, bootstrap_addr, room, dp_rank } => {
            assert_eq!((bootstrap_addr.as_str(), room.get(), *dp_rank), ("p:8998", 7, 1));
            Some(*token)
        }
        DirectoryRequest::CancelDpRank { .. } => None,
        other => panic!("{other:?}"),
    };
    registry.requests().iter().filter_map(token).collect()
}

/// Tokens of the questions that were taken back.
fn cancelled(registry: &FakeDirectory) -> Vec<u64> {
    let token = |r: &DirectoryRequest| match r {
        DirectoryRequest::CancelDpRank { token } => Some(*token),
        _ => None,
    };
    registry.requests().iter().filter_map(token).collect()
}

fn answer(w: &mut World, registry: &FakeDirectory, result: Result<(), &str>) {
    let token = *asked(registry).last().unwrap();
    let result = result.map_err(str::to_owned);
    w.p[0].push(PrefillCommand::Directory(DirectoryEvent::DpRankRegistered { token, result }));
    w.run();
}

/// Counters: taken, failed.
fn counted(w: &World) -> (u64, u64) {
    (w.p[0].stats.dp_ranks_registered.get(), w.p[0].stats.dp_rank_failures.get())
}

/// What waits for its turn at the registry would take the place of the number's next life, on another rank.
#[test]
fn r_g1_the_end_of_a_room_takes_its_claim_back() {
    let (mut w, registry, s) = claimed(WorldSpec::default());
    assert!(cancelled(&registry).is_empty());
    w.abort_p(0, &s);
    w.run();
    assert_eq!(cancelled(&registry), asked(&registry), "at once, not when something else is due");
    w.clear_p(0, &s);
    w.run();
    assert_eq!(cancelled(&registry).len(), 1);
    w.assert_nothing_held();

    // An answered one is over.
    let (mut w, registry, s) = claimed(WorldSpec::default());
    answer(&mut w, &registry, Ok(()));
    w.abort_p(0, &s);
    w.clear_p(0, &s);
    w.run();
    assert!(cancelled(&registry).is_empty());
}

#[test]
fn r_g1_a_claim_that_is_taken_is_asked_once() {
    let (mut w, registry, s) = claimed(WorldSpec::default());
    answer(&mut w, &registry, Ok(()));
    w.jump(secs(299));
    assert_eq!((asked(&registry).len(), counted(&w)), (1, (1, 0)));
    w.advance(secs(1));
    let text = "Request 7 timed out after 300.0s in KVPoll.Bootstrapping: metadata from 0 decode ranks arrived";
    assert_eq!(reason(&s), text);
    w.clear_p(0, &s);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn r_i2_a_room_that_decode_could_not_find_says_so() {
    let (mut w, registry, s) = claimed(WorldSpec { bootstrap_timeout: secs(20), ..WorldSpec::default() });
    let mut failures = 0;
    while s.poll() == KvPoll::Bootstrapping {
        // An answer comes at once when asked, and the next question only after a while.
        if asked(&registry).len() as u64 > failures {
            failures += 1;
            answer(&mut w, &registry, Err("connection refused"));
            continue;
        }
        assert_eq!(asked(&registry).len() as u64, failures);
        w.advance(Duration::from_millis(50));
    }
    assert_eq!(counted(&w), (0, failures));
    // At 0, 0.1, 0.3, 0.7, 1.5, 3.1, 6.3, 11.3 and 16.3 s, as the steps of 50 ms see it.
    assert_eq!(failures, 9);
    let text = reason(&s);
    assert!(text.starts_with("Request 7 timed out after 20.0s in KVPoll.Bootstrapping"), "{text}");
    for part in ["dp_rank 1", "bootstrap_addr p:8998", "9 attempts in 20.0s", "last: connection refused"] {
        assert!(text.contains(part), "{text}");
    }
    // The end of the room ends its claim.
    w.jump(secs(1000));
    assert_eq!(asked(&registry).len() as u64, failures);
    w.clear_p(0, &s);
    w.run();
    w.assert_nothing_held();
}

#[test]
fn r_i2_a_registry_that_never_answers_is_named_too() {
    let (mut w, registry, s) = claimed(WorldSpec { bootstrap_timeout: secs(3), ..WorldSpec::default() });
    w.advance(secs(3));
    let text = reason(&s);
    assert!(text.ends_with("not registered at bootstrap_addr p:8998, no answer within 3.0s"), "{text}");
    // An answer that comes now is for nobody.
    answer(&mut w, &registry, Err("late"));
    assert_eq!((reason(&s), counted(&w), asked(&registry).len()), (text, (0, 1), 1));
}

#[test]
fn r_c5_an_abort_keeps_its_text_when_the_registry_took_the_claim_in_the_end() {
    let (mut w, registry, s) = claimed(WorldSpec::default());
    answer(&mut w, &registry, Err("connection refused"));
    w.advance(Duration::from_millis(100));
    answer(&mut w, &registry, Ok(()));
    assert_eq!((asked(&registry).len(), counted(&w)), (2, (1, 1)));
    w.abort_p(0, &s);
    w.run();
    assert_eq!(reason(&s), "Aborted by AbortReq.");
}

/// Decode found the rank all the same (the request named it there): the claim is of no more use, and no failure later on
/// is blamed on it.
#[test]
fn r_g1_a_claim_ends_when_decode_has_come() {
    let (mut w, registry, s) = claimed(WorldSpec::default());
    answer(&mut w, &registry, Err("connection refused"));
    let r = w.receiver(0, 7);
    w.run();
    w.publish(0, &r, &[3], 0);
    w.run();
    assert_eq!(s.poll(), KvPoll::WaitingForInput);
    w.jump(secs(100));
    assert_eq!(asked(&registry).len(), 1);
    w.abort_p(0, &s);
    w.run();
    assert_eq!((reason(&s).as_str(), reason(&r).as_str()), ("Aborted by AbortReq.", "Aborted by AbortReq."));
    one(&mut w, &s, &r);
}

/// F6: a late question of the life before could take the place of the new life's, which another rank may serve.
#[test]
fn r_f6_a_cleared_room_asks_no_more() {
    let (mut w, registry, s) = claimed(WorldSpec::default());
    w.clear_p(0, &s);
    w.run();
    answer(&mut w, &registry, Err("connection refused"));
    w.jump(secs(1000));
    assert_eq!(asked(&registry).len(), 1);
    w.assert_nothing_held();
}
