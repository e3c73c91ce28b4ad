//! Test kit for kv-transfer: everything the engine talks to, in a form a test can hold in its hand.
//!
//! | seam in `kv_core` | stand-in here |
//! |---|---|
//! | `time::Clock` | [`ManualClock`] |
//! | `memory::MemoryOwner` | [`TestMemory`] |
//! | `transport::{Transport, Lane}` | [`FakeFabric`], [`FakeTransport`] |
//! | `control::ControlPlane` | [`SimNet`], [`SimControl`](net::SimControl) |
//! | `directory::Directory` | [`FakeDirectory`] |
//!
//! Besides: [`mooncake`], a peer of Mooncake's TCP wire that misbehaves as it is told; [`World`], shards on all of these, stepped until nothing moves; [`conformance`], the suite every transport
//! runs; [`vectors`], the loader of the golden vectors; [`Rng`], a small seeded generator; [`mod@print`], readable bytes
//! and frames.
//!
//! Used by tests only, so a misuse or a broken rule panics and says what happened.
#![deny(unsafe_op_in_unsafe_fn)]
// A test kit reports by panicking.
#![allow(clippy::expect_used)]

pub mod clock;
pub mod conformance;
pub mod directory;
pub mod fake_transport;
pub mod memory;
pub mod mooncake;
pub mod net;
pub mod print;
pub mod rng;
pub mod sim;
pub mod vectors;
pub mod world;

pub use clock::ManualClock;
pub use directory::FakeDirectory;
pub use fake_transport::{FakeFabric, FakeTransport};
pub use memory::TestMemory;
pub use net::SimNet;
pub use rng::Rng;
pub use world::{World, WorldSpec};
