//! Bad input to the program: one clear line on standard error, a non-zero exit, nothing on standard output.

#![allow(clippy::unwrap_used)] // helpers of tests

#[cfg(feature = "nixl")]
mod nixl_here;

use std::io::Write as _;
use std::net::TcpListener;
use std::process::{Command, Output, Stdio};

fn kvt(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_kvt")).args(args).env_remove("RUST_LOG").output().unwrap()
}

/// The one line that `kvt` ends with.
fn error(args: &[&str]) -> String {
    let out = kvt(args);
    assert!(!out.status.success(), "{args:?} succeeded");
    assert!(out.stdout.is_empty(), "{}", String::from_utf8_lossy(&out.stdout));
    let text = String::from_utf8(out.stderr).unwrap();
    let lines: Vec<_> = text.lines().filter(|l| l.starts_with("kvt: ")).collect();
    assert_eq!(lines.len(), 1, "{text}");
    assert_eq!(text.lines().last(), Some(lines[0]), "{text}");
    lines[0].to_owned()
}

#[test]
fn a_broken_trace_line_is_named_by_number() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    writeln!(file, r#"{{"timestamp":0,"input_length":5,"output_length":1,"hash_ids":[0]}}"#).unwrap();
    writeln!(file, r#"{{"timestamp":0,"input_length":"#).unwrap();
    let path = file.path().to_str().unwrap();
    let e = error(&["replay", "--trace", path, "--requests", "5"]);
    assert!(e.contains(&format!("{path}:2: ")), "{e}");
}

#[test]
fn an_unknown_model_and_an_unreadable_file() {
    let e = error(&["replay", "--model", "Qwen9"]);
    assert!(e.contains("unknown model 'Qwen9'") && e.contains("Qwen3-0.6B"), "{e}");
    let e = error(&["replay", "--model", "/nowhere/config.json"]);
    assert!(e.contains("cannot read model file /nowhere/config.json"), "{e}");
    let e = error(&["demo", "--trace", "/nowhere/t.jsonl"]);
    assert!(e.contains("cannot read trace /nowhere/t.jsonl"), "{e}");
}

#[test]
fn shapes_that_differ_name_both_values() {
    let e = error(&["replay", "--prefill", "tp=2", "--decode", "tp=1"]);
    assert!(e.contains("prefill tp=2, decode tp=1"), "{e}");
    let e = error(&["replay", "--prefill", "tp=16", "--decode", "tp=16"]);
    assert!(e.contains("tp=16 is more than the 8 KV heads"), "{e}");
}

#[test]
fn a_port_in_use() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let e = error(&["bootstrap", "--host", "127.0.0.1", "--port", &port]);
    assert!(e.contains(&format!("cannot listen on 127.0.0.1:{port}")), "{e}");
    let e = error(&["prefill", "--serve-bootstrap", &format!("127.0.0.1:{port}"), "--pool-mib", "64"]);
    assert!(e.contains(&format!("cannot listen on 127.0.0.1:{port}")) && e.contains("another port"), "{e}");
    let e = error(&["replay", "--bootstrap-port", &port, "--pool-mib", "64", "--requests", "1"]);
    assert!(e.contains(&format!("cannot listen on 127.0.0.1:{port}")), "{e}");
}

#[test]
fn an_unreachable_bootstrap() {
    // A port that was just free, and that nobody listens on.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let at = format!("127.0.0.1:{port}");
    let e = error(&["decode", "--bootstrap", &at, "--connect-timeout", "0"]);
    assert!(e.contains(&format!("the bootstrap server at {at} cannot be reached")), "{e}");
    let e = error(&["prefill", "--bootstrap", "nonsense"]);
    assert!(e.contains("--bootstrap nonsense is no HOST:PORT"), "{e}");
}

/// The last lines of a prefill and a decode that were started apart. Both end, neither well.
fn both(prefill: &[&str], decode: &[&str]) -> [String; 2] {
    // A port that was just free; should another program take it meanwhile, prefill says so.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let at = format!("127.0.0.1:{port}");
    let common = ["--pool-mib", "64", "--max-tokens", "256"];
    std::thread::scope(|scope| {
        let p = scope.spawn(|| error(&[&["prefill", "--serve-bootstrap", &at], &common[..], prefill].concat()));
        let d = error(&[&["decode", "--bootstrap", &at], &common[..], decode].concat());
        [p.join().unwrap(), d]
    })
}

/// R-A4, F72: each field that differs, with both values, on both sides, and nobody waits for anybody.
#[test]
fn workloads_that_differ_end_both_sides_with_both_values() {
    let file = |name: &str, layers: u32, dtype: &str| {
        let mut file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
        let heads = r#""num_key_value_heads":2,"head_dim":8"#;
        writeln!(file, r#"{{"name":"{name}","num_hidden_layers":{layers},{heads},"dtype":"{dtype}"}}"#).unwrap();
        file
    };
    let (base, deep, fp8) = (file("a", 2, "bfloat16"), file("b", 3, "bfloat16"), file("a", 2, "float8_e4m3fn"));
    let [base, deep, fp8] = [&base, &deep, &fp8].map(|f| f.path().to_str().unwrap());
    for (decode, wanted) in [
        (&["--model", deep][..], "model is a on prefill and b on decode, layers is 2 on prefill and 3 on decode"),
        (&["--model", fp8], "bytes a value is 2 on prefill and 1 on decode"),
        (&["--model", base, "--page-tokens", "32"], "page_size is 64 on prefill and 32 on decode"),
        (&["--model", base, "--tp-size", "2"], "tp_size is 1 on prefill and 2 on decode"),
        (&["--model", base, "--seed", "9"], "pattern is keyed, seed 1 on prefill and keyed, seed 9 on decode"),
        (&["--model", base, "--requests", "1"], "requests is 32 on prefill and 1 on decode"),
    ] {
        for line in both(&["--model", base], decode) {
            assert!(line.contains(wanted), "{wanted}: {line}");
        }
    }
}

/// R-A4: the two sides would wait for each other's messages, which neither can read.
#[cfg(feature = "nixl")]
#[test]
fn transports_that_differ_end_both_sides() {
    if nixl_here::available("transports_that_differ_end_both_sides") {
        for line in both(&[], &["--transport", "nixl"]) {
            assert!(line.contains("transport is tcp on prefill and nixl on decode"), "{line}");
        }
    }
}

#[test]
fn an_unknown_transport() {
    let e = error(&["replay", "--transport", "pigeon", "--requests", "1", "--pool-mib", "64"]);
    assert!(e.contains("transport 'pigeon' is not built into this program"), "{e}");
}

#[test]
fn frames_that_are_no_hex() {
    let mut child = Command::new(env!("CARGO_BIN_EXE_kvt"))
        .args(["wire", "decode", "--dialect", "mooncake"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"31\nzz\n").unwrap();
    let out = child.wait_with_output().unwrap();
    let text = String::from_utf8(out.stderr).unwrap();
    assert!(!out.status.success());
    assert!(text.contains("standard input:2: 'z' is not a hex digit"), "{text}");
}

#[test]
fn wire_decode_prints_a_status_of_every_dialect() {
    let mut file = tempfile::NamedTempFile::new().unwrap();
    // Mooncake status: room 5, Success, rank 0.
    writeln!(file, "[\"35\", \"34\", \"30\"]").unwrap();
    let out = kvt(&["wire", "decode", "--dialect", "mooncake", "--json", file.path().to_str().unwrap()]);
    assert!(out.status.success());
    let text = String::from_utf8(out.stdout).unwrap();
    assert!(text.lines().last().unwrap().contains("\"messages\":1"), "{text}");
    assert!(text.contains("frames"), "{text}");
}

#[test]
fn doctor_tries_same_host_copies_for_real() {
    let out = kvt(&["doctor", "--json"]);
    let text = String::from_utf8(out.stdout).unwrap();
    let last: serde_json::Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    let checks = last["checks"].as_array().unwrap();
    let copies = checks.iter().find(|c| c["name"] == "tcp: same-host copies").unwrap();
    // Either it works, or the line says why not and what to do.
    assert!(copies["status"] == "ok" || copies["fix"].as_str().is_some_and(|f| !f.is_empty()), "{copies}");
    assert_eq!(out.status.success(), last["ok"] == true);
    // What does not work says why.
    for check in checks {
        assert!(!check["detail"].as_str().unwrap().is_empty(), "{check}");
    }
    let named = |name: &str| checks.iter().any(|c| c["name"] == name);
    for name in ["transport: tcp", "transport: nixl", "transport: mooncake", "transport: mori", "device: RDMA NIC"] {
        assert!(named(name), "{name}");
    }
}

#[test]
fn a_full_disk_behind_standard_output_is_one_line() {
    let mut frames = tempfile::NamedTempFile::new().unwrap();
    writeln!(frames, "[\"35\", \"34\", \"30\"]").unwrap();
    let frames = frames.path().to_str().unwrap();
    for args in [
        &["wire", "decode", "--dialect", "mooncake", "--json", frames][..],
        &["doctor"],
        &["doctor", "--json"],
        &["bootstrap", "--host", "127.0.0.1", "--port", "0"],
        &["replay", "--json", "--requests", "1", "--max-tokens", "64", "--pool-mib", "32"],
    ] {
        let full = std::fs::File::options().write(true).open("/dev/full").unwrap();
        let out = Command::new(env!("CARGO_BIN_EXE_kvt")).args(args).env_remove("RUST_LOG").stdout(full).output();
        let out = out.unwrap();
        let text = String::from_utf8(out.stderr).unwrap();
        assert_eq!(out.status.code(), Some(1), "{args:?}: {text}");
        let last = text.lines().last().unwrap();
        assert!(last.starts_with("kvt: cannot write the result to standard output: "), "{args:?}: {text}");
        assert!(!text.contains("panicked"), "{text}");
    }
}

#[test]
fn numbers_that_leave_nothing_to_do_are_named_with_the_right_advice() {
    for (args, wanted) in [
        (["--concurrency", "0"], "--concurrency 0 lets no room run; give 1 or more"),
        (["--requests", "0"], "--requests 0 leaves nothing to do; give 1 or more"),
        (["--max-tokens", "0"], "--max-tokens 0 cuts every request to nothing; give 1 or more"),
        (["--pool-mib", "0"], "give --pool-mib 7 or more"),
        (["--pool-mib", "1"], "give --pool-mib 7 or more"),
    ] {
        let e = error(&[&["replay"], &args[..]].concat());
        assert!(e.contains(wanted), "{e}");
    }
}

#[test]
fn a_host_that_is_not_here_and_a_limit_that_is_too_low_get_their_own_advice() {
    // 203.0.113.0/24 is for documentation: no machine has it.
    let elsewhere = "give an address of this machine";
    for (args, wanted) in [
        (&["bootstrap", "--host", "no.such.invalid"][..], "correct the host's name"),
        (&["bootstrap", "--host", "203.0.113.7"], elsewhere),
        (&["replay", "--host", "203.0.113.7", "--pool-mib", "32", "--requests", "1"], elsewhere),
    ] {
        let e = error(args);
        assert!(e.contains(wanted) && !e.contains("another port"), "{e}");
    }
    for files in [20, 24] {
        let script = format!("ulimit -n {files}; exec \"$0\" replay --requests 1 --max-tokens 64 --pool-mib 32");
        let out = Command::new("sh").args(["-c", &script, env!("CARGO_BIN_EXE_kvt")]).output().unwrap();
        let text = String::from_utf8(out.stderr).unwrap();
        assert!(text.lines().last().unwrap().ends_with("raise the limit of open files: ulimit -n 4096"), "{text}");
    }
}

/// A `kvt` that goes on in the background; killed when it is dropped.
struct Running(std::process::Child);

impl Running {
    fn start(args: &[&str]) -> Self {
        let mut command = Command::new(env!("CARGO_BIN_EXE_kvt"));
        command.args(args).env_remove("RUST_LOG").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        Self(command.spawn().unwrap())
    }

    /// What it says, up to the first line with `text`.
    fn until(&mut self, text: &str) -> String {
        let stderr = std::io::BufReader::new(self.0.stderr.as_mut().unwrap());
        let mut lines = std::io::BufRead::lines(stderr).map(|l| l.unwrap());
        lines.find(|l| l.contains(text)).unwrap_or_else(|| panic!("it never says '{text}'"))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // One that has ended already needs no killing.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const SMALL: [&str; 6] = ["--pool-mib", "64", "--max-tokens", "256", "--requests", "3"];

#[test]
fn of_two_decodes_one_is_refused_and_the_other_has_its_run() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let at = format!("127.0.0.1:{port}");
    let _registry = Running::start(&["bootstrap", "--host", "127.0.0.1", "--port", &port.to_string()]);
    let decode = [&["decode", "--bootstrap", &at], &SMALL[..]].concat();
    let outs = std::thread::scope(|scope| {
        let decodes = [0, 1].map(|_| scope.spawn(|| kvt(&decode)));
        let prefill = kvt(&[&["prefill", "--bootstrap", &at], &SMALL[..]].concat());
        assert!(prefill.status.success(), "{}", String::from_utf8_lossy(&prefill.stderr));
        decodes.map(|d| d.join().unwrap())
    });
    let won = outs.iter().filter(|o| o.status.success()).count();
    let said: Vec<_> = outs.iter().map(|o| String::from_utf8_lossy(&o.stderr)).collect();
    assert_eq!(won, 1, "{said:?}");
    let lost = outs.iter().position(|o| o.status.code() == Some(1)).unwrap();
    let last = said[lost].lines().last().unwrap();
    // Second, or so late that prefill was through.
    let wanted = ["kvt: another decode tp0 pp0 has the prefill at", "kvt: no prefill tp0 pp0 came", "kvt: the prefill"];
    assert!(wanted.iter().any(|w| last.starts_with(w)), "{last}");
}

#[test]
fn a_prefill_that_was_killed_leaves_nothing_to_wait_for() {
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let at = format!("127.0.0.1:{port}");
    let _registry = Running::start(&["bootstrap", "--host", "127.0.0.1", "--port", &port.to_string()]);
    let mut prefill = Running::start(&[&["prefill", "--bootstrap", &at], &SMALL[..]].concat());
    prefill.until("the other side needs the same workload options");
    // A decode that was refused proves that prefill had stated its workload.
    let e = error(&[&["decode", "--bootstrap", &at, "--seed", "9"], &SMALL[..]].concat());
    assert!(e.contains("seed 9 on decode"), "{e}");
    drop(prefill);
    let e = error(&[&["decode", "--bootstrap", &at, "--connect-timeout", "1"], &SMALL[..]].concat());
    assert!(e.contains("has ended: no sign of life") || e.contains("no prefill tp0 pp0 came"), "{e}");
}
