//! The sockets of libzmq, by the `zmq` crate. They may move between threads when a full fence lies between the uses; a
//! mutex is one.

mod context;
mod inbox;
mod link;

pub(super) use context::ZmqContext;
pub(super) use inbox::LibzmqInbox;
pub(super) use link::LibzmqLinks;
