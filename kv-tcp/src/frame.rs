//! Frames: `u32 length | u8 kind | 3 zero bytes | body`, little-endian.
//!
//! | kind | from | body |
//! |---|---|---|
//! | HELLO | source | who I am, whom I want, what this connection is for |
//! | WELCOME | target | verdict, whether direct copies work, and which process it is |
//! | PULL | source | op + plan with source addresses: the target copies |
//! | WRITE | source | op + stripe + plan, followed by the stripe's bytes outside the frame |
//! | ACK | target | op + how it ended: nothing of it is in progress any more |
//! | BYE | both | source: this connection ends in order. Target: every copy has ended and the session is void |

use kv_core::ids::ProcessGeneration;

use crate::blob::{Key, MAX_NAME, VERSION};
use crate::codec::{Malformed, Put, Reader};
use kv_core::host::{HOST_IDENTITY_LEN, HostIdentity};

/// Bytes before the body.
pub(crate) const HEAD: usize = 8;
/// Longest text in a WELCOME or ACK, bytes.
const MAX_TEXT: usize = 512;
/// No HELLO, WELCOME, ACK or BYE is longer.
pub(crate) const MAX_SMALL: usize = 1024;
const MAGIC: &[u8; 6] = b"KVTCP\n";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Hello = 1,
    Welcome = 2,
    Pull = 3,
    Write = 4,
    Ack = 5,
    Bye = 6,
}

/// Length and kind off the front of `data`; `None` while they are not all there.
pub(crate) fn head(data: &[u8]) -> Result<Option<(Kind, usize)>, Malformed> {
    let Some(head) = data.first_chunk::<HEAD>() else { return Ok(None) };
    let kind = match head[4..] {
        [1, 0, 0, 0] => Kind::Hello,
        [2, 0, 0, 0] => Kind::Welcome,
        [3, 0, 0, 0] => Kind::Pull,
        [4, 0, 0, 0] => Kind::Write,
        [5, 0, 0, 0] => Kind::Ack,
        [6, 0, 0, 0] => Kind::Bye,
        _ => return Err(Malformed("unknown frame")),
    };
    Ok(Some((kind, u32::from_le_bytes([head[0], head[1], head[2], head[3]]) as usize)))
}

/// A whole small frame off the front of `data`: kind, body, bytes used.
#[allow(clippy::type_complexity)] // a triple, taken apart at once
pub(crate) fn small(data: &[u8]) -> Result<Option<(Kind, &[u8], usize)>, Malformed> {
    let Some((kind, len)) = head(data)? else { return Ok(None) };
    if len > MAX_SMALL {
        return Err(Malformed("frame too long"));
    }
    Ok(data.get(HEAD..HEAD + len).map(|body| (kind, body, HEAD + len)))
}

/// Append a frame whose body `fill` writes.
pub(crate) fn put(out: &mut Vec<u8>, kind: Kind, fill: impl FnOnce(&mut Vec<u8>)) {
    let at = out.len();
    out.put(&[0, 0, 0, 0, kind as u8, 0, 0, 0]);
    fill(out);
    let len = (out.len() - at - HEAD) as u32;
    out[at..at + 4].copy_from_slice(&len.to_le_bytes());
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// Open a session; the connection then carries requests and acks of this lane.
    Open {
        /// Number of the lane within the source's transport.
        lane: u32,
    },
    /// Requests and acks of one more lane.
    Lane {
        /// As above.
        lane: u32,
    },
    /// Bulk data of the session.
    Data,
    /// End the session: answered when nothing of it can write any more.
    Fence,
}

/// The first frame on a connection.
#[derive(Clone, Debug)]
pub(crate) struct Hello {
    pub purpose: Purpose,
    /// Whom the source wants: a process generation, not an address.
    pub target: String,
    pub admission: Key,
    /// Ties the connections of a session together; nobody else knows it.
    pub session: Key,
    pub source: String,
    /// The source's process, as control messages name it.
    pub process: ProcessGeneration,
    pub host: HostIdentity,
    /// The source would like the target to copy directly.
    pub direct: bool,
    /// Where 32 random bytes lie in the source's memory, and what they are: a target that reads them there copies from
    /// the right process.
    pub nonce_addr: u64,
    pub nonce: [u8; 32],
}

impl Hello {
    pub fn encode(&self, out: &mut Vec<u8>) {
        put(out, Kind::Hello, |out| {
            out.put(MAGIC);
            out.put_u16(VERSION);
            let (purpose, lane) = match self.purpose {
                Purpose::Open { lane } => (0, lane),
                Purpose::Lane { lane } => (1, lane),
                Purpose::Data => (2, 0),
                Purpose::Fence => (3, 0),
            };
            out.put_u8(purpose);
            out.put_u32(lane);
            out.put_text(&self.target, MAX_NAME);
            out.put(&self.admission.0);
            out.put(&self.session.0);
            out.put_text(&self.source, MAX_NAME);
            out.put(&self.process.0.to_le_bytes());
            out.put(&self.host.to_bytes());
            out.put_u8(self.direct.into());
            out.put_u64(self.nonce_addr);
            out.put(&self.nonce);
        });
    }

    pub fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader(body);
        if &r.array::<6>()? != MAGIC {
            return Err(Malformed("not this protocol"));
        }
        if r.u16()? != VERSION {
            return Err(Malformed("another version"));
        }
        let (purpose, lane) = (r.u8()?, r.u32()?);
        let hello = Self {
            purpose: match purpose {
                0 => Purpose::Open { lane },
                1 => Purpose::Lane { lane },
                2 => Purpose::Data,
                3 => Purpose::Fence,
                _ => return Err(Malformed("unknown purpose")),
            },
            target: r.text(MAX_NAME)?.to_owned(),
            admission: Key(r.array()?),
            session: Key(r.array()?),
            source: r.text(MAX_NAME)?.to_owned(),
            process: ProcessGeneration(u128::from_le_bytes(r.array()?)),
            host: HostIdentity::from_bytes(r.array()?),
            direct: r.u8()? == 1,
            nonce_addr: r.u64()?,
            nonce: r.array()?,
        };
        r.end()?;
        Ok(hello)
    }
}

const _: () = assert!(6 + 2 + 5 + 2 * (2 + MAX_NAME) + 32 + 16 + HOST_IDENTITY_LEN + 1 + 8 + 32 <= MAX_SMALL);

/// The answer to a HELLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Go ahead; the target copies directly.
    Direct,
    /// Go ahead over TCP.
    Tcp,
    /// Another process generation answers at this address.
    NotMe,
    /// Not admitted, or a limit is reached.
    Denied,
    /// The session does not exist (any more).
    NoSession,
    /// The session is void and nothing of it can write any more.
    Fenced,
}

/// Verdict and explanation, and which process answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Welcome {
    pub verdict: Verdict,
    pub text: String,
    /// The process that answers, when it takes the connection in: so it is not only its metadata that says so.
    pub host: Option<HostIdentity>,
}

impl Welcome {
    pub fn encode(&self, out: &mut Vec<u8>) {
        put(out, Kind::Welcome, |out| {
            out.put_u8(match self.verdict {
                Verdict::Direct => 0,
                Verdict::Tcp => 1,
                Verdict::NotMe => 2,
                Verdict::Denied => 3,
                Verdict::NoSession => 4,
                Verdict::Fenced => 5,
            });
            out.put_text(&self.text, MAX_TEXT);
            if let Some(host) = &self.host {
                out.put(&host.to_bytes());
            }
        });
    }

    pub fn decode(body: &[u8]) -> Result<Self, Malformed> {
        let mut r = Reader(body);
        let verdict = match r.u8()? {
            0 => Verdict::Direct,
            1 => Verdict::Tcp,
            2 => Verdict::NotMe,
            3 => Verdict::Denied,
            4 => Verdict::NoSession,
            5 => Verdict::Fenced,
            _ => return Err(Malformed("unknown verdict")),
        };
        let text = r.text(MAX_TEXT)?.to_owned();
        let host = if r.0.is_empty() { None } else { Some(HostIdentity::from_bytes(r.array()?)) };
        r.end()?;
        Ok(Self { verdict, text, host })
    }
}

/// How an op ended at the target. Whatever it is, nothing of the op reads or writes any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Done,
    Refused,
    Failed,
}

/// Append an ACK.
pub(crate) fn put_ack(out: &mut Vec<u8>, op: u64, status: Status, text: &str) {
    put(out, Kind::Ack, |out| {
        out.put_u64(op);
        out.put_u8(status as u8);
        out.put_text(text, MAX_TEXT);
    });
}

/// Read an ACK.
pub(crate) fn ack(body: &[u8]) -> Result<(u64, Status, &str), Malformed> {
    let mut r = Reader(body);
    let op = r.u64()?;
    let status = match r.u8()? {
        0 => Status::Done,
        1 => Status::Refused,
        2 => Status::Failed,
        _ => return Err(Malformed("unknown status")),
    };
    let text = r.text(MAX_TEXT)?;
    r.end()?;
    Ok((op, status, text))
}

/// What comes before the plan in PULL and WRITE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpHead {
    pub op: u64,
    /// Into how many stripes the op is cut.
    pub stripes: u32,
    /// First byte of this stripe, counted along the plan.
    pub start: u64,
    /// Bytes of this stripe.
    pub len: u64,
}

impl OpHead {
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.put_u64(self.op);
        out.put_u32(self.stripes);
        out.put_u64(self.start);
        out.put_u64(self.len);
    }

    pub fn decode(r: &mut Reader<'_>) -> Result<Self, Malformed> {
        let head = Self { op: r.u64()?, stripes: r.u32()?, start: r.u64()?, len: r.u64()? };
        if head.stripes == 0 { Err(Malformed("no stripes")) } else { Ok(head) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn hello() -> Hello {
        Hello {
            purpose: Purpose::Lane { lane: 9 },
            target: "d".into(),
            admission: Key([1; 16]),
            session: Key([2; 16]),
            source: "p".into(),
            process: ProcessGeneration(6),
            host: HostIdentity { boot_id: [1; 16], pid_ns: 2, pid: 3, start: 4, uid: 5 },
            direct: true,
            nonce_addr: 77,
            nonce: [8; 32],
        }
    }

    #[test]
    fn hello_round_trip() {
        let mut out = Vec::new();
        hello().encode(&mut out);
        let (kind, body, used) = small(&out).unwrap().unwrap();
        assert_eq!((kind, used), (Kind::Hello, out.len()));
        let h = Hello::decode(body).unwrap();
        assert_eq!((h.purpose, h.target.as_str(), h.nonce_addr), (Purpose::Lane { lane: 9 }, "d", 77));
        for n in 0..body.len() {
            assert!(Hello::decode(&body[..n]).is_err());
            assert!(small(&out[..n]).unwrap().is_none());
        }
    }

    #[test]
    fn long_texts_are_cut_at_a_character() {
        let mut out = Vec::new();
        put_ack(&mut out, 5, Status::Refused, &"ü".repeat(400));
        let (_, body, _) = small(&out).unwrap().unwrap();
        let (op, status, text) = ack(body).unwrap();
        assert_eq!((op, status, text.len()), (5, Status::Refused, 512));
    }

    #[test]
    fn a_length_beyond_the_limit_is_refused_before_its_body_is_there() {
        let mut bytes = vec![0; HEAD];
        bytes[..4].copy_from_slice(&u32::MAX.to_le_bytes());
        bytes[4] = Kind::Ack as u8;
        assert_eq!(small(&bytes), Err(Malformed("frame too long")));
    }

    proptest! {
        #[test]
        fn garbage_never_panics(noise in prop::collection::vec(any::<u8>(), 0..300), at: usize, v: u8) {
            let _ = head(&noise);
            let _ = small(&noise);
            let _ = Hello::decode(&noise);
            let _ = Welcome::decode(&noise);
            let _ = ack(&noise);
            let _ = OpHead::decode(&mut Reader(&noise));
            let mut near = Vec::new();
            hello().encode(&mut near);
            let at = HEAD + at % (near.len() - HEAD);
            near[at] = v;
            let _ = Hello::decode(&near[HEAD..]);
        }
    }
}
