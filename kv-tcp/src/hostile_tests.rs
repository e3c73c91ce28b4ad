//! A peer that follows no rule, played by hand over raw sockets.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::ids::{OpId, RegionId};
use kv_core::memory::{MemoryOwner, RegisteredRegion};
use kv_core::net::Endpoint;
use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_core::transport::{LaneEvent, Outcome, PeerDescriptor, Transport, WriteOp};
use proptest::prelude::*;

use crate::blob::{Blob, Key, RemoteRegion};
use crate::frame::{self, HEAD, Hello, Kind, OpHead, Purpose, Status, Verdict, Welcome};
use crate::inbound::PANICS;
use crate::plan::Plan;
use crate::{HostArena, TcpConfig, TcpTransport};
use kv_core::host::HostIdentity;

const LEN: usize = 1 << 20;

struct Target {
    transport: TcpTransport,
    arena: Arc<HostArena>,
    region: Option<Arc<RegisteredRegion>>,
    blob: Blob,
}

fn target(config: TcpConfig) -> Target {
    let transport = TcpTransport::new(config).unwrap();
    let arena = Arc::new(HostArena::new(LEN).unwrap());
    let region = Some(transport.register(arena.clone()).unwrap());
    let blob = Blob::decode(&transport.local_metadata()).unwrap();
    Target { transport, arena, region, blob }
}

impl Target {
    fn hello(&self, purpose: Purpose, session: Key) -> Hello {
        Hello {
            purpose,
            target: self.blob.name.clone(),
            admission: self.blob.admission,
            session,
            source: "mallory".into(),
            process: kv_core::ids::ProcessGeneration(6),
            host: HostIdentity { boot_id: [9; 16], pid_ns: 1, pid: 1, start: 1, uid: 0 },
            direct: true,
            nonce_addr: 0,
            nonce: [0; 32],
        }
    }

    fn dial(&self, bytes: &[u8]) -> TcpStream {
        let mut s = TcpStream::connect(self.blob.addresses[0]).unwrap();
        s.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        s.write_all(bytes).unwrap();
        s
    }

    fn join(&self, purpose: Purpose, session: Key) -> TcpStream {
        let mut bytes = Vec::new();
        self.hello(purpose, session).encode(&mut bytes);
        let mut s = self.dial(&bytes);
        assert_eq!(verdict(&mut s), Verdict::Tcp);
        s
    }

    fn untouched(&self) {
        assert!(self.arena.to_vec(0, LEN).iter().all(|b| *b == 0), "a byte was written");
    }

    /// An honest peer still gets its service.
    fn still_serves(&self) {
        let p = TcpTransport::new(TcpConfig::loopback()).unwrap();
        let arena = Arc::new(HostArena::new(4096).unwrap());
        let region = p.register(arena).unwrap();
        let peer = p
            .connect(&PeerDescriptor {
                name: self.transport.local_name().into(),
                metadata: self.transport.local_metadata(),
                endpoint: Endpoint::new("h", 1),
                host: None,
            })
            .unwrap();
        let mut lane = p.lane().unwrap();
        let entry = EntryPair {
            src_entry: 0,
            dst_entry: 0,
            src_region: region.id(),
            src_offset: 0,
            dst_addr: self.arena.base(),
            item_len: 8,
            src_stride: 8,
            dst_stride: 8,
            dst_kind: Default::default(),
        };
        let plan = WritePlan::new([PlanGroup {
            entries: Arc::new([entry]),
            runs: Arc::new([Run { src: 0, dst: 0, count: 1 }]),
        }]);
        lane.submit(WriteOp { id: OpId(1), peer, plan, regions: Arc::new([region]) }).unwrap();
        let mut out = Vec::new();
        let end = Instant::now() + Duration::from_secs(30);
        while out.is_empty() && Instant::now() < end {
            lane.poll(&mut out);
        }
        assert_eq!(out, [LaneEvent::Outcome(OpId(1), Outcome::Done)]);
    }
}

fn verdict(s: &mut TcpStream) -> Verdict {
    let (kind, body) = next(s).unwrap();
    assert_eq!(kind, Kind::Welcome);
    Welcome::decode(&body).unwrap().verdict
}

/// The next frame; `None` at the end of the stream.
pub(crate) fn next(s: &mut TcpStream) -> Option<(Kind, Vec<u8>)> {
    let mut head = [0; HEAD];
    s.read_exact(&mut head).ok()?;
    let (kind, len) = frame::head(&head).unwrap().unwrap();
    let mut body = vec![0; len];
    s.read_exact(&mut body).ok()?;
    Some((kind, body))
}

/// A WRITE of `len` bytes at `dst` as a forger makes it, without its payload.
fn write_frame(region: &RemoteRegion, dst: u64, len: u64, kind: Kind) -> Vec<u8> {
    let entry = EntryPair {
        src_entry: 0,
        dst_entry: 0,
        src_region: RegionId(0),
        src_offset: 0,
        dst_addr: dst,
        item_len: len,
        src_stride: 0,
        dst_stride: len,
        dst_kind: Default::default(),
    };
    let wide = RemoteRegion { addr: 0, len: u64::MAX, ..*region };
    let arena = Arc::new(HostArena::new(len as usize).unwrap());
    let local = Arc::new(RegisteredRegion::new(RegionId(0), arena, Box::new(())));
    let groups = [PlanGroup { entries: Arc::new([entry]), runs: Arc::new([Run { src: 0, dst: 0, count: 1 }]) }];
    let mut plan = Plan::default();
    plan.resolve(&WritePlan::new(groups), &[local], &[wide], u64::MAX).unwrap();
    let mut out = Vec::new();
    frame::put(&mut out, kind, |out| {
        OpHead { op: 5, stripes: 1, start: 0, len }.encode(out);
        plan.encode(false, out);
    });
    out
}

#[test]
fn a_write_without_the_key_or_outside_is_refused_and_ends_the_session() {
    let t = target(TcpConfig::loopback());
    let r = t.blob.regions[0];
    let forged = RemoteRegion { key: Key([0; 16]), ..r };
    let unknown = RemoteRegion { id: 77, ..r };
    for (n, (region, dst, len)) in [
        (forged, r.addr, 100),
        (unknown, r.addr, 100),
        (r, r.addr + LEN as u64 - 99, 100),
        (r, r.addr - 1, 100),
        (r, 4096, 100),
    ]
    .into_iter()
    .enumerate()
    {
        let mut s = t.join(Purpose::Open { lane: 0 }, Key([n as u8; 16]));
        let mut bytes = write_frame(&region, dst, len, Kind::Write);
        bytes.extend_from_slice(&vec![0xff; len as usize]);
        s.write_all(&bytes).unwrap();
        let (kind, body) = next(&mut s).unwrap();
        assert_eq!((kind, frame::ack(&body).unwrap().1), (Kind::Ack, Status::Refused));
        assert!(next(&mut s).is_none(), "the connection ends");
    }
    t.untouched();
    assert_eq!(t.transport.stats().ops_refused, 5);
    t.still_serves();
}

#[test]
fn the_same_write_with_key_and_inside_lands() {
    let t = target(TcpConfig::loopback());
    let r = t.blob.regions[0];
    let mut s = t.join(Purpose::Open { lane: 0 }, Key([1; 16]));
    let mut bytes = write_frame(&r, r.addr + 10, 100, Kind::Write);
    bytes.extend_from_slice(&[0xab; 100]);
    // Byte by byte: framing does not depend on how the stream is cut.
    for b in &bytes {
        s.write_all(&[*b]).unwrap();
    }
    let (_, body) = next(&mut s).unwrap();
    assert_eq!(frame::ack(&body).unwrap().1, Status::Done);
    assert_eq!(t.arena.to_vec(9, 102), [vec![0], vec![0xab; 100], vec![0]].concat());
}

#[test]
fn a_pull_in_a_session_without_direct_copies_is_out_of_place() {
    let t = target(TcpConfig::loopback());
    let r = t.blob.regions[0];
    let mut s = t.join(Purpose::Open { lane: 0 }, Key([1; 16]));
    s.write_all(&write_frame(&r, r.addr, 100, Kind::Pull)).unwrap();
    assert!(next(&mut s).is_none());
    t.untouched();
    assert_eq!(t.transport.stats().frames_malformed, 1);
}

#[test]
fn a_process_that_names_another_gets_no_direct_copies() {
    let t = target(TcpConfig::loopback());
    let me = HostIdentity::local();
    // Our own process, but the nonce is not at the address named.
    let nonce = [7u8; 32];
    for (addr, start) in [(8u64, me.start), (nonce.as_ptr() as u64, me.start + 1)] {
        let mut hello = t.hello(Purpose::Open { lane: 0 }, Key([start as u8 ^ addr as u8; 16]));
        hello.host = HostIdentity { start, ..me };
        hello.nonce_addr = addr;
        hello.nonce = nonce;
        let mut bytes = Vec::new();
        hello.encode(&mut bytes);
        let mut s = t.dial(&bytes);
        assert_eq!(verdict(&mut s), Verdict::Tcp);
    }
    // Control: the right address and start.
    let mut hello = t.hello(Purpose::Open { lane: 0 }, Key([99; 16]));
    (hello.host, hello.nonce_addr, hello.nonce) = (me, nonce.as_ptr() as u64, nonce);
    let mut bytes = Vec::new();
    hello.encode(&mut bytes);
    assert_eq!(verdict(&mut t.dial(&bytes)), Verdict::Direct);
}

#[test]
fn strangers_are_turned_away() {
    let t = target(TcpConfig::loopback());
    let ask = |hello: Hello| {
        let mut bytes = Vec::new();
        hello.encode(&mut bytes);
        verdict(&mut t.dial(&bytes))
    };
    let open = || t.hello(Purpose::Open { lane: 0 }, Key([1; 16]));
    assert_eq!(ask(Hello { target: "another".into(), ..open() }), Verdict::NotMe);
    assert_eq!(ask(Hello { admission: Key([0; 16]), ..open() }), Verdict::Denied);
    assert_eq!(ask(t.hello(Purpose::Data, Key([2; 16]))), Verdict::NoSession);
    assert_eq!(ask(t.hello(Purpose::Lane { lane: 1 }, Key([2; 16]))), Verdict::NoSession);
    assert_eq!(ask(t.hello(Purpose::Fence, Key([2; 16]))), Verdict::Fenced);
    t.still_serves();
}

#[test]
fn connections_that_say_nothing_end() {
    let t =
        target(TcpConfig { connect_timeout: Duration::from_millis(100), max_handshakes: 4, ..TcpConfig::loopback() });
    let mut silent: Vec<TcpStream> = (0..12).map(|_| t.dial(&[])).collect();
    for s in &mut silent {
        assert!(next(s).is_none());
    }
    t.still_serves();
}

#[test]
fn sessions_and_their_connections_are_bounded() {
    let t = target(TcpConfig { max_sessions: 2, max_connections_per_session: 2, ..TcpConfig::loopback() });
    let _a = t.join(Purpose::Open { lane: 0 }, Key([1; 16]));
    let _b = t.join(Purpose::Open { lane: 0 }, Key([2; 16]));
    let _c = t.join(Purpose::Data, Key([1; 16]));
    for hello in [t.hello(Purpose::Open { lane: 0 }, Key([3; 16])), t.hello(Purpose::Data, Key([1; 16]))] {
        let mut bytes = Vec::new();
        hello.encode(&mut bytes);
        assert_eq!(verdict(&mut t.dial(&bytes)), Verdict::Denied);
    }
}

/// The heart of the fence: the old connection's later bytes are refused by construction, not by luck.
#[test]
fn bytes_sent_after_the_fence_never_land() {
    let t = target(TcpConfig::loopback());
    let r = t.blob.regions[0];
    let session = Key([1; 16]);
    let _ctl = t.join(Purpose::Open { lane: 0 }, session);
    let mut data = t.join(Purpose::Data, session);
    data.write_all(&write_frame(&r, r.addr, LEN as u64, Kind::Write)).unwrap();
    data.write_all(&vec![1; LEN / 2]).unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    while t.transport.stats().bytes_received < LEN as u64 / 2 && Instant::now() < end {
        std::thread::yield_now();
    }
    let mut bytes = Vec::new();
    t.hello(Purpose::Fence, session).encode(&mut bytes);
    assert_eq!(verdict(&mut t.dial(&bytes)), Verdict::Fenced);
    // The memory is another's now.
    t.arena.write_at(0, &vec![0; LEN]);
    let _ = data.write_all(&vec![2; LEN / 2]);
    assert!(next(&mut data).is_none());
    t.untouched();
    assert_eq!(t.transport.stats().sessions, 0);
    // Nothing joins a fenced session, and it cannot be opened by a late data connection.
    let mut late = Vec::new();
    t.hello(Purpose::Data, session).encode(&mut late);
    assert_eq!(verdict(&mut t.dial(&late)), Verdict::NoSession);
}

/// Negative control of the test above: without the fence the second half lands.
#[test]
fn without_a_fence_the_same_bytes_land() {
    let t = target(TcpConfig::loopback());
    let r = t.blob.regions[0];
    let mut s = t.join(Purpose::Open { lane: 0 }, Key([1; 16]));
    s.write_all(&write_frame(&r, r.addr, LEN as u64, Kind::Write)).unwrap();
    s.write_all(&vec![1; LEN]).unwrap();
    assert_eq!(frame::ack(&next(&mut s).unwrap().1).unwrap().1, Status::Done);
    assert!(t.arena.to_vec(0, LEN).iter().all(|b| *b == 1));
}

#[test]
fn a_region_unregistered_between_two_halves_takes_nothing_more() {
    let mut t = target(TcpConfig::loopback());
    let r = t.blob.regions[0];
    let mut s = t.join(Purpose::Open { lane: 0 }, Key([1; 16]));
    s.write_all(&write_frame(&r, r.addr, LEN as u64, Kind::Write)).unwrap();
    s.write_all(&vec![1; LEN / 2]).unwrap();
    let end = Instant::now() + Duration::from_secs(30);
    while t.transport.stats().bytes_received < LEN as u64 / 2 && Instant::now() < end {
        std::thread::yield_now();
    }
    t.region = None;
    t.arena.write_at(0, &vec![0; LEN]);
    s.write_all(&vec![2; LEN / 2]).unwrap();
    let (_, body) = next(&mut s).unwrap();
    assert_eq!(frame::ack(&body).unwrap().1, Status::Refused);
    t.untouched();
    assert_eq!(t.transport.stats().bytes_discarded, LEN as u64 / 2);
}

#[test]
fn cat_f61_bad_frames_end_their_connection_only() {
    let t = target(TcpConfig::loopback());
    let mut hello = Vec::new();
    t.hello(Purpose::Open { lane: 0 }, Key([1; 16])).encode(&mut hello);
    let mut long = vec![0xff, 0xff, 0xff, 0xff, 4, 0, 0, 0];
    let mut after = hello.clone();
    after.append(&mut long);
    let cases: Vec<Vec<u8>> = vec![
        b"GET / HTTP/1.1\r\n\r\n".to_vec(),
        vec![0; 64],
        vec![0xff; 64],
        // Before the hello, a long frame is not waited for.
        vec![0xff, 0xff, 0xff, 0x7f, 3, 0, 0, 0],
        hello[..HEAD].iter().copied().chain([0xee; 400]).collect(),
        after,
        [hello.clone(), hello.clone()].concat(),
    ];
    for bytes in cases {
        let mut s = t.dial(&bytes);
        while next(&mut s).is_some() {}
    }
    t.untouched();
    assert!(t.transport.stats().frames_malformed >= 6);
    t.still_serves();
}

/// Catalogue F62: with one worker for everybody, a fault in the handling of one peer is that peer's alone.
#[test]
fn cat_f62_a_panic_in_one_connections_handler_ends_that_connection_only() {
    let t = target(TcpConfig { workers: 1, ..TcpConfig::loopback() });
    let r = t.blob.regions[0];
    let mut bystander = t.join(Purpose::Open { lane: 0 }, Key([7; 16]));
    for n in 1..=3u8 {
        let mut bytes = Vec::new();
        Hello { source: PANICS.into(), ..t.hello(Purpose::Open { lane: 0 }, Key([n; 16])) }.encode(&mut bytes);
        let mut s = t.dial(&bytes);
        assert_eq!(verdict(&mut s), Verdict::Tcp);
        s.write_all(&write_frame(&r, r.addr, 100, Kind::Write)).unwrap();
        assert!(next(&mut s).is_none(), "the connection ends");
        t.untouched();
        // Its session is quiet: the fence is answered.
        let mut fence = Vec::new();
        t.hello(Purpose::Fence, Key([n; 16])).encode(&mut fence);
        assert_eq!(verdict(&mut t.dial(&fence)), Verdict::Fenced);
        t.still_serves();
    }
    let stats = t.transport.stats();
    assert_eq!(stats.panics, 3);
    let mut bytes = write_frame(&r, r.addr, 100, Kind::Write);
    bytes.extend_from_slice(&[1; 100]);
    bystander.write_all(&bytes).unwrap();
    assert_eq!(frame::ack(&next(&mut bystander).unwrap().1).unwrap().1, Status::Done);
}

/// A worker that cannot wait leaves no connection open that nobody reads, and serves again when it can.
#[test]
fn cat_f62_a_worker_whose_wait_fails_closes_its_connections_and_recovers() {
    let t = target(TcpConfig { workers: 1, ..TcpConfig::loopback() });
    let mut peer = t.join(Purpose::Open { lane: 0 }, Key([1; 16]));
    let worker = &t.transport.inner().workers[0];
    let ep = worker.ep.as_raw_fd();
    let other = std::fs::File::open("/dev/null").unwrap();
    // SAFETY: plain descriptors; `kept` is ours.
    let kept = unsafe { libc::dup(ep) };
    assert!(kept >= 0);
    // SAFETY: plain descriptors: the set's number stands for another file for a while.
    assert_eq!(unsafe { libc::dup2(other.as_raw_fd(), ep) }, ep);
    worker.wake();
    assert!(next(&mut peer).is_none(), "the connection ends");
    // The peer sees the end of its connection before the worker has let go of the session.
    let patience = std::time::Instant::now() + Duration::from_secs(10);
    while t.transport.stats().sessions > 0 {
        assert!(std::time::Instant::now() < patience, "the session ends with its last connection");
        std::thread::sleep(Duration::from_millis(1));
    }
    // SAFETY: as above.
    assert!(unsafe { libc::dup2(kept, ep) == ep && libc::close(kept) == 0 });
    t.still_serves();
}

/// A target in another container, by hand: it takes the session, then its host is gone without a word. No proof comes,
/// attempts end (catalogue F53), the source's memory is free at once; and when it is back and connected again, the old
/// session is fenced first.
#[test]
fn cat_f53_a_lost_host_is_not_called_on_for_ever() {
    // The same kernel, so that its loopback address is called on, but other pid numbers: its death cannot be seen.
    let host = HostIdentity { pid_ns: 1, pid: 1, start: 1, ..HostIdentity::local() };
    let region = RemoteRegion { id: 0, addr: 1 << 40, len: 1 << 30, key: Key([1; 16]) };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    let blob = Blob { name: "far".into(), admission: Key([2; 16]), host, addresses: vec![at], regions: vec![region] };
    let descriptor =
        PeerDescriptor { name: "far".into(), metadata: blob.encode(), endpoint: Endpoint::new("far", 1), host: None };
    let config = TcpConfig { fence_for: Duration::from_millis(150), ..TcpConfig::loopback() };
    let p = TcpTransport::new(config).unwrap();
    let arena = Arc::new(HostArena::new(4096).unwrap());
    let region = p.register(arena).unwrap();
    let mut lane = p.lane().unwrap();
    let welcome = |s: &mut TcpStream, verdict| -> Hello {
        let (_, body) = next(s).unwrap();
        let mut out = Vec::new();
        Welcome { verdict, text: String::new(), host: Some(host) }.encode(&mut out);
        s.write_all(&out).unwrap();
        Hello::decode(&body).unwrap()
    };
    // Control connection and two for data.
    let serve = |n: usize| -> Vec<(TcpStream, Hello)> {
        let take = |_| {
            let mut s = listener.accept().unwrap().0;
            let hello = welcome(&mut s, Verdict::Tcp);
            (s, hello)
        };
        (0..n).map(take).collect()
    };
    let (peer, old) = std::thread::scope(|scope| {
        let there = scope.spawn(|| serve(3));
        (p.connect(&descriptor).unwrap(), there.join().unwrap())
    });
    let entry = EntryPair {
        src_entry: 0,
        dst_entry: 0,
        src_region: region.id(),
        src_offset: 0,
        dst_addr: 1 << 40,
        item_len: 8,
        src_stride: 8,
        dst_stride: 8,
        dst_kind: Default::default(),
    };
    let plan =
        WritePlan::new([PlanGroup { entries: Arc::new([entry]), runs: Arc::new([Run { src: 0, dst: 0, count: 1 }]) }]);
    lane.submit(WriteOp { id: OpId(1), peer, plan, regions: Arc::new([region]) }).unwrap();
    let session = old[0].1.session;
    drop(old);
    let mut out = Vec::new();
    let mut news = |want: usize| {
        let end = Instant::now() + Duration::from_secs(60);
        while out.len() < want && Instant::now() < end {
            lane.poll(&mut out);
            std::thread::yield_now();
        }
        out.clone()
    };
    let told = news(2);
    assert!(matches!(told[0], LaneEvent::PeerLost(..)), "{told:?}");
    assert!(
        matches!(told[1], LaneEvent::Outcome(_, Outcome::Failed { src_quiet: true, dst_quiet: false, .. })),
        "{told:?}"
    );
    // Attempts come, are cut off, and end.
    listener.set_nonblocking(true).unwrap();
    let mut attempts = 0;
    let mut since = Instant::now();
    while since.elapsed() < Duration::from_millis(700) {
        match listener.accept() {
            Ok(_) => (attempts, since) = (attempts + 1, Instant::now()),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
    assert!((1..=5).contains(&attempts), "{attempts} attempts");
    assert_eq!(news(2).len(), 2, "no proof, no settlement");
    assert_eq!(p.stats().peers, 1, "and the op is not forgotten");
    // Connected again: a fence for the old session, and a session of its own.
    listener.set_nonblocking(false).unwrap();
    // Open until the end of the test: a connection that closes is news of its own.
    let _open = std::thread::scope(|scope| {
        let there = scope.spawn(|| {
            let mut kept = Vec::new();
            for _ in 0..4 {
                let mut s = listener.accept().unwrap().0;
                s.set_nonblocking(false).unwrap();
                let (_, body) = next(&mut s).unwrap();
                let hello = Hello::decode(&body).unwrap();
                let fence = hello.purpose == Purpose::Fence;
                assert_eq!(fence, hello.session.0 == session.0, "a session is never opened again");
                let mut out = Vec::new();
                let verdict = if fence { Verdict::Fenced } else { Verdict::Tcp };
                Welcome { verdict, text: String::new(), host: (!fence).then_some(host) }.encode(&mut out);
                s.write_all(&out).unwrap();
                kept.push(s);
            }
            kept
        });
        assert_ne!(p.connect(&descriptor).unwrap(), peer);
        there.join().unwrap()
    });
    let told = news(3);
    let quiet = kv_core::transport::Settlement::Settled { src_quiet: true, dst_quiet: true };
    assert_eq!(told[2], LaneEvent::Settlement(OpId(1), quiet));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Whatever follows a hello, the memory stays untouched unless key and bounds are right.
    #[test]
    fn random_frames_write_nothing(noise in prop::collection::vec(any::<u8>(), 0..400), kind in 0u8..8, at: usize, v: u8) {
        let t = target(TcpConfig { workers: 1, ..TcpConfig::loopback() });
        let forged = RemoteRegion { key: Key([0; 16]), ..t.blob.regions[0] };
        let mut near = write_frame(&forged, forged.addr, 64, Kind::Write);
        let at = at % near.len();
        near[at] = v;
        near.extend_from_slice(&[0xff; 64]);
        let mut framed = vec![noise.len() as u8, (noise.len() >> 8) as u8, 0, 0, kind, 0, 0, 0];
        framed.extend_from_slice(&noise);
        for (n, bytes) in [noise.clone(), framed, near].into_iter().enumerate() {
            let mut s = t.join(Purpose::Open { lane: 0 }, Key([n as u8; 16]));
            s.write_all(&bytes).unwrap();
            let _ = s.shutdown(std::net::Shutdown::Write);
            while next(&mut s).is_some() {}
        }
        t.untouched();
    }
}
