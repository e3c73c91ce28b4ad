//! The conversation of a rank, listened in on. `--capture`: as a file, each control message that it sends or takes a JSON
//! line; `kvt wire decode` prints such a file in words. And who acknowledged the ABORT of which room.

use std::collections::{HashMap, HashSet};
use std::fs::{File, OpenOptions};
use std::io::Write as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use kv_core::control::ControlTap;
use kv_core::net::Endpoint;

use super::args::CommonArgs;
use super::events::unix_now;
use crate::error::{CliError, Result};

/// What is kept of a conversation.
#[derive(Default)]
pub struct Capture {
    file: Mutex<Option<File>>,
    acks: Mutex<HashMap<u64, HashSet<Bytes>>>,
}

/// With the file of `--capture`, if there is one.
///
/// # Errors
/// The file cannot be written.
pub fn tap(args: &CommonArgs) -> Result<Arc<Capture>> {
    args.capture.as_deref().map_or_else(|| Ok(Capture::default()), open).map(Arc::new)
}

fn open(path: &Path) -> Result<Capture> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    let file = file.map_err(|e| CliError::new(format!("--capture {}: {e}", path.display())));
    Ok(Capture { file: Mutex::new(Some(file?)), ..Capture::default() })
}

impl Capture {
    /// Ranks whose ABORT_ACK of a room came.
    pub fn acks(&self, room: u64) -> usize {
        self.acks.lock().unwrap_or_else(PoisonError::into_inner).get(&room).map_or(0, HashSet::len)
    }

    /// An ABORT_ACK is the same in all dialects: tag, room, rank, generation (protocol 6.9); from one of ours, then its
    /// extension.
    fn count(&self, frames: &[Bytes]) {
        let [tag, room, rank, _, ..] = frames else { return };
        let room = std::str::from_utf8(room).ok().and_then(|r| r.parse().ok());
        if let (b"ABORT_ACK", Some(room)) = (&tag[..], room) {
            let mut acks = self.acks.lock().unwrap_or_else(PoisonError::into_inner);
            acks.entry(room).or_default().insert(rank.clone());
        }
    }

    fn line(&self, direction: &str, peer: Option<String>, frames: &[Bytes]) {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        if file.is_none() {
            return;
        }
        let hex = |frame: &Bytes| frame.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let frames: Vec<_> = frames.iter().map(hex).collect();
        let mut line = serde_json::json!({ "t": unix_now(), "dir": direction, "frames_hex": frames });
        if let Some(peer) = peer {
            line["peer"] = format!("tcp://{peer}").into();
        }
        // One write a line: other ranks append to the same file.
        let written = file.as_mut().map_or(Ok(()), |f| f.write_all(format!("{line}\n").as_bytes()));
        if let Err(error) = written {
            tracing::warn!(%error, "--capture: no more is written");
            *file = None;
        }
    }
}

impl ControlTap for Capture {
    fn sent(&self, to: &Endpoint, frames: &[Bytes]) {
        self.line("send", Some(to.to_string()), frames);
    }

    fn received(&self, frames: &[Bytes]) {
        self.count(frames);
        self.line("recv", None, frames);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::wire_decode::parse;

    #[test]
    fn acks_are_counted_by_rank() {
        let capture = Capture::default();
        let ack = |rank: &'static str| ["ABORT_ACK", "7", rank, "1"].map(|f| Bytes::from_static(f.as_bytes()));
        for rank in ["0", "1", "0"] {
            capture.received(&ack(rank));
        }
        assert_eq!((capture.acks(7), capture.acks(8)), (2, 0));
    }

    #[test]
    fn a_capture_is_what_wire_decode_reads() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let capture = open(file.path()).unwrap();
        capture.sent(&Endpoint::new("::1", 7), &[Bytes::from_static(b"None"), Bytes::new()]);
        capture.received(&[Bytes::from_static(b"\x00\xff")]);
        let text = std::fs::read_to_string(file.path()).unwrap();
        assert!(text.contains("tcp://[::1]:7"), "{text}");
        let messages = parse(&text, "f").unwrap();
        assert_eq!(messages[0].frames, [Bytes::from_static(b"None"), Bytes::new()]);
        assert_eq!(messages[0].title.as_deref(), Some("send tcp://[::1]:7"));
        assert_eq!((messages[1].frames.len(), messages[1].title.as_deref()), (1, Some("recv")));
    }
}
