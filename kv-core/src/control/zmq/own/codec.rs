//! Frames: from bytes to messages and back. No I/O.

use bytes::Bytes;
use smallvec::SmallVec;

use crate::control::Multipart;

/// More frames of this message follow.
const MORE: u8 = 1;
/// The length has eight bytes.
const LONG: u8 = 2;
/// A command, not a part of a message.
pub(super) const COMMAND: u8 = 4;
/// Longest command that is read, bytes. READY and PING are far shorter.
const MAX_COMMAND: usize = 8 << 10;

/// Append one frame.
pub(super) fn put_frame(out: &mut Vec<u8>, flags: u8, body: &[u8]) {
    match u8::try_from(body.len()) {
        Ok(len) => out.extend_from_slice(&[flags, len]),
        Err(_) => {
            out.push(flags | LONG);
            out.extend_from_slice(&(body.len() as u64).to_be_bytes());
        }
    }
    out.extend_from_slice(body);
}

/// Append one message.
pub(super) fn put_message(out: &mut Vec<u8>, message: &Multipart) {
    let last = message.len().saturating_sub(1);
    for (i, frame) in message.iter().enumerate() {
        put_frame(out, if i < last { MORE } else { 0 }, frame);
    }
}

/// What the bytes hold.
#[derive(Debug, PartialEq, Eq)]
// Nearly every item is a message, handed on at once: a box would cost an allocation for each.
#[allow(clippy::large_enum_variant)]
pub(super) enum Item {
    Message(Multipart),
    /// The body of a command.
    Command(Vec<u8>),
    /// A message with more frames than allowed; it is dropped whole.
    TooManyFrames,
    /// A message with more bytes than allowed; it is dropped whole.
    TooManyBytes,
}

/// Why a connection cannot be read any further.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Fault {
    #[error("it sent a frame with unknown flags")]
    Flags,
    #[error("it sent a frame over the limit")]
    FrameTooLong,
    #[error("it sent a command over the limit")]
    CommandTooLong,
}

/// Bounds on what is read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub frames: usize,
    pub frame_bytes: usize,
    pub message_bytes: usize,
}

/// Cuts a stream into messages. Keeps what is not complete, never more than the bounds and one read allow: a length
/// that is only claimed takes no memory.
#[derive(Default)]
pub(super) struct Decoder {
    /// From the start of the message that is not complete.
    rest: Vec<u8>,
    /// Where its next frame starts.
    at: usize,
    /// Its frames so far: start and length.
    frames: SmallVec<[(usize, usize); 12]>,
    bytes: usize,
    /// The message is over a limit: forget its frames up to the last one.
    dropping: bool,
    /// Bytes of a forgotten frame that are still to come.
    skip: u64,
}

/// A frame's header: flags, header length, body length. `None`: not there yet.
fn header(data: &[u8]) -> Result<Option<(u8, usize, u64)>, Fault> {
    let Some((&flags, rest)) = data.split_first() else { return Ok(None) };
    if flags & !(MORE | LONG | COMMAND) != 0 || flags & COMMAND != 0 && flags & MORE != 0 {
        return Err(Fault::Flags);
    }
    if flags & LONG == 0 {
        return Ok(rest.first().map(|&len| (flags, 2, u64::from(len))));
    }
    Ok(rest.first_chunk::<8>().map(|len| (flags, 9, u64::from_be_bytes(*len))))
}

impl Decoder {
    /// Bytes kept of what is not complete.
    #[cfg(any(test, feature = "fuzzing"))]
    pub fn kept(&self) -> usize {
        self.rest.len()
    }

    /// Take in what was read; each complete item goes to `sink`.
    pub fn feed(&mut self, data: &[u8], bounds: Bounds, mut sink: impl FnMut(Item)) -> Result<(), Fault> {
        if self.rest.is_empty() {
            let used = self.cut(data, bounds, &mut sink)?;
            self.rest.extend_from_slice(&data[used..]);
        } else {
            let mut all = std::mem::take(&mut self.rest);
            all.extend_from_slice(data);
            let used = self.cut(&all, bounds, &mut sink)?;
            all.drain(..used);
            self.rest = all;
        }
        // After one large message, do not keep its room for a connection that may be silent.
        if self.rest.is_empty() && self.rest.capacity() > (64 << 10) {
            self.rest = Vec::new();
        }
        Ok(())
    }

    /// Cut `all`, which starts with the message that is not complete; the bytes that are done with.
    fn cut(&mut self, all: &[u8], bounds: Bounds, sink: &mut impl FnMut(Item)) -> Result<usize, Fault> {
        let mut done = 0;
        // Of a message that is not complete: its frames, and the commands among them.
        let most = bounds.message_bytes.saturating_add(bounds.frames.saturating_mul(9)).saturating_add(MAX_COMMAND);
        loop {
            let here = done + self.at;
            if self.skip > 0 {
                let now = self.skip.min((all.len() - here) as u64);
                self.skip -= now;
                done = here + now as usize;
                self.at = 0;
                if self.skip > 0 {
                    return Ok(done);
                }
                continue;
            }
            let Some((flags, head, len)) = header(&all[here..])? else { return Ok(done) };
            let start = here + head;
            if flags & COMMAND != 0 {
                if len > MAX_COMMAND as u64 {
                    return Err(Fault::CommandTooLong);
                }
                let Some(body) = all.get(start..start + len as usize) else { return Ok(done) };
                sink(Item::Command(body.to_vec()));
                self.at += head + body.len();
                if self.frames.is_empty() {
                    done += std::mem::take(&mut self.at);
                } else if self.at > most {
                    // Kept until the message ends, so they count as it does.
                    return Err(Fault::CommandTooLong);
                }
                continue;
            }
            if len > bounds.frame_bytes as u64 {
                return Err(Fault::FrameTooLong);
            }
            let len = len as usize;
            if !self.dropping {
                let over = if self.frames.len() >= bounds.frames {
                    Some(Item::TooManyFrames)
                } else {
                    (self.bytes.saturating_add(len) > bounds.message_bytes).then_some(Item::TooManyBytes)
                };
                if let Some(over) = over {
                    sink(over);
                    self.frames.clear();
                    self.dropping = true;
                }
            }
            if self.dropping {
                self.dropping = flags & MORE != 0;
                self.bytes = 0;
                (done, self.at, self.skip) = (start, 0, len as u64);
                continue;
            }
            if all.len() - start < len {
                return Ok(done);
            }
            self.frames.push((start - done, len));
            self.bytes += len;
            self.at += head + len;
            if flags & MORE == 0 {
                // One allocation a message: its frames are parts of it.
                let whole = Bytes::copy_from_slice(&all[done..done + self.at]);
                let message = self.frames.drain(..).map(|(at, len)| whole.slice(at..at + len)).collect();
                sink(Item::Message(message));
                self.bytes = 0;
                done += std::mem::take(&mut self.at);
            }
        }
    }
}

#[cfg(test)]
#[path = "codec_tests.rs"]
mod tests;
