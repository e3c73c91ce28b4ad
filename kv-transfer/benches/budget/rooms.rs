//! Fixed cost of a room of one 4 KiB page and one 64 B row: idle, back to back, and 64 at a time.
//!
//! Floor: the bare exchange (`exchange`). Ours: two managers over kv-tcp, prefill's `send()` queued ahead, so that the
//! metadata sets off the write. Latency is from `send_metadata` to the return of `wait_timeout`; rooms a second
//! include making and clearing senders and receivers.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use kv_transfer::KvPoll;
use kv_transfer::manager::KvReceiver;
use kv_transfer::memory::MemoryOwner;
use kv_transfer::tcp::{HostArena, TcpConfig, TcpTransport};
use kv_transfer::transport::Transport;
use serde_json::{Value, json};

use crate::child::{Link, Peer, number, text};
use crate::exchange::{self, Asker, Target, pull, push};
use crate::pair::{self, Decode, Geometry, PATIENCE, Prefill, check_sent, publish, why};
use crate::report::{Budget, Report, Row};
use crate::stats::{median, quantile};
use crate::sys::{now_ns, process_cpu_ns, readable};
use crate::{Options, Result};

pub const ROWS: &[&str] = &["room_idle", "room_back_to_back", "rooms_per_s"];
pub const ROLE: &str = "rooms";
pub const GEOMETRY: Geometry = Geometry { layers: 1, pages: 4096, page: 4096 };
const IN_FLIGHT: usize = 64;
/// Receivers made before their turn, and senders.
const AHEAD: usize = 256;

/// Both sides' CPU and the times of one turn.
struct Turn {
    /// us each.
    took: Vec<f64>,
    secs: f64,
    cpu: [u64; 2],
}

/// Decode's end, with prefill in another process, which has this role.
pub struct Bench {
    peer: Peer,
    asker: Asker,
    decode: Decode,
    fd: i32,
    room: u64,
}

fn page(room: u64) -> i32 {
    (room * 7 % GEOMETRY.pages) as i32
}

impl Bench {
    /// `hello` says what the role wants to know about decode's transport and its arena.
    pub fn start(
        role: &'static str,
        transport: Arc<dyn Transport>,
        hello: impl FnOnce(&dyn Transport, u64) -> Value,
    ) -> Result<Self> {
        let mut peer = Peer::start(role)?;
        let arena = GEOMETRY.arena()?;
        let region = transport.register(arena.clone())?;
        let context = zmq::Context::new();
        let (listener, port) = pull(&context)?;
        let mut hello = hello(&*transport, arena.base());
        hello["port"] = json!(port);
        let hello = peer.ask(&hello)?;
        let decode = Decode::start(transport, GEOMETRY.layout(region)?, text(&hello, "bootstrap")?)?;
        let asker = Asker::start(listener, push(&context, number(&hello, "port")?)?);
        let fd = decode.manager.subscribe()?;
        Ok(Self { peer, asker, decode, fd, room: 1 })
    }

    fn rooms(&mut self, count: usize) -> std::ops::Range<u64> {
        let rooms = self.room..self.room + count as u64;
        self.room = rooms.end;
        rooms
    }

    fn peer_cpu(&mut self) -> Result<u64> {
        let reply = self.peer.ask(&json!({ "do": "cpu" }))?;
        number(&reply, "cpu")
    }

    /// Run `work`, and count both processes' CPU.
    fn turn(&mut self, work: impl FnOnce(&mut Self) -> Result<Vec<f64>>) -> Result<Turn> {
        let theirs = self.peer_cpu()?;
        let (cpu, start) = (process_cpu_ns(), now_ns());
        let took = work(self)?;
        let (cpu, secs) = (process_cpu_ns() - cpu, (now_ns() - start) as f64 / 1e9);
        let theirs = self.peer_cpu()? - theirs;
        Ok(Turn { took, secs, cpu: [cpu, theirs] })
    }

    fn floor_one_by_one(&mut self, count: usize, pause: Duration) -> Result<Turn> {
        let rooms = self.rooms(count);
        self.turn(|b| {
            let one = |room| {
                pause_for(pause);
                let start = now_ns();
                b.asker.ask(room, page(room), u64::from(pair::row(room)))?;
                b.asker.wait()?;
                Ok((now_ns() - start) as f64 / 1e3)
            };
            rooms.map(one).collect()
        })
    }

    fn ours_one_by_one(&mut self, count: usize, pause: Duration) -> Result<Turn> {
        let rooms = self.rooms(count);
        self.peer.ask(&json!({ "do": "prepare", "first": rooms.start, "count": count }))?;
        let receivers = self.decode.ready(rooms)?;
        let turn = self.turn(|_| {
            let one = |receiver: &KvReceiver| {
                pause_for(pause);
                let start = now_ns();
                publish(receiver, &[page(receiver.room().get())])?;
                if receiver.wait_timeout(PATIENCE) != KvPoll::Success {
                    return Err(why(receiver));
                }
                Ok((now_ns() - start) as f64 / 1e3)
            };
            receivers.iter().map(one).collect()
        })?;
        drop(receivers);
        self.peer.ask(&json!({ "do": "finish" }))?;
        self.forget_events();
        Ok(turn)
    }

    fn forget_events(&mut self) {
        self.decode.manager.drain_events(&mut Vec::new());
    }

    fn floor_together(&mut self, count: usize) -> Result<Turn> {
        let mut rooms = self.rooms(count);
        self.turn(|b| {
            let mut flying = 0;
            loop {
                while flying < IN_FLIGHT {
                    let Some(room) = rooms.next() else { break };
                    b.asker.ask(room, page(room), u64::from(pair::row(room)))?;
                    flying += 1;
                }
                if flying == 0 {
                    return Ok(Vec::new());
                }
                b.asker.wait()?;
                flying -= 1;
                while b.asker.another().is_some() {
                    flying -= 1;
                }
            }
        })
    }

    fn ours_together(&mut self, count: usize) -> Result<Turn> {
        let rooms = self.rooms(count);
        self.peer.ask(&json!({ "do": "flow", "first": rooms.start, "count": count }))?;
        let turn = self.turn(|b| {
            b.flow(rooms)?;
            Ok(Vec::new())
        })?;
        self.peer.ask(&json!({ "do": "flowed" }))?;
        Ok(turn)
    }

    fn flow(&self, mut rooms: std::ops::Range<u64>) -> Result<()> {
        let left = rooms.end - rooms.start;
        let (mut left, mut flying) = (left as usize, 0);
        let mut open: HashMap<u64, KvReceiver> = HashMap::new();
        let mut ready: VecDeque<u64> = VecDeque::new();
        let mut events = Vec::new();
        while left > 0 {
            while open.len() < IN_FLIGHT + AHEAD {
                let Some(room) = rooms.next() else { break };
                open.insert(room, self.decode.open(room)?);
            }
            while flying < IN_FLIGHT {
                let Some(room) = ready.pop_front() else { break };
                publish(&open[&room], &[page(room)])?;
                flying += 1;
            }
            self.decode.manager.drain_events(&mut events);
            if events.is_empty() && !readable(self.fd, PATIENCE) {
                return Err(format!("{left} rooms left, {flying} in flight, and nothing happens").into());
            }
            for event in events.drain(..) {
                let room = event.room.get();
                match event.poll {
                    KvPoll::WaitingForInput => ready.push_back(room),
                    KvPoll::Success => {
                        open.remove(&room);
                        (flying, left) = (flying - 1, left - 1);
                    }
                    KvPoll::Failed => return Err(why(&open[&room])),
                    _ => {}
                }
            }
        }
        Ok(())
    }
}

fn pause_for(pause: Duration) {
    if !pause.is_zero() {
        std::thread::sleep(pause);
    }
}

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let transport = Arc::new(TcpTransport::new(TcpConfig::loopback())?);
    let bench = Bench::start(ROLE, transport, |_, base| json!({ "pid": std::process::id(), "base": base }))?;
    measure(options, report, ROWS, bench)
}

/// The rows of one transport: idle, back to back, and together.
pub fn measure(options: &Options, report: &mut Report, rows: &[&str], mut bench: Bench) -> Result<()> {
    // Connections and caches.
    bench.floor_one_by_one(50, Duration::ZERO)?;
    bench.ours_one_by_one(50, Duration::ZERO)?;
    for (row, pause, count) in [(rows[0], 1, 150), (rows[1], 0, 1500)] {
        if options.wants(row) {
            latency(options, report, &mut bench, row, Duration::from_millis(pause), options.count(count))?;
        }
    }
    if options.wants(rows[2]) {
        throughput(options, report, &mut bench, rows[2])?;
    }
    Ok(())
}

fn latency(
    options: &Options,
    report: &mut Report,
    bench: &mut Bench,
    row: &str,
    pause: Duration,
    count: usize,
) -> Result<()> {
    let (mut floor, mut ours) = (Vec::new(), Vec::new());
    let rounds = options.rounds(8);
    for _ in 0..rounds {
        floor.push(bench.floor_one_by_one(count, pause)?);
        ours.push(bench.ours_one_by_one(count, pause)?);
    }
    let p50 = |turns: &[Turn]| median(&turns.iter().map(|t| median(&t.took)).collect::<Vec<_>>());
    let p99 = |turns: &[Turn]| quantile(&turns.iter().flat_map(|t| t.took.iter().copied()).collect::<Vec<_>>(), 0.99);
    report.add(Row {
        row: row.into(),
        ours: p50(&ours),
        peer: p50(&floor),
        unit: "us p50",
        budget: Budget::RatioAtMost(1.3),
        cpu: format!("D+P {} | {} us a room", cpu_us(&ours, count), cpu_us(&floor, count)),
        note: format!("p99 {:.0} / {:.0} us; {} rooms each", p99(&ours), p99(&floor), rounds * count),
    });
    Ok(())
}

/// CPU of decode and prefill, us a room.
fn cpu_us(turns: &[Turn], count: usize) -> String {
    let side = |i: usize| turns.iter().map(|t| t.cpu[i]).sum::<u64>() as f64 / 1e3 / (turns.len() * count) as f64;
    format!("{:.1}+{:.1}", side(0), side(1))
}

fn throughput(options: &Options, report: &mut Report, bench: &mut Bench, row: &str) -> Result<()> {
    let count = options.count(40_000);
    let (mut floor, mut ours) = (Vec::new(), Vec::new());
    for _ in 0..options.rounds(5) {
        floor.push(bench.floor_together(count)?);
        ours.push(bench.ours_together(count)?);
    }
    let rate = |turns: &[Turn]| median(&turns.iter().map(|t| count as f64 / t.secs).collect::<Vec<_>>());
    report.add(Row {
        row: row.into(),
        ours: rate(&ours),
        peer: rate(&floor),
        unit: "rooms/s",
        budget: Budget::AtLeast(40_000.0),
        cpu: format!("D+P {} | {} us a room", cpu_us(&ours, count), cpu_us(&floor, count)),
        note: format!("{IN_FLIGHT} in flight; ours makes and clears both handles of each room"),
    });
    Ok(())
}

pub fn role(link: &mut Link) -> Result<()> {
    let transport = Arc::new(TcpTransport::new(TcpConfig::loopback())?);
    serve(link, transport, |hello, arena| {
        let base = number(hello, "base")?;
        let target = Target {
            pid: number(hello, "pid")? as i32,
            pages: base,
            page: GEOMETRY.page,
            rows: base + GEOMETRY.rows_offset(),
            row: pair::ROW,
        };
        let source = arena.clone();
        Ok(Box::new(move |page, row| exchange::write(&source, target, page, row)))
    })
}

/// Writes the first page and row to the page and row of these numbers.
type BareWrite = Box<dyn Fn(u64, u64) -> Result<()> + Send>;

/// Prefill's process; `bare` makes the bare exchange's write.
pub fn serve(
    link: &mut Link,
    transport: Arc<dyn Transport>,
    bare: impl FnOnce(&Value, &Arc<HostArena>) -> Result<BareWrite>,
) -> Result<()> {
    let Some(hello) = link.next()? else { return Ok(()) };
    let arena = GEOMETRY.arena()?;
    let context = zmq::Context::new();
    let (listener, port) = pull(&context)?;
    let answers = push(&context, number(&hello, "port")?)?;
    let write = bare(&hello, &arena)?;
    std::thread::spawn(move || {
        if let Err(e) = exchange::serve(&listener, &answers, write) {
            eprintln!("the bare exchange ended: {e}");
            std::process::exit(1);
        }
    });
    let region = transport.register(arena)?;
    let prefill = Prefill::start(transport, GEOMETRY.layout(region)?)?;
    link.say(&json!({ "port": port, "bootstrap": prefill.bootstrap }))?;

    let mut prepared = Vec::new();
    let flow = Flow::start(prefill);
    while let Some(request) = link.next()? {
        match text(&request, "do")? {
            "cpu" => link.say(&json!({ "cpu": process_cpu_ns() }))?,
            "finish" => {
                check_sent(&prepared)?;
                prepared.clear();
                link.say(&Value::Null)?;
            }
            "flowed" => {
                flow.ended()?;
                link.say(&Value::Null)?;
            }
            what => {
                let (first, count) = (number(&request, "first")?, number(&request, "count")?);
                if what == "prepare" {
                    prepared =
                        (first..first + count).map(|n| flow.prefill.send(n, &[page(n)])).collect::<Result<Vec<_>>>()?;
                } else {
                    flow.begin(first, count)?;
                }
                link.say(&Value::Null)?;
            }
        }
    }
    Ok(())
}

/// The thread that makes and clears senders while rooms flow.
struct Flow {
    prefill: Arc<Prefill>,
    work: std::sync::mpsc::Sender<(u64, u64)>,
    news: std::sync::mpsc::Receiver<std::result::Result<(), String>>,
}

impl Flow {
    fn start(prefill: Prefill) -> Self {
        let prefill = Arc::new(prefill);
        let (work, todo) = std::sync::mpsc::channel();
        let (tell, news) = std::sync::mpsc::channel();
        let side = prefill.clone();
        std::thread::spawn(move || {
            for (first, count) in todo {
                let result = flow_out(&side, first, count, &tell);
                if tell.send(result.map_err(|e| e.to_string())).is_err() {
                    return;
                }
            }
        });
        Self { prefill, work, news }
    }

    /// Returns when the first senders wait.
    fn begin(&self, first: u64, count: u64) -> Result<()> {
        self.work.send((first, count))?;
        Ok(self.news.recv_timeout(PATIENCE)??)
    }

    fn ended(&self) -> Result<()> {
        Ok(self.news.recv_timeout(PATIENCE)??)
    }
}

fn flow_out(
    side: &Prefill,
    first: u64,
    count: u64,
    tell: &std::sync::mpsc::Sender<std::result::Result<(), String>>,
) -> Result<()> {
    let fd = side.manager.subscribe()?;
    let mut rooms = first..first + count;
    let (mut live, mut events, mut left) = (HashMap::new(), Vec::new(), count);
    let mut begun = false;
    while left > 0 {
        // Ahead of decode by more than it can have in flight.
        while live.len() < 4 * AHEAD {
            let Some(room) = rooms.next() else { break };
            live.insert(room, side.send(room, &[page(room)])?);
        }
        if !std::mem::replace(&mut begun, true) {
            tell.send(Ok(()))?;
        }
        side.manager.drain_events(&mut events);
        if events.is_empty() && !readable(fd, PATIENCE) {
            return Err(format!("{left} senders left, and nothing happens").into());
        }
        for event in events.drain(..) {
            match event.poll {
                KvPoll::Success => left -= u64::from(live.remove(&event.room.get()).is_some()),
                KvPoll::Failed => {
                    let failure = live.remove(&event.room.get()).and_then(|s| s.failure());
                    return Err(format!("{failure:?}").into());
                }
                _ => {}
            }
        }
    }
    Ok(())
}
