//! Models: how many bytes of KV a token has, and which part of it a rank holds.
//!
//! Facts of the presets are those of the public HuggingFace `config.json` of each model.

use std::ops::Range;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::error::{CliError, Result};
use crate::hf_config;
use crate::shape::{Rank, Shape};

/// Tokens in one page unless said otherwise.
pub const DEFAULT_PAGE_TOKENS: u32 = 64;

/// What one layer keeps for each token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvKind {
    /// K and V, each `kv_heads` x `head_dim` values (MHA, GQA, MQA).
    Mha {
        /// KV heads of the whole model.
        kv_heads: u32,
        /// Values in one head.
        head_dim: u32,
    },
    /// One compressed row of `kv_lora_rank + rope_dim` values, the same on every TP rank (MLA).
    Mla {
        /// Values of the compressed part.
        kv_lora_rank: u32,
        /// Values of the decoupled rope key.
        rope_dim: u32,
    },
}

/// The KV geometry of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSpec {
    /// Name for reports.
    pub name: String,
    /// Layers of the whole model.
    pub layers: u32,
    /// What a layer keeps.
    pub kv: KvKind,
    /// Bytes of one value.
    pub value_bytes: u32,
    /// Tokens in one page.
    pub page_tokens: u32,
}

/// What one rank holds of each page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankGeometry {
    /// Layers of the whole model that this PP stage has.
    pub layers: Range<u32>,
    /// Head numbers of the whole model that this TP rank has; `0..1` for MLA.
    pub heads: Range<u32>,
    /// Bytes of one head of one token.
    pub head_bytes: u32,
    /// 2 = K and V, 1 = MLA.
    pub kinds: u32,
    /// Tokens in one page.
    pub page_tokens: u32,
}

impl RankGeometry {
    /// Buffers of this rank: one per layer and K/V, all K first, then all V.
    pub fn entries(&self) -> u32 {
        self.kinds * (self.layers.end - self.layers.start)
    }

    /// Which (layer of the whole model, 0 = K or MLA, 1 = V) buffer `entry` is.
    pub fn entry(&self, entry: u32) -> (u32, u32) {
        let layers = self.layers.end - self.layers.start;
        (self.layers.start + entry % layers, entry / layers)
    }

    /// Bytes of one page in one buffer.
    pub fn item_len(&self) -> u64 {
        u64::from(self.page_tokens) * u64::from(self.heads.end - self.heads.start) * u64::from(self.head_bytes)
    }

    /// Bytes of one page over all buffers of this rank.
    pub fn page_bytes(&self) -> u64 {
        self.item_len() * u64::from(self.entries())
    }
}

/// The presets, by name.
pub const PRESETS: [&str; 4] = ["Qwen3-0.6B", "Qwen3-8B", "Llama-3.1-70B", "DeepSeek-V3"];

impl ModelSpec {
    /// A preset by name, upper and lower case alike.
    pub fn preset(name: &str) -> Option<Self> {
        let mha = |layers| (layers, KvKind::Mha { kv_heads: 8, head_dim: 128 });
        let (preset, (layers, kv)) = match name.to_ascii_lowercase().as_str() {
            "qwen3-0.6b" => (PRESETS[0], mha(28)),
            "qwen3-8b" => (PRESETS[1], mha(36)),
            "llama-3.1-70b" => (PRESETS[2], mha(80)),
            "deepseek-v3" => (PRESETS[3], (61, KvKind::Mla { kv_lora_rank: 512, rope_dim: 64 })),
            _ => return None,
        };
        Some(Self { name: preset.into(), layers, kv, value_bytes: 2, page_tokens: DEFAULT_PAGE_TOKENS })
    }

    /// `--model`: the name of a preset, or the path of a HuggingFace `config.json`.
    pub fn resolve(arg: &str) -> Result<Self> {
        if let Some(spec) = Self::preset(arg) {
            return Ok(spec);
        }
        let path = Path::new(arg);
        let looks_like_a_file = path.extension().is_some_and(|e| e == "json") || arg.contains('/') || path.exists();
        if !looks_like_a_file {
            return Err(CliError::new(format!("unknown model '{arg}'"))
                .hint(format!("use one of {} or the path of a HuggingFace config.json", PRESETS.join(", "))));
        }
        let path = if path.is_dir() { path.join("config.json") } else { path.to_path_buf() };
        let text = std::fs::read_to_string(&path).map_err(|e| {
            CliError::new(format!("cannot read model file {}: {e}", path.display()))
                .hint("give a readable config.json or the name of a preset")
        })?;
        hf_config::parse(&text, &path.display().to_string())
    }

    /// Check every number, so that no later arithmetic can overflow or divide by zero.
    pub fn validate(&self) -> Result<()> {
        let numbers = match self.kv {
            KvKind::Mha { kv_heads, head_dim } => {
                [("KV heads", kv_heads, 4096), ("head_dim", head_dim, 1 << 16), ("layers", self.layers, 4096)]
            }
            KvKind::Mla { kv_lora_rank, rope_dim } => [
                ("kv_lora_rank", kv_lora_rank, 1 << 16),
                ("qk_rope_head_dim", rope_dim.max(1), 1 << 16),
                ("layers", self.layers, 4096),
            ],
        };
        for (name, n, max) in numbers {
            if n == 0 || n > max {
                return Err(CliError::new(format!("model {}: {name} = {n} is out of range 1..={max}", self.name)));
            }
        }
        if !matches!(self.value_bytes, 1 | 2 | 4) {
            return Err(CliError::new(format!("model {}: a value of {} bytes", self.name, self.value_bytes)));
        }
        if self.page_tokens == 0 || !crate::trace::BLOCK_TOKENS.is_multiple_of(self.page_tokens) {
            return Err(CliError::new(format!("a page of {} tokens does not divide a trace block", self.page_tokens))
                .hint(format!("use a page size that divides {}: 1, 2, 4, .. 512", crate::trace::BLOCK_TOKENS)));
        }
        if !self.head_bytes().is_multiple_of(4) {
            return Err(CliError::new(format!(
                "model {}: {} bytes a head is not a multiple of 4",
                self.name,
                self.head_bytes()
            ))
            .hint("the test patterns are made of 4- and 8-byte words"));
        }
        Ok(())
    }

    fn head_bytes(&self) -> u32 {
        match self.kv {
            KvKind::Mha { head_dim, .. } => head_dim * self.value_bytes,
            KvKind::Mla { kv_lora_rank, rope_dim } => (kv_lora_rank + rope_dim) * self.value_bytes,
        }
    }

    /// Bytes of KV of one token over the whole model.
    pub fn bytes_per_token(&self) -> u64 {
        let per_layer = match self.kv {
            KvKind::Mha { kv_heads, .. } => 2 * u64::from(kv_heads),
            KvKind::Mla { .. } => 1,
        };
        per_layer * u64::from(self.head_bytes()) * u64::from(self.layers)
    }

    /// Whether this is MLA.
    pub fn is_mla(&self) -> bool {
        matches!(self.kv, KvKind::Mla { .. })
    }

    /// KV heads of the whole model; 1 for MLA.
    pub fn kv_heads(&self) -> u32 {
        match self.kv {
            KvKind::Mha { kv_heads, .. } => kv_heads,
            KvKind::Mla { .. } => 1,
        }
    }

    /// What `rank` of `shape` holds. TP splits the heads (MLA: every rank has the one row), PP the layers: stages
    /// differ by at most one layer, the larger ones first.
    pub fn rank_geometry(&self, shape: Shape, rank: Rank) -> Result<RankGeometry> {
        self.validate()?;
        shape.check_rank(rank)?;
        if shape.pp > self.layers {
            return Err(CliError::new(format!("pp={} with {} layers leaves a stage empty", shape.pp, self.layers))
                .hint("use a smaller pp"));
        }
        let (base, more) = (self.layers / shape.pp, self.layers % shape.pp);
        let start = rank.pp * base + rank.pp.min(more);
        let layers = start..start + base + u32::from(rank.pp < more);
        let heads = match self.kv {
            KvKind::Mla { .. } => 0..1,
            KvKind::Mha { kv_heads, .. } => {
                if shape.tp > kv_heads {
                    return Err(CliError::new(format!(
                        "tp={} is more than the {kv_heads} KV heads of {}",
                        shape.tp, self.name
                    ))
                    .hint(format!(
                        "replicated heads are not supported by this release; use tp of at most {kv_heads}"
                    )));
                }
                if kv_heads % shape.tp != 0 {
                    return Err(CliError::new(format!("{kv_heads} KV heads do not divide by tp={}", shape.tp))
                        .hint("use a tp that divides them"));
                }
                let n = kv_heads / shape.tp;
                rank.tp * n..(rank.tp + 1) * n
            }
        };
        Ok(RankGeometry {
            layers,
            heads,
            head_bytes: self.head_bytes(),
            kinds: if self.is_mla() { 1 } else { 2 },
            page_tokens: self.page_tokens,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn preset(name: &str) -> ModelSpec {
        ModelSpec::preset(name).unwrap()
    }

    #[test]
    fn presets_have_the_public_sizes() {
        // 2 (K, V) x heads x head_dim x 2 bytes x layers
        assert_eq!(preset("qwen3-0.6b").bytes_per_token(), 2 * 8 * 128 * 2 * 28);
        assert_eq!(preset("Qwen3-8B").bytes_per_token(), 147_456);
        assert_eq!(preset("Llama-3.1-70B").bytes_per_token(), 327_680);
        assert_eq!(preset("DeepSeek-V3").bytes_per_token(), 576 * 2 * 61);
        for name in PRESETS {
            assert_eq!(preset(name).validate(), Ok(()), "{name}");
            assert_eq!(preset(name).name, name);
        }
    }

    #[test]
    fn one_rank_holds_everything() {
        let g = preset("Qwen3-0.6B").rank_geometry(Shape::default(), Rank::default()).unwrap();
        assert_eq!((g.entries(), g.item_len(), g.page_bytes()), (56, 64 * 8 * 256, 114_688 * 64));
        assert_eq!((g.entry(0), g.entry(27), g.entry(28), g.entry(55)), ((0, 0), (27, 0), (0, 1), (27, 1)));
    }

    #[test]
    fn ranks_split_heads_and_layers_without_gap() {
        let (model, shape) = (preset("Qwen3-0.6B"), Shape { tp: 2, pp: 3, ..Shape::default() });
        let mut total = 0;
        let mut next_layer = 0;
        for pp in 0..3 {
            for tp in 0..2 {
                let g = model.rank_geometry(shape, Rank { tp, pp, ..Rank::default() }).unwrap();
                assert_eq!(g.layers.start, next_layer);
                assert_eq!(g.heads, tp * 4..tp * 4 + 4);
                total += g.page_bytes();
                if tp == 1 {
                    next_layer = g.layers.end;
                }
            }
        }
        assert_eq!(next_layer, 28);
        assert_eq!(total, model.bytes_per_token() * 64);
    }

    #[test]
    fn mla_is_whole_on_every_tp_rank() {
        let shape = Shape { tp: 4, ..Shape::default() };
        let g = preset("DeepSeek-V3").rank_geometry(shape, Rank { tp: 3, ..Rank::default() }).unwrap();
        assert_eq!((g.heads.clone(), g.kinds, g.entries(), g.head_bytes), (0..1, 1, 61, 1152));
    }

    #[test]
    fn replicated_or_uneven_heads_are_refused_naming_both_values() {
        let model = preset("Qwen3-0.6B");
        let shape = |tp, pp| Shape { tp, pp, ..Shape::default() };
        let e = model.rank_geometry(shape(16, 1), Rank::default()).unwrap_err().one_line();
        assert!(e.contains("tp=16 is more than the 8 KV heads"), "{e}");
        let e = model.rank_geometry(shape(3, 1), Rank::default()).unwrap_err().one_line();
        assert!(e.contains("8 KV heads do not divide by tp=3"), "{e}");
        let e = model.rank_geometry(shape(1, 29), Rank::default()).unwrap_err().one_line();
        assert!(e.contains("pp=29 with 28 layers"), "{e}");
    }

    #[test]
    fn unknown_models_and_unreadable_files_are_named() {
        let e = ModelSpec::resolve("Gemma-9").unwrap_err().one_line();
        assert!(e.contains("unknown model 'Gemma-9'") && e.contains("Qwen3-0.6B"), "{e}");
        let e = ModelSpec::resolve("/nowhere/config.json").unwrap_err().one_line();
        assert!(e.contains("cannot read model file /nowhere/config.json"), "{e}");
    }
}
