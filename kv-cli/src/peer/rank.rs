//! What both roles start from: the transport, the rank's place, its layout.

use std::sync::Arc;
use std::time::Duration;

use kv_core::control::Multipart;
use kv_core::room::ReleasePolicy;
use kv_core::wire::{Dialect, Extension, MessageKind, Metadata, Registration, WireError};
use kv_transfer::bootstrap::address::join_host_port;
use kv_transfer::hooks::ManagerHooks;
use kv_transfer::layout::LocalLayout;
use kv_transfer::memory::MemoryKind;
use kv_transfer::transport::Transport;
use serde_json::{Value, json};

use super::args::{CommonArgs, DecodeArgs, LayerIds, MemKind, seconds};
use super::input::Input;
use super::store::Store;
use crate::driver::builtin;
use crate::driver::layout::{self, Described};
use crate::driver::managed::Backend;
use crate::driver::protocol::TcpPath;
use crate::error::Result;
use crate::shape::{Rank, Shape};

/// The rank, as events name it.
pub fn names(args: &CommonArgs) -> Value {
    json!({ "tp": args.tp_rank, "pp": args.pp_rank, "cp": 0, "dp": args.dp_rank })
}

/// Address of the bootstrap server, as clients write it.
pub fn bootstrap_addr(args: &CommonArgs) -> String {
    join_host_port(&args.bootstrap_host, args.bootstrap_port)
}

/// The rooms this DP rank serves, with their places in the list.
pub fn rooms(args: &CommonArgs) -> Vec<(usize, u64)> {
    let ours = |room: &u64| args.dp_size == 1 || room % u64::from(args.dp_size) == u64::from(args.dp_rank);
    args.rooms.0.iter().copied().enumerate().filter(|(_, room)| ours(room)).collect()
}

/// How many of them may start: those before the gate, or all.
pub fn allowed(args: &CommonArgs, rooms: &[(usize, u64)], input: &Input) -> usize {
    match args.gate {
        Some(n) if !input.gate_open() => rooms.iter().filter(|(i, _)| *i < n).count(),
        _ => rooms.len(),
    }
}

/// The transport of `--backend`.
pub fn backend(args: &CommonArgs) -> Result<Backend> {
    builtin::backend(&args.backend, &args.host_ip, TcpPath::Auto)
}

/// The rank's memory, registered.
pub fn layout(args: &CommonArgs, transport: &dyn Transport, store: &Store) -> Result<LocalLayout> {
    let described = Described {
        kv_cache_dtype: args.dtype_str.clone(),
        shape: Shape { tp: args.tp_size, pp: args.pp_size, ..Shape::default() },
        rank: Rank { tp: args.tp_rank, pp: args.pp_rank, ..Rank::default() },
        layer_ids: args.layer_ids == LayerIds::Force,
    };
    layout::register(transport, &store.memory, &store.rows, described)
}

/// The whole run's time.
pub fn timeout(args: &CommonArgs) -> Result<Duration> {
    seconds("--timeout", args.timeout)
}

/// The hooks of a backend, dressed up for 0.5.23's sake.
pub struct Dressed {
    inner: Arc<dyn ManagerHooks>,
    /// Send our extension to everybody, known or not: 0.5.23 reads its own frames by position, and takes no notice.
    offer: bool,
    /// Call the pool VRAM, as 0.5.23 calls its own unless told otherwise.
    vram: bool,
    /// How long pages wait for an ACK.
    release: Duration,
}

impl Dressed {
    /// For a decode rank.
    pub fn new(inner: Arc<dyn ManagerHooks>, args: &DecodeArgs) -> Result<Arc<Self>> {
        let vram = args.common.mem_kind != MemKind::Dram && args.common.backend == "nixl";
        let release = args.release()?;
        Ok(Arc::new(Self { inner, offer: args.offer_extension, vram, release }))
    }

    fn dress(&self, kind: MessageKind, mut message: Multipart) -> std::result::Result<Multipart, WireError> {
        if self.offer {
            self.dialect().attach_extension(kind, &mut message, &Extension::from(kv_core::wire::ExtPeer::here()))?;
        }
        Ok(message)
    }
}

impl ManagerHooks for Dressed {
    fn dialect(&self) -> &dyn Dialect {
        self.inner.dialect()
    }

    fn adjust_registration(&self, registration: &mut Registration) {
        self.inner.adjust_registration(registration);
        if self.vram {
            let device = u32::try_from(registration.gpu_id).unwrap_or(0);
            registration.kv_kinds.fill(MemoryKind::Vram { device });
        }
    }

    fn build_receiver_registration_message(&self, r: &Registration) -> std::result::Result<Multipart, WireError> {
        self.dress(MessageKind::Registration, self.inner.build_receiver_registration_message(r)?)
    }

    fn build_receiver_metadata_message(&self, m: &Metadata) -> std::result::Result<Multipart, WireError> {
        self.dress(MessageKind::Metadata, self.inner.build_receiver_metadata_message(m)?)
    }

    fn peer_name(&self, registration: &Registration) -> Option<String> {
        self.inner.peer_name(registration)
    }

    fn prepare_send_state_indices(&self, state_indices: Vec<Vec<i32>>) -> Vec<Vec<i32>> {
        self.inner.prepare_send_state_indices(state_indices)
    }

    fn sender_trace_module(&self) -> Option<&'static str> {
        self.inner.sender_trace_module()
    }

    fn failed_status_policy(&self) -> kv_core::room::FailedStatusPolicy {
        self.inner.failed_status_policy()
    }

    fn release_policy(&self) -> ReleasePolicy {
        ReleasePolicy::AckOrTimeout(self.release)
    }

    fn extension(&self) -> bool {
        self.inner.extension()
    }
}
