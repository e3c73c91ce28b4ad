//! Memory that takes part in transfers: who owns it, and proof that it is registered.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::ids::RegionId;

/// Where memory lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum MemoryKind {
    /// Host memory.
    #[default]
    Dram,
    /// Device memory of this device id.
    Vram {
        /// Device number as the backend counts it.
        device: u32,
    },
}

/// Owner of one block of memory that may be registered and written by others.
///
/// # Safety
/// `[base, base + len)` must stay valid for reads and writes, at the same address, until the owner is dropped. Other
/// processes write into it while this process runs, so no `&`/`&mut` reference into a range that may be written is
/// held meanwhile.
pub unsafe trait MemoryOwner: Send + Sync + 'static {
    /// First byte's address.
    fn base(&self) -> u64;
    /// Length in bytes.
    fn len(&self) -> u64;
    /// Whether there is nothing in it.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// Host or device.
    fn kind(&self) -> MemoryKind {
        MemoryKind::Dram
    }
}

/// A block of memory a transport registered. Writes in flight hold an `Arc` of it, so that unregistering or freeing
/// memory under a write cannot be written: the registration ends when the last holder lets go.
pub struct RegisteredRegion {
    id: RegionId,
    // Dropped before `owner`: the transport lets go of the memory before the memory goes.
    registration: Box<dyn Any + Send + Sync>,
    owner: Arc<dyn MemoryOwner>,
}

impl RegisteredRegion {
    /// Made by a transport; `registration` undoes the registration when dropped.
    pub fn new(id: RegionId, owner: Arc<dyn MemoryOwner>, registration: Box<dyn Any + Send + Sync>) -> Self {
        Self { id, registration, owner }
    }

    /// Number within the transport.
    pub fn id(&self) -> RegionId {
        self.id
    }

    /// First byte's address.
    pub fn addr(&self) -> u64 {
        self.owner.base()
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.owner.len()
    }

    /// Whether there is nothing in it.
    pub fn is_empty(&self) -> bool {
        self.owner.is_empty()
    }

    /// Host or device.
    pub fn kind(&self) -> MemoryKind {
        self.owner.kind()
    }

    /// The transport's own part.
    pub fn registration(&self) -> &(dyn Any + Send + Sync) {
        &*self.registration
    }

    /// Who owns the memory.
    pub fn owner(&self) -> &Arc<dyn MemoryOwner> {
        &self.owner
    }
}

impl fmt::Debug for RegisteredRegion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}[{:#x}; {}]", self.id, self.addr(), self.len())
    }
}
