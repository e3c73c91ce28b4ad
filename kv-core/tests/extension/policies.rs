//! F4, B2: what is said and freed when depends on whether the peer is ours.

use std::sync::Arc;

use kv_core::ids::{OpId, ProcessGeneration, Room as Number};
use kv_core::net::Endpoint;
use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::time::Timestamp;
use kv_core::transport::{Outcome, Settlement, TransportError, TransportErrorKind};
use kv_testkit::net::Action;

use super::*;

/// The defaults of the hooks.
fn per_peer(spec: WorldSpec) -> WorldSpec {
    WorldSpec { failed_status: FailedStatusPolicy::PerPeer, release: ReleasePolicy::PerPeer(secs(30)), ..spec }
}

#[test]
fn r_b2_ours_hears_of_a_failure_at_once_and_0_5_23_when_it_settled() {
    for decode_ext in [true, false] {
        let mut w = held_world(per_peer(WorldSpec { decode_ext, ..WorldSpec::default() }));
        let (s, r, op) = in_flight(&mut w);
        w.p[0].transport.unresolve(op);
        w.run();
        assert_eq!(r.poll(), if decode_ext { FAILED } else { KvPoll::WaitingForInput });
        assert!(!r.releasable());
        w.p[0].transport.settle(op, true, true);
        w.run();
        assert_eq!(r.poll(), FAILED);
        assert!(r.releasable());
        one(&mut w, &s, &r);
    }
}

#[test]
fn r_b2_each_decode_of_one_room_is_told_in_its_own_time() {
    let policy = SenderPolicy {
        bootstrap_timeout: secs(300),
        failed_status: FailedStatusPolicy::PerPeer,
        max_destinations: 4,
        max_chunks: 4,
    };
    let mut room = SenderRoom::new(Number::new(7).unwrap(), Timestamp::default(), Arc::new(policy));
    let mut on = |event| {
        let mut out = Vec::new();
        room.handle_event(Timestamp::default(), event, &mut out);
        out
    };
    let life = RoomLife { process: ProcessGeneration(1), generation: 4, geometry: 0 };
    let destination = |port, life| Destination {
        name: format!("d{port}").into(),
        endpoint: Endpoint::new("d", port),
        pages: [0].into(),
        aux_index: Some(0),
        required_dst_info_num: 2,
        decode_prefix_len: None,
        is_dummy: false,
        writes_aux: true,
        life,
    };
    on(SenderEvent::Destination(destination(1, Some(life))));
    on(SenderEvent::Destination(destination(2, None)));
    let pages = [0].into();
    on(SenderEvent::Enqueue(ChunkSpec {
        pages,
        index_slice: 0..1,
        is_last: true,
        has_wait_event: false,
        aux_index: None,
    }));
    on(SenderEvent::Posted(0, 0, OpId(1)));
    on(SenderEvent::Posted(0, 1, OpId(2)));
    let error = TransportError::new(TransportErrorKind::Backend, "broken");
    let told = on(SenderEvent::Outcome(0, 0, Outcome::Unresolved { error }));
    let ours =
        |e: &SenderEffect| matches!(e, SenderEffect::StatusOf { life: l, status: KvPoll::Failed, .. } if *l == life);
    let theirs = |e: &SenderEffect| matches!(e, SenderEffect::Status(to, KvPoll::Failed, _) if to.port() == 2);
    assert!(told.iter().any(ours) && !told.iter().any(theirs), "{told:?}");
    assert!(!on(SenderEvent::Outcome(0, 1, Outcome::Done)).iter().any(|e| ours(e) || theirs(e)));
    let told = on(SenderEvent::Settlement(0, 0, Settlement::Settled { src_quiet: true, dst_quiet: true }));
    assert!(told.iter().any(theirs) && !told.iter().any(ours), "{told:?}");
}

#[test]
fn r_f4_between_two_of_ours_nothing_but_proof_releases() {
    let mut w = held_world(per_peer(WorldSpec::default()));
    let (s, r, op) = in_flight(&mut w);
    w.abort_d(0, &r);
    w.run();
    w.advance(secs(3600));
    assert!(!r.releasable(), "the write may still land");
    assert_eq!(w.d[0].stats.released_without_proof.get(), 0);
    w.p[0].transport.complete(op);
    w.run();
    assert!(r.releasable());
    assert_eq!(w.d[0].stats.released_with_proof.get(), 1);
    one(&mut w, &s, &r);
}

#[test]
fn r_f4_cat_f19_towards_0_5_23_pages_are_held_to_the_timeout_and_counted_by_peer() {
    let mut w = held_world(per_peer(old_prefill()));
    let (s, r, op) = in_flight(&mut w);
    w.abort_d(0, &r);
    w.run();
    w.advance(secs(29));
    assert!(!r.releasable());
    w.advance(secs(1));
    assert!(r.releasable());
    let numbers = w.d[0].stats.peers.snapshot();
    assert_eq!(numbers.len(), 1);
    assert_eq!((&numbers[0].peer, numbers[0].released_without_proof), (&w.p[0].endpoint, 1));
    w.p[0].transport.complete(op);
    one(&mut w, &s, &r);
}

#[test]
fn r_f4_a_lost_abort_or_ack_is_made_up_for() {
    for lost in [is_abort as fn(&kv_testkit::net::Flight) -> bool, is_ack] {
        let mut w = world_with_proof();
        w.net.rule_times(2, Action::Drop, lost);
        let (s, r) = w.open(7, &[4]);
        w.abort_d(0, &r[0]);
        w.run();
        assert!(!r[0].releasable());
        w.advance(secs(31));
        assert!(!r[0].releasable(), "lost again");
        w.advance(secs(30));
        assert!(r[0].releasable());
        assert_eq!((w.d[0].stats.released_with_proof.get(), w.d[0].stats.released_without_proof.get()), (1, 0));
        w.abort_p(0, &s[0]);
        end(&mut w, &s, &r);
    }
}

fn world_with_proof() -> World {
    World::new(per_peer(WorldSpec::default()))
}

#[test]
fn r_f5_what_is_retained_is_seen_by_peer_with_bytes_and_age() {
    let mut w = held_world(per_peer(WorldSpec::default()));
    let (s, r, op) = in_flight(&mut w);
    w.advance(secs(5));
    w.p[0].transport.unresolve(op);
    w.run();
    w.advance(secs(5));
    let stats = w.p[0].stats.clone();
    let numbers = stats.peers.snapshot();
    assert_eq!(numbers.len(), 1);
    assert_eq!((&numbers[0].peer, numbers[0].retained_ops), (&w.d[0].endpoint, 1));
    assert_eq!(numbers[0].retained_bytes, stats.bytes_retained.get());
    assert!(numbers[0].retained_bytes > 0);
    assert_eq!(numbers[0].retained_since, Some(Timestamp::from_nanos(5_000_000_000)));
    w.p[0].transport.settle(op, true, true);
    w.run();
    let after = stats.peers.snapshot();
    assert_eq!((after[0].retained_ops, after[0].retained_bytes, after[0].retained_since), (0, 0, None));
    assert_eq!((stats.ops_retained.get(), stats.bytes_retained.get()), (0, 0));
    one(&mut w, &s, &r);
}
