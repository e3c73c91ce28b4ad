//! Peers of another pid namespace, played by hand, so that nothing but what they say can be known about them: who may
//! say that a peer's place was taken, and what one of them can do to the others.

use std::io::Write;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kv_core::ids::{OpId, PeerId};
use kv_core::memory::RegisteredRegion;
use kv_core::net::Endpoint;
use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_core::transport::{
    Lane, LaneEvent, Outcome, PeerDescriptor, Settlement, Transport, TransportError, TransportErrorKind, WriteOp,
};

use crate::blob::{Blob, Key, RemoteRegion};
use crate::frame::{Verdict, Welcome};
use crate::hostile_tests::next;
use crate::inbound::PANICS;
use crate::{HostArena, TcpConfig, TcpTransport};
use kv_core::host::HostIdentity;

/// On this boot (so that its loopback address is called), but with pid numbers that mean nothing here.
fn far(pid: u32) -> HostIdentity {
    HostIdentity { pid_ns: 1, pid, start: u64::from(pid), ..HostIdentity::local() }
}

fn blob(name: &str, host: HostIdentity, at: SocketAddr) -> Blob {
    let region = RemoteRegion { id: 0, addr: 1 << 40, len: 1 << 30, key: Key([1; 16]) };
    Blob { name: name.into(), admission: Key([2; 16]), host, addresses: vec![at], regions: vec![region] }
}

struct Source {
    transport: TcpTransport,
    lane: Box<dyn Lane>,
    region: Arc<RegisteredRegion>,
    news: Vec<LaneEvent>,
}

impl Source {
    fn new() -> Self {
        let transport = TcpTransport::new(TcpConfig { connections_per_peer: 1, ..TcpConfig::loopback() }).unwrap();
        let region = transport.register(Arc::new(HostArena::new(4096).unwrap())).unwrap();
        let lane = transport.lane().unwrap();
        Self { transport, lane, region, news: Vec::new() }
    }

    /// A registration arrives; every peer has the same endpoint.
    fn hear(&self, blob: &Blob) -> Result<PeerId, TransportError> {
        let endpoint = Endpoint::new("far", 1);
        self.transport.connect(&PeerDescriptor {
            name: blob.name.clone(),
            metadata: blob.encode(),
            endpoint,
            host: None,
        })
    }

    /// The same, and whoever listens takes both connections, as process `says`. They stay open.
    fn meet(
        &self,
        blob: &Blob,
        listener: &TcpListener,
        says: HostIdentity,
    ) -> (Result<PeerId, TransportError>, Vec<TcpStream>) {
        std::thread::scope(|scope| {
            let there = scope.spawn(move || {
                let take = |_| {
                    let mut s = listener.accept().unwrap().0;
                    next(&mut s).unwrap();
                    let mut out = Vec::new();
                    Welcome { verdict: Verdict::Tcp, text: String::new(), host: Some(says) }.encode(&mut out);
                    s.write_all(&out).unwrap();
                    s
                };
                // A wrong answer to the first leaves no second.
                (0..if says == blob.host { 2 } else { 1 }).map(take).collect()
            });
            (self.hear(blob), there.join().unwrap())
        })
    }

    fn write(&mut self, peer: PeerId) {
        let entry = EntryPair {
            src_entry: 0,
            dst_entry: 0,
            src_region: self.region.id(),
            src_offset: 0,
            dst_addr: 1 << 40,
            item_len: 8,
            src_stride: 8,
            dst_stride: 8,
            dst_kind: Default::default(),
        };
        let groups = [PlanGroup { entries: Arc::new([entry]), runs: Arc::new([Run { src: 0, dst: 0, count: 1 }]) }];
        let op = WriteOp { id: OpId(1), peer, plan: WritePlan::new(groups), regions: Arc::new([self.region.clone()]) };
        self.lane.submit(op).unwrap();
    }

    fn until(&mut self, count: usize) {
        let end = Instant::now() + Duration::from_secs(60);
        while self.news.len() < count {
            assert!(Instant::now() < end, "{:?}", self.news);
            self.lane.poll(&mut self.news);
            std::thread::yield_now();
        }
    }
}

fn listener() -> (TcpListener, SocketAddr) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap();
    (listener, at)
}

#[test]
fn cat_f54_a_claim_in_a_registration_settles_nothing_and_an_answer_does() {
    let mut p = Source::new();
    let (l, at) = listener();
    let (old, kept) = p.meet(&blob("old", far(1), at), &l, far(1));
    let old = old.unwrap();
    p.write(old);

    // Copied boot id and endpoint, and nobody listens.
    let (closed, nowhere) = listener();
    drop(closed);
    assert!(p.hear(&blob("forged", far(2), nowhere)).is_err());
    // Somebody listens, but is not the process that the metadata describes.
    let (l2, at2) = listener();
    let (refused, _s) = p.meet(&blob("forged", far(2), at2), &l2, far(3));
    let e = refused.unwrap_err();
    assert!(e.kind == TransportErrorKind::BadPeer && e.message.contains("another process"), "{e}");
    // The name of a peer that is there, with another's keys: its regions stay what they were.
    let thief = Blob { admission: Key([9; 16]), ..blob("old", far(1), at2) };
    assert_eq!(p.hear(&thief).unwrap_err().kind, TransportErrorKind::BadPeer);
    // It answers, but from another address, which may be another container's.
    let l4 = TcpListener::bind("127.0.0.2:0").unwrap();
    let aside = blob("aside", far(4), l4.local_addr().unwrap());
    let (met, _s4) = p.meet(&aside, &l4, far(4));
    met.unwrap();

    // `lose` would have been told before `connect` returned.
    assert_eq!(p.transport.stats().peers_lost, 0);
    p.lane.poll(&mut p.news);
    assert_eq!(p.news, []);
    assert_eq!(p.transport.peer_path(old).unwrap().ops_open, 1);

    // Control: it answers as who it says it is, where the old one was.
    let (l5, at5) = listener();
    let (met, _s5) = p.meet(&blob("new", far(5), at5), &l5, far(5));
    met.unwrap();
    p.until(3);
    assert!(matches!(p.news[0], LaneEvent::PeerLost(id, _) if id == old), "{:?}", p.news);
    let LaneEvent::Outcome(OpId(1), Outcome::Failed { src_quiet: true, dst_quiet: false, .. }) = p.news[1] else {
        panic!("{:?}", p.news)
    };
    assert_eq!(p.news[2], LaneEvent::Settlement(OpId(1), Settlement::PeerGenerationDead));
    assert_eq!(p.transport.stats().peers_lost, 1);
    drop(kept);
}

/// Catalogue F62, the keeper: a fault in the search for one peer's proof leaves that one unproven, and others get theirs.
#[test]
fn cat_f62_a_panic_over_one_lost_peer_leaves_the_keeper_to_the_others() {
    let mut p = Source::new();
    let (l, at) = listener();
    let (bad, cut) = p.meet(&blob(PANICS, far(1), at), &l, far(1));
    let bad = bad.unwrap();
    drop(cut);
    p.until(1);
    assert!(matches!(p.news[0], LaneEvent::PeerLost(id, _) if id == bad), "{:?}", p.news);
    let (l2, at2) = listener();
    let (good, cut) = p.meet(&blob("good", far(2), at2), &l2, far(2));
    p.write(good.unwrap());
    drop(cut);
    p.until(3);
    let mut fence = l2.accept().unwrap().0;
    next(&mut fence).unwrap();
    let mut out = Vec::new();
    Welcome { verdict: Verdict::Fenced, text: String::new(), host: None }.encode(&mut out);
    fence.write_all(&out).unwrap();
    p.until(4);
    let quiet = Settlement::Settled { src_quiet: true, dst_quiet: true };
    assert_eq!(p.news[3], LaneEvent::Settlement(OpId(1), quiet));
    assert!(p.transport.stats().panics > 0);
}

/// The old process is seen to run: then not even its successor's answer settles what it may still write.
#[test]
fn cat_f54_a_process_that_runs_on_this_host_is_not_dead_because_it_has_a_successor() {
    let mut p = Source::new();
    let (l, at) = listener();
    let me = HostIdentity::local();
    let (old, _kept) = p.meet(&blob("old", me, at), &l, me);
    p.write(old.unwrap());
    let other = HostIdentity { pid: me.pid + 1, ..me };
    let (l2, at2) = listener();
    let (met, _s) = p.meet(&blob("new", other, at2), &l2, other);
    met.unwrap();
    p.until(2);
    // The keeper has taken up the old session, and with it whatever was said before: it calls for a fence.
    let mut fence = l.accept().unwrap().0;
    next(&mut fence).unwrap();
    p.lane.poll(&mut p.news);
    assert!(matches!(p.news[..], [LaneEvent::PeerLost(..), LaneEvent::Outcome(..)]), "{:?}", p.news);
    let mut out = Vec::new();
    Welcome { verdict: Verdict::Fenced, text: String::new(), host: None }.encode(&mut out);
    fence.write_all(&out).unwrap();
    p.until(3);
    let quiet = Settlement::Settled { src_quiet: true, dst_quiet: true };
    assert_eq!(p.news[2], LaneEvent::Settlement(OpId(1), quiet));
}

/// A peer that lets one dial hang holds up nobody else's coming and going.
#[test]
fn a_dial_that_hangs_does_not_hold_up_disconnect_or_a_new_lane() {
    let p = Source::new();
    let _second = p.transport.lane().unwrap();
    let (l, at) = listener();
    let blob = blob("slow", far(1), at);
    let (metadata, endpoint) = (blob.encode(), Endpoint::new("far", 1));
    let descriptor = PeerDescriptor { name: blob.name, metadata, endpoint, host: None };
    let transport = &p.transport;
    let ((hangs, seen), (go_on, may)) = (std::sync::mpsc::channel(), std::sync::mpsc::channel::<()>());
    let kept = std::thread::scope(|scope| {
        let there = scope.spawn(move || {
            // The first lane's, one for data, the second lane's, and that of the lane that comes meanwhile.
            let take = |n| {
                let mut s = l.accept().unwrap().0;
                next(&mut s).unwrap();
                if n == 2 {
                    hangs.send(()).unwrap();
                    may.recv().unwrap();
                }
                let mut out = Vec::new();
                Welcome { verdict: Verdict::Tcp, text: String::new(), host: Some(far(1)) }.encode(&mut out);
                s.write_all(&out).unwrap();
                s
            };
            (0..4).map(take).collect::<Vec<_>>()
        });
        let connect = scope.spawn(|| transport.connect(&descriptor).unwrap());
        seen.recv().unwrap();
        transport.disconnect(PeerId(u64::MAX));
        let third = transport.lane().unwrap();
        // Only now does the dial go on: had either waited for it, it would have run out of time.
        go_on.send(()).unwrap();
        let peer = connect.join().unwrap();
        (there.join().unwrap(), third, peer)
    });
    assert_eq!(transport.peer_path(kept.2).unwrap().connections, 4);
    assert_eq!(transport.stats().peers_lost, 0);
}
