//! A rank's pool and metadata rows, registered, and described as an engine would.

use std::sync::Arc;

use kv_transfer::aux_slots::AuxSlots;
use kv_transfer::layout::{AttentionKind, EntryDesc, LayoutSpec, LocalLayout};
use kv_transfer::memory::MemoryOwner;
use kv_transfer::transport::Transport;

use crate::error::{CliError, Result};
use crate::memory::KvMemory;
use crate::shape::{Rank, Shape};

/// What the memory does not say of itself.
pub struct Described {
    /// Name of the KV's data type: both sides must have the same.
    pub kv_cache_dtype: String,
    /// Sizes of this side.
    pub shape: Shape,
    /// This rank.
    pub rank: Rank,
    /// Whether each buffer's layer is named.
    pub layer_ids: bool,
}

/// Register a pool and its rows with a transport.
///
/// # Errors
/// The transport refuses the memory, or the layout makes no sense.
pub fn register(
    transport: &dyn Transport,
    memory: &Arc<KvMemory>,
    rows: &Arc<AuxSlots>,
    described: Described,
) -> Result<LocalLayout> {
    let failed = |what: &str, e: &dyn std::fmt::Display| CliError::new(format!("{what}: {e}"));
    let owner: Arc<dyn MemoryOwner> = memory.clone();
    let pool = transport.register(owner).map_err(|e| failed("cannot register the pool", &e))?;
    let owner: Arc<dyn MemoryOwner> = rows.clone();
    let aux = transport.register(owner).map_err(|e| failed("cannot register the metadata rows", &e))?;
    let geometry = memory.geometry();
    let kv = (0..geometry.entries()).map(|entry| EntryDesc {
        region: pool.id(),
        offset: memory.entry_offset(entry),
        len: memory.entry_len(),
        item_len: geometry.item_len(),
        layer_id: described.layer_ids.then(|| geometry.entry(entry).0),
    });
    let spec = LayoutSpec {
        kv: kv.collect(),
        aux: rows
            .entries()
            .map(|e| EntryDesc { region: aux.id(), offset: e.offset, len: e.len, item_len: e.item_len, layer_id: None })
            .collect(),
        page_size: geometry.page_tokens,
        kv_cache_dtype: described.kv_cache_dtype,
        attention: if geometry.kinds == 1 { AttentionKind::Mla } else { AttentionKind::Mha },
        attn_tp_size: described.shape.tp,
        engine_rank: described.rank.tp,
        pp_size: described.shape.pp,
        pp_rank: described.rank.pp,
        prefill_start_layer: geometry.layers.start,
        prefill_end_layer: Some(geometry.layers.end),
        ..LayoutSpec::default()
    };
    LocalLayout::new(spec, [pool, aux]).map_err(|e| failed("the pool's layout", &e))
}
