//! The engines this program was built with.

use std::sync::Arc;

use crate::driver::engine::{DecodeEngine, EngineFactory, PrefillStart};
use crate::driver::protocol::WorkerConfig;
use crate::error::{CliError, Result};
use crate::memory::KvMemory;

/// Picks the engine by the name of the transport.
#[derive(Clone, Copy, Debug, Default)]
pub struct BuiltIn;

/// Names of the transports that are built in.
pub const TRANSPORTS: &[&str] = &[];

fn unknown(name: &str) -> CliError {
    let known = if TRANSPORTS.is_empty() { "none".to_owned() } else { TRANSPORTS.join(", ") };
    CliError::new(format!("transport '{name}' is not built into this program"))
        .hint(format!("built in: {known}; `kvt doctor` says what works here"))
}

impl EngineFactory for BuiltIn {
    fn prefill(&self, config: &WorkerConfig, _memory: Arc<KvMemory>) -> Result<PrefillStart> {
        Err(unknown(&config.transport))
    }

    fn decode(&self, config: &WorkerConfig, _memory: Arc<KvMemory>) -> Result<Box<dyn DecodeEngine>> {
        Err(unknown(&config.transport))
    }
}
