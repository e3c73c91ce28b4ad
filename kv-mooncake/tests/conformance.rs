//! The suite of kv-testkit over the real library, with targets in processes of their own.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::sync::Arc;

use common::{available, config, target_command};
use kv_core::transport::Transport;
use kv_mooncake::{MooncakeConfig, MooncakeTransport};
use kv_testkit::conformance::{self, Absent, Harness, RemoteTarget, Target};

/// The body of a target's process; not a test of its own.
#[test]
fn child_entry_point() {
    common::serve_if_child();
}

struct Mooncake {
    port: u16,
    config: MooncakeConfig,
}

impl Mooncake {
    fn spawn(&self, port: u16) -> Box<dyn Target> {
        Box::new(RemoteTarget::spawn(target_command("child_entry_point", &port.to_string())).unwrap())
    }
}

impl Harness for Mooncake {
    fn name(&self) -> String {
        format!("kv-mooncake ({} tasks a peer)", self.config.max_tasks_per_peer)
    }

    fn source(&mut self) -> Arc<dyn Transport> {
        Arc::new(MooncakeTransport::new(self.config.clone()).unwrap())
    }

    fn target(&mut self) -> Box<dyn Target> {
        self.port += 1;
        self.spawn(self.port)
    }

    fn successor(&mut self, old: &mut dyn Target) -> Result<Box<dyn Target>, Absent> {
        let port = old.descriptor().map_err(|_| Absent("the old target does not answer"))?.endpoint.port();
        Ok(self.spawn(port))
    }

    fn many(&self) -> u64 {
        4096
    }
}

fn conforms(config: MooncakeConfig) {
    // Few in flight, so that the trial of a busy lane sees one.
    let config = MooncakeConfig { max_ops_in_flight: 64, ..config };
    let report = conformance::run(&mut Mooncake { port: 1000, config });
    report.assert_passed();
    report.assert_skips(&[
        // A write that has begun goes on: see the crate's documentation. What begins later is refused (faults.rs).
        "unregister_then_write_refused",
        // The session id is all there is.
        "forged_peer_refused",
        "damaged_peer_blob_harmless",
        // Nothing here cuts a connection of the library and lets both processes live.
        "cut_connection_no_late_writer",
        "unresolved_stays_until_proof",
    ]);
}

#[test]
fn the_library_conforms() {
    if available("the_library_conforms") {
        conforms(config());
    }
}

/// With room for hardly anything: every op waits for room, and goes in many batches.
#[test]
fn the_library_conforms_with_three_tasks_at_a_time() {
    if available("the_library_conforms_with_three_tasks_at_a_time") {
        conforms(MooncakeConfig { max_tasks_per_peer: 3, max_batch: 2, ..config() });
    }
}
