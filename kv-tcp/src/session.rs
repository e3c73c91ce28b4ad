//! The target's side of a peer: its connections, its ops in progress, and the fence.
//!
//! Everything that may still write for a session holds a [`Hold`]: each of its connections (a worker may be inside a
//! receive call) and each copy in progress. A fenced session answers when the last hold is gone.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use kv_core::ids::ProcessGeneration;

use crate::blob::Key;
use crate::conn::ConnOut;
use crate::frame::{self, Hello, Status, Verdict, Welcome};
use crate::stats::{self, Counters};
use crate::worker::{Msg, WorkerShared};
use kv_core::host::HostIdentity;

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bound on ops of one session of which some stripes have landed.
const MAX_PARTIAL_OPS: usize = 1 << 16;

struct Partial {
    left: u32,
    failure: Option<(Status, String)>,
}

#[derive(Default)]
struct State {
    holds: usize,
    /// The last hold is gone: nothing joins any more.
    dead: bool,
    connections: Vec<(Arc<WorkerShared>, u64)>,
    fences: Vec<Arc<ConnOut>>,
}

/// One peer's session.
pub(crate) struct Session {
    id: [u8; 16],
    pub source: String,
    process: ProcessGeneration,
    /// The process to copy from, when direct copies work.
    pub direct: Option<u32>,
    revoked: AtomicBool,
    lanes: Mutex<HashMap<u32, Arc<ConnOut>>>,
    partial: Mutex<HashMap<u64, Partial>>,
    state: Mutex<State>,
    all: Weak<Sessions>,
}

impl Session {
    /// Whether it has ended: nothing may be started for it, and copies stop at their next slice.
    pub fn revoked(&self) -> bool {
        self.revoked.load(Ordering::Acquire)
    }

    /// End it. Its connections are closed by the workers that own them.
    pub fn revoke(&self) {
        let connections = {
            let mut state = lock(&self.state);
            self.revoked.store(true, Ordering::Release);
            std::mem::take(&mut state.connections)
        };
        for (worker, token) in connections {
            worker.post(Msg::Close(token));
        }
    }

    /// Keep it from being quiet. `None` once it has ended.
    pub fn hold(self: &Arc<Self>) -> Option<Hold> {
        let mut state = lock(&self.state);
        if state.dead || self.revoked() {
            return None;
        }
        state.holds += 1;
        Some(Hold(Arc::clone(self)))
    }

    /// [`Session::hold`] for a connection.
    pub fn join(self: &Arc<Self>, worker: &Arc<WorkerShared>, token: u64, max: usize) -> Option<Hold> {
        let mut state = lock(&self.state);
        if state.dead || self.revoked() || state.connections.len() >= max {
            return None;
        }
        state.holds += 1;
        state.connections.push((Arc::clone(worker), token));
        Some(Hold(Arc::clone(self)))
    }

    /// A connection is gone.
    pub fn leave(&self, token: u64) {
        lock(&self.state).connections.retain(|(_, t)| *t != token);
    }

    pub fn set_lane(&self, lane: u32, out: &Arc<ConnOut>) {
        lock(&self.lanes).insert(lane, Arc::clone(out));
    }

    pub fn drop_lane(&self, lane: u32) {
        lock(&self.lanes).remove(&lane);
    }

    /// Tell the source that everything has ended.
    pub fn goodbye(&self, bye: &[u8]) {
        for out in lock(&self.lanes).values() {
            out.send(bye);
        }
    }

    /// Answer op `op` on its lane's own connection.
    pub fn ack(&self, op: u64, status: Status, text: &str) {
        if self.revoked() {
            // The source counts on the fence now.
            return;
        }
        let out = lock(&self.lanes).get(&lane_of(op)).cloned();
        if let Some(out) = out {
            let mut bytes = Vec::with_capacity(32);
            frame::put_ack(&mut bytes, op, status, text);
            out.send(&bytes);
        }
    }

    /// One stripe of `op` has ended; the ack goes out with the last one. False: too many ops are half done.
    pub fn landed(&self, op: u64, stripes: u32, failure: Option<(Status, String)>) -> bool {
        let ended = if stripes == 1 {
            Partial { left: 0, failure }
        } else {
            let mut partial = lock(&self.partial);
            if partial.len() >= MAX_PARTIAL_OPS {
                return false;
            }
            let p = partial.entry(op).or_insert(Partial { left: stripes, failure: None });
            p.left -= 1;
            if p.failure.is_none() {
                p.failure = failure;
            }
            if p.left > 0 {
                return true;
            }
            match partial.remove(&op) {
                Some(p) => p,
                None => return true,
            }
        };
        match ended.failure {
            None => self.ack(op, Status::Done, ""),
            Some((status, text)) => self.ack(op, status, &text),
        }
        true
    }
}

/// The lane within an op's number.
pub(crate) fn lane_of(op: u64) -> u32 {
    (op >> LANE_SHIFT) as u32
}

/// Where the lane starts within an op's number.
pub(crate) const LANE_SHIFT: u32 = 40;

/// See the module.
pub(crate) struct Hold(pub Arc<Session>);

impl Drop for Hold {
    fn drop(&mut self) {
        let session = &self.0;
        let fences = {
            let mut state = lock(&session.state);
            state.holds -= 1;
            if state.holds > 0 {
                return;
            }
            state.dead = true;
            std::mem::take(&mut state.fences)
        };
        session.revoked.store(true, Ordering::Release);
        lock(&session.lanes).clear();
        if let Some(all) = session.all.upgrade() {
            all.remove(&session.id);
            for out in fences {
                all.answer_fence(&out);
            }
        }
    }
}

/// All sessions.
pub(crate) struct Sessions {
    map: Mutex<HashMap<[u8; 16], Arc<Session>>>,
    /// Where the processes run that have or had a session.
    sources: Mutex<HashMap<ProcessGeneration, HostIdentity>>,
    max: usize,
    counters: Arc<Counters>,
}

impl Sessions {
    pub fn new(max: usize, counters: Arc<Counters>) -> Arc<Self> {
        Arc::new(Self { map: Mutex::default(), sources: Mutex::default(), max, counters })
    }

    /// A new session; `None` when there are too many, or it exists.
    pub fn open(self: &Arc<Self>, hello: &Hello, direct: Option<u32>) -> Option<Arc<Session>> {
        let id = &hello.session;
        let mut map = lock(&self.map);
        if map.len() >= self.max || map.contains_key(&id.0) {
            return None;
        }
        let mut sources = lock(&self.sources);
        if sources.len() >= self.max && !sources.contains_key(&hello.process) {
            // As many as sessions, so one of them has none any more.
            let idle = sources.keys().find(|p| !map.values().any(|s| s.process == **p)).copied();
            idle.and_then(|idle| sources.remove(&idle));
        }
        sources.insert(hello.process, hello.host);
        drop(sources);
        let session = Arc::new(Session {
            id: id.0,
            source: hello.source.clone(),
            process: hello.process,
            direct,
            revoked: AtomicBool::new(false),
            lanes: Mutex::default(),
            partial: Mutex::default(),
            state: Mutex::default(),
            all: Arc::downgrade(self),
        });
        map.insert(id.0, Arc::clone(&session));
        stats::add(&self.counters.sessions, 1);
        Some(session)
    }

    pub fn get(&self, id: &Key) -> Option<Arc<Session>> {
        lock(&self.map).get(&id.0).cloned()
    }

    pub fn all(&self) -> Vec<Arc<Session>> {
        lock(&self.map).values().cloned().collect()
    }

    /// The processes that have or had a session here.
    pub fn sources(&self) -> Vec<ProcessGeneration> {
        lock(&self.sources).keys().copied().collect()
    }

    /// Nothing of this process can land here any more: it ran on this host, it is gone, and so is all that was done for
    /// it. In this order: a process that is gone opens no further session.
    pub fn source_dead(&self, process: ProcessGeneration, local: &HostIdentity) -> bool {
        let gone = lock(&self.sources).get(&process).is_some_and(|host| host.is_gone(local));
        gone && !lock(&self.map).values().any(|s| s.process == process)
    }

    fn remove(&self, id: &[u8; 16]) {
        if lock(&self.map).remove(id).is_some() {
            stats::sub(&self.counters.sessions, 1);
        }
    }

    /// End session `id`, and answer on `out` once nothing of it can write any more.
    pub fn fence(&self, id: &Key, out: &Arc<ConnOut>) {
        if let Some(session) = self.get(id) {
            session.revoke();
            let mut state = lock(&session.state);
            if !state.dead {
                state.fences.push(Arc::clone(out));
                return;
            }
        }
        self.answer_fence(out);
    }

    fn answer_fence(&self, out: &ConnOut) {
        let mut bytes = Vec::new();
        Welcome { verdict: Verdict::Fenced, text: String::new(), host: None }.encode(&mut bytes);
        stats::add(&self.counters.fences_answered, 1);
        out.send(&bytes);
    }
}
