//! A network of control planes in memory: time-driven, seeded, with faults by rule.
//!
//! Messages from one sender to one endpoint keep their order unless a rule reorders them. A message to an endpoint that
//! nobody has bound waits, as a PUSH socket's does, and reaches whoever binds it. Nothing moves by itself: a message is
//! received when its receiver calls `recv` at or after its due time.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::control::{ControlError, ControlEvent, ControlPlane, Multipart};
use kv_core::net::Endpoint;
use kv_core::time::Timestamp;

use crate::clock::ManualClock;
use crate::print;
use crate::rng::Rng;

/// What a rule does to a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// It never arrives.
    Drop,
    /// It arrives so much later; those behind it on the link wait for it.
    Delay(Duration),
    /// It arrives so many times more, right behind the first.
    Duplicate(u32),
    /// It arrives so much later, and those behind it overtake it.
    Overtaken(Duration),
    /// It stays in flight until [`SimNet::release`]; those behind it overtake it.
    Hold,
    /// The sender is told that the peer's queue is full.
    Stall,
    /// The sender is told that the peer cannot be reached.
    Unreachable,
}

/// Faults drawn for each message that no rule matched. Probabilities from 0 to 1.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Faults {
    /// Never arrives.
    pub drop: f64,
    /// Arrives twice.
    pub duplicate: f64,
    /// Is overtaken by later ones.
    pub overtaken: f64,
    /// Time on the way, drawn evenly; empty = the network's latency.
    pub delay: Range<Duration>,
}

/// A message on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Flight {
    /// Number in order of sending; a duplicate has one of its own.
    pub id: u64,
    /// Who sent it; `None` when a test [injected](SimNet::inject) it.
    pub from: Option<Endpoint>,
    /// Where to.
    pub to: Endpoint,
    /// Its frames.
    pub frames: Multipart,
    /// When it was sent.
    pub sent: Timestamp,
    /// When it may be received; `None` while held.
    pub due: Option<Timestamp>,
}

fn name(from: &Option<Endpoint>) -> String {
    from.as_ref().map_or("(test)".into(), Endpoint::to_string)
}

impl fmt::Display for Flight {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {} -> {} {}", self.id, name(&self.from), self.to, print::frames(&self.frames))?;
        match self.due {
            Some(due) => write!(f, " due at {} us", due.as_nanos() / 1000),
            None => f.write_str(" held"),
        }
    }
}

/// Names a rule, to take it away again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RuleId(u64);

type Matches = Box<dyn FnMut(&Flight) -> bool + Send>;

struct Rule {
    id: RuleId,
    matches: Matches,
    action: Action,
    left: Option<u32>,
}

#[derive(Default)]
struct Port {
    /// Bound generation, if any; a dropped `SimControl` of an older one changes nothing.
    bound: Option<u64>,
    events: VecDeque<ControlEvent>,
}

struct Inner {
    now: ManualClock,
    rng: Rng,
    latency: Duration,
    capacity: usize,
    ports: BTreeMap<Endpoint, Port>,
    next_bind: u64,
    next_id: u64,
    next_rule: u64,
    rules: Vec<Rule>,
    faults: Faults,
    flights: Vec<Flight>,
    /// When the last message of a link is due: those behind it are not due earlier.
    last_due: BTreeMap<(Option<Endpoint>, Endpoint), Timestamp>,
    cut: BTreeSet<(Endpoint, Endpoint)>,
    links: BTreeSet<(Endpoint, Endpoint)>,
    log: Vec<String>,
    quiet: bool,
}

/// The network. Clones are the same network.
#[derive(Clone)]
pub struct SimNet(Arc<Mutex<Inner>>);

impl SimNet {
    /// A network without faults or latency, on `clock`; `seed` feeds the random faults.
    pub fn new(clock: &ManualClock, seed: u64) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            now: clock.clone(),
            rng: Rng::new(seed),
            latency: Duration::ZERO,
            capacity: usize::MAX,
            ports: BTreeMap::new(),
            next_bind: 0,
            next_id: 0,
            next_rule: 0,
            rules: Vec::new(),
            faults: Faults::default(),
            flights: Vec::new(),
            last_due: BTreeMap::new(),
            cut: BTreeSet::new(),
            links: BTreeSet::new(),
            log: Vec::new(),
            quiet: false,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Bind `endpoint`: the control plane of one process there. Panics while another is bound. Messages that wait for the
    /// endpoint reach this one: after a restart, the successor hears what was meant for its predecessor.
    pub fn bind(&self, endpoint: &Endpoint) -> SimControl {
        let mut inner = self.lock();
        let bind = inner.next_bind;
        inner.next_bind += 1;
        let port = inner.ports.entry(endpoint.clone()).or_default();
        assert!(port.bound.is_none(), "{endpoint} is bound already");
        *port = Port { bound: Some(bind), events: VecDeque::new() };
        inner.log(format_args!("{endpoint} bound"));
        drop(inner);
        SimControl { net: self.clone(), endpoint: endpoint.clone(), bind, ticked: false }
    }

    /// Time on the way for every message sent from now on, unless a rule or fault says otherwise.
    pub fn set_latency(&self, latency: Duration) {
        self.lock().latency = latency;
    }

    /// Messages one link (sender, receiver) holds before the sender is told `Stalled`.
    pub fn set_capacity(&self, messages: usize) {
        self.lock().capacity = messages;
    }

    /// Random faults for messages that no rule matches.
    pub fn set_faults(&self, faults: Faults) {
        self.lock().faults = faults;
    }

    /// Do `action` to every message that matches; the first rule that matches decides.
    pub fn rule(&self, action: Action, matches: impl FnMut(&Flight) -> bool + Send + 'static) -> RuleId {
        self.add_rule(action, None, Box::new(matches))
    }

    /// Do `action` to the next `times` messages that match.
    pub fn rule_times(
        &self,
        times: u32,
        action: Action,
        matches: impl FnMut(&Flight) -> bool + Send + 'static,
    ) -> RuleId {
        self.add_rule(action, Some(times), Box::new(matches))
    }

    fn add_rule(&self, action: Action, left: Option<u32>, matches: Matches) -> RuleId {
        let mut inner = self.lock();
        let id = RuleId(inner.next_rule);
        inner.next_rule += 1;
        inner.rules.push(Rule { id, matches, action, left });
        id
    }

    /// Take a rule away.
    pub fn remove_rule(&self, id: RuleId) {
        self.lock().rules.retain(|r| r.id != id);
    }

    /// Cut the network between two endpoints, both ways: messages wait on the way until [`heal`](Self::heal), as they do
    /// in TCP.
    pub fn partition(&self, a: &Endpoint, b: &Endpoint) {
        let mut inner = self.lock();
        inner.cut.insert((a.clone(), b.clone()));
        inner.cut.insert((b.clone(), a.clone()));
        inner.log(format_args!("partition {a} | {b}"));
    }

    /// End a partition.
    pub fn heal(&self, a: &Endpoint, b: &Endpoint) {
        let mut inner = self.lock();
        inner.cut.remove(&(a.clone(), b.clone()));
        inner.cut.remove(&(b.clone(), a.clone()));
        inner.log(format_args!("healed {a} | {b}"));
    }

    /// Tell `at` that its connection to `peer` broke. Messages on the way from `at` to `peer` are lost with it.
    pub fn lose_peer(&self, at: &Endpoint, peer: &Endpoint, reason: &str) {
        let mut inner = self.lock();
        inner.flights.retain(|f| !(f.from.as_ref() == Some(at) && f.to == *peer));
        inner.log(format_args!("{at} lost {peer}: {reason}"));
        if let Some(port) = inner.ports.get_mut(at) {
            port.events.push_back(ControlEvent::PeerLost(peer.clone(), reason.into()));
        }
    }

    /// The process at `endpoint` dies: what was on its way to it is lost, and its peers (everyone with a message from or
    /// to it, ever) may be told by [`lose_peer`](Self::lose_peer). Its `SimControl` sends and hears nothing any more.
    pub fn crash(&self, endpoint: &Endpoint) {
        let mut inner = self.lock();
        inner.flights.retain(|f| f.to != *endpoint);
        inner.unbind(endpoint, "crashed");
    }

    /// Hand `frames` to whoever is at `to`, as if a stranger had sent them; due now.
    pub fn inject(&self, to: &Endpoint, frames: impl IntoIterator<Item = impl Into<bytes::Bytes>>) -> u64 {
        let frames = frames.into_iter().map(Into::into).collect();
        let mut inner = self.lock();
        let due = inner.now.now();
        inner.put(None, to.clone(), frames, Some(due))
    }

    /// Everything on its way, in order of sending.
    pub fn in_flight(&self) -> Vec<Flight> {
        let mut all = self.lock().flights.clone();
        all.sort_by_key(|f| f.id);
        all
    }

    /// What is on its way, one line a message.
    pub fn print_in_flight(&self) -> String {
        self.in_flight().iter().map(|f| format!("{f}\n")).collect()
    }

    /// The earliest due time of a message that is not held, cut off or addressed to nobody; a simulation moves its clock
    /// there. `None`: nothing will arrive by time alone.
    pub fn next_due(&self) -> Option<Timestamp> {
        let inner = self.lock();
        inner.flights.iter().filter(|f| inner.can_arrive(f)).filter_map(|f| f.due).min()
    }

    /// Let a message arrive now, before all that wait, whatever held it.
    pub fn release(&self, id: u64) {
        let mut inner = self.lock();
        let now = inner.now.now();
        let i = inner.index(id);
        let mut flight = inner.flights.remove(i);
        flight.due = Some(now);
        inner.flights.insert(0, flight);
    }

    /// Let every held message arrive now, in order of sending.
    pub fn release_all(&self) {
        let mut inner = self.lock();
        let now = inner.now.now();
        inner.flights.iter_mut().filter(|f| f.due.is_none()).for_each(|f| f.due = Some(now));
    }

    /// Lose a message on its way.
    pub fn drop_message(&self, id: u64) -> Flight {
        let mut inner = self.lock();
        let i = inner.index(id);
        inner.flights.remove(i)
    }

    /// When the next message that is not held, cut off or addressed to nobody is due, later than `now`.
    pub fn next_due_after(&self, now: Timestamp) -> Option<Timestamp> {
        let inner = self.lock();
        let later = inner.flights.iter().filter(|f| f.due.is_some_and(|d| d > now));
        later.filter(|f| inner.can_arrive(f)).filter_map(|f| f.due).min()
    }

    /// Endpoints that have something to receive at `now`.
    pub fn due_at(&self, now: Timestamp) -> BTreeSet<Endpoint> {
        let inner = self.lock();
        let due = inner.flights.iter().filter(|f| f.due.is_some_and(|d| d <= now) && inner.can_arrive(f));
        let told = inner.ports.iter().filter(|(_, port)| !port.events.is_empty());
        due.map(|f| f.to.clone()).chain(told.map(|(e, _)| e.clone())).collect()
    }

    /// Every (sender, receiver) that a message went from and to and that was not closed since: the open sockets.
    pub fn links(&self) -> Vec<(Endpoint, Endpoint)> {
        self.lock().links.iter().cloned().collect()
    }

    /// Endpoints that are bound.
    pub fn bound(&self) -> Vec<Endpoint> {
        let inner = self.lock();
        inner.ports.iter().filter(|(_, p)| p.bound.is_some()).map(|(e, _)| e.clone()).collect()
    }

    /// Keep no [`log`](Self::log): for runs of millions of messages.
    pub fn without_log(&self) {
        self.lock().quiet = true;
    }

    /// What happened so far, one line an event, with the time in microseconds.
    pub fn log(&self) -> Vec<String> {
        self.lock().log.clone()
    }
}

impl fmt::Debug for SimNet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.print_in_flight())
    }
}

impl Inner {
    fn log(&mut self, text: fmt::Arguments<'_>) {
        if self.quiet {
            return;
        }
        self.log.push(format!("{:>10} us  {text}", self.now.now().as_nanos() / 1000));
    }

    fn index(&self, id: u64) -> usize {
        let found = self.flights.iter().position(|f| f.id == id);
        found.unwrap_or_else(|| panic!("no message #{id} is on its way"))
    }

    fn unbind(&mut self, endpoint: &Endpoint, why: &str) {
        self.links.retain(|(from, _)| from != endpoint);
        if let Some(port) = self.ports.get_mut(endpoint)
            && port.bound.take().is_some()
        {
            self.log(format_args!("{endpoint} {why}"));
        }
    }

    fn can_arrive(&self, f: &Flight) -> bool {
        let bound = self.ports.get(&f.to).is_some_and(|p| p.bound.is_some());
        bound && !f.from.as_ref().is_some_and(|from| self.cut.contains(&(from.clone(), f.to.clone())))
    }

    fn put(&mut self, from: Option<Endpoint>, to: Endpoint, frames: Multipart, due: Option<Timestamp>) -> u64 {
        let id = self.next_id;
        self.next_id += 1;
        self.flights.push(Flight { id, from, to, frames, sent: self.now.now(), due });
        id
    }

    fn decide(&mut self, flight: &Flight) -> Option<Action> {
        let mut live = self.rules.iter_mut().filter(|r| r.left != Some(0));
        let rule = live.find_map(|r| (r.matches)(flight).then_some(r))?;
        rule.left = rule.left.map(|n| n - 1);
        Some(rule.action)
    }

    fn send(&mut self, from: &Endpoint, to: &Endpoint, frames: Multipart) -> Result<(), ControlError> {
        let queued = self.flights.iter().filter(|f| f.from.as_ref() == Some(from) && f.to == *to).count();
        if queued >= self.capacity {
            self.log(format_args!("{from} -> {to} stalled with {queued} queued"));
            return Err(ControlError::Stalled { endpoint: to.clone(), queued });
        }
        let now = self.now.now();
        self.links.insert((from.clone(), to.clone()));
        let mut due = now + self.latency;
        let flight =
            Flight { id: self.next_id, from: Some(from.clone()), to: to.clone(), frames, sent: now, due: Some(due) };
        let mut copies = 1;
        let mut in_order = true;
        let action = self.decide(&flight);
        if action.is_none() {
            let faults = self.faults.clone();
            if !faults.delay.is_empty() {
                let nanos = |d: Duration| d.as_nanos() as u64;
                due = now + Duration::from_nanos(self.rng.range(nanos(faults.delay.start)..nanos(faults.delay.end)));
            }
            copies = if self.rng.chance(faults.drop) { 0 } else { 1 + u32::from(self.rng.chance(faults.duplicate)) };
            in_order = !self.rng.chance(faults.overtaken);
            if !in_order {
                due = due + Duration::from_micros(1 + self.rng.below(1000));
            }
        }
        let mut held = false;
        match action {
            None => {}
            Some(Action::Drop) => copies = 0,
            Some(Action::Delay(d)) => due = due + d,
            Some(Action::Duplicate(n)) => copies += n,
            Some(Action::Overtaken(d)) => (due, in_order) = (due + d, false),
            Some(Action::Hold) => held = true,
            Some(Action::Stall) => return Err(ControlError::Stalled { endpoint: to.clone(), queued }),
            Some(Action::Unreachable) => {
                return Err(ControlError::Unreachable { endpoint: to.clone(), reason: "the test's rule".into() });
            }
        }
        let what = match (copies, held) {
            (0, _) => " LOST".to_string(),
            (_, true) => " HELD".to_string(),
            (1, _) if in_order => String::new(),
            (1, _) => " OVERTAKEN".to_string(),
            (n, _) => format!(" x{n}"),
        };
        if !self.quiet {
            let text = print::frames(&flight.frames);
            self.log(format_args!("{from} -> {to} {text}{what}"));
        }
        if in_order && !held && copies > 0 {
            let last = self.last_due.entry((Some(from.clone()), to.clone())).or_insert(due);
            *last = (*last).max(due);
            due = *last;
        }
        for _ in 0..copies {
            self.put(flight.from.clone(), to.clone(), flight.frames.clone(), (!held).then_some(due));
        }
        Ok(())
    }
}

/// The control plane of one endpoint of a [`SimNet`]. Dropping it unbinds the endpoint, as the end of a process does.
pub struct SimControl {
    net: SimNet,
    endpoint: Endpoint,
    bind: u64,
    /// Ticked, and not flushed since: what is sent now would be looked after too late.
    ticked: bool,
}

impl SimControl {
    /// Where it is bound.
    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    fn is_bound(&self, inner: &Inner) -> bool {
        inner.ports.get(&self.endpoint).is_some_and(|p| p.bound == Some(self.bind))
    }
}

impl ControlPlane for SimControl {
    fn send(&mut self, to: &Endpoint, message: Multipart) -> Result<(), ControlError> {
        assert!(!self.ticked, "a step sends to {to} after its tick");
        let mut inner = self.net.lock();
        if !self.is_bound(&inner) {
            let reason = format!("{} has crashed", self.endpoint);
            return Err(ControlError::Unreachable { endpoint: to.clone(), reason });
        }
        inner.send(&self.endpoint, to, message)
    }

    fn tick(&mut self, _now: Timestamp) -> Option<Timestamp> {
        self.ticked = true;
        None
    }

    fn flush(&mut self) -> bool {
        self.ticked = false;
        false
    }

    fn recv(&mut self, max: usize, out: &mut Vec<ControlEvent>) {
        let mut inner = self.net.lock();
        if !self.is_bound(&inner) {
            return;
        }
        let now = inner.now.now();
        let mut taken = 0;
        while taken < max {
            let port = inner.ports.get_mut(&self.endpoint).expect("bound");
            if let Some(event) = port.events.pop_front() {
                out.push(event);
                taken += 1;
                continue;
            }
            // Due first; among those due together, in order of sending, released ones before.
            let ready = |(_, f): &(usize, &Flight)| {
                f.to == self.endpoint && f.due.is_some_and(|d| d <= now) && inner.can_arrive(f)
            };
            let Some((i, _)) = inner.flights.iter().enumerate().filter(ready).min_by_key(|(i, f)| (f.due, *i)) else {
                break;
            };
            let flight = inner.flights.remove(i);
            out.push(ControlEvent::Message(flight.frames));
            taken += 1;
        }
    }

    fn close(&mut self, endpoint: &Endpoint) {
        let mut inner = self.net.lock();
        // What the peer's side has not got yet goes with the connection when nobody is there to get it.
        let bound = inner.ports.get(endpoint).is_some_and(|p| p.bound.is_some());
        if !bound {
            inner.flights.retain(|f| !(f.from.as_ref() == Some(&self.endpoint) && f.to == *endpoint));
        }
        inner.links.remove(&(self.endpoint.clone(), endpoint.clone()));
        inner.log(format_args!("{} closed {endpoint}", self.endpoint));
    }
}

impl Drop for SimControl {
    fn drop(&mut self) {
        let mut inner = self.net.lock();
        if self.is_bound(&inner) {
            inner.unbind(&self.endpoint, "unbound");
        }
    }
}
