//! Counting missed heartbeats of one prefill server (protocol 7.5).

use std::time::Duration;

use crate::time::Timestamp;

/// How servers are watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeartbeatConfig {
    /// Time between two probes of one server; below 2 s it is taken as 2 s
    /// (`SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL`).
    pub interval: Duration,
    /// Misses in a row at which the server counts as lost; 0 is taken as 1
    /// (`SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE`).
    pub max_failure: u32,
}

impl Default for HeartbeatConfig {
    fn default() -> Self {
        Self { interval: Duration::from_secs(5), max_failure: 2 }
    }
}

impl HeartbeatConfig {
    /// Shortest interval.
    pub const MIN_INTERVAL: Duration = Duration::from_secs(2);

    fn interval(&self) -> Duration {
        self.interval.max(Self::MIN_INTERVAL)
    }
}

/// One server's probes. At most one is under way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    config: HeartbeatConfig,
    due: Timestamp,
    in_flight: bool,
    misses: u32,
}

impl Heartbeat {
    /// Watching begins; the first probe is due after one interval.
    pub fn new(now: Timestamp, config: HeartbeatConfig) -> Self {
        Self { config, due: now + config.interval(), in_flight: false, misses: 0 }
    }

    /// When the next probe is due; `None` while one is under way.
    pub fn due(&self) -> Option<Timestamp> {
        (!self.in_flight).then_some(self.due)
    }

    /// Whether to send a probe now. The next one is due an interval later, or when this one ended, whichever is later.
    pub fn start(&mut self, now: Timestamp) -> bool {
        let start = !self.in_flight && now >= self.due;
        if start {
            self.in_flight = true;
            self.due = now + self.config.interval();
        }
        start
    }

    /// A probe ended. A good one resets the count.
    ///
    /// Returns whether the server is lost.
    pub fn finish(&mut self, alive: bool) -> bool {
        self.in_flight = false;
        self.misses = if alive { 0 } else { self.misses.saturating_add(1) };
        self.misses >= self.config.max_failure.max(1)
    }

    /// Misses in a row.
    pub fn misses(&self) -> u32 {
        self.misses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Timestamp {
        Timestamp::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn r_d7_two_misses_in_a_row_lose_the_server() {
        let mut hb = Heartbeat::new(at(0), HeartbeatConfig::default());
        assert!(!hb.start(at(4)));
        assert!(hb.start(at(5)));
        assert!(!hb.start(at(11)), "one probe at a time");
        assert_eq!((hb.due(), hb.finish(false)), (None, false));
        assert!(hb.start(at(11)));
        assert!(!hb.finish(true), "a good one resets the count");
        assert!(hb.start(at(16)));
        assert!(!hb.finish(false));
        assert!(hb.start(at(21)));
        assert!(hb.finish(false));
    }

    #[test]
    fn limits_of_the_settings_are_sglangs() {
        let mut hb = Heartbeat::new(at(0), HeartbeatConfig { interval: Duration::ZERO, max_failure: 0 });
        assert_eq!(hb.due(), Some(at(2)));
        assert!(hb.start(at(2)));
        assert!(hb.finish(false), "one miss is the least");
    }
}
