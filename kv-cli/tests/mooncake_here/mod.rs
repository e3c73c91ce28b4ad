//! Whether Mooncake can be tried here.

use kv_transfer::mooncake::{MooncakeConfig, MooncakeTransport};

/// Without the library the test says that it passes over itself, or fails where the library is asked for.
pub fn available(test: &str) -> bool {
    let config = MooncakeConfig { host: Some("127.0.0.1".into()), ..MooncakeConfig::default() };
    let Err(error) = MooncakeTransport::new(config) else { return true };
    let required = std::env::var("KV_REQUIRE_BACKENDS").unwrap_or_default();
    assert!(!required.split(',').any(|b| b.trim() == "mooncake"), "mooncake is required: {error}");
    println!("skipped: {test}: {error}");
    false
}
