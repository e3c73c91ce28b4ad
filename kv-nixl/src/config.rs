//! How a transport is set up.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of a [`NixlTransport`](crate::NixlTransport).
#[derive(Clone, Debug)]
pub struct NixlConfig {
    /// `libnixl_capi.so`; `None`: looked for (see [`nixl_capi_sys::places`]).
    pub library: Option<PathBuf>,
    /// The NIXL backend.
    pub backend: String,
    /// Longest time between two sweeps of the library's progress thread, which also wakes for every event. Never 0:
    /// the thread would spin on a whole core.
    pub progress_delay: Duration,
    /// UCX workers. Each posting thread (a manager's shard) uses one of them; with fewer workers than shards, posts of
    /// different shards wait for each other.
    pub workers: u32,
    /// Largest op in bytes. A post between processes of one host copies before it returns: this bounds how long other
    /// rooms of the shard wait.
    pub max_op_bytes: u64,
    /// Ops in flight, of one lane.
    pub max_ops_in_flight: usize,
    /// Descriptors (about 40 bytes each) that may be kept prepared, over all peers: a page of an entry takes one here, and one
    /// for each peer generation. Beyond that, lists are made anew for each op, which takes 1 to 4 % longer. 0: none.
    pub prepared_descriptors: u64,
    /// An op that is still in progress after this time is reported unresolved, and looked at further: a stopped peer's
    /// kernel keeps connections alive for ever, so nothing else would say that it hangs.
    pub op_timeout: Duration,
    /// What UCX does when a peer fails.
    pub errors: PeerErrors,
    /// More parameters of the backend, as NIXL names them (`ucx_devices`, `engine_config`, ..).
    pub parameters: Vec<(String, String)>,
    /// Keep memory whose registration has ended mapped for the life of the process, once a peer may know it. The library
    /// does not take access back, and a write that comes in over TCP to memory that is no longer there kills *this*
    /// process. Turn it off only where every peer has forgotten this process before memory is freed.
    pub keep_exported: bool,
    /// Name of the agent; `None`: a fresh UUID, which names this process generation.
    pub name: Option<String>,
    /// Longest metadata of a peer that is read, bytes.
    pub max_metadata_bytes: usize,
}

/// What UCX does when a peer fails (`ucx_error_handling_mode`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PeerErrors {
    /// It notices, and fails the transfers. Shared-memory transports cannot, and are not used: copies on one host go by
    /// the kernel (CMA).
    #[default]
    Noticed,
    /// It does not. Over shared memory a transfer to a dead peer stays in progress for ever; only where the peer runs on
    /// this host, and says which process it is, do we see its end. After such a death the library's thread spins, and its
    /// agent cannot be ended: it is kept until the process ends, and was seen to crash it then. Such a program ends by
    /// `_exit`.
    Ignored,
}

impl Default for NixlConfig {
    fn default() -> Self {
        Self {
            library: None,
            backend: "UCX".into(),
            progress_delay: Duration::from_millis(100),
            workers: 1,
            max_op_bytes: 4 << 20,
            max_ops_in_flight: 1024,
            prepared_descriptors: 2 << 20,
            op_timeout: Duration::from_secs(30),
            errors: PeerErrors::default(),
            parameters: Vec::new(),
            keep_exported: true,
            name: None,
            max_metadata_bytes: 16 << 20,
        }
    }
}
