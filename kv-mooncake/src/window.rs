//! How many tasks the library has for one session, over all lanes and generations; and whether it is known who is there.
//!
//! The library opens connections by itself, to whoever listens. A peer that restarts on the same ports breaks those that
//! are open, so one task tells: it fails where the process behind them has changed. Hence a session that was silent for a
//! while gets one task alone before it gets more.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Debug)]
pub(crate) struct Window(Mutex<Inner>);

#[derive(Debug)]
struct Inner {
    outstanding: usize,
    /// When a task of it last arrived, or it answered for itself.
    confirmed: Instant,
    /// One task is on its way alone.
    proving: bool,
}

impl Window {
    pub fn new(now: Instant) -> Self {
        Self(Mutex::new(Inner { outstanding: 0, confirmed: now, proving: false }))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Room for `least` to `wanted` tasks, of `most`; how many, or none. They are outstanding from now on.
    pub fn take(&self, (least, wanted): (usize, usize), most: usize, confirm_after: Duration, now: Instant) -> usize {
        let mut w = self.lock();
        let free = most.saturating_sub(w.outstanding);
        let granted = if w.proving {
            0
        } else if w.outstanding == 0 && now.saturating_duration_since(w.confirmed) > confirm_after {
            w.proving = wanted > 0;
            wanted.min(free).min(1)
        } else if free < least {
            0
        } else {
            wanted.min(free)
        };
        w.outstanding += granted;
        granted
    }

    /// `ended` tasks are outstanding no more; `arrived`: one of them at least has arrived.
    pub fn give(&self, ended: usize, arrived: bool, now: Instant) {
        let mut w = self.lock();
        w.outstanding = w.outstanding.saturating_sub(ended);
        if arrived {
            w.confirmed = now;
        }
        if arrived || w.outstanding == 0 {
            w.proving = false;
        }
    }

    /// The peer has just answered for itself.
    pub fn confirm(&self, now: Instant) {
        let mut w = self.lock();
        (w.confirmed, w.proving) = (now, false);
    }

    pub fn outstanding(&self) -> usize {
        self.lock().outstanding
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const AFTER: Duration = Duration::from_millis(100);

    #[test]
    fn never_more_than_the_most() {
        let now = Instant::now();
        let w = Window::new(now);
        assert_eq!(
            (w.take((1, 300), 512, AFTER, now), w.take((1, 300), 512, AFTER, now), w.take((1, 1), 512, AFTER, now)),
            (300, 212, 0)
        );
        w.give(12, true, now);
        assert_eq!((w.take((1, 300), 512, AFTER, now), w.outstanding()), (12, 512));
    }

    #[test]
    fn room_for_a_few_waits_until_it_is_room_for_more() {
        let now = Instant::now();
        let w = Window::new(now);
        assert_eq!(w.take((128, 128), 200, AFTER, now), 128);
        assert_eq!((w.take((128, 128), 200, AFTER, now), w.take((1, 128), 200, AFTER, now)), (0, 72));
    }

    #[test]
    fn after_silence_one_task_goes_alone() {
        let start = Instant::now();
        let (w, late) = (Window::new(start), start + 2 * AFTER);
        assert_eq!((w.take((1, 300), 512, AFTER, late), w.take((1, 300), 512, AFTER, late)), (1, 0));
        // It failed: the next one again goes alone.
        w.give(1, false, late);
        assert_eq!((w.take((1, 300), 512, AFTER, late), w.take((1, 300), 512, AFTER, late)), (1, 0));
        w.give(1, true, late);
        assert_eq!(w.take((1, 300), 512, AFTER, late), 300);
    }
}
