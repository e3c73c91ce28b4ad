//! A prefill rank.

use std::os::fd::RawFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::connector::ConnectorThreads;
use super::live::LiveRooms;
use super::runtime::Engine;
use super::{KvSender, ManagerError, PrefillConfig, RoomError, is_fake};
use crate::bootstrap::types::{FOLLOW_BOOTSTRAP_ROOM, POLICY_EARLY};
use crate::bootstrap::{PrefillRow, RegistrationConfig, register_prefill_rank};
use crate::control::local_ip::local_ip;
use crate::control::zmq::{PushRole, ZmqContext, ZmqControl, ZmqInbox, ZmqOutbox};
use crate::directory::{Directory, DirectoryRequest};
use crate::engine::{AuxRule, PrefillCommand, PrefillShard, PrefillShardConfig, RoomEvent, RoomShared, Stats};
use crate::hooks::ManagerHooks;
use crate::ids::{PrefillRank, Room};
use crate::layout::LocalLayout;
use crate::net::Endpoint;
use crate::poll::KvPoll;
use crate::room::SenderPolicy;
use crate::time::{Clock, MonotonicClock};
use crate::topology::prefill_unique_rank;
use crate::transport::Transport;
use crate::wire::ExtPeer;

pub(super) struct Inner {
    engine: Arc<Engine<PrefillShard>>,
    thread: Mutex<Option<JoinHandle<()>>>,
    pub(super) live: Arc<LiveRooms>,
    transport: Arc<dyn Transport>,
    layout: Arc<LocalLayout>,
    config: PrefillConfig,
    endpoint: Endpoint,
    rank: PrefillRank,
    extension: Option<ExtPeer>,
    stats: Arc<Stats>,
}

impl Inner {
    pub(super) fn submit(&self, command: PrefillCommand) {
        self.engine.enqueue(command);
        self.engine.kick();
    }

    pub(super) fn enqueue(&self, command: PrefillCommand) {
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

/// One prefill rank: its control socket, its shard, its senders. Cheap to clone. Ends when it and every sender of it
/// are gone.
#[derive(Clone)]
pub struct PrefillManager(Arc<Inner>);

/// Prefill asks its registry for nothing; a DP rank is told to it by the manager's owner.
struct NoDirectory;

impl Directory for NoDirectory {
    fn request(&mut self, request: DirectoryRequest) {
        tracing::warn!("this prefill rank has no directory: {request:?} is dropped");
    }
}

impl PrefillManager {
    /// Bind the control socket and start the shard. `layout` holds regions registered with `transport`.
    ///
    /// # Errors
    /// [`ManagerError`].
    pub fn start(
        config: PrefillConfig,
        transport: Arc<dyn Transport>,
        hooks: Arc<dyn ManagerHooks>,
        layout: LocalLayout,
    ) -> Result<Self, ManagerError> {
        let id = &config.identity;
        let rank = prefill_unique_rank(id.attn_tp.1, (id.attn_cp.1, id.attn_cp.0), (id.pp.1, id.pp.0))
            .map_err(|e| ManagerError::Config(e.to_string()))?;
        let sizes = [("attn_tp", id.attn_tp), ("attn_cp", id.attn_cp), ("attn_dp", id.attn_dp), ("pp", id.pp)];
        for (what, (size, rank)) in sizes.into_iter().chain([("system_dp", id.system_dp)]) {
            if rank >= size {
                return Err(ManagerError::Config(format!("{what} rank {rank} of {what} size {size}")));
            }
        }
        let host = match &config.host {
            Some(host) => host.clone(),
            None => local_ip().map_err(|e| ManagerError::LocalAddress(e.to_string()))?,
        };
        let control_error = |e: &dyn std::fmt::Display| ManagerError::Control(e.to_string());
        let context = ZmqContext::new(&config.limits).map_err(|e| control_error(&e))?;
        let (inbox, endpoint) = ZmqInbox::bind(&context, &host, &config.limits).map_err(|e| control_error(&e))?;
        let mut outbox = ZmqOutbox::new(&context, PushRole::ToDecode, &config.limits);

        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::new());
        let engine = Engine::new(!transport.capabilities().submit_blocks, clock)?;
        outbox.set_wake(engine.waker());
        let extension = hooks.extension().then(ExtPeer::here);
        let live = Arc::new(LiveRooms::new(config.limits.max_rooms));
        let stats = Arc::new(Stats::default());
        let layout = Arc::new(layout);
        let (weak, freed) = (Arc::downgrade(&engine), live.clone());
        let commands: Arc<dyn Fn(PrefillCommand) + Send + Sync> = Arc::new(move |c| {
            if let Some(engine) = weak.upgrade() {
                engine.post(c);
            }
        });
        let connected = commands.clone();
        let connector =
            ConnectorThreads::start(transport.clone(), Arc::new(move |c| connected(PrefillCommand::Connected(c))))?;
        let shard_config = PrefillShardConfig {
            limits: config.limits.clone(),
            policy: Arc::new(SenderPolicy {
                bootstrap_timeout: config.bootstrap_timeout,
                failed_status: hooks.failed_status_policy(),
                max_destinations: config.limits.max_peers_per_room,
                max_chunks: config.limits.max_chunks_per_room,
            }),
            early_timeout: config.early_timeout,
            tombstone_timeout: config.tombstone_timeout,
            rank,
            freed: Arc::new(move |room| freed.freed(room)),
            aux_rule: AuxRule {
                attn_tp: id.attn_tp,
                cp_rank: id.attn_cp.1,
                last_stage: id.pp.1 + 1 == id.pp.0,
                kv_entries: layout.spec().kv.len(),
            },
            extension,
            commands,
        };
        let lane = transport.lane()?;
        let shard = PrefillShard::new(
            shard_config,
            hooks,
            layout.clone(),
            lane,
            Box::new(connector),
            Box::new(NoDirectory),
            stats.clone(),
        );
        let thread = engine.start("kv-prefill", shard, ZmqControl::new(outbox), inbox)?;
        Ok(Self(Arc::new(Inner {
            engine,
            thread: Mutex::new(Some(thread)),
            live,
            transport,
            layout,
            config,
            endpoint,
            rank,
            extension,
            stats,
        })))
    }

    /// Its control socket, as decode reaches it.
    pub fn endpoint(&self) -> &Endpoint {
        &self.0.endpoint
    }

    /// Its number in status messages.
    pub fn rank(&self) -> PrefillRank {
        self.0.rank
    }

    /// Its counters.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.0.stats
    }

    /// Hand the counters to the recorder that is installed for the `metrics` facade ([`Stats::export`]). Call it as often
    /// as the numbers should be fresh.
    #[cfg(feature = "metrics")]
    pub fn export_metrics(&self) {
        self.0.stats.export("prefill", self.0.backend(), self.0.engine.now());
    }

    /// What this rank PUTs to the bootstrap server.
    pub fn row(&self) -> PrefillRow {
        let (id, spec) = (&self.0.config.identity, self.0.layout.spec());
        PrefillRow {
            attn_tp_size: id.attn_tp.0,
            attn_tp_rank: id.attn_tp.1,
            attn_cp_size: id.attn_cp.0,
            attn_cp_rank: id.attn_cp.1,
            attn_dp_size: id.attn_dp.0,
            attn_dp_rank: id.attn_dp.1,
            pp_size: id.pp.0,
            pp_rank: id.pp.1,
            system_dp_size: id.system_dp.0,
            system_dp_rank: id.system_dp.1,
            rank_ip: self.0.endpoint.host().to_owned(),
            rank_port: self.0.endpoint.port(),
            page_size: spec.page_size,
            kv_cache_dtype: spec.kv_cache_dtype.clone(),
            kv_layout: spec.kv_layout.clone(),
            dsv41_spec_layout: None,
            load_balance_method: FOLLOW_BOOTSTRAP_ROOM.to_owned(),
            enable_dsa_cache_layer_split: false,
            enable_kv_cache_sharding: false,
            prefill_http_port: None,
            decode_allocation_policy: POLICY_EARLY.to_owned(),
            ext: self.0.extension,
        }
    }

    /// Register with the bootstrap server; blocks, with SGLang's retries. From here on decode finds this rank.
    ///
    /// # Errors
    /// [`ManagerError::Bootstrap`] with the address, the attempts and the last cause.
    pub fn register(&self, server: &RegistrationConfig) -> Result<(), ManagerError> {
        register_prefill_rank(server, &self.row()).map_err(|e| ManagerError::Bootstrap(e.to_string()))
    }

    /// A sender for a room; the room is in Bootstrapping. `bootstrap_addr` is only looked at for the fake host
    /// ([`FAKE_BOOTSTRAP_HOST`](super::FAKE_BOOTSTRAP_HOST)).
    ///
    /// # Errors
    /// [`RoomError`]; a room that is live already is not touched.
    pub fn sender(&self, room: Room, bootstrap_addr: &str) -> Result<KvSender, RoomError> {
        if is_fake(bootstrap_addr) {
            let shared = RoomShared::new(room, 0, None);
            shared.publish(KvPoll::Success, true, None, None);
            return Ok(KvSender::new(self.0.clone(), shared, true));
        }
        let life = self.0.live.take(room)?;
        let shared = RoomShared::new(room, life, self.0.engine.events());
        self.0.submit(PrefillCommand::Create(shared.clone()));
        Ok(KvSender::new(self.0.clone(), shared, false))
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
