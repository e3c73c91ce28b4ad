//! One prefill rank writes a decode rank's metadata slot: last PP stage, CP rank 0, lowest TP rank of those that serve it.
//!
//! 0.5.23 has every non-dummy rank of NIXL and Mooncake write the whole row, identical rows over each other. A slow rank
//! may then write a slot again that decode has read. One writer is enough for any decode: its Success counts only
//! together with that of every other rank.

use crate::wire::Registration;

/// This prefill rank's place, as far as metadata slots go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AuxRule {
    /// Attention TP size, and this rank.
    pub attn_tp: (u32, u32),
    /// Attention CP rank.
    pub cp_rank: u32,
    /// This rank is of the last PP stage.
    pub last_stage: bool,
    /// KV entries of this rank.
    pub kv_entries: usize,
}

impl AuxRule {
    /// The only rank.
    pub const ALONE: Self = Self { attn_tp: (1, 0), cp_rank: 0, last_stage: true, kv_entries: 0 };

    /// Whether this rank writes the slot of the decode that registered so. `told`: a decode of ours names its writer, since
    /// it knows whom it asked.
    ///
    /// How many stages serve a decode of 0.5.23 it does not say. One that has no more KV entries than this stage takes
    /// them from this stage alone (PP on both sides).
    pub fn writes(&self, decode: &Registration, told: Option<bool>) -> bool {
        if let Some(told) = told {
            return told;
        }
        // Sizes that do not divide were refused with the registration.
        let group = (self.attn_tp.0 / decode.attn_tp_size.max(1)).max(1);
        let lowest = self.attn_tp.1.is_multiple_of(group);
        let stage = self.last_stage || decode.kv.len() <= self.kv_entries;
        self.cp_rank == 0 && lowest && stage
    }
}
