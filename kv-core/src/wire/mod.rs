//! The wire: frames <-> typed messages, in the dialects of SGLang 0.5.23.
//!
//! Pure: no I/O, no clock, no unsafe. Parsing is validating: what comes out of a parser is within
//! [`Limits`](crate::Limits). Unknown trailing frames are kept off, not rejected.

pub mod describe;
pub mod dialect;
pub mod ext;
pub mod message;
pub mod mooncake;
pub mod mori;
pub mod msgpack;
pub mod nixl;
pub mod pack;

mod common;
mod destinations;
mod frames;
mod geometry;

pub use describe::describe;
pub use dialect::{Dialect, built_in};
pub use ext::{ExtCapabilities, ExtPeer, Extension, MessageKind, RoomTag};
pub use message::*;
pub use mooncake::MooncakeDialect;
pub use mori::MoriDialect;
pub use nixl::NixlDialect;
