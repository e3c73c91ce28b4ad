//! Own sockets against peers that do not keep to the protocol.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use bytes::Bytes;
use kv_core::control::zmq::{Implementation, PushRole, ZmqInbox, ZmqOutbox, ZmqSockets};
use kv_core::control::{ControlEvent, Multipart};
use kv_core::time::{Clock, MonotonicClock};
use kv_core::{Endpoint, Limits};

fn sockets(limits: &Limits) -> ZmqSockets {
    ZmqSockets::new(Implementation::Own, limits).unwrap()
}

fn hello() -> Multipart {
    Multipart::from_iter([Bytes::from_static(b"hello")])
}

fn until(what: &str, mut step: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(60);
    while !step() {
        assert!(Instant::now() < end, "{what} did not happen");
    }
}

/// Version 3.0, NULL.
fn greeting() -> Vec<u8> {
    let mut bytes = vec![0; 64];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

fn ready(kind: &[u8]) -> Vec<u8> {
    let body = [b"\x05READY\x0bSocket-Type\0\0\0", &[kind.len() as u8][..], kind].concat();
    [&[4, body.len() as u8][..], &body].concat()
}

/// Messages that come until the inbox has nothing for 50 ms.
fn drain(inbox: &mut ZmqInbox) -> Vec<Multipart> {
    let mut all = Vec::new();
    while inbox.wait(&[], Some(Duration::from_millis(50))).unwrap().inbox {
        inbox.recv(99, &mut all).unwrap();
    }
    all
}

/// Whether the other end has closed it.
fn closed(peer: &mut TcpStream) -> bool {
    peer.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
    loop {
        match peer.read(&mut [0; 256]) {
            Ok(0) => return true,
            Ok(_) => {}
            Err(e) => return e.kind() == std::io::ErrorKind::ConnectionReset,
        }
    }
}

#[test]
fn r_h2_strangers_cost_their_own_connection_only() {
    let limits = Limits { max_frame_bytes: 100, ..Limits::default() };
    let (mut inbox, at) = sockets(&limits).bind("127.0.0.1", &limits).unwrap();
    let good = |kind: &[u8]| [greeting(), ready(kind)].concat();
    let cases: Vec<(&str, Vec<u8>)> = vec![
        ("http", b"GET / HTTP/1.1\r\n\r\n".to_vec()),
        ("zeros", vec![0; 64]),
        ("an old version", [&[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 1][..], &[0; 53]].concat()),
        ("another mechanism", {
            let mut g = greeting();
            g[12..17].copy_from_slice(b"PLAIN");
            g
        }),
        ("another kind", good(b"SUB")),
        ("a message before READY", [greeting(), vec![0, 1, b'x']].concat()),
        ("unknown flags", [good(b"PUSH"), vec![0x80, 1, 1]].concat()),
        ("a long frame", [good(b"PUSH"), vec![2, 0, 0, 0, 0, 0, 0, 0, 101]].concat()),
        ("a long command", [good(b"PUSH"), vec![6, 0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0]].concat()),
        ("a malformed READY", [greeting(), vec![4, 7, 5, b'R', b'E', b'A', b'D', b'Y', 200]].concat()),
    ];
    for (what, bytes) in cases {
        let mut peer = TcpStream::connect(("127.0.0.1", at.port())).unwrap();
        peer.write_all(&bytes).unwrap();
        until(what, || {
            assert_eq!(drain(&mut inbox), [] as [Multipart; 0], "{what}");
            closed(&mut peer)
        });
    }
    // Byte by byte, with a command between two frames, and a PING in front.
    let mut peer = TcpStream::connect(("127.0.0.1", at.port())).unwrap();
    let bytes =
        [good(b"PUSH"), b"\x04\x09\x04PING\0\0hi".to_vec(), vec![1, 1, b'a', 4, 2, 1, b'X', 0, 1, b'b']].concat();
    let mut got = Vec::new();
    for byte in bytes {
        peer.write_all(&[byte]).unwrap();
        inbox.wait(&[], Some(Duration::from_millis(1))).unwrap();
        inbox.recv(9, &mut got).unwrap();
    }
    got.extend(drain(&mut inbox));
    assert_eq!(got, [Multipart::from_iter([Bytes::from_static(b"a"), Bytes::from_static(b"b")])]);
    let mut answers = Vec::new();
    peer.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
    let _ = peer.read_to_end(&mut answers);
    assert!(answers.windows(9).any(|w| w == b"\x04\x07\x04PONGhi"), "{answers:?}");
    drop(peer);
    assert!(drain(&mut inbox).is_empty());
}

#[test]
fn r_h2_connections_have_a_bound() {
    let limits = Limits { max_sockets: 3, ..Limits::default() };
    let (mut inbox, at) = sockets(&limits).bind("127.0.0.1", &limits).unwrap();
    let mut peers: Vec<_> = (0..5).map(|_| TcpStream::connect(("127.0.0.1", at.port())).unwrap()).collect();
    drain(&mut inbox);
    assert_eq!(inbox.counters().refused, 2);
    let (kept, refused) = peers.split_at_mut(3);
    assert!(refused.iter_mut().all(closed));
    assert!(!kept.iter_mut().any(closed));
    // One that leaves makes room.
    peers.remove(0);
    drain(&mut inbox);
    let mut late = TcpStream::connect(("127.0.0.1", at.port())).unwrap();
    late.write_all(&[greeting(), ready(b"PUSH"), vec![0, 1, b'x']].concat()).unwrap();
    assert_eq!(drain(&mut inbox).len(), 1);
}

/// A listener, its endpoint, and an outbox that has sent it a message.
fn called(role: PushRole) -> (TcpListener, Endpoint, ZmqOutbox) {
    let limits = Limits::default();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = Endpoint::new("127.0.0.1", listener.local_addr().unwrap().port());
    let mut outbox = sockets(&limits).outbox(role, &limits).unwrap();
    outbox.send(&at, hello()).unwrap();
    outbox.flush();
    (listener, at, outbox)
}

#[test]
fn r_h2_a_peer_that_answers_nonsense_is_lost_by_name() {
    let long = [greeting(), ready(b"PULL"), vec![0; 80 << 10]].concat();
    let cases: [(&[u8], &str); 6] = [
        (b"HTTP/1.1 400 Bad Request\r\n", "does not speak"),
        (&[greeting(), ready(b"PUSH")].concat(), "is a \"PUSH\" socket"),
        (&[greeting(), b"\x04\x0a\x05ERROR\x03no!".to_vec()].concat(), "no!"),
        (&[greeting(), vec![0x40, 0]].concat(), "unknown flags"),
        (&[greeting(), vec![6, 0, 0, 0, 0, 0, 1, 0, 0]].concat(), "command over the limit"),
        (&long, "nobody asked for"),
    ];
    for (answer, reason) in cases {
        let (listener, at, mut outbox) = called(PushRole::ToDecode);
        let (mut peer, _) = listener.accept().unwrap();
        peer.write_all(answer).unwrap();
        let mut events = Vec::new();
        until(reason, || {
            outbox.poll_events(9, &mut events);
            !events.is_empty()
        });
        assert!(
            matches!(&events[..], [ControlEvent::PeerLost(to, why)] if *to == at && why.contains(reason)),
            "{reason}: {events:?}"
        );
        assert!(outbox.is_empty());
    }
}

/// What was sent in part only is sent whole on the next connection; PINGs are answered between messages.
#[test]
fn cat_f63_a_message_cut_off_by_a_lost_connection_starts_again() {
    let (listener, at, mut outbox) = called(PushRole::ToPrefill);
    let big = Multipart::from_iter([Bytes::from(vec![7; 16 << 20]), Bytes::from_static(b"end")]);
    outbox.send(&at, big.clone()).unwrap();
    let clock = MonotonicClock::new();
    let mut drive = move || {
        outbox.poll_events(9, &mut Vec::new());
        outbox.flush();
        outbox.sweep(clock.now());
    };
    for whole in [false, true] {
        listener.set_nonblocking(true).unwrap();
        let mut peer = None;
        until("a call", || {
            drive();
            peer = listener.accept().ok();
            peer.is_some()
        });
        let (mut peer, _) = peer.unwrap();
        peer.write_all(&[greeting(), ready(b"PULL"), b"\x04\x07\x04PING\0\0".to_vec()].concat()).unwrap();
        peer.set_nonblocking(true).unwrap();
        let mut got = Vec::new();
        let mut buf = vec![0; 1 << 20];
        until("the messages", || {
            drive();
            if let Ok(n) = peer.read(&mut buf) {
                got.extend_from_slice(&buf[..n]);
            }
            got.len() >= if whole { 16 << 20 | 64 } else { 1 << 20 } && (!whole || got.ends_with(b"\x04\x05\x04PONG"))
        });
        if whole {
            let at = got.windows(9).position(|w| w == [3, 0, 0, 0, 0, 1, 0, 0, 0]).unwrap();
            assert!(at < 130, "it starts with the first frame of the big message, behind the handshake: {at}");
            let rest = &got[at + 9..];
            assert!(rest[..16 << 20].iter().all(|b| *b == 7));
            assert!(rest[16 << 20..].starts_with(b"\0\x03end"));
        }
    }
}

/// Each turn of the inbox takes in something of everybody, however much one sends.
#[test]
fn cat_f61_a_peer_that_floods_holds_nobody_else_up() {
    let limits = Limits::default();
    let (mut inbox, at) = sockets(&limits).bind("127.0.0.1", &limits).unwrap();
    let hello = || {
        let mut peer = TcpStream::connect(("127.0.0.1", at.port())).unwrap();
        peer.write_all(&[greeting(), ready(b"PUSH")].concat()).unwrap();
        peer
    };
    let mut flood = hello();
    flood.set_nonblocking(true).unwrap();
    let small = [0, 1, b'f'].repeat(64 << 10);
    let mut at_byte = 0;
    let mut pour = || {
        while let Ok(n) = flood.write(&small[at_byte..]) {
            at_byte = (at_byte + n) % small.len();
        }
    };
    let mut all = Vec::new();
    until("the flood", || {
        pour();
        inbox.recv(1, &mut all).unwrap() > 0
    });
    let mut other = hello();
    other.write_all(&[0, 1, b'o']).unwrap();
    for _ in 0..2000 {
        pour();
        all.clear();
        inbox.recv(256, &mut all).unwrap();
        if all.iter().any(|m| m[0] == b"o"[..]) {
            return;
        }
    }
    panic!("it was not heard in 2000 turns");
}

/// The peer's PING that nobody has read must not make the system throw away what is still to be sent.
#[test]
fn cat_f63_a_close_with_something_unread_loses_nothing() {
    let (listener, at, mut outbox) = called(PushRole::ToDecode);
    let (mut peer, _) = listener.accept().unwrap();
    peer.write_all(&[greeting(), ready(b"PULL")].concat()).unwrap();
    peer.set_nonblocking(true).unwrap();
    // Greeting, READY and the first message: it is up.
    let mut start = [0; 64 + 27];
    until("the connection", || {
        outbox.poll_events(9, &mut Vec::new());
        peer.peek(&mut start).is_ok_and(|n| n == start.len())
    });
    outbox.send(&at, Multipart::from_iter([Bytes::from(vec![7; 1 << 20])])).unwrap();
    outbox.flush();
    // On loopback it has arrived when this returns.
    peer.write_all(b"\x04\x07\x04PING\0\0").unwrap();
    outbox.close(&at);
    peer.set_nonblocking(false).unwrap();
    let mut got = Vec::new();
    let end = std::thread::spawn(move || peer.read_to_end(&mut got).map(|_| got));
    let clock = MonotonicClock::new();
    until("the end", || {
        outbox.poll_events(9, &mut Vec::new());
        outbox.sweep(clock.now());
        end.is_finished()
    });
    let got = end.join().unwrap().unwrap();
    assert!(got.len() > 1 << 20, "{} bytes", got.len());
}
