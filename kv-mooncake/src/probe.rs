//! Asking a peer for its descriptor, before the library does.
//!
//! The library throws when a member of a peer's descriptor has another type than it expects, and that ends our process
//! (0.3.13.post1). So what it would read is read here first, and looked at strictly: [`mooncake_wire`].

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

pub(crate) use mooncake_wire::{Descriptor as Described, session};
use mooncake_wire::{Kind, handshake};

/// Why there is no descriptor.
#[derive(Debug)]
pub(crate) enum ProbeError {
    /// It does not answer.
    Silent(io::Error),
    /// It answers what cannot be used.
    Odd(String),
}

/// Ask `name` for its descriptor, for at most `timeout`.
pub(crate) fn describe(name: &str, timeout: Duration) -> Result<Described, ProbeError> {
    let (host, port) = session(name).ok_or_else(|| ProbeError::Odd("no `host:port`".into()))?;
    let until = Instant::now() + timeout;
    let body = ask(host, port, until)?;
    Described::parse(&body, name).and_then(acknowledging).map_err(ProbeError::Odd)
}

fn left(until: Instant) -> Result<Duration, ProbeError> {
    let left = until.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ProbeError::Silent(io::ErrorKind::TimedOut.into())) } else { Ok(left) }
}

fn ask(host: &str, port: u16, until: Instant) -> Result<Vec<u8>, ProbeError> {
    let mut failed = io::Error::other("its name leads to no address");
    let addresses = (host, port).to_socket_addrs().map_err(ProbeError::Silent)?;
    for address in addresses {
        match TcpStream::connect_timeout(&address, left(until)?) {
            Ok(stream) => return exchange(stream, until),
            Err(e) => failed = e,
        }
    }
    Err(ProbeError::Silent(failed))
}

fn exchange(mut stream: TcpStream, until: Instant) -> Result<Vec<u8>, ProbeError> {
    let request = handshake::frame(Some(Kind::Metadata), handshake::ASK.as_bytes());
    stream.set_write_timeout(Some(left(until)?)).map_err(ProbeError::Silent)?;
    stream.write_all(&request).map_err(ProbeError::Silent)?;
    let mut head = [0; handshake::HEAD_LEN];
    fill(&mut stream, &mut head, until)?;
    let len = handshake::body_len(head, handshake::MAX_LEN);
    let mut body = vec![0; len.map_err(|e| ProbeError::Odd(format!("it announces {e}")))?];
    fill(&mut stream, &mut body, until)?;
    match handshake::split(&body) {
        Some((Some(Kind::Metadata), json)) => Ok(json.to_vec()),
        _ => {
            Err(ProbeError::Odd(format!("it answers with a message of type {}, not {}", body[0], Kind::Metadata as u8)))
        }
    }
}

/// Read all of `into` before `until`, however slowly it comes.
fn fill(stream: &mut TcpStream, mut into: &mut [u8], until: Instant) -> Result<(), ProbeError> {
    while !into.is_empty() {
        stream.set_read_timeout(Some(left(until)?)).map_err(ProbeError::Silent)?;
        match stream.read(into) {
            Ok(0) => return Err(ProbeError::Silent(io::ErrorKind::UnexpectedEof.into())),
            Ok(n) => into = &mut into[n..],
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(ProbeError::Silent(e)),
        }
    }
    Ok(())
}

/// Nothing is proven about writes that nobody acknowledges.
fn acknowledging(said: Described) -> Result<Described, String> {
    if said.protocol == "tcp" && !said.acknowledges() {
        return Err(format!(
            "it speaks version {} of Mooncake's TCP wire, without acknowledgements (0.3.12 has them), so nothing could be \
             proven about writes to it",
            said.version
        ));
    }
    Ok(said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_without_acknowledgements_is_refused() {
        let said = |version| acknowledging(Described::tcp("h:9", None, 1, version, []));
        for version in [0, 1] {
            let error = said(version).unwrap_err();
            assert!(
                error.contains("without acknowledgements") && error.contains(&format!("version {version}")),
                "{error}"
            );
        }
        assert!(said(2).is_ok());
    }
}
