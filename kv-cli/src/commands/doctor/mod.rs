//! `kvt doctor`: which transports and devices work here, which do not, why, and what would change that.

#[cfg(any(feature = "nixl", feature = "mooncake"))]
mod child;
mod host;
#[cfg(feature = "mooncake")]
mod mooncake;
mod network;
#[cfg(feature = "nixl")]
mod nixl;
mod probe;
#[cfg(any(feature = "nixl", feature = "mooncake"))]
mod trial;

use std::fs;
use std::path::Path;
use std::process::ExitCode;

use serde::Serialize;

use crate::error::Result;
use crate::out;

/// When started by a check of `doctor`, this process is its other side.
pub use probe::child as probe_child;

/// How a check came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// Works.
    Ok,
    /// Works, but could be better.
    Warn,
    /// Does not work here, or is not here.
    No,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    /// What was looked at.
    pub name: &'static str,
    /// Result.
    pub status: Status,
    /// What was seen.
    pub detail: String,
    /// The command that would change it; empty when there is none.
    pub fix: String,
}

impl Check {
    fn new(name: &'static str, status: Status, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { name, status, detail: detail.into(), fix: fix.into() }
    }
}

const TRANSPORT: &str = "transport: tcp";

/// Run it. Exit 0 when at least one transport works.
pub fn run(json: bool) -> Result<ExitCode> {
    let checks = checks();
    let ok = checks.iter().any(|c| c.name.starts_with("transport: ") && c.status != Status::No);
    if json {
        out::line(serde_json::json!({ "ok": ok, "checks": checks }))?;
    } else {
        out::text(&table(&checks))?;
    }
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn table(checks: &[Check]) -> String {
    let width = checks.iter().map(|c| c.name.len()).max().unwrap_or(0);
    let mut out = String::new();
    for c in checks {
        let mark = match c.status {
            Status::Ok => "ok  ",
            Status::Warn => "warn",
            Status::No => "no  ",
        };
        out.push_str(&format!("{mark}  {:width$}  {}\n", c.name, c.detail));
        if !c.fix.is_empty() {
            out.push_str(&format!("      {:width$}  fix: {}\n", "", c.fix));
        }
    }
    out
}

fn checks() -> Vec<Check> {
    let copies = probe::same_host_copy();
    let mut checks = tcp(&copies);
    checks.extend(nixl(&copies));
    checks.push(mooncake());
    let fix = "use --transport tcp: host memory, this host and others";
    checks.push(Check::new("transport: mori", Status::No, "not in this release", fix));
    checks.extend([
        network::listens("tcp: IPv4", "127.0.0.1:0", "ip link set lo up"),
        network::listens("tcp: IPv6", "[::1]:0", "sysctl -w net.ipv6.conf.all.disable_ipv6=0 && ip link set lo up"),
        network::registry_port(),
        network::buffers(),
        host::huge_pages(),
        host::memory(),
        host::open_files(),
        host::cores(),
        host::rdma(Path::new("/sys/class/infiniband")),
        host::nvidia(Path::new("/proc/driver/nvidia/gpus")),
        host::amd(Path::new("/sys/class/kfd/kfd/topology/nodes")),
        network::namespaces(),
    ]);
    checks
}

/// The embedded transport, really started.
#[cfg(feature = "tcp")]
fn tcp(copies: &std::result::Result<(), String>) -> Vec<Check> {
    use kv_transfer::tcp::{TcpConfig, TcpTransport};
    let transport = match TcpTransport::new(TcpConfig::default()) {
        Ok(transport) => transport,
        Err(e) => {
            let fix = "ip link set lo up; ulimit -n 4096";
            return vec![Check::new(TRANSPORT, Status::No, format!("cannot be started: {e}"), fix)];
        }
    };
    let ips: Vec<_> = transport.addresses().iter().map(|a| a.ip()).collect();
    let pidfd = match kv_transfer::tcp::probe().pidfd {
        Ok(()) => Check::new("tcp: deaths of peers", Status::Ok, "proven at once on this host (pidfd)", ""),
        Err(e) => Check::new(
            "tcp: deaths of peers",
            Status::Warn,
            format!("no pidfd ({e}): pages of a dead peer's rooms are held longer"),
            "use Linux 5.3 or newer",
        ),
    };
    vec![
        Check::new(TRANSPORT, Status::Ok, "host memory; started here", ""),
        same_host_copies(copies),
        network::addresses(&ips),
        pidfd,
    ]
}

#[cfg(not(feature = "tcp"))]
fn tcp(copies: &std::result::Result<(), String>) -> Vec<Check> {
    let fix = "cargo build -p kv-transfer-cli --features tcp";
    vec![Check::new(TRANSPORT, Status::No, "not built into this program", fix), same_host_copies(copies)]
}

/// NIXL, really tried out.
#[cfg(feature = "nixl")]
fn nixl(copies: &std::result::Result<(), String>) -> Vec<Check> {
    nixl::checks(copies)
}

#[cfg(not(feature = "nixl"))]
fn nixl(_copies: &std::result::Result<(), String>) -> Vec<Check> {
    let fix = "cargo build -p kv-transfer-cli --features nixl";
    vec![Check::new("transport: nixl", Status::No, "not built into this program", fix)]
}

/// Mooncake, really tried out.
#[cfg(feature = "mooncake")]
fn mooncake() -> Check {
    mooncake::check()
}

#[cfg(not(feature = "mooncake"))]
fn mooncake() -> Check {
    let fix = "cargo build -p kv-transfer-cli --features mooncake";
    Check::new("transport: mooncake", Status::No, "not built into this program", fix)
}

/// Whether one process may read another's memory (`process_vm_readv`): it was tried with a child of this program.
fn same_host_copies(tried: &std::result::Result<(), String>) -> Check {
    let seccomp = fs::read_to_string("/proc/self/status").is_ok_and(|s| s.lines().any(|l| l == "Seccomp:\t2"));
    copies_check(tried.clone(), probe::yama_scope(), seccomp)
}

fn copies_check(tried: std::result::Result<(), String>, yama: Option<u32>, seccomp: bool) -> Check {
    let name = "tcp: same-host copies";
    match (tried, yama) {
        (Ok(()), Some(scope @ 2..)) => Check::new(
            name,
            Status::Ok,
            format!("process_vm_readv works for this user alone: Yama's scope is {scope}, other users' ranks stream"),
            "sysctl -w kernel.yama.ptrace_scope=1",
        ),
        (Ok(()), _) => Check::new(name, Status::Ok, "process_vm_readv works between processes of this user", ""),
        (Err(why), yama) => {
            let fix = match yama {
                // Scope 3 stays until the next boot.
                Some(3) => "set kernel.yama.ptrace_scope=1 in /etc/sysctl.d, and boot",
                Some(2) => "sysctl -w kernel.yama.ptrace_scope=1",
                _ if seccomp => "start the container with --cap-add=SYS_PTRACE (its seccomp filter forbids the call)",
                _ => "run both ranks as one user in one pid namespace; in containers: --cap-add=SYS_PTRACE",
            };
            let detail = format!("process_vm_readv is refused ({why}): ranks on one host stream, at a lower rate");
            Check::new(name, Status::Warn, detail, fix)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cure_of_refused_copies_follows_the_cause() {
        let refused = |yama, seccomp| copies_check(Err("Operation not permitted".into()), yama, seccomp).fix;
        assert!(refused(Some(2), true).contains("ptrace_scope=1"));
        assert!(refused(Some(3), false).contains("sysctl.d"));
        assert!(refused(None, true).contains("SYS_PTRACE") && refused(None, true).contains("seccomp"));
        assert!(refused(Some(1), false).contains("one pid namespace"));
        assert_eq!(copies_check(Ok(()), None, true).status, Status::Ok);
        assert!(copies_check(Ok(()), Some(2), false).detail.contains("scope is 2"));
    }

    #[test]
    fn the_table_puts_the_cure_under_the_cause() {
        let checks = [Check::new("a", Status::Ok, "fine", ""), Check::new("longer", Status::Warn, "meh", "do this")];
        assert_eq!(table(&checks), "ok    a       fine\nwarn  longer  meh\n              fix: do this\n");
    }
}
