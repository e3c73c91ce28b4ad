//! What the host allows: direct copies between two processes, facts for `doctor`.

use kv_core::host::HostIdentity;

use crate::sys;

/// Why these two cannot try a direct copy; `None` when they can.
pub(crate) fn direct_copy_obstacle(a: &HostIdentity, b: &HostIdentity) -> Option<&'static str> {
    if a.boot_id == [0; 16] || a.boot_id != b.boot_id {
        Some("different hosts")
    } else if !a.shares_pids(b) {
        Some("different pid namespaces")
    } else if a.uid != b.uid {
        Some("different users")
    } else {
        None
    }
}

/// What this host allows the transport to do: for `doctor`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostProbe {
    /// Whether `process_vm_readv` works here at all (tried on our own process), else the kernel's reason.
    pub process_vm_readv: Result<(), String>,
    /// Yama's `ptrace_scope`: 0 no rule, 1 descendants or opt-in, 2 administrators, 3 nobody; `None` without Yama.
    pub yama_scope: Option<u32>,
    /// `/sys/kernel/mm/transparent_hugepage/enabled`, the chosen word: `always`, `madvise` or `never`.
    pub huge_pages: Option<String>,
    /// The same for memory shared between processes.
    pub huge_pages_shmem: Option<String>,
    /// Whether a pidfd can be opened: without it, the death of a peer on this host cannot be proven at once.
    pub pidfd: Result<(), String>,
}

/// Find out what this host allows.
pub fn probe() -> HostProbe {
    let nonce = [0x5au8; 32];
    let mut copy = [0u8; 32];
    let process_vm_readv = match sys::vm_read_buf(std::process::id(), nonce.as_ptr() as u64, &mut copy) {
        Ok(32) if copy == nonce => Ok(()),
        Ok(n) => Err(format!("read {n} of 32 bytes")),
        Err(e) => Err(e.to_string()),
    };
    HostProbe {
        process_vm_readv,
        yama_scope: yama_scope(),
        huge_pages: chosen("/sys/kernel/mm/transparent_hugepage/enabled"),
        huge_pages_shmem: chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        pidfd: kv_core::host::handles_work().map_err(|e| e.to_string()),
    }
}

pub(crate) fn yama_scope() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?.trim().parse().ok()
}

fn chosen(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.split_once('[')?.1.split_once(']')?.0.to_owned())
}

/// Bytes of `[addr, addr + len)` that lie in mappings backed by huge pages now, as far as `/proc/self/smaps` tells (it
/// counts whole mappings). `None` when it cannot be read.
pub fn huge_page_bytes(addr: u64, len: u64) -> Option<u64> {
    let smaps = std::fs::read_to_string("/proc/self/smaps").ok()?;
    let (mut inside, mut bytes) = (0u64, 0u64);
    for line in smaps.lines() {
        let Some((head, rest)) = line.split_once(' ') else { continue };
        if let Some((from, to)) = head.split_once('-') {
            let (Ok(from), Ok(to)) = (u64::from_str_radix(from, 16), u64::from_str_radix(to, 16)) else { continue };
            inside = to.min(addr.saturating_add(len)).saturating_sub(from.max(addr));
        } else if inside > 0 && matches!(head, "AnonHugePages:" | "ShmemPmdMapped:" | "Private_Hugetlb:") {
            let kib: u64 = rest.trim().trim_end_matches(" kB").parse().unwrap_or(0);
            bytes += (kib << 10).min(inside);
        }
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_hosts_prove_nothing() {
        let me = HostIdentity::local();
        let other = HostIdentity { boot_id: [7; 16], start: 1, ..me };
        assert!(!other.succeeded_by(&me));
        assert_eq!(direct_copy_obstacle(&other, &me), Some("different hosts"));
        let boxed = HostIdentity { pid_ns: 1, ..me };
        assert_eq!(direct_copy_obstacle(&boxed, &me), Some("different pid namespaces"));
        let user = HostIdentity { uid: me.uid + 1, ..me };
        assert_eq!(direct_copy_obstacle(&user, &me), Some("different users"));
        assert_eq!(direct_copy_obstacle(&me, &me), None);
    }

    #[test]
    fn the_probe_reads_this_host() {
        let p = probe();
        assert_eq!(p.process_vm_readv, Ok(()));
        assert_eq!(p.pidfd, Ok(()));
    }
}
