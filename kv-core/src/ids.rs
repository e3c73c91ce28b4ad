//! Identifiers. Each is a newtype, so that a room is never taken for a rank.

use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::num::NonZeroU64;
use std::sync::{Mutex, PoisonError};

/// One request's transfer: SGLang's `bootstrap_room`.
///
/// Never 0: decode recognises a metadata slot that was not written yet by a zero room (requirement D6), so a receiver
/// or sender without a room cannot be constructed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Room(NonZeroU64);

impl Room {
    /// The room with this number; `None` for 0.
    pub const fn new(room: u64) -> Option<Self> {
        match NonZeroU64::new(room) {
            Some(room) => Some(Self(room)),
            None => None,
        }
    }

    /// The number as it travels on the wire.
    pub const fn get(self) -> u64 {
        self.0.get()
    }
}

impl TryFrom<u64> for Room {
    type Error = ZeroRoom;
    fn try_from(room: u64) -> Result<Self, ZeroRoom> {
        Self::new(room).ok_or(ZeroRoom)
    }
}

/// Room 0 was named where a room is needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("bootstrap_room 0 is not a room: 0 marks a metadata slot that was not written yet")]
pub struct ZeroRoom;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self.0)
            }
        }
    };
}

impl fmt::Display for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Room {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Room({})", self.0)
    }
}

id! {
    /// A prefill rank's number in status and ACK messages:
    /// `attn_tp_rank * (pp_size * attn_cp_size) + pp_rank * attn_cp_size + attn_cp_rank`.
    PrefillRank(u32)
}
id! {
    /// One *generation* of one connected transport peer, given out by [`Transport::connect`](crate::transport::Transport::connect).
    /// A peer that restarts and registers again gets a new one.
    PeerId(u64)
}
id! {
    /// One submitted write; unique within a manager for its whole life.
    OpId(u64)
}
id! {
    /// A registered region of local memory, unique within a transport.
    RegionId(u32)
}

/// One process, told from any other that had or will have its address (F56). Random, never 0.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProcessGeneration(pub u128);

impl ProcessGeneration {
    /// This process. Drawn at the first call, and anew in a child that was forked.
    pub fn here() -> Self {
        static HERE: Mutex<Option<(u32, ProcessGeneration)>> = Mutex::new(None);
        let mut here = HERE.lock().unwrap_or_else(PoisonError::into_inner);
        let pid = std::process::id();
        match *here {
            Some((of, generation)) if of == pid => generation,
            _ => here.insert((pid, Self::draw(pid))).1,
        }
    }

    /// The keys of `RandomState` come from the operating system; the process number tells forked children apart, which
    /// inherit them.
    fn draw(pid: u32) -> Self {
        let half = |salt: u32| {
            let mut hasher = RandomState::new().build_hasher();
            hasher.write_u32(pid);
            hasher.write_u32(salt);
            u128::from(hasher.finish())
        };
        Self(((half(1) << 64) | half(2)).max(1))
    }
}

impl fmt::Display for ProcessGeneration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Debug for ProcessGeneration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ProcessGeneration({self})")
    }
}
