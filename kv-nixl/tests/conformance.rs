//! The suite of kv-testkit over the real library, with targets in processes of their own.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::sync::Arc;

use common::{available, config, target_command, with_environment};
use kv_core::transport::Transport;
use kv_nixl::{NixlConfig, NixlTransport};
use kv_testkit::conformance::{self, Absent, Harness, RemoteTarget, Target};

/// The body of a target's process; not a test of its own.
#[test]
fn child_entry_point() {
    common::serve_if_child();
}

struct Nixl {
    port: u16,
}

impl Nixl {
    fn spawn(&self, port: u16) -> Box<dyn Target> {
        Box::new(RemoteTarget::spawn(target_command("child_entry_point", &port.to_string())).unwrap())
    }
}

impl Harness for Nixl {
    fn name(&self) -> String {
        let tls = std::env::var("UCX_TLS").unwrap_or("default".into());
        format!("kv-nixl (UCX_TLS {tls})")
    }

    fn source(&mut self) -> Arc<dyn Transport> {
        // Few in flight, so that the trial of a busy lane sees one.
        Arc::new(NixlTransport::new(NixlConfig { max_ops_in_flight: 64, ..config() }).unwrap())
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

fn conforms() {
    conformance::run(&mut Nixl { port: 1000 }).assert_passed();
}

#[test]
fn the_library_conforms() {
    if available("the_library_conforms") {
        conforms();
    }
}

/// The same with everything over TCP: posts return before their transfers are done. In a process of its own, since the
/// library reads the environment when it is opened.
#[test]
fn the_library_conforms_over_tcp() {
    if with_environment("the_library_conforms_over_tcp", &[("UCX_TLS", "tcp")]) {
        conforms();
    }
}

/// The same through shared memory, whose errors nobody notices.
#[test]
fn the_library_conforms_through_shared_memory() {
    let env = [("UCX_TLS", "posix,self"), (common::IGNORE_ERRORS, "1")];
    if with_environment("the_library_conforms_through_shared_memory", &env) {
        conforms();
    }
}
