//! What differs between backends (requirement A2): a dialect, two messages, state preparation, a trace module, and the
//! policies that depend on whether the peers are ours.

use std::time::Duration;

use crate::control::Multipart;
use crate::room::{FailedStatusPolicy, ReleasePolicy};
use crate::wire::{Dialect, Metadata, NixlDialect, Registration, WireError};

/// A backend's part of a manager. Everything has a default but the dialect.
pub trait ManagerHooks: Send + Sync + 'static {
    /// How messages are framed.
    fn dialect(&self) -> &dyn Dialect;

    /// What a decode rank says of itself, where that is not what its layout says: an engine that calls its pool otherwise
    /// than the transport does.
    fn adjust_registration(&self, registration: &mut Registration) {
        let _ = registration;
    }

    /// Decode's registration, sent once per prefill rank.
    fn build_receiver_registration_message(&self, registration: &Registration) -> Result<Multipart, WireError> {
        self.dialect().encode_registration(registration)
    }

    /// Decode's metadata, sent once per room and prefill rank.
    fn build_receiver_metadata_message(&self, metadata: &Metadata) -> Result<Multipart, WireError> {
        self.dialect().encode_metadata(metadata)
    }

    /// The name by which metadata will speak of the decode rank that registered. Mori's is inside its engine
    /// description; without one the registration is dropped.
    fn peer_name(&self, registration: &Registration) -> Option<String> {
        Some(registration.name.clone()).filter(|name| !name.is_empty())
    }

    /// State indices as this backend sends them (Mori skips CP-replicated state and normalises per component).
    fn prepare_send_state_indices(&self, state_indices: Vec<Vec<i32>>) -> Vec<Vec<i32>> {
        state_indices
    }

    /// Module name on trace spans (Mooncake: `mooncake`).
    fn sender_trace_module(&self) -> Option<&'static str> {
        None
    }

    /// When decode is told of a failure while a write is unresolved: by default as each peer allows.
    fn failed_status_policy(&self) -> FailedStatusPolicy {
        FailedStatusPolicy::PerPeer
    }

    /// When decode's pages of a failed room are free: by default on proof between two of ours, else on proof or after
    /// 30 s.
    fn release_policy(&self) -> ReleasePolicy {
        ReleasePolicy::PerPeer(Duration::from_secs(30))
    }

    /// Whether peers of ours are spoken to with the extension (H4). Without it every peer gets exactly 0.5.23's bytes.
    fn extension(&self) -> bool {
        true
    }
}

/// The hooks of the embedded TCP transport: NIXL's frames under a guard of their own. Both sides are ours, so a
/// failure is told at once, and decode's pages wait for the ACK.
#[derive(Debug)]
pub struct TcpHooks {
    dialect: NixlDialect,
    release: ReleasePolicy,
}

impl TcpHooks {
    /// The default: pages are released by proof (an ACK, or the death of the process), or 30 s after the ABORT without
    /// it (counted). [`ReleasePolicy::PerPeer`] waits for proof alone; a prefill **host** that vanishes for good, and has no
    /// successor, then keeps the pages of the rooms it had.
    pub fn new() -> Self {
        Self::with_release(ReleasePolicy::AckOrTimeout(Duration::from_secs(30)))
    }

    /// With another release policy.
    pub fn with_release(release: ReleasePolicy) -> Self {
        Self { dialect: NixlDialect::with_guard(TCP_GUARD), release }
    }
}

/// First frame of the embedded TCP transport's registration and metadata.
pub const TCP_GUARD: &str = "KvTcpMsgGuard";

impl Default for TcpHooks {
    fn default() -> Self {
        Self::new()
    }
}

impl ManagerHooks for TcpHooks {
    fn dialect(&self) -> &dyn Dialect {
        &self.dialect
    }

    fn failed_status_policy(&self) -> FailedStatusPolicy {
        FailedStatusPolicy::AtOnce
    }

    fn release_policy(&self) -> ReleasePolicy {
        self.release
    }
}
