//! What comes from outside while rooms run: lines on standard input, its end, SIGTERM.

use std::io::BufRead as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// Told to stop.
static TERMINATED: AtomicBool = AtomicBool::new(false);

extern "C" fn on_term(_signal: libc::c_int) {
    TERMINATED.store(true, Ordering::Relaxed);
}

/// SIGTERM is [noted](terminated) from now on, and ends nothing.
pub fn catch_sigterm() {
    // SAFETY: the handler stores to an atomic, which is all that a handler may do.
    unsafe { libc::signal(libc::SIGTERM, on_term as extern "C" fn(libc::c_int) as libc::sighandler_t) };
}

/// SIGTERM came.
pub fn terminated() -> bool {
    TERMINATED.load(Ordering::Relaxed)
}

/// Lines seen so far.
#[derive(Clone, Debug, Default)]
pub struct Input(Arc<Seen>);

#[derive(Debug, Default)]
struct Seen {
    lines: AtomicUsize,
    ended: AtomicBool,
}

impl Input {
    /// Read from now on, on a thread of its own; and catch SIGTERM.
    pub fn start() -> Self {
        catch_sigterm();
        let input = Self::default();
        let seen = input.0.clone();
        std::thread::spawn(move || {
            for line in std::io::stdin().lock().lines() {
                if line.is_err() {
                    break;
                }
                seen.lines.fetch_add(1, Ordering::Release);
            }
            seen.ended.store(true, Ordering::Release);
        });
        input
    }

    /// Whether the gate is open: a line came, or no more can.
    pub fn gate_open(&self) -> bool {
        self.0.lines.load(Ordering::Acquire) > 0 || self.ended()
    }

    /// Standard input has ended.
    pub fn ended(&self) -> bool {
        self.0.ended.load(Ordering::Acquire)
    }

    /// SIGTERM came.
    pub fn terminated(&self) -> bool {
        terminated()
    }

    /// Block until standard input ends, or SIGTERM.
    pub fn wait_for_end(&self) {
        while !self.ended() && !self.terminated() {
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Block for so long, or until SIGTERM.
    pub fn linger(&self, time: Duration) {
        let end = std::time::Instant::now() + time;
        while !self.terminated() {
            let left = end.saturating_duration_since(std::time::Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::sleep(left.min(Duration::from_millis(20)));
        }
    }
}

/// End this process as `kill -9` does.
pub fn kill_self() -> ! {
    // SAFETY: a signal to ourselves; it cannot be caught.
    unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    loop {
        std::thread::park();
    }
}
