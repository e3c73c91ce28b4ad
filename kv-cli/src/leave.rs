//! How this program ends.

use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, Ordering};

static SKIPS: AtomicBool = AtomicBool::new(false);

/// The end of `main`, with this status.
pub fn with(code: ExitCode) -> ExitCode {
    if skips_destructors() {
        // The type does not tell its number.
        now((0..=u8::MAX).find(|n| ExitCode::from(*n) == code).map_or(1, i32::from));
    }
    code
}

/// End the process here, from any thread.
pub fn now(status: i32) -> ! {
    if skips_destructors() {
        // Results were flushed when they were written (see `out`), and standard error has no buffer.
        // SAFETY: ends the process, whatever its threads do.
        unsafe { libc::_exit(status) };
    }
    std::process::exit(status)
}

/// From now on the process ends without running destructors of libraries: of what a vendor brings, some crash there, and
/// the status would be 139 whatever the result.
pub fn without_destructors() {
    SKIPS.store(true, Ordering::Relaxed);
}

fn skips_destructors() -> bool {
    SKIPS.load(Ordering::Relaxed)
}
