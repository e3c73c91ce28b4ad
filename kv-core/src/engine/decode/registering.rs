//! Registration with prefill's ranks: once per connection-pool key, anew when they may have forgotten us.

use std::sync::Arc;

use super::{DecodeShard, RoomKey};
use crate::control::ControlPlane;
use crate::directory::{DirectoryRequest, PrefillPeers};
use crate::net::Endpoint;
use crate::time::Timestamp;
use crate::wire::MessageKind;

impl DecodeShard {
    /// Once per connection-pool key and generation, before any metadata, over the same sockets.
    pub(super) fn register(
        &mut self,
        now: Timestamp,
        peers: &Arc<PrefillPeers>,
        control: &mut dyn ControlPlane,
    ) -> Result<(), String> {
        if self.registered.get(&peers.pool_key).is_some_and(|p| p.generation == peers.generation) {
            return Ok(());
        }
        if self.registered.len() >= self.config.limits.max_peers {
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
        self.registered.insert(peers.pool_key.clone(), peers.clone());
        Ok(())
    }

    /// The next room registers again. The connections stay: metadata of other rooms may still be on its way on them,
    /// and an ABORT on a new connection would overtake it.
    pub(super) fn forget(&mut self, pool_key: &str) {
        self.registered.remove(pool_key);
    }

    /// Every pool with a rank there: its addresses are fetched anew, too.
    pub(super) fn forget_all_at(&mut self, endpoint: &Endpoint) {
        let to_it = |p: &PrefillPeers| p.records.iter().any(|r| r.endpoint == *endpoint);
        let keys: Vec<String> = self.registered.iter().filter(|(_, p)| to_it(p)).map(|(k, _)| k.clone()).collect();
        for pool_key in keys {
            self.forget(&pool_key);
            self.directory.request(DirectoryRequest::Forget { pool_key });
        }
    }

    /// The server is lost, and every room of it has ended: its connections go.
    pub(super) fn lose(&mut self, pool_key: &str, control: &mut dyn ControlPlane) {
        let Some(peers) = self.registered.remove(pool_key) else { return };
        for record in &peers.records {
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
