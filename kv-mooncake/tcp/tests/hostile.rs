//! Whoever reaches our ports may send anything: nothing outside registered memory is touched, nobody else notices, and no
//! process ends. The other side is the test kit's initiator.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{Source, config};
use kv_core::transport::Transport as _;
use kv_mooncake_tcp::MooncakeTcpConfig;
use kv_testkit::Rng;
use kv_testkit::mooncake::{MooncakeClient, ask, describe, raw};
use mooncake_wire::{Kind, Opcode, Status, handshake};

const K: usize = 1024;

fn target(config: MooncakeTcpConfig) -> (Source, String) {
    let s = Source::new(config, 64 * K);
    let session = s.transport.local_name().to_owned();
    (s, session)
}

#[test]
fn r_f2_ranges_outside_one_registered_block_are_refused_and_nothing_is_written() {
    let (s, session) = target(config());
    let (base, len, before) = (s.base(), 64 * K as u64, s.memory.read_all());
    let bad = [
        (base - 1, 2),
        (base + len - 1, 2),
        (base + len, 1),
        (base, len + 1),
        (base, 0),
        (0, 8),
        (base, u64::MAX),
        (u64::MAX - 3, 8),
        (base - 4096, 8192 + len),
    ];
    for (addr, len) in bad {
        for op in [Opcode::Write, Opcode::Read] {
            for acknowledged in [true, false] {
                let mut client = MooncakeClient::connect(&session, acknowledged).unwrap();
                let header = client.header(op, addr, len);
                client.send(&header).unwrap();
                // Payload as announced, or as much as the target bears.
                let _ = client.send(&vec![0xee; len.min(256 << 10) as usize]);
                // A good one behind it is not taken any more.
                let good = client.header(Opcode::Write, base, 16);
                let _ = client.send(&good).and_then(|()| client.send(&[0xee; 16]));
                if acknowledged {
                    assert_eq!(client.status().unwrap(), Status::Rejected, "{len} at {addr:#x}");
                }
                assert!(client.closed());
            }
        }
    }
    s.memory.check_guards().unwrap();
    assert_eq!(s.memory.read_all(), before);
    assert_eq!(s.transport.stats().requests_refused, 36);
}

#[test]
fn r_h2_both_versions_read_and_write_what_is_registered() {
    let (s, session) = target(config());
    for acknowledged in [true, false] {
        let mut client = MooncakeClient::connect(&session, acknowledged).unwrap();
        let bytes = Rng::new(acknowledged.into()).bytes(40 * K);
        let said = client.write(s.base() + 3, &bytes).unwrap();
        assert_eq!(said, acknowledged.then_some(Status::Ok));
        assert_eq!(client.read(s.base() + 3, bytes.len()).unwrap(), bytes);
        // Several at once, cut anywhere: reads and writes in the order of the stream.
        let mut stream = Vec::new();
        for i in 0..32u64 {
            stream.extend(client.header(Opcode::Write, s.base() + i * 100, 100));
            stream.extend(vec![i as u8; 100]);
            stream.extend(client.header(Opcode::Read, s.base() + i * 100, 50));
        }
        for piece in stream.chunks(77) {
            client.send(piece).unwrap();
        }
        for i in 0..32u64 {
            if acknowledged {
                assert_eq!((client.status().unwrap(), client.status().unwrap()), (Status::Ok, Status::Ok));
            }
            let mut got = vec![0; 50];
            client.fill(&mut got).unwrap();
            assert_eq!(got, vec![i as u8; 50]);
        }
    }
}

#[test]
fn r_f2_nothing_lands_after_a_registration_has_ended() {
    let (mut s, session) = target(config());
    let (base, memory) = (s.base(), s.memory.clone());
    let mut clients = [true, false].map(|acknowledged| {
        let mut client = MooncakeClient::connect(&session, acknowledged).unwrap();
        let header = client.header(Opcode::Write, base, 32 * K as u64);
        client.send(&header).unwrap();
        client.send(&[0x11; 1000]).unwrap();
        client
    });
    let begun = Instant::now();
    while memory.read(0, 1000) != [0x11; 1000] {
        assert!(begun.elapsed() < common::PATIENCE);
        std::thread::sleep(Duration::from_millis(1));
    }
    s.region = None;
    let before = memory.read_all();
    for client in &mut clients {
        let _ = client.send(&[0x22; 20 * K]);
        if client.acknowledged {
            assert_eq!(client.status().unwrap(), Status::Rejected);
        }
        assert!(client.closed());
    }
    assert_eq!(memory.read_all(), before);
    assert!(describe(&session).unwrap()["buffers"].as_array().unwrap().is_empty());
    // Registered anew it is open again.
    s.region = Some(s.transport.register(memory.clone()).unwrap());
    assert_eq!(MooncakeClient::connect(&session, true).unwrap().write(base, &[7]).unwrap(), Some(Status::Ok));
}

/// The library's process ends over some of these.
#[test]
fn r_h2_cat_f61_odd_bytes_on_either_port_end_their_connection_only() {
    let (s, session) = target(config());
    let mut good = MooncakeClient::connect(&session, true).unwrap();
    for json in [r#"{"name":{}}"#, r#"{"qp_num":["x"]}"#, "[1]", "null", "", "{", "\u{0}"] {
        for kind in [Kind::Connection, Kind::Metadata, Kind::Notify, Kind::Probe] {
            assert_eq!(ask(&session, Some(kind), json).unwrap().0, Some(kind), "{json}");
        }
    }
    assert_eq!(ask(&session, None, "{}").unwrap().1, describe(&session).unwrap(), "the form before 2025");
    for head in [0u64, (1 << 20) + 1, u64::MAX] {
        assert!(raw(&session, &head.to_le_bytes()).map_or(true, |answer| answer.is_empty()));
    }
    let mut rng = Rng::new(7);
    let data = ("127.0.0.1", describe(&session).unwrap()["tcp_data_port"].as_u64().unwrap() as u16);
    for _ in 0..200 {
        let len = rng.range(0..100) as usize;
        let bytes = rng.bytes(len);
        let _ = raw(&session, &bytes);
        let _ = raw(data, &bytes);
    }
    for opcode in [2u8, 0x7f, 0x82, 0xff] {
        let mut client = MooncakeClient::connect(&session, true).unwrap();
        let mut header = client.header(Opcode::Write, s.base(), 16);
        header[16] = opcode;
        client.send(&header).unwrap();
        assert!(client.closed());
    }
    let bytes = s.memory.read(0, 64);
    assert_eq!(good.write(s.base(), &bytes).unwrap(), Some(Status::Ok), "somebody else's connection");
    s.memory.check_guards().unwrap();
    assert_eq!(s.transport.stats().panics, 0);
}

#[test]
fn idle_and_half_open_connections_are_bounded_and_hold_nobody_up() {
    let config = MooncakeTcpConfig {
        max_connections: 4,
        max_handshakes: 3,
        handshake_timeout: Duration::from_millis(500),
        ..config()
    };
    let (s, session) = target(config);
    // Two say nothing, and the third slot still serves everybody.
    let idle: Vec<TcpStream> = (0..2).map(|_| TcpStream::connect(&session).unwrap()).collect();
    (0..20).for_each(|_| assert_eq!(describe(&session).unwrap()["name"], session));
    let mut third = TcpStream::connect(&session).unwrap();
    third.write_all(&handshake::frame(Some(Kind::Probe), b"{}")[..5]).unwrap();
    // They are closed in time.
    for mut stream in idle.into_iter().chain([third]) {
        stream.set_read_timeout(Some(common::PATIENCE)).unwrap();
        assert_eq!(stream.read(&mut [0; 8]).unwrap(), 0);
    }
    let mut clients: Vec<_> = (0..4).map(|_| MooncakeClient::connect(&session, true).unwrap()).collect();
    assert_eq!(clients[3].write(s.base(), &[1]).unwrap(), Some(Status::Ok));
    let mut fifth = MooncakeClient::connect(&session, true).unwrap();
    assert!(fifth.write(s.base(), &[1]).is_err(), "more connections than allowed");
    // A peer that never reads its answers stops being read from, and costs nothing.
    let flood = clients[0].header(Opcode::Read, s.base(), 64 * K as u64).repeat(1000);
    clients[0].send(&flood).unwrap();
    assert_eq!(clients[1].write(s.base(), &[2]).unwrap(), Some(Status::Ok));
    drop(clients);
    let begun = Instant::now();
    while s.transport.stats().connections_in > 0 {
        assert!(begun.elapsed() < common::PATIENCE, "{:?}", s.transport.stats());
        std::thread::sleep(Duration::from_millis(5));
    }
}
