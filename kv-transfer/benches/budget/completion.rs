//! From the moment the lane says Done to the moment decode's waiter runs again, both sides asleep before.
//!
//! Floor: a thread woken by an eventfd sends the 5 frames by libzmq, a listener thread receives them and wakes the
//! waiter. Ours crosses the same sleepers: shard, two I/O threads of libzmq, decode's shard, the waiter.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use kv_transfer::KvPoll;
use serde_json::{Value, json};

use crate::child::{Link, Peer, number, numbers, text};
use crate::exchange::{int, pull, push, recv, send};
use crate::pair::{Decode, Geometry, PATIENCE, Prefill, check_sent, publish, why};
use crate::report::{Budget, Report, Row};
use crate::stats::{median, quantile};
use crate::stub::Stub;
use crate::sys::{EventFd, now_ns, process_cpu_ns};
use crate::{Options, Result};

pub const ROWS: &[&str] = &["done_to_waiter", "done_to_waiter_p99"];
pub const ROLE: &str = "completion";
pub const GEOMETRY: Geometry = Geometry { layers: 1, pages: 64, page: 4096 };
/// Everybody is asleep after this long.
pub const GAP: Duration = Duration::from_micros(400);

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let mut peer = Peer::start(ROLE)?;
    let (waiter, port) = FloorWaiter::start()?;
    let hello = peer.ask(&json!({ "port": port }))?;
    let stub = Arc::new(Stub::new("decode")?);
    let region = kv_transfer::transport::Transport::register(&*stub, GEOMETRY.arena()?)?;
    let decode = Decode::start(stub, GEOMETRY.layout(region)?, text(&hello, "bootstrap")?)?;

    let (rounds, count) = (options.rounds(12), options.count(120));
    let mut floor = Samples::default();
    let mut ours = Samples::default();
    let mut room = 1;
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
            publish(receiver, &[1])?;
            if receiver.wait_timeout(PATIENCE) != KvPoll::Success {
                return Err(why(receiver));
            }
            awake.push(now_ns());
        }
        let cpu = process_cpu_ns() - cpu;
        let reply = peer.hear()?;
        let done = numbers(&reply, "done")?;
        let took: Vec<f64> = awake.iter().zip(&done).map(|(a, d)| (a - d) as f64 / 1e3).collect();
        if measured {
            ours.add(&took, cpu + number(&reply, "cpu")?);
        }
    }
    show(report, ROWS, [&ours, &floor], rounds * count, [Budget::RatioAtMost(1.2), Budget::None]);
    Ok(())
}

/// The two rows of these samples.
pub fn show(report: &mut Report, rows: &[&str], [ours, floor]: [&Samples; 2], n: usize, budgets: [Budget; 2]) {
    report.add(Row {
        row: rows[0].into(),
        ours: median(&ours.p50),
        peer: median(&floor.p50),
        unit: "us p50",
        budget: budgets[0],
        cpu: format!("{:.0} | {:.0} us a message", ours.cpu_us(), floor.cpu_us()),
        note: format!("{n} each, {} us apart; ours' CPU has the metadata in it too", GAP.as_micros()),
    });
    report.add(Row {
        row: rows[1].into(),
        ours: quantile(&ours.all, 0.99),
        peer: quantile(&floor.all, 0.99),
        unit: "us p99",
        budget: budgets[1],
        cpu: String::new(),
        note: String::new(),
    });
}

/// The floor's waiter and its listener. The thread that starts it is the one that waits.
pub struct FloorWaiter {
    /// Messages so far, and when the last one was sent.
    inbox: Arc<(AtomicU64, AtomicU64)>,
    seen: AtomicU64,
}

impl FloorWaiter {
    /// With the port to send to.
    pub fn start() -> Result<(Self, u64)> {
        let (listener, port) = pull(&zmq::Context::new())?;
        let waiter = std::thread::current();
        let inbox = Arc::new((AtomicU64::new(0), AtomicU64::new(0)));
        let tell = inbox.clone();
        std::thread::spawn(move || {
            let mut frames = Vec::new();
            while recv(&listener, &mut frames).is_ok_and(|n| n == 5) {
                tell.1.store(int(&frames[4]), Ordering::Relaxed);
                tell.0.fetch_add(1, Ordering::Release);
                waiter.unpark();
            }
        });
        Ok((Self { inbox, seen: AtomicU64::new(0) }, port))
    }

    /// us from each message to the waiter, and the CPU of both processes, ns.
    pub fn turn(&self, peer: &mut Peer, count: usize) -> Result<(Vec<f64>, u64)> {
        let cpu = process_cpu_ns();
        peer.tell(&json!({ "do": "floor", "count": count }))?;
        let mut took = Vec::with_capacity(count);
        for _ in 0..count {
            let seen = self.seen.fetch_add(1, Ordering::Relaxed) + 1;
            let end = Instant::now() + PATIENCE;
            while self.inbox.0.load(Ordering::Acquire) < seen {
                if Instant::now() > end {
                    return Err("a message of the floor is lost".into());
                }
                std::thread::park_timeout(PATIENCE);
            }
            took.push((now_ns() - self.inbox.1.load(Ordering::Relaxed)) as f64 / 1e3);
        }
        let reply = peer.hear()?;
        Ok((took, process_cpu_ns() - cpu + number(&reply, "cpu")?))
    }
}

/// The floor's other side: a sleeping thread that sends when its eventfd is signalled.
pub struct FloorTeller(Arc<EventFd>);

impl FloorTeller {
    pub fn start(port: u64) -> Result<Self> {
        let socket = push(&zmq::Context::new(), port)?;
        let door = Arc::new(EventFd::new(true)?);
        let opened = door.clone();
        std::thread::spawn(move || -> Option<()> {
            loop {
                opened.take();
                let stamp = now_ns().to_string();
                send(&socket, &[b"KV_STATUS", b"1234567890123", b"4", b"0", stamp.as_bytes()]).ok()?;
            }
        });
        Ok(Self(door))
    }

    /// Send so many, far apart; CPU, ns.
    pub fn turn(&self, count: u64) -> u64 {
        let cpu = process_cpu_ns();
        for _ in 0..count {
            std::thread::sleep(GAP);
            self.0.signal();
        }
        std::thread::sleep(GAP);
        process_cpu_ns() - cpu
    }
}

/// Times of all turns, and their CPU.
#[derive(Default)]
pub struct Samples {
    p50: Vec<f64>,
    all: Vec<f64>,
    cpu: u64,
}

impl Samples {
    pub fn add(&mut self, took: &[f64], cpu: u64) {
        self.p50.push(median(took));
        self.all.extend(took);
        self.cpu += cpu;
    }

    fn cpu_us(&self) -> f64 {
        self.cpu as f64 / 1e3 / self.all.len() as f64
    }
}

pub fn role(link: &mut Link) -> Result<()> {
    let stub = Arc::new(Stub::new("prefill")?);
    let strings = stub.strings();
    let region = kv_transfer::transport::Transport::register(&*stub, GEOMETRY.arena()?)?;
    let prefill = Prefill::start(stub, GEOMETRY.layout(region)?)?;

    let Some(hello) = link.next()? else { return Ok(()) };
    let teller = FloorTeller::start(number(&hello, "port")?)?;
    link.say(&json!({ "bootstrap": prefill.bootstrap }))?;

    while let Some(request) = link.next()? {
        let count = number(&request, "count")?;
        let mut reply = json!({});
        if text(&request, "do")? == "floor" {
            reply["cpu"] = json!(teller.turn(count));
        } else {
            let first = number(&request, "first")?;
            let senders = (first..first + count).map(|n| prefill.send(n, &[1])).collect::<Result<Vec<_>>>()?;
            link.say(&Value::Null)?;
            let cpu = process_cpu_ns();
            for _ in 0..count {
                let op = strings.submitted()?;
                std::thread::sleep(GAP);
                strings.complete(op);
            }
            check_sent(&senders)?;
            reply["cpu"] = json!(process_cpu_ns() - cpu);
            reply["done"] = json!(strings.done_at());
        }
        link.say(&reply)?;
    }
    Ok(())
}
