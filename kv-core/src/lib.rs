//! Prefill/decode KV-cache transfer: the wire, the rooms, the plans and the seams.
//!
//! One rule stands above all others here:
//!
//! > **A write without proof of quiescence stays counted, its handle stays alive, its memory stays registered.**
#![deny(unsafe_op_in_unsafe_fn)]

pub mod aux_slots;
pub mod bootstrap;
pub mod control;
pub mod directory;
pub mod engine;
pub mod error;
pub mod event;
pub mod hooks;
pub mod host;
pub mod ids;
pub mod layout;
pub mod limits;
#[cfg(all(feature = "control", feature = "bootstrap"))]
pub mod manager;
pub mod memory;
pub mod mutants;
pub mod net;
pub mod plan;
pub mod poll;
pub mod room;
pub mod time;
pub mod topology;
pub mod transport;
pub mod wire;

pub use error::KvTransferError;
pub use ids::{OpId, PeerId, PrefillRank, RegionId, Room};
pub use limits::Limits;
pub use net::Endpoint;
pub use poll::{AgreedPoll, KvPoll};
pub use time::Timestamp;
