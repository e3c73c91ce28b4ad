//! What the library does to the process it is opened in: its exit, its output, its resources.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::time::Instant;

use common::{PATIENCE, Remote, Source, available, config};
use kv_core::host::HostIdentity;
use kv_core::memory::MemoryOwner;
use kv_core::net::Endpoint;
use kv_core::transport::{Outcome, PeerDescriptor, Transport as _, TransportErrorKind};
use kv_mooncake::MooncakeTransport;
use kv_testkit::TestMemory;
use kv_testkit::print::{hex, unhex};

const M: usize = 1 << 20;
const PEERS: &str = "KV_MOONCAKE_TEST_PEERS";
const WORK: &str = "KV_MOONCAKE_TEST_WORK";

/// The body of a target's process; not a test of its own.
#[test]
fn child_entry_point() {
    common::serve_if_child();
}

/// The body of a process that uses the library and ends as programs do; not a test of its own.
#[test]
fn worker_entry_point() {
    if std::env::var_os(WORK).is_none() {
        return;
    }
    let mut target = Remote::new(1, M);
    let mut s = Source::new(config(), M);
    let peer = s.connect(&target.descriptor);
    s.reaches(peer, &mut target);
}

#[test]
fn a_process_that_used_the_library_ends_with_its_own_status_and_its_own_output() {
    if !available("a_process_that_used_the_library_ends_with_its_own_status_and_its_own_output") {
        return;
    }
    let out = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "worker_entry_point", "--nocapture"])
        .env(WORK, "1")
        .env("MC_LOG_LEVEL", "INFO")
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{}\n{text}", out.status);
    assert!(!text.contains("transfer_engine"), "the library wrote to standard output: {text}");
    assert!(String::from_utf8_lossy(&out.stderr).contains("transfer_engine"), "the library said nothing at all");
}

#[test]
fn memory_that_cannot_be_is_not_registered() {
    struct Nowhere(u64, u64);
    // SAFETY: not so, and never used: it is refused.
    unsafe impl MemoryOwner for Nowhere {
        fn base(&self) -> u64 {
            self.0
        }
        fn len(&self) -> u64 {
            self.1
        }
    }
    if !available("memory_that_cannot_be_is_not_registered") {
        return;
    }
    let t = MooncakeTransport::new(config()).unwrap();
    let refused = |memory| t.register(memory).err().map(|e| e.kind);
    for (base, len) in [(4096, 0), (0, 4096), (u64::MAX - 10, 4096)] {
        let kind = refused(std::sync::Arc::new(Nowhere(base, len)));
        assert_eq!(kind, Some(TransportErrorKind::InvalidArgument), "{len} at {base:#x}");
    }
    // The library knows each byte once.
    let memory = TestMemory::new(M);
    let region = t.register(memory.clone()).unwrap();
    assert_eq!(refused(memory.clone()), Some(TransportErrorKind::InvalidArgument));
    drop(region);
    t.register(memory).unwrap();
}

/// The body of a process that is a new peer; not a test of its own.
#[test]
fn peers_entry_point() {
    if std::env::var_os(PEERS).is_none() {
        return;
    }
    let target = MooncakeTransport::new(config()).unwrap();
    let memory = TestMemory::new(64 << 10);
    let _region = target.register(memory.clone()).unwrap();
    let host = hex(&HostIdentity::local().to_bytes());
    println!("peer {} {} {host}", target.local_name(), memory.base());
    // Until it is killed.
    let _ = std::io::stdin().lines().next();
}

/// Open files, threads, resident memory in KiB.
fn held() -> (usize, usize, usize) {
    let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let rss = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    let memory = rss.trim().trim_end_matches(" kB").parse().unwrap();
    (count("/proc/self/fd"), count("/proc/self/task"), memory)
}

/// 60 peers come, are written to, and die: half are let go of first. In a process of its own, whose resources it counts.
#[test]
fn cat_f55_peers_that_come_and_die_leave_nothing() {
    if !common::with_environment("cat_f55_peers_that_come_and_die_leave_nothing", &[]) {
        return;
    }
    let mut s = Source::new(config(), M);
    let round = |s: &mut Source, n: u16| {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "peers_entry_point", "--nocapture"])
            .env(PEERS, "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut from = BufReader::new(process.stdout.take().unwrap()).lines();
        let line = from.find_map(|l| Some(l.unwrap().split_once("peer ")?.1.to_owned())).unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let descriptor = PeerDescriptor {
            name: words[0].to_owned(),
            metadata: Default::default(),
            endpoint: Endpoint::new("127.0.0.1", 1 + n),
            host: unhex(words[2]).unwrap().try_into().ok().map(HostIdentity::from_bytes),
        };
        let peer = s.connect(&descriptor);
        let id = s.write(peer, 0, words[1].parse().unwrap(), 4096);
        assert_eq!(s.outcome(id), Outcome::Done);
        if n.is_multiple_of(2) {
            s.transport.disconnect(peer);
        }
        process.kill().unwrap();
        process.wait().unwrap();
        if !n.is_multiple_of(2) {
            s.until("the loss", |s| s.lost.contains(&peer));
            s.transport.disconnect(peer);
        }
        s.seen.clear();
    };
    // What stays after the first ones is the library's own, made once.
    (0..10).for_each(|n| round(&mut s, n));
    let before = held();
    (10..60).for_each(|n| round(&mut s, n));
    // The last connections are closed in passing.
    let start = Instant::now();
    while held().0 > before.0 + 8 && start.elapsed() < PATIENCE {
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    let after = held();
    println!("{before:?} after 10 peers, {after:?} after 60");
    std::io::stdout().flush().unwrap();
    assert!(after.0 <= before.0 + 8 && after.1 <= before.1, "{before:?}, then {after:?}");
    assert!(after.2 < before.2 + (8 << 10), "{before:?}, then {after:?}");
    assert_eq!(s.transport.stats().peers, 0);
}

/// A peer that is let go of and connected again, and again, holds no more than once. In a process of its own.
#[test]
fn cat_f55_a_peer_that_comes_again_and_again_is_held_once() {
    if !common::with_environment("cat_f55_a_peer_that_comes_again_and_again_is_held_once", &[]) {
        return;
    }
    let mut target = Remote::new(1, M);
    let mut s = Source::new(config(), M);
    let mut round = |s: &mut Source, n: u16| {
        let endpoint = Endpoint::new("127.0.0.1", 1 + n);
        let peer = s.connect(&PeerDescriptor { endpoint, ..target.descriptor.clone() });
        s.reaches(peer, &mut target);
        s.transport.disconnect(peer);
        s.seen.clear();
    };
    (0..4).for_each(|n| round(&mut s, n));
    let before = held();
    (4..104).for_each(|n| round(&mut s, n));
    let after = held();
    assert!(after.0 <= before.0 && after.1 <= before.1, "{before:?}, then {after:?}");
    assert_eq!(s.transport.stats().peers, 0);
}
