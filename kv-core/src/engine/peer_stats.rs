//! What is counted by peer (requirements F4, F5): writes without proof, and releases without proof.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::ids::OpId;
use crate::net::Endpoint;
use crate::time::Timestamp;

/// One peer's numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerNumbers {
    /// Its control socket.
    pub peer: Endpoint,
    /// Prefill: writes to it that ended without proof of quiet, and that no proof has settled since. Their handles are
    /// alive, their memory is registered.
    pub retained_ops: u64,
    /// Bytes of those writes.
    pub retained_bytes: u64,
    /// When the oldest of them ended.
    pub retained_since: Option<Timestamp>,
    /// Decode: rooms whose pages were released by the timeout while an ACK of this peer was missing.
    pub released_without_proof: u64,
}

#[derive(Debug, Default)]
struct Record {
    retained: BTreeSet<(Timestamp, OpId)>,
    bytes: u64,
    released: u64,
}

/// The numbers of every peer that has or had any. Touched only where something went wrong.
#[derive(Debug, Default)]
pub struct PeerTable(Mutex<BTreeMap<Endpoint, Record>>);

/// Peers in the table; when there are more, those go whose writes are all settled, the first of them by address.
const MAX_PAST: usize = 16_384;

impl PeerTable {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<Endpoint, Record>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn retain(&self, peer: &Endpoint, since: Timestamp, op: OpId, bytes: u64) {
        let mut table = self.lock();
        let record = Self::record(&mut table, peer);
        if record.retained.insert((since, op)) {
            record.bytes += bytes;
        }
    }

    pub(crate) fn settle(&self, peer: &Endpoint, since: Timestamp, op: OpId, bytes: u64) {
        let mut table = self.lock();
        let Some(record) = table.get_mut(peer) else { return };
        if record.retained.remove(&(since, op)) {
            record.bytes = record.bytes.saturating_sub(bytes);
        }
        // It stays with zeros: who watches a gauge must see it fall.
    }

    fn record<'a>(table: &'a mut BTreeMap<Endpoint, Record>, peer: &Endpoint) -> &'a mut Record {
        if table.len() >= MAX_PAST && !table.contains_key(peer) {
            let past = table.iter().find(|(_, r)| r.retained.is_empty()).map(|(peer, _)| peer.clone());
            past.and_then(|past| table.remove(&past));
        }
        table.entry(peer.clone()).or_default()
    }

    pub(crate) fn released_without_proof(&self, peer: &Endpoint) {
        Self::record(&mut self.lock(), peer).released += 1;
    }

    /// Every peer that has or had numbers.
    pub fn snapshot(&self) -> Vec<PeerNumbers> {
        let numbers = |(peer, r): (&Endpoint, &Record)| PeerNumbers {
            peer: peer.clone(),
            retained_ops: r.retained.len() as u64,
            retained_bytes: r.bytes,
            retained_since: r.retained.first().map(|(since, _)| *since),
            released_without_proof: r.released,
        };
        self.lock().iter().map(numbers).collect()
    }
}
