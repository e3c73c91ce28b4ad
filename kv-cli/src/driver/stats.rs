//! What a rank's manager counts, as a line of JSON: the release rules seen from outside.

use std::collections::BTreeMap;
use std::time::Duration;

use kv_transfer::engine::StatsSnapshot;
use serde::{Deserialize, Serialize};

use crate::error::{CliError, Result};

/// The numbers of one rank, as of now.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankStats {
    /// Every counter and gauge of [`Stats`](kv_transfer::engine::Stats), by its name there.
    #[serde(flatten)]
    pub counters: BTreeMap<String, u64>,
    /// Age of the oldest write without proof, seconds; 0: there is none.
    pub retained_oldest_s: f64,
    /// What is counted by peer: those that have or had any.
    pub peers: Vec<PeerStats>,
}

/// One peer's numbers.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PeerStats {
    /// Its control socket, `host:port`.
    pub peer: String,
    /// Prefill: writes to it without proof of quiet.
    pub retained_ops: u64,
    /// Bytes of those writes.
    pub retained_bytes: u64,
    /// Age of the oldest of them, seconds; 0: there is none.
    pub retained_oldest_s: f64,
    /// Decode: rooms whose pages were released by the timeout while its ACK was missing.
    pub released_without_proof: u64,
}

impl RankStats {
    /// The counter of this name. One that there is not reads as 0.
    pub fn get(&self, name: &str) -> u64 {
        self.counters.get(name).copied().unwrap_or(0)
    }

    /// The line that `--stats-every` prints.
    ///
    /// # Errors
    /// A number that is none; cannot happen.
    pub fn line(&self) -> Result<String> {
        #[derive(Serialize)]
        struct Line<'a> {
            stats: &'a RankStats,
        }
        serde_json::to_string(&Line { stats: self }).map_err(|e| CliError::new(format!("cannot write numbers: {e}")))
    }
}

impl From<StatsSnapshot> for RankStats {
    fn from(s: StatsSnapshot) -> Self {
        let seconds = |age: Option<Duration>| age.map_or(0.0, |age| age.as_secs_f64());
        let peer = |n: &kv_transfer::engine::PeerNumbers| PeerStats {
            peer: n.peer.to_string(),
            retained_ops: n.retained_ops,
            retained_bytes: n.retained_bytes,
            retained_oldest_s: seconds(n.retained_age(s.at)),
            released_without_proof: n.released_without_proof,
        };
        Self {
            counters: s.counters.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect(),
            retained_oldest_s: seconds(s.retained_age()),
            peers: s.peers.iter().map(peer).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_survives_the_pipe() {
        let peer = PeerStats {
            peer: "10.0.0.1:7".into(),
            retained_ops: 1,
            retained_bytes: 2,
            retained_oldest_s: 0.5,
            released_without_proof: 0,
        };
        let counters = [("ops_retained".to_owned(), 1)].into();
        let stats = RankStats { counters, retained_oldest_s: 0.5, peers: vec![peer] };
        let line = stats.line().unwrap();
        assert!(line.starts_with(r#"{"stats":{"ops_retained":1,"#), "{line}");
        let mut value: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!(serde_json::from_value::<RankStats>(value["stats"].take()).unwrap(), stats);
        assert_eq!((stats.get("ops_retained"), stats.get("no_such")), (1, 0));
    }
}
