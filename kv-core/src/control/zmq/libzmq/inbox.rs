//! The receiving half: one PULL socket per manager.

use std::os::fd::RawFd;
use std::time::{Duration, Instant};

use bytes::Bytes;
use smallvec::SmallVec;
use zmq_sys as sys;

use super::ZmqContext;
use super::context::Socket;
use crate::control::Multipart;
use crate::control::zmq::{BACKLOG, InboxCounters, Ready, ZmqError, resolve};
use crate::limits::Limits;
use crate::net::Endpoint;

/// Messages waiting per connection. SGLang has no bound (RCVHWM=0); here a full queue closes the TCP window, so the
/// sender's own bounded queue fills and **its** `send` reports the stall. Nothing is lost, and memory stays bounded.
const RCVHWM: i32 = 1000;

/// Frames from this size on keep libzmq's buffer, smaller ones are copied. libzmq cuts small frames out of 8 KiB read
/// buffers; keeping one would pin all of it.
const KEEP_FROM: usize = 4096;

/// The PULL socket of a manager. Owned by one thread.
pub(in crate::control::zmq) struct LibzmqInbox {
    socket: Socket,
    max_frames: usize,
    max_bytes: usize,
    // The message being received. libzmq hands over whole messages, so it is empty between calls unless libzmq breaks
    // that promise; then the rest is joined by the next call rather than taken for a new message.
    partial: Multipart,
    partial_bytes: usize,
    dropping: bool,
    counters: InboxCounters,
}

impl LibzmqInbox {
    /// See [`ZmqSockets::bind`](crate::control::zmq::ZmqSockets::bind).
    pub fn bind(context: &ZmqContext, host: &str, limits: &Limits) -> Result<(Self, Endpoint), ZmqError> {
        let named = Endpoint::new(host, 0);
        let refused = |reason: String| ZmqError::Bind { host: named.host().to_owned(), reason };
        let target = resolve::bind_target(named.host()).map_err(refused)?;

        let socket = context.socket(sys::ZMQ_PULL).map_err(|e| ZmqError::system("create a PULL socket", e))?;
        let frame_bytes = i64::try_from(limits.max_frame_bytes).unwrap_or(i64::MAX);
        set_options(&socket, target.ipv6, frame_bytes).map_err(|e| ZmqError::system("set PULL options", e))?;
        socket.bind(&format!("tcp://{}:*", target.text)).map_err(|e| refused(e.to_string()))?;

        let bound = socket.get_last_endpoint().map_err(|e| ZmqError::system("read the bound port", e))?;
        let port = bound.ok().as_deref().and_then(|uri| uri.rsplit_once(':')?.1.parse().ok());
        let port = port.ok_or_else(|| refused("the bound port is not in the endpoint".to_owned()))?;
        let endpoint = Endpoint::new(named.host(), port);
        let inbox = Self {
            socket,
            max_frames: limits.max_frames,
            max_bytes: limits.max_message_bytes,
            partial: Multipart::new(),
            partial_bytes: 0,
            dropping: false,
            counters: InboxCounters::default(),
        };
        Ok((inbox, endpoint))
    }

    /// Append at most `max` whole messages to `out`; returns how many. Never blocks.
    ///
    /// A message over a limit is taken from the socket to its last frame, dropped and counted (F61); it counts towards
    /// `max`, so a flood of them cannot hold the caller.
    ///
    /// # Errors
    /// [`ZmqError::System`]; the socket is then useless.
    pub fn recv(&mut self, max: usize, out: &mut Vec<Multipart>) -> Result<usize, ZmqError> {
        let mut taken = 0;
        let mut delivered = 0;
        let mut frame = zmq::Message::new();
        while taken < max {
            match self.socket.recv(&mut frame, zmq::DONTWAIT) {
                Ok(()) => {}
                Err(zmq::Error::EAGAIN) => break,
                Err(zmq::Error::EINTR) => continue,
                Err(e) => return Err(ZmqError::system("receive", e)),
            }
            let more = frame.get_more();
            self.take(&mut frame);
            if more {
                continue;
            }
            taken += 1;
            self.partial_bytes = 0;
            if std::mem::take(&mut self.dropping) {
                continue;
            }
            self.counters.messages += 1;
            delivered += 1;
            out.push(std::mem::take(&mut self.partial));
        }
        Ok(delivered)
    }

    fn take(&mut self, frame: &mut zmq::Message) {
        if self.dropping {
            return;
        }
        self.partial_bytes = self.partial_bytes.saturating_add(frame.len());
        if self.partial.len() >= self.max_frames {
            self.counters.too_many_frames += 1;
        } else if self.partial_bytes > self.max_bytes {
            self.counters.too_many_bytes += 1;
        } else {
            self.partial.push(into_bytes(frame));
            return;
        }
        self.dropping = true;
        self.partial.clear();
    }

    /// See [`ZmqInbox::wait`](crate::control::zmq::ZmqInbox::wait). Timeouts are rounded up to milliseconds.
    pub fn wait(&mut self, fds: &[RawFd], timeout: Option<Duration>) -> Result<Ready, ZmqError> {
        let mut items: SmallVec<[zmq::PollItem<'_>; 6]> = SmallVec::new();
        items.push(self.socket.as_poll_item(zmq::POLLIN));
        items.extend(fds.iter().map(|&fd| zmq::PollItem::from_fd(fd, zmq::POLLIN)));
        let deadline = timeout.and_then(|t| Instant::now().checked_add(t));
        loop {
            let left = match deadline {
                None => -1,
                Some(at) => millis_rounded_up(at.saturating_duration_since(Instant::now())),
            };
            match zmq::poll(&mut items, left) {
                Ok(_) => break,
                Err(zmq::Error::EINTR) => {}
                Err(e) => return Err(ZmqError::system("poll", e)),
            }
        }
        let ready = |item: &zmq::PollItem<'_>| item.is_readable() || item.is_error();
        let inbox = items.first().is_some_and(ready);
        let fds = fds.iter().zip(&items[1..]).filter(|(_, item)| ready(item)).map(|(&fd, _)| fd).collect();
        Ok(Ready { inbox, fds })
    }

    /// What was received and refused so far.
    pub fn counters(&self) -> InboxCounters {
        self.counters
    }
}

fn set_options(socket: &Socket, ipv6: bool, max_frame_bytes: i64) -> Result<(), zmq::Error> {
    socket.set_ipv6(ipv6)?;
    socket.set_rcvhwm(RCVHWM)?;
    socket.set_maxmsgsize(max_frame_bytes)?;
    socket.set_linger(0)?;
    socket.set_backlog(BACKLOG)?;
    super::link::set_keepalive(socket)
}

/// The frame's bytes, leaving an empty frame behind.
fn into_bytes(frame: &mut zmq::Message) -> Bytes {
    struct Owner(zmq::Message);
    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }
    if frame.len() < KEEP_FROM {
        Bytes::copy_from_slice(frame)
    } else {
        Bytes::from_owner(Owner(std::mem::replace(frame, zmq::Message::new())))
    }
}

fn millis_rounded_up(d: Duration) -> i64 {
    i64::try_from(d.as_nanos().div_ceil(1_000_000)).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_round_up() {
        assert_eq!(millis_rounded_up(Duration::ZERO), 0);
        assert_eq!(millis_rounded_up(Duration::from_nanos(1)), 1);
        assert_eq!(millis_rounded_up(Duration::from_millis(7)), 7);
        assert_eq!(millis_rounded_up(Duration::from_micros(7001)), 8);
    }
}
