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
    for frames in &messages {
        out::text(&wire::describe(dialect, frames))?;
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

/// Messages of a text: lines of hex, an empty line between messages, or a JSON array of hex strings a line. `name` is
/// for error texts.
///
/// # Errors
/// A line that is neither, named.
pub fn parse(text: &str, name: &str) -> Result<Vec<Vec<Bytes>>> {
    let mut messages = Vec::new();
    let mut frames = Vec::new();
    for (i, line) in text.lines().enumerate() {
        let at = |what: String| {
            CliError::new(format!("{name}:{}: {what}", i + 1))
                .hint("write frames as hex, or as a JSON array of hex strings")
        };
        let line = line.trim();
        if line.starts_with('#') {
            continue;
        }
        if line.is_empty() || line.starts_with('[') {
            if !frames.is_empty() {
                messages.push(std::mem::take(&mut frames));
            }
            if !line.is_empty() {
                let list: Vec<String> =
                    serde_json::from_str(line).map_err(|e| at(format!("not a JSON array of strings: {e}")))?;
                messages.push(list.iter().map(|s| hex(s).map_err(at)).collect::<Result<_>>()?);
            }
            continue;
        }
        // An empty frame cannot be an empty line: it is written as two quotes.
        frames.push(if line == "\"\"" { Bytes::new() } else { hex(line).map_err(at)? });
    }
    if !frames.is_empty() {
        messages.push(frames);
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
        assert_eq!(parse(text, "f").unwrap(), want);
    }

    #[test]
    fn names_file_line_and_fault() {
        for (text, says) in [
            ("00\nxy", "f:2: 'x' is not a hex digit"),
            ("000", "f:1: 3 hex digits are no whole bytes"),
            ("[1]", "f:1: not a JSON array of strings"),
        ] {
            let e = parse(text, "f").unwrap_err().one_line();
            assert!(e.starts_with(says), "{e}");
        }
        let e = read(Some(Path::new("/nowhere/frames"))).unwrap_err().one_line();
        assert!(e.contains("cannot read /nowhere/frames"), "{e}");
    }
}
