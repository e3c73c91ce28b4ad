//! `--capture`: the conversation of a rank as a file, each control message that it sends or takes a JSON line.
//! `kvt wire decode` prints such a file in words.

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

struct Capture(Mutex<Option<File>>);

/// What writes to the file of `--capture`, if there is one.
///
/// # Errors
/// The file cannot be written.
pub fn tap(args: &CommonArgs) -> Result<Option<Arc<dyn ControlTap>>> {
    args.capture.as_deref().map(|path| open(path).map(|c| Arc::new(c) as Arc<dyn ControlTap>)).transpose()
}

fn open(path: &Path) -> Result<Capture> {
    let file = OpenOptions::new().create(true).append(true).open(path);
    let file = file.map_err(|e| CliError::new(format!("--capture {}: {e}", path.display())));
    Ok(Capture(Mutex::new(Some(file?))))
}

impl Capture {
    fn line(&self, direction: &str, peer: Option<String>, frames: &[Bytes]) {
        let hex = |frame: &Bytes| frame.iter().map(|b| format!("{b:02x}")).collect::<String>();
        let frames: Vec<_> = frames.iter().map(hex).collect();
        let mut line = serde_json::json!({ "t": unix_now(), "dir": direction, "frames_hex": frames });
        if let Some(peer) = peer {
            line["peer"] = format!("tcp://{peer}").into();
        }
        let mut file = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
        self.line("recv", None, frames);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::commands::wire_decode::parse;

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
