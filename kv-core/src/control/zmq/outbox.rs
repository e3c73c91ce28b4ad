//! The sending half: one PUSH socket per endpoint, cached, bounded.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::link::{Link, Push, Seen};
use super::resolve::{Host, Resolver, Target, connect_host};
use super::{ZmqContext, ZmqError};
use crate::control::wake::WakeFd;
use crate::control::{ControlError, ControlEvent, Multipart};
use crate::limits::Limits;
use crate::net::Endpoint;
use crate::time::Timestamp;

/// How long a closed socket may still hand queued messages to the network, ms. The closing thread does not wait; the
/// end of the context does, at most this long. SGLang uses 0: an evicted or closing manager then loses the final
/// statuses it has just queued, and the peers wait for their timeout.
pub(super) const LINGER_MS: i32 = 500;

/// Give up on a connection that is not established after this long: prefill to decode (one attempt) ...
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// ... and decode to prefill, where libzmq tries again every 0.1 to 5 s. After this the endpoint is left alone until the
/// next send (F53).
const RECONNECT_FOR: Duration = Duration::from_secs(60);

/// How often [`ZmqOutbox::sweep`] looks at a part of the sockets.
const SWEEP_EVERY: Duration = Duration::from_millis(100);
/// Sockets per look: all of a small cache, a tenth of a large one, so each about once a second.
const SWEEP_MIN: usize = 64;

/// Steps an eviction may take past sockets that still have something to deliver.
const EVICT_LOOK: usize = 256;

/// Which way the messages go; decides how the sockets treat a broken connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PushRole {
    /// Prefill to decode: never reconnects by itself. A broken connection is reported as
    /// [`PeerLost`](ControlEvent::PeerLost), closed, and made anew by the next send.
    ToDecode,
    /// Decode to prefill: reconnects by itself, and what waits is delivered then. Reported as lost when the
    /// connection stays down for a minute.
    ToPrefill,
}

/// What an outbox did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OutboxCounters {
    /// Whole messages taken.
    pub messages: u64,
    /// Sockets opened (F58: one per endpoint, not one per message).
    pub opened: u64,
    /// Sockets closed to make room.
    pub evicted: u64,
    /// Connections reported as lost.
    pub lost: u64,
    /// Messages refused because a queue was full.
    pub stalled: u64,
}

struct Entry {
    endpoint: Endpoint,
    state: State,
    /// Sent to since the eviction hand last passed.
    used: bool,
    /// When the sweep first saw it without a connection.
    down_since: Option<Timestamp>,
}

enum State {
    /// The host name is being looked up; messages wait here, in order.
    Resolving(Vec<Multipart>),
    Open(Link),
}

impl Entry {
    /// Closing it would lose nothing, as far as libzmq lets one see.
    fn is_idle(&self) -> bool {
        matches!(&self.state, State::Open(link) if link.is_up() && link.has_room())
    }
}

/// PUSH sockets by endpoint. Used by one thread at a time.
///
/// Messages to one endpoint arrive in the order sent while its connection lives. No call blocks.
pub struct ZmqOutbox {
    context: ZmqContext,
    role: PushRole,
    max_sockets: usize,
    max_queue: i32,
    entries: Vec<Option<Entry>>,
    free: Vec<usize>,
    index: HashMap<Endpoint, usize>,
    evict_hand: usize,
    sweep_hand: usize,
    next_sweep: Option<Timestamp>,
    events: VecDeque<ControlEvent>,
    resolver: Option<Resolver>,
    wake: Option<Arc<WakeFd>>,
    counters: OutboxCounters,
}

impl ZmqOutbox {
    /// An outbox with no sockets yet, bounded by `max_sockets` and `max_send_queue` of `limits`.
    pub fn new(context: &ZmqContext, role: PushRole, limits: &Limits) -> Self {
        Self {
            context: context.clone(),
            role,
            max_sockets: limits.max_sockets.max(1),
            // 0 means "no bound" to libzmq.
            max_queue: limits.max_send_queue.max(1),
            entries: Vec::new(),
            free: Vec::new(),
            index: HashMap::new(),
            evict_hand: 0,
            sweep_hand: 0,
            next_sweep: None,
            events: VecDeque::new(),
            resolver: None,
            wake: None,
            counters: OutboxCounters::default(),
        }
    }

    /// Wake this when a host name has been looked up, so that what waits for it leaves before the next sweep. To be
    /// set before the first send.
    pub fn set_wake(&mut self, wake: Arc<WakeFd>) {
        self.wake = Some(wake);
    }

    /// Queue a whole message, or nothing of it. Never blocks. A message without frames is not a message and is dropped.
    ///
    /// # Errors
    /// [`ControlError::Stalled`] when the peer's queue is full (F64); [`ControlError::Unreachable`] when there cannot
    /// be a connection: no such host text, no sockets left, or the connection broke twice within this call.
    pub fn send(&mut self, to: &Endpoint, message: Multipart) -> Result<(), ControlError> {
        if message.is_empty() {
            return Ok(());
        }
        self.take_answers();
        let mut slot = self.ready(to)?;
        for attempt in 0.. {
            let Some(entry) = self.entries.get_mut(slot).and_then(Option::as_mut) else { break };
            entry.used = true;
            let link = match &mut entry.state {
                State::Resolving(held) if held.len() >= self.max_queue as usize => break,
                State::Resolving(held) => {
                    held.push(message);
                    self.counters.messages += 1;
                    return Ok(());
                }
                State::Open(link) => link,
            };
            let reason = match link.push(&message) {
                Push::Taken => {
                    self.counters.messages += 1;
                    return Ok(());
                }
                // A full queue, or a connection that broke since the last look.
                Push::Full => match link.look(self.role) {
                    Seen::Alive => break,
                    Seen::Lost(reason) => reason,
                },
                Push::Torn(reason) => reason,
            };
            self.lose(slot, &reason);
            if attempt > 0 {
                return Err(ControlError::Unreachable { endpoint: to.clone(), reason });
            }
            slot = self.open(to)?;
        }
        self.counters.stalled += 1;
        Err(ControlError::Stalled { endpoint: to.clone(), queued: self.max_queue as usize })
    }

    /// Move at most `max` [`PeerLost`](ControlEvent::PeerLost) events to `out`. Never blocks, looks at no socket.
    pub fn poll_events(&mut self, max: usize, out: &mut Vec<ControlEvent>) {
        self.take_answers();
        out.extend(self.events.drain(..max.min(self.events.len())));
    }

    /// Close an endpoint's socket; what is queued may still leave for half a second. Nothing is reported.
    pub fn close(&mut self, endpoint: &Endpoint) {
        if let Some(&slot) = self.index.get(endpoint) {
            self.remove(slot);
        }
    }

    /// Look at a part of the sockets for broken connections and for ones that never came up; returns when to be called
    /// again. Sockets in use are looked at by `send` anyway, so this is slow on purpose.
    pub fn sweep(&mut self, now: Timestamp) -> Option<Timestamp> {
        self.take_answers();
        if self.index.is_empty() {
            self.next_sweep = None;
            return None;
        }
        if let Some(at) = self.next_sweep.filter(|&at| now < at) {
            return Some(at);
        }
        let total = self.entries.len();
        for _ in 0..total.min(SWEEP_MIN.max(total / 10)) {
            self.sweep_hand = (self.sweep_hand + 1) % total;
            self.look_over(self.sweep_hand, now);
        }
        self.next_sweep = Some(now + SWEEP_EVERY);
        self.next_sweep
    }

    /// Open sockets, and names being looked up.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether there is no socket.
    pub fn is_empty(&self) -> bool {
        self.index.is_empty()
    }

    /// Whether there is a socket for this endpoint.
    pub fn contains(&self, endpoint: &Endpoint) -> bool {
        self.index.contains_key(endpoint)
    }

    /// What was done so far.
    pub fn counters(&self) -> OutboxCounters {
        self.counters
    }

    /// The endpoint's slot with a socket that was alive a moment ago.
    fn ready(&mut self, to: &Endpoint) -> Result<usize, ControlError> {
        let Some(&slot) = self.index.get(to) else { return self.open(to) };
        let seen = match self.entries.get_mut(slot).and_then(Option::as_mut) {
            Some(Entry { state: State::Open(link), .. }) => link.look(self.role),
            _ => Seen::Alive,
        };
        match seen {
            Seen::Alive => Ok(slot),
            Seen::Lost(reason) => {
                self.lose(slot, &reason);
                self.open(to)
            }
        }
    }

    fn open(&mut self, to: &Endpoint) -> Result<usize, ControlError> {
        let unreachable = |reason: String| ControlError::Unreachable { endpoint: to.clone(), reason };
        if to.port() == 0 {
            return Err(unreachable("port 0".to_owned()));
        }
        let host = connect_host(to.host()).map_err(unreachable)?;
        if self.index.len() >= self.max_sockets {
            self.evict();
        }
        let state = match host {
            Host::Address(target) => State::Open(self.connect(to, &target).map_err(|e| unreachable(e.to_string()))?),
            Host::Name => {
                self.resolve(to).map_err(unreachable)?;
                State::Resolving(Vec::new())
            }
        };
        let entry = Entry { endpoint: to.clone(), state, used: true, down_since: None };
        let slot = self.free.pop().unwrap_or(self.entries.len());
        match self.entries.get_mut(slot) {
            Some(place) => *place = Some(entry),
            None => self.entries.push(Some(entry)),
        }
        self.index.insert(to.clone(), slot);
        Ok(slot)
    }

    fn connect(&mut self, to: &Endpoint, target: &Target) -> Result<Link, ZmqError> {
        let link = Link::connect(&self.context, self.role, target, to.port(), self.max_queue)?;
        self.counters.opened += 1;
        Ok(link)
    }

    fn resolve(&mut self, to: &Endpoint) -> Result<(), String> {
        let resolver = match self.resolver.take() {
            Some(resolver) => resolver,
            None => Resolver::start(self.wake.clone()).map_err(|e| format!("no thread to look names up: {e}"))?,
        };
        let asked = resolver.ask(to.clone());
        self.resolver = asked.then_some(resolver);
        asked.then_some(()).ok_or_else(|| "the thread that looks names up is gone".to_owned())
    }

    /// Connect what has been looked up, and send what waited for it.
    fn take_answers(&mut self) {
        while let Some((endpoint, answer)) = self.resolver.as_ref().and_then(Resolver::answer) {
            let Some(&slot) = self.index.get(&endpoint) else { continue };
            let link = answer.and_then(|target| self.connect(&endpoint, &target).map_err(|e| e.to_string()));
            let Some(Some(entry)) = self.entries.get_mut(slot) else { continue };
            // An endpoint closed and opened again while its name was looked up gets a second answer: no use for it.
            let State::Resolving(held) = &mut entry.state else { continue };
            let held = std::mem::take(held);
            let failed = link.and_then(|mut link| {
                // Fewer than the queue holds, on a socket that has just been made: they all fit.
                let all = held.iter().all(|message| matches!(link.push(message), Push::Taken));
                entry.state = State::Open(link);
                all.then_some(()).ok_or_else(|| "the connection broke at once".to_owned())
            });
            if let Err(reason) = failed {
                self.lose(slot, &reason);
            }
        }
    }

    fn look_over(&mut self, slot: usize, now: Timestamp) {
        let Some(Some(entry)) = self.entries.get_mut(slot) else { return };
        let (lost, up) = match &mut entry.state {
            State::Resolving(_) => (None, false),
            State::Open(link) => match link.look(self.role) {
                Seen::Lost(reason) => (Some(reason), false),
                Seen::Alive => (None, link.is_up()),
            },
        };
        let lost = lost.or_else(|| {
            if up {
                entry.down_since = None;
                return None;
            }
            let patience = match self.role {
                PushRole::ToDecode => CONNECT_TIMEOUT,
                PushRole::ToPrefill => RECONNECT_FOR,
            };
            let since = *entry.down_since.get_or_insert(now);
            (now.since(since) >= patience).then(|| format!("no connection for {} s", patience.as_secs()))
        });
        if let Some(reason) = lost {
            self.lose(slot, &reason);
        }
    }

    /// Make room: close the socket not used for longest (one pass of a clock hand, so about that), sparing those that
    /// still have something to deliver unless there are many.
    fn evict(&mut self) {
        let total = self.entries.len();
        let mut spared = 0;
        // Two rounds: the first may only take `used` marks down.
        for _ in 0..2 * total + 1 {
            self.evict_hand = (self.evict_hand + 1) % total.max(1);
            let Some(Some(entry)) = self.entries.get_mut(self.evict_hand) else { continue };
            if std::mem::take(&mut entry.used) {
                continue;
            }
            if spared < EVICT_LOOK.min(total) {
                // The look also brings the news that it is connected.
                let lost = match &mut entry.state {
                    State::Open(link) => link.look(self.role) != Seen::Alive,
                    State::Resolving(_) => false,
                };
                if !lost && !entry.is_idle() {
                    spared += 1;
                    continue;
                }
            }
            let slot = self.evict_hand;
            self.remove(slot);
            self.counters.evicted += 1;
            return;
        }
        // Everything is busy: the one under the hand goes, the bound holds.
        if let Some(slot) = (0..total).map(|i| (self.evict_hand + i) % total).find(|&s| self.entries[s].is_some()) {
            self.remove(slot);
            self.counters.evicted += 1;
        }
    }

    fn lose(&mut self, slot: usize, reason: &str) {
        if let Some(entry) = self.remove(slot) {
            if let State::Open(link) = &entry.state {
                link.abandon();
            }
            self.counters.lost += 1;
            self.events.push_back(ControlEvent::PeerLost(entry.endpoint, reason.to_owned()));
        }
    }

    fn remove(&mut self, slot: usize) -> Option<Entry> {
        let entry = self.entries.get_mut(slot)?.take()?;
        self.index.remove(&entry.endpoint);
        self.free.push(slot);
        Some(entry)
    }
}
