//! The wire: frames <-> typed messages, in the dialects of SGLang 0.5.23.
//!
//! Pure: no I/O, no clock, no unsafe. Parsing is validating: what comes out of a parser is within
//! [`Limits`](crate::Limits). Unknown trailing frames are kept off, not rejected.

pub mod message;

pub use message::*;
