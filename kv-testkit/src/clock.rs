//! A clock that moves only when told to.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use kv_core::time::{Clock, Timestamp};

/// A clock that stands still until [`advance`](Self::advance). Clones share one time.
#[derive(Clone, Debug, Default)]
pub struct ManualClock(Arc<AtomicU64>);

impl ManualClock {
    /// A clock that shows [`Timestamp::ZERO`].
    pub fn new() -> Self {
        Self::default()
    }

    /// The time it shows.
    pub fn now(&self) -> Timestamp {
        Timestamp::from_nanos(self.0.load(Ordering::SeqCst))
    }

    /// Move forward by `d` and return the new time.
    pub fn advance(&self, d: Duration) -> Timestamp {
        self.advance_to(self.now() + d)
    }

    /// Move forward to `t`; a `t` in the past changes nothing, for a clock never goes back.
    pub fn advance_to(&self, t: Timestamp) -> Timestamp {
        self.0.fetch_max(t.as_nanos(), Ordering::SeqCst);
        self.now()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Timestamp {
        Self::now(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clones_share_time_and_it_never_goes_back() {
        let a = ManualClock::new();
        let b = a.clone();
        a.advance(Duration::from_secs(3));
        assert_eq!(b.now(), Timestamp::from_nanos(3_000_000_000));
        assert_eq!(b.advance_to(Timestamp::from_nanos(7)), Timestamp::from_nanos(3_000_000_000));
    }
}
