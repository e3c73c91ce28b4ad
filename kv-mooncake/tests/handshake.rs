//! What a peer says of itself, well or ill: a fake one in the test answers what the library's own never would.
#![allow(clippy::unwrap_used)] // helpers of tests, outside `#[test]` functions

mod common;

use std::io::{Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Remote, Source, available, config};
use kv_core::net::Endpoint;
use kv_core::transport::{PeerDescriptor, Transport as _, TransportErrorKind};
use kv_mooncake::{MooncakeConfig, MooncakeTransport};
use serde_json::{Value, json};

const M: usize = 1 << 20;
/// In a process that is to read a descriptor with the library alone: of which peer.
const BARE: &str = "KV_MOONCAKE_TEST_BARE";

/// The body of a target's process; not a test of its own.
#[test]
fn child_entry_point() {
    common::serve_if_child();
}

type Answer = Arc<Mutex<Vec<u8>>>;

/// A handshake port that answers every request with the same bytes, and then closes; with none, it never answers.
struct Fake {
    name: String,
    answer: Answer,
}

impl Fake {
    fn new() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let name = listener.local_addr().unwrap().to_string();
        let answer = Answer::default();
        let ours = Arc::clone(&answer);
        std::thread::spawn(move || {
            let mut held = Vec::new();
            for stream in listener.incoming().flatten() {
                let answer = ours.lock().unwrap().clone();
                held.extend(serve(stream, &answer));
            }
        });
        Self { name, answer }
    }

    fn says(&self, descriptor: &Value) {
        self.sends(frame(1, descriptor.to_string().as_bytes()));
    }

    fn sends(&self, bytes: Vec<u8>) {
        *self.answer.lock().unwrap() = bytes;
    }

    fn peer(&self) -> PeerDescriptor {
        PeerDescriptor {
            name: self.name.clone(),
            metadata: Default::default(),
            endpoint: Endpoint::new("127.0.0.1", 9),
            host: None,
        }
    }

    /// What 0.3.13.post1 says.
    fn good(&self) -> Value {
        json!({
            "buffers": [{"addr": 0x7f00_0000_0000u64, "length": 4096, "name": self.name}],
            "name": self.name, "protocol": "tcp", "rdma_server_name": "", "tcp_data_host": "127.0.0.1",
            "tcp_data_port": 1, "tcp_proto_version": 2, "timestamp": "2026-11-30 00:00:00",
        })
    }
}

fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
    let mut out = (body.len() as u64 + 1).to_le_bytes().to_vec();
    out.push(kind);
    out.extend_from_slice(body);
    out
}

/// Read one request and answer it; a connection that is not answered is held open.
fn serve(mut stream: TcpStream, answer: &[u8]) -> Option<TcpStream> {
    let mut head = [0; 8];
    stream.read_exact(&mut head).ok()?;
    let mut body = vec![0; u64::from_le_bytes(head) as usize];
    stream.read_exact(&mut body).ok()?;
    if answer.is_empty() {
        return Some(stream);
    }
    stream.write_all(answer).ok()?;
    stream.shutdown(std::net::Shutdown::Write).ok()?;
    let _ = stream.read(&mut [0]);
    None
}

/// Each of these ends a process that lets the library read it, or makes it write without proof.
#[test]
fn r_h2_descriptors_with_odd_members_are_refused_and_harm_nobody() {
    if !available("r_h2_descriptors_with_odd_members_are_refused_and_harm_nobody") {
        return;
    }
    let mut target = Remote::new(1, M);
    let mut s = Source::new(config(), M);
    let fake = Fake::new();
    let odd = [
        ("/tcp_data_port", json!("abc"), "tcp_data_port"),
        ("/tcp_data_port", json!([1, 2]), "tcp_data_port"),
        ("/tcp_proto_version", json!({}), "tcp_proto_version"),
        ("/tcp_proto_version", json!(1), "without acknowledgements"),
        ("/name", json!({}), "name"),
        ("/name", json!("127.0.0.1:1"), "calls itself"),
        ("/protocol", json!(["tcp", "rdma"]), "protocol"),
        ("/timestamp", json!([]), "timestamp"),
        ("/buffers", json!(7), "buffers"),
        ("/buffers/0", json!([]), "buffer"),
        ("/buffers/0/addr", json!("0x7f"), "addr"),
        ("/buffers/0/length", json!(-5), "length"),
    ];
    for (at, value, word) in odd {
        let mut descriptor = fake.good();
        *descriptor.pointer_mut(at).unwrap() = value;
        fake.says(&descriptor);
        let error = s.transport.connect(&fake.peer()).expect_err(at);
        assert_eq!(error.kind, TransportErrorKind::BadPeer, "{at}: {error}");
        assert!(error.message.contains(word) && error.message.contains(&fake.name), "{at}: {error}");
    }
    for whole in [json!([1, 2]), json!(null), json!("x")] {
        fake.says(&whole);
        let error = s.transport.connect(&fake.peer()).unwrap_err();
        assert!(error.message.contains("no object"), "{error}");
    }
    let frames: [(Vec<u8>, &str); 5] = [
        (frame(1, b"{\"name\":"), "no JSON"),
        (frame(1, b"\xff\xfe"), "no JSON"),
        (frame(2, b"{}"), "type 2"),
        (u64::MAX.to_le_bytes().to_vec(), "announces"),
        (0u64.to_le_bytes().to_vec(), "announces"),
    ];
    for (bytes, word) in frames {
        fake.sends(bytes);
        let error = s.transport.connect(&fake.peer()).unwrap_err();
        assert!(error.kind == TransportErrorKind::BadPeer && error.message.contains(word), "{error}");
    }
    assert_eq!((s.transport.stats().peers, s.transport.stats().probes_failed), (0, 20));
    // Everybody else is reached as ever.
    let peer = s.connect(&target.descriptor);
    s.reaches(peer, &mut target);
}

/// The body of a process that lets the library read a descriptor; not a test of its own.
#[test]
fn bare_entry_point() {
    let Ok(name) = std::env::var(BARE) else { return };
    kv_mooncake::prepare_environment();
    let api = mooncake_sys::Api::open(None).unwrap();
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: strings that end in 0, an engine that lives.
    let segment = unsafe {
        let host = c"127.0.0.1";
        let engine =
            (api.create_transfer_engine)(mooncake_sys::P2P_HANDSHAKE.as_ptr(), host.as_ptr(), c"".as_ptr(), 0, 1);
        assert!(!engine.is_null());
        (api.open_segment_no_cache)(engine, name.as_ptr())
    };
    println!("segment {segment}");
}

/// Control: the library's reader ends the process over what is refused above.
#[test]
fn control_the_library_ends_the_process_that_reads_an_odd_descriptor() {
    if !available("control_the_library_ends_the_process_that_reads_an_odd_descriptor") {
        return;
    }
    let fake = Fake::new();
    let run = || {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "bare_entry_point", "--nocapture"])
            .env(BARE, &fake.name)
            .output()
            .unwrap()
    };
    fake.says(&fake.good());
    let out = run();
    assert!(out.status.success() && String::from_utf8_lossy(&out.stdout).contains("segment 1"), "{out:?}");
    let mut descriptor = fake.good();
    descriptor["tcp_data_port"] = json!("abc");
    fake.says(&descriptor);
    let status = run().status;
    assert!(!status.success(), "the library read it: the hazard is gone, and so is its reason");
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(6), "{status}");
}

/// A peer that takes a connection and says nothing costs the time allowed and no more; one that is not there, nothing.
#[test]
fn cat_f51_a_silent_peer_costs_its_time_and_is_connected_when_it_speaks() {
    if !available("cat_f51_a_silent_peer_costs_its_time_and_is_connected_when_it_speaks") {
        return;
    }
    let config = MooncakeConfig { probe_timeout: Duration::from_millis(300), ..config() };
    let s = Source::new(config, M);
    let fake = Fake::new();
    let error = s.transport.connect(&fake.peer()).unwrap_err();
    assert_eq!(error.kind, TransportErrorKind::PeerLost, "{error}");
    // It speaks well, and its data port serves nothing.
    fake.says(&fake.good());
    let error = s.transport.connect(&fake.peer()).unwrap_err();
    assert!(error.kind == TransportErrorKind::PeerLost && error.message.contains("data port 1"), "{error}");
    // Without memory there is nothing to serve.
    let mut bare = fake.good();
    bare["buffers"] = json!([]);
    fake.says(&bare);
    s.transport.connect(&fake.peer()).unwrap();
    for odd in ["", "nowhere", "127.0.0.1:0", "127.0.0.1:99999", "a b:1", s.transport.local_name()] {
        let error = s.transport.connect(&PeerDescriptor { name: odd.into(), ..fake.peer() }).unwrap_err();
        assert_eq!(error.kind, TransportErrorKind::BadPeer, "{odd}: {error}");
    }
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let error = s.transport.connect(&PeerDescriptor { name: closed, ..fake.peer() }).unwrap_err();
    assert_eq!(error.kind, TransportErrorKind::PeerLost, "{error}");
}

#[test]
fn a_missing_library_is_an_error_with_what_was_tried() {
    let config = MooncakeConfig { library: Some("/nowhere/libtransfer_engine.so".into()), ..config() };
    let error = MooncakeTransport::new(config).err().unwrap();
    assert_eq!(error.kind, TransportErrorKind::Unavailable);
    assert!(error.message.contains("/nowhere/libtransfer_engine.so"), "{error}");
    assert!(error.message.contains("cargo xtask setup mooncake"), "{error}");
}
