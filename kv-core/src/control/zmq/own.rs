//! PUSH and PULL over ZMTP 3 (<https://rfc.zeromq.org/spec/23/>), written for this project.
//!
//! The same bytes as libzmq's, which is at the other end wherever the peer is an SGLang process. What is gained is
//! sleeping threads: libzmq hands each message to an I/O thread at either end, and on an idle machine each wake costs
//! 12-18 us. Here the shard that has news writes it to the socket, and the thread that is to act on it reads it.
//!
//! Spoken: the NULL mechanism, version 3.0 and above, PING (answered). Not spoken: ZMTP 2 and older (libzmq 3), and
//! other mechanisms; such a peer is refused with a reason. No call blocks but [`OwnInbox::wait`], and everything has a
//! bound: connections, the time of a handshake, bytes of a frame, frames and bytes of a message, messages to send.

mod codec;
#[cfg(feature = "fuzzing")]
pub mod fuzzing;
mod handshake;
mod inbox;
mod link;
mod poll;

pub(super) use inbox::OwnInbox;
pub(super) use link::OwnLinks;
