//! A transport whose writes end when they are told to, so that the time from Done to the waiter stands alone.

use std::os::fd::RawFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use kv_transfer::memory::{MemoryOwner, RegisteredRegion};
use kv_transfer::transport::{
    Capabilities, Lane, LaneEvent, Outcome, PeerDescriptor, SubmitError, Transport, TransportError, WriteOp,
};
use kv_transfer::{OpId, PeerId, RegionId};

use crate::Result;
use crate::sys::{EventFd, now_ns};

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What the benchmark's driver and the lane share.
pub struct Strings {
    wake: EventFd,
    flying: Mutex<Vec<OpId>>,
    submitted: Condvar,
    told: Mutex<Vec<OpId>>,
    done_at: Mutex<Vec<u64>>,
}

impl Strings {
    /// Wait for a write to be submitted.
    pub fn submitted(&self) -> Result<OpId> {
        let flying = lock(&self.flying);
        let none = |flying: &mut Vec<OpId>| flying.is_empty();
        let (mut flying, _) = self
            .submitted
            .wait_timeout_while(flying, Duration::from_secs(10), none)
            .unwrap_or_else(PoisonError::into_inner);
        flying.pop().ok_or_else(|| "no write was submitted within 10 s".into())
    }

    /// End a write: the lane's descriptor turns readable.
    pub fn complete(&self, op: OpId) {
        lock(&self.told).push(op);
        self.wake.signal();
    }

    /// When each write was handed out as Done, in order.
    pub fn done_at(&self) -> Vec<u64> {
        std::mem::take(&mut lock(&self.done_at))
    }
}

pub struct Stub {
    name: String,
    capabilities: Capabilities,
    strings: Arc<Strings>,
}

impl Stub {
    pub fn new(name: &str) -> Result<Self> {
        Ok(Self {
            name: name.to_owned(),
            capabilities: Capabilities {
                name: "stub",
                host_memory: true,
                device_memory: false,
                max_op_bytes: None,
                submit_blocks: false,
                done_proves_placement: true,
                settles_unresolved: true,
                unregister_revokes: true,
                checks_destinations: false,
            },
            strings: Arc::new(Strings {
                wake: EventFd::new(false)?,
                flying: Mutex::default(),
                submitted: Condvar::new(),
                told: Mutex::default(),
                done_at: Mutex::default(),
            }),
        })
    }

    pub fn strings(&self) -> Arc<Strings> {
        self.strings.clone()
    }
}

impl Transport for Stub {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }
    fn local_name(&self) -> &str {
        &self.name
    }
    fn local_metadata(&self) -> Bytes {
        Bytes::from_static(b"stub")
    }
    fn register(&self, memory: Arc<dyn MemoryOwner>) -> std::result::Result<Arc<RegisteredRegion>, TransportError> {
        Ok(Arc::new(RegisteredRegion::new(RegionId(1), memory, Box::new(()))))
    }
    fn connect(&self, _: &PeerDescriptor) -> std::result::Result<PeerId, TransportError> {
        Ok(PeerId(1))
    }
    fn disconnect(&self, _: PeerId) {}
    fn lane(&self) -> std::result::Result<Box<dyn Lane>, TransportError> {
        Ok(Box::new(StubLane(self.strings.clone())))
    }
}

struct StubLane(Arc<Strings>);

impl Lane for StubLane {
    fn submit(&mut self, op: WriteOp) -> std::result::Result<(), SubmitError> {
        lock(&self.0.flying).push(op.id);
        self.0.submitted.notify_one();
        Ok(())
    }

    fn poll(&mut self, out: &mut Vec<LaneEvent>) {
        // One system call, as every real lane has at least.
        self.0.wake.take();
        for op in std::mem::take(&mut *lock(&self.0.told)) {
            lock(&self.0.done_at).push(now_ns());
            out.push(LaneEvent::Outcome(op, Outcome::Done));
        }
    }

    fn wake_fd(&self) -> Option<RawFd> {
        Some(self.0.wake.fd())
    }
}
