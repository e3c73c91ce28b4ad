//! From the moment the library says SUCCESS to the moment decode's waiter runs again. Floor: as in `completion`.
//!
//! Between processes of one host SUCCESS comes while prefill's shard posts, so that one is awake, where the floor's
//! thread is woken first. Everybody else is asleep.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use kv_transfer::memory::{MemoryOwner, RegisteredRegion};
use kv_transfer::nixl::{NixlConfig, NixlTransport};
use kv_transfer::transport::{
    Capabilities, Lane, LaneEvent, PeerDescriptor, SubmitError, Transport, TransportError, WriteOp,
};
use kv_transfer::{KvPoll, PeerId};
use serde_json::json;

use crate::child::{Link, Peer, number, numbers, text};
use crate::completion::{FloorTeller, FloorWaiter, GAP, GEOMETRY, Samples, show};
use crate::pair::{Decode, PATIENCE, Prefill, check_sent, publish, why};
use crate::report::{Budget, Report};
use crate::sys::{now_ns, process_cpu_ns};
use crate::{Options, Result};

pub const ROWS: &[&str] = &["nixl_done_to_waiter", "nixl_done_to_waiter_p99"];
pub const ROLE: &str = "nixl_completion";

type Stamps = Arc<Mutex<Vec<u64>>>;

/// NIXL, with the time at which each post returned.
struct Stamped {
    inner: NixlTransport,
    stamps: Stamps,
}

impl Transport for Stamped {
    fn capabilities(&self) -> &Capabilities {
        self.inner.capabilities()
    }
    fn local_name(&self) -> &str {
        self.inner.local_name()
    }
    fn local_metadata(&self) -> Bytes {
        self.inner.local_metadata()
    }
    fn register(&self, memory: Arc<dyn MemoryOwner>) -> std::result::Result<Arc<RegisteredRegion>, TransportError> {
        self.inner.register(memory)
    }
    fn connect(&self, peer: &PeerDescriptor) -> std::result::Result<PeerId, TransportError> {
        self.inner.connect(peer)
    }
    fn disconnect(&self, peer: PeerId) {
        self.inner.disconnect(peer);
    }
    fn lane(&self) -> std::result::Result<Box<dyn Lane>, TransportError> {
        Ok(Box::new(StampedLane { inner: self.inner.lane()?, stamps: self.stamps.clone() }))
    }
}

struct StampedLane {
    inner: Box<dyn Lane>,
    stamps: Stamps,
}

impl Lane for StampedLane {
    fn submit(&mut self, op: WriteOp) -> std::result::Result<(), SubmitError> {
        let accepted = self.inner.submit(op);
        self.stamps.lock().unwrap_or_else(PoisonError::into_inner).push(now_ns());
        accepted
    }
    fn flush(&mut self) {
        self.inner.flush();
    }
    fn poll(&mut self, out: &mut Vec<LaneEvent>) {
        self.inner.poll(out);
    }
    fn wake_fd(&self) -> Option<RawFd> {
        self.inner.wake_fd()
    }
}

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let transport = Arc::new(NixlTransport::new(NixlConfig::default())?);
    let region = transport.register(GEOMETRY.arena()?)?;
    let mut peer = Peer::start(ROLE)?;
    let (waiter, port) = FloorWaiter::start()?;
    let hello = peer.ask(&json!({ "port": port }))?;
    let decode = Decode::start(transport, GEOMETRY.layout(region)?, text(&hello, "bootstrap")?)?;
    let (rounds, count) = (options.rounds(12), options.count(120));
    let (mut floor, mut ours, mut room) = (Samples::default(), Samples::default(), 1);
    for round in 0..=rounds {
        let measured = round > 0; // the first one connects
        let (took, cpu) = waiter.turn(&mut peer, count)?;
        if measured {
            floor.add(&took, cpu);
        }
        let rooms = room..room + count as u64;
        room = rooms.end;
        let receivers = decode.ready(rooms.clone())?;
        peer.ask(&json!({ "do": "ours", "first": rooms.start, "count": count }))?;
        let cpu = process_cpu_ns();
        let mut awake = Vec::with_capacity(count);
        for receiver in &receivers {
            std::thread::sleep(GAP);
            publish(receiver, &[1])?;
            if receiver.wait_timeout(PATIENCE) != KvPoll::Success {
                return Err(why(receiver));
            }
            awake.push(now_ns());
        }
        let cpu = process_cpu_ns() - cpu;
        let reply = peer.ask(&json!({ "do": "done" }))?;
        let done = numbers(&reply, "done")?;
        if done.len() != awake.len() {
            return Err(format!("{} writes for {} rooms", done.len(), awake.len()).into());
        }
        let took: Vec<f64> = awake.iter().zip(&done).map(|(a, d)| (a - d) as f64 / 1e3).collect();
        if measured {
            ours.add(&took, cpu + number(&reply, "cpu")?);
        }
    }
    show(report, ROWS, [&ours, &floor], rounds * count, [Budget::RatioAtMost(1.2), Budget::None]);
    Ok(())
}

pub fn role(link: &mut Link) -> Result<()> {
    let stamps = Stamps::default();
    let transport = Arc::new(Stamped { inner: NixlTransport::new(NixlConfig::default())?, stamps: stamps.clone() });
    let region = transport.register(GEOMETRY.arena()?)?;
    let prefill = Prefill::start(transport, GEOMETRY.layout(region)?)?;
    let Some(hello) = link.next()? else { return Ok(()) };
    let teller = FloorTeller::start(number(&hello, "port")?)?;
    link.say(&json!({ "bootstrap": prefill.bootstrap }))?;
    let (mut senders, mut before) = (Vec::new(), 0);
    while let Some(request) = link.next()? {
        let mut reply = json!({});
        match text(&request, "do")? {
            "floor" => reply["cpu"] = json!(teller.turn(number(&request, "count")?)),
            "ours" => {
                let (first, count) = (number(&request, "first")?, number(&request, "count")?);
                senders = (first..first + count).map(|n| prefill.send(n, &[1])).collect::<Result<Vec<_>>>()?;
                before = process_cpu_ns();
            }
            _ => {
                reply["cpu"] = json!(process_cpu_ns() - before);
                check_sent(&senders)?;
                senders.clear();
                let done = std::mem::take(&mut *stamps.lock().unwrap_or_else(PoisonError::into_inner));
                reply["done"] = json!(done);
            }
        }
        link.say(&reply)?;
    }
    Ok(())
}
