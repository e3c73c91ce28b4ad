//! A directory whose answers the test writes.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kv_core::directory::{Directory, DirectoryEvent, DirectoryRequest, PrefillPeers, PrefillRecord};
use kv_core::ids::PrefillRank;
use kv_core::net::Endpoint;
use kv_core::time::Timestamp;

use crate::clock::ManualClock;

/// What a `Peers` request gets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// These peers.
    Peers(Arc<PrefillPeers>),
    /// This reason.
    Refused(String),
    /// Nothing, ever.
    Never,
}

struct Inner {
    clock: ManualClock,
    answers: BTreeMap<String, (Duration, Answer)>,
    requests: Vec<DirectoryRequest>,
    pending: Vec<(Timestamp, DirectoryEvent)>,
    fetches: u64,
    cached: BTreeMap<String, (u64, Arc<PrefillPeers>)>,
    keeps: bool,
}

/// The directory and the test's hand on it: clone it, give one clone to the engine.
///
/// Answers are due at the time of the request plus their delay; the driver passes [`take_events`](Self::take_events) on
/// to the shard. As with the real one, `Forget` and [`node_lost`](Self::node_lost) make the next answer for the address a
/// new generation.
#[derive(Clone)]
pub struct FakeDirectory(Arc<Mutex<Inner>>);

impl FakeDirectory {
    /// A directory that refuses every address it was not told about.
    pub fn new(clock: &ManualClock) -> Self {
        Self(Arc::new(Mutex::new(Inner {
            clock: clock.clone(),
            answers: BTreeMap::new(),
            requests: Vec::new(),
            pending: Vec::new(),
            fetches: 0,
            cached: BTreeMap::new(),
            keeps: false,
        })))
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Requests for `bootstrap_addr` get this answer at once.
    pub fn answer(&self, bootstrap_addr: &str, answer: Answer) {
        self.answer_after(bootstrap_addr, Duration::ZERO, answer);
    }

    /// Requests for `bootstrap_addr` get this answer `delay` after they were made.
    pub fn answer_after(&self, bootstrap_addr: &str, delay: Duration, answer: Answer) {
        self.lock().answers.insert(bootstrap_addr.into(), (delay, answer));
    }

    /// From now on, an answer that was fetched is given again until it is forgotten, as the real directory does, whatever
    /// [`answer`](Self::answer) says meanwhile.
    pub fn keep_answers(&self) {
        self.lock().keeps = true;
    }

    /// Serve the ranks of `shape` under its own address.
    pub fn serve(&self, shape: &Shape) {
        self.answer(&shape.bootstrap_addr, Answer::Peers(Arc::new(shape.peers())));
    }

    /// The server at `bootstrap_addr` missed its heartbeats: an event now, and a new generation next time.
    pub fn node_lost(&self, bootstrap_addr: &str) {
        let mut inner = self.lock();
        inner.cached.remove(bootstrap_addr);
        let now = inner.clock.now();
        let reason = format!("Lost connection with prefill instance (bootstrap_addr: {bootstrap_addr})");
        inner.pending.push((now, DirectoryEvent::NodeLost { bootstrap_addr: bootstrap_addr.into(), reason }));
    }

    /// Put any event in line, due now.
    pub fn push(&self, event: DirectoryEvent) {
        let mut inner = self.lock();
        let now = inner.clock.now();
        inner.pending.push((now, event));
    }

    /// The events due by now, in order of due time.
    pub fn take_events(&self) -> Vec<DirectoryEvent> {
        let mut inner = self.lock();
        let now = inner.clock.now();
        inner.pending.sort_by_key(|(due, _)| *due);
        let due = inner.pending.partition_point(|(due, _)| *due <= now);
        inner.pending.drain(..due).map(|(_, event)| event).collect()
    }

    /// When the next event is due.
    pub fn next_due(&self) -> Option<Timestamp> {
        self.lock().pending.iter().map(|(due, _)| *due).min()
    }

    /// Every request so far.
    pub fn requests(&self) -> Vec<DirectoryRequest> {
        self.lock().requests.clone()
    }

    /// How often an address had to be fetched anew (the real one asks its server then).
    pub fn fetches(&self) -> u64 {
        self.lock().fetches
    }
}

impl Directory for FakeDirectory {
    fn request(&mut self, request: DirectoryRequest) {
        let mut inner = self.lock();
        inner.requests.push(request.clone());
        match request {
            DirectoryRequest::Peers { token, bootstrap_addr, .. } => {
                let (delay, answer) = inner.answers.get(&bootstrap_addr).cloned().unwrap_or_else(|| {
                    let text = format!("Could not fetch prefill parallel info from bootstrap_addr: {bootstrap_addr}");
                    (Duration::ZERO, Answer::Refused(text))
                });
                let result = match answer {
                    Answer::Never => return,
                    Answer::Refused(text) => Err(text),
                    Answer::Peers(peers) => {
                        if !inner.cached.contains_key(&bootstrap_addr) {
                            inner.fetches += 1;
                            let generation = peers.generation + inner.fetches - 1;
                            inner.cached.insert(bootstrap_addr.clone(), (generation, peers.clone()));
                        }
                        let (generation, kept) = inner.cached[&bootstrap_addr].clone();
                        let peers = if inner.keeps { kept } else { peers };
                        Ok(Arc::new(PrefillPeers { generation, ..(*peers).clone() }))
                    }
                };
                let due = inner.clock.now() + delay;
                inner.pending.push((due, DirectoryEvent::Peers { token, result }));
            }
            DirectoryRequest::Forget { pool_key } => {
                inner.cached.retain(|addr, _| !pool_key.starts_with(addr.as_str()));
            }
            DirectoryRequest::RegisterDpRank { .. } | DirectoryRequest::CancelDpRank { .. } => {}
        }
    }
}

/// Sizes of a prefill server and of one decode rank, and what follows for that rank (protocol section 3). Written from
/// the specification, apart from kv-core's own mapping, and checked against the same golden vectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shape {
    /// `host:port` of the bootstrap server.
    pub bootstrap_addr: String,
    /// Prefill attention TP size.
    pub prefill_tp: u32,
    /// Prefill attention CP size.
    pub prefill_cp: u32,
    /// Prefill PP size.
    pub prefill_pp: u32,
    /// Decode attention TP size.
    pub decode_tp: u32,
    /// Decode rank's `engine_rank`.
    pub decode_rank: u32,
    /// Decode PP size: 1 or `prefill_pp`.
    pub decode_pp: u32,
    /// Decode rank's PP rank.
    pub decode_pp_rank: u32,
    /// MLA cache (not hybrid).
    pub mla: bool,
    /// Every CP rank takes part.
    pub all_cp: bool,
    /// Which DP rank of prefill.
    pub dp: u32,
    /// Host of every prefill rank; ports count up from `first_port`.
    pub host: String,
    /// Port of prefill rank 0.
    pub first_port: u16,
}

impl Default for Shape {
    /// One prefill rank, one decode rank, MHA.
    fn default() -> Self {
        Self {
            bootstrap_addr: "p:8998".into(),
            prefill_tp: 1,
            prefill_cp: 1,
            prefill_pp: 1,
            decode_tp: 1,
            decode_rank: 0,
            decode_pp: 1,
            decode_pp_rank: 0,
            mla: false,
            all_cp: false,
            dp: 0,
            host: "10.0.0.1".into(),
            first_port: 9000,
        }
    }
}

impl Shape {
    /// Prefill TP against decode TP, as seen by decode rank `decode_rank`.
    pub fn tp(prefill_tp: u32, decode_tp: u32, decode_rank: u32) -> Self {
        Self { prefill_tp, decode_tp, decode_rank, ..Self::default() }
    }

    /// The number of a prefill rank in status messages.
    pub fn prefill_rank(&self, tp: u32, cp: u32, pp: u32) -> PrefillRank {
        PrefillRank(tp * self.prefill_pp * self.prefill_cp + pp * self.prefill_cp + cp)
    }

    /// The control endpoint of a prefill rank.
    pub fn endpoint(&self, rank: PrefillRank) -> Endpoint {
        Endpoint::new(&self.host, self.first_port + rank.0 as u16)
    }

    /// What the decode rank is told. Panics on sizes that do not divide.
    pub fn peers(&self) -> PrefillPeers {
        let (pt, dt) = (self.prefill_tp, self.decode_tp);
        assert!(pt % dt == 0 || dt % pt == 0, "prefill TP {pt} and decode TP {dt} do not divide");
        assert!(self.decode_pp == self.prefill_pp || self.decode_pp == 1, "decode PP must be 1 or prefill's");
        let r = self.decode_rank % dt;
        let (tps, required_dst_info_num, mut responses) = if dt >= pt {
            let target = r / (dt / pt);
            (target..target + 1, dt / pt, 1)
        } else {
            let k = pt / dt;
            (r * k..r * k + k, 1, if self.mla { 1 } else { k })
        };
        let target_tp = tps.start;
        let cps = if self.all_cp { 0..self.prefill_cp } else { 0..1 };
        responses *= cps.end;
        let pps: Vec<u32> = if self.decode_pp == self.prefill_pp {
            vec![self.decode_pp_rank]
        } else {
            responses *= self.prefill_pp;
            (0..self.prefill_pp).rev().collect()
        };
        let mut records = Vec::new();
        for cp_rank in cps {
            for tp_rank in tps.clone() {
                for &pp_rank in &pps {
                    let rank = self.prefill_rank(tp_rank, cp_rank, pp_rank);
                    let is_dummy = self.mla && tp_rank != target_tp;
                    let endpoint = self.endpoint(rank);
                    records.push(PrefillRecord { endpoint, rank, cp_rank, tp_rank, pp_rank, is_dummy, ext: None });
                }
            }
        }
        // SGLang keeps one pool entry per CP rank; the seam's one key stands for all of them.
        let pool_key = format!("{}_{}_0_{target_tp}", self.bootstrap_addr, self.dp);
        PrefillPeers {
            bootstrap_addr: self.bootstrap_addr.clone(),
            pool_key,
            records,
            required_dst_info_num,
            required_prefill_response_num: responses,
            generation: 1,
        }
    }
}
