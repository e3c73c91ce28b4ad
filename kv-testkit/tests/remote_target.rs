//! A target in a real child process: driven, paused, resumed, killed.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use std::process::Command;

use kv_core::net::Endpoint;
use kv_core::transport::Transport as _;
use kv_testkit::FakeFabric;
use kv_testkit::conformance::{NoFaults, RemoteTarget, Target as _, serve_stdio};

const CHILD: &str = "KV_TESTKIT_CHILD";

/// Not a test of its own: the child's entry point. The parent runs this program with only this test and the variable.
#[test]
fn child_entry_point() {
    if std::env::var_os(CHILD).is_some() {
        let transport = FakeFabric::new().transport("child");
        serve_stdio(transport, Endpoint::new("127.0.0.1", 7), NoFaults).unwrap();
    }
}

fn spawn() -> RemoteTarget {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child_entry_point", "--nocapture"]).env(CHILD, "1");
    RemoteTarget::spawn(command).unwrap()
}

#[test]
fn a_child_is_driven_paused_resumed_and_killed() {
    let mut target = spawn();
    let block = target.alloc(100, true).unwrap();
    assert_eq!(block.len, 100);
    target.write(block.id, 10, b"hello").unwrap();
    assert_eq!(target.read(block.id, 8, 9).unwrap(), b"\0\0hello\0\0");
    target.check_guards(block.id).unwrap();
    assert!(target.read(99, 0, 1).unwrap_err().contains("no block 99"));

    let descriptor = target.descriptor().unwrap();
    assert_eq!((descriptor.name.as_str(), descriptor.endpoint.port()), ("child", 7));
    // The blob came over whole: a transport of another fabric can read it, and knows no such process.
    let error = FakeFabric::new().transport("here").connect(&descriptor).unwrap_err();
    assert!(error.message.contains("no such transport on this fabric"), "{error}");

    target.pause().unwrap();
    assert_eq!(target.read(block.id, 0, 1).unwrap_err(), "the target is paused");
    target.resume();
    assert_eq!(target.read(block.id, 10, 5).unwrap(), b"hello");
    assert!(target.cut().is_err());

    target.unregister(block.id).unwrap();
    target.kill().unwrap();
    assert_eq!(target.read(block.id, 0, 1).unwrap_err(), "the target is dead");
}
