//! What the library does to the process it is opened in: its exit, its output, its resources.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};

use common::{Remote, Source, available, config};
use kv_core::memory::MemoryOwner as _;
use kv_core::net::Endpoint;
use kv_core::transport::{Outcome, PeerDescriptor, Transport as _, TransportErrorKind};
use kv_nixl::{NixlConfig, NixlTransport};
use kv_testkit::print::{hex, unhex};
use kv_testkit::{Rng, TestMemory};

const M: usize = 1 << 20;
const PEERS: &str = "KV_NIXL_TEST_PEERS";
const WORK: &str = "KV_NIXL_TEST_WORK";

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

/// UCX would write to standard output, which belongs to the program. And its RDMA module's libraries were seen to crash
/// processes at their end; not on every machine, so there is no control here.
#[test]
fn a_process_that_used_the_library_ends_with_its_own_status_and_its_own_output() {
    if !available("a_process_that_used_the_library_ends_with_its_own_status_and_its_own_output") {
        return;
    }
    let run = |env: &[(&str, &str)]| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "worker_entry_point", "--nocapture"])
            .env(WORK, "1")
            .envs(env.iter().copied())
            .output()
            .unwrap()
    };
    let out = run(&[("UCX_LOG_LEVEL", "info")]);
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{}\n{text}", out.status);
    assert!(!text.contains("UCX"), "UCX wrote to standard output: {text}");
    assert!(String::from_utf8_lossy(&out.stderr).contains("UCX"), "UCX said nothing at all");
}

#[test]
fn a_missing_library_is_an_error_with_what_was_tried() {
    let config = NixlConfig { library: Some("/nowhere/libnixl_capi.so".into()), ..config() };
    let error = NixlTransport::new(config).err().unwrap();
    assert_eq!(error.kind, TransportErrorKind::Unavailable);
    assert!(error.message.contains("/nowhere/libnixl_capi.so") && error.message.contains("cargo xtask setup nixl"));
}

#[test]
fn memory_that_cannot_be_is_not_registered() {
    struct Nowhere(u64, u64);
    // SAFETY: not so, and never used: it is refused.
    unsafe impl kv_core::memory::MemoryOwner for Nowhere {
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
    let t = NixlTransport::new(config()).unwrap();
    for (base, len) in [(4096, 0), (0, 4096), (u64::MAX - 10, 4096)] {
        let refused = t.register(std::sync::Arc::new(Nowhere(base, len)));
        assert_eq!(refused.err().map(|e| e.kind), Some(TransportErrorKind::InvalidArgument), "{len} at {base:#x}");
    }
}

/// Metadata with a flipped bit in it: an error or a peer, never a crash, and other peers are reached after all that. (Not
/// the bytes of the connection's addresses: with those the library calls on strangers.) Metadata that ends early leaves
/// no trace even for its own agent; of keys that cannot be read the library keeps the connection, and nothing helps.
#[test]
fn r_h2_damaged_metadata_never_harms_the_process() {
    if !available("r_h2_damaged_metadata_never_harms_the_process") {
        return;
    }
    let (mut target, mut other) = (Remote::new(1, M), Remote::new(2, M));
    let mut s = Source::new(config(), M);
    let good = target.descriptor.clone();
    for n in (0..good.metadata.len()).step_by(7) {
        let cut = PeerDescriptor { metadata: good.metadata.slice(..n), ..good.clone() };
        assert_eq!(s.transport.connect(&cut).err().map(|e| e.kind), Some(TransportErrorKind::BadPeer), "{n} bytes");
    }
    let peer = s.connect(&good);
    s.reaches(peer, &mut target);
    s.transport.disconnect(peer);
    let addresses = good.metadata.windows(11).position(|w| w == b"MemSection|").unwrap();
    let mut rng = Rng::new(20261130);
    for _ in 0..200 {
        let mut metadata = good.metadata.to_vec();
        let at = addresses + rng.below((metadata.len() - addresses) as u64) as usize;
        metadata[at] ^= 1 << rng.below(8);
        if let Ok(peer) = s.transport.connect(&PeerDescriptor { metadata: metadata.into(), ..good.clone() }) {
            s.transport.disconnect(peer);
        }
    }
    let peer = s.connect(&other.descriptor);
    s.reaches(peer, &mut other);
}

#[derive(Debug, Clone, Copy)]
struct Held {
    files: usize,
    threads: usize,
    /// Resident memory, KiB.
    memory: usize,
}

fn held() -> Held {
    let count = |dir: &str| std::fs::read_dir(dir).unwrap().count();
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let rss = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).unwrap();
    let memory = rss.trim().trim_end_matches(" kB").parse().unwrap();
    Held { files: count("/proc/self/fd"), threads: count("/proc/self/task"), memory }
}

/// The body of a process that is a new peer for each line it reads; not a test of its own.
#[test]
fn peers_entry_point() {
    if std::env::var_os(PEERS).is_none() {
        return;
    }
    let mut lines = std::io::stdin().lines();
    while lines.next().is_some() {
        let target = NixlTransport::new(config()).unwrap();
        let memory = TestMemory::new(64 << 10);
        let _region = target.register(memory.clone()).unwrap();
        println!("peer {} {} {}", target.local_name(), memory.base(), hex(&target.local_metadata()));
        // Until the next line, which may be the last.
        lines.next();
    }
}

/// 200 peers come, are written to, and go: half are let go of first, half are gone first. In a process of its own, whose
/// resources it counts.
#[test]
fn cat_f55_two_hundred_peers_come_and_go_and_leave_nothing() {
    if !common::with_environment("cat_f55_two_hundred_peers_come_and_go_and_leave_nothing", &[]) {
        return;
    }
    let mut peers = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "peers_entry_point", "--nocapture"])
        .env(PEERS, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let (mut to, mut from) = (peers.stdin.take().unwrap(), BufReader::new(peers.stdout.take().unwrap()).lines());
    let mut s = Source::new(config(), M);
    let mut round = |s: &mut Source, n: u16| {
        writeln!(to).unwrap();
        let line = from.find_map(|l| Some(l.unwrap().split_once("peer ")?.1.to_owned())).unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let descriptor = PeerDescriptor {
            name: words[0].to_owned(),
            metadata: unhex(words[2]).unwrap().into(),
            endpoint: Endpoint::new("127.0.0.1", 1 + n),
            host: None,
        };
        let peer = s.connect(&descriptor);
        let id = s.write(peer, 0, words[1].parse().unwrap(), 4096);
        assert_eq!(s.outcome(id), Outcome::Done);
        if n.is_multiple_of(2) {
            s.transport.disconnect(peer);
        }
        writeln!(to).unwrap();
        s.poll();
        s.transport.disconnect(peer);
        s.seen.clear();
    };
    // What stays after the first ones is the library's own, made once.
    (0..40).for_each(|n| round(&mut s, n));
    let before = held();
    (40..240).for_each(|n| round(&mut s, n));
    let after = held();
    println!("{before:?} after 40 peers, {after:?} after 240");
    assert!(after.files <= before.files + 4 && after.threads <= before.threads, "{before:?}, then {after:?}");
    assert!(after.memory < before.memory + (4 << 10), "{before:?}, then {after:?}");
    assert_eq!(s.transport.stats().peers, 0);
    peers.kill().unwrap();
    peers.wait().unwrap();
}
