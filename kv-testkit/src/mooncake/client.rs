//! The initiator.

use std::io::{self, Read as _, Write as _};
use std::net::{Shutdown, TcpStream, ToSocketAddrs};
use std::time::Duration;

use mooncake_wire::handshake::{self, HEAD_LEN, MAX_LEN};
use mooncake_wire::{Kind, Opcode, Request, STATUS_LEN, Status};
use serde_json::Value;

/// Only hangs end here.
const PATIENCE: Duration = Duration::from_secs(30);

fn open(at: impl ToSocketAddrs) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(at)?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}

fn invalid(what: impl std::fmt::Display) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what.to_string())
}

/// Send these bytes to a port, close our half, and return all that comes back until the peer closes.
pub fn raw(at: impl ToSocketAddrs, bytes: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = open(at)?;
    stream.write_all(bytes)?;
    stream.shutdown(Shutdown::Write)?;
    let mut out = Vec::new();
    stream.read_to_end(&mut out)?;
    Ok(out)
}

/// Ask the handshake port of `session`: the kind of its answer, and the answer. Without a kind, in the form before 2025.
pub fn ask(session: &str, kind: Option<Kind>, json: &str) -> io::Result<(Option<Kind>, Value)> {
    let mut stream = open(session)?;
    stream.write_all(&handshake::frame(kind, json.as_bytes()))?;
    let mut head = [0; HEAD_LEN];
    stream.read_exact(&mut head)?;
    let mut body = vec![0; handshake::body_len(head, MAX_LEN).map_err(invalid)?];
    stream.read_exact(&mut body)?;
    let (kind, json) = handshake::split(&body).ok_or_else(|| invalid("an empty answer"))?;
    Ok((kind, serde_json::from_slice(json)?))
}

/// The descriptor of the engine `session`, as it says it.
pub fn describe(session: &str) -> io::Result<Value> {
    Ok(ask(session, Some(Kind::Metadata), handshake::ASK)?.1)
}

/// A connection to a data port.
pub struct MooncakeClient {
    stream: TcpStream,
    /// Ask for statuses (version 2).
    pub acknowledged: bool,
}

impl MooncakeClient {
    /// Connect to the data port of the engine `session`.
    pub fn connect(session: &str, acknowledged: bool) -> io::Result<Self> {
        let said = describe(session)?;
        let port = said["tcp_data_port"].as_u64().and_then(|p| u16::try_from(p).ok());
        let host = session.rsplit_once(':').map_or(session, |(host, _)| host);
        let stream = open((host, port.ok_or_else(|| invalid(format!("no data port in {said}")))?))?;
        Ok(Self { stream, acknowledged })
    }

    /// Send any bytes.
    pub fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.write_all(bytes)
    }

    /// A header of `op`.
    pub fn header(&self, op: Opcode, addr: u64, len: u64) -> Vec<u8> {
        Request { op, addr, len, acknowledged: self.acknowledged }.encode().to_vec()
    }

    /// The next status.
    pub fn status(&mut self) -> io::Result<Status> {
        let mut bytes = [0; STATUS_LEN];
        self.stream.read_exact(&mut bytes)?;
        Status::decode(bytes).map_err(invalid)
    }

    /// Read as many bytes as fit.
    pub fn fill(&mut self, into: &mut [u8]) -> io::Result<()> {
        self.stream.read_exact(into)
    }

    /// Write, and return the target's word; version 1 has none.
    pub fn write(&mut self, addr: u64, bytes: &[u8]) -> io::Result<Option<Status>> {
        self.send(&self.header(Opcode::Write, addr, bytes.len() as u64))?;
        self.send(bytes)?;
        if self.acknowledged { self.status().map(Some) } else { Ok(None) }
    }

    /// Read `len` bytes; an error where the target refuses.
    pub fn read(&mut self, addr: u64, len: usize) -> io::Result<Vec<u8>> {
        self.send(&self.header(Opcode::Read, addr, len as u64))?;
        if self.acknowledged {
            let status = self.status()?;
            if status != Status::Ok {
                return Err(invalid(format!("{status:?}")));
            }
        }
        let mut out = vec![0; len];
        self.stream.read_exact(&mut out)?;
        Ok(out)
    }

    /// Whether the target has closed: what comes until then is thrown away.
    pub fn closed(&mut self) -> bool {
        let mut chunk = [0; 4096];
        loop {
            match self.stream.read(&mut chunk) {
                Ok(0) => return true,
                Ok(_) => {}
                Err(e) => return e.kind() == io::ErrorKind::ConnectionReset,
            }
        }
    }
}
