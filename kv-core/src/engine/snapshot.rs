//! The numbers of a manager at one time, for people and for programs without a `metrics` recorder (requirement I1).

use std::time::Duration;

use super::peer_stats::PeerNumbers;
use super::stats::Stats;
use crate::time::Timestamp;

/// What one manager counts, as it stood at `at`. Each number is exact; two of them may be a step of the shard apart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatsSnapshot {
    /// When, by the clock that the shard runs on.
    pub at: Timestamp,
    /// Every counter and gauge of [`Stats`], with its name.
    pub counters: Vec<(&'static str, u64)>,
    /// What is counted by peer: those that have or had any.
    pub peers: Vec<PeerNumbers>,
}

impl StatsSnapshot {
    /// The counter of this name; `None`: there is none.
    pub fn get(&self, name: &str) -> Option<u64> {
        self.counters.iter().find(|(n, _)| *n == name).map(|(_, value)| *value)
    }

    /// Age of the oldest write without proof, whichever peer it goes to; `None`: there is none.
    pub fn retained_age(&self) -> Option<Duration> {
        self.peers.iter().filter_map(|p| p.retained_age(self.at)).max()
    }
}

impl PeerNumbers {
    /// Age, at `now`, of its oldest write without proof; `None`: there is none.
    pub fn retained_age(&self, now: Timestamp) -> Option<Duration> {
        self.retained_since.map(|since| now.since(since))
    }
}

impl Stats {
    /// Everything, by peer too. `now`: of the clock that the shard runs on; managers know it
    /// ([`PrefillManager::snapshot`](crate::manager::PrefillManager::snapshot)).
    pub fn snapshot_at(&self, now: Timestamp) -> StatsSnapshot {
        StatsSnapshot { at: now, counters: self.snapshot(), peers: self.peers.snapshot() }
    }
}
