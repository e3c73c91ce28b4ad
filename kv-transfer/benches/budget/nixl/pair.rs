//! Prefill and decode over NIXL, each in a process of its own, with the library driven bare beside them.
//!
//! Decode is a process too, not the measuring one: the library reads the environment (`UCX_TLS`) when it is opened.

use std::sync::Arc;
use std::time::Duration;

use kv_transfer::memory::MemoryOwner;
use kv_transfer::nixl::{NixlConfig, NixlTransport, prepare_environment};
use kv_transfer::transport::Transport;
use serde_json::{Value, json};

use super::bare::{Agent, Lists};
use crate::bulk::{drive, same_plan};
use crate::child::{Link, Peer, number, text};
use crate::own_lane::OurLane;
use crate::pair::{Decode, Geometry, Prefill, ROW, ROWS, check_sent, row};
use crate::stats::shuffled_pages;
use crate::sys::{now_ns, process_cpu_ns};
use crate::{Result, target};

pub const DECODE: &str = "nixl_decode";
pub const PREFILL: &str = "nixl_prefill";
/// Rooms until the pools come round again.
pub const POOL: u64 = 4;

/// What both processes know of the pools.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Of one side's whole pool.
    pub pool: Geometry,
    pub max_op_bytes: u64,
}

impl Shape {
    /// Pools for rooms of this shape.
    pub fn new(layers: u64, room_pages: u64, page: u64, max_op_bytes: u64) -> Self {
        Self { pool: Geometry { layers, pages: POOL * room_pages, page }, max_op_bytes }
    }

    pub fn to_json(self) -> Value {
        let g = self.pool;
        json!({ "layers": g.layers, "pages": g.pages, "page": g.page, "max_op_bytes": self.max_op_bytes })
    }

    fn from_json(v: &Value) -> Result<Self> {
        let pool = Geometry { layers: number(v, "layers")?, pages: number(v, "pages")?, page: number(v, "page")? };
        Ok(Self { pool, max_op_bytes: number(v, "max_op_bytes")? })
    }

    fn config(self) -> NixlConfig {
        NixlConfig { max_op_bytes: self.max_op_bytes, ..NixlConfig::default() }
    }

    /// Bytes of a room, without its metadata row.
    pub fn room_bytes(self) -> u64 {
        self.pool.layers * self.pool.pages / POOL * self.pool.page
    }

    /// Source and destination pages of the room of this number: slices of two shuffles.
    fn pages(self, number: u64) -> [Vec<i32>; 2] {
        let n = (self.pool.pages / POOL) as usize;
        let at = (number % POOL) as usize * n;
        [21, 22].map(|seed| shuffled_pages(self.pool.pages as usize, seed)[at..at + n].to_vec())
    }

    /// Every descriptor of a pool at this address: pages layer by layer, then metadata rows.
    fn descriptors(self, base: u64) -> impl Iterator<Item = (u64, u64)> {
        let g = self.pool;
        let pages = (0..g.layers * g.pages).map(move |i| (base + i * g.page, g.page));
        pages.chain((0..ROWS).map(move |i| (base + g.rows_offset() + i * ROW, ROW)))
    }

    /// The descriptors that a room is, on both sides.
    fn indices(self, number: u64) -> [Vec<i32>; 2] {
        let g = self.pool;
        self.pages(number).map(|pages| {
            let layer = |l: u64| pages.iter().map(move |p| (l * g.pages) as i32 + *p).collect::<Vec<_>>();
            let mut all: Vec<i32> = (0..g.layers).flat_map(layer).collect();
            all.push((g.layers * g.pages) as i32 + row(number) as i32);
            all
        })
    }
}

/// The decode process: has the prefill process, and does rooms when told to.
pub fn decode(link: &mut Link) -> Result<()> {
    let Some(hello) = link.next()? else { return Ok(()) };
    let shape = Shape::from_json(&hello)?;
    let arena = shape.pool.arena()?;
    let transport = Arc::new(NixlTransport::new(shape.config())?);
    let region = transport.register(arena.clone())?;
    let mut peer = Peer::start(PREFILL)?;
    let mut start = shape.to_json();
    start["target"] = target::describe(&*transport, arena.base(), 1);
    let hello = peer.ask(&start)?;
    let decode = Decode::start(transport, shape.pool.layout(region)?, text(&hello, "bootstrap")?)?;
    let fd = decode.manager.subscribe()?;
    link.say(&Value::Null)?;

    let mut first = 1;
    while let Some(request) = link.next()? {
        let mut theirs = number(&peer.ask(&json!({ "do": "cpu" }))?, "cpu")?;
        let mut cpu = process_cpu_ns();
        let mut start = now_ns();
        let ns = match text(&request, "do")? {
            "idle" => {
                std::thread::sleep(Duration::from_secs(number(&request, "secs")?));
                now_ns() - start
            }
            "rooms" => {
                let count = number(&request, "count")?;
                peer.ask(&json!({ "do": "prepare", "first": first, "count": count }))?;
                let receivers = decode.ready(first..first + count)?;
                decode.manager.drain_events(&mut Vec::new());
                let dst: Vec<Vec<i32>> = (first..first + count).map(|n| shape.pages(n)[1].clone()).collect();
                // Preparing does not count.
                theirs = number(&peer.ask(&json!({ "do": "cpu" }))?, "cpu")?;
                (cpu, start) = (process_cpu_ns(), now_ns());
                drive(&decode, fd, &receivers, &dst, number(&request, "in_flight")? as usize)?;
                let ns = now_ns() - start;
                first += count;
                peer.ask(&json!({ "do": "finish" }))?;
                ns
            }
            _ => {
                let reply = peer.ask(&request)?;
                // Making the lists does not count.
                theirs += number(&reply, "unmeasured")?;
                number(&reply, "ns")?
            }
        };
        let cpu = process_cpu_ns() - cpu;
        let theirs = number(&peer.ask(&json!({ "do": "cpu" }))?, "cpu")? - theirs;
        link.say(&json!({ "ns": ns, "cpu": cpu + theirs }))?;
    }
    Ok(())
}

/// The prefill process: ours, its lane alone, and the library bare, all on the same arenas.
pub fn prefill(link: &mut Link) -> Result<()> {
    let Some(hello) = link.next()? else { return Ok(()) };
    prepare_environment();
    let shape = Shape::from_json(&hello)?;
    let arena = shape.pool.arena()?;
    let transport = Arc::new(NixlTransport::new(shape.config())?);
    let region = transport.register(arena.clone())?;
    let prefill = Prefill::start(transport, shape.pool.layout(region)?)?;
    let to = &hello["target"];
    let base = number(to, "base")?;
    link.say(&json!({ "bootstrap": prefill.bootstrap }))?;

    let (mut senders, mut bare, mut lane) = (Vec::new(), None::<(Agent, Lists)>, None);
    while let Some(request) = link.next()? {
        let mut reply = Value::Null;
        let cpu = process_cpu_ns();
        match text(&request, "do")? {
            "prepare" => {
                let (first, count) = (number(&request, "first")?, number(&request, "count")?);
                let send = |n| prefill.send(n, &shape.pages(n)[0]);
                senders = (first..first + count).map(send).collect::<Result<Vec<_>>>()?;
            }
            "finish" => {
                check_sent(&senders)?;
                senders.clear();
            }
            "bare" => {
                if bare.is_none() {
                    let agent = Agent::new("bare", "peer")?;
                    agent.register(arena.base(), arena.len())?;
                    let peer = agent.connect(&target::metadata(to)?)?;
                    let lists = agent.prepare(&peer, shape.descriptors(arena.base()), shape.descriptors(base))?;
                    bare = Some((agent, lists));
                }
                let (agent, lists) = bare.as_ref().ok_or("no agent")?;
                let most = match number(&request, "cut")? {
                    0 => usize::MAX,
                    bytes => (bytes / shape.pool.page) as usize,
                };
                let mut parts: Vec<[Vec<i32>; 2]> = Vec::new();
                for [from, to] in (1..=number(&request, "count")?).map(|n| shape.indices(n)) {
                    parts.extend(from.chunks(most).zip(to.chunks(most)).map(|(f, t)| [f.to_vec(), t.to_vec()]));
                }
                let pause = Duration::from_micros(number(&request, "pause_us")?);
                let unmeasured = process_cpu_ns() - cpu;
                let ns = agent.rooms(lists, &parts, number(&request, "in_flight")? as usize, pause)?;
                reply = json!({ "ns": ns, "unmeasured": unmeasured });
            }
            "lane" => {
                if lane.is_none() {
                    let ours = OurLane::new(NixlTransport::new(shape.config())?, arena.clone())?;
                    let peer = ours.connect(to)?;
                    lane = Some((ours, peer));
                }
                let (ours, peer) = lane.as_mut().ok_or("no lane")?;
                let plan = |n| {
                    let [src, dst] = shape.pages(n);
                    same_plan(ours.region.id(), (&shape.pool, &shape.pool), base, (&src, &dst), n)
                };
                let plans = (1..=number(&request, "count")?).map(plan).collect::<Result<Vec<_>>>()?;
                let unmeasured = process_cpu_ns() - cpu;
                reply = json!({ "ns": ours.run(*peer, plans)?, "unmeasured": unmeasured });
            }
            _ => reply = json!({ "cpu": process_cpu_ns() }),
        }
        link.say(&reply)?;
    }
    Ok(())
}
