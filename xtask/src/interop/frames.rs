//! Our control messages to SGLang, as `--capture` has them: exactly the frames of 0.5.23.

use std::fs;

use serde_json::Value;

use super::play::Acted;
use super::program::{Backend, Direction, Program};

/// Frames of what a decode sends: registration, metadata, ABORT with and without generation.
fn of_decode(backend: Backend) -> [usize; 4] {
    match backend {
        Backend::Mooncake => [20, 10, 5, 4],
        Backend::Nixl | Backend::Tcp => [25, 11, 5, 4],
    }
}

/// Frames of what a prefill sends: status, ABORT_ACK.
fn of_prefill(backend: Backend) -> [usize; 2] {
    match backend {
        Backend::Mooncake => [3, 4],
        Backend::Nixl | Backend::Tcp => [5, 4],
    }
}

/// What is odd about what our actors sent to SGLang's.
pub fn check(direction: Direction, backend: Backend, actors: &[Acted]) -> Vec<String> {
    let mut faults = Vec::new();
    for acted in actors.iter().filter(|a| a.program == Program::Ours && a.who.role() != "bootstrap") {
        let (other, allowed) = match acted.who.role() {
            "prefill" => (direction.decode, of_prefill(backend).to_vec()),
            _ => (direction.prefill, of_decode(backend).to_vec()),
        };
        if other == Program::Ours {
            continue;
        }
        let Some(path) = acted.options.get("--capture") else {
            faults.push(format!("{} kept no record of its messages", acted.who.name()));
            continue;
        };
        match fs::read_to_string(path) {
            Ok(text) => faults.extend(sent(&text, &allowed).into_iter().map(|f| format!("{}: {f}", acted.who.name()))),
            Err(e) => faults.push(format!("cannot read {path}: {e}")),
        }
    }
    faults
}

fn sent(text: &str, allowed: &[usize]) -> Vec<String> {
    let lines = text.lines().filter_map(|l| serde_json::from_str::<Value>(l).ok());
    let messages = lines.filter(|v| v["dir"] == "send").filter_map(|v| v["frames_hex"].as_array().map(Vec::len));
    let counts: Vec<usize> = messages.collect();
    if counts.is_empty() {
        return vec!["sent nothing, says the record".to_owned()];
    }
    let odd = counts.iter().filter(|n| !allowed.contains(n));
    odd.map(|n| format!("a message of {n} frames, which 0.5.23 does not have")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_further_frame_is_a_fault() {
        let nixl = of_decode(Backend::Nixl);
        let line = |n: usize| serde_json::json!({"dir": "send", "frames_hex": vec!["00"; n]}).to_string();
        assert_eq!(sent(&format!("{}\n{}\n", line(25), line(11)), &nixl), Vec::<String>::new());
        assert!(sent(&format!("{}\n{}\n", line(25), line(12)), &nixl)[0].contains("12 frames"));
        assert!(sent("", &nixl)[0].contains("nothing"));
    }
}
