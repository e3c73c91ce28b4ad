//! A peer of Mooncake's TCP wire, both roles, versions 1 and 2, that misbehaves as it is told: what the library's own engine
//! cannot be made to do.
//!
//! | role | here | faults |
//! |---|---|---|
//! | target, to test who writes | [`MooncakePeer`] | [`HandshakeFault`], [`DataFault`]: slow, truncated, wrong status, wrong types, half-open |
//! | initiator, to test who is written to | [`ask`], [`describe`], [`MooncakeClient`] | any bytes: [`raw`], [`MooncakeClient::send`] |
//!
//! Blocking sockets and a thread a connection: for tests.

mod client;
mod peer;

pub use client::{MooncakeClient, ask, describe, raw};
pub use peer::{DataFault, HandshakeFault, MooncakePeer, Seen};
