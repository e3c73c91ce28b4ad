//! Files that a user hands to `kvt`: traces, model configs, recorded frames.

use kv_cli::commands::wire_decode;
use kv_cli::hf_config;
use kv_cli::shape::{Rank, Shape};
use kv_cli::trace::{BLOCK_TOKENS, DEFAULT_TRACE, TraceReader};

use crate::input::Input;

/// Keys of both kinds of JSON.
pub const WORDS: &[&[u8]] = &[
    b"\"timestamp\":",
    b"\"input_length\":",
    b"\"output_length\":",
    b"\"hash_ids\":[",
    b"\"num_hidden_layers\":",
    b"\"num_key_value_heads\":",
    b"\"num_attention_heads\":",
    b"\"hidden_size\":",
    b"\"head_dim\":",
    b"\"kv_lora_rank\":",
    b"\"qk_rope_head_dim\":",
    b"\"torch_dtype\":\"bfloat16\"",
    b"\"dtype\":",
    b"\"page_tokens\":",
    b"\"text_config\":{",
    b"4294967295",
    b"\"\"",
    b"0x",
];

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    match input.below(3) {
        0 => trace(input.rest()),
        1 => model(&String::from_utf8_lossy(input.rest())),
        _ => {
            if let Ok(messages) = wire_decode::parse(&String::from_utf8_lossy(input.rest()), "f") {
                assert!(messages.iter().all(|message| message.frames.len() <= data.len()));
            }
        }
    }
}

fn trace(bytes: &[u8]) {
    for request in TraceReader::new(bytes, "t") {
        match request {
            Ok(r) => assert_eq!(r.blocks.len(), r.input_tokens.div_ceil(BLOCK_TOKENS) as usize),
            Err(e) => assert!(e.one_line().starts_with("t:"), "{}", e.one_line()),
        }
    }
}

fn model(text: &str) {
    let Ok(spec) = hf_config::parse(text, "c.json") else { return };
    spec.validate().expect("a model that was taken");
    assert!(spec.bytes_per_token() > 0);
    for (tp, pp) in [(1, 1), (2, 1), (8, 4), (1, 64)] {
        let shape = Shape { tp, pp, cp: 1, dp: 1 };
        let rank = Rank { tp: tp - 1, pp: pp - 1, cp: 0, dp: 0 };
        if let Ok(rank) = spec.rank_geometry(shape, rank) {
            assert!(rank.page_bytes() == u64::from(rank.entries()) * rank.item_len(), "{rank:?}");
        }
    }
}

/// The first requests of the built-in trace, model configs, and frames in words.
pub fn seeds() -> Vec<Vec<u8>> {
    let lines: Vec<&str> = DEFAULT_TRACE.lines().filter(|l| l.len() < 300).take(4).collect();
    let configs = [
        r#"{"model_type":"qwen3","head_dim":128,"hidden_size":1024,"num_attention_heads":16,"num_hidden_layers":28,"num_key_value_heads":8,"torch_dtype":"bfloat16"}"#,
        r#"{"num_hidden_layers":61,"kv_lora_rank":512,"qk_rope_head_dim":64,"dtype":"float8_e4m3fn","page_tokens":32}"#,
        r#"{"text_config":{"hidden_size":8192,"num_attention_heads":64,"num_hidden_layers":80},"dtype":"float16"}"#,
    ];
    let mut out = vec![[b"\0", lines.join("\n").as_bytes()].concat()];
    out.extend(configs.map(|c| [b"\x01", c.as_bytes()].concat()));
    out.push(b"\x02# two messages\n4e 69\n\"\"\n\n[\"0xff\", \"\"]\n01\n".to_vec());
    out
}
