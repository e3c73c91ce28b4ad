//! Rooms of many layers: prefill's process, and decode's driver.

use std::collections::HashMap;
use std::sync::Arc;

use kv_transfer::manager::KvReceiver;
use kv_transfer::memory::MemoryOwner;
use kv_transfer::plan::{EntryPair, PlanGroup, Run, WritePlan, find_runs};
use kv_transfer::tcp::{HostArena, PathKind, TcpConfig, TcpTransport};
use kv_transfer::transport::Transport;
use kv_transfer::{KvPoll, RegionId};
use serde_json::{Value, json};

use crate::child::{Link, Peer, number, pages, text};
use crate::lane::{self, Bare};
use crate::pair::{Decode, Geometry, PATIENCE, Prefill, ROW, check_sent, publish, row, why};
use crate::sys::{now_ns, process_cpu_ns, readable};
use crate::vm::Copy;
use crate::{Options, Result};

pub const ROLE: &str = "bulk";
pub const LAYERS: u64 = 32;
pub const PAGE: u64 = 16 << 10;

/// Pages of a room, all of them but in quick runs.
pub fn room_pages(options: &Options) -> usize {
    if options.quick { 64 } else { 256 }
}

/// Decode's end, with prefill in another process.
pub struct Bulk {
    pub peer: Peer,
    pub arena: Arc<HostArena>,
    /// First byte of prefill's pool.
    pub source: u64,
    pub theirs: Geometry,
    pub ours: Geometry,
    decode: Decode,
    fd: i32,
    room: u64,
}

/// What a batch of rooms took.
pub struct Batch {
    pub ns: u64,
    pub cpu: u64,
    /// From `send_metadata` to the news of Success, ms.
    pub took: Vec<f64>,
}

impl Bulk {
    pub fn start(source_pages: u64, destination_pages: u64) -> Result<Self> {
        let mut peer = Peer::start(ROLE)?;
        let theirs = Geometry { layers: LAYERS, pages: source_pages, page: PAGE };
        let ours = Geometry { layers: LAYERS, pages: destination_pages, page: PAGE };
        let arena = ours.arena()?;
        let transport = Arc::new(TcpTransport::new(TcpConfig::loopback())?);
        let region = transport.register(arena.clone())?;
        let target = lane::describe(&transport, arena.base());
        let hello = peer.ask(&json!({
            "source_pages": source_pages, "destination_pages": destination_pages, "target": target
        }))?;
        let decode = Decode::start(transport, ours.layout(region)?, text(&hello, "bootstrap")?)?;
        let fd = decode.manager.subscribe()?;
        Ok(Self { peer, arena, source: number(&hello, "base")?, theirs, ours, decode, fd, room: 1 })
    }

    /// Send `src` once to each of `dst`, at most `in_flight` at a time.
    pub fn rooms(&mut self, src: &[i32], dst: &[Vec<i32>], in_flight: usize) -> Result<Batch> {
        let first = self.room;
        self.room += dst.len() as u64;
        self.peer.ask(&json!({ "do": "prepare", "first": first, "count": dst.len(), "pages": src }))?;
        let receivers = self.decode.ready(first..self.room)?;
        self.decode.manager.drain_events(&mut Vec::new());
        let theirs = number(&self.peer.ask(&json!({ "do": "cpu" }))?, "cpu")?;
        let (cpu, start) = (process_cpu_ns(), now_ns());
        let took = drive(&self.decode, self.fd, &receivers, dst, in_flight)?;
        let (ns, cpu) = (now_ns() - start, process_cpu_ns() - cpu);
        let theirs = number(&self.peer.ask(&json!({ "do": "finish" }))?, "cpu")? - theirs;
        Ok(Batch { ns, cpu: cpu + theirs, took })
    }

    /// The copies that a room of these pages is.
    pub fn copies(&self, src: &[i32], dst: &[i32]) -> Result<Vec<Copy>> {
        let mut runs = Vec::new();
        find_runs(src, dst, &mut runs)?;
        let layers = (0..LAYERS).map(|l| (self.theirs.layer_offset(l), self.ours.layer_offset(l)));
        let copy = |(from, to): (u64, u64), r: &Run| {
            (from + u64::from(r.src) * PAGE, to + u64::from(r.dst) * PAGE, u64::from(r.count) * PAGE)
        };
        Ok(layers.flat_map(|base| runs.iter().map(move |r| copy(base, r))).collect())
    }
}

/// Publish `dst`, one list a receiver, at most `in_flight` at a time, until all succeeded; ms each.
pub fn drive(
    decode: &Decode,
    fd: i32,
    receivers: &[KvReceiver],
    dst: &[Vec<i32>],
    in_flight: usize,
) -> Result<Vec<f64>> {
    let mut started: HashMap<u64, u64> = HashMap::new();
    let mut waiting = receivers.iter().zip(dst);
    let (mut took, mut events) = (Vec::with_capacity(dst.len()), Vec::new());
    while took.len() < dst.len() {
        while started.len() < in_flight {
            let Some((receiver, pages)) = waiting.next() else { break };
            started.insert(receiver.room().get(), now_ns());
            publish(receiver, pages)?;
        }
        if !readable(fd, PATIENCE) {
            return Err("rooms are in flight, and nothing happens".into());
        }
        decode.manager.drain_events(&mut events);
        let now = now_ns();
        for event in events.drain(..) {
            let room = event.room;
            match event.poll {
                KvPoll::Success => {
                    let start = started.remove(&room.get()).unwrap_or(now);
                    took.push((now - start) as f64 / 1e6);
                }
                KvPoll::Failed => {
                    let failed = receivers.iter().find(|r| r.room() == room);
                    return Err(failed.map_or_else(|| "a room failed".into(), why));
                }
                _ => {}
            }
        }
    }
    Ok(took)
}

pub fn role(link: &mut Link) -> Result<()> {
    let Some(hello) = link.next()? else { return Ok(()) };
    let geometry = Geometry { layers: LAYERS, pages: number(&hello, "source_pages")?, page: PAGE };
    let theirs = Geometry { pages: number(&hello, "destination_pages")?, ..geometry };
    let arena = geometry.arena()?;
    let transport = Arc::new(TcpTransport::new(TcpConfig::loopback())?);
    let region = transport.register(arena.clone())?;
    let prefill = Prefill::start(transport, geometry.layout(region)?)?;
    let target = &hello["target"];
    let mut bare = Bare::new(TcpConfig::loopback(), arena.clone())?;
    let peer = bare.connect(target, PathKind::SameHost)?;
    let base = number(target, "base")?;
    link.say(&json!({ "bootstrap": prefill.bootstrap, "base": arena.base() }))?;

    let mut senders = Vec::new();
    while let Some(request) = link.next()? {
        let mut reply = Value::Null;
        match text(&request, "do")? {
            "prepare" => {
                let (first, count) = (number(&request, "first")?, number(&request, "count")?);
                let pages = pages(&request, "pages")?;
                senders = (first..first + count).map(|n| prefill.send(n, &pages)).collect::<Result<Vec<_>>>()?;
            }
            "finish" => {
                check_sent(&senders)?;
                reply = json!({ "cpu": process_cpu_ns() });
                senders.clear();
            }
            "bare" => {
                let (src, dst) = (pages(&request, "src")?, pages(&request, "dst")?);
                let plan = same_plan(bare.region.id(), (&geometry, &theirs), base, (&src, &dst), 1)?;
                let cpu = process_cpu_ns();
                let ns = bare.run(peer, plan)?;
                reply = json!({ "ns": ns, "cpu": process_cpu_ns() - cpu });
            }
            _ => reply = json!({ "cpu": process_cpu_ns() }),
        }
        link.say(&reply)?;
    }
    Ok(())
}

/// What the managers plan for a room of these pages and this number, its metadata row included.
pub fn same_plan(
    region: RegionId,
    (ours, theirs): (&Geometry, &Geometry),
    base: u64,
    (src, dst): (&[i32], &[i32]),
    room: u64,
) -> Result<WritePlan> {
    let entry = |i: u32, from: u64, to: u64, len: u64| EntryPair {
        src_entry: i,
        dst_entry: i,
        src_region: region,
        src_offset: from,
        dst_addr: base + to,
        item_len: len,
        src_stride: len,
        dst_stride: len,
        dst_kind: Default::default(),
    };
    let kv = (0..ours.layers).map(|l| entry(l as u32, ours.layer_offset(l), theirs.layer_offset(l), ours.page));
    let mut runs = Vec::new();
    find_runs(src, dst, &mut runs)?;
    let aux = entry(0, ours.rows_offset(), theirs.rows_offset(), ROW);
    let slot = Run { src: row(room), dst: row(room), count: 1 };
    Ok(WritePlan::new([
        PlanGroup { entries: kv.collect(), runs: runs.into() },
        PlanGroup { entries: [aux].into(), runs: [slot].into() },
    ]))
}
