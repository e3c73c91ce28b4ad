//! How a connection begins: greeting, READY, and what commands mean afterwards. No I/O.

use super::codec::{COMMAND, put_frame};

/// Bytes of a greeting.
pub(super) const GREETING: usize = 64;

/// Which end we are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Push,
    Pull,
}

impl End {
    fn name(self) -> &'static [u8] {
        match self {
            Self::Push => b"PUSH",
            Self::Pull => b"PULL",
        }
    }

    fn other(self) -> Self {
        match self {
            Self::Push => Self::Pull,
            Self::Pull => Self::Push,
        }
    }
}

/// Our greeting: version 3.0, NULL.
pub(super) fn greeting() -> [u8; GREETING] {
    let mut bytes = [0; GREETING];
    (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, 3);
    bytes[12..16].copy_from_slice(b"NULL");
    bytes
}

/// Check the first bytes of a peer's greeting, as many as are there; `Ok(false)`: so far so good.
pub(super) fn check_greeting(bytes: &[u8]) -> Result<bool, String> {
    let wrong = |at: usize, value: u8| bytes.get(at).is_some_and(|b| *b != value);
    if wrong(0, 0xff) || bytes.get(9).is_some_and(|b| b & 1 == 0) {
        return Err("it does not speak ZeroMQ's protocol".to_owned());
    }
    if let Some(version) = bytes.get(10).filter(|v| **v < 3) {
        return Err(format!("it speaks version {version} of ZeroMQ's protocol, not 3"));
    }
    let Some(mechanism) = bytes.get(12..32) else { return Ok(false) };
    let name = mechanism.split(|b| *b == 0).next().unwrap_or_default();
    if name != b"NULL" {
        return Err(format!("it asks for the security mechanism {}", String::from_utf8_lossy(name)));
    }
    Ok(bytes.len() >= GREETING)
}

/// Our READY, as a frame.
pub(super) fn ready(end: End) -> Vec<u8> {
    let mut body = b"\x05READY".to_vec();
    for (name, value) in [(&b"Socket-Type"[..], end.name()), (b"Identity", b"")] {
        body.push(name.len() as u8);
        body.extend_from_slice(name);
        body.extend_from_slice(&(value.len() as u32).to_be_bytes());
        body.extend_from_slice(value);
    }
    let mut out = Vec::with_capacity(body.len() + 2);
    put_frame(&mut out, COMMAND, &body);
    out
}

/// What a command means.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Command {
    /// The handshake is over.
    Ready,
    /// Answer with these bytes, a PONG frame.
    Pong(Vec<u8>),
    Other,
}

/// Read a command's body. `up`: the handshake is over already.
pub(super) fn command(end: End, up: bool, body: &[u8]) -> Result<Command, String> {
    let malformed = || "it sent a malformed command".to_owned();
    let (&len, rest) = body.split_first().ok_or_else(malformed)?;
    let (name, data) = rest.split_at_checked(usize::from(len)).ok_or_else(malformed)?;
    match name {
        b"READY" if !up => {
            let socket_type = property(data, b"socket-type").map_err(|()| malformed())?.unwrap_or_default();
            if socket_type != end.other().name() {
                let kind = String::from_utf8_lossy(&socket_type[..socket_type.len().min(32)]);
                return Err(format!("it is a {kind:?} socket, where a {:?} is called for", end.other()));
            }
            Ok(Command::Ready)
        }
        b"ERROR" => {
            let reason = data.get(1..).unwrap_or_default();
            Err(format!("it refused: {}", String::from_utf8_lossy(&reason[..reason.len().min(255)])))
        }
        b"PING" if up => {
            // Two bytes of time to live, then at most 16 of context.
            let context = data.get(2..).filter(|c| c.len() <= 16).ok_or_else(malformed)?;
            let mut out = Vec::new();
            put_frame(&mut out, COMMAND, &[b"\x04PONG", context].concat());
            Ok(Command::Pong(out))
        }
        _ if up => Ok(Command::Other),
        _ => Err("it sent something else than READY".to_owned()),
    }
}

/// The value of a property; names have no case.
fn property<'a>(mut data: &'a [u8], wanted: &[u8]) -> Result<Option<&'a [u8]>, ()> {
    while let Some((&len, rest)) = data.split_first() {
        let (name, rest) = rest.split_at_checked(usize::from(len)).ok_or(())?;
        let (len, rest) = rest.split_first_chunk::<4>().ok_or(())?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize).ok_or(())?;
        if name.eq_ignore_ascii_case(wanted) {
            return Ok(Some(value));
        }
        data = rest;
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn both_ends_accept_each_other() {
        let hello = greeting();
        assert_eq!(check_greeting(&hello), Ok(true));
        assert!((0..GREETING).all(|n| check_greeting(&hello[..n]) == Ok(false)));
        for end in [End::Push, End::Pull] {
            let ready = ready(end.other());
            assert_eq!(command(end, false, &ready[2..]), Ok(Command::Ready));
            assert!(command(end.other(), false, &ready[2..]).unwrap_err().contains("socket"), "the same kind");
        }
    }

    #[test]
    fn others_are_told_apart() {
        assert!(check_greeting(b"GET / HTTP/1.1").unwrap_err().contains("does not speak"));
        let mut old = greeting();
        old[10] = 1;
        assert!(check_greeting(&old[..11]).unwrap_err().contains("version 1"));
        let mut curve = greeting();
        curve[12..17].copy_from_slice(b"CURVE");
        assert!(check_greeting(&curve).unwrap_err().contains("CURVE"));
        assert_eq!(
            command(End::Pull, true, b"\x04PING\x00\x0aabc"),
            Ok(Command::Pong(b"\x04\x08\x04PONGabc".to_vec()))
        );
        assert!(command(End::Push, false, b"\x05ERROR\x03no!").unwrap_err().ends_with("no!"));
        assert_eq!(command(End::Push, true, b"\x09SUBSCRIBE"), Ok(Command::Other));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(noise in prop::collection::vec(any::<u8>(), 0..120), up: bool, push: bool) {
            let _ = check_greeting(&noise);
            let end = if push { End::Push } else { End::Pull };
            let _ = command(end, up, &noise);
            let _ = command(end, up, &[b"\x05READY", &noise[..]].concat());
        }
    }
}
