//! Prefill and decode shards against each other: simulated network and clock, a transport that copies bytes when it is
//! told to.
// A test reports by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod aborts;
mod claims;
mod deadlines;
mod early;
mod network;
mod peers;
mod pieces;
mod proof;
mod pushed;
mod reuse;
mod robustness;
mod shapes;
mod support;
mod traces;
mod transfers;
