//! What the machine gives: memory, limits, cores, devices.

use std::fs;
use std::path::Path;

use super::{Check, Status};
use crate::memory::{mem_available, memory_limit};

pub fn huge_pages() -> Check {
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

pub fn open_files() -> Check {
    let name = "limit: open files";
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes one `rlimit`.
    let rc = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    if rc != 0 {
        return Check::new(name, Status::Warn, std::io::Error::last_os_error().to_string(), "");
    }
    files_check(name, limit.rlim_cur, limit.rlim_max)
}

fn files_check(name: &'static str, soft: u64, hard: u64) -> Check {
    let detail = format!("{soft} (hard limit {hard})");
    if soft >= WANTED_FILES {
        return Check::new(name, Status::Ok, detail, "");
    }
    let fix = if hard >= WANTED_FILES {
        format!("ulimit -n {WANTED_FILES}")
    } else {
        format!("as root: prlimit --pid $$ --nofile={WANTED_FILES}:{WANTED_FILES}")
    };
    Check::new(name, Status::Warn, format!("{detail}: a fleet needs more sockets"), fix)
}

pub fn memory() -> Check {
    let name = "memory: free";
    let detail = |n: u64| match memory_limit() {
        Some(limit) => format!("{} MiB (this container may have {} MiB in all)", n >> 20, limit >> 20),
        None => format!("{} MiB", n >> 20),
    };
    match mem_available() {
        Ok(n) if n >> 30 < 2 => Check::new(
            name,
            Status::Warn,
            format!("{}: requests are cut to what small pools hold", detail(n)),
            "kvt demo --pool-mib 256",
        ),
        Ok(n) => Check::new(name, Status::Ok, detail(n), ""),
        Err(e) => Check::new(name, Status::Warn, e.one_line(), "kvt demo --pool-mib 256"),
    }
}

pub fn cores() -> Check {
    let name = "cores";
    match std::thread::available_parallelism() {
        Ok(n) if n.get() < 2 => Check::new(name, Status::Warn, "1: both sides of a demo share it", ""),
        Ok(n) => Check::new(name, Status::Ok, n.to_string(), ""),
        Err(e) => Check::new(name, Status::Warn, e.to_string(), ""),
    }
}

fn entries(dir: &Path) -> Vec<String> {
    let mut found: Vec<String> = fs::read_dir(dir)
        .into_iter()
        .flatten()
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .collect();
    found.sort();
    found
}

/// What moves bytes meanwhile.
const UNUSED: &str = "found, but no transport of this release uses it";

fn device(name: &'static str, found: &[String], none: &str) -> Check {
    if found.is_empty() {
        Check::new(name, Status::No, none, "")
    } else {
        Check::new(name, Status::No, format!("{}: {UNUSED}", found.join(", ")), "")
    }
}

/// Ports of RDMA devices with their state, as `mlx5_0/1 ACTIVE`.
pub fn rdma(root: &Path) -> Check {
    let mut ports = Vec::new();
    for device in entries(root) {
        for port in entries(&root.join(&device).join("ports")) {
            let state = fs::read_to_string(root.join(&device).join("ports").join(&port).join("state"));
            // The file says `4: ACTIVE`.
            let state = state.unwrap_or_default();
            let state = state.trim().rsplit(' ').next().unwrap_or_default();
            ports.push(format!("{device}/{port} {state}").trim_end().to_owned());
        }
    }
    device("device: RDMA NIC", &ports, "none, or no driver for it; hosts are reached over TCP")
}

pub fn nvidia(root: &Path) -> Check {
    let gpus: Vec<_> = entries(root)
        .into_iter()
        .map(|bus| {
            let text = fs::read_to_string(root.join(&bus).join("information")).unwrap_or_default();
            let model = text.lines().find_map(|l| l.strip_prefix("Model:")).map(str::trim).unwrap_or("NVIDIA GPU");
            format!("{model} at {bus}")
        })
        .collect();
    device("device: NVIDIA GPU", &gpus, "none, or no driver for it; host memory only")
}

/// The kernel lists processors among the nodes; those have no `gpu_id`.
pub fn amd(root: &Path) -> Check {
    let mut gpus = entries(root);
    gpus.retain(|node| fs::read_to_string(root.join(node).join("gpu_id")).is_ok_and(|id| id.trim() != "0"));
    let gpus: Vec<_> = gpus.into_iter().map(|node| format!("node {node}")).collect();
    device("device: AMD GPU", &gpus, "none, or no driver for it; host memory only")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_says_something() {
        for check in [huge_pages(), open_files(), memory(), cores()] {
            assert!(!check.detail.is_empty(), "{check:?}");
        }
    }

    #[test]
    fn a_low_limit_names_the_command_that_raises_it() {
        assert_eq!(files_check("f", 4096, 4096).status, Status::Ok);
        assert_eq!(files_check("f", 1024, 8192).fix, "ulimit -n 4096");
        assert!(files_check("f", 1024, 1024).fix.contains("prlimit"));
    }

    #[test]
    fn devices_are_named() {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        write("ib/mlx5_0/ports/1/state", "4: ACTIVE\n");
        write("nv/0000:01:00.0/information", "Model: \t\t NVIDIA H200\nIRQ: 1\n");
        write("kfd/0/gpu_id", "0\n");
        write("kfd/1/gpu_id", "41234\n");
        let text = |c: Check| (c.status, c.detail);
        let found = |what: &str| (Status::No, format!("{what}: {UNUSED}"));
        assert_eq!(text(rdma(&root.path().join("ib"))), found("mlx5_0/1 ACTIVE"));
        assert_eq!(text(nvidia(&root.path().join("nv"))), found("NVIDIA H200 at 0000:01:00.0"));
        assert_eq!(text(amd(&root.path().join("kfd"))), found("node 1"));
        assert!(rdma(Path::new("/nowhere")).detail.starts_with("none"));
    }
}
