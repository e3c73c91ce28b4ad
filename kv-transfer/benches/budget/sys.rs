//! Clocks, memory and descriptors of the operating system.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::time::Duration;

fn clock(id: libc::clockid_t) -> u64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `t` is a valid place for the answer.
    unsafe { libc::clock_gettime(id, &raw mut t) };
    t.tv_sec.cast_unsigned() * 1_000_000_000 + t.tv_nsec.cast_unsigned()
}

/// Nanoseconds of the clock that all processes share.
pub fn now_ns() -> u64 {
    clock(libc::CLOCK_MONOTONIC)
}

/// CPU time of this process, ns.
pub fn process_cpu_ns() -> u64 {
    clock(libc::CLOCK_PROCESS_CPUTIME_ID)
}

/// CPU time of this thread, ns.
pub fn thread_cpu_ns() -> u64 {
    clock(libc::CLOCK_THREAD_CPUTIME_ID)
}

/// Resident memory of this process, bytes.
pub fn rss_bytes() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/self/smaps_rollup")?;
    let kib = text.lines().find_map(|l| l.strip_prefix("Rss:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| io::Error::other("no Rss in smaps_rollup"))
}

/// Memory that can be had without swapping, bytes.
pub fn available_bytes() -> io::Result<u64> {
    let text = std::fs::read_to_string("/proc/meminfo")?;
    let kib = text
        .lines()
        .find_map(|l| l.strip_prefix("MemAvailable:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    kib.map(|kib| kib << 10).ok_or_else(|| io::Error::other("no MemAvailable in meminfo"))
}

/// Load average of the last minute: how busy the machine was with other things.
pub fn load() -> f64 {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').next().and_then(|t| t.parse().ok()).unwrap_or(f64::NAN)
}

/// The machine in one line.
pub fn machine() -> String {
    let cpuinfo = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let field = |name: &str| {
        let line = cpuinfo.lines().find(|l| l.starts_with(name));
        line.and_then(|l| l.split_once(':')).map_or("unknown CPU", |(_, v)| v.trim())
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let kernel = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let guest = if cpuinfo.contains(" hypervisor") { ", virtual machine" } else { "" };
    let (family, model) = (field("cpu family"), field("model\t"));
    format!("{} (family {family}, model {model}), {cores} CPUs{guest}, Linux {}", field("model name"), kernel.trim())
}

/// Block until `fd` is readable; false when the time is over.
pub fn readable(fd: RawFd, timeout: Duration) -> bool {
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let ms = i32::try_from(timeout.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one pollfd that lives through the call.
    unsafe { libc::poll(&raw mut poll, 1, ms) > 0 }
}

/// An eventfd.
pub struct EventFd(OwnedFd);

impl EventFd {
    /// Blocking reads that take one signal each, or reads that take all there are and never block.
    pub fn new(blocking: bool) -> io::Result<Self> {
        let flags = libc::EFD_CLOEXEC | if blocking { libc::EFD_SEMAPHORE } else { libc::EFD_NONBLOCK };
        // SAFETY: no pointers.
        let fd = unsafe { libc::eventfd(0, flags) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the kernel just gave us this descriptor; nobody else holds it.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    pub fn signal(&self) {
        let one = 1u64;
        // SAFETY: eight readable bytes.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Take signals; see [`Self::new`].
    pub fn take(&self) {
        let mut count = 0u64;
        // SAFETY: eight writable bytes.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }

    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// This process ends with its parent.
pub fn die_with_parent() {
    // SAFETY: no pointers.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

/// Where Yama asks for it: our own processes may copy from and to each other, as in the programs that are measured.
pub fn allow_copies() {
    const PR_SET_PTRACER: libc::c_int = 0x5961_6d61;
    // SAFETY: no pointers. Without Yama the call fails, and is not needed.
    unsafe { libc::prctl(PR_SET_PTRACER, libc::c_ulong::MAX) };
}
