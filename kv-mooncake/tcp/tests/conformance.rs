//! The suite of kv-testkit over our own peer of Mooncake's wire, with targets in processes of their own: ours, and the real
//! library's; and over the real library with our targets.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::sync::Arc;

use common::{available, config, target_command};
use kv_core::ids::PeerId;
use kv_core::transport::Transport;
use kv_mooncake_tcp::{MooncakeTcpConfig, MooncakeTcpTransport};
use kv_testkit::conformance::{self, Absent, Harness, RemoteTarget, Target};

/// The body of a target's process; not a test of its own.
#[test]
fn child_entry_point() {
    common::serve_if_child();
}

struct Pair {
    name: &'static str,
    /// `None`: the library's.
    source: Option<MooncakeTcpConfig>,
    /// In front of the port: whose target.
    target: &'static str,
    port: u16,
    /// The source made last, when it is ours.
    made: Option<Arc<MooncakeTcpTransport>>,
}

impl Pair {
    fn spawn(&self, port: u16) -> Box<dyn Target> {
        let what = format!("{} {port}", self.target);
        Box::new(RemoteTarget::spawn(target_command("child_entry_point", &what)).unwrap())
    }
}

impl Harness for Pair {
    fn name(&self) -> String {
        self.name.into()
    }

    fn source(&mut self) -> Arc<dyn Transport> {
        match &self.source {
            Some(config) => {
                let source = Arc::new(MooncakeTcpTransport::new(config.clone()).unwrap());
                self.made = Some(Arc::clone(&source));
                source
            }
            None => Arc::new(common::library()),
        }
    }

    fn target(&mut self) -> Box<dyn Target> {
        self.port += 1;
        self.spawn(self.port)
    }

    fn successor(&mut self, old: &mut dyn Target) -> Result<Box<dyn Target>, Absent> {
        let port = old.descriptor().map_err(|_| Absent("the old target does not answer"))?.endpoint.port();
        Ok(self.spawn(port))
    }

    fn cut(&mut self, peer: PeerId, target: &mut dyn Target) -> Result<(), Absent> {
        let _ = target;
        let source = self.made.as_ref().ok_or(Absent("nothing here cuts a connection of the library"))?;
        common::sever(source.data_port(peer).ok_or(Absent("the peer is not known any more"))?);
        Ok(())
    }

    fn end_trial(&mut self) {
        self.made = None;
    }

    fn many(&self) -> u64 {
        4096
    }
}

/// Few in flight, so that the trial of a busy lane sees one.
fn few() -> MooncakeTcpConfig {
    MooncakeTcpConfig { max_ops_in_flight: 64, ..config() }
}

/// The session id is all there is.
const NO_BLOB: [&str; 2] = ["forged_peer_refused", "damaged_peer_blob_harmless"];

fn conforms(name: &'static str, source: Option<MooncakeTcpConfig>, target: &'static str, skips: &[&str]) {
    let report = conformance::run(&mut Pair { name, source, target, port: 1000, made: None });
    report.assert_passed();
    report.assert_skips(skips);
}

#[test]
fn our_peer_of_the_wire_conforms() {
    conforms("kv-mooncake-tcp", Some(few()), "", &NO_BLOB);
}

/// With the real library at the other end.
#[test]
fn our_initiator_conforms_towards_the_library() {
    if available("our_initiator_conforms_towards_the_library") {
        conforms("kv-mooncake-tcp to the library", Some(few()), "library", &NO_BLOB);
    }
}

#[test]
fn the_library_conforms_towards_our_target() {
    if available("the_library_conforms_towards_our_target") {
        let skips = [
            // What the library says of itself: see kv-mooncake.
            "unregister_then_write_refused",
            "forged_peer_refused",
            "damaged_peer_blob_harmless",
            "cut_connection_no_late_writer",
            "unresolved_stays_until_proof",
        ];
        conforms("the library to kv-mooncake-tcp", None, "", &skips);
    }
}
