//! Waking a shard that sleeps in a poll: an eventfd that costs a system call only when somebody sleeps on it.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// An eventfd with an "armed" flag.
///
/// The order of calls is a contract. The **sleeper** (one thread):
///
/// 1. [`arm`](Self::arm),
/// 2. look at every queue once more; when one holds work, [`disarm`](Self::disarm) and do the work,
/// 3. otherwise poll [`fd`](Self::fd) until it is readable, then [`disarm`](Self::disarm).
///
/// A **waker** (any thread) puts its work into a queue first, then calls [`wake`](Self::wake).
///
/// Memory ordering: `arm` stores the flag, then runs a `SeqCst` fence; `wake` runs a `SeqCst` fence, then loads the
/// flag. This is the store-buffering pattern: the two fences have one order, so either the waker sees the flag (and
/// writes), or the sleeper's second look sees the work. Both missing each other is impossible; both succeeding costs
/// one needless wake. A waker that finds the flag down pays a fence and a load, no system call.
#[derive(Debug)]
pub struct WakeFd {
    file: File,
    armed: AtomicBool,
}

impl WakeFd {
    /// A new eventfd, not armed, close-on-exec, non-blocking.
    ///
    /// # Errors
    /// What the system says, in practice that the process has no descriptor left.
    pub fn new() -> io::Result<Self> {
        // SAFETY: eventfd takes two integers and touches no memory of ours.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the descriptor was just made, is valid, and nobody else owns it.
        let owned = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Self { file: File::from(owned), armed: AtomicBool::new(false) })
    }

    /// The descriptor to poll for reading. It stays owned by `self`.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Sleeper: announce the sleep. Look at the queues once more after this and before sleeping.
    pub fn arm(&self) {
        self.armed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Sleeper: awake again. Takes the flag down and empties the eventfd.
    ///
    /// A waker that took the flag but has not written yet leaves one needless wake for the next sleep, no more.
    pub fn disarm(&self) {
        // When the flag is still up, nobody took it, so nobody wrote: the system call is saved.
        if !self.armed.swap(false, Ordering::AcqRel) {
            self.drain();
        }
    }

    /// Waker: wake the sleeper if there is one. Call it after the work is visible in its queue. True when the system
    /// call was made.
    pub fn wake(&self) -> bool {
        fence(Ordering::SeqCst);
        // The plain load keeps the cache line shared between wakers while nobody sleeps; the swap picks one waker.
        let take = self.armed.load(Ordering::Relaxed) && self.armed.swap(false, Ordering::AcqRel);
        if take {
            // An eventfd write fails only when the counter would overflow; then it is readable anyway.
            let _ = (&self.file).write(&1u64.to_ne_bytes());
        }
        take
    }

    /// Empty the eventfd without touching the flag. Never blocks. True when it had been written to.
    pub fn drain(&self) -> bool {
        let mut count = [0u8; 8];
        matches!((&self.file).read(&mut count), Ok(8))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wake_writes_only_when_armed_and_only_once() {
        let wake = WakeFd::new().unwrap();
        assert!(!wake.wake(), "nobody sleeps");
        assert!(!wake.drain());
        wake.arm();
        assert!(wake.wake());
        assert!(!wake.wake(), "the first waker took the flag");
        wake.disarm();
        assert!(!wake.drain(), "disarm emptied it");
    }

    #[test]
    fn disarm_without_wake_leaves_nothing_behind() {
        let wake = WakeFd::new().unwrap();
        wake.arm();
        wake.disarm();
        assert!(!wake.wake());
        assert!(!wake.drain());
    }
}
