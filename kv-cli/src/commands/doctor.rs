//! `kvt doctor`: which transports and devices work here, which do not, why, and what would change that.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::TcpListener;
use std::process::{Command, ExitCode, Stdio};

use serde::Serialize;

use crate::error::Result;
use crate::memory::mem_available;

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

/// Run it. Exit 0 when at least one transport works.
pub fn run(json: bool) -> Result<ExitCode> {
    let checks = checks();
    if json {
        let ok = works(&checks);
        println!("{}", serde_json::json!({ "ok": ok, "checks": checks }));
    } else {
        let width = checks.iter().map(|c| c.name.len()).max().unwrap_or(0);
        for c in &checks {
            let mark = match c.status {
                Status::Ok => "ok  ",
                Status::Warn => "warn",
                Status::No => "no  ",
            };
            println!("{mark}  {:width$}  {}", c.name, c.detail);
            if !c.fix.is_empty() {
                println!("      {:width$}  fix: {}", "", c.fix);
            }
        }
    }
    Ok(if works(&checks) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn works(checks: &[Check]) -> bool {
    checks.iter().any(|c| c.name == LOOPBACK && c.status == Status::Ok)
}

const LOOPBACK: &str = "tcp: IPv4 loopback";

fn checks() -> Vec<Check> {
    vec![
        listens(LOOPBACK, "127.0.0.1:0", "ip link set lo up"),
        listens("tcp: IPv6 loopback", "[::1]:0", "sysctl -w net.ipv6.conf.lo.disable_ipv6=0"),
        same_host_copies(),
        huge_pages(),
        open_files(),
        memory(),
        cores(),
        devices("device: RDMA", "/sys/class/infiniband", "", "no RDMA device; hosts are reached over TCP"),
        devices("device: NVIDIA GPU", "/proc/driver/nvidia/gpus", "", "no NVIDIA driver; host memory only"),
        devices("device: AMD GPU", "/sys/class/kfd/kfd/topology/nodes", "", "no AMD driver; host memory only"),
        not_built("transport: nixl"),
        not_built("transport: mooncake"),
        not_built("transport: mori"),
    ]
}

fn not_built(name: &'static str) -> Check {
    Check::new(name, Status::No, "not part of this release", "")
}

fn listens(name: &'static str, addr: &str, fix: &str) -> Check {
    match TcpListener::bind(addr) {
        Ok(_) => Check::new(name, Status::Ok, "can listen", ""),
        Err(e) => Check::new(name, Status::No, format!("cannot listen on {addr}: {e}"), fix),
    }
}

/// Environment variable that makes this program the other side of [`same_host_copies`]; see [`probe_child`].
const PROBE: &str = "KVT_DOCTOR_PROBE";
const PROBE_BYTES: [u8; 8] = *b"kvtprobe";

/// When started by the check of same-host copies: say where the probe bytes are, and wait until standard input closes.
pub fn probe_child() -> Option<ExitCode> {
    std::env::var_os(PROBE)?;
    let bytes = Box::new(PROBE_BYTES);
    println!("{}", std::ptr::from_ref(&*bytes) as usize);
    let _ = std::io::stdout().flush();
    let mut line = String::new();
    let _ = std::io::stdin().read_line(&mut line);
    std::hint::black_box(&bytes);
    Some(ExitCode::SUCCESS)
}

/// Whether one process may read another's memory (`process_vm_readv`): tried with a child of this program.
fn same_host_copies() -> Check {
    let name = "tcp: same-host copies";
    match try_same_host() {
        Ok(()) => Check::new(name, Status::Ok, "process_vm_readv works between processes of this user", yama_note()),
        Err(why) => Check::new(
            name,
            Status::Warn,
            format!("process_vm_readv is not possible ({why}); ranks on one host fall back to TCP"),
            "sysctl -w kernel.yama.ptrace_scope=0; in a container: run it with --cap-add=SYS_PTRACE",
        ),
    }
}

fn yama_note() -> String {
    match fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok().as_deref().map(str::trim) {
        Some("2" | "3") => "sysctl -w kernel.yama.ptrace_scope=1, or run as root: ranks that are not parent and child \
                            may be refused"
            .into(),
        _ => String::new(),
    }
}

fn try_same_host() -> std::result::Result<(), String> {
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    let mut child = Command::new(exe)
        .env(PROBE, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|e| format!("cannot start a child: {e}"))?;
    let mut line = String::new();
    let read = child.stdout.take().ok_or("no pipe")?;
    let result = BufReader::new(read)
        .read_line(&mut line)
        .map_err(|e| e.to_string())
        .and_then(|_| line.trim().parse::<usize>().map_err(|_| "the child does not answer".into()))
        .and_then(|addr| read_other(child.id(), addr));
    drop(child.stdin.take());
    let _ = child.wait();
    result
}

fn read_other(pid: u32, addr: usize) -> std::result::Result<(), String> {
    let mut bytes = [0u8; PROBE_BYTES.len()];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: bytes.len() };
    let pid = libc::pid_t::try_from(pid).map_err(|e| e.to_string())?;
    // SAFETY: `local` is a buffer of ours of the length given; the remote range is only read, by the kernel, which
    // checks it.
    let n = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    match n {
        -1 => Err(std::io::Error::last_os_error().to_string()),
        _ if bytes == PROBE_BYTES => Ok(()),
        n => Err(format!("{n} bytes came, and not the right ones")),
    }
}

fn huge_pages() -> Check {
    let name = "memory: huge pages";
    match fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled") {
        Ok(text) if text.contains("[never]") => Check::new(
            name,
            Status::Warn,
            "transparent huge pages are off: copies run about a third slower",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
        Ok(text) => Check::new(name, Status::Ok, format!("transparent huge pages: {}", text.trim()), ""),
        Err(e) => Check::new(name, Status::Warn, format!("not known: {e}"), ""),
    }
}

/// Sockets for a fleet of some size.
const WANTED_FILES: u64 = 4096;

fn open_files() -> Check {
    let name = "limit: open files";
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes one `rlimit`.
    let rc = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    if rc != 0 {
        return Check::new(name, Status::Warn, std::io::Error::last_os_error().to_string(), "");
    }
    let detail = format!("{} (hard limit {})", limit.rlim_cur, limit.rlim_max);
    if limit.rlim_cur < WANTED_FILES {
        Check::new(
            name,
            Status::Warn,
            format!("{detail}: a fleet needs more sockets"),
            format!("ulimit -n {WANTED_FILES}"),
        )
    } else {
        Check::new(name, Status::Ok, detail, "")
    }
}

fn memory() -> Check {
    let name = "memory: free";
    match mem_available() {
        Ok(n) if n >> 30 < 2 => {
            Check::new(name, Status::Warn, format!("{} MiB: requests will be cut to small pools", n >> 20), "")
        }
        Ok(n) => Check::new(name, Status::Ok, format!("{} MiB", n >> 20), ""),
        Err(e) => Check::new(name, Status::Warn, e.one_line(), ""),
    }
}

fn cores() -> Check {
    let name = "cores";
    match std::thread::available_parallelism() {
        Ok(n) if n.get() < 2 => Check::new(name, Status::Warn, "1: both sides of a demo share it", ""),
        Ok(n) => Check::new(name, Status::Ok, n.to_string(), ""),
        Err(e) => Check::new(name, Status::Warn, e.to_string(), ""),
    }
}

fn devices(name: &'static str, dir: &str, fix: &str, none: &str) -> Check {
    let mut found: Vec<String> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .collect();
    found.sort();
    if found.is_empty() {
        Check::new(name, Status::No, none, fix)
    } else {
        Check::new(name, Status::Warn, format!("{} found, not used by this release", found.join(", ")), fix)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_says_something() {
        // `same_host_copies` starts this program; here that would be the test runner, so it is tried as a process
        // in tests/.
        for check in [
            listens(LOOPBACK, "127.0.0.1:0", ""),
            huge_pages(),
            open_files(),
            memory(),
            cores(),
            devices("d", "/nowhere", "", "none"),
        ] {
            assert!(!check.detail.is_empty(), "{check:?}");
        }
        assert_eq!(devices("d", "/nowhere", "", "none").status, Status::No);
    }

    #[test]
    fn a_check_that_fails_names_the_cure() {
        let check = listens("x", "203.0.113.1:0", "do this");
        assert_eq!((check.status, check.fix.as_str()), (Status::No, "do this"));
    }

    #[test]
    fn reads_its_own_memory() {
        let bytes = Box::new(PROBE_BYTES);
        assert_eq!(read_other(std::process::id(), std::ptr::from_ref(&*bytes) as usize), Ok(()));
        assert!(read_other(std::process::id(), 16).is_err());
    }
}
