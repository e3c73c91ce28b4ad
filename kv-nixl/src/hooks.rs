//! NIXL's part of a manager.

use std::time::Duration;

use kv_core::hooks::ManagerHooks;
use kv_core::room::ReleasePolicy;
use kv_core::wire::{Dialect, NixlDialect};

/// The hooks of a manager over NIXL: the frames of SGLang 0.5.23's NIXL backend, which its workers understand in both
/// roles.
///
/// Towards 0.5.23 a failure is told once its writes have settled; between two of ours at once.
#[derive(Debug)]
pub struct NixlHooks {
    dialect: NixlDialect,
    release: ReleasePolicy,
}

impl NixlHooks {
    /// The default: [`ReleasePolicy::AckOrTimeout`] of 30 s, as 0.5.23 has it. That no byte lands later is then policy
    /// where prefill died: the library says nothing of writes that come in, so their end cannot be proven here. Each page
    /// that is freed so is counted.
    pub fn new() -> Self {
        Self::with_release(ReleasePolicy::AckOrTimeout(Duration::from_secs(30)))
    }

    /// With another release policy: [`ReleasePolicy::PerPeer`] never frees pages of a peer of ours without its word, and
    /// keeps them for ever when it died without one.
    pub fn with_release(release: ReleasePolicy) -> Self {
        Self { dialect: NixlDialect::new(), release }
    }
}

impl Default for NixlHooks {
    fn default() -> Self {
        Self::new()
    }
}

impl ManagerHooks for NixlHooks {
    fn dialect(&self) -> &dyn Dialect {
        &self.dialect
    }

    fn release_policy(&self) -> ReleasePolicy {
        self.release
    }
}
