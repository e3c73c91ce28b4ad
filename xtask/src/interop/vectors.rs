//! `--vectors`: what our side recorded of some cases, as vectors for the golden tests.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::case::Case;
use super::program::{Backend, Direction, Program};
use crate::setup;
use crate::sh::Result;

/// Cases whose conversations are kept: small ones, with one process on our side, so that a file is in order.
const KEPT: &[(&str, Direction)] = &[
    ("one-room", Direction::SGLANG_OURS),
    ("one-room", Direction::OURS_SGLANG),
    ("mha", Direction::SGLANG_OURS),
    ("mha", Direction::OURS_SGLANG),
    ("chunked", Direction::SGLANG_OURS),
    ("chunked", Direction::OURS_SGLANG),
    ("full-prefix", Direction::SGLANG_OURS),
    ("full-prefix", Direction::OURS_SGLANG),
    ("partial-prefix", Direction::SGLANG_OURS),
    ("partial-prefix", Direction::OURS_SGLANG),
    ("ipv6", Direction::SGLANG_OURS),
    ("ipv6", Direction::OURS_SGLANG),
    ("pp2-mla", Direction::SGLANG_OURS),
    ("pp2-mha", Direction::SGLANG_OURS),
    ("tp2-tp1-mla", Direction::SGLANG_OURS),
    ("tp1-tp2-mla", Direction::OURS_SGLANG),
    ("dp2-by-room", Direction::SGLANG_OURS),
    ("abort-prefill-unsent", Direction::OURS_SGLANG),
    ("abort-prefill-chunk-2", Direction::OURS_SGLANG),
    ("abort-decode-waiting", Direction::SGLANG_OURS),
    ("abort-decode-waiting", Direction::OURS_SGLANG),
    ("abort-decode-hanging", Direction::SGLANG_OURS),
    ("abort-decode-hanging", Direction::OURS_SGLANG),
    ("abort-decode-two-acks", Direction::SGLANG_OURS),
    ("timeout-decode", Direction::SGLANG_OURS),
    ("timeout-decode", Direction::OURS_SGLANG),
    ("restart-prefill", Direction::SGLANG_OURS),
];

/// Where they are recorded: an empty folder.
pub fn folder() -> Result<PathBuf> {
    let folder = setup::target()?.join("interop").join("vectors");
    match fs::remove_dir_all(&folder) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(format!("cannot empty {}: {e}", folder.display())),
        _ => Ok(folder),
    }
}

/// The cases that are to be run for them.
pub fn cases(all: Vec<Case>) -> Vec<Case> {
    all.into_iter().filter(|c| KEPT.iter().any(|(name, _)| *name == c.name)).collect()
}

/// Write `conversations_BACKEND.json` from the files of a recording.
pub fn write(record: &Path, backend: Backend, to: &Path) -> Result<usize> {
    let mut vectors = Vec::new();
    for (case, direction) in KEPT {
        let side = if direction.prefill == Program::Ours { "prefill" } else { "decode" };
        let file =
            record.join(format!("{case}.{}.{}.{side}.jsonl", backend.name(), direction.to_string().replace('>', "-")));
        let text = fs::read_to_string(&file).map_err(|e| format!("cannot read {}: {e}", file.display()))?;
        let messages = messages(&text).map_err(|e| format!("{}: {e}", file.display()))?;
        if messages.is_empty() {
            return Err(format!("{} holds no message", file.display()));
        }
        vectors.push(json!({"name": case, "direction": direction.to_string(), "side": side, "messages": messages}));
    }
    let n = vectors.len();
    let file = json!({
        "source": "recorded on our side: `cargo xtask interop --vectors`, the other side SGLang 0.5.23",
        "vectors": vectors,
    });
    let path = to.join(format!("conversations_{}.json", backend.name()));
    let text = serde_json::to_string_pretty(&file).map_err(|e| e.to_string())?;
    fs::write(&path, text + "\n").map_err(|e| format!("cannot write {}: {e}", path.display()))?;
    Ok(n)
}

fn messages(text: &str) -> Result<Vec<Value>> {
    let message = |line: &str| {
        let v: Value = serde_json::from_str(line).map_err(|e| e.to_string())?;
        let frames = v["frames_hex"].as_array().ok_or("a line without frames")?;
        Ok(json!({"dir": v["dir"], "frames": frames}))
    };
    text.lines().map(message).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cases_that_are_kept_exist() {
        let all = super::super::cases::all();
        for (name, direction) in KEPT {
            let case = all.iter().find(|c| c.name == *name).unwrap_or_else(|| panic!("no case {name}"));
            assert_eq!(case.not_in(*direction, Backend::Nixl), None, "{name} {direction}");
        }
    }

    #[test]
    fn lines_become_messages() {
        let text = r#"{"t":1,"dir":"send","peer":"tcp://x","frames_hex":["00"]}"#;
        assert_eq!(messages(text).unwrap(), [json!({"dir": "send", "frames": ["00"]})]);
        assert!(messages("{}").is_err() && messages("x").is_err());
    }
}
