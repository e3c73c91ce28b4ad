//! Reads the KV geometry out of a HuggingFace `config.json`.

use serde_json::{Map, Value};

use crate::error::{CliError, Result};
use crate::model::{DEFAULT_PAGE_TOKENS, KvKind, ModelSpec};

/// Parse `text`; `file` is for error texts. Multimodal models keep their language model under `text_config`: that one
/// is taken. Own keys, for synthetic geometries: `page_tokens`.
pub fn parse(text: &str, file: &str) -> Result<ModelSpec> {
    let value: Value = serde_json::from_str(text)
        .map_err(|e| CliError::new(format!("{file} is not JSON: {e}")).hint("give a HuggingFace config.json"))?;
    let Value::Object(top) = value else {
        return Err(CliError::new(format!("{file} holds no JSON object")).hint("give a HuggingFace config.json"));
    };
    let map = match top.get("text_config") {
        Some(Value::Object(inner)) if !top.contains_key("num_hidden_layers") => inner,
        _ => &top,
    };
    let config = Config { map, file };

    let layers = config.need("num_hidden_layers")?;
    let kv = if let Some(kv_lora_rank) = config.number("kv_lora_rank")? {
        KvKind::Mla { kv_lora_rank, rope_dim: config.need("qk_rope_head_dim")? }
    } else {
        let attention_heads = config.number("num_attention_heads")?;
        let kv_heads = match config.number("num_key_value_heads")? {
            Some(n) => n,
            // Absent means one KV head per attention head.
            None => attention_heads.ok_or_else(|| config.missing("num_key_value_heads (or num_attention_heads)"))?,
        };
        let head_dim = match config.number("head_dim")? {
            Some(n) => n,
            None => {
                let hidden =
                    config.number("hidden_size")?.ok_or_else(|| config.missing("head_dim (or hidden_size)"))?;
                let heads = attention_heads.ok_or_else(|| config.missing("head_dim (or num_attention_heads)"))?;
                if heads == 0 || hidden % heads != 0 {
                    return Err(CliError::new(format!(
                        "{file}: hidden_size {hidden} does not divide by num_attention_heads {heads}"
                    ))
                    .hint("add head_dim"));
                }
                hidden / heads
            }
        };
        KvKind::Mha { kv_heads, head_dim }
    };
    let spec = ModelSpec {
        name: config.name(&top),
        layers,
        kv,
        value_bytes: config.value_bytes(&top)?,
        page_tokens: config.number("page_tokens")?.unwrap_or(DEFAULT_PAGE_TOKENS),
    };
    spec.validate().map_err(|e| CliError { what: format!("{file}: {}", e.what), hint: e.hint })?;
    Ok(spec)
}

struct Config<'a> {
    map: &'a Map<String, Value>,
    file: &'a str,
}

impl Config<'_> {
    fn missing(&self, field: &str) -> CliError {
        CliError::new(format!("{}: field {field} is missing", self.file))
            .hint("give the config.json of the model itself")
    }

    fn need(&self, field: &str) -> Result<u32> {
        self.number(field)?.ok_or_else(|| self.missing(field))
    }

    /// A field that is absent or null is `None`; anything but a whole number of u32 is an error.
    fn number(&self, field: &str) -> Result<Option<u32>> {
        match self.map.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(v) => v.as_u64().and_then(|n| u32::try_from(n).ok()).map(Some).ok_or_else(|| {
                CliError::new(format!("{}: field {field} is {v}, not a whole number", self.file))
                    .hint("give the config.json of the model itself")
            }),
        }
    }

    fn name(&self, top: &Map<String, Value>) -> String {
        ["_name_or_path", "name", "model_type"]
            .iter()
            .find_map(|k| top.get(*k).and_then(Value::as_str).filter(|s| !s.is_empty()))
            .unwrap_or(self.file)
            .to_owned()
    }

    fn value_bytes(&self, top: &Map<String, Value>) -> Result<u32> {
        let find = |map: &Map<String, Value>| {
            ["dtype", "torch_dtype"].iter().find_map(|k| map.get(*k).filter(|v| !v.is_null()).cloned().map(|v| (*k, v)))
        };
        let Some((field, value)) = find(self.map).or_else(|| find(top)) else {
            return Err(self.missing("torch_dtype (or dtype)"));
        };
        match value.as_str() {
            Some("bfloat16" | "float16" | "half") => Ok(2),
            Some("float32" | "float") => Ok(4),
            Some("float8_e4m3fn" | "float8_e5m2") => Ok(1),
            _ => Err(CliError::new(format!("{}: field {field} is {value}, which has no known size", self.file))
                .hint("known are bfloat16, float16, float32, float8_e4m3fn, float8_e5m2")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const QWEN: &str = r#"{"model_type":"qwen3","head_dim":128,"hidden_size":1024,"num_attention_heads":16,
        "num_hidden_layers":28,"num_key_value_heads":8,"torch_dtype":"bfloat16"}"#;

    fn error(text: &str) -> String {
        parse(text, "c.json").unwrap_err().one_line()
    }

    #[test]
    fn reads_gqa_with_and_without_head_dim() {
        let spec = parse(QWEN, "c.json").unwrap();
        assert_eq!(spec.bytes_per_token(), ModelSpec::preset("Qwen3-0.6B").unwrap().bytes_per_token());
        // Llama: head_dim is hidden_size / num_attention_heads.
        let llama = r#"{"hidden_size":8192,"num_attention_heads":64,"num_hidden_layers":80,"num_key_value_heads":8,
            "dtype":"bfloat16"}"#;
        assert_eq!(parse(llama, "c.json").unwrap().kv, KvKind::Mha { kv_heads: 8, head_dim: 128 });
    }

    #[test]
    fn reads_mla_and_text_config() {
        let mla = r#"{"num_hidden_layers":61,"kv_lora_rank":512,"qk_rope_head_dim":64,"torch_dtype":"bfloat16",
            "num_key_value_heads":128,"num_attention_heads":128}"#;
        assert_eq!(parse(mla, "c.json").unwrap().kv, KvKind::Mla { kv_lora_rank: 512, rope_dim: 64 });
        let nested = format!(r#"{{"model_type":"vl","text_config":{QWEN}}}"#);
        let spec = parse(&nested, "c.json").unwrap();
        assert_eq!((spec.layers, spec.name.as_str()), (28, "vl"));
    }

    #[test]
    fn missing_and_odd_fields_are_named() {
        for (text, says) in [
            ("[]", "c.json holds no JSON object"),
            ("{", "c.json is not JSON"),
            ("{}", "field num_hidden_layers is missing"),
            (r#"{"num_hidden_layers":"x"}"#, r#"field num_hidden_layers is "x", not a whole number"#),
            (r#"{"num_hidden_layers":-1}"#, "field num_hidden_layers is -1"),
            (r#"{"num_hidden_layers":2}"#, "field num_key_value_heads (or num_attention_heads) is missing"),
            (r#"{"num_hidden_layers":2,"num_key_value_heads":8}"#, "field head_dim (or hidden_size) is missing"),
            (r#"{"num_hidden_layers":2,"kv_lora_rank":8}"#, "field qk_rope_head_dim is missing"),
            (r#"{"num_hidden_layers":2,"num_attention_heads":3,"hidden_size":8}"#, "hidden_size 8 does not divide"),
            (
                r#"{"num_hidden_layers":2,"num_key_value_heads":8,"head_dim":8}"#,
                "field torch_dtype (or dtype) is missing",
            ),
            (
                r#"{"num_hidden_layers":2,"num_key_value_heads":8,"head_dim":8,"dtype":"int3"}"#,
                r#"field dtype is "int3""#,
            ),
            (
                r#"{"num_hidden_layers":0,"num_key_value_heads":8,"head_dim":8,"dtype":"float16"}"#,
                "layers = 0 is out of range",
            ),
            (
                r#"{"num_hidden_layers":1,"num_key_value_heads":8,"head_dim":8,"dtype":"float16","page_tokens":48}"#,
                "page of 48 tokens does not divide",
            ),
        ] {
            let e = error(text);
            assert!(e.contains(says), "{text}: {e}");
        }
    }
}
