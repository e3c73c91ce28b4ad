//! The system calls this crate needs and `std` does not offer. All raw pointers of the crate are handed to the kernel
//! here (and in `arena`, which maps memory).

use std::io;
use std::net::IpAddr;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::time::Duration;

/// One contiguous piece of memory: the layout of `struct iovec`.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Seg {
    /// First byte's address.
    pub addr: usize,
    /// Bytes.
    pub len: usize,
}

const _: () = assert!(size_of::<Seg>() == size_of::<libc::iovec>() && align_of::<Seg>() == align_of::<libc::iovec>());

fn check(ret: libc::c_int) -> io::Result<libc::c_int> {
    if ret < 0 { Err(io::Error::last_os_error()) } else { Ok(ret) }
}

fn check_len(ret: isize) -> io::Result<usize> {
    usize::try_from(ret).map_err(|_| io::Error::last_os_error())
}

fn own(fd: libc::c_int) -> io::Result<OwnedFd> {
    let fd = check(fd)?;
    // SAFETY: the kernel just gave us this descriptor; nobody else holds it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// What one wait reported about a descriptor.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Event {
    /// The number the descriptor was added under.
    pub token: u64,
    /// Something to read, an end of stream, or an error.
    pub readable: bool,
    /// Room to write, or an error.
    pub writable: bool,
}

/// A level-triggered epoll set. Level-triggered, because a worker stops reading a socket early for fairness and must
/// hear of it again, and because the set itself is a wake descriptor that stays readable until the news was taken.
#[derive(Debug)]
pub(crate) struct Epoll(OwnedFd);

impl Epoll {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        Ok(Self(own(unsafe { libc::epoll_create1(libc::EPOLL_CLOEXEC) })?))
    }

    fn ctl(&self, op: libc::c_int, fd: RawFd, token: u64, read: bool, write: bool) -> io::Result<()> {
        let mut events = 0;
        if read {
            events |= libc::EPOLLIN | libc::EPOLLRDHUP;
        }
        if write {
            events |= libc::EPOLLOUT;
        }
        let mut event = libc::epoll_event { events: events.cast_unsigned(), u64: token };
        // SAFETY: `event` lives through the call; a wrong `fd` is an error code.
        check(unsafe { libc::epoll_ctl(self.0.as_raw_fd(), op, fd, &raw mut event) }).map(drop)
    }

    pub fn add(&self, fd: RawFd, token: u64, read: bool, write: bool) -> io::Result<()> {
        self.ctl(libc::EPOLL_CTL_ADD, fd, token, read, write)
    }

    pub fn modify(&self, fd: RawFd, token: u64, read: bool, write: bool) -> io::Result<()> {
        self.ctl(libc::EPOLL_CTL_MOD, fd, token, read, write)
    }

    pub fn remove(&self, fd: RawFd) {
        // A descriptor that is already gone left the set by itself.
        let _ = self.ctl(libc::EPOLL_CTL_DEL, fd, 0, false, false);
    }

    /// Wait up to `timeout` (`None`: without end) and append what is ready, at most 128 descriptors.
    pub fn wait(&self, out: &mut Vec<Event>, timeout: Option<Duration>) -> io::Result<()> {
        const N: usize = 128;
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; N];
        let ms = match timeout {
            None => -1,
            // Rounded up, so that a wait for a deadline does not spin through its last millisecond.
            Some(t) => i32::try_from(t.as_nanos().div_ceil(1_000_000)).unwrap_or(i32::MAX),
        };
        // SAFETY: `events` has room for N entries.
        let n = unsafe { libc::epoll_wait(self.0.as_raw_fd(), events.as_mut_ptr(), N as libc::c_int, ms) };
        let n = match check(n) {
            Ok(n) => usize::try_from(n).unwrap_or(0),
            Err(e) if e.kind() == io::ErrorKind::Interrupted => 0,
            Err(e) => return Err(e),
        };
        out.extend(events[..n].iter().map(|e| {
            let bits = e.events.cast_signed();
            let broken = libc::EPOLLERR | libc::EPOLLHUP;
            Event {
                token: e.u64,
                readable: bits & (libc::EPOLLIN | libc::EPOLLRDHUP | broken) != 0,
                writable: bits & (libc::EPOLLOUT | broken) != 0,
            }
        }));
        Ok(())
    }
}

impl AsRawFd for Epoll {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// A counter that makes a sleeping thread's epoll set readable.
#[derive(Debug)]
pub(crate) struct EventFd(OwnedFd);

impl EventFd {
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers.
        Ok(Self(own(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?))
    }

    pub fn signal(&self) {
        let one = 1u64;
        // SAFETY: eight readable bytes. The only failure is a full counter, which is readable anyway.
        unsafe { libc::write(self.0.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    pub fn drain(&self) {
        let mut count = 0u64;
        // SAFETY: eight writable bytes. Failure means that it was empty.
        unsafe { libc::read(self.0.as_raw_fd(), (&raw mut count).cast(), 8) };
    }
}

impl AsRawFd for EventFd {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

/// Copy from another process into this one; the two lists may be cut differently. Returns the bytes copied, possibly
/// fewer than asked.
///
/// # Safety
/// Every segment of `local` lies in memory that is mapped and writable for the whole call and of which no reference
/// is held.
pub(crate) unsafe fn vm_read(pid: u32, local: &[Seg], remote: &[Seg]) -> io::Result<usize> {
    let pid = libc::pid_t::try_from(pid).map_err(|_| io::Error::from(io::ErrorKind::InvalidInput))?;
    // SAFETY: `Seg` is laid out as iovec. Local memory: the caller's promise; remote addresses are checked by the kernel.
    check_len(unsafe {
        libc::process_vm_readv(
            pid,
            local.as_ptr().cast(),
            local.len() as libc::c_ulong,
            remote.as_ptr().cast(),
            remote.len() as libc::c_ulong,
            0,
        )
    })
}

/// [`vm_read`] into a buffer of our own.
pub(crate) fn vm_read_buf(pid: u32, addr: u64, buf: &mut [u8]) -> io::Result<usize> {
    let local = [Seg { addr: buf.as_mut_ptr() as usize, len: buf.len() }];
    let remote = [Seg { addr: usize::try_from(addr).unwrap_or(0), len: buf.len() }];
    // SAFETY: `buf` is exclusively ours.
    unsafe { vm_read(pid, &local, &remote) }
}

fn message(segs: &[Seg]) -> libc::msghdr {
    // SAFETY: all-zero is a valid msghdr (no name, no control data).
    let mut m: libc::msghdr = unsafe { std::mem::zeroed() };
    m.msg_iov = segs.as_ptr().cast_mut().cast();
    m.msg_iovlen = segs.len();
    m
}

/// Send these pieces of memory without blocking.
///
/// # Safety
/// Every segment is mapped and readable for the whole call.
pub(crate) unsafe fn send_segs(fd: RawFd, segs: &[Seg]) -> io::Result<usize> {
    let m = message(segs);
    // SAFETY: the header points at `segs`; the memory is the caller's promise.
    check_len(unsafe { libc::sendmsg(fd, &raw const m, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) })
}

/// Receive into these pieces of memory without blocking. 0 is the end of the stream.
///
/// # Safety
/// Every segment is mapped and writable for the whole call and no reference into it is held.
pub(crate) unsafe fn recv_segs(fd: RawFd, segs: &[Seg]) -> io::Result<usize> {
    let mut m = message(segs);
    // SAFETY: the header points at `segs`; the memory is the caller's promise.
    check_len(unsafe { libc::recvmsg(fd, &raw mut m, libc::MSG_DONTWAIT) })
}

const WORD: usize = size_of::<usize>();

/// How many of `len` bytes at `addr` lie before the first whole aligned word.
fn lead(addr: usize, len: usize) -> usize {
    (addr.wrapping_neg() % WORD).min(len)
}

/// Write `data` at `addr`, as another process would: by relaxed atomic stores, whole aligned words where there are such.
///
/// Registered memory is shared: code of this process may read or write the same bytes meanwhile (a peer writes when it
/// likes, and we are only its hand), and `HostArena` lets safe code do so. So these are no plain stores, which would be
/// a data race; such a reader sees a mixture of old and new bytes, as it does when the kernel receives straight into
/// the pages. No byte outside the range is touched.
///
/// # Safety
/// `addr .. addr + data.len()` is mapped and writable, no reference into it is held, and this process touches it
/// meanwhile, if at all, by atomics or through the kernel.
pub(crate) unsafe fn write_mem(addr: u64, data: &[u8]) {
    let addr = addr as usize;
    let (head, rest) = data.split_at(lead(addr, data.len()));
    let (words, tail) = rest.as_chunks::<WORD>();
    let bytes = |at: usize, data: &[u8]| {
        for (n, b) in data.iter().enumerate() {
            // SAFETY: one byte of the range the caller promised.
            unsafe { AtomicU8::from_ptr((at + n) as *mut u8) }.store(*b, Ordering::Relaxed);
        }
    };
    bytes(addr, head);
    let at = addr + head.len();
    for (n, w) in words.iter().enumerate() {
        // SAFETY: a whole word of the range, aligned, since `at` is.
        let word = unsafe { AtomicUsize::from_ptr((at + n * WORD) as *mut usize) };
        word.store(usize::from_ne_bytes(*w), Ordering::Relaxed);
    }
    bytes(at + words.len() * WORD, tail);
}

/// Append `len` bytes at `addr` to `out`: by relaxed atomic loads, for the reason given at [`write_mem`].
///
/// # Safety
/// `addr .. addr + len` is mapped, readable and (atomics are made of it) writable, and this process writes it meanwhile,
/// if at all, by atomics or through the kernel.
pub(crate) unsafe fn read_mem(addr: u64, len: usize, out: &mut Vec<u8>) {
    out.reserve(len);
    let (mut at, end) = (addr as usize, addr as usize + len);
    let byte = |at: usize| {
        // SAFETY: one byte of the range the caller promised.
        unsafe { AtomicU8::from_ptr(at as *mut u8) }.load(Ordering::Relaxed)
    };
    let first = at + lead(at, len);
    out.extend((at..first).map(byte));
    at = first;
    while end - at >= WORD {
        // SAFETY: a whole word of the range, aligned, since `first` is.
        let word = unsafe { AtomicUsize::from_ptr(at as *mut usize) };
        out.extend_from_slice(&word.load(Ordering::Relaxed).to_ne_bytes());
        at += WORD;
    }
    out.extend((at..end).map(byte));
}

/// Let any process of this user read our memory, where Yama restricts that to children (scope 1).
pub(crate) fn allow_any_reader() -> io::Result<()> {
    // SAFETY: no pointers; -1 is PR_SET_PTRACER_ANY.
    check(unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::c_ulong::MAX, 0, 0, 0) }).map(drop)
}

/// What the kernel knows about the other end of a TCP connection.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TcpHealth {
    /// Segments sent and not acknowledged by the peer's *kernel* (which also answers for a stopped process).
    pub unacked: u32,
    /// Time since its last acknowledgement.
    pub last_ack: Duration,
}

/// Ask the kernel about a connection.
pub(crate) fn tcp_health(fd: RawFd) -> io::Result<TcpHealth> {
    // SAFETY: plain integers, all-zero is valid.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: `info` has `len` writable bytes.
    check(unsafe { libc::getsockopt(fd, libc::IPPROTO_TCP, libc::TCP_INFO, (&raw mut info).cast(), &raw mut len) })?;
    Ok(TcpHealth { unacked: info.tcpi_unacked, last_ack: Duration::from_millis(u64::from(info.tcpi_last_ack_recv)) })
}

/// Addresses of the interfaces that are up, loopback last. Link-local IPv6 is left out: its zone means nothing to others.
pub(crate) fn interface_addresses() -> io::Result<Vec<IpAddr>> {
    let mut list: *mut libc::ifaddrs = std::ptr::null_mut();
    // SAFETY: `list` receives a list that we free below.
    check(unsafe { libc::getifaddrs(&raw mut list) })?;
    let mut found = Vec::new();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: a non-null node of the list the kernel gave us.
        let node = unsafe { &*next };
        next = node.ifa_next;
        if node.ifa_addr.is_null() || node.ifa_flags & libc::IFF_UP as libc::c_uint == 0 {
            continue;
        }
        // SAFETY: every sockaddr starts with its family.
        let ip = match i32::from(unsafe { (*node.ifa_addr).sa_family }) {
            libc::AF_INET => {
                // SAFETY: this family has this layout; the read makes no assumption about alignment.
                let a: libc::sockaddr_in = unsafe { node.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
                IpAddr::from(a.sin_addr.s_addr.to_ne_bytes())
            }
            libc::AF_INET6 => {
                // SAFETY: as above.
                let a: libc::sockaddr_in6 = unsafe { node.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
                IpAddr::from(a.sin6_addr.s6_addr)
            }
            _ => continue,
        };
        let link_local = matches!(ip, IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfe80);
        if !link_local && !found.contains(&ip) {
            found.push(ip);
        }
    }
    // SAFETY: the list came from getifaddrs and is freed once.
    unsafe { libc::freeifaddrs(list) };
    found.sort_by_key(IpAddr::is_loopback);
    Ok(found)
}

/// Whether a CPU other than ours can be had: the number this process may run on.
pub(crate) fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostArena;

    #[test]
    fn memory_is_written_and_read_exactly_at_every_cut() {
        let arena = HostArena::new(64).unwrap();
        let data: Vec<u8> = (1..=40).collect();
        for from in 0..20 {
            for len in 0..=40 {
                arena.write_at(0, &[0xee; 64]);
                let addr = arena.as_ptr() as u64 + from as u64;
                let mut out = vec![7];
                // SAFETY: inside the arena, which only this thread touches.
                unsafe {
                    write_mem(addr, &data[..len]);
                    read_mem(addr, len, &mut out);
                }
                let mut want = vec![0xee; 64];
                want[from..from + len].copy_from_slice(&data[..len]);
                assert_eq!(arena.to_vec(0, 64), want, "{from}+{len}");
                assert_eq!(out[1..], data[..len], "{from}+{len}");
            }
        }
    }
}
