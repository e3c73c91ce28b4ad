//! A model of the real `SenderRoom` and `ReceiverRoom`: every order of events in small universes, with faults, aborts on
//! both sides, lost and repeated messages, deadlines, and a room number used again.
//!
//! `setup` says what is explored, `state` and `step` what can happen, `prefill` and `decode` do what the shards do around
//! the rooms, `invariants` says what must hold. The full size: `cargo xtask model`.
// A test reports by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod decode;
mod explore;
mod invariants;
#[cfg(feature = "mutants")]
mod mutants;
mod prefill;
mod setup;
mod sizes;
mod state;
mod step;
