//! What this rank registered.

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;

use super::{EntryRef, LayoutError};
use crate::ids::RegionId;
use crate::memory::{MemoryKind, RegisteredRegion};
use crate::net::Endpoint;
use crate::wire::message::{Buffers, Registration};

/// How KV is laid out over layers and TP ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum AttentionKind {
    /// K and V apart, heads split over TP: all K entries, then all V entries.
    #[default]
    Mha,
    /// One entry a layer, the same on every TP rank.
    Mla,
    /// KV as [`Self::Mla`], beside state that may differ between TP ranks.
    HybridMla,
}

impl AttentionKind {
    /// One KV entry a layer, the same on every TP rank.
    pub const fn is_any_mla(self) -> bool {
        matches!(self, Self::Mla | Self::HybridMla)
    }
}

/// One buffer of this rank: `len / item_len` items, back to back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EntryDesc {
    /// The registered region it lies in.
    pub region: RegionId,
    /// Where it starts in the region, bytes.
    pub offset: u64,
    /// Its length, bytes.
    pub len: u64,
    /// One item (KV: one page; aux: one row), bytes.
    pub item_len: u64,
    /// Model layer, for KV entries of engines that know it: all entries or none.
    pub layer_id: Option<u32>,
}

impl EntryDesc {
    /// How many whole items it holds; 0 when `item_len` is 0.
    pub const fn slots(&self) -> u64 {
        match self.len.checked_div(self.item_len) {
            Some(slots) => slots,
            None => 0,
        }
    }
}

/// Everything an engine says about its pools (SGLang's KV args, protocol 8.1). Plain data: [`LocalLayout::new`] checks
/// it. Fill what applies and take the rest from `Default`, so that later fields do not break you.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutSpec {
    /// KV entries in SGLang's order: MHA all K, then all V; MLA one a layer; the draft model's entries last.
    pub kv: Vec<EntryDesc>,
    /// Aux entries (the metadata buffers), in the order of protocol 8.7.
    pub aux: Vec<EntryDesc>,
    /// Tokens a page.
    pub page_size: u32,
    /// `kv_cache_dtype`, as text.
    pub kv_cache_dtype: String,
    /// `kv_layout`, when the engine has one.
    pub kv_layout: Option<String>,
    /// Attention kind.
    pub attention: AttentionKind,
    /// How many of the last KV entries belong to the speculative draft model.
    pub num_draft_entries: u32,
    /// Attention TP size.
    pub attn_tp_size: u32,
    /// TP rank. With attention DP it may exceed `attn_tp_size`; the rank within the attention group is
    /// `engine_rank % attn_tp_size`.
    pub engine_rank: u32,
    /// PP size.
    pub pp_size: u32,
    /// PP rank.
    pub pp_rank: u32,
    /// First model layer of this PP stage.
    pub prefill_start_layer: u32,
    /// One past the last model layer of this PP stage, where the engine knows it.
    pub prefill_end_layer: Option<u32>,
    /// Compression ratio of each model layer (0, 4 or 128) for compressed MLA; empty otherwise.
    pub mla_compression_ratios: Vec<u32>,
    /// Decode context-parallel size.
    pub dcp_size: u32,
    /// Decode context-parallel rank.
    pub dcp_rank: u32,
    /// Device number.
    pub gpu_id: i64,
}

impl Default for LayoutSpec {
    fn default() -> Self {
        Self {
            kv: Vec::new(),
            aux: Vec::new(),
            page_size: 1,
            kv_cache_dtype: String::new(),
            kv_layout: None,
            attention: AttentionKind::Mha,
            num_draft_entries: 0,
            attn_tp_size: 1,
            engine_rank: 0,
            pp_size: 1,
            pp_rank: 0,
            prefill_start_layer: 0,
            prefill_end_layer: None,
            mla_compression_ratios: Vec::new(),
            dcp_size: 1,
            dcp_rank: 0,
            gpu_id: 0,
        }
    }
}

/// A checked [`LayoutSpec`] with the regions it lies in, which it keeps registered.
#[derive(Clone, Debug)]
pub struct LocalLayout {
    spec: LayoutSpec,
    regions: Arc<[Arc<RegisteredRegion>]>,
    /// Index into `regions` of each KV, then each aux entry.
    places: Vec<u32>,
}

impl LocalLayout {
    /// Check `spec` against the regions it names.
    ///
    /// # Errors
    /// Entries outside their regions or without a whole item, sizes of 0, ranks outside their sizes, an odd number of
    /// MHA entries, layer ids on some entries only.
    pub fn new(
        spec: LayoutSpec,
        regions: impl IntoIterator<Item = Arc<RegisteredRegion>>,
    ) -> Result<Self, LayoutError> {
        check_numbers(&spec)?;
        let regions: Arc<[_]> = regions.into_iter().collect();
        let mut index = HashMap::with_capacity(regions.len());
        for (i, region) in regions.iter().enumerate() {
            if index.insert(region.id(), i as u32).is_some() {
                return Err(LayoutError::DuplicateRegion(region.id()));
            }
        }
        let named = (spec.kv.iter().zip(0..).map(|(e, i)| (e, EntryRef::Kv(i))))
            .chain(spec.aux.iter().zip(0..).map(|(e, i)| (e, EntryRef::Aux(i))));
        let mut places = Vec::with_capacity(spec.kv.len() + spec.aux.len());
        for (desc, entry) in named {
            if desc.slots() == 0 {
                return Err(LayoutError::ItemLen { entry, item_len: desc.item_len, len: desc.len });
            }
            let &place = index.get(&desc.region).ok_or(LayoutError::UnknownRegion { entry, region: desc.region })?;
            let region_len = regions[place as usize].len();
            if desc.offset.checked_add(desc.len).is_none_or(|end| end > region_len) {
                return Err(LayoutError::OutsideRegion {
                    entry,
                    region: desc.region,
                    offset: desc.offset,
                    len: desc.len,
                    region_len,
                });
            }
            places.push(place);
        }
        Ok(Self { spec, regions, places })
    }

    /// What it was made of.
    pub fn spec(&self) -> &LayoutSpec {
        &self.spec
    }

    /// Every registered region, for [`WriteOp::regions`](crate::transport::WriteOp::regions).
    pub fn regions(&self) -> &Arc<[Arc<RegisteredRegion>]> {
        &self.regions
    }

    /// Pages of the smallest KV entry, 0 when there is none: what registration frame 17 says.
    pub fn kv_slots(&self) -> u64 {
        self.spec.kv.iter().map(EntryDesc::slots).min().unwrap_or(0)
    }

    /// Rows of the smallest aux entry, 0 when there is none.
    pub fn aux_slots(&self) -> u64 {
        self.spec.aux.iter().map(EntryDesc::slots).min().unwrap_or(0)
    }

    /// Absolute address of each KV entry's first item.
    pub fn kv_addrs(&self) -> Vec<u64> {
        self.spec.kv.iter().zip(&self.places).map(|(e, &p)| self.regions[p as usize].addr() + e.offset).collect()
    }

    /// Absolute address of each aux entry's first row.
    pub fn aux_addrs(&self) -> Vec<u64> {
        let places = &self.places[self.spec.kv.len()..];
        self.spec.aux.iter().zip(places).map(|(e, &p)| self.regions[p as usize].addr() + e.offset).collect()
    }

    /// Memory kind of each KV entry.
    pub fn kv_kinds(&self) -> Vec<MemoryKind> {
        self.places[..self.spec.kv.len()].iter().map(|&p| self.regions[p as usize].kind()).collect()
    }

    /// Layer id of each KV entry; empty when the engine gave none.
    pub fn kv_layer_ids(&self) -> Vec<u32> {
        self.spec.kv.iter().filter_map(|e| e.layer_id).collect()
    }

    /// Decode's check of what a prefill's bootstrap server says (protocol 2.5): the page size and dtype must be equal,
    /// the layout where both have one.
    ///
    /// # Errors
    /// [`LayoutError::Mismatch`], naming the field and both values.
    pub fn check_prefill(
        &self,
        page_size: Option<u32>,
        kv_cache_dtype: Option<&str>,
        kv_layout: Option<&str>,
    ) -> Result<(), LayoutError> {
        let text = |v: Option<&str>| v.unwrap_or("unknown").to_owned();
        if page_size != Some(self.spec.page_size) {
            return Err(LayoutError::Mismatch {
                field: "page_size",
                ours: self.spec.page_size.to_string(),
                theirs: page_size.map_or_else(|| text(None), |v| v.to_string()),
            });
        }
        if kv_cache_dtype != Some(self.spec.kv_cache_dtype.as_str()) {
            return Err(LayoutError::Mismatch {
                field: "kv_cache_dtype",
                ours: self.spec.kv_cache_dtype.clone(),
                theirs: text(kv_cache_dtype),
            });
        }
        match (self.spec.kv_layout.as_deref(), kv_layout) {
            (Some(ours), Some(theirs)) if ours != theirs => {
                Err(LayoutError::Mismatch { field: "kv_layout", ours: ours.to_owned(), theirs: theirs.to_owned() })
            }
            _ => Ok(()),
        }
    }

    /// What decode tells each prefill rank about itself. `name` and `metadata` come from the transport. Buffers are
    /// given as absolute addresses; a backend with descriptors of its own replaces `kv` and `aux`.
    pub fn to_registration(&self, endpoint: Endpoint, name: impl Into<String>, metadata: Bytes) -> Registration {
        Registration {
            endpoint,
            name: name.into(),
            metadata,
            kv: Buffers::Addrs(self.kv_addrs()),
            kv_item_lens: self.spec.kv.iter().map(|e| e.item_len).collect(),
            kv_item_len: self.spec.kv.first().map_or(0, |e| e.item_len),
            kv_slots: Some(self.kv_slots()),
            kv_kinds: self.kv_kinds(),
            kv_layer_ids: self.kv_layer_ids(),
            aux: Buffers::Addrs(self.aux_addrs()),
            state: Vec::new(),
            gpu_id: self.spec.gpu_id,
            attn_tp_size: self.spec.attn_tp_size,
            engine_rank: self.spec.engine_rank,
            dcp_size: self.spec.dcp_size,
            dcp_rank: self.spec.dcp_rank,
            staging: None,
            staging_layer_ids: Vec::new(),
        }
    }
}

fn check_numbers(spec: &LayoutSpec) -> Result<(), LayoutError> {
    let invalid = |field, value: u32, needed| Err(LayoutError::Invalid { field, value: u64::from(value), needed });
    for (field, value) in [
        ("page_size", spec.page_size),
        ("attn_tp_size", spec.attn_tp_size),
        ("pp_size", spec.pp_size),
        ("dcp_size", spec.dcp_size),
    ] {
        if value == 0 {
            return invalid(field, 0, "it must be at least 1");
        }
    }
    if spec.pp_rank >= spec.pp_size {
        return invalid("pp_rank", spec.pp_rank, "it must be below pp_size");
    }
    if spec.dcp_rank >= spec.dcp_size {
        return invalid("dcp_rank", spec.dcp_rank, "it must be below dcp_size");
    }
    for (field, list) in [("kv", &spec.kv), ("aux", &spec.aux)] {
        if u32::try_from(list.len()).is_err() {
            return Err(LayoutError::TooMany { field, got: list.len() as u64, limit: u64::from(u32::MAX) });
        }
    }
    let (kv, draft) = (spec.kv.len() as u64, u64::from(spec.num_draft_entries));
    if draft > kv {
        return invalid("num_draft_entries", spec.num_draft_entries, "it must be at most the number of KV entries");
    }
    if spec.attention == AttentionKind::Mha && (kv % 2 != 0 || draft % 2 != 0) {
        return Err(LayoutError::Invalid {
            field: "MHA KV entries",
            value: if kv % 2 != 0 { kv } else { draft },
            needed: "K and V come in pairs, of the target and of the draft model",
        });
    }
    let with_id = spec.kv.iter().filter(|e| e.layer_id.is_some()).count() as u64;
    if with_id != 0 && with_id != kv {
        return Err(LayoutError::Count { field: "kv layer ids", got: with_id, want: kv });
    }
    if spec.prefill_end_layer.is_some_and(|end| end < spec.prefill_start_layer) {
        return invalid("prefill_start_layer", spec.prefill_start_layer, "it must be at most prefill_end_layer");
    }
    Ok(())
}
