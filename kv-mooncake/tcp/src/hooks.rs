//! This transport's part of a manager.

use std::time::Duration;

use kv_core::hooks::ManagerHooks;
use kv_core::room::ReleasePolicy;
use kv_core::wire::{Dialect, MooncakeDialect};

/// The hooks of a manager over this transport: the frames of SGLang 0.5.23's Mooncake backend. They are those of
/// `kv_mooncake::MooncakeHooks`, which is there only with the library's crate.
#[derive(Debug)]
pub struct MooncakeTcpHooks {
    dialect: MooncakeDialect,
    release: ReleasePolicy,
}

impl MooncakeTcpHooks {
    /// The default: [`ReleasePolicy::AckOrTimeout`] of 30 s, as 0.5.23 has it. The wire does not say who writes, so the end of
    /// what a dead prefill wrote cannot be proven here. Each page that is freed so is counted.
    pub fn new() -> Self {
        Self::with_release(ReleasePolicy::AckOrTimeout(Duration::from_secs(30)))
    }

    /// With another release policy: [`ReleasePolicy::PerPeer`] never frees pages of a peer of ours without its word, and
    /// keeps them for ever when it died without one.
    pub fn with_release(release: ReleasePolicy) -> Self {
        Self { dialect: MooncakeDialect, release }
    }
}

impl Default for MooncakeTcpHooks {
    fn default() -> Self {
        Self::new()
    }
}

impl ManagerHooks for MooncakeTcpHooks {
    fn dialect(&self) -> &dyn Dialect {
        &self.dialect
    }

    fn sender_trace_module(&self) -> Option<&'static str> {
        Some("mooncake")
    }

    fn release_policy(&self) -> ReleasePolicy {
        self.release
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn r_a2_spans_and_frames_are_mooncakes() {
        let hooks = MooncakeTcpHooks::new();
        assert_eq!((hooks.dialect().name(), hooks.sender_trace_module()), ("mooncake", Some("mooncake")));
    }
}
