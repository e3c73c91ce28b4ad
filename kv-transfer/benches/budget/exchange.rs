//! The bare exchange of a room over libzmq: 11 frames from decode to prefill, page and metadata row written by
//! `process_vm_writev`, 5 frames back, the waiter woken. No rooms, no checks: what the sockets and wakes cost.

use std::sync::mpsc::{Receiver, channel};

use kv_transfer::tcp::HostArena;

use crate::Result;
use crate::pair::HOST;

/// A PULL socket at a free port, and the port.
pub fn pull(context: &zmq::Context) -> Result<(zmq::Socket, u64)> {
    let socket = context.socket(zmq::PULL)?;
    socket.set_rcvhwm(0)?;
    socket.bind(&format!("tcp://{HOST}:*"))?;
    let bound = socket.get_last_endpoint()?.map_err(|_| "the endpoint is no text")?;
    let port = bound.rsplit(':').next().and_then(|p| p.parse().ok());
    Ok((socket, port.ok_or("no port in the endpoint")?))
}

/// A PUSH socket to that port.
pub fn push(context: &zmq::Context, port: u64) -> Result<zmq::Socket> {
    let socket = context.socket(zmq::PUSH)?;
    socket.set_sndhwm(0)?;
    socket.set_linger(0)?;
    socket.connect(&format!("tcp://{HOST}:{port}"))?;
    Ok(socket)
}

/// Send one message.
pub fn send(socket: &zmq::Socket, frames: &[&[u8]]) -> Result<()> {
    let last = frames.len() - 1;
    for (i, frame) in frames.iter().enumerate() {
        socket.send(*frame, if i < last { zmq::SNDMORE } else { 0 })?;
    }
    Ok(())
}

/// Receive one message into `frames`; how many there were.
pub fn recv(socket: &zmq::Socket, frames: &mut Vec<zmq::Message>) -> Result<usize> {
    let mut n = 0;
    loop {
        if n == frames.len() {
            frames.push(zmq::Message::new());
        }
        socket.recv(&mut frames[n], 0)?;
        n += 1;
        if !frames[n - 1].get_more() {
            return Ok(n);
        }
    }
}

/// A decimal number.
pub fn int(text: &[u8]) -> u64 {
    text.iter().fold(0, |n, c| n * 10 + u64::from(c.wrapping_sub(b'0')))
}

/// Where prefill writes in the bare exchange.
#[derive(Clone, Copy)]
pub struct Target {
    pub pid: i32,
    pub pages: u64,
    pub page: u64,
    pub rows: u64,
    pub row: u64,
}

/// Prefill: serve exchanges until the process ends; `write` writes the first page and row to these numbers.
pub fn serve(pull: &zmq::Socket, push: &zmq::Socket, write: impl Fn(u64, u64) -> Result<()>) -> Result<()> {
    let mut frames = Vec::new();
    let mut index: Vec<i32> = Vec::new();
    loop {
        let n = recv(pull, &mut frames)?;
        if n != 11 {
            return Err(format!("{n} frames").into());
        }
        let room = int(&frames[1]);
        index.clear();
        index.extend(frames[5].as_chunks::<4>().0.iter().map(|b| i32::from_le_bytes(*b)));
        let (page, row) = (index.first().copied().unwrap_or(0) as u64, int(&frames[6]));
        write(page, row)?;
        send(push, &[b"KV_STATUS", room.to_string().as_bytes(), b"4", b"0", b""])?;
    }
}

/// The kernel's copy.
pub fn write(source: &HostArena, to: Target, page: u64, row: u64) -> Result<()> {
    let iov = |base: u64, len: u64| libc::iovec { iov_base: base as *mut libc::c_void, iov_len: len as usize };
    let from = source.as_ptr() as u64;
    let local = [iov(from, to.page), iov(from, to.row)];
    let remote = [iov(to.pages + page * to.page, to.page), iov(to.rows + row * to.row, to.row)];
    // SAFETY: the local segments lie in `source`; the remote ones are the kernel's to check.
    let n = unsafe { libc::process_vm_writev(to.pid, local.as_ptr(), 2, remote.as_ptr(), 2, 0) };
    if n == (to.page + to.row) as isize { Ok(()) } else { Err(std::io::Error::last_os_error().into()) }
}

/// Decode's side of the bare exchange: this thread asks and waits, another one listens.
pub struct Asker {
    push: zmq::Socket,
    done: Receiver<u64>,
}

impl Asker {
    pub fn start(pull: zmq::Socket, push: zmq::Socket) -> Self {
        let (tell, done) = channel();
        std::thread::spawn(move || {
            let mut frames = Vec::new();
            // Ends with the process, or when nobody listens any more.
            while recv(&pull, &mut frames).is_ok_and(|n| n == 5) && tell.send(int(&frames[1])).is_ok() {}
        });
        Self { push, done }
    }

    pub fn ask(&self, room: u64, page: i32, row: u64) -> Result<()> {
        let (room, row) = (room.to_string(), row.to_string());
        let name = b"550e8400-e29b-41d4-a716-446655440000";
        let frames: [&[u8]; 11] = [
            b"KvTcpMsgGuard",
            room.as_bytes(),
            HOST.as_bytes(),
            b"31999",
            name,
            &page.to_le_bytes(),
            row.as_bytes(),
            b"1",
            b"",
            b"0",
            b"0",
        ];
        send(&self.push, &frames)
    }

    /// Sleep until a room is done.
    pub fn wait(&self) -> Result<u64> {
        Ok(self.done.recv_timeout(crate::pair::PATIENCE)?)
    }

    /// One that is done already.
    pub fn another(&self) -> Option<u64> {
        self.done.try_recv().ok()
    }
}
