//! All raw pointers of the crate: memory that others write too goes to and from the kernel as addresses, never as
//! references.

use std::io;
use std::net::TcpStream;
use std::os::fd::AsRawFd;
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

/// The kernel takes no more at once (`IOV_MAX`).
pub(crate) const MAX_SEGS: usize = 1024;

impl Seg {
    pub fn of(bytes: &[u8]) -> Self {
        Self { addr: bytes.as_ptr() as usize, len: bytes.len() }
    }

    pub fn of_mut(bytes: &mut [u8]) -> Self {
        Self { addr: bytes.as_mut_ptr() as usize, len: bytes.len() }
    }
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
pub(crate) unsafe fn send(sock: &TcpStream, segs: &[Seg]) -> io::Result<usize> {
    let m = message(segs);
    // SAFETY: the header points at `segs`; the memory is the caller's promise.
    let n = unsafe { libc::sendmsg(sock.as_raw_fd(), &raw const m, libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

/// Receive into these pieces of memory without blocking. 0 is the end of the stream.
///
/// # Safety
/// Every segment is mapped and writable for the whole call and no reference into it is held.
pub(crate) unsafe fn receive(sock: &TcpStream, segs: &[Seg]) -> io::Result<usize> {
    let mut m = message(segs);
    // SAFETY: the header points at `segs`; the memory is the caller's promise.
    let n = unsafe { libc::recvmsg(sock.as_raw_fd(), &raw mut m, libc::MSG_DONTWAIT) };
    usize::try_from(n).map_err(|_| io::Error::last_os_error())
}

const WORD: usize = size_of::<usize>();

/// Write `data` at `addr`, as another process would: by relaxed atomic stores, whole aligned words where there are such.
///
/// Registered memory is shared: code of this process may read or write the same bytes meanwhile (a peer writes when it
/// likes, and we are only its hand). So these are no plain stores, which would be a data race; such a reader sees a mixture
/// of old and new bytes, as it does when the kernel receives straight into the pages. No byte outside the range is touched.
///
/// # Safety
/// `addr .. addr + data.len()` is mapped and writable, no reference into it is held, and this process touches it
/// meanwhile, if at all, by atomics or through the kernel.
pub(crate) unsafe fn write_mem(addr: usize, data: &[u8]) {
    let (head, rest) = data.split_at((addr.wrapping_neg() % WORD).min(data.len()));
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

/// Options of a data connection.
pub(crate) fn tune(sock: &TcpStream, dead_after: Duration) -> io::Result<()> {
    let options = socket2::SockRef::from(sock);
    options.set_tcp_nodelay(true)?;
    options.set_tcp_user_timeout(Some(dead_after.max(Duration::from_secs(1))))?;
    let probe = (dead_after / 3).max(Duration::from_secs(1));
    options.set_tcp_keepalive(&socket2::TcpKeepalive::new().with_time(probe).with_interval(probe).with_retries(3))
}

/// Call it readable only from so many bytes on, or at its end (`SO_RCVLOWAT`). Where that cannot be set, it is told sooner.
pub(crate) fn readable_from(sock: &TcpStream, bytes: libc::c_int) {
    let len = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: `bytes` is read for the length that is its own.
    unsafe {
        libc::setsockopt(sock.as_raw_fd(), libc::SOL_SOCKET, libc::SO_RCVLOWAT, (&raw const bytes).cast(), len);
    }
}

/// Whether there was nothing to do now.
pub(crate) fn not_now(e: &io::Error) -> bool {
    matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_written_exactly_at_every_cut() {
        let data: Vec<u8> = (1..=40).collect();
        for from in 0..20 {
            for len in 0..=40 {
                let mut memory = vec![0xee_u8; 64];
                // SAFETY: inside the vector, which only this thread touches.
                unsafe { write_mem(memory.as_mut_ptr() as usize + from, &data[..len]) };
                let mut want = vec![0xee; 64];
                want[from..from + len].copy_from_slice(&data[..len]);
                assert_eq!(memory, want, "{from}+{len}");
            }
        }
    }
}
