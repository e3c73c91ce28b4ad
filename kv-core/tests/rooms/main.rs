//! The lifecycle as pure state machines: one invariant a file.
// A test reports by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cleared;
mod outstanding;
mod posting;
mod properties_receiver;
mod properties_sender;
mod ranks;
mod release;
mod success;
mod support;
mod terminal;
mod transitions_receiver;
mod transitions_sender;
