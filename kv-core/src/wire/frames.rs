//! Building and reading the frames of one message.

use std::ops::RangeInclusive;
use std::sync::Arc;

use bytes::Bytes;
use smallvec::SmallVec;

use super::message::{WireError, WireErrorKind};
use super::pack::{self, PackError, Word, shown};
use crate::control::Multipart;
use crate::limits::Limits;
use crate::net::Endpoint;

const DIGITS: &[u8; 10] = b"0123456789";

/// Builds a message: what is not static or shared already is written into one buffer and cut up at the end, so that a
/// message costs one buffer and not one per frame.
pub(crate) struct FrameWriter {
    message: &'static str,
    frames: Multipart,
    /// Frames that live in `buffer`: their place, and where they end.
    cuts: SmallVec<[(usize, usize); 16]>,
    buffer: Vec<u8>,
}

impl FrameWriter {
    /// A message of about this many bytes.
    pub(crate) fn new(message: &'static str, bytes: usize) -> Self {
        Self { message, frames: Multipart::new(), cuts: SmallVec::new(), buffer: Vec::with_capacity(bytes) }
    }

    pub(crate) fn fixed(&mut self, frame: &'static [u8]) {
        self.frames.push(Bytes::from_static(frame));
    }

    pub(crate) fn empty(&mut self) {
        self.frames.push(Bytes::new());
    }

    pub(crate) fn shared(&mut self, frame: &Bytes) {
        self.frames.push(frame.clone());
    }

    /// A frame written by `write`.
    pub(crate) fn built(
        &mut self,
        name: &str,
        write: impl FnOnce(&mut Vec<u8>) -> Result<(), PackError>,
    ) -> Result<(), WireError> {
        write(&mut self.buffer).map_err(|error| at_frame(self.message, self.frames.len(), name, error))?;
        self.cut();
        Ok(())
    }

    fn cut(&mut self) {
        self.cuts.push((self.frames.len(), self.buffer.len()));
        self.frames.push(Bytes::new());
    }

    pub(crate) fn u64(&mut self, value: u64) {
        match DIGITS.get(usize::try_from(value).unwrap_or(usize::MAX)..).and_then(|digits| digits.get(..1)) {
            Some(digit) => self.fixed(digit),
            None => {
                pack::put_u64(&mut self.buffer, value);
                self.cut();
            }
        }
    }

    pub(crate) fn u32(&mut self, value: u32) {
        self.u64(value.into());
    }

    pub(crate) fn i64(&mut self, value: i64) {
        match u64::try_from(value) {
            Ok(value) => self.u64(value),
            Err(_) => {
                pack::put_i64(&mut self.buffer, value);
                self.cut();
            }
        }
    }

    pub(crate) fn array<T: Word>(&mut self, values: &[T]) {
        if values.is_empty() {
            self.empty();
        } else {
            pack::put_array(&mut self.buffer, values);
            self.cut();
        }
    }

    /// An identity: ASCII without control characters, not empty (0.5.23 decodes it as ASCII, outside any `try`).
    pub(crate) fn id(&mut self, name: &str, text: &str) -> Result<(), WireError> {
        check_id(text).map_err(|error| at_frame(self.message, self.frames.len(), name, error))?;
        self.text(text);
        Ok(())
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.buffer.extend_from_slice(text.as_bytes());
        self.cut();
    }

    /// Two frames: host, unbracketed, and port.
    pub(crate) fn endpoint(&mut self, endpoint: &Endpoint) -> Result<(), WireError> {
        let refused = |writer: &Self, error| at_frame(writer.message, writer.frames.len(), "decode ip and port", error);
        check_host(endpoint.host()).map_err(|error| refused(self, error))?;
        if endpoint.port() == 0 {
            return Err(refused(self, PackError::new(WireErrorKind::BadInteger, "port 0 cannot be reached")));
        }
        self.text(endpoint.host());
        self.u64(endpoint.port().into());
        Ok(())
    }

    pub(crate) fn finish(mut self) -> Multipart {
        let all = Bytes::from(self.buffer);
        let mut start = 0;
        for (place, end) in self.cuts {
            self.frames[place] = all.slice(start..end);
            start = end;
        }
        self.frames
    }
}

/// Refuse what no dialect accepts: no frame, too many frames, too many bytes.
pub(crate) fn check_shape(frames: &[Bytes], limits: &Limits) -> Result<(), WireError> {
    let refuse = |kind, detail| Err(WireError { kind, what: "message".into(), detail });
    if frames.is_empty() {
        return refuse(WireErrorKind::TooShort, "no frame".into());
    }
    if frames.len() > limits.max_frames {
        let detail = format!("{} frames, at most {} are accepted", frames.len(), limits.max_frames);
        return refuse(WireErrorKind::TooLarge, detail);
    }
    let mut total = 0usize;
    for (at, frame) in frames.iter().enumerate() {
        total = total.saturating_add(frame.len());
        if frame.len() > limits.max_frame_bytes || total > limits.max_message_bytes {
            let detail = format!("frame {at} has {} bytes, the message {total} up to it", frame.len());
            return refuse(WireErrorKind::TooLarge, detail);
        }
    }
    Ok(())
}

pub(crate) fn unknown_tag(to: &str, frame: &[u8]) -> WireError {
    let detail = format!("{} begins no message to {to}", shown(frame));
    WireError { kind: WireErrorKind::UnknownTag, what: "message frame 0 (tag)".into(), detail }
}

/// The dialect has no way to say this.
pub(crate) fn unsupported(message: &str, detail: impl Into<String>) -> WireError {
    WireError { kind: WireErrorKind::Unsupported, what: message.into(), detail: detail.into() }
}

fn at_frame(message: &str, at: usize, name: &str, error: PackError) -> WireError {
    WireError { kind: error.kind, what: format!("{message} frame {at} ({name})"), detail: error.detail }
}

fn check_id(text: &str) -> Result<(), PackError> {
    let good = !text.is_empty() && text.bytes().all(|byte| matches!(byte, b' '..=b'~'));
    if good {
        Ok(())
    } else {
        let detail = format!("{} is no identity: printable ASCII, at least one character", shown(text.as_bytes()));
        Err(PackError::new(WireErrorKind::BadText, detail))
    }
}

/// A host that may be put into an endpoint text: a peer must not be able to smuggle in wildcards, a source address or
/// another transport.
fn check_host(text: &str) -> Result<(), PackError> {
    let allowed = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_' | b':' | b'%');
    if !text.is_empty() && text.bytes().all(allowed) {
        Ok(())
    } else {
        let detail = format!("{} is no host name or address", shown(text.as_bytes()));
        Err(PackError::new(WireErrorKind::BadText, detail))
    }
}

/// Reads the frames of one message. An *optional* frame is absent when it is missing **or empty**: older peers leave it
/// out, newer ones may pad it to put something behind it.
#[derive(Clone, Copy)]
pub(crate) struct FrameReader<'a> {
    message: &'static str,
    frames: &'a [Bytes],
    pub(crate) limits: &'a Limits,
}

impl<'a> FrameReader<'a> {
    /// A message of at least `min` frames; frames behind the known ones are ignored.
    pub(crate) fn new(
        message: &'static str,
        frames: &'a [Bytes],
        min: usize,
        limits: &'a Limits,
    ) -> Result<Self, WireError> {
        if frames.len() < min {
            let detail = format!("{} frames, at least {min} are needed", frames.len());
            return Err(WireError { kind: WireErrorKind::TooShort, what: message.into(), detail });
        }
        Ok(Self { message, frames, limits })
    }

    pub(crate) fn error(&self, at: usize, name: &str, error: PackError) -> WireError {
        at_frame(self.message, at, name, error)
    }

    pub(crate) fn fail<T>(
        &self,
        at: usize,
        name: &str,
        kind: WireErrorKind,
        detail: impl Into<String>,
    ) -> Result<T, WireError> {
        Err(self.error(at, name, PackError::new(kind, detail)))
    }

    pub(crate) fn optional(&self, at: usize) -> Option<&'a Bytes> {
        self.frames.get(at).filter(|frame| !frame.is_empty())
    }

    /// The frame, or an empty one.
    pub(crate) fn bytes(&self, at: usize) -> &'a [u8] {
        self.frames.get(at).map_or(&[], |frame| frame)
    }

    pub(crate) fn shared(&self, at: usize) -> Bytes {
        self.frames.get(at).cloned().unwrap_or_default()
    }

    /// An integer of this type.
    pub(crate) fn int<T: TryFrom<i128>>(&self, at: usize, name: &str) -> Result<T, WireError> {
        let frame = self.bytes(at);
        let value = pack::parse_int(frame).map_err(|error| self.error(at, name, error))?;
        T::try_from(value)
            .or_else(|_| self.fail(at, name, WireErrorKind::BadInteger, format!("{} is out of range", shown(frame))))
    }

    /// An integer inside `range`.
    pub(crate) fn within(&self, at: usize, name: &str, range: RangeInclusive<u32>) -> Result<u32, WireError> {
        let value = self.int(at, name)?;
        if range.contains(&value) {
            return Ok(value);
        }
        let kind = if value > *range.end() { WireErrorKind::TooLarge } else { WireErrorKind::BadInteger };
        self.fail(at, name, kind, format!("{value} is not in {} to {}", range.start(), range.end()))
    }

    pub(crate) fn optional_int<T: TryFrom<i128>>(&self, at: usize, name: &str) -> Result<Option<T>, WireError> {
        self.optional(at).map(|_| self.int(at, name)).transpose()
    }

    fn ascii(&self, at: usize, name: &str, check: fn(&str) -> Result<(), PackError>) -> Result<&'a str, WireError> {
        let frame = self.bytes(at);
        if frame.len() > self.limits.max_text_bytes {
            let error = PackError::too_large("bytes", frame.len(), self.limits.max_text_bytes);
            return Err(self.error(at, name, error));
        }
        let text = std::str::from_utf8(frame)
            .or_else(|_| self.fail(at, name, WireErrorKind::BadText, format!("{} is not text", shown(frame))))?;
        check(text).map_err(|error| self.error(at, name, error))?;
        Ok(text)
    }

    /// An identity: printable ASCII.
    pub(crate) fn id(&self, at: usize, name: &str) -> Result<String, WireError> {
        Ok(self.ascii(at, name, check_id)?.to_owned())
    }

    /// Host and port, in this frame and the next.
    pub(crate) fn endpoint(&self, at: usize) -> Result<Endpoint, WireError> {
        // Brackets are taken off: senders leave them out, and an endpoint keeps its host without them.
        let unbracketed =
            |text: &str| check_host(text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text));
        let host = self.ascii(at, "decode ip", unbracketed)?;
        let port = self.int(at + 1, "decode port")?;
        if port == 0 {
            return self.fail(at + 1, "decode port", WireErrorKind::BadInteger, "port 0 cannot be reached");
        }
        Ok(Endpoint::new(host, port))
    }

    pub(crate) fn array<T: Word>(&self, at: usize, name: &str, max: usize) -> Result<Vec<T>, WireError> {
        pack::get_array(self.bytes(at), max).map_err(|error| self.error(at, name, error))
    }

    pub(crate) fn nested<T: Word>(&self, at: usize, name: &str) -> Result<Vec<Vec<T>>, WireError> {
        let max = self.limits.max_entries;
        pack::get_nested(self.bytes(at), max, max).map_err(|error| self.error(at, name, error))
    }

    /// Page indices, none negative.
    pub(crate) fn pages(&self, at: usize, name: &str) -> Result<Arc<[i32]>, WireError> {
        pack::get_pages(self.bytes(at), self.limits.max_pages).map_err(|error| self.error(at, name, error))
    }

    /// State indices per component, none negative.
    pub(crate) fn state_indices(&self, at: usize) -> Result<Vec<Vec<i32>>, WireError> {
        let name = "state indices";
        let read = || {
            let lists = pack::get_nested(self.bytes(at), self.limits.max_entries, self.limits.max_pages)?;
            lists.iter().try_for_each(|list: &Vec<i32>| pack::no_negative(list))?;
            Ok(lists)
        };
        read().map_err(|error| self.error(at, name, error))
    }
}
