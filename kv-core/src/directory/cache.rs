//! The directory as a state machine: what to ask, what to remember, when to ask again, whom to watch. No I/O, no clock.
//!
//! Order of calls: feed [`handle_request`](DirectoryCore::handle_request), [`handle_answer`](DirectoryCore::handle_answer)
//! and [`handle_timeout`](DirectoryCore::handle_timeout), then take every [`poll_effect`](DirectoryCore::poll_effect),
//! then sleep until [`poll_timeout`](DirectoryCore::poll_timeout). Each [`Effect::Call`] must be answered once, unless it is cancelled.
//!
//! Everything known of a server belongs to one *life* of it: when it is lost, all of that goes, for exactly that
//! address, and answers still under way are ignored.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::compat::{self, DecodeProfile};
use super::heartbeat::HeartbeatConfig;
use super::server_state::{Server, Waiter};
use super::{DirectoryEvent, DirectoryRequest, PrefillPeers};
use crate::bootstrap::address::split_host_port;
use crate::bootstrap::types::{ParallelInfo, RankAddress, RankKey, RegistryError};
use crate::ids::Room;
use crate::limits::Limits;
use crate::time::Timestamp;
use crate::topology::RankMapping;

/// How a directory behaves.
#[derive(Clone, Debug)]
pub struct DirectoryConfig {
    /// The decode rank it resolves for; `None` on prefill, which only registers DP ranks.
    pub decode: Option<DecodeProfile>,
    /// How servers are watched.
    pub heartbeat: HeartbeatConfig,
    /// Shortest time between two fetches of one server's sizes, and how long a refusal is remembered.
    pub min_refetch: Duration,
    /// Fetches of a server's sizes before its rooms are given up.
    pub max_attempts: u32,
    /// Time between two questions for the DP ranks of rooms that no prefill has claimed yet.
    pub dp_query_interval: Duration,
    /// How long a room waits to be claimed.
    pub dp_query_timeout: Duration,
    /// Ask for every room's DP rank (`SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK`).
    pub force_query_dp_rank: bool,
    /// `max_rooms` bounds rooms that wait, `max_peers` servers, `max_text_bytes` host names.
    pub limits: Limits,
}

impl DirectoryConfig {
    /// SGLang's settings, for a decode rank.
    pub fn decode(profile: DecodeProfile) -> Self {
        Self { decode: Some(profile), ..Self::prefill() }
    }

    /// SGLang's settings, for a prefill rank.
    pub fn prefill() -> Self {
        Self {
            decode: None,
            heartbeat: HeartbeatConfig::default(),
            min_refetch: Duration::from_secs(1),
            max_attempts: 15,
            dp_query_interval: Duration::from_millis(100),
            dp_query_timeout: Duration::from_secs(300),
            force_query_dp_rank: false,
            limits: Limits::default(),
        }
    }
}

/// Names a call until its answer comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(u64);

#[cfg(test)]
impl CallId {
    pub(super) fn of(n: u64) -> Self {
        Self(n)
    }
}

/// A question to a registry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Call {
    /// [`Registry::parallel_info`](crate::bootstrap::Registry::parallel_info).
    ParallelInfo,
    /// [`Registry::rank_address`](crate::bootstrap::Registry::rank_address).
    RankAddress(RankKey),
    /// [`Registry::query_dp_ranks`](crate::bootstrap::Registry::query_dp_ranks).
    QueryDpRanks(Vec<Room>),
    /// [`Registry::register_dp_rank`](crate::bootstrap::Registry::register_dp_rank).
    RegisterDpRank(Room, u32),
    /// [`Registry::health`](crate::bootstrap::Registry::health).
    Health,
}

/// The answer to a [`Call`] of the same name.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    /// Sizes and flags.
    ParallelInfo(Result<ParallelInfo, RegistryError>),
    /// One rank's address.
    RankAddress(Result<RankAddress, RegistryError>),
    /// The rooms that are known.
    QueryDpRanks(Result<Vec<(Room, u32)>, RegistryError>),
    /// Remembered.
    RegisterDpRank(Result<(), RegistryError>),
    /// Alive.
    Health(Result<(), RegistryError>),
}

/// What the state machine wants done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Ask `addr`; the answer goes to [`DirectoryCore::handle_answer`].
    Call {
        /// For the answer.
        id: CallId,
        /// Which server.
        addr: Arc<str>,
        /// What.
        call: Call,
    },
    /// The call is not wanted any more: if it was not made yet, it need not be. If it was, its answer is ignored.
    Cancel {
        /// Which.
        id: CallId,
        /// To which server.
        addr: Arc<str>,
    },
    /// Tell the shard.
    Event(DirectoryEvent),
}

/// What is known of a compatible server.
#[derive(Debug, PartialEq)]
pub(super) struct Known {
    pub info: ParallelInfo,
    pub mapping: RankMapping,
}

/// Where an answer belongs.
#[derive(Debug)]
enum Place {
    Info,
    Address { dp: u32, pool: u64, index: usize },
    DpQuery,
    Register { token: u64 },
    Health,
}

#[derive(Debug)]
struct Pending {
    addr: Arc<str>,
    life: u64,
    place: Place,
}

/// What servers share: settings, effects, numbers.
#[derive(Debug)]
pub(super) struct Shared {
    pub config: DirectoryConfig,
    effects: VecDeque<Effect>,
    pending: HashMap<CallId, Pending>,
    next: u64,
    /// Rooms that were asked for and have no answer yet.
    waiting: usize,
}

impl Shared {
    /// A number that was not given out before.
    pub fn unique(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn call(&mut self, addr: &Arc<str>, life: u64, place: Place, call: Call) {
        let id = CallId(self.unique());
        self.pending.insert(id, Pending { addr: Arc::clone(addr), life, place });
        self.effects.push_back(Effect::Call { id, addr: Arc::clone(addr), call });
    }

    /// One pass of what is under way: rooms that end while their claim is not answered are few.
    fn cancel(&mut self, register: u64) {
        let found = |p: &Pending| matches!(p.place, Place::Register { token } if token == register);
        let Some(id) = self.pending.iter().find(|(_, p)| found(p)).map(|(id, _)| *id) else { return };
        if let Some(Pending { addr, .. }) = self.pending.remove(&id) {
            self.effects.push_back(Effect::Cancel { id, addr });
        }
    }

    pub fn fetch_info(&mut self, addr: &Arc<str>, life: u64) {
        self.call(addr, life, Place::Info, Call::ParallelInfo);
    }

    pub fn fetch_address(&mut self, addr: &Arc<str>, life: u64, pool: u64, index: usize, key: RankKey) {
        self.call(addr, life, Place::Address { dp: key.dp, pool, index }, Call::RankAddress(key));
    }

    pub fn query_dp_ranks(&mut self, addr: &Arc<str>, life: u64, rooms: Vec<Room>) {
        self.call(addr, life, Place::DpQuery, Call::QueryDpRanks(rooms));
    }

    pub fn probe(&mut self, addr: &Arc<str>, life: u64) {
        self.call(addr, life, Place::Health, Call::Health);
    }

    /// Answers one room that waited.
    pub fn answer(&mut self, waiter: &Waiter, result: Result<Arc<PrefillPeers>, String>) {
        self.waiting -= 1;
        self.event(DirectoryEvent::Peers { token: waiter.token, result });
    }

    pub fn event(&mut self, event: DirectoryEvent) {
        self.effects.push_back(Effect::Event(event));
    }

    /// Whether ranks of a server that may be of 0.5.23 survive our registration.
    pub fn check_0_5_23(&self, info: &ParallelInfo) -> Result<(), String> {
        let Some(profile) = &self.config.decode else { return Ok(()) };
        compat::check_0_5_23(profile, info).map_err(|e| e.to_string())
    }

    /// The mapping onto a server, if it fits.
    pub fn check(&self, info: &ParallelInfo) -> Result<RankMapping, String> {
        match &self.config.decode {
            Some(profile) => compat::check(profile, info).map_err(|e| e.to_string()),
            None => Err("this directory belongs to a prefill rank".into()),
        }
    }
}

/// The directory of one manager.
#[derive(Debug)]
pub struct DirectoryCore {
    shared: Shared,
    servers: HashMap<Arc<str>, Server>,
}

impl DirectoryCore {
    /// A directory that knows nothing yet.
    pub fn new(config: DirectoryConfig) -> Self {
        let (effects, pending) = (VecDeque::new(), HashMap::new());
        Self { shared: Shared { config, effects, pending, next: 0, waiting: 0 }, servers: HashMap::new() }
    }

    /// Starts a request.
    pub fn handle_request(&mut self, now: Timestamp, request: DirectoryRequest) {
        match request {
            DirectoryRequest::Peers { token, room, bootstrap_addr, prefill_dp_rank } => {
                let waiter = Waiter { token, room, dp_rank: prefill_dp_rank, asked: now };
                self.shared.waiting += 1;
                if let Err(reason) = self.admit(now, &bootstrap_addr) {
                    return self.shared.answer(&waiter, Err(reason));
                }
                let addr: Arc<str> = Arc::from(bootstrap_addr);
                let life = self.shared.unique();
                let server = self.servers.entry(Arc::clone(&addr)).or_insert_with(|| Server::new(addr, life, now));
                server.ask(&mut self.shared, now, waiter);
            }
            DirectoryRequest::Forget { pool_key } => {
                // The key's text is not taken apart: hosts may hold any of its characters.
                for server in self.servers.values_mut() {
                    server.forget(&pool_key);
                }
            }
            DirectoryRequest::RegisterDpRank { token, bootstrap_addr, room, dp_rank } => {
                let most = self.shared.config.limits.max_rooms;
                if self.shared.pending.len() >= most {
                    let result = Err(format!("{most} questions are under way already"));
                    return self.shared.event(DirectoryEvent::DpRankRegistered { token, result });
                }
                let addr = Arc::from(bootstrap_addr);
                self.shared.call(&addr, 0, Place::Register { token }, Call::RegisterDpRank(room, dp_rank));
            }
            DirectoryRequest::CancelDpRank { token } => self.shared.cancel(token),
        }
    }

    fn admit(&mut self, now: Timestamp, addr: &str) -> Result<(), String> {
        let config = &self.shared.config;
        if config.decode.is_none() {
            return Err(format!("Could not ask bootstrap_addr: {addr}: this directory belongs to a prefill rank"));
        }
        split_host_port(addr).map_err(|e| format!("Could not ask bootstrap_addr: {e}"))?;
        if self.shared.waiting > config.limits.max_rooms {
            let most = config.limits.max_rooms;
            return Err(format!("Could not ask bootstrap_addr: {addr}: {most} rooms wait for an answer already"));
        }
        let most = config.limits.max_peers;
        if self.servers.len() >= most && !self.servers.contains_key(addr) {
            self.drop_idle(now);
            if self.servers.len() >= most {
                return Err(format!("Could not ask bootstrap_addr: {addr}: {most} prefill servers are known already"));
            }
        }
        Ok(())
    }

    /// Takes an answer. One that belongs to an earlier life of its server is ignored.
    pub fn handle_answer(&mut self, now: Timestamp, id: CallId, answer: Answer) {
        let Some(Pending { addr, life, place }) = self.shared.pending.remove(&id) else { return };
        let (place, answer) = match (place, answer) {
            (Place::Register { token }, Answer::RegisterDpRank(result)) => {
                let result = result.map_err(|e| e.to_string());
                return self.shared.event(DirectoryEvent::DpRankRegistered { token, result });
            }
            other => other,
        };
        let Some(server) = self.servers.get_mut(&addr).filter(|s| s.life() == life) else { return };
        let shared = &mut self.shared;
        match (place, answer) {
            (Place::Info, Answer::ParallelInfo(result)) => server.on_info(shared, now, result),
            (Place::Address { dp, pool, index }, Answer::RankAddress(result)) => {
                server.on_address(shared, now, dp, pool, index, result);
            }
            (Place::DpQuery, Answer::QueryDpRanks(result)) => server.on_dp_ranks(shared, now, result),
            (Place::Health, Answer::Health(result)) => {
                if server.on_health(result.is_ok()) {
                    self.lose(&addr);
                }
            }
            (place, answer) => debug_assert!(false, "{answer:?} does not answer {place:?}"),
        }
    }

    /// Drops everything known of a server: its rooms fail, its next life is registered with anew (protocol 7.5). It is
    /// not probed any more (F53).
    fn lose(&mut self, addr: &Arc<str>) {
        let Some(server) = self.servers.remove(addr) else { return };
        let reason = format!("Lost connection with prefill instance (bootstrap_addr: {addr})");
        server.fail_all(&mut self.shared, &reason);
        self.shared.event(DirectoryEvent::NodeLost { bootstrap_addr: addr.to_string(), reason });
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Timestamp) {
        for server in self.servers.values_mut() {
            server.on_timeout(&mut self.shared, now);
        }
        self.drop_idle(now);
    }

    fn drop_idle(&mut self, now: Timestamp) {
        self.servers.retain(|_, server| !server.is_idle(now));
    }

    /// The next effect, in order.
    pub fn poll_effect(&mut self) -> Option<Effect> {
        self.shared.effects.pop_front()
    }

    /// When [`handle_timeout`](Self::handle_timeout) has something to do.
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        self.servers.values().filter_map(Server::poll_timeout).min()
    }

    /// Servers that are remembered.
    pub fn servers(&self) -> usize {
        self.servers.len()
    }

    /// Rooms without an answer yet.
    pub fn waiting(&self) -> usize {
        self.shared.waiting
    }
}

#[cfg(test)]
#[path = "cache_tests.rs"]
mod tests;
