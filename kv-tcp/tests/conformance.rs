//! The suite of kv-testkit over both paths, with targets in processes of their own.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

use std::cell::RefCell;
use std::process::Command;
use std::rc::Rc;
use std::sync::Arc;

use kv_core::net::Endpoint;
use kv_core::transport::{PeerDescriptor, Transport};
use kv_tcp::{SameHost, TcpConfig, TcpTransport};
use kv_testkit::conformance::{self, Absent, Block, Harness, NoFaults, RemoteTarget, Target};

const CHILD: &str = "KV_TCP_CONFORMANCE_CHILD";

fn config(same_host: SameHost) -> TcpConfig {
    // Few in flight, so that the trial of a busy lane sees one.
    TcpConfig { same_host, max_ops_in_flight: 64, ..TcpConfig::loopback() }
}

fn same_host(mode: &str) -> SameHost {
    if mode == "direct" { SameHost::Auto } else { SameHost::Off }
}

/// The body of a target's process; not a test of its own.
#[test]
fn child_entry_point() {
    let Ok(spec) = std::env::var(CHILD) else { return };
    let (mode, port) = spec.split_once(' ').unwrap();
    let transport = Arc::new(TcpTransport::new(config(same_host(mode))).unwrap());
    conformance::serve_stdio(transport, Endpoint::new("127.0.0.1", port.parse().unwrap()), NoFaults).unwrap();
}

type Sources = Rc<RefCell<Vec<Arc<TcpTransport>>>>;

/// A target in another process; cuts are made at the source's end.
struct Remote(RemoteTarget, Sources);

impl Target for Remote {
    fn descriptor(&mut self) -> Result<PeerDescriptor, String> {
        self.0.descriptor()
    }
    fn alloc(&mut self, len: usize, register: bool) -> Result<Block, String> {
        self.0.alloc(len, register)
    }
    fn unregister(&mut self, block: u32) -> Result<(), String> {
        self.0.unregister(block)
    }
    fn read(&mut self, block: u32, offset: usize, len: usize) -> Result<Vec<u8>, String> {
        self.0.read(block, offset, len)
    }
    fn write(&mut self, block: u32, offset: usize, bytes: &[u8]) -> Result<(), String> {
        self.0.write(block, offset, bytes)
    }
    fn check_guards(&mut self, block: u32) -> Result<(), String> {
        self.0.check_guards(block)
    }
    fn kill(&mut self) -> Result<(), Absent> {
        self.0.kill()
    }
    fn pause(&mut self) -> Result<(), Absent> {
        self.0.pause()
    }
    fn resume(&mut self) {
        self.0.resume();
    }
    fn cut(&mut self) -> Result<(), Absent> {
        self.1.borrow().iter().for_each(|s| s.sever_all());
        Ok(())
    }
}

struct Tcp {
    mode: &'static str,
    port: u16,
    sources: Sources,
}

impl Tcp {
    fn new(mode: &'static str) -> Self {
        Self { mode, port: 1000, sources: Rc::default() }
    }

    fn spawn(&self, port: u16) -> Box<dyn Target> {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", "child_entry_point", "--nocapture"]).env(CHILD, format!("{} {port}", self.mode));
        Box::new(Remote(RemoteTarget::spawn(command).unwrap(), self.sources.clone()))
    }
}

impl Harness for Tcp {
    fn name(&self) -> String {
        format!("kv-tcp {}", self.mode)
    }

    fn source(&mut self) -> Arc<dyn Transport> {
        let transport = Arc::new(TcpTransport::new(config(same_host(self.mode))).unwrap());
        self.sources.borrow_mut().push(transport.clone());
        transport
    }

    fn target(&mut self) -> Box<dyn Target> {
        self.port += 1;
        self.spawn(self.port)
    }

    fn successor(&mut self, old: &mut dyn Target) -> Result<Box<dyn Target>, Absent> {
        let port = old.descriptor().map_err(|_| Absent("the old target does not answer"))?.endpoint.port();
        Ok(self.spawn(port))
    }

    /// The blob carries admission and region keys, and names the generation: a flipped bit anywhere is noticed, and all
    /// addresses are on the loopback interface.
    fn flipped_blobs(&self) -> u32 {
        40
    }

    fn end_trial(&mut self) {
        self.sources.borrow_mut().clear();
    }
}

fn conforms(mode: &'static str) {
    let report = conformance::run(&mut Tcp::new(mode));
    report.assert_passed();
    // Ops of this trial are mostly done before its cut, and over TCP they end with the source proven quiet, which is
    // more than `Unresolved`. Its subject is tested with a stopped target in `process.rs`.
    let skipped = report.skipped();
    assert!(skipped.iter().all(|t| *t == "unresolved_stays_until_proof"), "{skipped:?}");
}

#[test]
fn direct_copies_conform() {
    conforms("direct");
}

#[test]
fn striped_tcp_conforms() {
    conforms("tcp");
}
