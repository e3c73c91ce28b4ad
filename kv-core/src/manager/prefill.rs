//! A prefill rank.

use std::os::fd::RawFd;
use std::sync::Arc;

use super::connector::ConnectorThreads;
use super::core::{Core, fake_room};
use super::dp::{DpRank, DpRanks};
use super::{KvSender, ManagerError, PrefillConfig, PrefillIdentity, RoomError, SenderOptions, is_fake};
use crate::bootstrap::types::POLICY_EARLY;
use crate::bootstrap::{PrefillRow, RegistrationConfig, register_prefill_rank};
use crate::control::zmq::PushRole;
use crate::directory::{DirectoryConfig, HttpDirectory};
use crate::engine::{
    AuxRule, Claim, PrefillCommand, PrefillShard, PrefillShardConfig, RoomEvent, Stats, StatsSnapshot,
};
use crate::hooks::ManagerHooks;
use crate::ids::{PrefillRank, Room};
use crate::layout::LocalLayout;
use crate::net::Endpoint;
use crate::room::{Failure, SenderPolicy};
use crate::topology::prefill_unique_rank;
use crate::transport::Transport;
use crate::wire::ExtPeer;

/// What a rank says of itself at the registry.
struct Place {
    layout: Arc<LocalLayout>,
    identity: PrefillIdentity,
    rank: PrefillRank,
    extension: Option<ExtPeer>,
    load_balance_method: String,
    dp: DpRanks,
}

/// One prefill rank: its control socket, its shard, its senders. Cheap to clone. Ends when it and every sender of it
/// are gone.
#[derive(Clone)]
pub struct PrefillManager {
    core: Arc<Core<PrefillShard>>,
    place: Arc<Place>,
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
        let (core, sockets) = Core::bind(
            config.host.as_deref(),
            &config.limits,
            config.zmq,
            PushRole::ToDecode,
            transport.clone(),
            hooks.clone(),
        )?;
        let extension = hooks.extension().then(ExtPeer::here);
        let layout = Arc::new(layout);
        let (weak, freed) = (Arc::downgrade(&core.engine), core.live.clone());
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
            max_op_bytes: transport.capabilities().max_op_bytes,
            unknown_slots: transport.capabilities().unknown_slots(),
            extension,
            commands: commands.clone(),
        };
        let lane = transport.lane()?;
        let dp = DpRanks::new(id, &config.load_balance_method, config.force_register_dp_rank);
        let mut shard =
            PrefillShard::new(shard_config, hooks, layout.clone(), lane, Box::new(connector), core.stats.clone());
        if dp.are_claimed() {
            let directory = DirectoryConfig { limits: config.limits, ..DirectoryConfig::prefill() };
            let directory = HttpDirectory::new(directory, Box::new(move |e| commands(PrefillCommand::Directory(e))));
            shard.set_directory(Box::new(directory.map_err(|e| ManagerError::Bootstrap(e.to_string()))?));
        }
        core.start("kv-prefill", shard, sockets.tapped(config.tap))?;
        let load_balance_method = config.load_balance_method;
        let place = Place { layout, identity: config.identity, rank, extension, load_balance_method, dp };
        Ok(Self { core: Arc::new(core), place: Arc::new(place) })
    }

    /// Its control socket, as decode reaches it.
    pub fn endpoint(&self) -> &Endpoint {
        &self.core.endpoint
    }

    /// Its number in status messages.
    pub fn rank(&self) -> PrefillRank {
        self.place.rank
    }

    /// Its counters.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.core.stats
    }

    /// All its numbers as of now, by peer too: what [`Stats`] counts, with the age of what is retained.
    pub fn snapshot(&self) -> StatsSnapshot {
        self.core.stats.snapshot_at(self.core.engine.now())
    }

    /// Hand the counters to the recorder that is installed for the `metrics` facade ([`Stats::export`]). Call it as often
    /// as the numbers should be fresh.
    #[cfg(feature = "metrics")]
    pub fn export_metrics(&self) {
        self.core.stats.export("prefill", self.core.backend(), self.core.engine.now());
    }

    /// What this rank PUTs to the bootstrap server.
    pub fn row(&self) -> PrefillRow {
        let (id, spec) = (&self.place.identity, self.place.layout.spec());
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
            rank_ip: self.core.endpoint.host().to_owned(),
            rank_port: self.core.endpoint.port(),
            page_size: spec.page_size,
            kv_cache_dtype: spec.kv_cache_dtype.clone(),
            kv_layout: spec.kv_layout.clone(),
            dsv41_spec_layout: None,
            load_balance_method: self.place.load_balance_method.clone(),
            enable_dsa_cache_layer_split: false,
            enable_kv_cache_sharding: false,
            prefill_http_port: None,
            decode_allocation_policy: POLICY_EARLY.to_owned(),
            ext: self.place.extension,
        }
    }

    /// Register with the bootstrap server; blocks, with SGLang's retries. From here on decode finds this rank.
    ///
    /// # Errors
    /// [`ManagerError::Bootstrap`] with the address, the attempts and the last cause.
    pub fn register(&self, server: &RegistrationConfig) -> Result<(), ManagerError> {
        register_prefill_rank(server, &self.row()).map_err(|e| ManagerError::Bootstrap(e.to_string()))
    }

    /// A sender for a room whose request names no DP rank: [`sender_with`](Self::sender_with) the default options.
    ///
    /// # Errors
    /// [`RoomError`]; a room that is live already is not touched.
    pub fn sender(&self, room: Room, bootstrap_addr: &str) -> Result<KvSender, RoomError> {
        self.sender_with(room, bootstrap_addr, SenderOptions::default())
    }

    /// A sender for a room; the room is in Bootstrapping. `bootstrap_addr`: the request's `host:port` (IPv6 bracketed),
    /// looked at where decode must learn this rank's DP rank from there, and for the fake host
    /// ([`FAKE_BOOTSTRAP_HOST`](super::FAKE_BOOTSTRAP_HOST)).
    ///
    /// A room that decode will ask another DP rank for fails at once, saying so.
    ///
    /// # Errors
    /// [`RoomError`]; a room that is live already is not touched.
    pub fn sender_with(&self, room: Room, bootstrap_addr: &str, options: SenderOptions) -> Result<KvSender, RoomError> {
        if is_fake(bootstrap_addr) {
            return Ok(KvSender::new(self.core.clone(), fake_room(room), true));
        }
        let shared = self.core.take(room)?;
        self.core.engine.enqueue(PrefillCommand::Create(shared.clone()));
        match self.place.dp.serves(room, options.prefill_dp_rank) {
            Ok(DpRank::Known) => {}
            Ok(DpRank::Claim(dp_rank)) => {
                let claim = Claim { bootstrap_addr: bootstrap_addr.to_owned(), dp_rank };
                self.core.engine.enqueue(PrefillCommand::Claim(shared.clone(), claim));
            }
            Err(reason) => {
                self.core.engine.enqueue(PrefillCommand::Fail(shared.clone(), Failure::here(reason)));
            }
        }
        self.core.engine.kick();
        Ok(KvSender::new(self.core.clone(), shared, false))
    }

    /// Ask for changes of all rooms made from now on: a descriptor that turns readable when
    /// [`drain_events`](Self::drain_events) has news.
    ///
    /// # Errors
    /// The system's, when no descriptor is left.
    pub fn subscribe(&self) -> std::io::Result<RawFd> {
        self.core.engine.subscribe()
    }

    /// Append what changed since the last call: at most one event a room, with its newest state.
    pub fn drain_events(&self, out: &mut Vec<RoomEvent>) {
        self.core.engine.drain_events(out);
    }
}
