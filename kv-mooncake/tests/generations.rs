//! Peers that come back, on other ports and on the same, and registrations that end: who may write where.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{PATIENCE, Remote, Source, available, config, with_own_network};
use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_core::transport::{Outcome, PeerDescriptor, SubmitError, TransportErrorKind};
use kv_mooncake::MooncakeConfig;
use kv_testkit::conformance::Target as _;
use serde_json::Value;

const M: usize = 1 << 20;

/// The body of a target's process; not a test of its own.
#[test]
fn child_entry_point() {
    common::serve_if_child();
}

/// A peer's descriptor, as the library gives it.
fn describe(name: &str) -> Value {
    let ask = br#"{"name":"test:0"}"#;
    let mut stream = TcpStream::connect(name).unwrap();
    let mut request = (ask.len() as u64 + 1).to_le_bytes().to_vec();
    request.push(1);
    request.extend_from_slice(ask);
    stream.write_all(&request).unwrap();
    let mut head = [0; 8];
    stream.read_exact(&mut head).unwrap();
    let mut body = vec![0; u64::from_le_bytes(head) as usize];
    stream.read_exact(&mut body).unwrap();
    serde_json::from_slice(&body[1..]).unwrap()
}

fn data_port(name: &str) -> u64 {
    describe(name)["tcp_data_port"].as_u64().unwrap()
}

// ---- generations

#[test]
fn cat_f54_a_peer_that_restarts_is_another_generation_and_disturbs_nobody() {
    if !available("cat_f54_a_peer_that_restarts_is_another_generation_and_disturbs_nobody") {
        return;
    }
    let (mut old, mut other) = (Remote::new(5, M), Remote::new(6, M));
    let mut s = Source::new(config(), M);
    let (first, second) = (s.connect(&old.descriptor), s.connect(&other.descriptor));
    s.reaches(first, &mut old);
    old.process.kill().unwrap();
    let mut new = Remote::new(5, M);
    let next = s.connect(&new.descriptor);
    assert_ne!(next, first);
    match s.try_write(first, 0, new.block.addr, 64) {
        Err(SubmitError::Rejected(..)) => {}
        other => panic!("a write through the old generation: {other:?}"),
    }
    s.reaches(next, &mut new);
    s.reaches(second, &mut other);
    s.poll();
    assert!(!s.lost.contains(&second) && !s.lost.contains(&next));
}

/// A target on the ports of `like`, with a block at the address of its block: all that the wire can tell them apart by is
/// the same. `None`: ports and addresses did not come out so in time.
fn twin(env: &[(&str, &str)], name: &str, port: u64, addr: u64, len: usize) -> Option<Remote> {
    let start = Instant::now();
    while start.elapsed() < PATIENCE {
        let found = fixed(env, len);
        if found.descriptor.name == name && data_port(name) == port && found.block.addr == addr {
            return Some(found);
        }
    }
    None
}

/// A target without ASLR, on one of two ports.
fn fixed(env: &[(&str, &str)], len: usize) -> Remote {
    loop {
        let mut command = Command::new("setarch");
        command.arg("-R").arg(std::env::current_exe().unwrap());
        command.args(["--exact", "child_entry_point", "--nocapture"]);
        command.env(common::CHILD, "7").envs(env.iter().copied()).stderr(Stdio::null());
        // A port may not be free yet: then it says so, and ends.
        if let Some(found) = Remote::spawn(command, len) {
            return found;
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// Writes 64 pieces to a peer that has restarted on the same ports, with memory at the same address, unseen; how much of
/// the new process' memory they reached.
fn write_to_a_twin(config: MooncakeConfig) -> Option<usize> {
    let env = [("MC_MIN_RPC_PORT", "17101"), ("MC_MAX_RPC_PORT", "17102")];
    let mut old = fixed(&env, M);
    let mut s = Source::new(config, M);
    // As 0.5.23 and as from another host: nothing says which process it is.
    let peer = s.connect(&PeerDescriptor { host: None, ..old.descriptor.clone() });
    s.reaches(peer, &mut old);
    let port = data_port(&old.descriptor.name);
    old.process.kill().unwrap();
    let mut new = twin(&env, &old.descriptor.name, port, old.block.addr, M)?;
    std::thread::sleep(Duration::from_millis(200));
    let entry = EntryPair {
        src_entry: 0,
        dst_entry: 0,
        src_region: s.region.as_ref().unwrap().id(),
        src_offset: 1,
        dst_addr: new.block.addr,
        item_len: 1024,
        src_stride: 2048,
        dst_stride: 2048,
        dst_kind: Default::default(),
    };
    let runs = [Run { src: 0, dst: 0, count: 64 }];
    let plan = WritePlan::new([PlanGroup { entries: [entry].into(), runs: runs.into() }]);
    let (id, behind) = (s.submit(peer, plan.clone()).unwrap(), s.submit(peer, plan).unwrap());
    s.is_unproven(id);
    // What is acknowledged now is acknowledged by somebody else.
    assert_ne!(s.outcome(behind), Outcome::Done);
    // The library waits for a second before it goes on with what it had queued.
    s.watch(Duration::from_secs(2));
    let reached = new.bytes(0, M).iter().filter(|b| **b != 0).count();
    // Asked anew it is another generation, and gets what is meant for it.
    let next = s.connect(&PeerDescriptor { host: None, ..new.descriptor.clone() });
    assert_ne!(next, peer);
    s.reaches(next, &mut new);
    Some(reached)
}

/// The wire has no generations. One task alone finds out, and nothing follows it.
#[test]
fn cat_f54_a_restart_on_the_same_ports_and_addresses_gets_nothing_of_the_old_session() {
    if !with_own_network("cat_f54_a_restart_on_the_same_ports_and_addresses_gets_nothing_of_the_old_session") {
        return;
    }
    match write_to_a_twin(config()) {
        Some(reached) => assert_eq!(reached, 0, "bytes of the old session in the new process"),
        None => println!(
            "skipped: cat_f54_a_restart_on_the_same_ports_and_addresses_gets_nothing_of_the_old_session: no twin"
        ),
    }
}

/// Control: without that one task, the new process takes the rest.
#[test]
fn control_a_restart_on_the_same_ports_and_addresses_takes_what_the_library_queued() {
    if !with_own_network("control_a_restart_on_the_same_ports_and_addresses_takes_what_the_library_queued") {
        return;
    }
    let config = MooncakeConfig { confirm_after: Duration::MAX, ..config() };
    match write_to_a_twin(config) {
        Some(reached) => assert_ne!(reached, 0, "nothing went astray: the hazard is gone, and so is its reason"),
        None => println!(
            "skipped: control_a_restart_on_the_same_ports_and_addresses_takes_what_the_library_queued: no twin"
        ),
    }
}

/// Connections of this process to a port of this host.
fn connections_to(port: u64) -> usize {
    let established = |table: &str| {
        let text = std::fs::read_to_string(table).unwrap_or_default();
        let there = |l: &&str| {
            let mut words = l.split_whitespace().skip(2);
            let remote = words.next().and_then(|w| u64::from_str_radix(w.rsplit_once(':')?.1, 16).ok());
            remote == Some(port) && words.next() == Some("01")
        };
        text.lines().filter(there).count()
    };
    established("/proc/self/net/tcp") + established("/proc/self/net/tcp6")
}

/// A connection that were made later could lead to whoever listens then.
#[test]
fn r_f5_every_connection_is_there_before_the_first_write() {
    if !available("r_f5_every_connection_is_there_before_the_first_write") {
        return;
    }
    let target = Remote::new(1, M);
    let port = data_port(&target.descriptor.name);
    let sources: Vec<Source> = (0..8).map(|_| Source::new(config(), M)).collect();
    for (n, s) in sources.iter().enumerate() {
        s.connect(&target.descriptor);
        assert_eq!(connections_to(port), 4 * (n + 1));
    }
}

// ---- errors and registrations

/// What begins after a registration has ended is refused by the peer; the peer is reached again at once, and nothing is
/// proven about the write that failed.
#[test]
fn cat_f51_a_peer_is_reached_again_after_an_error() {
    if !available("cat_f51_a_peer_is_reached_again_after_an_error") {
        return;
    }
    let mut target = Remote::new(1, M);
    let gone = target.process.alloc(M, true).unwrap();
    let mut s = Source::new(config(), M);
    let peer = s.connect(&target.descriptor);
    target.process.unregister(gone.id).unwrap();
    let id = s.write(peer, 0, gone.addr, 4096);
    assert!(s.is_unproven(id).contains("failed (6)"));
    assert!(target.process.read(gone.id, 0, M).unwrap().iter().all(|b| *b == 0));
    s.until("the loss", |s| s.lost.contains(&peer));
    let again = s.connect(&target.process.descriptor().unwrap());
    assert_ne!(again, peer);
    s.reaches(again, &mut target);
    // It is known now, and costs no connection any more.
    match s.try_write(again, 0, gone.addr, 4096) {
        Err(SubmitError::Rejected(_, error)) => assert_eq!(error.kind, TransportErrorKind::Refused),
        other => panic!("a write to memory that is not registered: {other:?}"),
    }
    s.reaches(again, &mut target);
    // The process lives: nothing is proven about the failed write.
    assert_eq!(s.seen[&id].settlement, None);
    assert_eq!(s.transport.stats().ops_retained, 1);
}

/// A write whose head the library has let in goes on when the registration has ended, even when the owner has let go of
/// the memory. So the memory stays mapped, and it harms nobody.
#[test]
fn cat_f78_a_write_that_has_begun_outlives_the_registration_and_harms_nobody() {
    if !available("cat_f78_a_write_that_has_begun_outlives_the_registration_and_harms_nobody") {
        return;
    }
    const LEN: usize = 4 * M;
    let mut target = Remote::new(1, M);
    let (ended, freed) = (target.process.alloc(LEN, true).unwrap(), target.process.alloc(LEN, true).unwrap());
    let port = data_port(&target.descriptor.name);
    let head = |addr: u64| {
        let mut stream = TcpStream::connect(("127.0.0.1", port as u16)).unwrap();
        let mut head = (LEN as u64).to_le_bytes().to_vec();
        head.extend_from_slice(&addr.to_le_bytes());
        // A write that is to be acknowledged.
        head.extend_from_slice(&[0x81, 0, 0, 0, 0, 0, 0, 0]);
        stream.write_all(&head).unwrap();
        stream
    };
    let begin = |addr: u64| {
        let mut stream = head(addr);
        stream.write_all(&vec![1; LEN / 2]).unwrap();
        stream
    };
    let finish = |mut stream: TcpStream| {
        stream.write_all(&vec![2; LEN / 2]).unwrap();
        let mut status = [0; 8];
        stream.read_exact(&mut status).map(|()| u64::from_le_bytes(status))
    };
    let (first, second) = (begin(ended.addr), begin(freed.addr));
    let start = Instant::now();
    while target.process.read(freed.id, LEN / 2 - 1, 1).unwrap() != [1] {
        assert!(start.elapsed() < PATIENCE, "the first half does not arrive");
    }
    target.process.unregister(ended.id).unwrap();
    target.process.free(freed.id).unwrap();
    const DONE: u64 = 0x4d43_5456 << 32;
    assert_eq!(finish(first).unwrap(), DONE, "the write stopped: unregister_revokes is true now");
    assert!(target.process.read(ended.id, LEN / 2, LEN / 2).unwrap().iter().all(|b| *b == 2));
    assert_eq!(finish(second).unwrap(), DONE);
    // What begins later is refused.
    let mut late = head(ended.addr);
    let mut status = [0; 8];
    late.read_exact(&mut status).unwrap();
    assert_eq!(u64::from_le_bytes(status), DONE | 1);
    let mut s = Source::new(config(), M);
    let peer = s.connect(&target.process.descriptor().unwrap());
    s.reaches(peer, &mut target);
    let id = s.write(peer, 0, target.block.addr, M as u64);
    assert_eq!(s.outcome(id), Outcome::Done);
}
