//! Waiting for descriptors: an epoll set, and a sleep on several.

use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::time::Duration;

use rustix::event::epoll::{self, CreateFlags, Event, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec};
use smallvec::SmallVec;

/// Most events taken at once; the rest is there at the next look.
const EVENTS: usize = 256;

/// An epoll set. Closing a descriptor takes it out, unless a forked child has it too: then it is reported for ever, so
/// remove it first.
pub(super) struct Epoll(OwnedFd);

impl Epoll {
    pub fn new() -> io::Result<Self> {
        Ok(Self(epoll::create(CreateFlags::CLOEXEC)?))
    }

    /// Report `source` under this number while it is readable.
    pub fn add_reader(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        Ok(epoll::add(&self.0, source, EventData::new_u64(token), EventFlags::IN)?)
    }

    /// Report `source` under this number each time something changes.
    pub fn add_edges(&self, source: impl AsFd, token: u64) -> io::Result<()> {
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        Ok(epoll::add(&self.0, source, EventData::new_u64(token), flags)?)
    }

    pub fn remove(&self, source: impl AsFd) {
        // Only fails for what is not in the set.
        let _ = epoll::delete(&self.0, source);
    }

    /// Append the numbers of what is ready; waits at most `timeout`.
    pub fn ready(&self, timeout: Duration, out: &mut Vec<u64>) -> io::Result<()> {
        let mut events = [MaybeUninit::<Event>::uninit(); EVENTS];
        match epoll::wait(&self.0, &mut events[..], Some(&timespec(timeout))) {
            Ok((events, _)) => out.extend(events.iter().map(|e| e.data.u64())),
            Err(rustix::io::Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        Ok(())
    }

    pub fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

fn timespec(d: Duration) -> Timespec {
    Timespec { tv_sec: i64::try_from(d.as_secs()).unwrap_or(i64::MAX), tv_nsec: d.subsec_nanos().into() }
}

/// Sleep until one of `fds` is readable or broken, at most `timeout`; which ones are. A signal ends it early.
pub(super) fn sleep(fds: &[RawFd], timeout: Option<Duration>) -> io::Result<SmallVec<[bool; 6]>> {
    let mut items: SmallVec<[PollFd<'_>; 6]> = SmallVec::new();
    for &fd in fds {
        // SAFETY: poll reads the number only, and reports one that is not open as such (POLLNVAL).
        items.push(PollFd::from_borrowed_fd(unsafe { BorrowedFd::borrow_raw(fd) }, PollFlags::IN));
    }
    let timeout = timeout.map(timespec);
    match rustix::event::poll(&mut items, timeout.as_ref()) {
        Ok(_) => {}
        Err(rustix::io::Errno::INTR) => return Ok(SmallVec::from_elem(false, fds.len())),
        Err(e) => return Err(e.into()),
    }
    if items.iter().any(|i| i.revents().contains(PollFlags::NVAL)) {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "a descriptor is not open"));
    }
    Ok(items.iter().map(|i| !i.revents().is_empty()).collect())
}
