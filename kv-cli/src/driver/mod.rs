//! How a run is driven: one brain, many ranks.
//!
//! A **worker** is one rank: it has the memory and the engine, and does what it is told, wave by wave ([`worker`]).
//! The **scheduler** is the brain: it has the pools, the prefix caches and the books of both sides ([`scheduler`]).
//! They talk in lines of JSON ([`protocol`]), over pipes to OS processes or over channels to threads ([`fleet`]).
//! What moves bytes is behind [`engine`]; `loopback` is one for tests.
//!
//! Order of one wave: prefill fills its pages → prefill opens the rooms → decode fetches the gate room (so it knows
//! that the pages are filled, also from another machine) → the clock runs while decode fetches the rooms → decode
//! verifies every page. Fill and verification are outside the clock and reported apart.

pub mod agreement;
pub mod builtin;
pub mod engine;
pub mod fleet;
pub mod layout;
#[cfg(test)]
pub mod loopback;
pub mod managed;
pub mod protocol;
pub mod rows;
pub mod scheduler;
pub mod stats;
#[cfg(test)]
mod tests;
pub mod worker;
