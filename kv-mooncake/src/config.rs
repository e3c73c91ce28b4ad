//! How a transport is set up.

use std::path::PathBuf;
use std::time::Duration;

/// Settings of a [`MooncakeTransport`](crate::MooncakeTransport).
#[derive(Clone, Debug)]
pub struct MooncakeConfig {
    /// `libtransfer_engine.so`; `None`: looked for (see [`mooncake_sys::places`]).
    pub library: Option<PathBuf>,
    /// The address peers reach this host at; it becomes the first half of the session id. `None`: as SGLang finds it
    /// ([`local_ip`](kv_core::control::local_ip::local_ip)).
    pub host: Option<String>,
    /// Tasks (a contiguous copy each) given to the library and not ended, to one peer, over all lanes. At most
    /// [`MAX_TASKS`](Self::MAX_TASKS), whatever is set: the library refuses whole batches beyond 2048, and then may leave
    /// tasks waiting for ever.
    pub max_tasks_per_peer: usize,
    /// Tasks of one batch.
    pub max_batch: usize,
    /// Largest op in bytes.
    pub max_op_bytes: u64,
    /// Ops in flight, of one lane.
    pub max_ops_in_flight: usize,
    /// An op of which nothing has moved for this time is reported unresolved, and looked at further. `None`: what the library
    /// allows (`MC_TCP_PROGRESS_TIMEOUT_SEC` + `MC_TCP_STATUS_TIMEOUT_SEC`) and 5 s, so that it speaks first.
    pub op_timeout: Option<Duration>,
    /// A peer that nothing was heard of for this time gets one task alone; the next follow when that has arrived. A process
    /// that has taken its place breaks the connection, and so that one task, and gets nothing.
    pub confirm_after: Duration,
    /// How long a peer may take to answer for itself when it is connected.
    pub probe_timeout: Duration,
    /// Keep memory whose registration has ended mapped for the life of the process, once a peer may know it: a write that
    /// has begun goes on after the registration has ended. Turn it off only where every peer has forgotten this process
    /// before memory is freed.
    pub keep_exported: bool,
}

impl MooncakeConfig {
    /// The most tasks to one peer.
    pub const MAX_TASKS: usize = 1024;

    pub(crate) fn tasks(&self) -> usize {
        self.max_tasks_per_peer.clamp(1, Self::MAX_TASKS)
    }

    pub(crate) fn batch(&self) -> usize {
        self.max_batch.clamp(1, Self::MAX_TASKS)
    }
}

impl Default for MooncakeConfig {
    fn default() -> Self {
        Self {
            library: None,
            host: None,
            max_tasks_per_peer: 512,
            max_batch: 128,
            max_op_bytes: 16 << 20,
            max_ops_in_flight: 1024,
            op_timeout: None,
            confirm_after: Duration::from_millis(100),
            probe_timeout: Duration::from_secs(5),
            keep_exported: true,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_hold_whatever_is_set() {
        let config = MooncakeConfig { max_tasks_per_peer: 1 << 20, max_batch: 0, ..MooncakeConfig::default() };
        assert_eq!((config.tasks(), config.batch()), (1024, 1));
    }
}
