//! kv-tcp's lane driven bare, without managers: the source's process of the same-host and TCP rows.

use std::sync::Arc;

use kv_transfer::memory::{MemoryOwner, RegisteredRegion};
use kv_transfer::plan::{EntryPair, PlanGroup, WritePlan, find_runs};
use kv_transfer::tcp::{HostArena, PathKind, SameHost, TcpConfig, TcpTransport};
use kv_transfer::transport::{Lane, LaneEvent, Outcome, PeerDescriptor, SubmitError, Transport, WriteOp};
use kv_transfer::{Endpoint, OpId, PeerId};
use serde_json::{Value, json};

use crate::child::{Link, number, numbers, text};
use crate::pair::{HOST, PATIENCE};
use crate::stats::shuffled_pages;
use crate::sys::{now_ns, process_cpu_ns, readable};
use crate::{Result, tcp};

pub const ROLE: &str = "lane";
/// Bytes of one op.
pub const OP: u64 = 128 << 20;
/// Bytes of each side's pool: ops walk through it, so that caches are cold.
pub const POOL: u64 = 512 << 20;
/// Ops until the pool comes round again.
pub const OPS: usize = (POOL / OP) as usize;
/// Tensors in the pool, as of a model: K and V of 32 layers. An op takes the same pages of each.
pub const ENTRIES: u64 = 64;
const ENTRY: u64 = POOL / ENTRIES;

/// Source and destination pages, in each entry, of the op with this number: slices of two shuffles.
pub fn page_lists(page: u64, op: usize) -> (Vec<i32>, Vec<i32>) {
    let (all, n) = ((ENTRY / page) as usize, (OP / ENTRIES / page) as usize);
    let at = op % OPS * n;
    let cut = |seed| shuffled_pages(all, seed)[at..at + n].to_vec();
    (cut(11), cut(12))
}

/// The same as byte offsets into the pools, entry by entry.
pub fn offsets(page: u64, op: usize) -> (Vec<u64>, Vec<u64>) {
    let (src, dst) = page_lists(page, op);
    let bytes = |list: Vec<i32>| {
        (0..ENTRIES).flat_map(|e| list.iter().map(move |p| e * ENTRY + *p as u64 * page).collect::<Vec<_>>()).collect()
    };
    (bytes(src), bytes(dst))
}

/// What a source needs to know of a target.
pub fn describe(transport: &TcpTransport, base: u64) -> Value {
    json!({ "name": transport.local_name(), "metadata": transport.local_metadata().to_vec(), "base": base })
}

/// A transport and one lane of it.
pub struct Bare {
    pub transport: Arc<TcpTransport>,
    pub region: Arc<RegisteredRegion>,
    regions: Arc<[Arc<RegisteredRegion>]>,
    lane: Box<dyn Lane>,
    next: u64,
    targets: u16,
}

impl Bare {
    pub fn new(config: TcpConfig, arena: Arc<HostArena>) -> Result<Self> {
        let transport = Arc::new(TcpTransport::new(config)?);
        let region = transport.register(arena)?;
        let lane = transport.lane()?;
        Ok(Self { transport, regions: Arc::new([region.clone()]), region, lane, next: 0, targets: 0 })
    }

    /// Connect to a target, which must be reached this way.
    pub fn connect(&mut self, target: &Value, kind: PathKind) -> Result<PeerId> {
        // Two names at one endpoint would be two generations of one peer.
        self.targets += 1;
        let descriptor = PeerDescriptor {
            name: text(target, "name")?.to_owned(),
            metadata: numbers(target, "metadata")?.into_iter().map(|b| b as u8).collect::<Vec<_>>().into(),
            endpoint: Endpoint::new(HOST, self.targets),
            host: None,
        };
        let peer = self.transport.connect(&descriptor)?;
        let path = self.transport.peer_path(peer).ok_or("the peer is gone at once")?;
        if path.kind != kind {
            return Err(format!("{kind:?} is to be measured, but this is {:?}: {}", path.kind, path.reason).into());
        }
        Ok(peer)
    }

    /// One write, from submission to Done, ns.
    pub fn run(&mut self, peer: PeerId, plan: WritePlan) -> Result<u64> {
        self.next += 1;
        let id = OpId(self.next);
        let op = WriteOp { id, peer, plan, regions: self.regions.clone() };
        let fd = self.lane.wake_fd().ok_or("a lane without a descriptor")?;
        let mut news = Vec::new();
        let start = now_ns();
        self.lane.submit(op).map_err(|e| match e {
            SubmitError::Busy(_) => "the lane is busy".to_owned(),
            SubmitError::Rejected(_, e) => e.to_string(),
        })?;
        loop {
            if !readable(fd, PATIENCE) {
                return Err("the lane has no news".into());
            }
            self.lane.poll(&mut news);
            match news.first() {
                None => {}
                Some(LaneEvent::Outcome(done, Outcome::Done)) if *done == id => return Ok(now_ns() - start),
                Some(other) => return Err(format!("{other:?}").into()),
            }
        }
    }
}

/// The plan of an op.
fn plan(bare: &Bare, base: u64, page: u64, op: usize) -> Result<WritePlan> {
    let (src, dst) = page_lists(page, op);
    let mut runs = Vec::new();
    find_runs(&src, &dst, &mut runs)?;
    let entry = |e: u64| EntryPair {
        src_entry: e as u32,
        dst_entry: e as u32,
        src_region: bare.region.id(),
        src_offset: e * ENTRY,
        dst_addr: base + e * ENTRY,
        item_len: page,
        src_stride: page,
        dst_stride: page,
        dst_kind: Default::default(),
    };
    Ok(WritePlan::new([PlanGroup { entries: (0..ENTRIES).map(entry).collect(), runs: runs.into() }]))
}

pub fn role(link: &mut Link) -> Result<()> {
    let arena = Arc::new(HostArena::prefaulted(POOL as usize)?);
    let Some(hello) = link.next()? else { return Ok(()) };
    let page = number(&hello, "page")?;
    let over_tcp = hello["tcp"] == true;
    let (same_host, kind) =
        if over_tcp { (SameHost::Off, PathKind::Tcp) } else { (SameHost::Auto, PathKind::SameHost) };
    let mut bare = Bare::new(TcpConfig { same_host, ..TcpConfig::loopback() }, arena.clone())?;
    let mut plans = Vec::new();
    for target in hello["targets"].as_array().ok_or("no targets")? {
        let peer = bare.connect(target, kind)?;
        let base = number(target, "base")?;
        plans.push((peer, (0..OPS).map(|op| plan(&bare, base, page, op)).collect::<Result<Vec<_>>>()?));
    }
    // For raw sockets, which want addresses.
    let source: Vec<Vec<u64>> =
        (0..OPS).map(|op| offsets(page, op).0.into_iter().map(|o| arena.base() + o).collect()).collect();
    link.say(&json!({ "base": arena.base() }))?;
    while let Some(request) = link.next()? {
        let op = number(&request, "op")? as usize % OPS;
        let cpu = process_cpu_ns();
        let ns = match request["target"].as_u64() {
            Some(n) => {
                let (peer, plans) = plans.get(n as usize).ok_or("no such target")?;
                bare.run(*peer, plans[op].clone())?
            }
            None => tcp::raw_send(&request, &source[op], page)?,
        };
        link.say(&json!({ "ns": ns, "cpu": process_cpu_ns() - cpu }))?;
    }
    Ok(())
}
