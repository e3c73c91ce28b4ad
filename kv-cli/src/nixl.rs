//! NIXL as this program opens it, and what a person is told when that fails.

use std::sync::atomic::{AtomicBool, Ordering};

use kv_transfer::nixl::{NixlConfig, NixlTransport};

use crate::error::{CliError, Result};

/// How to get the library.
pub const INSTALL: &str = "`cargo xtask setup nixl` in a checkout, or `pip install --no-deps nixl-cu12==1.5.1`, or \
                           KV_NIXL_LIB=/path/to/libnixl_capi.so";
/// Places that were tried and are named; the rest is counted.
const PLACES: usize = 4;

static OPENED: AtomicBool = AtomicBool::new(false);

/// Whether this process tried to open the library.
pub fn was_opened() -> bool {
    OPENED.load(Ordering::Relaxed)
}

/// A transport, as every rank uses it.
///
/// # Errors
/// The library is not here, or cannot start.
pub fn open() -> Result<NixlTransport> {
    OPENED.store(true, Ordering::Relaxed);
    NixlTransport::new(NixlConfig::default()).map_err(|e| {
        let tls = std::env::var("UCX_TLS").is_ok();
        failure(&e.to_string(), tls)
    })
}

/// The transport's error comes as text, so it is its text that is looked at.
fn failure(text: &str, tls: bool) -> CliError {
    // It ends with advice of its own, and the list before may be long.
    let (seen, missing) = match text.split_once("; install it (") {
        Some((seen, _)) => (shortened(seen), true),
        None => (text.to_owned(), text.contains("libnixl_capi.so")),
    };
    let hint = match (missing, tls) {
        (true, _) => INSTALL,
        (false, true) => "unset UCX_TLS, or put tcp into it",
        (false, false) => "NIXL_LOG_LEVEL=debug UCX_LOG_LEVEL=info show what it does",
    };
    CliError::new(format!("cannot start the nixl transport: {seen}")).hint(hint)
}

fn shortened(seen: &str) -> String {
    let mut places: Vec<_> = seen.split("; ").collect();
    let more = places.len().saturating_sub(PLACES);
    places.truncate(PLACES);
    let list = places.join("; ");
    if more > 0 { format!("{list}; and {more} more places") } else { list }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_library_names_places_and_the_cure_once() {
        let text = |n: usize| {
            let places: String = (0..n).map(|i| format!("/p{i} (Python's packages): no such file; ")).collect();
            format!("libnixl_capi.so (NIXL 1.5) is not to be had: {places}install it (`x`, or `y`), or set KV_NIXL_LIB")
        };
        let e = failure(&text(1), true).one_line();
        assert!(e.contains("/p0 (Python's packages): no such file; `cargo xtask setup nixl`"), "{e}");
        assert!(!e.contains("install it"), "{e}");
        let e = failure(&text(9), false).one_line();
        assert!(e.contains("/p3") && !e.contains("/p4") && e.contains("and 5 more places"), "{e}");
    }

    #[test]
    fn the_cure_follows_the_cause() {
        assert_eq!(failure("/x/libnixl_capi.so has no function f: use NIXL 1.5", false).hint, INSTALL);
        let backend = "NIXL cannot start its backend UCX: backend error (-2)";
        assert!(failure(backend, true).hint.contains("UCX_TLS"));
        assert!(failure(backend, false).hint.contains("LOG_LEVEL"));
    }
}
