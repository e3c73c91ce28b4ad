//! The simulated network: order, faults, time.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::time::Duration;

use kv_core::control::{ControlError, ControlEvent, ControlPlane as _, Multipart};
use kv_core::net::Endpoint;
use kv_testkit::net::{Action, Faults, SimControl};
use kv_testkit::{ManualClock, SimNet};

const MS: Duration = Duration::from_millis(1);

fn ends() -> (ManualClock, SimNet, Endpoint, Endpoint) {
    let clock = ManualClock::new();
    let net = SimNet::new(&clock, 1);
    (clock, net, Endpoint::new("10.0.0.1", 1), Endpoint::new("10.0.0.2", 2))
}

fn msg(text: &str) -> Multipart {
    [bytes::Bytes::copy_from_slice(text.as_bytes())].into_iter().collect()
}

fn texts(control: &mut SimControl) -> Vec<String> {
    let mut out = Vec::new();
    control.recv(usize::MAX, &mut out);
    let text = |e| match e {
        ControlEvent::Message(m) => String::from_utf8(m[0].to_vec()).unwrap(),
        ControlEvent::PeerLost(e, why) => format!("lost {e}: {why}"),
    };
    out.into_iter().map(text).collect()
}

#[test]
fn messages_arrive_whole_in_order_and_in_time() {
    let (clock, net, a, b) = ends();
    let (mut ca, mut cb) = (net.bind(&a), net.bind(&b));
    net.set_latency(MS);
    ca.send(&b, msg("1")).unwrap();
    ca.send(&b, msg("2")).unwrap();
    assert_eq!(texts(&mut cb), [""; 0]);
    assert_eq!(net.next_due(), Some(clock.now() + MS));
    clock.advance(MS);
    assert_eq!(texts(&mut cb), ["1", "2"]);
    assert_eq!(net.next_due(), None);
}

#[test]
fn rules_drop_delay_duplicate_reorder_and_hold() {
    let (clock, net, a, b) = ends();
    let (mut ca, mut cb) = (net.bind(&a), net.bind(&b));
    net.rule(Action::Drop, |f| f.frames[0].starts_with(b"drop"));
    net.rule_times(1, Action::Delay(MS), |f| f.frames[0].starts_with(b"delay"));
    net.rule(Action::Duplicate(1), |f| f.frames[0].starts_with(b"twice"));
    let over = net.rule(Action::Overtaken(MS), |f| f.frames[0].starts_with(b"slow"));
    net.rule(Action::Hold, |f| f.frames[0].starts_with(b"hold"));
    for text in ["slow", "drop", "twice", "hold", "delay", "behind"] {
        ca.send(&b, msg(text)).unwrap();
    }
    assert_eq!(texts(&mut cb), ["twice", "twice"], "what is behind a delayed one waits");
    clock.advance(MS);
    assert_eq!(texts(&mut cb), ["slow", "delay", "behind"]);
    let held = net.in_flight();
    assert_eq!(held.len(), 1);
    assert_eq!(held[0].to_string(), "#3 10.0.0.1:1 -> 10.0.0.2:2 [\"hold\"] held");
    net.release(held[0].id);
    assert_eq!(texts(&mut cb), ["hold"]);
    net.remove_rule(over);
    ca.send(&b, msg("slow")).unwrap();
    ca.send(&b, msg("delay")).unwrap();
    assert_eq!(texts(&mut cb), ["slow", "delay"], "rules end");
}

#[test]
fn a_partition_keeps_messages_and_heals() {
    let (_, net, a, b) = ends();
    let (mut ca, mut cb) = (net.bind(&a), net.bind(&b));
    net.partition(&a, &b);
    ca.send(&b, msg("1")).unwrap();
    cb.send(&a, msg("2")).unwrap();
    assert!(texts(&mut cb).is_empty() && texts(&mut ca).is_empty());
    assert_eq!(net.next_due(), None);
    net.heal(&a, &b);
    assert_eq!(texts(&mut cb), ["1"]);
    assert_eq!(texts(&mut ca), ["2"]);
}

#[test]
fn cat_f64_a_full_queue_is_an_error_at_once() {
    let (_, net, a, b) = ends();
    let mut ca = net.bind(&a);
    net.set_capacity(2);
    ca.send(&b, msg("1")).unwrap();
    ca.send(&b, msg("2")).unwrap();
    assert_eq!(ca.send(&b, msg("3")), Err(ControlError::Stalled { endpoint: b.clone(), queued: 2 }));
    let mut cb = net.bind(&b);
    assert_eq!(texts(&mut cb), ["1", "2"], "what waited for the endpoint reaches it once bound");
    ca.send(&b, msg("3")).unwrap();
    net.rule(Action::Unreachable, |_| true);
    assert!(matches!(ca.send(&b, msg("4")), Err(ControlError::Unreachable { .. })));
}

#[test]
fn a_restart_at_the_same_address_hears_what_comes_next() {
    let (_, net, a, b) = ends();
    let (mut ca, mut old) = (net.bind(&a), net.bind(&b));
    ca.send(&b, msg("lost with the process")).unwrap();
    net.crash(&b);
    net.lose_peer(&a, &b, "reset");
    assert_eq!(texts(&mut ca), ["lost 10.0.0.2:2: reset"]);
    ca.send(&b, msg("for the successor")).unwrap();
    assert!(old.send(&a, msg("from the grave")).is_err());
    let mut new = net.bind(&b);
    assert_eq!(texts(&mut old), [""; 0]);
    drop(old); // must not unbind the successor
    assert_eq!(texts(&mut new), ["for the successor"]);
    new.send(&a, msg("hello")).unwrap();
    assert_eq!(texts(&mut ca), ["hello"]);
}

#[test]
fn recv_takes_at_most_max_and_strangers_can_speak() {
    let (_, net, _, b) = ends();
    let mut cb = net.bind(&b);
    for i in 0..5u8 {
        net.inject(&b, [vec![i], b"KV_STATUS".to_vec()]);
    }
    assert!(net.print_in_flight().contains("(test) -> 10.0.0.2:2 ["));
    let mut out = Vec::new();
    cb.recv(3, &mut out);
    assert_eq!(out.len(), 3);
    cb.recv(3, &mut out);
    assert_eq!(out.len(), 5);
}

#[test]
fn equal_seeds_give_equal_runs() {
    let run = |seed| {
        let clock = ManualClock::new();
        let net = SimNet::new(&clock, seed);
        let (a, b) = (Endpoint::new("a", 1), Endpoint::new("b", 1));
        let (mut ca, mut cb) = (net.bind(&a), net.bind(&b));
        let delay = Duration::ZERO..MS;
        net.set_faults(Faults { drop: 0.2, duplicate: 0.2, overtaken: 0.2, delay });
        (0..100).for_each(|i| ca.send(&b, msg(&i.to_string())).unwrap());
        let mut got = Vec::new();
        while let Some(due) = net.next_due() {
            clock.advance_to(due);
            got.extend(texts(&mut cb));
        }
        got
    };
    assert_eq!(run(3), run(3));
    assert_ne!(run(3), run(4));
    let got = run(3);
    let mut distinct = got.clone();
    distinct.sort();
    distinct.dedup();
    assert!(distinct.len() < 100 && got.len() > distinct.len(), "some lost, some twice");
}
