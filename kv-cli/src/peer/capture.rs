//! The conversation of a rank, as a file: each control message that it sends or takes.

use kv_transfer::manager::{DecodeConfig, PrefillConfig};

use super::args::CommonArgs;
use crate::error::Result;

pub fn prefill(config: PrefillConfig, _args: &CommonArgs) -> Result<PrefillConfig> {
    Ok(config)
}

pub fn decode(config: DecodeConfig, _args: &CommonArgs) -> Result<DecodeConfig> {
    Ok(config)
}
