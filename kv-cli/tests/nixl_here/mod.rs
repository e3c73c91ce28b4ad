//! Whether NIXL can be tried here.

use kv_transfer::nixl::{NixlConfig, NixlTransport};

/// Without the library the test says that it passes over itself, or fails where the library is asked for.
pub fn available(test: &str) -> bool {
    let Err(error) = NixlTransport::new(NixlConfig::default()) else { return true };
    let required = std::env::var("KV_REQUIRE_BACKENDS").unwrap_or_default();
    assert!(!required.split(',').any(|b| b.trim() == "nixl"), "nixl is required: {error}");
    println!("skipped: {test}: {error}");
    false
}
