//! A seeded simulation: several prefill engines and several decode engines, the real shards on a simulated network, clock
//! and transport, engines that do whatever engines do, and everything going wrong that can.
//!
//! A run is a row of *episodes*. The first one's seed is the run's; each draws its fleet (shapes, policies, clocks), its
//! troubles and its rooms from its own seed, so that an episode that fails is replayed alone:
//! [`SimOptions::replay`]. An episode goes on for some hundred room lives with faults on; then faults end, and
//! everything must drain or be [named](Unresolved): the room, the peer, the write that nothing is proven about. These are
//! settled last, and then every count must be back where it started, and rooms between all pairs of engines must succeed.
//!
//! # What is checked, all the time
//! * A byte lands only in a page that its room life owns at that moment, and that life has not reported Success.
//! * A source page is given back only when no write may read it: its bytes, which name their owner, are destroyed at once.
//! * A destination page given back as proven has no write that may land; one given back by timeout is counted, and
//!   kept out of use until it is safe.
//! * Success on decode: every prefill rank that was asked has reported it, and all bytes are in place.
//! * Success on prefill: no write of the room is open.
//! * A terminal state stays, the first cause stays, Failed has a reason, `decode_prefix_len` is the room's own.
//! * A second user of a live number is refused, and the first goes on.
//!
//! `SIMULATION.md` beside this crate says what is modelled and what is not.

mod config;
mod drain;
mod faults;
mod fleet;
mod life;
mod observe;
mod oracle;
mod print;
mod told;
mod trace;
mod writes;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, VecDeque};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use kv_core::engine::RoomShared;
use kv_core::ids::OpId;
use kv_core::limits::Limits;
use kv_core::net::Endpoint;
use kv_core::time::Timestamp;

use crate::{FakeFabric, ManualClock, Rng, SimNet};
use config::Episode;
use faults::{SharedRates, Undo};
use fleet::{D, P};
use life::Life;
use oracle::Owners;
use told::Told;
use trace::Trace;
use writes::{Step, Write};

/// What to run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimOptions {
    /// Of the first episode.
    pub seed: u64,
    /// Episodes are run until so many room lives have ended.
    pub rooms: u64,
    /// Keep the whole trace of the last episode, not its end only.
    pub trace: bool,
}

impl SimOptions {
    /// `rooms` lives, without a trace.
    pub fn new(seed: u64, rooms: u64) -> Self {
        Self { seed, rooms, trace: false }
    }

    /// One episode, with its trace.
    pub fn replay(seed: u64) -> Self {
        Self { trace: true, ..Self::new(seed, 1) }
    }
}

/// A write, or pages, about which nothing was proven when faults had ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unresolved {
    /// The room's number.
    pub room: u64,
    /// Which life of it.
    pub life: u64,
    /// The process that holds something for it.
    pub holder: String,
    /// The process at the other end.
    pub peer: String,
    /// The write; `None`: decode waits for an ABORT_ACK.
    pub op: Option<OpId>,
    /// Why nothing is known.
    pub why: &'static str,
}

impl fmt::Display for Unresolved {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { room, life, holder, peer, op, why } = self;
        write!(f, "room {room} (life {life}): {holder} -> {peer}")?;
        if let Some(op) = op {
            write!(f, ", {op:?}")?;
        }
        write!(f, ": {why}")
    }
}

/// What a run did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SimReport {
    /// Of the first episode.
    pub seed: u64,
    /// Episodes.
    pub episodes: u64,
    /// Room lives that ended.
    pub lives: u64,
    /// Senders that reported Success.
    pub sender_success: u64,
    /// Receivers that reported Success, their bytes checked.
    pub receiver_success: u64,
    /// Faults of the fleet (partitions, restarts, ...).
    pub faults: u64,
    /// Control messages sent, lost ones included.
    pub messages: u64,
    /// Spans that landed.
    pub landed: u64,
    /// Spans that landed after a release by timeout, without proof.
    pub landed_without_proof: u64,
    /// Releases by timeout, without proof.
    pub released_without_proof: u64,
    /// Writes and pages that were named as unresolved when faults had ended.
    pub unresolved: u64,
    /// The last ones named.
    pub named: Vec<Unresolved>,
    /// Simulated time.
    pub simulated: Duration,
    /// Of every line of every trace: equal seeds, equal hashes.
    pub hash: u64,
    /// The last episode's trace, when it was asked for.
    pub trace: Vec<String>,
}

/// What went wrong, and how to see it again.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SimFailure {
    /// Of the episode.
    pub seed: u64,
    /// What it was made of.
    pub episode: String,
    /// Everything that was found wrong.
    pub found: Vec<String>,
    /// Lives that had ended before, in all episodes.
    pub lives: u64,
    /// The end of the trace, or all of it.
    pub trace: Vec<String>,
}

impl fmt::Display for SimFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", self.episode)?;
        for text in self.found.iter().take(20) {
            writeln!(f, "WRONG: {text}")?;
        }
        write!(f, "after {} room lives; replay with: kvt sim --seed {} --rooms 1 --trace", self.lives, self.seed)
    }
}

impl std::error::Error for SimFailure {}

/// Run episodes from `options.seed` on.
///
/// # Errors
/// The first thing that went wrong, with the seed of its episode.
pub fn run(options: SimOptions) -> Result<SimReport, Box<SimFailure>> {
    let mut total = SimReport { seed: options.seed, ..SimReport::default() };
    let mut seed = options.seed;
    loop {
        let episode = Episode::draw(seed);
        let one = run_episode(episode, options, total.lives)?;
        total.add(one);
        if total.lives >= options.rooms {
            return Ok(total);
        }
        seed = Rng::new(seed).next_u64();
    }
}

fn run_episode(episode: Episode, options: SimOptions, before: u64) -> Result<SimReport, Box<SimFailure>> {
    let (text, seed) = (episode.describe(), episode.seed);
    let trace = Trace::new(options.trace);
    trace.line(format_args!("{text}"));
    let mut sim = Sim::new(episode, trace.clone());
    // The shards, the fabric and the pools panic over what they see.
    let result = catch_unwind(AssertUnwindSafe(|| sim.run()));
    let mut found = std::mem::take(&mut sim.wrong);
    if let Err(panic) = result {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        found.push(format!("panic: {}", text.unwrap_or_else(|| "of unknown kind".into())));
    }
    let lives = before + sim.report.lives;
    let report = sim.close();
    if found.is_empty() {
        return Ok(SimReport {
            hash: trace.hash(),
            trace: if options.trace { trace.lines() } else { Vec::new() },
            ..report
        });
    }
    let trace = trace.lines();
    Err(Box::new(SimFailure { seed, episode: text, found, lives, trace }))
}

impl SimReport {
    fn add(&mut self, one: Self) {
        self.episodes += 1;
        self.lives += one.lives;
        self.sender_success += one.sender_success;
        self.receiver_success += one.receiver_success;
        self.faults += one.faults;
        self.messages += one.messages;
        self.landed += one.landed;
        self.landed_without_proof += one.landed_without_proof;
        self.released_without_proof += one.released_without_proof;
        self.unresolved += one.unresolved;
        if !one.named.is_empty() {
            self.named = one.named;
        }
        self.simulated += one.simulated;
        self.hash = self.hash.rotate_left(7) ^ one.hash;
        self.trace = one.trace;
    }
}

/// Something that will happen.
#[derive(Clone)]
enum Ev {
    Birth,
    CreateSender(u64, usize),
    CreateReceiver(u64, usize),
    Publish(u64, usize),
    Send(u64, usize),
    Signal(u64, usize, usize, bool),
    AbortSender(u64, usize),
    AbortReceiver(u64, usize),
    ClearSender(u64, usize),
    ClearReceiver(u64, usize),
    ImpostorSender(u64, usize),
    ImpostorReceiver(u64, usize),
    Write(u64, OpId, Step),
    Fault,
    Undo(Undo),
}

/// One episode under way.
struct Sim {
    episode: Episode,
    rng: Rng,
    clock: ManualClock,
    net: SimNet,
    fabric: FakeFabric,
    limits: Limits,
    owners: Owners,
    trace: Trace,
    told: Told,
    rates: SharedRates,
    p: Vec<P>,
    d: Vec<D>,
    processes: u64,
    /// Lives whose senders (receivers) prefill rank (decode rank) i holds.
    on_p: Vec<BTreeSet<u64>>,
    on_d: Vec<BTreeSet<u64>>,
    lives: BTreeMap<u64, Life>,
    born: u64,
    first_life: u64,
    next_room: u64,
    /// Numbers whose lives are over, by decode engine.
    numbers: BTreeMap<usize, VecDeque<u64>>,
    /// Writes that are not quiet, by process and op.
    writes: BTreeMap<(u64, OpId), Write>,
    /// Lives with pages that were released without proof.
    quarantined: BTreeSet<u64>,
    impostors: Vec<(u64, Arc<RoomShared>)>,
    impostors_made: u64,
    events: BinaryHeap<Reverse<(u64, u64)>>,
    pending: BTreeMap<u64, Ev>,
    next_event: u64,
    touched_p: BTreeSet<usize>,
    touched_d: BTreeSet<usize>,
    touch_all: bool,
    healing: bool,
    /// Until when messages may have been lost, or have waited at their sender, for another reason than a draw.
    trouble_at: Timestamp,
    wrong: Vec<String>,
    report: SimReport,
}

/// Steps at one moment after which it is a livelock.
const MAX_ROUNDS: u32 = 10_000;

impl Sim {
    fn new(episode: Episode, trace: Trace) -> Self {
        let mut rng = Rng::new(episode.seed ^ 0x5173_9a6c_0f42_be81);
        let clock = ManualClock::new();
        let net = SimNet::new(&clock, rng.next_u64());
        net.without_log();
        let fabric = FakeFabric::new();
        if episode.leave_superseded {
            fabric.leave_superseded();
        }
        let owners = Owners::default();
        let look = owners.clone();
        fabric.observe(move |landing| look.look(landing));
        let rates = SharedRates::default();
        rates.set(episode.rates);
        let mut sim = Self {
            next_room: rng.below(1 << 40),
            first_life: rng.below(1 << 20) << 20,
            rng,
            clock,
            net,
            fabric,
            limits: Limits::default(),
            owners,
            trace,
            told: Told::new(episode.reuse),
            rates,
            p: Vec::new(),
            d: Vec::new(),
            processes: 0,
            on_p: Vec::new(),
            on_d: Vec::new(),
            lives: BTreeMap::new(),
            born: 0,
            numbers: BTreeMap::new(),
            writes: BTreeMap::new(),
            quarantined: BTreeSet::new(),
            impostors: Vec::new(),
            impostors_made: 0,
            events: BinaryHeap::new(),
            pending: BTreeMap::new(),
            next_event: 0,
            touched_p: BTreeSet::new(),
            touched_d: BTreeSet::new(),
            touch_all: true,
            healing: false,
            trouble_at: Timestamp::ZERO,
            wrong: Vec::new(),
            report: SimReport::default(),
            episode,
        };
        sim.message_rules();
        sim.add_prefills();
        sim.add_decodes();
        sim.on_p = vec![BTreeSet::new(); sim.p.len()];
        sim.on_d = vec![BTreeSet::new(); sim.d.len()];
        sim
    }

    fn wrong(&mut self, text: String) {
        self.trace.line(format_args!("WRONG: {text}"));
        self.wrong.push(text);
    }

    /// `nanos` from now.
    fn after(&mut self, nanos: u64, event: Ev) {
        let id = self.next_event;
        self.next_event += 1;
        self.events.push(Reverse((self.clock.now().as_nanos() + nanos.max(1), id)));
        self.pending.insert(id, event);
    }

    fn run(&mut self) {
        self.after(1, Ev::Birth);
        self.next_fault();
        // Until all are born and have had their time; what hangs then must drain without faults.
        let mut overtime = 0;
        while self.wrong.is_empty() && overtime < 4 && (self.born < self.episode.lives || !self.lives.is_empty()) {
            let before = self.born;
            self.run_for(Duration::from_secs(2));
            overtime += u32::from(self.born == before);
        }
        if self.wrong.is_empty() {
            self.drain();
        }
    }

    /// Let time pass.
    fn run_for(&mut self, time: Duration) {
        let end = self.clock.now() + time;
        while self.wrong.is_empty() {
            let Some(next) = self.next_due().filter(|t| *t <= end) else {
                self.clock.advance_to(end);
                self.trace.at(end.as_nanos());
                return;
            };
            self.clock.advance_to(next);
            self.trace.at(next.as_nanos());
            while let Some(Reverse((at, id))) = self.events.peek().copied()
                && at <= next.as_nanos()
            {
                self.events.pop();
                if let Some(event) = self.pending.remove(&id) {
                    self.happen(event);
                }
            }
            self.settle();
        }
    }

    /// When something happens next.
    fn next_due(&self) -> Option<Timestamp> {
        let now = self.clock.now();
        let event = self.events.peek().map(|Reverse((at, _))| Timestamp::from_nanos(*at));
        let p = self.p.iter().filter(|p| !p.node.stopped).filter_map(|p| Some(p.skew.global(p.node.wake?)));
        let d = self.d.iter().filter(|d| !d.node.stopped).filter_map(|d| Some(d.skew.global(d.node.wake?)));
        let directories = self.d.iter().filter(|d| !d.node.stopped).filter_map(|d| d.node.directory.next_due());
        let due = p.chain(d).chain(directories).filter(|t| *t > now).min();
        due.into_iter().chain(event).chain(self.net.next_due_after(now)).min()
    }

    fn happen(&mut self, event: Ev) {
        match event {
            Ev::Birth => self.birth(),
            Ev::CreateSender(life, p) => self.create_sender(life, p),
            Ev::CreateReceiver(life, d) => self.create_receiver(life, d),
            Ev::Publish(life, d) => self.publish(life, d),
            Ev::Send(life, p) => self.send(life, p),
            Ev::Signal(life, p, nth, ok) => self.signal(life, p, nth, ok),
            Ev::AbortSender(life, p) => self.abort_sender(life, p),
            Ev::AbortReceiver(life, d) => self.abort_receiver(life, d),
            Ev::ClearSender(life, p) => self.clear_sender(life, p),
            Ev::ClearReceiver(life, d) => self.clear_receiver(life, d),
            Ev::ImpostorSender(life, p) => self.impostor(life, Some(p), None),
            Ev::ImpostorReceiver(life, d) => self.impostor(life, None, Some(d)),
            Ev::Write(process, op, step) => self.write_step(process, op, step),
            Ev::Fault => {
                self.touch_all = true;
                self.fault();
            }
            Ev::Undo(undo) => {
                self.touch_all = true;
                self.undo(undo);
            }
        }
    }

    /// Step everybody who has something to do at this moment, until nobody has.
    fn settle(&mut self) {
        let now = self.clock.now();
        let due = self.net.due_at(now);
        let all = std::mem::take(&mut self.touch_all);
        let (touched_p, touched_d) = (std::mem::take(&mut self.touched_p), std::mem::take(&mut self.touched_d));
        let p = self.p.iter().enumerate().filter(|(i, p)| {
            let woken = p.node.wake.is_some_and(|t| t <= p.skew.local(now));
            all || woken || touched_p.contains(i) || due.contains(&p.node.endpoint) || p.node.has_commands()
        });
        let mut busy: Vec<usize> = p.map(|(i, _)| i).collect();
        let d = self.d.iter().enumerate().filter(|(i, d)| {
            let woken = d.node.wake.is_some_and(|t| t <= d.skew.local(now));
            let asked = d.node.directory.next_due().is_some_and(|t| t <= now);
            let told = !d.node.commands.is_empty() || asked;
            all || woken || touched_d.contains(i) || due.contains(&d.node.endpoint) || told
        });
        busy.extend(d.map(|(i, _)| self.p.len() + i));
        for round in 0.. {
            assert!(round < MAX_ROUNDS, "nothing comes to rest at {now:?}");
            self.rng.shuffle(&mut busy);
            for i in std::mem::take(&mut busy) {
                let again = match i.checked_sub(self.p.len()) {
                    None => self.step_prefill(i, now),
                    Some(d) => self.step_decode(d, now),
                };
                if again {
                    busy.push(i);
                }
            }
            if busy.is_empty() {
                break;
            }
        }
        if !self.quarantined.is_empty() {
            self.refresh_writes();
            self.end_quarantine();
        }
        for text in self.fabric.take_violations() {
            self.wrong(text);
        }
    }

    fn step_prefill(&mut self, p: usize, now: Timestamp) -> bool {
        let rank = &mut self.p[p];
        if rank.node.stopped {
            return false;
        }
        let again = rank.node.step_once(rank.skew.local(now));
        self.new_writes(p);
        self.observe_senders(p);
        self.check_told(p);
        again
    }

    /// Failed goes out with the first cause; and towards 0.5.23 not before every write of the room has settled (B2).
    fn check_told(&mut self, p: usize) {
        let (told, wrong) = self.told.take();
        wrong.into_iter().for_each(|text| self.wrong(text));
        let decode = |to: &Endpoint| self.d.iter().find(|d| d.node.endpoint == *to).map(|d| d.engine);
        let engine = self.p[p].engine;
        let told: Vec<_> = told
            .into_iter()
            .filter(|failed| decode(&failed.to).is_some_and(|d| !self.episode.tells_at_once(engine, d)))
            .collect();
        for failed in told {
            let to = self.d.iter().find(|d| d.node.endpoint == failed.to).map(|d| d.node.name.clone());
            let is_it = |id: u64, room: u64| room == failed.room && (failed.life == 0 || failed.life == id);
            let lives: Vec<u64> = self.lives.iter().filter(|(id, l)| is_it(**id, l.room)).map(|(id, _)| *id).collect();
            let open = |sim: &Self| {
                let mut of = lives.iter().flat_map(|id| sim.open_writes(sim.p[p].process, *id));
                of.find(|(_, w)| !w.dst_quiet && Some(&w.to) == to.as_ref()).map(|(op, _)| op)
            };
            if open(self).is_some() {
                self.refresh_writes();
            }
            if let Some(op) = open(self) {
                self.wrong(format!("{}: room {}: Failed told while {op:?} may land", self.p[p].name, failed.room));
            }
        }
    }

    fn step_decode(&mut self, d: usize, now: Timestamp) -> bool {
        let rank = &mut self.d[d];
        if rank.node.stopped {
            return false;
        }
        let before = rank.node.stats.released_without_proof.get();
        let again = rank.node.step_once(rank.skew.local(now));
        let unproven = rank.node.stats.released_without_proof.get() - before;
        self.report.released_without_proof += unproven;
        self.observe_receivers(d, unproven > 0);
        again
    }

    /// The end of an episode, whatever it came to.
    fn close(mut self) -> SimReport {
        self.report.simulated = self.clock.now().since(Timestamp::ZERO);
        let (late, landed) = self.owners.counts();
        (self.report.landed, self.report.landed_without_proof) = (landed, late);
        self.report.messages = self.trace.messages();
        for p in &self.p {
            self.fabric.exit(&p.name);
        }
        drop(self.fabric.take_violations());
        self.report
    }
}
