//! The libzmq context. The safe `zmq` crate has no way to set MAX_SOCKETS, hence the few raw calls here.

use std::ops::Deref;
use std::os::raw::{c_int, c_void};
use std::sync::Arc;

use zmq_sys as sys;

use crate::control::zmq::ZmqError;
use crate::limits::Limits;

/// A libzmq context: one I/O thread, one reaper thread, a fixed number of sockets. One per manager.
///
/// Cloning shares it. It ends when the last clone and the last socket are gone; that waits for messages that still
/// linger, at most half a second.
#[derive(Clone)]
pub(in crate::control::zmq) struct ZmqContext(Arc<RawContext>);

struct RawContext(*mut c_void);

// SAFETY: "A ØMQ context is thread safe and may be shared among as many application threads as necessary"
// (zmq_ctx_new(3)); the pointer is only passed to zmq_socket, and to zmq_ctx_term by the last owner.
unsafe impl Send for RawContext {}
// SAFETY: as above.
unsafe impl Sync for RawContext {}

impl Drop for RawContext {
    fn drop(&mut self) {
        // SAFETY: the pointer came from zmq_ctx_new, every socket holds an Arc to this and was closed before it let
        // go of it, and this runs once.
        while unsafe { sys::zmq_ctx_term(self.0) } == -1 && last_error() == zmq::Error::EINTR {}
    }
}

fn last_error() -> zmq::Error {
    // SAFETY: reads the calling thread's errno.
    zmq::Error::from_raw(unsafe { sys::zmq_errno() })
}

impl ZmqContext {
    /// A context for one manager within `limits`: each endpoint takes a PUSH socket and a monitor (two PAIR sockets),
    /// so MAX_SOCKETS is three times `limits.max_sockets` (SGLang: `SGLANG_DISAGGREGATION_ZMQ_MAX_SOCKETS`).
    ///
    /// Each endpoint also takes about four file descriptors: `RLIMIT_NOFILE` has to allow them.
    ///
    /// # Errors
    /// [`ZmqError::System`] when libzmq cannot make it.
    pub fn new(limits: &Limits) -> Result<Self, ZmqError> {
        let sockets = limits.max_sockets.saturating_mul(3).saturating_add(64);
        Self::with_capacity(i32::try_from(sockets).unwrap_or(i32::MAX), 1)
    }

    /// A context with room for `max_sockets` libzmq sockets, served by `io_threads` threads.
    ///
    /// # Errors
    /// [`ZmqError::System`] when libzmq cannot make it or refuses a number.
    pub fn with_capacity(max_sockets: i32, io_threads: i32) -> Result<Self, ZmqError> {
        // SAFETY: takes nothing; null is checked below.
        let raw = unsafe { sys::zmq_ctx_new() };
        if raw.is_null() {
            return Err(ZmqError::system("create a context", last_error()));
        }
        let context = Self(Arc::new(RawContext(raw)));
        context.set(sys::ZMQ_MAX_SOCKETS, max_sockets, "set MAX_SOCKETS")?;
        context.set(sys::ZMQ_IO_THREADS, io_threads, "set IO_THREADS")?;
        Ok(context)
    }

    fn set(&self, option: u32, value: i32, action: &'static str) -> Result<(), ZmqError> {
        // SAFETY: the context is alive; the other arguments are integers.
        let rc = unsafe { sys::zmq_ctx_set(self.0.0, option as c_int, value) };
        if rc == -1 { Err(ZmqError::system(action, last_error())) } else { Ok(()) }
    }

    /// A socket of this context; `kind` is one of the `ZMQ_PUSH` constants.
    pub(super) fn socket(&self, kind: u32) -> Result<Socket, zmq::Error> {
        // SAFETY: the context is alive; null is checked below.
        let raw = unsafe { sys::zmq_socket(self.0.0, kind as c_int) };
        if raw.is_null() {
            return Err(last_error());
        }
        // SAFETY: the pointer was just made by zmq_socket and nobody else owns it. The contract of `from_raw` names
        // `into_raw` as the source, which yields the same kind of pointer.
        Ok(Socket { socket: unsafe { zmq::Socket::from_raw(raw) }, _context: self.clone() })
    }
}

/// A socket that keeps its context alive. Fields drop in this order: the socket is closed before the context can end.
pub(super) struct Socket {
    socket: zmq::Socket,
    _context: ZmqContext,
}

impl Deref for Socket {
    type Target = zmq::Socket;
    fn deref(&self) -> &zmq::Socket {
        &self.socket
    }
}
