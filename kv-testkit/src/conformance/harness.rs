//! What a backend's author brings: a source transport here, and targets that can be told what to do.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use kv_core::host::HostIdentity;
use kv_core::ids::PeerId;
use kv_core::memory::{MemoryKind, MemoryOwner, RegisteredRegion};
use kv_core::net::Endpoint;
use kv_core::transport::{PeerDescriptor, Transport};

use crate::memory::TestMemory;

/// A harness or target cannot do this; why. The trials that need it are skipped, and the reason is printed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent(pub &'static str);

/// A block of the target's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Names it to its target.
    pub id: u32,
    /// Its first byte's address in the target's process.
    pub addr: u64,
    /// Its bytes.
    pub len: usize,
}

/// The receiving side of a pair: one transport, in this process or another.
///
/// A method that cannot reach the target any more (it was killed, or is paused) returns an error text.
pub trait Target {
    /// What it would send to register: name, metadata covering everything registered so far, endpoint.
    fn descriptor(&mut self) -> Result<PeerDescriptor, String>;

    /// Allocate a zeroed block between guards, and register it if `register`.
    fn alloc(&mut self, len: usize, register: bool) -> Result<Block, String>;

    /// End a block's registration; its memory stays.
    fn unregister(&mut self, block: u32) -> Result<(), String>;

    /// End a block's registration, and free its memory as far as the backend lets it go.
    fn free(&mut self, block: u32) -> Result<(), String> {
        Err(format!("block {block} cannot be freed by this target"))
    }

    /// Copy `len` bytes out of a block.
    fn read(&mut self, block: u32, offset: usize, len: usize) -> Result<Vec<u8>, String>;

    /// Copy bytes into a block.
    fn write(&mut self, block: u32, offset: usize, bytes: &[u8]) -> Result<(), String>;

    /// Whether nothing was written just before or after the block: `Err` says where.
    fn check_guards(&mut self, block: u32) -> Result<(), String>;

    /// End the process at once, as SIGKILL does; return when it is gone.
    fn kill(&mut self) -> Result<(), Absent> {
        Err(Absent("this target cannot be killed"))
    }

    /// Stop the process as SIGSTOP does.
    fn pause(&mut self) -> Result<(), Absent> {
        Err(Absent("this target cannot be paused"))
    }

    /// Let a stopped process go on.
    fn resume(&mut self) {}

    /// Break every connection to it from outside, without harming the process.
    fn cut(&mut self) -> Result<(), Absent> {
        Err(Absent("connections to this target cannot be cut"))
    }

    /// Whether memory can be read and written while it is paused or after it was killed.
    fn visible_when_stopped(&self) -> bool {
        false
    }
}

/// What the suite needs from a backend.
pub trait Harness {
    /// Printed in front of every line.
    fn name(&self) -> String;

    /// A fresh transport in this process.
    fn source(&mut self) -> Arc<dyn Transport>;

    /// A fresh target at an endpoint of its own.
    fn target(&mut self) -> Box<dyn Target>;

    /// A new process generation at the endpoint of `old`, which has ended or ends now.
    fn successor(&mut self, old: &mut dyn Target) -> Result<Box<dyn Target>, Absent> {
        let _ = old;
        Err(Absent("this harness cannot start a successor at the same endpoint"))
    }

    /// Break every connection between the source made last and `target`, which it knows as `peer`, harming neither process.
    /// By default the target does it.
    fn cut(&mut self, peer: PeerId, target: &mut dyn Target) -> Result<(), Absent> {
        let _ = peer;
        target.cut()
    }

    /// Source memory. Override for device memory.
    fn memory(&mut self, len: usize) -> Arc<dyn SourceMemory> {
        TestMemory::new(len)
    }

    /// Called between polls that brought no news.
    fn idle(&mut self) {
        std::thread::sleep(Duration::from_micros(200));
    }

    /// How long without any news until the suite gives up on something that must come. Generous: a loaded machine is no
    /// failure.
    fn patience(&self) -> Duration {
        Duration::from_secs(60)
    }

    /// How many polls, with [`idle`](Self::idle) between, to watch for what must not come.
    fn watch_polls(&self) -> u32 {
        1000
    }

    /// Ops of the trial with many small ones.
    fn many(&self) -> u64 {
        10_000
    }

    /// Bytes of the trial with large ops, which the suite cuts to `max_op_bytes`.
    fn large(&self) -> usize {
        8 << 20
    }

    /// Bytes of one op in the trials where peers go while writes are in flight: large enough that some still are, where the
    /// target cannot be stopped first.
    fn piece(&self) -> usize {
        32 << 10
    }

    /// How many peer blobs with one flipped bit to try. None by default: a flipped bit in an address makes a real backend call
    /// on strangers. Raise it where the blob is protected, or holds no address.
    fn flipped_blobs(&self) -> u32 {
        0
    }

    /// Open files and threads of this process; `None` where that cannot be told.
    fn resources(&self) -> Option<Resources> {
        let count = |dir: &str| std::fs::read_dir(dir).ok().map(Iterator::count);
        Some(Resources { files: count("/proc/self/fd")?, threads: count("/proc/self/task")? })
    }

    /// Files and threads that the trial with many small ops may add; other threads of the test program count too.
    fn resource_slack(&self) -> usize {
        64
    }

    /// A trial has ended. Whatever the harness kept for it may go.
    fn end_trial(&mut self) {}
}

/// What a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Resources {
    /// Open file descriptors.
    pub files: usize,
    /// Threads.
    pub threads: usize,
}

/// Source memory the suite can fill and read.
pub trait SourceMemory: MemoryOwner {
    /// Put bytes at an offset.
    fn put(&self, offset: usize, bytes: &[u8]);
    /// Copy bytes from an offset.
    fn get(&self, offset: usize, len: usize) -> Vec<u8>;
}

impl SourceMemory for TestMemory {
    fn put(&self, offset: usize, bytes: &[u8]) {
        self.write(offset, bytes);
    }
    fn get(&self, offset: usize, len: usize) -> Vec<u8> {
        self.read(offset, len)
    }
}

/// Drives a [`LocalTarget`]'s faults, where a backend can make them within one process.
pub trait LocalFaults {
    /// As [`Target::kill`].
    fn kill(&mut self) -> Result<(), Absent> {
        Err(Absent("the target is in this process and cannot be killed"))
    }
    /// As [`Target::pause`] and [`Target::resume`].
    fn pause(&mut self, paused: bool) -> Result<(), Absent> {
        let _ = paused;
        Err(Absent("the target is in this process and cannot be paused"))
    }
    /// As [`Target::cut`].
    fn cut(&mut self) -> Result<(), Absent> {
        Err(Absent("the target is in this process and its connections cannot be cut"))
    }
}

/// No faults.
pub struct NoFaults;

impl LocalFaults for NoFaults {}

/// A target in this process, over any transport with host memory.
pub struct LocalTarget<F = NoFaults> {
    transport: Arc<dyn Transport>,
    endpoint: Endpoint,
    faults: F,
    memory: BTreeMap<u32, (Arc<TestMemory>, Option<Arc<RegisteredRegion>>)>,
}

impl LocalTarget {
    /// A target over `transport`, whose control endpoint would be `endpoint`.
    pub fn new(transport: Arc<dyn Transport>, endpoint: Endpoint) -> Self {
        Self::with_faults(transport, endpoint, NoFaults)
    }
}

impl<F: LocalFaults> LocalTarget<F> {
    /// A target with faults.
    pub fn with_faults(transport: Arc<dyn Transport>, endpoint: Endpoint, faults: F) -> Self {
        Self { transport, endpoint, faults, memory: BTreeMap::new() }
    }

    fn block(&self, id: u32) -> Result<&TestMemory, String> {
        self.memory.get(&id).map(|(m, _)| &**m).ok_or_else(|| format!("no block {id}"))
    }
}

impl<F: LocalFaults> Target for LocalTarget<F> {
    fn descriptor(&mut self) -> Result<PeerDescriptor, String> {
        Ok(PeerDescriptor {
            name: self.transport.local_name().into(),
            metadata: self.transport.local_metadata(),
            endpoint: self.endpoint.clone(),
            host: Some(HostIdentity::local()),
        })
    }

    fn alloc(&mut self, len: usize, register: bool) -> Result<Block, String> {
        let kind =
            if self.transport.capabilities().host_memory { MemoryKind::Dram } else { MemoryKind::Vram { device: 0 } };
        let memory = TestMemory::of_kind(len, kind);
        let region = match register {
            true => Some(self.transport.register(memory.clone()).map_err(|e| e.to_string())?),
            false => None,
        };
        let id = self.memory.last_key_value().map_or(0, |(id, _)| id + 1);
        let block = Block { id, addr: memory.base(), len };
        self.memory.insert(id, (memory, region));
        Ok(block)
    }

    fn unregister(&mut self, block: u32) -> Result<(), String> {
        self.memory.get_mut(&block).ok_or_else(|| format!("no block {block}"))?.1 = None;
        Ok(())
    }

    fn free(&mut self, block: u32) -> Result<(), String> {
        let (memory, region) = self.memory.remove(&block).ok_or_else(|| format!("no block {block}"))?;
        drop(region);
        drop(memory);
        Ok(())
    }

    fn read(&mut self, block: u32, offset: usize, len: usize) -> Result<Vec<u8>, String> {
        Ok(self.block(block)?.read(offset, len))
    }

    fn write(&mut self, block: u32, offset: usize, bytes: &[u8]) -> Result<(), String> {
        self.block(block)?.write(offset, bytes);
        Ok(())
    }

    fn check_guards(&mut self, block: u32) -> Result<(), String> {
        self.block(block)?.check_guards()
    }

    fn kill(&mut self) -> Result<(), Absent> {
        self.faults.kill()
    }

    fn pause(&mut self) -> Result<(), Absent> {
        self.faults.pause(true)
    }

    fn resume(&mut self) {
        let _ = self.faults.pause(false);
    }

    fn cut(&mut self) -> Result<(), Absent> {
        self.faults.cut()
    }

    fn visible_when_stopped(&self) -> bool {
        true
    }
}
