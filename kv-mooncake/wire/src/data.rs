//! The data port: requests and statuses.
//!
//! | | version 1 | version 2 (`tcp_proto_version` of the target's descriptor) |
//! |---|---|---|
//! | WRITE | header, payload; no answer | header, payload; a status when the last byte is in memory |
//! | READ | header; the payload comes back | header; a status, then the payload |
//! | a range that is not in one registered buffer, or empty | the target closes | status 1, then it closes |
//!
//! A target takes the requests of a connection in the order of its stream. So a client may send the next one at once, and
//! statuses come in the same order.

/// Bytes of a request's header.
pub const HEADER_LEN: usize = 24;
/// Bytes of a status.
pub const STATUS_LEN: usize = 8;
/// The upper half of every status: `MCTV`.
pub const STATUS_MAGIC: u32 = 0x4D43_5456;
/// In an opcode: a status is asked for (version 2).
const ACKNOWLEDGED: u8 = 0x80;

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Opcode {
    /// The target sends of its memory.
    Read,
    /// The target receives into its memory.
    Write,
}

/// A request: 24 bytes, of which the last 7 mean nothing (the library sends what lay on its stack).
///
/// | bytes | what |
/// |---|---|
/// | 0..8 | how many bytes, little-endian |
/// | 8..16 | address in the target's process, little-endian |
/// | 16 | 0 READ, 1 WRITE; 0x80 on top: with a status |
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// What to do.
    pub op: Opcode,
    /// First byte's address in the target's process.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// A status is asked for (version 2).
    pub acknowledged: bool,
}

/// Shorthand for a [`Request`] that writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Write {
    /// First byte's address in the target's process.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// A status is asked for (version 2).
    pub acknowledged: bool,
}

/// Shorthand for a [`Request`] that reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Read {
    /// First byte's address in the target's process.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// A status is asked for (version 2).
    pub acknowledged: bool,
}

impl Write {
    /// Its header.
    pub const fn encode(self) -> [u8; HEADER_LEN] {
        Request { op: Opcode::Write, addr: self.addr, len: self.len, acknowledged: self.acknowledged }.encode()
    }
}

impl Read {
    /// Its header.
    pub const fn encode(self) -> [u8; HEADER_LEN] {
        Request { op: Opcode::Read, addr: self.addr, len: self.len, acknowledged: self.acknowledged }.encode()
    }
}

/// A request that is neither READ nor WRITE. The stream cannot be read on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a request with opcode {0:#04x}; READ is 0, WRITE 1, and 0x80 on top asks for a status")]
pub struct BadOpcode(pub u8);

impl Request {
    /// Its header, the padding zero.
    pub const fn encode(self) -> [u8; HEADER_LEN] {
        let (len, addr) = (self.len.to_le_bytes(), self.addr.to_le_bytes());
        let mut out = [0; HEADER_LEN];
        let mut i = 0;
        while i < 8 {
            out[i] = len[i];
            out[8 + i] = addr[i];
            i += 1;
        }
        let op = match self.op {
            Opcode::Read => 0,
            Opcode::Write => 1,
        };
        out[16] = if self.acknowledged { op | ACKNOWLEDGED } else { op };
        out
    }

    /// Read a header. Whether its range may be touched is for the target to say.
    ///
    /// # Errors
    /// An opcode nobody has.
    pub fn decode(header: &[u8; HEADER_LEN]) -> Result<Self, BadOpcode> {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| header[at + i]));
        let op = match header[16] & !ACKNOWLEDGED {
            0 => Opcode::Read,
            1 => Opcode::Write,
            _ => return Err(BadOpcode(header[16])),
        };
        Ok(Self { op, addr: word(8), len: word(0), acknowledged: header[16] & ACKNOWLEDGED != 0 })
    }
}

/// A target's word on a request of version 2: 8 bytes, a little-endian u64 whose upper half is [`STATUS_MAGIC`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// A WRITE's last byte is in memory; a READ's payload follows.
    Ok,
    /// The range is not in one registered buffer, or empty. The target closes, and takes no further request.
    Rejected,
    /// A code that is not known.
    Unknown(u32),
}

/// Eight bytes that are no status: the stream is out of step, or the other side speaks something else.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:#018x} is no status: its upper half is not {STATUS_MAGIC:#010x}")]
pub struct BadStatus(pub u64);

impl Status {
    /// Its bytes.
    pub const fn encode(self) -> [u8; STATUS_LEN] {
        let code = match self {
            Self::Ok => 0,
            Self::Rejected => 1,
            Self::Unknown(code) => code,
        };
        ((STATUS_MAGIC as u64) << 32 | code as u64).to_le_bytes()
    }

    /// Read one.
    ///
    /// # Errors
    /// Another upper half.
    pub const fn decode(bytes: [u8; STATUS_LEN]) -> Result<Self, BadStatus> {
        let word = u64::from_le_bytes(bytes);
        if (word >> 32) as u32 != STATUS_MAGIC {
            return Err(BadStatus(word));
        }
        Ok(match word as u32 {
            0 => Self::Ok,
            1 => Self::Rejected,
            code => Self::Unknown(code),
        })
    }
}
