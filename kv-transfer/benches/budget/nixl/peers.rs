//! Peers that come and go: what they leave behind in a source. Each is a process that is connected to, written to once,
//! and parted from: in turns in order, and killed first. Floor: a source that does the same with the library bare.

use std::sync::Arc;
use std::time::Duration;

use kv_transfer::memory::MemoryOwner;
use kv_transfer::nixl::{NixlConfig, NixlTransport, prepare_environment};
use kv_transfer::plan::{EntryPair, PlanGroup, Run, WritePlan};
use kv_transfer::tcp::HostArena;
use kv_transfer::transport::Transport;
use serde_json::{Value, json};

use super::bare::Agent;
use crate::child::{Link, Peer, number};
use crate::own_lane::OurLane;
use crate::report::{Budget, Report, Row};
use crate::sys::rss_bytes;
use crate::{Options, Result, target};

pub const ROWS: &[&str] = &["nixl_peers_rss", "nixl_peers_fds", "nixl_peers_threads"];
pub const OURS: &str = "nixl_peers_ours";
pub const BARE: &str = "nixl_peers_bare";
pub const TARGET: &str = "nixl_peers_target";
const SIZE: u64 = 1 << 20;
const WRITE: u64 = 16 << 10;
/// Targets that start side by side.
const TOGETHER: usize = 4;

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let (warm, all) = if options.quick { (4, 20) } else { (20, 200) };
    let mut sources = [Peer::start(OURS)?, Peer::start(BARE)?];
    let mut counts = vec![count(&mut sources)?];
    let mut met = 0;
    while met < all {
        let mut targets = (0..TOGETHER.min(all - met)).map(|_| Peer::start(TARGET)).collect::<Result<Vec<_>>>()?;
        for target in &mut targets {
            met += 1;
            let description = target.ask(&json!({ "port": met }))?;
            for source in &mut sources {
                source.ask(&json!({ "do": "meet", "target": description }))?;
            }
        }
        // Half of them are gone before they are parted from.
        let killed = targets.len() / 2;
        drop(targets.drain(..killed));
        for source in &mut sources {
            source.ask(&json!({ "do": "part", "killed": killed }))?;
        }
        if met == warm || met == all {
            counts.push(count(&mut sources)?);
        }
    }
    let grown = (all - warm) as f64;
    for (i, (name, unit, budget)) in
        [("rss", "KiB a peer", 1.0), ("fds", "fds", 0.0), ("threads", "threads", 0.0)].into_iter().enumerate()
    {
        let per = if i == 0 { grown } else { 1.0 };
        let growth = |side: usize| (counts[2][side][i] as f64 - counts[1][side][i] as f64) / per;
        let series = |side: usize| counts.iter().map(|c| c[side][i].to_string()).collect::<Vec<_>>().join(" -> ");
        report.add(Row {
            row: format!("nixl_peers_{name}"),
            ours: growth(0),
            peer: growth(1),
            unit,
            budget: Budget::AtMost(budget),
            cpu: String::new(),
            note: format!(
                "growth from peer {warm} to peer {all}, half of them killed; before, after {warm}, after {all}: ours {}, bare {}",
                series(0),
                series(1)
            ),
        });
    }
    Ok(())
}

/// Resident KiB, descriptors and threads of each source.
fn count(sources: &mut [Peer; 2]) -> Result<Vec<[u64; 3]>> {
    std::thread::sleep(Duration::from_millis(500));
    let one = |source: &mut Peer| {
        let reply = source.ask(&json!({ "do": "count" }))?;
        Ok([number(&reply, "kib")?, number(&reply, "fds")?, number(&reply, "threads")?])
    };
    sources.iter_mut().map(one).collect()
}

fn entries(directory: &str) -> Result<usize> {
    Ok(std::fs::read_dir(directory)?.count())
}

/// A source: `meet` writes to a target and gives what `part` needs, which hears whether the target was killed.
fn source<T>(
    link: &mut Link,
    mut meet: impl FnMut(&Value) -> Result<T>,
    mut part: impl FnMut(T, bool) -> Result<()>,
) -> Result<()> {
    let mut met = Vec::new();
    while let Some(request) = link.next()? {
        let mut reply = Value::Null;
        match request["do"].as_str() {
            Some("meet") => met.push(meet(&request["target"])?),
            Some("part") => {
                let killed = number(&request, "killed")? as usize;
                for (i, target) in met.drain(..).enumerate() {
                    part(target, i < killed)?;
                }
            }
            _ => {
                let (fds, threads) = (entries("/proc/self/fd")?, entries("/proc/self/task")?);
                reply = json!({ "kib": rss_bytes()? >> 10, "fds": fds, "threads": threads });
            }
        }
        link.say(&reply)?;
    }
    Ok(())
}

pub fn ours(link: &mut Link) -> Result<()> {
    let mut lane =
        OurLane::new(NixlTransport::new(NixlConfig::default())?, Arc::new(HostArena::prefaulted(SIZE as usize)?))?;
    let (region, transport) = (lane.region.id(), lane.transport.clone());
    let lane = std::cell::RefCell::new(&mut lane);
    let meet = |description: &Value| {
        let mut lane = lane.borrow_mut();
        let peer = lane.connect(description)?;
        let entry = EntryPair {
            src_entry: 0,
            dst_entry: 0,
            src_region: region,
            src_offset: 0,
            dst_addr: number(description, "base")?,
            item_len: WRITE,
            src_stride: WRITE,
            dst_stride: WRITE,
            dst_kind: Default::default(),
        };
        let run = Run { src: 0, dst: 1, count: 1 };
        lane.run(peer, vec![WritePlan::new([PlanGroup { entries: [entry].into(), runs: [run].into() }])])?;
        Ok(peer)
    };
    source(link, meet, |peer, killed| {
        if killed {
            lane.borrow_mut().lost(peer)?;
        }
        transport.disconnect(peer);
        Ok(())
    })
}

pub fn bare(link: &mut Link) -> Result<()> {
    prepare_environment();
    let arena = HostArena::prefaulted(SIZE as usize)?;
    let agent = Agent::new("bare", "peer")?;
    agent.register(arena.base(), arena.len())?;
    let meet = |description: &Value| {
        let peer = agent.connect(&target::metadata(description)?)?;
        let to = number(description, "base")? + WRITE;
        let lists = agent.prepare(&peer, [(arena.base(), WRITE)].into_iter(), [(to, WRITE)].into_iter())?;
        agent.rooms(&lists, &[[vec![0], vec![0]]], 1, Duration::ZERO)?;
        agent.unprepare(&lists)?;
        Ok(peer)
    };
    source(link, meet, |peer, _| agent.disconnect(&peer))
}

pub fn target(link: &mut Link) -> Result<()> {
    let transport = NixlTransport::new(NixlConfig::default())?;
    let arena = Arc::new(HostArena::prefaulted(SIZE as usize)?);
    let _region = transport.register(arena.clone())?;
    while let Some(hello) = link.next()? {
        link.say(&target::describe(&transport, arena.base(), number(&hello, "port")? as u16))?;
    }
    Ok(())
}
