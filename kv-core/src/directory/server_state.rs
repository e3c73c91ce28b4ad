//! What a directory remembers of one prefill server, during one life of it.

use std::collections::HashMap;
use std::sync::Arc;

use super::cache::{Known, Shared};
use super::heartbeat::Heartbeat;
use super::{PrefillPeers, PrefillRecord};
use crate::bootstrap::types::{ParallelInfo, RankAddress, RankKey, RegistryError};
use crate::ids::Room;
use crate::time::Timestamp;
use crate::topology::Connection;

/// Rooms in one question for DP ranks; keeps the body far below the server's limit.
const ROOMS_PER_QUERY: usize = 4096;

/// One room that waits for its peers.
#[derive(Clone, Debug)]
pub(super) struct Waiter {
    pub token: u64,
    pub room: Room,
    pub dp_rank: Option<u32>,
    pub asked: Timestamp,
}

/// Fetching the sizes: one question at a time, whatever the number of rooms (F75).
#[derive(Debug)]
struct InfoFetch {
    in_flight: bool,
    /// Not before this.
    next: Timestamp,
    attempts: u32,
    /// First attempt of this series.
    started: Timestamp,
}

#[derive(Debug)]
enum Pool {
    /// Addresses are being fetched, one question each; `id` tells this fetch from an earlier one of the same group.
    Fetching {
        id: u64,
        connections: Vec<Connection>,
        records: Vec<Option<PrefillRecord>>,
        waiters: Vec<Waiter>,
    },
    Ready(Arc<PrefillPeers>),
    /// Remembered for a moment, so that many rooms do not ask the same in vain (F75), but never longer (F51).
    Failed {
        reason: String,
        until: Timestamp,
    },
}

#[derive(Debug)]
pub(super) struct Server {
    addr: Arc<str>,
    life: u64,
    known: Option<Arc<Known>>,
    /// The sizes must be fetched anew before the next room.
    stale: bool,
    fetch: InfoFetch,
    refused: Option<(String, Timestamp)>,
    waiting: Vec<Waiter>,
    /// By DP group.
    pools: HashMap<u32, Pool>,
    /// Rooms that no prefill rank has claimed yet.
    unclaimed: HashMap<Room, Vec<Waiter>>,
    dp_queries: usize,
    dp_next: Timestamp,
    dp_error: Option<String>,
    heartbeat: Option<Heartbeat>,
}

impl Server {
    pub fn new(addr: Arc<str>, life: u64, now: Timestamp) -> Self {
        Self {
            addr,
            life,
            known: None,
            stale: false,
            fetch: InfoFetch { in_flight: false, next: now, attempts: 0, started: now },
            refused: None,
            waiting: Vec::new(),
            pools: HashMap::new(),
            unclaimed: HashMap::new(),
            dp_queries: 0,
            dp_next: now,
            dp_error: None,
            heartbeat: None,
        }
    }

    pub fn life(&self) -> u64 {
        self.life
    }

    /// A room wants its peers.
    pub fn ask(&mut self, shared: &mut Shared, now: Timestamp, waiter: Waiter) {
        if let Some((reason, _)) = self.refused.as_ref().filter(|(_, until)| now < *until) {
            return shared.answer(&waiter, Err(reason.clone()));
        }
        match self.known.clone() {
            Some(known) if !self.stale => self.choose_dp_rank(shared, now, &known, waiter),
            _ => {
                self.waiting.push(waiter);
                self.fetch_info(shared, now);
            }
        }
    }

    fn fetch_info(&mut self, shared: &mut Shared, now: Timestamp) {
        if self.waiting.is_empty() || self.fetch.in_flight || now < self.fetch.next {
            return;
        }
        if self.fetch.attempts == 0 {
            self.fetch.started = now;
        }
        self.fetch.in_flight = true;
        self.fetch.attempts += 1;
        self.fetch.next = now + shared.config.min_refetch;
        shared.fetch_info(&self.addr, self.life);
    }

    /// The sizes arrived, or not.
    pub fn on_info(&mut self, shared: &mut Shared, now: Timestamp, result: Result<ParallelInfo, RegistryError>) {
        self.fetch.in_flight = false;
        let info = match result {
            Ok(info) => info,
            Err(error) => return self.info_failed(shared, now, &error),
        };
        self.fetch.attempts = 0;
        let mapping = match shared.check(&info) {
            Ok(mapping) => mapping,
            Err(reason) => {
                let reason =
                    format!("Prefill at bootstrap_addr: {} does not fit this decode rank: {reason}", self.addr);
                self.refused = Some((reason.clone(), now + shared.config.min_refetch));
                // It is not one of ours: nothing stays cached, nothing is watched.
                (self.known, self.heartbeat) = (None, None);
                return self.drain(shared, &reason);
            }
        };
        let known = Arc::new(Known { info, mapping });
        let mut again = std::mem::take(&mut self.waiting);
        if self.known.as_ref().is_some_and(|old| *old != known) {
            // Another server behind the same address: addresses of the old one mean nothing.
            again.extend(self.take_waiters());
        }
        self.known = Some(Arc::clone(&known));
        self.stale = false;
        // What failed with the sizes of before is tried again with these.
        self.pools.retain(|_, pool| !matches!(pool, Pool::Failed { .. }));
        self.heartbeat.get_or_insert_with(|| Heartbeat::new(now, shared.config.heartbeat));
        for waiter in again {
            self.choose_dp_rank(shared, now, &known, waiter);
        }
    }

    fn info_failed(&mut self, shared: &mut Shared, now: Timestamp, error: &RegistryError) {
        tracing::debug!(addr = %self.addr, attempt = self.fetch.attempts, %error, "no parallel info yet");
        if self.fetch.attempts < shared.config.max_attempts.max(1) {
            return;
        }
        let what_to_do = match error {
            RegistryError::NotReady(_) => "start the missing prefill ranks, or see why they could not register",
            RegistryError::Unreachable(_) => {
                "check that the prefill server runs and that its --disaggregation-bootstrap-port can be reached from here"
            }
            _ => "check that a bootstrap server listens at this address",
        };
        let reason = format!(
            "Could not fetch prefill parallel info from bootstrap_addr: {}: {} attempts in {:.1} s, last: {error}; {what_to_do}",
            self.addr,
            self.fetch.attempts,
            now.since(self.fetch.started).as_secs_f64(),
        );
        self.fetch.attempts = 0;
        for waiter in std::mem::take(&mut self.waiting) {
            shared.answer(&waiter, Err(reason.clone()));
        }
    }

    /// Protocol 2.5: the request's own choice; the only group; by room; as prefill claims it.
    fn choose_dp_rank(&mut self, shared: &mut Shared, now: Timestamp, known: &Known, waiter: Waiter) {
        let size = known.info.dp_size;
        let dp = match waiter.dp_rank {
            Some(dp) => dp,
            None if size == 1 => 0,
            None if known.info.follow_bootstrap_room && !shared.config.force_query_dp_rank => {
                // Below `size`, so it fits.
                (waiter.room.get() % u64::from(size)) as u32
            }
            None => {
                self.unclaimed.entry(waiter.room).or_default().push(waiter);
                return self.query_dp_ranks(shared, now);
            }
        };
        self.use_pool(shared, now, known, dp, waiter);
    }

    fn query_dp_ranks(&mut self, shared: &mut Shared, now: Timestamp) {
        if self.unclaimed.is_empty() || self.dp_queries > 0 || now < self.dp_next {
            return;
        }
        self.dp_next = now + shared.config.dp_query_interval;
        let rooms: Vec<Room> = self.unclaimed.keys().copied().collect();
        for rooms in rooms.chunks(ROOMS_PER_QUERY) {
            self.dp_queries += 1;
            shared.query_dp_ranks(&self.addr, self.life, rooms.to_vec());
        }
    }

    pub fn on_dp_ranks(
        &mut self,
        shared: &mut Shared,
        now: Timestamp,
        result: Result<Vec<(Room, u32)>, RegistryError>,
    ) {
        self.dp_queries = self.dp_queries.saturating_sub(1);
        let (Some(known), claims) = (self.known.clone(), result) else { return };
        match claims {
            Ok(claims) => {
                self.dp_error = None;
                for (room, dp) in claims {
                    for waiter in self.unclaimed.remove(&room).unwrap_or_default() {
                        self.use_pool(shared, now, &known, dp, waiter);
                    }
                }
            }
            Err(error) => self.dp_error = Some(error.to_string()),
        }
    }

    fn use_pool(&mut self, shared: &mut Shared, now: Timestamp, known: &Known, dp: u32, waiter: Waiter) {
        if dp >= known.info.dp_size {
            let (addr, size) = (&self.addr, known.info.dp_size);
            let reason = format!("prefill_dp_rank {dp} does not exist: dp_size is {size} at bootstrap_addr: {addr}");
            return shared.answer(&waiter, Err(reason));
        }
        match self.pools.get_mut(&dp) {
            Some(Pool::Ready(peers)) => shared.answer(&waiter, Ok(Arc::clone(peers))),
            Some(Pool::Fetching { waiters, .. }) => waiters.push(waiter),
            Some(Pool::Failed { reason, until }) if now < *until => shared.answer(&waiter, Err(reason.clone())),
            _ => {
                let connections = known.mapping.connections();
                let id = shared.unique();
                for (index, c) in connections.iter().enumerate() {
                    let key = RankKey { dp, cp: c.cp, tp: c.tp, pp: c.pp };
                    shared.fetch_address(&self.addr, self.life, id, index, key);
                }
                let records = vec![None; connections.len()];
                self.pools.insert(dp, Pool::Fetching { id, connections, records, waiters: vec![waiter] });
            }
        }
    }

    /// One rank's address arrived, or not.
    pub fn on_address(
        &mut self,
        shared: &mut Shared,
        now: Timestamp,
        dp: u32,
        pool: u64,
        index: usize,
        result: Result<RankAddress, RegistryError>,
    ) {
        let Some(known) = self.known.clone() else { return };
        let Some(Pool::Fetching { id, connections, records, waiters }) = self.pools.get_mut(&dp) else { return };
        let Some(&c) = connections.get(index).filter(|_| *id == pool) else { return };
        let most = shared.config.limits.max_text_bytes;
        let result = result.and_then(|address| match address.rank_ip.len() {
            n if n > most => Err(RegistryError::Malformed(format!("rank_ip has {n} bytes, at most {most} are taken"))),
            _ => Ok(address),
        });
        let address = match result {
            Ok(address) => address,
            Err(error) => {
                let reason = format!(
                    "Could not fetch bootstrap info for: prefill_dp_rank: {dp} prefill_cp_rank: {} target_tp_rank: {} and target_pp_rank {} from bootstrap_addr: {}: {error}",
                    c.cp, c.tp, c.pp, self.addr,
                );
                let waiters = std::mem::take(waiters);
                let until = now + shared.config.min_refetch;
                self.pools.insert(dp, Pool::Failed { reason: reason.clone(), until });
                // A server that does not know its own ranks may have been started anew with other sizes.
                self.stale |= matches!(error, RegistryError::NotFound(_) | RegistryError::NotReady(_));
                for waiter in waiters {
                    shared.answer(&waiter, Err(reason.clone()));
                }
                return;
            }
        };
        records[index] = Some(PrefillRecord {
            endpoint: address.endpoint(),
            rank: known.mapping.rank_of(&c),
            cp_rank: c.cp,
            tp_rank: c.tp,
            pp_rank: c.pp,
            is_dummy: c.is_dummy,
            ext: address.ext,
        });
        let Some(records) = records.iter().cloned().collect::<Option<Vec<_>>>() else { return };
        let waiters = std::mem::take(waiters);
        if records.iter().any(|r| r.ext.is_none())
            && let Err(reason) = shared.check_0_5_23(&known.info)
        {
            let reason = format!("Prefill at bootstrap_addr: {} does not fit this decode rank: {reason}", self.addr);
            let until = now + shared.config.min_refetch;
            self.pools.insert(dp, Pool::Failed { reason: reason.clone(), until });
            for waiter in waiters {
                shared.answer(&waiter, Err(reason.clone()));
            }
            return;
        }
        let first_cp = known.mapping.target_cp_ranks.first().copied().unwrap_or(0);
        let peers = Arc::new(PrefillPeers {
            bootstrap_addr: self.addr.to_string(),
            // One mapping always contacts the same CP ranks, so the first one's key stands for all of them.
            pool_key: known.mapping.pool_key(&self.addr, dp, first_cp),
            records,
            required_dst_info_num: known.mapping.required_dst_info_num,
            required_prefill_response_num: known.mapping.required_prefill_response_num,
            generation: shared.unique(),
        });
        self.pools.insert(dp, Pool::Ready(Arc::clone(&peers)));
        for waiter in waiters {
            shared.answer(&waiter, Ok(Arc::clone(&peers)));
        }
    }

    /// The peers of this key did not take messages. The sizes are fetched again too, since the process behind the
    /// address may be another one by now.
    pub fn forget(&mut self, pool_key: &str) {
        let before = self.pools.len();
        self.pools.retain(|_, pool| !matches!(pool, Pool::Ready(peers) if peers.pool_key == pool_key));
        self.stale |= self.pools.len() < before;
    }

    /// A probe ended; returns whether the server is lost.
    pub fn on_health(&mut self, alive: bool) -> bool {
        self.heartbeat.as_mut().is_some_and(|hb| hb.finish(alive))
    }

    pub fn on_timeout(&mut self, shared: &mut Shared, now: Timestamp) {
        self.fetch_info(shared, now);
        self.give_up_unclaimed(shared, now);
        self.query_dp_ranks(shared, now);
        if self.heartbeat.as_mut().is_some_and(|hb| hb.start(now)) {
            shared.probe(&self.addr, self.life);
        }
    }

    fn give_up_unclaimed(&mut self, shared: &mut Shared, now: Timestamp) {
        let limit = shared.config.dp_query_timeout;
        let (addr, last) = (&self.addr, &self.dp_error);
        self.unclaimed.retain(|room, waiters| {
            waiters.retain(|waiter| {
                let waited = now.since(waiter.asked);
                if waited < limit {
                    return true;
                }
                let last = last.as_ref().map_or(String::new(), |e| format!(", last error: {e}"));
                let reason = format!(
                    "No prefill rank claimed bootstrap_room {room} at bootstrap_addr: {addr} within {:.1} s{last}; check that the request reached this prefill server",
                    waited.as_secs_f64(),
                );
                shared.answer(waiter, Err(reason));
                false
            });
            !waiters.is_empty()
        });
    }

    fn take_waiters(&mut self) -> Vec<Waiter> {
        let mut all: Vec<_> = self.unclaimed.drain().flat_map(|(_, waiters)| waiters).collect();
        for (_, pool) in self.pools.drain() {
            if let Pool::Fetching { waiters, .. } = pool {
                all.extend(waiters);
            }
        }
        all
    }

    fn drain(&mut self, shared: &mut Shared, reason: &str) {
        let mut all = std::mem::take(&mut self.waiting);
        all.extend(self.take_waiters());
        for waiter in all {
            shared.answer(&waiter, Err(reason.to_owned()));
        }
    }

    /// Every room that waits fails.
    pub fn fail_all(mut self, shared: &mut Shared, reason: &str) {
        self.drain(shared, reason);
    }

    /// Nothing is known, nobody waits, no rule about asking again holds any more.
    pub fn is_idle(&self, now: Timestamp) -> bool {
        self.known.is_none()
            && self.waiting.is_empty()
            && !self.fetch.in_flight
            && now >= self.fetch.next
            && self.refused.as_ref().is_none_or(|(_, until)| now >= *until)
    }

    /// Rooms that no rank claims are given up when it is time to ask for them again, which is often enough.
    pub fn poll_timeout(&self) -> Option<Timestamp> {
        let fetch = (!self.waiting.is_empty() && !self.fetch.in_flight).then_some(self.fetch.next);
        let query = (!self.unclaimed.is_empty() && self.dp_queries == 0).then_some(self.dp_next);
        let probe = self.heartbeat.as_ref().and_then(Heartbeat::due);
        [fetch, query, probe].into_iter().flatten().min()
    }
}
