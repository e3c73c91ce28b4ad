//! Registration with prefill's ranks: once per connection-pool key, anew when they may have forgotten us.

use std::sync::Arc;

use super::{DecodeShard, RoomKey};
use crate::control::ControlPlane;
use crate::directory::{DirectoryRequest, PrefillPeers};
use crate::net::Endpoint;
use crate::time::Timestamp;
use crate::wire::MessageKind;

/// A pool that was registered with.
pub(super) struct Registered {
    pub(super) peers: Arc<PrefillPeers>,
    /// It may know nothing of it any more. The connections are still there.
    pub(super) forgotten: bool,
}

impl DecodeShard {
    /// Once per connection-pool key and generation, before any metadata, over the same sockets.
    pub(super) fn register(
        &mut self,
        now: Timestamp,
        peers: &Arc<PrefillPeers>,
        control: &mut dyn ControlPlane,
    ) -> Result<(), String> {
        if self.registered.get(&peers.pool_key).is_some_and(|r| !r.forgotten && r.peers.generation == peers.generation)
        {
            return Ok(());
        }
        let known = self.registered.contains_key(&peers.pool_key);
        if !known && self.registered.len() >= self.config.limits.max_peers && !self.make_room(control) {
            return Err(format!("more than {} prefill peers are registered", self.config.limits.max_peers));
        }
        let registration = (self.config.registration)();
        let message = self.hooks.build_receiver_registration_message(&registration).map_err(|e| e.to_string())?;
        for record in &peers.records {
            let message = self
                .extended(MessageKind::Registration, &message, record, None, None)
                .map_err(|e| format!("registration cannot be encoded: {e}"))?;
            if !self.outgoing.send(now, control, &record.endpoint, message, &self.stats) {
                return Err(format!("registration to prefill {} failed", record.endpoint));
            }
        }
        self.stats.peers_registered.inc();
        self.registered.insert(peers.pool_key.clone(), Registered { peers: peers.clone(), forgotten: false });
        Ok(())
    }

    /// The next room registers again. The connections stay: metadata of other rooms may still be on its way on them,
    /// and an ABORT on a new connection would overtake it.
    pub(super) fn forget(&mut self, pool_key: &str) {
        if let Some(registered) = self.registered.get_mut(pool_key) {
            registered.forgotten = true;
        }
    }

    /// Every pool with a rank there: its addresses are fetched anew, too. Whether there was one.
    pub(super) fn forget_all_at(&mut self, endpoint: &Endpoint) -> bool {
        let to_it = |r: &Registered| !r.forgotten && r.peers.records.iter().any(|r| r.endpoint == *endpoint);
        let keys: Vec<String> = self.registered.iter().filter(|(_, r)| to_it(r)).map(|(k, _)| k.clone()).collect();
        let any = !keys.is_empty();
        for pool_key in keys {
            self.forget(&pool_key);
            self.directory.request(DirectoryRequest::Forget { pool_key });
        }
        any
    }

    /// Give up what is forgotten, but for a registration that comes.
    fn make_room(&mut self, control: &mut dyn ControlPlane) -> bool {
        let forgotten = self.registered.iter().find(|(_, r)| r.forgotten).map(|(k, _)| k.clone());
        forgotten.map(|key| self.lose(&key, control)).is_some()
    }

    /// The server is lost, and every room of it has ended: its connections go.
    pub(super) fn lose(&mut self, pool_key: &str, control: &mut dyn ControlPlane) {
        let Some(registered) = self.registered.remove(pool_key) else { return };
        for record in &registered.peers.records {
            self.outgoing.forget(&record.endpoint);
            control.close(&record.endpoint);
        }
    }

    pub(super) fn forget_peers_of(&mut self, key: RoomKey) {
        let Some(peers) = self.rooms.get(key).and_then(|e| e.room.peers().cloned()) else { return };
        self.forget(&peers.pool_key);
        self.directory.request(DirectoryRequest::Forget { pool_key: peers.pool_key.clone() });
    }
}
