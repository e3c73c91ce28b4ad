//! What is tried in a child of this program, since only another process can tell.

use std::process::{Command, ExitCode, Stdio};

/// Environment variable that makes this program the child; see [`child`].
pub(super) const PROBE: &str = "KVT_DOCTOR_PROBE";
const BYTES: [u8; 8] = *b"kvtprobe";

/// When started by a check: do what it asks, and say how it went on standard output.
pub fn child() -> Option<ExitCode> {
    let task = std::env::var(PROBE).ok()?;
    #[cfg(feature = "nixl")]
    if let Some(code) = super::trial::child::<super::nixl::Nixl>(&task) {
        return Some(code);
    }
    #[cfg(feature = "mooncake")]
    if let Some(code) = super::trial::child::<super::mooncake::Mooncake>(&task) {
        return Some(code);
    }
    let result = match task.split_once(' ') {
        Some((pid, addr)) => match (pid.parse(), addr.parse()) {
            (Ok(pid), Ok(addr)) => read_other(pid, addr),
            _ => Err("the check asks for nonsense".into()),
        },
        None => new_network(),
    };
    let written = crate::out::line(result.err().unwrap_or_else(|| "ok".into()));
    Some(written.map_or(ExitCode::FAILURE, |()| ExitCode::SUCCESS))
}

/// Whether an unrelated process of this user may read our memory. The child reads ours: under Yama's scope 1 a parent
/// may read its child in any case, which says nothing about two ranks.
pub fn same_host_copy() -> Result<(), String> {
    if yama_scope() == Some(1) {
        // As the transport does: nothing is allowed to processes of other users by it.
        // SAFETY: no pointers; -1 is PR_SET_PTRACER_ANY.
        if unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::c_ulong::MAX, 0, 0, 0) } != 0 {
            return Err(format!("Yama's opt-in: {}", std::io::Error::last_os_error()));
        }
    }
    let bytes = Box::new(BYTES);
    let result = ask(&format!("{} {}", std::process::id(), std::ptr::from_ref(&*bytes) as usize));
    std::hint::black_box(&bytes);
    result
}

/// Whether this user may make a network namespace: what the test of two machines needs.
pub fn network_namespace() -> Result<(), String> {
    ask("netns")
}

/// Yama's `ptrace_scope`; `None` without Yama.
pub fn yama_scope() -> Option<u32> {
    std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").ok()?.trim().parse().ok()
}

fn ask(task: &str) -> Result<(), String> {
    let exe = std::env::current_exe().map_err(|e| e.to_string())?;
    let out = Command::new(exe)
        .env(PROBE, task)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output()
        .map_err(|e| format!("cannot start a child: {e}"))?;
    match String::from_utf8_lossy(&out.stdout).trim() {
        "ok" => Ok(()),
        "" => Err(format!("the child says nothing: {}", out.status)),
        why => Err(why.to_owned()),
    }
}

fn read_other(pid: libc::pid_t, addr: usize) -> Result<(), String> {
    let mut bytes = [0u8; BYTES.len()];
    let local = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let remote = libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: bytes.len() };
    // SAFETY: `local` is a buffer of ours of the length given; the remote range is only read, by the kernel, which
    // checks it.
    let n = unsafe { libc::process_vm_readv(pid, &local, 1, &remote, 1, 0) };
    match n {
        -1 => Err(std::io::Error::last_os_error().to_string()),
        _ if bytes == BYTES => Ok(()),
        n => Err(format!("{n} bytes came, and not the right ones")),
    }
}

fn new_network() -> Result<(), String> {
    // SAFETY: no pointers. Only this child moves into the new namespace, and it ends at once.
    match unsafe { libc::unshare(libc::CLONE_NEWNET) } {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error().to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_its_own_memory() {
        let bytes = Box::new(BYTES);
        let me = libc::pid_t::try_from(std::process::id()).unwrap();
        assert_eq!(read_other(me, std::ptr::from_ref(&*bytes) as usize), Ok(()));
        assert!(read_other(me, 16).is_err());
    }
}
