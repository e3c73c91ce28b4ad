//! Our layout joined with one peer's.

use std::sync::Arc;

use super::pairs::{compressed_kv_len, unplaceable};
use super::{
    AttentionKind, CompressedList, EntryRef, LayoutError, LocalLayout, PeerLayout, Unsupported,
    build_transfer_entry_pairs, compressed_offsets, mha_pairs, mla_pairs,
};
use crate::memory::{MemoryKind, RegisteredRegion};
use crate::plan::EntryPair;

/// Page numbers on the wire are i32.
const MAX_PAGES: u64 = 1 << 31;

/// How many pages a peer is taken to have when it does not say.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum UnknownSlots {
    /// As many as we have: what NIXL peers mean.
    #[default]
    AsOurs,
    /// As many as can be addressed. For backends that check every write against what the peer registered with them,
    /// and whose peers never say (Mooncake, Mori): their pools are often larger than ours.
    CheckedByBackend,
}

/// How our entries and a peer's pair, and how far each side's pages and slots reach. Made once per registered peer
/// (requirement A4); every chunk to the peer is planned from it.
#[derive(Clone, Debug)]
pub struct Pairing {
    kv: Arc<[EntryPair]>,
    aux: Arc<[EntryPair]>,
    kv_bounds: (u64, u64),
    aux_bounds: (u64, u64),
    aux_unpaired: (u32, u32),
    elected_kv_writer: bool,
    regions: Arc<[Arc<RegisteredRegion>]>,
}

impl Pairing {
    /// Join `local` (a prefill rank) with `peer` (a decode rank); a peer that does not say how many pages it has is
    /// taken to have as many as we.
    ///
    /// # Errors
    /// [`LayoutError`]: what the peer is refused with.
    pub fn new(local: &LocalLayout, peer: &PeerLayout) -> Result<Self, LayoutError> {
        Self::with_unknown_slots(local, peer, UnknownSlots::AsOurs)
    }

    /// [`Self::new`] with a choice for peers that do not say how many pages they have.
    ///
    /// # Errors
    /// [`LayoutError`]: what the peer is refused with.
    pub fn with_unknown_slots(
        local: &LocalLayout,
        peer: &PeerLayout,
        unknown: UnknownSlots,
    ) -> Result<Self, LayoutError> {
        check_parallelism(local, peer)?;
        let (kv, kv_bounds) = pair_kv(local, peer, unknown)?;
        let (aux, aux_bounds) = pair_aux(local, peer)?;
        let paired = aux.len() as u32;
        let spec = local.spec();
        let (pt, dt) = (spec.attn_tp_size, peer.attn_tp_size);
        Ok(Self {
            kv: kv.into(),
            aux: aux.into(),
            kv_bounds,
            aux_bounds,
            aux_unpaired: (spec.aux.len() as u32 - paired, peer.aux.len() as u32 - paired),
            elected_kv_writer: pt <= dt || (spec.engine_rank % pt).is_multiple_of(pt / dt),
            regions: Arc::clone(local.regions()),
        })
    }

    /// Paired KV entries, in our order.
    pub fn kv(&self) -> &Arc<[EntryPair]> {
        &self.kv
    }

    /// Paired aux entries, in order.
    pub fn aux(&self) -> &Arc<[EntryPair]> {
        &self.aux
    }

    /// Pages that may be named: below `.0` here, below `.1` at the peer.
    pub fn kv_bounds(&self) -> (u64, u64) {
        self.kv_bounds
    }

    /// Slots that may be named: below `.0` here, below `.1` at the peer. 0.5.23 does not send the peer's; then `.1` only
    /// keeps addresses from overflowing and the backend's own check stands alone.
    pub fn aux_bounds(&self) -> (u64, u64) {
        self.aux_bounds
    }

    /// Aux entries without a partner: ours, the peer's. SGLang stops at the shorter list; log it once.
    pub fn aux_unpaired(&self) -> (u32, u32) {
        self.aux_unpaired
    }

    /// With more prefill than decode TP ranks on (hybrid) MLA: whether this rank is the one of its group whose KV need
    /// go out (Mooncake elects, NIXL and Mori send from all).
    pub fn elected_kv_writer(&self) -> bool {
        self.elected_kv_writer
    }

    /// Our registered regions, for [`WriteOp::regions`](crate::transport::WriteOp::regions).
    pub fn regions(&self) -> &Arc<[Arc<RegisteredRegion>]> {
        &self.regions
    }
}

fn check_parallelism(local: &LocalLayout, peer: &PeerLayout) -> Result<(), LayoutError> {
    let spec = local.spec();
    let (ours, theirs) = (spec.attn_tp_size, peer.attn_tp_size);
    if !ours.max(theirs).is_multiple_of(ours.min(theirs)) {
        return Err(LayoutError::TpIndivisible { ours, theirs });
    }
    if ours != theirs && spec.attention == AttentionKind::Mha {
        return Err(LayoutError::NotSupported { what: Unsupported::HeadSlices, ours, theirs });
    }
    if spec.attention == AttentionKind::Mha {
        // Heads are split over TP: a rank may only write to the rank that has the same ones.
        let (ours, theirs) = (spec.engine_rank % ours, peer.engine_rank % ours);
        if ours != theirs {
            return Err(mismatch("attention TP rank", ours, theirs));
        }
    }
    let (ours, theirs) = (spec.dcp_size, peer.dcp_size);
    if ours == theirs {
        if spec.dcp_rank != peer.dcp_rank {
            return Err(mismatch("dcp_rank", spec.dcp_rank, peer.dcp_rank));
        }
    } else if ours == 1 && spec.attention.is_any_mla() {
        return Err(LayoutError::NotSupported { what: Unsupported::DcpRelayout, ours, theirs });
    } else {
        return Err(mismatch("dcp_size", ours, theirs));
    }
    Ok(())
}

fn kv_pairs(local: &LocalLayout, peer: &PeerLayout) -> Result<Vec<(u32, u32)>, LayoutError> {
    let spec = local.spec();
    let (n_src, n_dst) = (spec.kv.len() as u32, peer.kv.len() as u32);
    let ids = local.kv_layer_ids();
    if !ids.is_empty() || !peer.kv_layer_ids.is_empty() {
        return build_transfer_entry_pairs(&ids, &peer.kv_layer_ids, n_src, n_dst, spec.pp_size == 1);
    }
    if spec.attention == AttentionKind::Mha {
        let pp = (spec.pp_rank, spec.pp_size);
        return mha_pairs(n_src, n_dst, spec.prefill_start_layer, spec.num_draft_entries, pp);
    }
    if spec.mla_compression_ratios.is_empty() || n_src == n_dst {
        return mla_pairs(n_src, n_dst, spec.prefill_start_layer, spec.num_draft_entries);
    }
    // 0.5.23 reads a KV list of another length by the rule for SWA state, and writes to the wrong entries.
    let draft = spec.num_draft_entries;
    if u64::from(n_dst) != compressed_kv_len(&spec.mla_compression_ratios) + u64::from(draft) {
        return Err(unplaceable(n_src, n_dst, "not the length of a compressed-MLA list"));
    }
    let Some(end) = spec.prefill_end_layer else {
        return Err(unplaceable(n_src, n_dst, "prefill_end_layer is unknown"));
    };
    let layers = spec.prefill_start_layer..end;
    let mut theirs = compressed_offsets(&spec.mla_compression_ratios, layers, CompressedList::Kv, n_dst - draft)?;
    theirs.extend(n_dst - draft..n_dst);
    if theirs.len() != n_src as usize {
        return Err(unplaceable(n_src, n_dst, "our layers have another number of entries"));
    }
    Ok((0..n_src).zip(theirs).collect())
}

fn pair_kv(
    local: &LocalLayout,
    peer: &PeerLayout,
    unknown: UnknownSlots,
) -> Result<(Vec<EntryPair>, (u64, u64)), LayoutError> {
    let spec = local.spec();
    let pairs = kv_pairs(local, peer)?;
    let src_bound = local.kv_slots().min(MAX_PAGES);
    let mut dst_bound = match (peer.kv_slots, unknown) {
        (Some(slots), _) => slots.min(MAX_PAGES),
        (None, UnknownSlots::AsOurs) => src_bound,
        (None, UnknownSlots::CheckedByBackend) => MAX_PAGES,
    };
    let mut out = Vec::with_capacity(pairs.len());
    for (i, j) in pairs {
        let src = &spec.kv[i as usize];
        // A peer that sent one length only is held to that one; for the others ours is what is written.
        if let Some(&theirs) = peer.kv_item_lens.get(j as usize)
            && theirs != src.item_len
        {
            return Err(LayoutError::ItemLenMismatch { our_entry: i, their_entry: j, ours: src.item_len, theirs });
        }
        let dst_addr = peer.kv[j as usize];
        dst_bound = dst_bound.min(addressable(EntryRef::Kv(j), dst_addr, src.item_len)?);
        let kind = peer.kv_kinds.get(j as usize).copied().unwrap_or_default();
        out.push(entry_pair(src, (i, j), dst_addr, kind));
    }
    Ok((out, (src_bound, dst_bound)))
}

fn pair_aux(local: &LocalLayout, peer: &PeerLayout) -> Result<(Vec<EntryPair>, (u64, u64)), LayoutError> {
    let spec = local.spec();
    let src_bound = local.aux_slots();
    let mut dst_bound = peer.aux_slots.unwrap_or(u64::from(u32::MAX));
    let mut out = Vec::with_capacity(spec.aux.len().min(peer.aux.len()));
    for ((src, &dst_addr), i) in spec.aux.iter().zip(&peer.aux).zip(0u32..) {
        if let Some(&theirs) = peer.aux_item_lens.get(i as usize)
            && theirs != src.item_len
        {
            return Err(mismatch("aux row bytes", src.item_len, theirs));
        }
        dst_bound = dst_bound.min(addressable(EntryRef::Aux(i), dst_addr, src.item_len)?);
        // Metadata rows are in host memory at every peer.
        out.push(entry_pair(src, (i, i), dst_addr, MemoryKind::Dram));
    }
    Ok((out, (src_bound, dst_bound)))
}

/// Items that fit between `addr` and the end of the address space.
fn addressable(entry: EntryRef, addr: u64, item_len: u64) -> Result<u64, LayoutError> {
    match (u64::MAX - addr) / item_len {
        0 => Err(LayoutError::AddressOverflow { entry, addr, len: item_len }),
        items => Ok(items),
    }
}

fn entry_pair(
    src: &super::EntryDesc,
    (src_entry, dst_entry): (u32, u32),
    dst_addr: u64,
    dst_kind: MemoryKind,
) -> EntryPair {
    EntryPair {
        src_entry,
        dst_entry,
        src_region: src.region,
        src_offset: src.offset,
        dst_addr,
        item_len: src.item_len,
        src_stride: src.item_len,
        dst_stride: src.item_len,
        dst_kind,
    }
}

fn mismatch(field: &'static str, ours: impl ToString, theirs: impl ToString) -> LayoutError {
    LayoutError::Mismatch { field, ours: ours.to_string(), theirs: theirs.to_string() }
}
