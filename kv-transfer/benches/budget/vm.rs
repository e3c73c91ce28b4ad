//! The floor of copies on one host: `process_vm_readv`, driven by the target, in the best cut.

use std::io;

use crate::Result;

/// One contiguous copy: offset at the source, offset here, bytes.
pub type Copy = (u64, u64, u64);

/// Copies out of another process.
#[derive(Clone, Copy)]
pub struct Reader {
    pub pid: i32,
    /// First byte of the source's pool in its process.
    pub from: u64,
    /// First byte of ours.
    pub to: u64,
}

impl Reader {
    /// Do all copies, `segments` in a call, by `threads` threads that share them out.
    pub fn read(self, copies: &[Copy], segments: usize, threads: usize) -> Result<()> {
        if threads == 1 {
            return Ok(self.share(copies, segments)?);
        }
        let share = copies.len().div_ceil(threads).max(1);
        std::thread::scope(|scope| {
            let all: Vec<_> =
                copies.chunks(share).map(|part| scope.spawn(move || self.share(part, segments))).collect();
            for thread in all {
                thread.join().map_err(|_| "a copying thread panicked")??;
            }
            Ok(())
        })
    }

    fn share(self, copies: &[Copy], segments: usize) -> io::Result<()> {
        let iov = |addr: u64, len: u64| libc::iovec { iov_base: addr as *mut libc::c_void, iov_len: len as usize };
        let (mut local, mut remote) = (Vec::with_capacity(segments), Vec::with_capacity(segments));
        for part in copies.chunks(segments) {
            local.clear();
            remote.clear();
            local.extend(part.iter().map(|c| iov(self.to + c.1, c.2)));
            remote.extend(part.iter().map(|c| iov(self.from + c.0, c.2)));
            let n = part.len() as libc::c_ulong;
            // SAFETY: the local segments lie in our arena, to which no reference is held; the remote ones are the
            // kernel's to check.
            let done = unsafe { libc::process_vm_readv(self.pid, local.as_ptr(), n, remote.as_ptr(), n, 0) };
            match usize::try_from(done) {
                Ok(done) if done as u64 == part.iter().map(|c| c.2).sum::<u64>() => {}
                Ok(_) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Err(_) => return Err(io::Error::last_os_error()),
            }
        }
        Ok(())
    }
}
