//! What the live tests share.
#![allow(dead_code)] // every test binary uses its own part
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests, outside `#[test]` functions

use std::process::Command;

use kv_nixl::{NixlConfig, NixlTransport};

/// Tells a process that it is a target, and of which port.
pub const CHILD: &str = "KV_NIXL_TEST_CHILD";

pub fn config() -> NixlConfig {
    NixlConfig::default()
}

/// Whether the library is here. Without it the test says that it passes over itself, or fails where the library is asked
/// for.
pub fn available(test: &str) -> bool {
    let Err(error) = NixlTransport::new(config()) else { return true };
    let required = std::env::var("KV_REQUIRE_BACKENDS").unwrap_or_default();
    assert!(!required.split(',').any(|b| b.trim() == "nixl"), "nixl is required: {error}");
    println!("skipped: {test}: {error}");
    false
}

/// A process of this program that runs one test as a target.
pub fn target_command(test: &str, what: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, what);
    command
}
