//! An engine that copies within this process: for tests of everything around the engine, with faults on demand.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::driver::engine::{DecodeEngine, EngineEvent, EngineFactory, PrefillEngine, PrefillStart};
use crate::driver::protocol::{Arrived, FetchRoom, ServeRoom, WorkerConfig};
use crate::driver::stats::RankStats;
use crate::error::{CliError, Result};
use crate::memory::KvMemory;
use crate::shape::Rank;

/// What should go wrong.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// Rooms that fail on both sides, with this reason.
    pub fail: HashMap<u64, String>,
    /// Rooms one byte of which is changed on the way.
    pub corrupt: HashSet<u64>,
    /// Prefill engines that end (as if the process had died) when they are to serve this room.
    pub die_at: Option<u64>,
}

type Key = (u64, u32, u32);

#[derive(Default)]
struct Shared {
    served: HashMap<Key, (ServeRoom, Arc<KvMemory>)>,
    wanted: HashMap<Key, (FetchRoom, Arc<KvMemory>, Instant)>,
    news: HashMap<(bool, Rank2), Vec<EngineEvent>>,
    faults: Faults,
}

type Rank2 = (u32, u32);

/// The medium: both sides of a run share one.
#[derive(Clone, Default)]
pub struct Loopback {
    shared: Arc<(Mutex<Shared>, Condvar)>,
}

impl Loopback {
    /// A medium with faults.
    pub fn new(faults: Faults) -> Self {
        let loopback = Self::default();
        loopback.lock().faults = faults;
        loopback
    }

    fn lock(&self) -> MutexGuard<'_, Shared> {
        self.shared.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait(&self, who: (bool, Rank2), timeout: Duration, out: &mut Vec<EngineEvent>) {
        let idle = |shared: &mut Shared| shared.news.get(&who).is_none_or(Vec::is_empty);
        let guard = self.lock();
        let (mut guard, _) =
            self.shared.1.wait_timeout_while(guard, timeout, idle).unwrap_or_else(PoisonError::into_inner);
        out.append(guard.news.entry(who).or_default());
    }

    /// Move a room whose two sides are both there.
    fn meet(&self, key: Key) {
        let mut shared = self.lock();
        if !(shared.served.contains_key(&key) && shared.wanted.contains_key(&key)) {
            return;
        }
        let (Some((serve, src)), Some((fetch, dst, since))) = (shared.served.remove(&key), shared.wanted.remove(&key))
        else {
            return;
        };
        let events = match shared.faults.fail.get(&key.0).cloned() {
            Some(reason) => vec![EngineEvent::Failed { room: key.0, reason }, EngineEvent::Released { room: key.0 }],
            None => {
                let skip = (fetch.prefix_tokens / u64::from(src.geometry().page_tokens)) as usize;
                copy(&src, &serve.pages[skip..], &dst, &fetch.pages, shared.faults.corrupt.contains(&key.0));
                vec![EngineEvent::Done { room: key.0, latency: since.elapsed(), pages: fetch.pages.len() as u64 }]
            }
        };
        for side in [true, false] {
            shared.news.entry((side, (key.1, key.2))).or_default().extend(events.iter().cloned());
        }
        drop(shared);
        self.shared.1.notify_all();
    }
}

fn copy(src: &KvMemory, from: &[u32], dst: &KvMemory, to: &[u32], corrupt: bool) {
    assert_eq!(from.len(), to.len(), "both sides of a room have the same pages");
    for (&from, &to) in from.iter().zip(to) {
        for entry in 0..src.geometry().entries() {
            if let (Some((a, n)), Some((b, m))) = (src.page_ptr(entry, from), dst.page_ptr(entry, to)) {
                assert_eq!(n, m, "both sides have the same geometry");
                // SAFETY: both pages are inside their own mappings, and belong to this room until its end.
                unsafe { std::ptr::copy_nonoverlapping(a, b, n) };
            }
        }
    }
    if let Some((byte, _)) = to.first().filter(|_| corrupt).and_then(|page| dst.page_ptr(0, *page)) {
        // SAFETY: the first byte of a page of this room.
        unsafe { *byte ^= 0x10 };
    }
}

struct Side {
    loopback: Loopback,
    memory: Arc<KvMemory>,
    rank: Rank2,
}

impl Side {
    fn key(&self, room: u64) -> Key {
        (room, self.rank.0, self.rank.1)
    }
}

impl PrefillEngine for Side {
    fn serve(&mut self, room: &ServeRoom, _chunk_pages: u32) -> Result<()> {
        let key = self.key(room.room);
        let mut shared = self.loopback.lock();
        if shared.faults.die_at == Some(room.room) {
            return Err(CliError::new("killed by the test"));
        }
        shared.served.insert(key, (room.clone(), Arc::clone(&self.memory)));
        drop(shared);
        self.loopback.meet(key);
        Ok(())
    }

    fn stats(&self) -> RankStats {
        RankStats::default() // nor is anything else
    }

    fn wait(&mut self, timeout: Duration, out: &mut Vec<EngineEvent>) -> Result<()> {
        self.loopback.wait((true, self.rank), timeout, out);
        Ok(())
    }
}

impl DecodeEngine for Side {
    fn fetch(&mut self, room: &FetchRoom) -> Result<()> {
        let key = self.key(room.room);
        self.loopback.lock().wanted.insert(key, (room.clone(), Arc::clone(&self.memory), Instant::now()));
        self.loopback.meet(key);
        Ok(())
    }

    fn arrived(&self) -> Arrived {
        Arrived::default() // not counted
    }

    fn stats(&self) -> RankStats {
        RankStats::default() // nor is anything else
    }

    fn wait(&mut self, timeout: Duration, out: &mut Vec<EngineEvent>) -> Result<()> {
        self.loopback.wait((false, self.rank), timeout, out);
        Ok(())
    }
}

impl EngineFactory for Loopback {
    fn prefill(&self, config: &WorkerConfig, memory: Arc<KvMemory>) -> Result<PrefillStart> {
        let Rank { tp, pp, .. } = config.rank;
        let engine = Box::new(Side { loopback: self.clone(), memory, rank: (tp, pp) });
        Ok(PrefillStart { engine, bootstrap: Some("loopback:0".into()) })
    }

    fn decode(&self, config: &WorkerConfig, memory: Arc<KvMemory>) -> Result<Box<dyn DecodeEngine>> {
        let Rank { tp, pp, .. } = config.rank;
        Ok(Box::new(Side { loopback: self.clone(), memory, rank: (tp, pp) }))
    }
}
