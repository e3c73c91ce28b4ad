//! `kvt prefill` and `kvt decode` as on two machines: two network namespaces with a cable between them.
//!
//! Network namespaces share the kernel, its boot id and the process numbers, so the embedded transport would rightly
//! copy between them. Two machines stream; both ways to get there are tested: told to (`--tcp-path stream`), and found
//! out by itself, with decode in a namespace of process numbers of its own.
#![cfg(feature = "tcp")]
#![allow(clippy::unwrap_used, clippy::expect_used)] // helpers of tests

use std::io::{Read as _, Write as _};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

/// A model small enough for a debug build.
const CONFIG: &str =
    r#"{"name":"tiny","num_hidden_layers":4,"num_key_value_heads":4,"head_dim":32,"dtype":"bfloat16"}"#;
/// Far above what a run takes: only a hang reaches it.
const PATIENCE: Duration = Duration::from_secs(180);

/// Why this cannot be tried here, printed where `xtask ci` finds it.
fn skipped(test: &str, why: &str) {
    eprintln!("skipped: {test}: {why}");
}

fn ip(args: &[&str]) -> Result<(), String> {
    let shown = || format!("`ip {}`", args.join(" "));
    match Command::new("ip").args(args).output() {
        Ok(out) if out.status.success() => Ok(()),
        Ok(out) => Err(format!("{}: {}", shown(), String::from_utf8_lossy(&out.stderr).trim())),
        Err(e) => Err(format!("{}: {e} (iproute2 is needed)", shown())),
    }
}

/// Two namespaces, a veth pair between them, one IPv4 and one IPv6 address each. Gone when dropped.
struct Cable {
    names: [String; 2],
}

const V4: [&str; 2] = ["10.213.77.1", "10.213.77.2"];
const V6: [&str; 2] = ["fd5a:77::1", "fd5a:77::2"];

impl Cable {
    fn new(test: &str) -> Result<Self, String> {
        // The process number makes names unique among runs at the same time.
        let names = ["p", "d"].map(|side| format!("kvt-{test}-{}-{side}", std::process::id()));
        // From here on a failure takes away again what was made.
        let cable = Self { names };
        let [a, b] = [cable.names[0].as_str(), cable.names[1].as_str()];
        ip(&["netns", "add", a])?;
        ip(&["netns", "add", b])?;
        ip(&["link", "add", "kv0", "netns", a, "type", "veth", "peer", "name", "kv0", "netns", b])?;
        for (i, name) in [a, b].into_iter().enumerate() {
            ip(&["-n", name, "addr", "add", &format!("{}/24", V4[i]), "dev", "kv0"])?;
            ip(&["-n", name, "link", "set", "lo", "up"])?;
            ip(&["-n", name, "link", "set", "kv0", "up"])?;
        }
        Ok(cable)
    }

    fn with_v6(self) -> Result<Self, String> {
        for (name, addr) in self.names.iter().zip(V6) {
            // Usable at once: nobody else is on this cable.
            ip(&["-n", name, "-6", "addr", "add", &format!("{addr}/64"), "dev", "kv0", "nodad"])?;
        }
        Ok(self)
    }

    /// A command inside one of them.
    fn inside(&self, side: usize, wrap: &[&str]) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.names[side]]).args(wrap).arg(env!("CARGO_BIN_EXE_kvt"));
        command
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for name in &self.names {
            // One that was never made cannot be taken away, which is fine. The veth pair goes with its namespaces.
            let _ = ip(&["netns", "del", name]);
        }
    }
}

/// A running `kvt`; killed when the test fails before it ends.
struct Kvt(Option<Child>);

impl Kvt {
    fn start(mut command: Command, args: &[&str]) -> Self {
        let child = command
            .args(args)
            .env_remove("RUST_LOG")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        Self(Some(child))
    }

    /// Its end, with everything it said.
    fn end(mut self) -> Output {
        let deadline = Instant::now() + PATIENCE;
        let mut child = self.0.take().unwrap();
        // Both say little: a pipe holds it all.
        while child.try_wait().unwrap().is_none() {
            if Instant::now() > deadline {
                child.kill().unwrap();
                let mut said = String::new();
                child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
                panic!("kvt hangs: {said}");
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        child.wait_with_output().unwrap()
    }
}

impl Drop for Kvt {
    fn drop(&mut self) {
        if let Some(child) = &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn report(out: &Output) -> Value {
    let (stdout, stderr) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
    let last = stdout.lines().last().unwrap_or_else(|| panic!("no output: {stderr}"));
    let report: Value = serde_json::from_str(last).unwrap();
    assert!(out.status.success() && report["ok"] == true, "{report}\n{stderr}");
    report
}

/// Run both sides; decode's report.
fn run(cable: &Cable, hosts: [&str; 2], path: &str, wrap_decode: &[&str]) -> Value {
    let mut model = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
    model.write_all(CONFIG.as_bytes()).unwrap();
    let registry = if hosts[0].contains(':') { format!("[{}]:8998", hosts[0]) } else { format!("{}:8998", hosts[0]) };
    let common = ["--json", "--pool-mib", "32", "--requests", "12", "--tcp-path", path];
    let model = ["--model", model.path().to_str().unwrap()];
    let args = |mine: &[&'static str], host| [&common[..], &model, mine, &["--host", host]].concat();
    // Decode first: it waits for the registry.
    let decode = Kvt::start(
        cable.inside(1, wrap_decode),
        &[&["decode", "--bootstrap", registry.as_str()], &args(&[], hosts[1])[..]].concat(),
    );
    let prefill = Kvt::start(
        cable.inside(0, &[]),
        &[&["prefill", "--serve-bootstrap", registry.as_str()], &args(&[], hosts[0])[..]].concat(),
    );
    let (decode, prefill) = (report(&decode.end()), report(&prefill.end()));
    for side in [&decode, &prefill] {
        assert_eq!((&side["rooms"], &side["failed"], &side["corrupt"]), (&12.into(), &0.into(), &0.into()), "{side}");
    }
    assert!(decode["bytes"].as_u64().unwrap() > 0 && decode["fixed_us"].as_u64().unwrap() > 0, "{decode}");
    decode
}

/// Namespaces may be forbidden here: then `None`, and the reason was printed.
fn cable(test: &str, v6: bool) -> Option<Cable> {
    let made = Cable::new(test).and_then(|c| if v6 { c.with_v6() } else { Ok(c) });
    made.map_err(|why| skipped(test, &format!("no network namespaces here: {why}"))).ok()
}

#[test]
fn two_machines_stream_over_ipv4() {
    let Some(cable) = cable("two_machines_stream_over_ipv4", false) else { return };
    let decode = run(&cable, V4, "stream", &[]);
    assert_eq!(decode["path"], "stream", "{decode}");
}

#[test]
fn two_machines_stream_over_ipv6() {
    let Some(cable) = cable("two_machines_stream_over_ipv6", true) else { return };
    let decode = run(&cable, V6, "stream", &[]);
    assert_eq!(decode["path"], "stream", "{decode}");
}

/// Process numbers of its own: what decode is told of prefill's process means nothing there, so it must not copy.
#[test]
fn containers_find_out_that_they_cannot_copy() {
    const NAME: &str = "containers_find_out_that_they_cannot_copy";
    let wrap = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"];
    match Command::new(wrap[0]).args(&wrap[1..]).arg("true").output() {
        Ok(out) if out.status.success() => {}
        Ok(out) => return skipped(NAME, &format!("no pid namespaces here: {}", String::from_utf8_lossy(&out.stderr))),
        Err(e) => return skipped(NAME, &format!("unshare (util-linux): {e}")),
    }
    let Some(cable) = cable(NAME, false) else { return };
    let decode = run(&cable, V4, "auto", &wrap);
    assert_eq!(decode["path"], "stream", "{decode}");
}

/// The counterpart: namespaces of the network alone do not keep processes of one host from copying.
#[test]
fn processes_of_one_host_copy_whatever_their_network() {
    let Some(cable) = cable("processes_of_one_host_copy_whatever_their_network", true) else { return };
    let probe = Command::new(env!("CARGO_BIN_EXE_kvt")).args(["doctor", "--json"]).output().unwrap();
    let doctor: Value = serde_json::from_slice(&probe.stdout).unwrap();
    let copies = doctor["checks"].as_array().unwrap().iter().find(|c| c["name"] == "tcp: same-host copies").unwrap();
    if copies["status"] != "ok" {
        return skipped("processes_of_one_host_copy_whatever_their_network", copies["detail"].as_str().unwrap());
    }
    let decode = run(&cable, V6, "copy", &[]);
    assert_eq!(decode["path"], "copy", "{decode}");
}
