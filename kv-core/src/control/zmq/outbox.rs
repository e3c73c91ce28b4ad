//! The sending half: one PUSH socket per endpoint, cached, bounded, whichever implementation makes the sockets.

use std::collections::{HashMap, VecDeque};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ZmqError;
use super::resolve::{Host, Resolver, Target, connect_host};
use crate::control::wake::WakeFd;
use crate::control::{ControlError, ControlEvent, Multipart};
use crate::limits::Limits;
use crate::net::Endpoint;
use crate::time::Timestamp;

/// How long a closed connection may still hand queued messages to the network. Who closes it does not wait; the end of
/// the outbox does, at most this long. SGLang uses 0: an evicted or closing manager then loses the final statuses it has
/// just queued, and the peers wait for their timeout.
pub(super) const LINGER: Duration = Duration::from_millis(500);

/// Give up on a connection that is not established after this long: prefill to decode (one attempt) ...
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
/// ... and decode to prefill, where it is tried again every 0.1 to 5 s. After this the endpoint is left alone until the
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
    /// Decode to prefill: reconnects by itself, and what waits is delivered then. A connection that breaks is reported as
    /// [`PeerLost`](ControlEvent::PeerLost), since what the peer was sent may be lost with it, and the one that is
    /// made next may reach another process. Reported again, and closed, when it stays down for a minute.
    ToPrefill,
}

/// How a message went.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Push {
    /// Whole, in the queue.
    Taken,
    /// Nothing of it: the queue is full, or there is no connection to queue for.
    Full,
    /// A part of it is gone with the connection: the socket must be closed.
    #[cfg(feature = "libzmq")]
    Torn(String),
}

/// How a connection is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Alive,
    Lost(String),
}

/// What to connect.
pub(super) struct Dial<'a> {
    pub role: PushRole,
    pub target: &'a Target,
    pub port: u16,
    /// Messages that may wait.
    pub max_queue: usize,
    /// Its name in [`Links::news`].
    pub token: u64,
}

/// Makes the sockets of one outbox.
pub(super) trait Links: Send {
    type Link: Link;

    /// Start to connect. The link takes messages at once.
    fn connect(&mut self, dial: Dial<'_>) -> Result<Self::Link, ZmqError>;

    /// Append the tokens of links that want [`Link::advance`]; waits for one at most `timeout`.
    fn news(&mut self, timeout: Duration, tokens: &mut Vec<u64>);

    /// Readable when there is such a link. `None`: the implementation has threads of its own.
    fn fd(&self) -> Option<RawFd>;
}

/// One PUSH socket.
pub(super) trait Link: Send {
    /// Queue all frames or none.
    fn push(&mut self, message: &Multipart) -> Push;
    /// Send what is queued, as far as the connection takes it.
    fn flush(&mut self) {}
    /// Its connection has news: go on as far as that allows.
    fn advance(&mut self) {}
    /// Look at the clock, for what waits for a time.
    fn tick(&mut self, _now: Timestamp) {}
    /// Whether the connection lives.
    fn look(&mut self) -> Seen;
    /// Why an established connection broke that the link makes anew by itself; said once.
    fn broke(&mut self) -> Option<String>;
    fn token(&self) -> u64;
    /// Whether the connection was established at the last look.
    fn is_up(&self) -> bool;
    /// Whether closing it now would lose nothing, as far as can be seen.
    fn has_room(&self) -> bool;
    /// Whether it has something to deliver and must be kept, closed or not, until it has.
    fn lingers(&self) -> bool;
    /// The peer is gone: nothing is delivered any more.
    fn abandon(&self) {}
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

struct Entry<L> {
    endpoint: Endpoint,
    state: State<L>,
    /// Something was queued since the last flush.
    dirty: bool,
    /// Sent to since the eviction hand last passed.
    used: bool,
    /// When the sweep first saw it without a connection.
    down_since: Option<Timestamp>,
}

enum State<L> {
    /// The host name is being looked up; messages wait here, in order.
    Resolving(Vec<Multipart>),
    Open(L),
}

impl<L: Link> Entry<L> {
    /// Closing it would lose nothing.
    fn is_idle(&self) -> bool {
        matches!(&self.state, State::Open(link) if link.is_up() && link.has_room())
    }
}

/// A closed socket that still delivers.
struct Closing<L> {
    link: L,
    until: Option<Timestamp>,
}

/// PUSH sockets by endpoint.
pub(super) struct Outbox<K: Links> {
    links: K,
    role: PushRole,
    max_sockets: usize,
    max_queue: usize,
    entries: Vec<Option<Entry<K::Link>>>,
    dirty: Vec<usize>,
    closing: Vec<Closing<K::Link>>,
    tokens: Vec<u64>,
    /// Links made so far: tells the news of a link from those of its predecessors in the same slot.
    made: u32,
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

impl<K: Links> Outbox<K> {
    /// An outbox with no sockets yet, bounded by `max_sockets` and `max_send_queue` of `limits`.
    pub fn new(links: K, role: PushRole, limits: &Limits) -> Self {
        Self {
            links,
            role,
            max_sockets: limits.max_sockets.max(1),
            // 0 means "no bound" to libzmq.
            max_queue: usize::try_from(limits.max_send_queue).unwrap_or(1).max(1),
            entries: Vec::new(),
            dirty: Vec::new(),
            closing: Vec::new(),
            tokens: Vec::new(),
            made: 0,
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

    /// See [`ZmqOutbox::set_wake`](super::ZmqOutbox::set_wake).
    pub fn set_wake(&mut self, wake: Arc<WakeFd>) {
        self.wake = Some(wake);
    }

    /// See [`ZmqOutbox::send`](super::ZmqOutbox::send).
    pub fn send(&mut self, to: &Endpoint, message: Multipart) -> Result<(), ControlError> {
        if message.is_empty() {
            return Ok(());
        }
        self.take_answers();
        let mut slot = self.slot_for(to)?;
        for attempt in 0.. {
            let Some(entry) = self.entries.get_mut(slot).and_then(Option::as_mut) else { break };
            entry.used = true;
            let link = match &mut entry.state {
                State::Resolving(held) if held.len() >= self.max_queue => break,
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
                    if !std::mem::replace(&mut entry.dirty, true) {
                        self.dirty.push(slot);
                    }
                    return Ok(());
                }
                // A full queue, or a connection that broke since the last look.
                Push::Full => match link.look() {
                    Seen::Alive => break,
                    Seen::Lost(reason) => reason,
                },
                #[cfg(feature = "libzmq")]
                Push::Torn(reason) => reason,
            };
            self.lose(slot, &reason);
            if attempt > 0 {
                return Err(ControlError::Unreachable { endpoint: to.clone(), reason });
            }
            slot = self.open(to)?;
        }
        self.counters.stalled += 1;
        Err(ControlError::Stalled { endpoint: to.clone(), queued: self.max_queue })
    }

    /// See [`ZmqOutbox::flush`](super::ZmqOutbox::flush).
    pub fn flush(&mut self) -> bool {
        for slot in std::mem::take(&mut self.dirty) {
            let Some(Some(entry)) = self.entries.get_mut(slot) else { continue };
            entry.dirty = false;
            if let State::Open(link) = &mut entry.state {
                link.flush();
            }
            self.lose_if_lost(slot);
        }
        !self.events.is_empty()
    }

    /// See [`ZmqOutbox::poll_events`](super::ZmqOutbox::poll_events).
    pub fn poll_events(&mut self, max: usize, out: &mut Vec<ControlEvent>) {
        self.drive();
        out.extend(self.events.drain(..max.min(self.events.len())));
    }

    /// See [`ZmqOutbox::close`](super::ZmqOutbox::close).
    pub fn close(&mut self, endpoint: &Endpoint) {
        if let Some(&slot) = self.index.get(endpoint) {
            self.let_go(slot);
        }
    }

    /// See [`ZmqOutbox::sweep`](super::ZmqOutbox::sweep).
    pub fn sweep(&mut self, now: Timestamp) -> Option<Timestamp> {
        self.take_answers();
        if self.index.is_empty() && self.closing.is_empty() {
            self.next_sweep = None;
            return None;
        }
        if let Some(at) = self.next_sweep.filter(|&at| now < at) {
            return Some(at);
        }
        self.drive();
        self.flush();
        self.closing.retain_mut(|c| {
            let until = *c.until.get_or_insert(now + LINGER);
            c.link.advance();
            c.link.lingers() && now < until
        });
        let total = self.entries.len();
        for _ in 0..total.min(SWEEP_MIN.max(total / 10)) {
            self.sweep_hand = (self.sweep_hand + 1) % total;
            self.look_over(self.sweep_hand, now);
        }
        self.next_sweep = (!self.index.is_empty() || !self.closing.is_empty()).then(|| now + SWEEP_EVERY);
        self.next_sweep
    }

    /// Readable when a connection has news.
    pub fn fd(&self) -> Option<RawFd> {
        self.links.fd()
    }

    /// Open sockets, and names being looked up.
    pub fn len(&self) -> usize {
        self.index.len()
    }

    /// Whether there is a socket for this endpoint.
    pub fn contains(&self, endpoint: &Endpoint) -> bool {
        self.index.contains_key(endpoint)
    }

    /// What was done so far.
    pub fn counters(&self) -> OutboxCounters {
        self.counters
    }

    /// Let the connections with news go on.
    fn drive(&mut self) {
        self.take_answers();
        let mut tokens = std::mem::take(&mut self.tokens);
        self.links.news(Duration::ZERO, &mut tokens);
        for token in tokens.drain(..) {
            self.advance(token);
        }
        self.tokens = tokens;
    }

    fn advance(&mut self, token: u64) {
        let slot = (token & u64::from(u32::MAX)) as usize;
        match self.entries.get_mut(slot) {
            Some(Some(Entry { state: State::Open(link), .. })) if link.token() == token => {
                link.advance();
                self.lose_if_lost(slot);
            }
            _ => {
                if let Some(at) = self.closing.iter().position(|c| c.link.token() == token) {
                    self.closing[at].link.advance();
                    if !self.closing[at].link.lingers() {
                        self.closing.swap_remove(at);
                    }
                }
            }
        }
    }

    fn lose_if_lost(&mut self, slot: usize) {
        if let Seen::Lost(reason) = self.look(slot) {
            self.lose(slot, &reason);
        }
    }

    /// How the slot's connection is; reports one that broke and is made anew.
    fn look(&mut self, slot: usize) -> Seen {
        let Some(Some(Entry { endpoint, state: State::Open(link), .. })) = self.entries.get_mut(slot) else {
            return Seen::Alive;
        };
        let seen = link.look();
        if let Some(reason) = link.broke() {
            self.counters.lost += 1;
            self.events.push_back(ControlEvent::PeerLost(endpoint.clone(), reason));
        }
        seen
    }

    /// The endpoint's slot with a socket that was alive a moment ago.
    fn slot_for(&mut self, to: &Endpoint) -> Result<usize, ControlError> {
        let Some(&slot) = self.index.get(to) else { return self.open(to) };
        match self.look(slot) {
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
        let slot = self.free.last().copied().unwrap_or(self.entries.len());
        let state = match host {
            Host::Address(target) => {
                State::Open(self.connect(to, &target, slot).map_err(|e| unreachable(e.to_string()))?)
            }
            Host::Name => {
                self.resolve(to).map_err(unreachable)?;
                State::Resolving(Vec::new())
            }
        };
        let entry = Entry { endpoint: to.clone(), state, dirty: false, used: true, down_since: None };
        match self.entries.get_mut(slot) {
            Some(place) => *place = Some(entry),
            None => self.entries.push(Some(entry)),
        }
        self.free.pop();
        self.index.insert(to.clone(), slot);
        Ok(slot)
    }

    fn connect(&mut self, to: &Endpoint, target: &Target, slot: usize) -> Result<K::Link, ZmqError> {
        self.made = self.made.wrapping_add(1);
        let token = u64::from(self.made) << 32 | slot as u64;
        let (role, port, max_queue) = (self.role, to.port(), self.max_queue);
        let link = self.links.connect(Dial { role, target, port, max_queue, token })?;
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
            // An endpoint closed and opened again while its name was looked up gets a second answer: no use for it.
            let Some(Some(Entry { state: State::Resolving(held), .. })) = self.entries.get_mut(slot) else { continue };
            let held = std::mem::take(held);
            let link = answer.and_then(|target| self.connect(&endpoint, &target, slot).map_err(|e| e.to_string()));
            let Some(Some(entry)) = self.entries.get_mut(slot) else { continue };
            let failed = link.and_then(|mut link| {
                // Fewer than the queue holds, on a socket that has just been made: they all fit.
                let all = held.iter().all(|message| matches!(link.push(message), Push::Taken));
                link.flush();
                entry.state = State::Open(link);
                all.then_some(()).ok_or_else(|| "the connection broke at once".to_owned())
            });
            if let Err(reason) = failed {
                self.lose(slot, &reason);
            }
        }
    }

    fn look_over(&mut self, slot: usize, now: Timestamp) {
        if let Some(Some(Entry { state: State::Open(link), .. })) = self.entries.get_mut(slot) {
            link.tick(now);
        }
        let seen = self.look(slot);
        let Some(Some(entry)) = self.entries.get_mut(slot) else { return };
        let (lost, up) = match (seen, &entry.state) {
            (Seen::Lost(reason), _) => (Some(reason), false),
            (Seen::Alive, State::Open(link)) => (None, link.is_up()),
            (Seen::Alive, State::Resolving(_)) => (None, false),
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
                // With libzmq, the look also brings the news that it is connected.
                let lost = match &mut entry.state {
                    State::Open(link) => link.look() != Seen::Alive,
                    State::Resolving(_) => false,
                };
                if !lost && !entry.is_idle() {
                    spared += 1;
                    continue;
                }
            }
            self.let_go(self.evict_hand);
            self.counters.evicted += 1;
            return;
        }
        // Everything is busy: the one under the hand goes, the bound holds.
        if let Some(slot) = (0..total).map(|i| (self.evict_hand + i) % total).find(|&s| self.entries[s].is_some()) {
            self.let_go(slot);
            self.counters.evicted += 1;
        }
    }

    /// Close a socket; what is queued may still leave.
    fn let_go(&mut self, slot: usize) {
        if let Some(Entry { state: State::Open(mut link), .. }) = self.remove(slot) {
            // Read as well: what is unread at the close would make the system throw away what it has still to send.
            link.advance();
            if link.lingers() {
                self.closing.push(Closing { link, until: None });
            }
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

    fn remove(&mut self, slot: usize) -> Option<Entry<K::Link>> {
        let entry = self.entries.get_mut(slot)?.take()?;
        self.index.remove(&entry.endpoint);
        self.free.push(slot);
        Some(entry)
    }
}

impl<K: Links> Drop for Outbox<K> {
    /// What is queued may still leave, for a moment.
    fn drop(&mut self) {
        self.flush();
        for slot in 0..self.entries.len() {
            self.let_go(slot);
        }
        let end = Instant::now() + LINGER;
        let mut tokens = Vec::new();
        while !self.closing.is_empty() {
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            self.links.news(left, &mut tokens);
            for token in tokens.drain(..) {
                self.advance(token);
            }
        }
    }
}
