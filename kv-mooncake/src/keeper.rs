//! The thread that sees processes of this host end, and looks at what lanes that are gone left behind.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use kv_core::ids::PeerId;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};

use crate::peer::Peer;
use crate::transport::Core;

const WAKE: u64 = 0;
/// What nobody else looks at is looked at this often.
const SWEEP: Duration = Duration::from_millis(100);

pub(crate) struct Keeper {
    set: Arc<OwnedFd>,
    wake: Arc<OwnedFd>,
    stopped: Arc<AtomicBool>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Keeper {
    pub fn new() -> io::Result<Self> {
        let set = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        epoll::add(&set, &wake, epoll::EventData::new_u64(WAKE), epoll::EventFlags::IN)?;
        Ok(Self { set: Arc::new(set), wake: Arc::new(wake), stopped: Arc::default(), thread: Mutex::default() })
    }

    pub fn start(&self, core: Weak<Core>) -> io::Result<()> {
        let (set, wake, stopped) = (Arc::clone(&self.set), Arc::clone(&self.wake), Arc::clone(&self.stopped));
        let thread =
            std::thread::Builder::new().name("kv-mc-keeper".into()).spawn(move || run(&set, &wake, &stopped, &core))?;
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    /// Tell when its process ends: once.
    pub fn watch(&self, peer: &Peer) {
        let Some(process) = &peer.process else { return };
        let flags = epoll::EventFlags::IN | epoll::EventFlags::ONESHOT;
        if let Err(e) = epoll::add(&self.set, process.as_fd(), epoll::EventData::new_u64(peer.id.0), flags) {
            tracing::warn!(error = %e, "the end of a peer's process will not be seen");
        }
    }

    pub fn unwatch(&self, peer: &Peer) {
        if let Some(process) = &peer.process {
            // It may never have been in the set.
            let _ = epoll::delete(&self.set, process.as_fd());
        }
    }

    /// There is something to look at.
    pub fn wake(&self) {
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
        self.wake();
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        // The last holder of the transport may be this very thread.
        if let Some(thread) = thread.filter(|t| t.thread().id() != std::thread::current().id()) {
            let _ = thread.join();
        }
    }
}

fn run(set: &OwnedFd, wake: &OwnedFd, stopped: &AtomicBool, core: &Weak<Core>) {
    let mut events = Vec::with_capacity(64);
    let mut more = false;
    while !stopped.load(Ordering::Acquire) {
        events.clear();
        let wait = more.then(|| Timespec { tv_sec: 0, tv_nsec: SWEEP.subsec_nanos().into() });
        match epoll::wait(set, rustix::buffer::spare_capacity(&mut events), wait.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => {
                // Cannot happen with a valid set.
                tracing::error!(error = %e, "the ends of peers' processes cannot be waited for");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
        let _ = rustix::io::read(wake, &mut [0u8; 8]);
        let Some(core) = core.upgrade() else { continue };
        events.iter().map(|e| e.data.u64()).filter(|id| *id != WAKE).for_each(|id| core.process_ended(PeerId(id)));
        more = core.sweep();
    }
}
