//! `kvt wire decode`: control messages in words.

use std::io::Read as _;
use std::path::Path;
use std::process::ExitCode;

use bytes::Bytes;
use kv_core::hooks::TCP_GUARD;
use kv_core::wire::{self, Dialect, MooncakeDialect, MoriDialect, NixlDialect};

use crate::cli::{DialectArg, WireDecodeArgs};
use crate::error::{CliError, Result};
use crate::out;

/// Largest input, bytes.
const MAX_INPUT: u64 = 256 << 20;

/// Run it.
pub fn run(args: &WireDecodeArgs, json: bool) -> Result<ExitCode> {
    let (text, name) = read(args.file.as_deref())?;
    let messages = parse(&text, &name)?;
    if messages.is_empty() {
        return Err(CliError::new(format!("{name} holds no message")).hint("give hex frames, one a line"));
    }
    let tcp = NixlDialect::with_guard(TCP_GUARD);
    let dialect: &dyn Dialect = match args.dialect {
        DialectArg::Nixl => &const { NixlDialect::new() },
        DialectArg::Mooncake => &MooncakeDialect,
        DialectArg::Mori => &MoriDialect,
        DialectArg::Tcp => &tcp,
    };
    for message in &messages {
        if let Some(title) = &message.title {
            out::line(title)?;
        }
        out::text(&wire::describe(dialect, &message.frames))?;
    }
    if json {
        out::line(serde_json::json!({ "ok": true, "messages": messages.len() }))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn read(file: Option<&Path>) -> Result<(String, String)> {
    let name = file.map_or_else(|| "standard input".to_owned(), |p| p.display().to_string());
    let mut bytes = Vec::new();
    let result = match file {
        Some(path) => std::fs::File::open(path).and_then(|f| f.take(MAX_INPUT + 1).read_to_end(&mut bytes)),
        None => std::io::stdin().take(MAX_INPUT + 1).read_to_end(&mut bytes),
    };
    result.map_err(|e| CliError::new(format!("cannot read {name}: {e}")).hint("give a readable file"))?;
    if bytes.len() as u64 > MAX_INPUT {
        return Err(CliError::new(format!("{name} is longer than {MAX_INPUT} bytes")).hint("cut it"));
    }
    let text = String::from_utf8(bytes)
        .map_err(|_| CliError::new(format!("{name} is not text")).hint("give frames as hex, not raw bytes"))?;
    Ok((text, name))
}

/// A message as it was given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Given {
    /// Which way it went, if that is known.
    pub title: Option<String>,
    /// Its frames.
    pub frames: Vec<Bytes>,
}

/// A line of a capture. Lines without frames (HTTP exchanges) are passed over.
#[derive(serde::Deserialize)]
struct Captured {
    dir: Option<String>,
    peer: Option<String>,
    endpoint: Option<String>,
    #[serde(default)]
    frames_hex: Vec<String>,
}

/// Messages of a text: lines of hex, an empty line between messages; or, a line each, a JSON array of hex strings, or an
/// object of a capture. `name` is for error texts.
///
/// # Errors
/// A line that is none of these, named.
pub fn parse(text: &str, name: &str) -> Result<Vec<Given>> {
    let mut messages = Vec::new();
    let mut frames = Vec::new();
    let untitled = |frames| Given { title: None, frames };
    for (i, line) in text.lines().enumerate() {
        let at = |what: String| {
            CliError::new(format!("{name}:{}: {what}", i + 1))
                .hint("write frames as hex, as a JSON array of hex strings, or give a file of --capture")
        };
        let line = line.trim();
        if line.starts_with('#') {
            continue;
        }
        let all = |list: Vec<String>| list.iter().map(|s| hex(s).map_err(at)).collect::<Result<Vec<_>>>();
        if line.is_empty() || line.starts_with(['[', '{']) {
            if !frames.is_empty() {
                messages.push(untitled(std::mem::take(&mut frames)));
            }
            if line.starts_with('[') {
                let list = serde_json::from_str(line).map_err(|e| at(format!("not a JSON array of strings: {e}")))?;
                messages.push(untitled(all(list)?));
            } else if line.starts_with('{') {
                let c: Captured =
                    serde_json::from_str(line).map_err(|e| at(format!("not a line of a capture: {e}")))?;
                let title: Vec<String> = [c.dir, c.peer.or(c.endpoint)].into_iter().flatten().collect();
                let title = (!title.is_empty()).then(|| title.join(" "));
                if !c.frames_hex.is_empty() {
                    messages.push(Given { title, frames: all(c.frames_hex)? });
                }
            }
            continue;
        }
        // An empty frame cannot be an empty line: it is written as two quotes.
        frames.push(if line == "\"\"" { Bytes::new() } else { hex(line).map_err(at)? });
    }
    if !frames.is_empty() {
        messages.push(untitled(frames));
    }
    Ok(messages)
}

fn hex(text: &str) -> std::result::Result<Bytes, String> {
    let digits: Vec<u8> = text
        .strip_prefix("0x")
        .unwrap_or(text)
        .chars()
        .filter(|c| !c.is_whitespace())
        .map(|c| c.to_digit(16).map(|d| d as u8).ok_or_else(|| format!("'{c}' is not a hex digit")))
        .collect::<std::result::Result<_, _>>()?;
    let (pairs, odd) = digits.as_chunks::<2>();
    if !odd.is_empty() {
        return Err(format!("{} hex digits are no whole bytes", digits.len()));
    }
    Ok(pairs.iter().map(|[hi, lo]| hi << 4 | lo).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_lines_and_arrays() {
        let text = "# two messages\n4e 69\n\"\"\n\n[\"0xff\", \"\"]\n01\n";
        let frame = |bytes: &'static [u8]| Bytes::from_static(bytes);
        let want = vec![vec![frame(b"Ni"), frame(b"")], vec![frame(b"\xff"), frame(b"")], vec![frame(b"\x01")]];
        let got: Vec<_> = parse(text, "f").unwrap().into_iter().map(|m| m.frames).collect();
        assert_eq!(got, want);
    }

    #[test]
    fn names_file_line_and_fault() {
        for (text, says) in [
            ("00\nxy", "f:2: 'x' is not a hex digit"),
            ("000", "f:1: 3 hex digits are no whole bytes"),
            ("[1]", "f:1: not a JSON array of strings"),
            ("{\"frames_hex\":3}", "f:1: not a line of a capture"),
            ("{\"frames_hex\":[\"zz\"]}", "f:1: 'z' is not a hex digit"),
        ] {
            let e = parse(text, "f").unwrap_err().one_line();
            assert!(e.starts_with(says), "{e}");
        }
        let e = read(Some(Path::new("/nowhere/frames"))).unwrap_err().one_line();
        assert!(e.contains("cannot read /nowhere/frames"), "{e}");
    }
}
