//! The writing side of an accepted connection: any thread may answer on it.

use std::io::{self, Write};
use std::net::{Shutdown, TcpStream};
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex, PoisonError};

use crate::sys::Epoll;

#[derive(Debug, Default)]
struct Queue {
    bytes: Vec<u8>,
    sent: usize,
    closed: bool,
}

/// Writes at once from whichever thread has the answer: handing it to the connection's own worker would cost the wake
/// of a sleeping thread. What does not fit the socket is kept, and that worker sends it later.
#[derive(Debug)]
pub(crate) struct ConnOut {
    pub sock: TcpStream,
    ep: Arc<Epoll>,
    token: u64,
    limit: usize,
    queue: Mutex<Queue>,
}

impl ConnOut {
    /// `limit`: bytes kept for a peer that does not read; beyond it the connection is given up.
    pub fn new(sock: TcpStream, ep: Arc<Epoll>, token: u64, limit: usize) -> Self {
        Self { sock, ep, token, limit, queue: Mutex::default() }
    }

    /// Send these whole frames, now or as soon as the socket has room. Errors show on the reading side.
    pub fn send(&self, frames: &[u8]) {
        let mut q = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        if q.closed || frames.is_empty() {
            return;
        }
        let mut rest = frames;
        if q.bytes.is_empty() {
            rest = match (&self.sock).write(frames) {
                Ok(n) => &frames[n..],
                Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => frames,
                Err(_) => return self.give_up(&mut q),
            };
        }
        if rest.is_empty() {
            return;
        }
        if q.bytes.len() - q.sent + rest.len() > self.limit {
            tracing::warn!("a peer does not read its acknowledgements; connection closed");
            return self.give_up(&mut q);
        }
        let first = q.bytes.is_empty();
        q.bytes.extend_from_slice(rest);
        if first && self.ep.modify(self.sock.as_raw_fd(), self.token, true, true).is_err() {
            self.give_up(&mut q);
        }
    }

    /// The socket has room again. For the connection's worker.
    pub fn flush(&self) {
        let mut q = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        while q.sent < q.bytes.len() {
            match (&self.sock).write(&q.bytes[q.sent..]) {
                Ok(n) => q.sent += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return,
                Err(_) => return self.give_up(&mut q),
            }
        }
        *q = Queue { closed: q.closed, ..Queue::default() };
        if !q.closed {
            let _ = self.ep.modify(self.sock.as_raw_fd(), self.token, true, false);
        }
    }

    /// The owner then reads an end of stream and closes in order.
    fn give_up(&self, q: &mut Queue) {
        *q = Queue { closed: true, ..Queue::default() };
        let _ = self.sock.shutdown(Shutdown::Both);
    }

    /// End the connection: nothing is sent any more. For the connection's worker.
    pub fn close(&self) {
        self.ep.remove(self.sock.as_raw_fd());
        let mut q = self.queue.lock().unwrap_or_else(PoisonError::into_inner);
        self.give_up(&mut q);
    }
}
