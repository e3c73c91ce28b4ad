//! Managers over real threads, real control sockets, our bootstrap server and the fake transport.
#![cfg(all(feature = "control", feature = "bootstrap"))]
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod dp;
mod one_each;
mod restarts;
mod support;
mod tap;
