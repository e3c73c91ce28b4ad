//! `kvt replay` from its start to its report.

use std::io::Write as _;
use std::process::Command;

/// A model small enough for a debug build: 4 layers, 4 KV heads of 16 values.
pub const CONFIG: &str =
    r#"{"name":"tiny","num_hidden_layers":4,"num_key_value_heads":4,"head_dim":16,"dtype":"bfloat16"}"#;
pub const MLA: &str =
    r#"{"name":"tiny-mla","num_hidden_layers":4,"kv_lora_rank":48,"qk_rope_head_dim":16,"dtype":"bfloat16"}"#;

/// A run that must end well; its report.
pub fn replay(config: &str, args: &[&str]) -> serde_json::Value {
    replay_with(config, args, &[])
}

/// The same with these environment variables; `None` takes one away.
pub fn replay_with(config: &str, args: &[&str], env: &[(&str, Option<&str>)]) -> serde_json::Value {
    let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    file.write_all(config.as_bytes()).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_kvt"));
    command.args(["replay", "--json", "--pool-mib", "16", "--model", file.path().to_str().unwrap()]).args(args);
    for (name, value) in env {
        match value {
            Some(value) => command.env(name, value),
            None => command.env_remove(name),
        };
    }
    let out = command.output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let last = stdout.lines().last().unwrap_or_else(|| panic!("no output: {stderr}"));
    let report: serde_json::Value = serde_json::from_str(last).unwrap();
    assert_eq!(out.status.success(), report["ok"] == true, "{stderr}");
    assert_eq!(report["ok"], true, "{report}\n{stderr}");
    assert_eq!((&report["failed"], &report["corrupt"]), (&0.into(), &0.into()));
    report
}
