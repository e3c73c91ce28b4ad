//! How this program ends.

use std::process::ExitCode;

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

/// With NIXL in the process, destructors of libraries do not run: where there is RDMA, one that it brings crashes, and the
/// status would be 139 whatever the result.
fn skips_destructors() -> bool {
    #[cfg(feature = "nixl")]
    return crate::nixl::was_opened();
    #[cfg(not(feature = "nixl"))]
    false
}
