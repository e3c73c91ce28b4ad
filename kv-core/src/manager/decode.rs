//! A decode rank.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::live::LiveRooms;
use super::runtime::Engine;
use super::{DecodeConfig, KvReceiver, ManagerError, RoomError, is_fake};
use crate::control::local_ip::local_ip;
use crate::control::zmq::{PushRole, ZmqContext, ZmqControl, ZmqInbox, ZmqOutbox};
use crate::directory::{DecodeProfile, DirectoryConfig, HeartbeatConfig, HttpDirectory};
use crate::engine::{DecodeCommand, DecodeShard, DecodeShardConfig, RoomEvent, RoomShared, Stats};
use crate::hooks::ManagerHooks;
use crate::ids::Room;
use crate::layout::LocalLayout;
use crate::net::Endpoint;
use crate::poll::KvPoll;
use crate::room::ReceiverPolicy;
use crate::time::{Clock, MonotonicClock};
use crate::transport::Transport;
use crate::wire::ExtPeer;

pub(super) struct Inner {
    engine: Arc<Engine<DecodeShard>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    pub(super) live: Arc<LiveRooms>,
    transport: Arc<dyn Transport>,
    endpoint: Endpoint,
    stats: Arc<Stats>,
}

impl Inner {
    pub(super) fn submit(&self, command: DecodeCommand) {
        self.engine.enqueue(command);
        self.engine.kick();
    }

    pub(super) fn enqueue(&self, command: DecodeCommand) {
        self.engine.enqueue(command);
    }

    pub(super) fn kick(&self) {
        self.engine.kick();
    }

    pub(super) fn backend(&self) -> &'static str {
        self.transport.capabilities().name
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.engine.stop(thread);
    }
}

/// One decode rank: its control socket, its shard, its directory, its receivers. Cheap to clone. Ends when it and
/// every receiver of it are gone.
#[derive(Clone)]
pub struct DecodeManager(Arc<Inner>);

impl DecodeManager {
    /// Bind the control socket and start the shard. `layout` holds regions registered with `transport`.
    ///
    /// # Errors
    /// [`ManagerError`].
    pub fn start(
        config: DecodeConfig,
        transport: Arc<dyn Transport>,
        hooks: Arc<dyn ManagerHooks>,
        layout: LocalLayout,
    ) -> Result<Self, ManagerError> {
        let host = match &config.host {
            Some(host) => host.clone(),
            None => local_ip().map_err(|e| ManagerError::LocalAddress(e.to_string()))?,
        };
        let control_error = |e: &dyn std::fmt::Display| ManagerError::Control(e.to_string());
        let context = ZmqContext::new(&config.limits).map_err(|e| control_error(&e))?;
        let (inbox, endpoint) = ZmqInbox::bind(&context, &host, &config.limits).map_err(|e| control_error(&e))?;
        let mut outbox = ZmqOutbox::new(&context, PushRole::ToPrefill, &config.limits);

        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::new());
        // Decode's steps never block: it posts nothing.
        let engine = Engine::new(true, clock)?;
        outbox.set_wake(engine.waker());
        let live = Arc::new(LiveRooms::new(config.limits.max_rooms));
        let stats = Arc::new(Stats::default());
        let weak = Arc::downgrade(&engine);
        let spec = layout.spec();
        let directory_config = DirectoryConfig {
            heartbeat: HeartbeatConfig {
                interval: config.heartbeat_interval,
                max_failure: config.heartbeat_max_failure,
            },
            limits: config.limits.clone(),
            ..DirectoryConfig::decode(DecodeProfile {
                kv_layout: spec.kv_layout.clone(),
                ..DecodeProfile::new(config.rank.clone(), spec.page_size, &spec.kv_cache_dtype)
            })
        };
        let directory = HttpDirectory::new(
            directory_config,
            Box::new(move |event| {
                if let Some(engine) = weak.upgrade() {
                    engine.post(DecodeCommand::Directory(event));
                }
            }),
        )
        .map_err(|e| ManagerError::Bootstrap(e.to_string()))?;
        let freed = live.clone();
        let inbound = transport.clone();
        let (name, of, at) = (transport.local_name().to_owned(), transport.clone(), endpoint.clone());
        let shard_config = DecodeShardConfig {
            limits: config.limits.clone(),
            policy: Arc::new(ReceiverPolicy {
                waiting_timeout: config.waiting_timeout,
                release: hooks.release_policy(),
            }),
            inbound_dead: Arc::new(move |process| inbound.inbound_dead(process)),
            extension: hooks.extension().then(ExtPeer::here),
            endpoint: endpoint.clone(),
            name: name.clone(),
            freed: Arc::new(move |room| freed.freed(room)),
            registration: Arc::new(move || layout.to_registration(at.clone(), name.clone(), of.local_metadata())),
        };
        let shard = DecodeShard::new(shard_config, hooks, Box::new(directory), stats.clone());
        let thread = engine.start("kv-decode", shard, ZmqControl::new(outbox), inbox)?;
        Ok(Self(Arc::new(Inner { engine, thread: Mutex::new(Some(thread)), live, transport, endpoint, stats })))
    }

    /// Its control socket, as prefill reaches it.
    pub fn endpoint(&self) -> &Endpoint {
        &self.0.endpoint
    }

    /// Its counters.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.0.stats
    }

    /// Hand the counters to the recorder that is installed for the `metrics` facade ([`Stats::export`]). Call it as often
    /// as the numbers should be fresh.
    #[cfg(feature = "metrics")]
    pub fn export_metrics(&self) {
        self.0.stats.export("decode", self.0.backend(), self.0.engine.now());
    }

    /// A receiver for a room; the room is in Bootstrapping. `bootstrap_addr` is `host:port` of prefill's bootstrap
    /// server, IPv6 bracketed.
    ///
    /// # Errors
    /// [`RoomError`]; a room that is live already is not touched.
    pub fn receiver(&self, room: Room, bootstrap_addr: &str) -> Result<KvReceiver, RoomError> {
        if is_fake(bootstrap_addr) {
            let shared = RoomShared::new(room, 0, None);
            shared.publish(KvPoll::Success, true, None, None);
            return Ok(KvReceiver::new(self.0.clone(), shared, bootstrap_addr.to_owned(), true));
        }
        let life = self.0.live.take(room)?;
        let shared = RoomShared::new(room, life, self.0.engine.events());
        Ok(KvReceiver::new(self.0.clone(), shared, bootstrap_addr.to_owned(), false))
    }

    /// Ask for changes of all rooms made from now on: a descriptor that turns readable when
    /// [`drain_events`](Self::drain_events) has news.
    ///
    /// # Errors
    /// The system's, when no descriptor is left.
    pub fn subscribe(&self) -> std::io::Result<RawFd> {
        self.0.engine.subscribe()
    }

    /// Append what changed since the last call: at most one event a room, with its newest state.
    pub fn drain_events(&self, out: &mut Vec<RoomEvent>) {
        self.0.engine.drain_events(out);
    }
}
