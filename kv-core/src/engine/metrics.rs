//! The numbers of a manager, handed to the recorder that the process installed for the `metrics` facade.
//!
//! [`Stats`] stays the source: an export copies it, whenever the process likes (an exporter's interval), and costs
//! nothing in between. Every number carries the labels `role` and `backend`; numbers by peer also `peer` (its control
//! socket).

use metrics::{counter, describe_counter, describe_gauge, gauge};

use super::Stats;
use crate::time::Timestamp;

/// Counters that go up and down.
const GAUGES: &[&str] = &["rooms_live", "rooms_awaiting_release", "ops_in_flight", "ops_retained", "bytes_retained"];

/// What every number of these has in front of its name.
const PREFIX: &str = "kv_transfer_";

impl Stats {
    /// Hand everything to the recorder. `role`: `prefill` or `decode`; `now`: of the clock that the shard runs on.
    ///
    /// Names: `kv_transfer_` and the counter's name; and `kv_transfer_retained_ops`, `kv_transfer_retained_bytes`,
    /// `kv_transfer_retained_oldest_seconds` (0: none) and `kv_transfer_released_without_proof_by_peer` by peer.
    pub fn export(&self, role: &'static str, backend: &'static str, now: Timestamp) {
        let all = self.snapshot_at(now);
        let seconds = |age: Option<std::time::Duration>| age.map_or(0.0, |age| age.as_secs_f64());
        for &(name, value) in &all.counters {
            let full = format!("{PREFIX}{name}");
            if GAUGES.contains(&name) {
                gauge!(full, "role" => role, "backend" => backend).set(value as f64);
            } else {
                counter!(full, "role" => role, "backend" => backend).absolute(value);
            }
        }
        for n in &all.peers {
            let peer = n.peer.to_string();
            let by = |name: &'static str| gauge!(name, "role" => role, "backend" => backend, "peer" => peer.clone());
            by("kv_transfer_retained_ops").set(n.retained_ops as f64);
            by("kv_transfer_retained_bytes").set(n.retained_bytes as f64);
            by("kv_transfer_retained_oldest_seconds").set(seconds(n.retained_age(now)));
            counter!(
                "kv_transfer_released_without_proof_by_peer",
                "role" => role, "backend" => backend, "peer" => peer
            )
            .absolute(n.released_without_proof);
        }
        gauge!("kv_transfer_ops_retained_oldest_seconds", "role" => role, "backend" => backend)
            .set(seconds(all.retained_age()));
    }

    /// Tell the recorder what the numbers that matter most mean.
    pub fn describe() {
        describe_gauge!("kv_transfer_rooms_awaiting_release", "failed rooms whose pages are not free yet");
        describe_gauge!("kv_transfer_ops_in_flight", "posted writes whose outcome has not come");
        describe_gauge!("kv_transfer_retained_ops", "writes to a peer without proof of quiet, kept alive");
        describe_gauge!("kv_transfer_retained_bytes", "bytes of those writes, whose memory stays registered");
        describe_gauge!("kv_transfer_retained_oldest_seconds", "age of the oldest of those writes");
        describe_gauge!("kv_transfer_ops_retained_oldest_seconds", "age of the oldest write without proof, any peer");
        describe_counter!(
            "kv_transfer_released_without_proof_by_peer",
            "rooms whose pages were released by the timeout while the peer's ACK was missing"
        );
    }
}
