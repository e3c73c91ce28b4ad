//! Prefill and decode over Mooncake, each in a process of its own, with the library driven bare and its Python module beside
//! them: all write to the same decode process.

use std::sync::Arc;
use std::time::Duration;

use kv_transfer::memory::MemoryOwner;
use kv_transfer::mooncake::{MooncakeConfig, MooncakeTransport, prepare_environment};
use kv_transfer::transport::Transport;
use kv_transfer::{PeerId, RegionId};
use mooncake_sys::Segment;
use serde_json::{Value, json};

use super::bare::{Bare, Way};
use super::python::Python;
use super::work::{Piece, Shape, pieces};
use crate::bulk::drive;
use crate::child::{Link, Peer, number, text};
use crate::own_lane::OurLane;
use crate::pair::{Decode, HOST, Prefill, check_sent};
use crate::sys::{now_ns, process_cpu_ns};
use crate::{Result, target};

pub const DECODE: &str = "mooncake_decode";
pub const PREFILL: &str = "mooncake_prefill";

fn transport() -> Result<MooncakeTransport> {
    Ok(MooncakeTransport::new(MooncakeConfig { host: Some(HOST.into()), ..MooncakeConfig::default() })?)
}

/// The decode process: has the prefill process, and does rooms when told to.
pub fn decode(link: &mut Link) -> Result<()> {
    let Some(hello) = link.next()? else { return Ok(()) };
    let shape = Shape::from_json(&hello)?;
    let arena = shape.pool.arena()?;
    let transport = Arc::new(transport()?);
    let region = transport.register(arena.clone())?;
    let mut peer = Peer::start(PREFILL)?;
    let mut start = shape.to_json();
    start["target"] = target::describe(&*transport, arena.base(), 1);
    let hello = peer.ask(&start)?;
    let decode = Decode::start(transport, shape.pool.layout(region)?, text(&hello, "bootstrap")?)?;
    let fd = decode.manager.subscribe()?;
    link.say(&json!({ "python": hello["python"] }))?;

    let mut first = 1;
    while let Some(request) = link.next()? {
        let (mut cpu, reply);
        if text(&request, "do")? == "rooms" {
            let count = number(&request, "count")?;
            peer.ask(&json!({ "do": "prepare", "first": first, "count": count }))?;
            let receivers = decode.ready(first..first + count)?;
            decode.manager.drain_events(&mut Vec::new());
            let dst: Vec<Vec<i32>> = (first..first + count).map(|n| shape.pages(n)[1].clone()).collect();
            // Preparing does not count.
            let theirs = number(&peer.ask(&json!({ "do": "cpu" }))?, "cpu")?;
            cpu = process_cpu_ns();
            let start = now_ns();
            drive(&decode, fd, &receivers, &dst, number(&request, "in_flight")? as usize)?;
            let ns = now_ns() - start;
            first += count;
            let after = number(&peer.ask(&json!({ "do": "finish" }))?, "cpu")?;
            reply = json!({ "ns": ns, "cpu": after - theirs });
        } else {
            cpu = process_cpu_ns();
            reply = peer.ask(&request)?;
        }
        cpu = process_cpu_ns() - cpu;
        link.say(&json!({ "ns": reply["ns"], "cpu": cpu + number(&reply, "cpu")? }))?;
    }
    Ok(())
}

/// Those who write to decode beside the managers; made when first asked for.
struct Others {
    shape: Shape,
    arena: Arc<kv_transfer::tcp::HostArena>,
    to: Value,
    bare: Option<(Bare, Segment)>,
    lane: Option<(OurLane<MooncakeTransport>, PeerId)>,
    python: Option<Python>,
}

impl Others {
    fn lists(&self, request: &Value) -> Result<Vec<Vec<Piece>>> {
        let plans = self.shape.plans(request, RegionId(0), number(&self.to, "base")?)?;
        Ok(plans.iter().map(|p| pieces(p, self.arena.base())).collect())
    }

    fn bare(&mut self, request: &Value) -> Result<(u64, u64)> {
        let mut lists = self.lists(request)?;
        let (bare, segment) = match &mut self.bare {
            Some(made) => made,
            none => {
                let bare = Bare::new()?;
                bare.register(self.arena.base(), self.arena.len())?;
                let segment = bare.open(text(&self.to, "name")?)?;
                none.insert((bare, segment))
            }
        };
        let way = Way {
            batch: number(request, "batch")? as usize,
            window: number(request, "window")? as usize,
            pause: Duration::from_micros(number(request, "pause_us")?),
        };
        if request.get("pieces").is_none() {
            // Rooms go in one stream.
            lists = vec![lists.concat()];
        }
        let cpu = process_cpu_ns();
        let ns = lists.iter().map(|l| bare.write(*segment, l, way)).sum::<Result<u64>>()?;
        Ok((ns, process_cpu_ns() - cpu))
    }

    fn lane(&mut self, request: &Value) -> Result<(u64, u64)> {
        let (lane, peer) = match &mut self.lane {
            Some(made) => made,
            none => {
                let lane = OurLane::new(transport()?, self.arena.clone())?;
                let peer = lane.connect(&self.to)?;
                none.insert((lane, peer))
            }
        };
        let plans = self.shape.plans(request, lane.region.id(), number(&self.to, "base")?)?;
        let cpu = process_cpu_ns();
        let ns = match request.get("pieces") {
            None => lane.run(*peer, plans)?,
            Some(_) => plans.into_iter().map(|p| lane.run(*peer, vec![p])).sum::<Result<u64>>()?,
        };
        Ok((ns, process_cpu_ns() - cpu))
    }

    fn python(&mut self, request: &Value) -> Result<(u64, u64)> {
        let (lists, base) = (self.lists(request)?, self.arena.base());
        let python = self.python.as_mut().ok_or("no Python with mooncake.engine")?;
        python.write(&lists, base, number(request, "cut")?, number(request, "threads")?)
    }
}

/// The prefill process.
pub fn prefill(link: &mut Link) -> Result<()> {
    let Some(hello) = link.next()? else { return Ok(()) };
    prepare_environment();
    let shape = Shape::from_json(&hello)?;
    let arena = shape.pool.arena()?;
    let transport = Arc::new(transport()?);
    let region = transport.register(arena.clone())?;
    let prefill = Prefill::start(transport, shape.pool.layout(region)?)?;
    let to = hello["target"].clone();
    let python = Python::start(text(&to, "name")?, arena.len())?;
    let version = python.as_ref().map(|p| p.version.clone());
    link.say(&json!({ "bootstrap": prefill.bootstrap, "python": version }))?;

    let mut others = Others { shape, arena, to, bare: None, lane: None, python };
    let mut senders = Vec::new();
    while let Some(request) = link.next()? {
        let (ns, cpu) = match text(&request, "do")? {
            "prepare" => {
                let (first, count) = (number(&request, "first")?, number(&request, "count")?);
                let send = |n| prefill.send(n, &shape.pages(n)[0]);
                senders = (first..first + count).map(send).collect::<Result<Vec<_>>>()?;
                (0, 0)
            }
            "finish" => {
                check_sent(&senders)?;
                let cpu = process_cpu_ns();
                senders.clear();
                (0, cpu)
            }
            "bare" => others.bare(&request)?,
            "lane" => others.lane(&request)?,
            "python" => others.python(&request)?,
            _ => (0, process_cpu_ns()),
        };
        link.say(&json!({ "ns": ns, "cpu": cpu }))?;
    }
    Ok(())
}
