//! Inner doors for the fuzz targets: the parsers of what a peer sends, with what must hold for whatever they accept.
//! No part of the API.
#![allow(clippy::expect_used)] // a broken rule is what a fuzzer looks for

use std::sync::Arc;

use kv_core::memory::MemoryOwner;

use crate::blob::{Blob, Key};
use crate::codec::Reader;
use crate::frame::{self, Hello, OpHead, Welcome};
use crate::plan::{Cursor, Plan};
use crate::region::Registry;

/// Where the region of [`request`] lies, as far as numbers go; region 0 with the key `[7; 16]`.
pub const REGION: (u64, u64) = (1 << 32, 1 << 20);
const KEY: Key = Key([7; 16]);
/// Pieces of a plan that are looked at.
const PIECES: usize = 4096;

struct Numbers;

// SAFETY: nothing here reads or writes through the address; only the numbers are used.
unsafe impl MemoryOwner for Numbers {
    fn base(&self) -> u64 {
        REGION.0
    }
    fn len(&self) -> u64 {
        REGION.1
    }
}

/// A peer's metadata blob: what is accepted survives its own encoding.
pub fn blob(bytes: &[u8]) {
    let Ok(blob) = Blob::decode(bytes) else { return };
    let again = blob.encode();
    let same = Blob::decode(&again).expect("a blob that we wrote");
    assert_eq!(same.encode(), again);
    assert!(blob.regions.iter().all(|r| r.len > 0 && r.addr.checked_add(r.len).is_some()));
}

/// Bytes off a connection, frame after frame, as a reader takes them; each body through every small parser.
pub fn stream(mut bytes: &[u8]) {
    while let Ok(Some((_, body, used))) = frame::small(bytes) {
        assert!(used >= frame::HEAD && used <= bytes.len() && body.len() <= frame::MAX_SMALL);
        if let Ok(hello) = Hello::decode(body) {
            let mut out = Vec::new();
            hello.encode(&mut out);
            let (_, again, _) = frame::small(&out).expect("our own frame").expect("a whole frame");
            Hello::decode(again).expect("a HELLO that we wrote");
        }
        if let Ok(welcome) = Welcome::decode(body) {
            let mut out = Vec::new();
            welcome.encode(&mut out);
            let (_, again, _) = frame::small(&out).expect("our own frame").expect("a whole frame");
            assert_eq!(Welcome::decode(again), Ok(welcome));
        }
        if let Ok((op, status, text)) = frame::ack(body) {
            let mut out = Vec::new();
            frame::put_ack(&mut out, op, status, text);
            let (_, again, _) = frame::small(&out).expect("our own frame").expect("a whole frame");
            assert_eq!(frame::ack(again), Ok((op, status, text)));
        }
        bytes = &bytes[used..];
    }
}

/// The body of a PULL or WRITE: head and plan. An authorised plan writes inside its regions only, and a cursor that
/// skips stands where one that walked stands.
pub fn request(body: &[u8]) {
    let mut r = Reader(body);
    let Ok(head) = OpHead::decode(&mut r) else { return };
    let planned = r.0;
    let mut plan = Plan::default();
    if plan.decode(&mut r).is_err() || r.end().is_err() {
        return;
    }
    let mut again = Vec::new();
    plan.encode(true, &mut again);
    assert_eq!(again, planned, "a plan survives its own encoding");
    let registry = Registry::default();
    registry.add(Arc::new(Numbers), KEY).expect("the first region");
    let mut held = Vec::new();
    if plan.authorise(&registry, &mut held).is_err() {
        return;
    }
    let total = plan.total();
    let mut walker = Cursor::default();
    let mut walked = 0;
    for _ in 0..PIECES {
        let Some(piece) = walker.next(&plan, 1 + head.len % (1 << 20)) else {
            assert_eq!(walked, total, "a whole walk is the whole plan");
            break;
        };
        assert!(piece.dst >= REGION.0 && piece.dst + piece.len <= REGION.0 + REGION.1, "{piece:?} leaves the region");
        walked += piece.len;
        assert!(piece.len > 0 && walked <= total);
    }
    let mut skipper = Cursor::default();
    skipper.skip(&plan, walked);
    assert_eq!(skipper, walker, "skipping {walked} of {total} bytes");
    // A stripe may start anywhere: getting there must not cost a step an item.
    Cursor::default().skip(&plan, head.start.min(total));
}

/// Seeds for [`blob`], [`stream`] and [`request`], in this order.
pub fn seeds() -> [Vec<Vec<u8>>; 3] {
    use crate::blob::RemoteRegion;
    use crate::frame::{Purpose, Status, Verdict};
    use kv_core::host::HostIdentity;
    use kv_core::ids::{ProcessGeneration, RegionId};
    use kv_core::memory::RegisteredRegion;
    use kv_core::plan::{EntryPair, PlanGroup, Run, WritePlan};

    let host = HostIdentity { boot_id: [1; 16], pid_ns: 2, pid: 3, start: 4, uid: 5 };
    let region = RemoteRegion { id: 0, addr: REGION.0, len: REGION.1, key: KEY };
    let addresses = ["10.0.0.1:80", "[fd00::1]:81"].iter().filter_map(|a| a.parse().ok()).collect();
    let blob = Blob { name: "d-1".into(), admission: Key([3; 16]), host, addresses, regions: vec![region] };

    let mut stream = Vec::new();
    let purposes = [Purpose::Open { lane: 0 }, Purpose::Lane { lane: 1 }, Purpose::Data, Purpose::Fence];
    for purpose in purposes {
        let hello = Hello {
            purpose,
            target: "d-1".into(),
            admission: Key([3; 16]),
            session: Key([4; 16]),
            source: "p-1".into(),
            process: ProcessGeneration(6),
            host,
            direct: true,
            nonce_addr: 77,
            nonce: [8; 32],
        };
        hello.encode(&mut stream);
    }
    let verdicts =
        [Verdict::Direct, Verdict::Tcp, Verdict::NotMe, Verdict::Denied, Verdict::NoSession, Verdict::Fenced];
    for verdict in verdicts {
        Welcome { verdict, text: "why".into(), host: Some(host) }.encode(&mut stream);
    }
    for status in [Status::Done, Status::Refused, Status::Failed] {
        frame::put_ack(&mut stream, 5, status, "because");
    }
    frame::put(&mut stream, frame::Kind::Bye, |_| {});

    let local = [Arc::new(RegisteredRegion::new(RegionId(0), Arc::new(Numbers), Box::new(())))];
    let requests = [64, 96].map(|stride| {
        let entry = EntryPair {
            src_entry: 0,
            dst_entry: 0,
            src_region: RegionId(0),
            src_offset: 0,
            dst_addr: REGION.0,
            item_len: 64,
            src_stride: stride,
            dst_stride: stride,
            dst_kind: Default::default(),
        };
        let runs = Arc::from([Run { src: 0, dst: 3, count: 4 }, Run { src: 9, dst: 9, count: 1 }]);
        let group = PlanGroup { entries: Arc::from([entry, EntryPair { dst_addr: REGION.0 + 4096, ..entry }]), runs };
        let mut plan = Plan::default();
        plan.resolve(&WritePlan::new([group]), &local, &[region], u64::MAX).expect("a plan that fits");
        let mut body = Vec::new();
        OpHead { op: 5, stripes: 1, start: 100, len: plan.total() - 100 }.encode(&mut body);
        plan.encode(true, &mut body);
        body
    });
    [vec![blob.encode().to_vec()], vec![stream], requests.to_vec()]
}
