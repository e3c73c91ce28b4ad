//! The numbers as an exporter sees them (requirement I1).
// A test reports by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use kv_testkit::fake_transport::Policy;
use kv_testkit::world::{World, WorldSpec};
use metrics::{Counter, CounterFn, Gauge, GaugeFn, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};

type Values = Arc<Mutex<BTreeMap<String, f64>>>;

struct Slot(Values, String);

impl CounterFn for Slot {
    fn increment(&self, n: u64) {
        *self.0.lock().unwrap().entry(self.1.clone()).or_default() += n as f64;
    }
    fn absolute(&self, n: u64) {
        self.0.lock().unwrap().insert(self.1.clone(), n as f64);
    }
}

impl GaugeFn for Slot {
    fn increment(&self, n: f64) {
        *self.0.lock().unwrap().entry(self.1.clone()).or_default() += n;
    }
    fn decrement(&self, n: f64) {
        self.increment_by(-n);
    }
    fn set(&self, n: f64) {
        self.0.lock().unwrap().insert(self.1.clone(), n);
    }
}

impl Slot {
    fn increment_by(&self, n: f64) {
        GaugeFn::increment(self, n);
    }
}

/// Remembers the newest value of everything.
#[derive(Default)]
struct Memory(Values);

impl Memory {
    fn slot(&self, key: &Key) -> Arc<Slot> {
        let labels: Vec<_> = key.labels().map(|l| format!("{}={}", l.key(), l.value())).collect();
        Arc::new(Slot(self.0.clone(), format!("{}{{{}}}", key.name(), labels.join(","))))
    }
    fn get(&self, name: &str) -> f64 {
        *self.0.lock().unwrap().get(name).unwrap_or_else(|| panic!("no {name}"))
    }
}

impl Recorder for Memory {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.slot(key))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.slot(key))
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[test]
fn r_f5_r_i1_retained_writes_are_seen_with_age_and_bytes_and_seen_to_go() {
    let mut w = World::new(WorldSpec::default());
    w.p[0].transport.set_policy(Policy::Hold);
    let (s, r) = w.open(7, &[4]);
    w.send(0, &s[0], &[0], 0, true);
    w.run();
    let op = w.p[0].transport.only().id;
    let of_prefill = |w: &World| {
        let s = w.p[0].stats.snapshot_at(kv_core::time::Clock::now(&w.clock));
        ["ops_in_flight", "ops_retained", "rooms_awaiting_release"].map(|name| s.get(name).unwrap())
    };
    assert_eq!(of_prefill(&w), [1, 0, 0], "under way");
    w.p[0].transport.unresolve(op);
    w.run();
    assert_eq!(of_prefill(&w), [0, 1, 1], "without proof: the pages may still be read");
    assert_eq!(w.d[0].stats.rooms_awaiting_release.get(), 1, "and written");
    w.advance(Duration::from_secs(3));

    let memory = Memory::default();
    let export = |w: &World| {
        metrics::with_local_recorder(&memory, || {
            w.p[0].stats.export("prefill", "fake", kv_core::time::Clock::now(&w.clock));
            w.d[0].stats.export("decode", "fake", kv_core::time::Clock::now(&w.clock));
        });
    };
    export(&w);
    let peer = "role=prefill,backend=fake,peer=10.0.1.1:7000";
    assert_eq!(memory.get(&format!("kv_transfer_retained_ops{{{peer}}}")), 1.0);
    assert!(memory.get(&format!("kv_transfer_retained_bytes{{{peer}}}")) > 0.0);
    assert_eq!(memory.get(&format!("kv_transfer_retained_oldest_seconds{{{peer}}}")), 3.0);
    assert_eq!(memory.get("kv_transfer_ops_retained_oldest_seconds{role=prefill,backend=fake}"), 3.0);
    assert_eq!(memory.get("kv_transfer_ops_retained{role=prefill,backend=fake}"), 1.0);
    assert_eq!(memory.get("kv_transfer_rooms_failed{role=decode,backend=fake}"), 1.0);

    assert_eq!(memory.get("kv_transfer_rooms_awaiting_release{role=decode,backend=fake}"), 1.0);
    let now = kv_core::time::Clock::now(&w.clock);
    assert_eq!(w.p[0].stats.snapshot_at(now).retained_age(), Some(Duration::from_secs(3)));

    // Decode gives the pages back by time: policy, and counted.
    w.advance(Duration::from_secs(30));
    assert_eq!(w.d[0].stats.rooms_awaiting_release.get(), 0, "policy gave them back");
    w.p[0].transport.settle(op, true, true);
    w.run();
    assert_eq!(of_prefill(&w), [0, 0, 0], "proof gave them back");
    w.close(&s, &r);
    export(&w);
    let prefill = "role=decode,backend=fake,peer=10.0.0.1:9000";
    assert_eq!(memory.get(&format!("kv_transfer_released_without_proof_by_peer{{{prefill}}}")), 1.0);
    assert_eq!(memory.get("kv_transfer_released_without_proof{role=decode,backend=fake}"), 1.0);
    for gauge in ["retained_ops", "retained_bytes", "retained_oldest_seconds"] {
        assert_eq!(memory.get(&format!("kv_transfer_{gauge}{{{peer}}}")), 0.0, "{gauge}");
    }
    kv_core::engine::Stats::describe();
}
