//! The wire of the Mooncake transfer engine over TCP with `P2PHANDSHAKE`, as bytes: no I/O, no clock, no unsafe code.
//!
//! Learnt from the engine's sources and checked against the libraries of 0.3.13.post1 and 0.3.14. An engine has two ports:
//!
//! | port | what goes over it | here |
//! |---|---|---|
//! | handshake, the port of its session id `host:port` | one request a connection, in JSON | [`handshake`] |
//! | data, `tcp_data_port` of its descriptor | headers, payload, statuses; persistent, one request after the other | [`data`] |
//!
//! What an engine says of itself there is a [`Descriptor`].
//!
//! ```
//! use mooncake_wire::{Status, Write};
//!
//! // Write 4096 bytes to 0x7f00_0000_0000 of the peer, and have it say so when they are there.
//! let header = Write { addr: 0x7f00_0000_0000, len: 4096, acknowledged: true }.encode();
//! assert_eq!((header.len(), header[16]), (24, 0x81));
//! assert_eq!(Status::decode([0, 0, 0, 0, b'V', b'T', b'C', b'M']), Ok(Status::Ok));
//! ```
//!
//! Nothing on this wire authenticates, encrypts, numbers or checks anything: addresses are those of the peer's process.
#![forbid(unsafe_code)]

pub mod data;
pub mod descriptor;
pub mod handshake;

pub use data::{BadOpcode, BadStatus, HEADER_LEN, Opcode, Read, Request, STATUS_LEN, Status, Write};
pub use descriptor::{Buffer, Descriptor, session};
pub use handshake::Kind;
