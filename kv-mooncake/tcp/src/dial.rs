//! Blocking conversations with a peer while it is connected, each with one deadline for all of it.

use std::io::{self, Read as _, Write as _};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use mooncake_wire::handshake::{self, HEAD_LEN, MAX_LEN};
use mooncake_wire::{Descriptor, Kind, Read, STATUS_LEN, Status, session};

/// Why a peer is not to be had.
#[derive(Debug)]
pub(crate) enum DialError {
    /// It does not answer.
    Silent(io::Error),
    /// It answers what cannot be used.
    Odd(String),
}

impl From<io::Error> for DialError {
    fn from(e: io::Error) -> Self {
        Self::Silent(e)
    }
}

fn left(until: Instant) -> io::Result<Duration> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// A connection to one of the addresses of `host`.
pub(crate) fn dial(host: &str, port: u16, until: Instant) -> io::Result<TcpStream> {
    let mut failed = io::Error::other("its name leads to no address");
    for address in (host, port).to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left(until)?) {
            Ok(stream) => return Ok(stream),
            Err(e) => failed = e,
        }
    }
    Err(failed)
}

fn send(stream: &mut TcpStream, bytes: &[u8], until: Instant) -> io::Result<()> {
    stream.set_write_timeout(Some(left(until)?))?;
    stream.write_all(bytes)
}

/// Read all of `into` before `until`, however slowly it comes.
fn fill(stream: &mut TcpStream, mut into: &mut [u8], until: Instant) -> io::Result<()> {
    while !into.is_empty() {
        stream.set_read_timeout(Some(left(until)?))?;
        match stream.read(into) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => into = &mut into[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Ask the engine `name` for its descriptor.
pub(crate) fn describe(name: &str, until: Instant) -> Result<Descriptor, DialError> {
    let (host, port) = session(name).ok_or_else(|| DialError::Odd("no `host:port`".into()))?;
    let mut stream = dial(host, port, until)?;
    send(&mut stream, &handshake::frame(Some(Kind::Metadata), handshake::ASK.as_bytes()), until)?;
    let mut head = [0; HEAD_LEN];
    fill(&mut stream, &mut head, until)?;
    let len = handshake::body_len(head, MAX_LEN).map_err(|e| DialError::Odd(format!("it announces {e}")))?;
    let mut body = vec![0; len];
    fill(&mut stream, &mut body, until)?;
    let Some((Some(Kind::Metadata), json)) = handshake::split(&body) else {
        return Err(DialError::Odd(format!("it answers with a message of type {}, not 1", body[0])));
    };
    let said = Descriptor::parse(json, name).map_err(DialError::Odd)?;
    match said.protocol.as_str() {
        "tcp" => Ok(said),
        other => Err(DialError::Odd(format!("it speaks {other}; this transport speaks tcp alone"))),
    }
}

/// Read one byte of the peer's memory: whoever is behind this connection serves it now.
pub(crate) fn greet(stream: &mut TcpStream, addr: u64, acknowledges: bool, until: Instant) -> Result<(), DialError> {
    send(stream, &Read { addr, len: 1, acknowledged: acknowledges }.encode(), until)?;
    if acknowledges {
        let mut status = [0; STATUS_LEN];
        fill(stream, &mut status, until)?;
        match Status::decode(status) {
            Ok(Status::Ok) => {}
            Ok(other) => return Err(DialError::Odd(format!("it answers a read of what it registered with {other:?}"))),
            Err(e) => return Err(DialError::Odd(format!("on its data port, {e}"))),
        }
    }
    Ok(fill(stream, &mut [0], until)?)
}
