//! Which process on which boot of which host this is: what proofs of a peer's death rest on.
//!
//! A process names itself to its peers by a [`HostIdentity`]. On the same host a peer can hold on to that very process
//! (a pidfd) and see it end; from elsewhere, another process of the same boot at the same endpoint has taken its place.
//! What a peer merely claims is no proof: an identity is looked up here, or compared with that of a successor.

use std::fmt;

/// One process on one boot of one host. Two processes with equal `boot_id` run on one kernel; `pid` and `start` name
/// the process within `pid_ns` for as long as the host runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HostIdentity {
    /// Of the running kernel; zeros where the system does not tell.
    pub boot_id: [u8; 16],
    /// Number of the pid namespace; 0 where the system does not tell.
    pub pid_ns: u64,
    /// Process number within `pid_ns`.
    pub pid: u32,
    /// Clock ticks from boot to the start of the process; 0 where the system does not tell.
    pub start: u64,
    /// Effective user.
    pub uid: u32,
}

/// Bytes of an encoded [`HostIdentity`].
pub const HOST_IDENTITY_LEN: usize = 40;

impl HostIdentity {
    /// Whether the other runs on the same booted kernel and the same pid numbers mean the same processes.
    pub fn shares_pids(&self, other: &Self) -> bool {
        self.boot_id != [0; 16] && self.pid_ns != 0 && (self.boot_id, self.pid_ns) == (other.boot_id, other.pid_ns)
    }

    /// Whether `successor` is another, not older, process on the same boot of the same host: found at the same endpoint, it has taken
    /// this generation's place.
    pub fn succeeded_by(&self, successor: &Self) -> bool {
        self.shares_pids(successor)
            && self.start != 0
            && successor.start != 0
            && self.start <= successor.start
            && (self.pid, self.start) != (successor.pid, successor.start)
    }

    /// Little-endian, in the order of the fields.
    pub fn to_bytes(self) -> [u8; HOST_IDENTITY_LEN] {
        let mut out = [0; HOST_IDENTITY_LEN];
        out[..16].copy_from_slice(&self.boot_id);
        out[16..24].copy_from_slice(&self.pid_ns.to_le_bytes());
        out[24..28].copy_from_slice(&self.pid.to_le_bytes());
        out[28..36].copy_from_slice(&self.start.to_le_bytes());
        out[36..].copy_from_slice(&self.uid.to_le_bytes());
        out
    }

    /// Reads [`to_bytes`](Self::to_bytes): every value is one.
    pub fn from_bytes(bytes: [u8; HOST_IDENTITY_LEN]) -> Self {
        fn part<const N: usize>(bytes: &[u8; HOST_IDENTITY_LEN], at: usize) -> [u8; N] {
            std::array::from_fn(|i| bytes[at + i])
        }
        Self {
            boot_id: part(&bytes, 0),
            pid_ns: u64::from_le_bytes(part(&bytes, 16)),
            pid: u32::from_le_bytes(part(&bytes, 24)),
            start: u64::from_le_bytes(part(&bytes, 28)),
            uid: u32::from_le_bytes(part(&bytes, 36)),
        }
    }
}

impl fmt::Display for HostIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {} started at {} on boot {:02x?}", self.pid, self.start, &self.boot_id[..4])
    }
}

#[cfg(feature = "host")]
mod process {
    //! Who we are, and holding on to a process of this host.

    use std::io;
    use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
    use std::os::unix::fs::MetadataExt;

    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    use rustix::io::Errno;
    use rustix::process::{Pid, PidfdFlags, pidfd_open, test_kill_process};

    use super::HostIdentity;

    fn parse_hex(text: &str) -> Option<[u8; 16]> {
        let digits: Vec<u8> = text.chars().filter(|c| *c != '-').map(|c| c.to_digit(16)).try_fold(
            Vec::with_capacity(32),
            |mut v, d| {
                v.push(u8::try_from(d?).ok()?);
                Some(v)
            },
        )?;
        let pairs: Vec<u8> = digits.chunks_exact(2).map(|p| p[0] << 4 | p[1]).collect();
        if digits.len() == 32 { pairs.try_into().ok() } else { None }
    }

    /// Field 22 of `/proc/PID/stat`, counted from behind the program name, which may hold blanks and brackets.
    fn start_time(pid: u32) -> Option<u64> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)?.parse().ok()
    }

    fn pid(number: u32) -> Option<Pid> {
        Pid::from_raw(i32::try_from(number).ok()?)
    }

    /// A handle on one process; unlike its number it never comes to mean another one.
    #[derive(Debug)]
    pub struct ProcessHandle(OwnedFd);

    impl ProcessHandle {
        /// Whether every thread of the process has ended.
        pub fn exited(&self) -> bool {
            let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
            matches!(poll(&mut fds, Some(&Timespec::default())), Ok(n) if n > 0)
        }

        /// Readable once the process has ended: for a poll set.
        pub fn as_raw_fd(&self) -> RawFd {
            std::os::fd::AsRawFd::as_raw_fd(&self.0)
        }
    }

    impl AsFd for ProcessHandle {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }

    /// Whether this kernel gives handles on processes (Linux 5.3).
    ///
    /// # Errors
    /// Why not.
    pub fn handles_work() -> io::Result<()> {
        let me = pid(std::process::id()).ok_or(io::ErrorKind::InvalidInput)?;
        Ok(pidfd_open(me, PidfdFlags::empty()).map(drop)?)
    }

    impl HostIdentity {
        /// Ours. Parts the system does not tell are zero, and zeros never prove anything.
        pub fn local() -> Self {
            let boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
                .ok()
                .and_then(|text| parse_hex(text.trim()))
                .unwrap_or_default();
            let pid_ns = std::fs::metadata("/proc/self/ns/pid").map_or(0, |m| m.ino());
            let uid = std::fs::metadata("/proc/self").map_or(u32::MAX, |m| m.uid());
            let pid = std::process::id();
            Self { boot_id, pid_ns, pid, start: start_time(pid).unwrap_or(0), uid }
        }

        /// A handle on this very process, when it runs on our host: opened by number, then checked by start time, so that
        /// a recycled number is noticed.
        pub fn open(&self, local: &Self) -> Option<ProcessHandle> {
            if !local.shares_pids(self) || self.start == 0 {
                return None;
            }
            let handle = ProcessHandle(pidfd_open(pid(self.pid)?, PidfdFlags::empty()).ok()?);
            (start_time(self.pid) == Some(self.start) && !handle.exited()).then_some(handle)
        }

        /// Whether this process is gone, when that can be seen from here: `None` when it runs (or ran) elsewhere. A zombie
        /// counts as there; only a handle tells that it has exited.
        pub fn gone(&self, local: &Self) -> Option<bool> {
            if !local.shares_pids(self) || self.start == 0 {
                return None;
            }
            Some(match start_time(self.pid) {
                Some(start) => start != self.start,
                // `/proc` may hide other users' processes; a signal's target is never hidden.
                None => pid(self.pid).is_none_or(|p| test_kill_process(p) == Err(Errno::SRCH)),
            })
        }

        /// Whether this process ran on our host and has ended. False when it cannot be told.
        pub fn is_gone(&self, local: &Self) -> bool {
            if !local.shares_pids(self) || self.start == 0 {
                return false;
            }
            match pid(self.pid).map(|p| pidfd_open(p, PidfdFlags::empty())) {
                // Opened first, so that it is of the process whose start time is read then, or of one that came before.
                Some(Ok(fd)) => {
                    ProcessHandle(fd).exited() || start_time(self.pid).is_some_and(|start| start != self.start)
                }
                Some(Err(e)) => e == Errno::SRCH,
                None => true,
            }
        }
    }
}

#[cfg(feature = "host")]
pub use process::{ProcessHandle, handles_work};

#[cfg(test)]
mod tests {
    use super::*;

    #[cfg(feature = "host")]
    #[test]
    fn bytes_round_trip() {
        let me = HostIdentity::local();
        assert_eq!(HostIdentity::from_bytes(me.to_bytes()), me);
    }

    #[cfg(feature = "host")]
    #[test]
    fn own_identity_opens_and_a_recycled_pid_does_not() {
        let me = HostIdentity::local();
        assert!(me.open(&me).is_some_and(|handle| !handle.exited()));
        let predecessor = HostIdentity { start: me.start.wrapping_sub(1), ..me };
        assert!(predecessor.open(&me).is_none());
        assert!(predecessor.succeeded_by(&me));
        assert!(!me.succeeded_by(&me));
        // A late word of the older one does not make the newer one its predecessor.
        assert!(!me.succeeded_by(&predecessor));
    }

    #[cfg(feature = "host")]
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
}
