//! Which process on which host this is, and what the host allows: identity at handshakes, facts for `doctor`.

use std::fmt;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

use crate::codec::{Malformed, Put, Reader};
use crate::sys;

/// One process on one boot of one host. Two processes with equal `boot_id` run on one kernel; `pid` and `start` name
/// the process within `pid_ns` for as long as the host runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HostIdentity {
    pub boot_id: [u8; 16],
    pub pid_ns: u64,
    pub pid: u32,
    /// Clock ticks from boot to the start of the process.
    pub start: u64,
    pub uid: u32,
}

/// Encoded size of a [`HostIdentity`].
pub(crate) const HOST_IDENTITY_LEN: usize = 40;

impl HostIdentity {
    /// Ours. Parts the system does not tell are zero, and zeros never prove anything.
    pub fn local() -> Self {
        let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .ok()
            .and_then(|text| parse_hex(text.trim()))
            .unwrap_or_default();
        let pid_ns = std::fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino());
        let pid = std::process::id();
        Self { boot_id, pid_ns, pid, start: start_time(pid).unwrap_or(0), uid: sys::uid() }
    }

    /// Whether the other runs on the same booted kernel and the same pid numbers mean the same processes.
    pub fn shares_pids(&self, other: &Self) -> bool {
        self.boot_id != [0; 16] && self.pid_ns != 0 && (self.boot_id, self.pid_ns) == (other.boot_id, other.pid_ns)
    }

    /// Why these two cannot try a direct copy; `None` when they can.
    pub fn direct_copy_obstacle(&self, other: &Self) -> Option<&'static str> {
        if self.boot_id == [0; 16] || self.boot_id != other.boot_id {
            Some("different hosts")
        } else if !self.shares_pids(other) {
            Some("different pid namespaces")
        } else if self.uid != other.uid {
            Some("different users")
        } else {
            None
        }
    }

    /// Whether `successor` is another process on the same boot of the same host: found at the same endpoint, it has taken
    /// this generation's place.
    pub fn succeeded_by(&self, successor: &Self) -> bool {
        self.shares_pids(successor)
            && self.start != 0
            && successor.start != 0
            && (self.pid, self.start) != (successor.pid, successor.start)
    }

    /// Whether this process is gone, when that can be seen from here: `None` when it runs (or ran) elsewhere. A zombie
    /// counts as there; only a pidfd tells that it has exited.
    pub fn gone(&self, local: &Self) -> Option<bool> {
        if !local.shares_pids(self) || self.start == 0 {
            return None;
        }
        Some(match start_time(self.pid) {
            Some(start) => start != self.start,
            // `/proc` may hide other users' processes; a signal's target is never hidden.
            None => !sys::pid_exists(self.pid),
        })
    }

    /// A handle on this very process, when it runs on our host: opened by number, then checked by start time, so that
    /// a recycled number is noticed.
    pub fn open(&self, local: &Self) -> Option<OwnedFd> {
        if !local.shares_pids(self) || self.start == 0 {
            return None;
        }
        let fd = sys::pidfd_open(self.pid).ok()?;
        (start_time(self.pid) == Some(self.start) && !sys::pidfd_exited(&fd)).then_some(fd)
    }

    /// Whether this process ran on our host and has ended. False when it cannot be told.
    pub fn is_gone(&self, local: &Self) -> bool {
        if !local.shares_pids(self) || self.start == 0 {
            return false;
        }
        match sys::pidfd_open(self.pid) {
            // Opened first, so that it is of the process whose start time is read then, or of one that came before.
            Ok(fd) => sys::pidfd_exited(&fd) || start_time(self.pid).is_some_and(|start| start != self.start),
            Err(e) => e.raw_os_error() == Some(libc::ESRCH),
        }
    }

    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put(&self.boot_id);
        out.put_u64(self.pid_ns);
        out.put_u32(self.pid);
        out.put_u64(self.start);
        out.put_u32(self.uid);
    }

    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        Ok(Self { boot_id: r.array()?, pid_ns: r.u64()?, pid: r.u32()?, start: r.u64()?, uid: r.u32()? })
    }
}

impl fmt::Display for HostIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} started at {} on boot {:02x?}", self.pid, self.start, &self.boot_id[..4])
    }
}

fn parse_hex(text: &str) -> Option<[u8; 16]> {
    let digits: Vec<u8> =
        text.chars().filter(|c| *c != '-').map(|c| c.to_digit(16)).try_fold(Vec::with_capacity(32), |mut v, d| {
            v.push(u8::try_from(d?).ok()?);
            Some(v)
        })?;
    let pairs: Vec<u8> = digits.chunks_exact(2).map(|p| p[0] << 4 | p[1]).collect();
    if digits.len() == 32 { pairs.try_into().ok() } else { None }
}

/// Field 22 of `/proc/PID/stat`, counted from behind the program name, which may hold blanks and brackets.
fn start_time(pid: u32) -> Option<u64> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
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
        pidfd: sys::pidfd_open(std::process::id()).map(drop).map_err(|e| e.to_string()),
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
    fn own_identity_opens_and_a_recycled_pid_does_not() {
        let me = HostIdentity::local();
        assert!(me.open(&me).is_some());
        let predecessor = HostIdentity { start: me.start.wrapping_sub(1), ..me };
        assert!(predecessor.open(&me).is_none());
        assert!(predecessor.succeeded_by(&me));
        assert!(!me.succeeded_by(&me));
    }

    #[test]
    fn a_process_is_gone_only_where_that_can_be_seen() {
        let me = HostIdentity::local();
        assert_eq!(me.gone(&me), Some(false));
        assert_eq!(HostIdentity { start: me.start.wrapping_sub(1), ..me }.gone(&me), Some(true));
        // Above the largest number a process can have.
        assert_eq!(HostIdentity { pid: 1 << 23, ..me }.gone(&me), Some(true));
        assert_eq!(HostIdentity { pid_ns: 1, ..me }.gone(&me), None);
        assert_eq!(HostIdentity { boot_id: [7; 16], ..me }.gone(&me), None);
        assert_eq!(HostIdentity { start: 0, ..me }.gone(&me), None);
    }

    #[test]
    fn other_hosts_prove_nothing() {
        let me = HostIdentity::local();
        let other = HostIdentity { boot_id: [7; 16], start: 1, ..me };
        assert!(!other.succeeded_by(&me));
        assert_eq!(other.direct_copy_obstacle(&me), Some("different hosts"));
        let boxed = HostIdentity { pid_ns: 1, ..me };
        assert_eq!(boxed.direct_copy_obstacle(&me), Some("different pid namespaces"));
        let user = HostIdentity { uid: me.uid + 1, ..me };
        assert_eq!(user.direct_copy_obstacle(&me), Some("different users"));
        assert_eq!(me.direct_copy_obstacle(&me), None);
    }

    #[test]
    fn the_probe_reads_this_host() {
        let p = probe();
        assert_eq!(p.process_vm_readv, Ok(()));
        assert_eq!(p.pidfd, Ok(()));
    }
}
