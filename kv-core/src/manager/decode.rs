//! A decode rank.

use std::os::fd::RawFd;
use std::sync::Arc;

use super::core::{Core, fake_room};
use super::one_each::Serving;
use super::{DecodeConfig, KvReceiver, ManagerError, RoomError, is_fake};
use crate::control::zmq::PushRole;
use crate::directory::{DecodeProfile, DirectoryConfig, HeartbeatConfig, HttpDirectory, NixlEntries};
use crate::engine::{DecodeCommand, DecodeShard, DecodeShardConfig, RoomEvent, Stats, StatsSnapshot};
use crate::hooks::ManagerHooks;
use crate::host::HostIdentity;
use crate::ids::Room;
use crate::layout::LocalLayout;
use crate::memory::MemoryKind;
use crate::net::Endpoint;
use crate::room::ReceiverPolicy;
use crate::transport::Transport;
use crate::wire::ExtPeer;

/// One decode rank: its control socket, its shard, its directory, its receivers. Cheap to clone. Ends when it and
/// every receiver of it are gone.
#[derive(Clone)]
pub struct DecodeManager(Arc<Core<DecodeShard>>);

impl DecodeManager {
    /// Bind the control socket and start the shard. `layout` holds regions registered with `transport`, which serves this
    /// decode manager alone.
    ///
    /// # Errors
    /// [`ManagerError`].
    pub fn start(
        config: DecodeConfig,
        transport: Arc<dyn Transport>,
        hooks: Arc<dyn ManagerHooks>,
        layout: LocalLayout,
    ) -> Result<Self, ManagerError> {
        let of = Serving::one(transport.clone(), hooks.dialect().registers_once())?;
        let (core, sockets) = Core::bind(
            config.host.as_deref(),
            &config.limits,
            config.zmq,
            PushRole::ToPrefill,
            transport.clone(),
            hooks.clone(),
        )?;
        let weak = Arc::downgrade(&core.engine);
        let spec = layout.spec().clone();
        let (name, at, adjust) = (transport.local_name().to_owned(), core.endpoint.clone(), hooks.clone());
        let agent = name.clone();
        let registration = Arc::new(move || {
            let mut said = layout.to_registration(at.clone(), agent.clone(), of.transport().local_metadata());
            adjust.adjust_registration(&mut said);
            said
        });
        let said = registration();
        let nixl = NixlEntries {
            host_memory: said.kv_kinds.contains(&MemoryKind::Dram),
            layer_ids: !said.kv_layer_ids.is_empty(),
        };
        let directory_config = DirectoryConfig {
            heartbeat: HeartbeatConfig {
                interval: config.heartbeat_interval,
                max_failure: config.heartbeat_max_failure,
            },
            force_query_dp_rank: config.force_query_dp_rank,
            dp_query_timeout: config.waiting_timeout,
            limits: config.limits.clone(),
            ..DirectoryConfig::decode(DecodeProfile {
                kv_layout: spec.kv_layout.clone(),
                nixl: (hooks.dialect().name() == "nixl").then_some(nixl),
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
        let freed = core.live.clone();
        let inbound = transport.clone();
        let shard_config = DecodeShardConfig {
            limits: config.limits.clone(),
            policy: Arc::new(ReceiverPolicy {
                waiting_timeout: config.waiting_timeout,
                release: hooks.release_policy(),
            }),
            inbound_dead: Arc::new(move |process| inbound.inbound_dead(process)),
            extension: hooks.extension().then(ExtPeer::here),
            host: Some(HostIdentity::local()),
            endpoint: core.endpoint.clone(),
            name,
            freed: Arc::new(move |room| freed.freed(room)),
            registration,
        };
        let shard = DecodeShard::new(shard_config, hooks, Box::new(directory), core.stats.clone());
        core.start("kv-decode", shard, sockets.tapped(config.tap))?;
        Ok(Self(Arc::new(core)))
    }

    /// Its control socket, as prefill reaches it.
    pub fn endpoint(&self) -> &Endpoint {
        &self.0.endpoint
    }

    /// Its counters.
    pub fn stats(&self) -> &Arc<Stats> {
        &self.0.stats
    }

    /// All its numbers as of now, by peer too: what [`Stats`] counts, with the age of what is retained.
    pub fn snapshot(&self) -> StatsSnapshot {
        self.0.stats.snapshot_at(self.0.engine.now())
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
        let fake = is_fake(bootstrap_addr);
        let shared = if fake { fake_room(room) } else { self.0.take(room)? };
        Ok(KvReceiver::new(self.0.clone(), shared, bootstrap_addr.to_owned(), fake))
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
