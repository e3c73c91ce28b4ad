//! What a world is made of.

use std::sync::Arc;
use std::time::Duration;

use kv_core::directory::PrefillPeers;
use kv_core::hooks::{ManagerHooks, TcpHooks};
use kv_core::ids::ProcessGeneration;
use kv_core::layout::{AttentionKind, EntryDesc, LayoutSpec};
use kv_core::limits::Limits;
use kv_core::memory::RegisteredRegion;
use kv_core::net::Endpoint;
use kv_core::room::{FailedStatusPolicy, ReleasePolicy};
use kv_core::wire::ExtPeer;

use crate::directory::Shape;

/// Bytes of one row of the aux entry.
pub const AUX_LEN: usize = 48;

/// Sizes, times and policies of a world. The defaults: one prefill rank, one decode rank, both ours, SGLang's times.
#[derive(Clone)]
pub struct WorldSpec {
    /// The prefill side, and what decode is told of it; `decode_rank` is set for each decode rank.
    pub shape: Shape,
    /// How many decode ranks exist (ranks 0.. of `shape.decode_tp`).
    pub decodes: u32,
    /// Layers of one pipeline stage.
    pub layers: u32,
    /// Rows of the aux entry.
    pub aux_rows: usize,
    /// Pages of each KV entry.
    pub pages: usize,
    /// How many more pages decode has.
    pub more_at_decode: usize,
    /// Bytes of one page.
    pub page_len: usize,
    /// The largest op of prefill's transports.
    pub max_op_bytes: Option<u64>,
    /// Prefill's transports say that they refuse what decode has not registered.
    pub checks_destinations: bool,
    /// Bounds of every shard.
    pub limits: Limits,
    /// Backends' part.
    pub hooks: Arc<dyn ManagerHooks>,
    /// Prefill: when decode is told of a failure.
    pub failed_status: FailedStatusPolicy,
    /// Decode: when pages of a failed room are free.
    pub release: ReleasePolicy,
    /// Prefill ranks are of ours and say so; false: they are as 0.5.23.
    pub prefill_ext: bool,
    /// Decode ranks likewise.
    pub decode_ext: bool,
    /// Prefill.
    pub bootstrap_timeout: Duration,
    /// Decode.
    pub waiting_timeout: Duration,
    /// Prefill: metadata without a sender.
    pub early_timeout: Duration,
    /// Prefill: failed and cleared rooms.
    pub tombstone_timeout: Duration,
    /// Changes decode's layout: a peer that does not fit.
    pub tune_decode: fn(&mut LayoutSpec),
    /// For the network.
    pub seed: u64,
}

impl Default for WorldSpec {
    fn default() -> Self {
        Self {
            shape: Shape::default(),
            decodes: 1,
            layers: 2,
            aux_rows: 8,
            pages: 16,
            more_at_decode: 0,
            page_len: 64,
            max_op_bytes: None,
            checks_destinations: false,
            limits: Limits::default(),
            hooks: Arc::new(TcpHooks::new()),
            failed_status: FailedStatusPolicy::AtOnce,
            release: ReleasePolicy::AckOrTimeout(Duration::from_secs(30)),
            prefill_ext: true,
            decode_ext: true,
            bootstrap_timeout: Duration::from_secs(300),
            waiting_timeout: Duration::from_secs(300),
            early_timeout: Duration::from_secs(300),
            tombstone_timeout: Duration::from_secs(600),
            tune_decode: |_| {},
            seed: 1,
        }
    }
}

impl WorldSpec {
    /// A world of this shape with `decodes` decode ranks.
    pub fn of(shape: Shape, decodes: u32) -> Self {
        Self { shape, decodes, ..Self::default() }
    }

    /// What the prefill rank of this number says of itself, in its first life.
    pub fn prefill_peer(&self, rank: kv_core::ids::PrefillRank) -> Option<ExtPeer> {
        self.prefill_ext.then(|| process(&format!("prefill-{rank}")))
    }

    /// What the directory tells decode rank `rank`.
    pub fn peers(&self, rank: u32) -> PrefillPeers {
        let mut peers = Shape { decode_rank: rank, ..self.shape.clone() }.peers();
        for record in &mut peers.records {
            record.ext = self.prefill_peer(record.rank);
        }
        peers
    }

    /// KV entries of one prefill rank.
    pub(super) fn prefill_entries(&self) -> u32 {
        if self.shape.mla { self.layers } else { 2 * self.layers }
    }

    /// KV entries of one decode rank: every stage's.
    pub(super) fn decode_entries(&self) -> u32 {
        self.prefill_entries() * self.decode_stages()
    }

    fn decode_stages(&self) -> u32 {
        if self.shape.decode_pp == 1 { self.shape.prefill_pp } else { 1 }
    }

    /// Where entry `entry` of a prefill rank of stage `pp` goes: MHA all K, then all V; MLA one a layer.
    pub(crate) fn decode_entry(&self, pp: u32, entry: u32) -> u32 {
        let stages = self.decode_stages();
        let first = if stages == 1 { 0 } else { pp * self.layers };
        let (kv, layer) = (entry / self.layers, entry % self.layers);
        kv * stages * self.layers + first + layer
    }

    /// Pages of each KV entry of decode.
    pub(super) fn decode_pages(&self) -> usize {
        self.pages + self.more_at_decode
    }

    fn layout(&self, entries: u32, pages: usize, kv: &RegisteredRegion, aux: &RegisteredRegion) -> LayoutSpec {
        let len = (pages * self.page_len) as u64;
        let entry = |i: u32| EntryDesc {
            region: kv.id(),
            offset: u64::from(i) * len,
            len,
            item_len: self.page_len as u64,
            layer_id: None,
        };
        LayoutSpec {
            kv: (0..entries).map(entry).collect(),
            aux: vec![EntryDesc {
                region: aux.id(),
                offset: 0,
                len: (self.aux_rows * AUX_LEN) as u64,
                item_len: AUX_LEN as u64,
                layer_id: None,
            }],
            kv_cache_dtype: "bfloat16".into(),
            attention: if self.shape.mla { AttentionKind::Mla } else { AttentionKind::Mha },
            ..LayoutSpec::default()
        }
    }

    pub(super) fn prefill_layout(
        &self,
        (tp, pp): (u32, u32),
        kv: &RegisteredRegion,
        aux: &RegisteredRegion,
    ) -> LayoutSpec {
        // Where both sides have stages, each pair of stages stands for itself.
        let stages = self.decode_stages();
        LayoutSpec {
            attn_tp_size: self.shape.prefill_tp,
            engine_rank: tp,
            pp_size: stages,
            pp_rank: if stages == 1 { 0 } else { pp },
            prefill_start_layer: if stages == 1 { 0 } else { pp * self.layers },
            ..self.layout(self.prefill_entries(), self.pages, kv, aux)
        }
    }

    pub(super) fn decode_layout(&self, rank: u32, kv: &RegisteredRegion, aux: &RegisteredRegion) -> LayoutSpec {
        let mut spec = LayoutSpec {
            attn_tp_size: self.shape.decode_tp,
            engine_rank: rank,
            ..self.layout(self.decode_entries(), self.decode_pages(), kv, aux)
        };
        (self.tune_decode)(&mut spec);
        spec
    }

    pub(super) fn decode_endpoint(&self, rank: u32) -> Endpoint {
        Endpoint::new("10.0.1.1", 7000 + rank as u16)
    }
}

/// The process of this name: the same for the same name.
pub fn process(name: &str) -> ExtPeer {
    // FNV-1a: any number will do, as long as names differ.
    let hash = name.bytes().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d_u128, |hash, byte| {
        (hash ^ u128::from(byte)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    });
    ExtPeer::new(ProcessGeneration(hash.max(1)))
}
