//! What two of ours say to each other beyond SGLang 0.5.23 (requirements F6, H3, H4): one frame behind all frames the
//! dialect knows, with a magic of its own. 0.5.23 reads frames by position and ignores further ones; a peer that is not
//! known to be ours is never sent it.
//!
//! ```text
//! magic "\0KVX1" | version u8 | capabilities u64 | process u128 | fields: kind u8, length u8, bytes ..
//! ```
//! Little-endian. Fields of a kind that is not known are skipped, so later versions add fields; whatever cannot be
//! skipped gets another magic.

use bytes::Bytes;

use super::frames::unsupported;
use super::message::{WireError, WireErrorKind};
use super::pack::shown;
use crate::control::Multipart;
use crate::host::HostIdentity;
use crate::ids::ProcessGeneration;

/// What the extension's frame begins with. No frame of 0.5.23 begins so where an extension can stand.
pub const MAGIC: &[u8; 5] = b"\0KVX1";
/// The version written.
pub const VERSION: u8 = 1;
/// Longest extension that is read, bytes.
pub const MAX_LEN: usize = 512;
/// Key of a prefill rank's row and of the per-rank answer of the bootstrap server.
pub const BOOTSTRAP_KEY: &str = "kv_ext";

const HEAD: usize = MAGIC.len() + 1 + 8 + 16;

const FIELD_TO: u8 = 1;
const FIELD_LIFE: u8 = 2;
const FIELD_TAG: u8 = 3;
const FIELD_AUX_WRITER: u8 = 4;
const FIELD_REGISTER_AGAIN: u8 = 5;
const FIELD_HOST: u8 = 6;

/// What a process of ours can do: a set of bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct ExtCapabilities(pub u64);

impl ExtCapabilities {
    /// Its messages name the life of a room, and it ignores those of another life (F6).
    pub const ROOM_GENERATION: Self = Self(1);
    /// Prefill: Success carries the tag of what was written. Decode: it checks the tag (H3).
    pub const TAG: Self = Self(1 << 1);
    /// Prefill: an ABORT_ACK is proof that nothing can land any more, also of writes that failed (F3).
    pub const PROOF: Self = Self(1 << 2);
    /// Everything this version can do.
    pub const ALL: Self = Self(0b111);

    /// Whether every bit of `other` is set.
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// Who speaks: a process of ours, and what it can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ExtPeer {
    /// Of the extension it writes.
    pub version: u8,
    /// What it can do.
    pub capabilities: ExtCapabilities,
    /// Which process it is; another one at the same address is another peer (F56).
    pub process: ProcessGeneration,
}

impl ExtPeer {
    /// This process, with everything this version can do.
    pub fn here() -> Self {
        Self::new(ProcessGeneration::here())
    }

    /// A process with everything this version can do.
    pub const fn new(process: ProcessGeneration) -> Self {
        Self { version: VERSION, capabilities: ExtCapabilities::ALL, process }
    }

    /// As the bootstrap server keeps it under [`BOOTSTRAP_KEY`]: `version:capabilities:process`, the last two in hex.
    pub fn to_text(self) -> String {
        format!("{}:{:x}:{:032x}", self.version, self.capabilities.0, self.process.0)
    }

    /// Reads [`to_text`](Self::to_text). `None` for everything else: a peer whose word cannot be read is not ours.
    pub fn from_text(text: &str) -> Option<Self> {
        let mut parts = text.split(':');
        let version = parts.next()?.parse().ok().filter(|v| *v > 0)?;
        let hex = |digits: &str, most: usize| {
            let good = (1..=most).contains(&digits.len()) && digits.bytes().all(|b| b.is_ascii_hexdigit());
            good.then(|| u128::from_str_radix(digits, 16).ok())?
        };
        let capabilities = ExtCapabilities(u64::try_from(hex(parts.next()?, 16)?).ok()?);
        let process = ProcessGeneration(hex(parts.next()?, 32)?);
        // Later versions may put more behind it.
        (process.0 != 0).then_some(Self { version, capabilities, process })
    }
}

/// What a prefill rank wrote for one destination of a room (H3): decode computes the same from what it announced.
///
/// A tag proves that the writer followed *this* room's metadata: this life, these pages in this order, this metadata
/// slot. It is no checksum of the bytes. `pages` is a sum over the written positions, so that ranks which share the pages
/// of a request (CP, page sharding) add up to the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RoomTag {
    /// Over the room, its life, the prefix length, the metadata slot and decode's geometry.
    pub head: u64,
    /// Over (position, page) of every page written.
    pub pages: u64,
    /// How many pages this rank had for the room: those it wrote, and those that decode announced no place for.
    pub count: u32,
    /// This rank wrote the metadata slot.
    pub wrote_aux: bool,
}

/// The extension of one message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extension {
    /// Who speaks.
    pub from: ExtPeer,
    /// The process that is spoken to; another one at its address is not meant.
    pub to: Option<ProcessGeneration>,
    /// Which life of the room, as decode numbers them: unique within decode's process, growing.
    pub room_generation: Option<u64>,
    /// With Success.
    pub tag: Option<RoomTag>,
    /// With metadata: whether this prefill rank is the one that writes the metadata slot.
    pub aux_writer: Option<bool>,
    /// With Failed: prefill does not know this decode (any more), which must register before it sends metadata again.
    pub register_again: bool,
    /// With a registration: where the process runs, so that a peer on its host can see it end.
    pub host: Option<HostIdentity>,
}

impl Extension {
    /// Only who speaks.
    pub const fn from(from: ExtPeer) -> Self {
        Self { from, to: None, room_generation: None, tag: None, aux_writer: None, register_again: false, host: None }
    }

    /// As a frame.
    pub fn encode(&self) -> Bytes {
        let mut out = Vec::with_capacity(HEAD + 64);
        out.extend_from_slice(MAGIC);
        out.push(self.from.version);
        out.extend_from_slice(&self.from.capabilities.0.to_le_bytes());
        out.extend_from_slice(&self.from.process.0.to_le_bytes());
        let mut field = |kind: u8, bytes: &[u8]| {
            // The longest field has 40 bytes.
            out.extend_from_slice(&[kind, bytes.len() as u8]);
            out.extend_from_slice(bytes);
        };
        if let Some(to) = self.to {
            field(FIELD_TO, &to.0.to_le_bytes());
        }
        if let Some(life) = self.room_generation {
            field(FIELD_LIFE, &life.to_le_bytes());
        }
        if let Some(tag) = self.tag {
            let mut bytes = [0; 21];
            bytes[..8].copy_from_slice(&tag.head.to_le_bytes());
            bytes[8..16].copy_from_slice(&tag.pages.to_le_bytes());
            bytes[16..20].copy_from_slice(&tag.count.to_le_bytes());
            bytes[20] = tag.wrote_aux.into();
            field(FIELD_TAG, &bytes);
        }
        if let Some(writer) = self.aux_writer {
            field(FIELD_AUX_WRITER, &[writer.into()]);
        }
        if self.register_again {
            field(FIELD_REGISTER_AGAIN, &[]);
        }
        if let Some(host) = self.host {
            field(FIELD_HOST, &host.to_bytes());
        }
        Bytes::from(out)
    }

    /// Reads a frame. `Ok(None)`: it is no extension, and means nothing here.
    ///
    /// # Errors
    /// It begins as one and cannot be read.
    pub fn parse(frame: &[u8]) -> Result<Option<Self>, WireError> {
        if !frame.starts_with(MAGIC) {
            return Ok(None);
        }
        let bad = |kind, detail: String| WireError { kind, what: "extension".into(), detail };
        if frame.len() > MAX_LEN {
            return Err(bad(WireErrorKind::TooLarge, format!("{} bytes, at most {MAX_LEN}", frame.len())));
        }
        let short = || bad(WireErrorKind::TooShort, format!("{} ends early", shown(frame)));
        let mut rest = &frame[MAGIC.len()..];
        let [version] = take(&mut rest).ok_or_else(short)?;
        let capabilities = ExtCapabilities(u64::from_le_bytes(take(&mut rest).ok_or_else(short)?));
        let process = ProcessGeneration(u128::from_le_bytes(take(&mut rest).ok_or_else(short)?));
        if version == 0 || process.0 == 0 {
            return Err(bad(WireErrorKind::BadInteger, "version or process 0".into()));
        }
        let mut out = Self::from(ExtPeer { version, capabilities, process });
        while !rest.is_empty() {
            let [kind, len] = take(&mut rest).ok_or_else(short)?;
            let (field, after) = rest.split_at_checked(usize::from(len)).ok_or_else(short)?;
            rest = after;
            out.field(kind, field)
                .ok_or_else(|| bad(WireErrorKind::BadArray, format!("field {kind} of {len} bytes")))?;
        }
        Ok(Some(out))
    }

    /// `None`: a known field of another length.
    fn field(&mut self, kind: u8, mut bytes: &[u8]) -> Option<()> {
        let bytes = &mut bytes;
        match kind {
            FIELD_TO => self.to = Some(ProcessGeneration(u128::from_le_bytes(take(bytes)?))),
            FIELD_LIFE => self.room_generation = Some(u64::from_le_bytes(take(bytes)?)),
            FIELD_TAG => {
                let head = u64::from_le_bytes(take(bytes)?);
                let pages = u64::from_le_bytes(take(bytes)?);
                let count = u32::from_le_bytes(take(bytes)?);
                let [wrote_aux] = take(bytes)?;
                self.tag = Some(RoomTag { head, pages, count, wrote_aux: wrote_aux != 0 });
            }
            FIELD_AUX_WRITER => {
                let [writer] = take(bytes)?;
                self.aux_writer = Some(writer != 0);
            }
            FIELD_REGISTER_AGAIN => self.register_again = true,
            FIELD_HOST => self.host = Some(HostIdentity::from_bytes(take(bytes)?)),
            _ => return Some(()),
        }
        bytes.is_empty().then_some(())
    }
}

fn take<const N: usize>(rest: &mut &[u8]) -> Option<[u8; N]> {
    let (head, tail) = rest.split_first_chunk()?;
    *rest = tail;
    Some(*head)
}

/// The kinds of messages, for what depends on nothing but the kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum MessageKind {
    /// D → P.
    Registration,
    /// D → P.
    Metadata,
    /// P → D.
    Status,
    /// P → D.
    ChunkReady,
    /// P → D.
    StagingReq,
    /// D → P.
    StagingRsp,
    /// D → P.
    Watermark,
    /// D → P.
    Abort,
    /// P → D.
    AbortAck,
    /// P → D.
    AuxData,
    /// D → P.
    Bootstrap,
}

/// Frames of the messages that are the same in every dialect, optional ones included.
pub(crate) const fn common_frames(kind: MessageKind) -> usize {
    match kind {
        MessageKind::ChunkReady | MessageKind::StagingRsp => 7,
        MessageKind::StagingReq | MessageKind::AuxData => 6,
        MessageKind::Abort => 5,
        MessageKind::Watermark | MessageKind::AbortAck | MessageKind::Bootstrap => 4,
        // Each dialect has its own; these are NIXL's.
        MessageKind::Registration => 25,
        MessageKind::Metadata => 11,
        MessageKind::Status => 5,
    }
}

/// Puts an extension behind `full` frames; optional frames that are missing are padded with empty ones. It takes the place of
/// one that is there.
pub(crate) fn attach(frames: &mut Multipart, full: usize, extension: Bytes) -> Result<(), WireError> {
    if frames.len() == full + 1 && detach(frames, full)?.is_some() {
        frames.pop();
    }
    if frames.len() > full {
        return Err(unsupported("extension", format!("{} frames, the message has {full}", frames.len())));
    }
    frames.resize(full, Bytes::new());
    frames.push(extension);
    Ok(())
}

/// The extension of a message that has `full` frames of its own.
pub(crate) fn detach(frames: &[Bytes], full: usize) -> Result<Option<Extension>, WireError> {
    match frames.last() {
        Some(last) if frames.len() > full => Extension::parse(last),
        _ => Ok(None),
    }
}
