//! Request traces: JSON lines as published with Mooncake (FAST '25), read one line at a time.

use std::fs::File;
use std::io::{BufRead, BufReader, Read as _};
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

use crate::error::{CliError, Result};

/// Prompt tokens that one hash id of a trace stands for.
pub const BLOCK_TOKENS: u32 = 512;

/// Longest prompt taken from a trace, tokens. Beyond every public model's window.
const MAX_INPUT_TOKENS: u64 = 16 << 20;

/// Longest line of a trace, bytes.
const MAX_LINE_BYTES: u64 = 4 << 20;

/// The trace that is used when none is named: 500 requests of the Mooncake conversation trace (see `data/README.md`).
pub const DEFAULT_TRACE: &str = include_str!("../data/mooncake_conversation_500.jsonl");

/// Name of the default trace in texts.
pub const DEFAULT_TRACE_NAME: &str = "mooncake_conversation_500 (built in)";

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRequest {
    /// Arrival, milliseconds since the start of the trace.
    pub timestamp_ms: u64,
    /// Prompt tokens.
    pub input_tokens: u32,
    /// Generated tokens.
    pub output_tokens: u32,
    /// One id per [`BLOCK_TOKENS`] prompt tokens, the last block may be short. Equal ids mean equal prefixes.
    pub blocks: Vec<u64>,
}

/// Where requests come from.
pub enum TraceSource {
    /// A file of JSON lines.
    Reader(TraceReader<Box<dyn BufRead>>),
    /// The same request again and again: `synthetic:tokens=16384[,shared]`.
    Synthetic {
        /// Prompt tokens of every request.
        tokens: u32,
        /// All requests name the same blocks, so that all rooms read the same source pages.
        shared: bool,
        /// How many were made.
        made: u64,
    },
}

impl TraceSource {
    /// `--trace`: nothing = the built-in trace, `synthetic:tokens=N[,shared]`, `-` = standard input, or a file.
    pub fn open(arg: Option<&str>) -> Result<Self> {
        let Some(arg) = arg else {
            return Ok(Self::Reader(TraceReader::new(Box::new(DEFAULT_TRACE.as_bytes()), DEFAULT_TRACE_NAME)));
        };
        if let Some(rest) = arg.strip_prefix("synthetic:") {
            return Self::synthetic(rest);
        }
        if arg == "-" {
            return Ok(Self::Reader(TraceReader::new(Box::new(BufReader::new(std::io::stdin())), "standard input")));
        }
        let cannot = |e: std::io::Error| {
            CliError::new(format!("cannot read trace {arg}: {e}"))
                .hint("give a readable file of JSON lines, or leave --trace out for the built-in sample")
        };
        let file = File::open(Path::new(arg)).map_err(cannot)?;
        if file.metadata().map_err(cannot)?.is_dir() {
            return Err(CliError::new(format!("cannot read trace {arg}: it is a directory")).hint("name a file in it"));
        }
        Ok(Self::Reader(TraceReader::new(Box::new(BufReader::new(file)), arg)))
    }

    fn synthetic(rest: &str) -> Result<Self> {
        let bad = |what: String| {
            CliError::new(what).hint("write it like synthetic:tokens=16384 or synthetic:tokens=16384,shared")
        };
        let (mut tokens, mut shared) = (None, false);
        for part in rest.split(',') {
            match part.split_once('=') {
                Some(("tokens", n)) => {
                    let n: u64 = n.parse().map_err(|_| bad(format!("synthetic trace: '{n}' is not a number")))?;
                    if n == 0 || n > MAX_INPUT_TOKENS {
                        return Err(bad(format!("synthetic trace: {n} tokens is out of range 1..={MAX_INPUT_TOKENS}")));
                    }
                    tokens = u32::try_from(n).ok();
                }
                None if part == "shared" => shared = true,
                _ => return Err(bad(format!("synthetic trace: '{part}' is not understood"))),
            }
        }
        let tokens = tokens.ok_or_else(|| bad("synthetic trace without tokens=N".into()))?;
        Ok(Self::Synthetic { tokens, shared, made: 0 })
    }

    /// The first `n` requests; an error when there are none at all.
    pub fn first(&mut self, n: usize) -> Result<Vec<TraceRequest>> {
        let requests = self.by_ref().take(n).collect::<Result<Vec<_>>>()?;
        if requests.is_empty() && n > 0 {
            let name = match self {
                Self::Reader(r) => r.name.as_str(),
                Self::Synthetic { .. } => "synthetic",
            };
            return Err(CliError::new(format!("trace {name} holds no request")).hint("give a file of JSON lines"));
        }
        Ok(requests)
    }
}

impl Iterator for TraceSource {
    type Item = Result<TraceRequest>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Reader(reader) => reader.next(),
            Self::Synthetic { tokens, shared, made } => {
                let per_request = u64::from(tokens.div_ceil(BLOCK_TOKENS));
                let first = if *shared { 0 } else { *made * per_request };
                *made += 1;
                Some(Ok(TraceRequest {
                    timestamp_ms: 0,
                    input_tokens: *tokens,
                    output_tokens: 1,
                    blocks: (first..first + per_request).collect(),
                }))
            }
        }
    }
}

/// Reads requests line by line. After an error it is at its end.
pub struct TraceReader<R> {
    input: R,
    name: String,
    line: u64,
    buf: Vec<u8>,
    ended: bool,
}

impl<R: BufRead> TraceReader<R> {
    /// Reads from `input`, called `name` in error texts.
    pub fn new(input: R, name: &str) -> Self {
        Self { input, name: name.to_owned(), line: 0, buf: Vec::new(), ended: false }
    }

    fn read(&mut self) -> Result<Option<TraceRequest>> {
        loop {
            self.buf.clear();
            self.line += 1;
            let at = |what: String| {
                CliError::new(format!("{}:{}: {what}", self.name, self.line))
                    .hint("correct or remove that line of the trace")
            };
            let n = self.input.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut self.buf);
            match n {
                Err(e) => return Err(at(format!("cannot be read: {e}"))),
                Ok(0) => return Ok(None),
                Ok(n) if n as u64 > MAX_LINE_BYTES => return Err(at(format!("longer than {MAX_LINE_BYTES} bytes"))),
                Ok(_) => {}
            }
            let text = std::str::from_utf8(&self.buf).map_err(|e| at(format!("not UTF-8: {e}")))?.trim();
            if !text.is_empty() {
                return parse_line(text).map(Some).map_err(at);
            }
        }
    }
}

impl<R: BufRead> Iterator for TraceReader<R> {
    type Item = Result<TraceRequest>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.ended {
            return None;
        }
        let read = self.read();
        self.ended = !matches!(read, Ok(Some(_)));
        read.transpose()
    }
}

#[derive(Deserialize)]
struct Line {
    timestamp: Option<Value>,
    input_length: Option<Value>,
    output_length: Option<Value>,
    hash_ids: Option<Value>,
}

fn parse_line(text: &str) -> std::result::Result<TraceRequest, String> {
    if !text.starts_with('{') {
        return Err("not a JSON object".into());
    }
    let line: Line = serde_json::from_str(text).map_err(|e| format!("not a JSON object of a request: {e}"))?;
    let number = |name: &str, value: Option<Value>, range: std::ops::RangeInclusive<u64>| {
        let value = value.ok_or_else(|| format!("field {name} is missing"))?;
        let n = value.as_u64().ok_or_else(|| format!("field {name} is {}, not a whole number", shorten(&value)))?;
        if range.contains(&n) {
            Ok(n)
        } else {
            Err(format!("field {name} is {n}, out of range {}..={}", range.start(), range.end()))
        }
    };
    let timestamp_ms = number("timestamp", line.timestamp, 0..=u64::MAX)?;
    let input = number("input_length", line.input_length, 1..=MAX_INPUT_TOKENS)?;
    let output = number("output_length", line.output_length, 0..=MAX_INPUT_TOKENS)?;
    let ids = match line.hash_ids {
        None => return Err("field hash_ids is missing".into()),
        Some(Value::Array(ids)) => ids,
        Some(other) => return Err(format!("field hash_ids is {}, not a list", shorten(&other))),
    };
    let blocks = ids
        .iter()
        .map(|v| v.as_u64().ok_or_else(|| format!("hash_ids holds {}, not a whole number", shorten(v))))
        .collect::<std::result::Result<Vec<_>, _>>()?;
    let want = input.div_ceil(u64::from(BLOCK_TOKENS));
    if blocks.len() as u64 != want {
        return Err(format!(
            "hash_ids holds {} ids, but input_length {input} makes {want} blocks of {BLOCK_TOKENS} tokens",
            blocks.len()
        ));
    }
    let fits = |n: u64, name: &str| u32::try_from(n).map_err(|_| format!("field {name} is {n}: too large"));
    Ok(TraceRequest {
        timestamp_ms,
        input_tokens: fits(input, "input_length")?,
        output_tokens: fits(output, "output_length")?,
        blocks,
    })
}

fn shorten(value: &Value) -> String {
    let text = value.to_string();
    if text.chars().count() > 40 { format!("{}..", text.chars().take(40).collect::<String>()) } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<TraceRequest>> {
        TraceReader::new(text.as_bytes(), "t.jsonl").collect()
    }

    #[test]
    fn the_built_in_trace_is_whole() {
        let requests = TraceSource::open(None).unwrap().first(1000).unwrap();
        assert_eq!(requests.len(), 500);
        assert_eq!(requests[0].input_tokens, 6758);
        assert_eq!(requests[0].blocks, (0..14).collect::<Vec<_>>());
        assert_eq!(requests.iter().map(|r| r.input_tokens).max(), Some(121_298));
    }

    #[test]
    fn empty_lines_are_passed_over_and_unknown_fields_ignored() {
        let text = "\n{\"timestamp\":1,\"input_length\":513,\"output_length\":0,\"hash_ids\":[7,9],\"more\":1}\r\n\n";
        let want = TraceRequest { timestamp_ms: 1, input_tokens: 513, output_tokens: 0, blocks: vec![7, 9] };
        assert_eq!(read(text), Ok(vec![want]));
    }

    #[test]
    fn a_broken_line_is_named_with_file_and_number() {
        let good = r#"{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":[7]}"#;
        for (bad, says) in [
            ("{", "not a JSON object"),
            ("[]", "not a JSON object"),
            ("{}", "field timestamp is missing"),
            (r#"{"timestamp":1,"output_length":1,"hash_ids":[7]}"#, "field input_length is missing"),
            (r#"{"timestamp":1,"input_length":0,"output_length":1,"hash_ids":[]}"#, "input_length is 0, out of range"),
            (
                r#"{"timestamp":1,"input_length":-5,"output_length":1,"hash_ids":[7]}"#,
                "input_length is -5, not a whole",
            ),
            (r#"{"timestamp":1,"input_length":99999999999,"output_length":1,"hash_ids":[7]}"#, "out of range"),
            (r#"{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":3}"#, "hash_ids is 3, not a list"),
            (r#"{"timestamp":1,"input_length":5,"output_length":1,"hash_ids":["x"]}"#, "hash_ids holds \"x\""),
            (r#"{"timestamp":1,"input_length":513,"output_length":1,"hash_ids":[7]}"#, "513 makes 2 blocks"),
        ] {
            let e = read(&format!("{good}\n{bad}\n")).unwrap_err().one_line();
            assert!(e.starts_with("t.jsonl:2: ") && e.contains(says), "{bad}: {e}");
        }
        assert!(TraceReader::new(&b"\xff\n"[..], "t").next().unwrap().is_err());
    }

    #[test]
    fn stops_after_an_error() {
        let mut reader = TraceReader::new(&b"x\ny\n"[..], "t");
        assert!(reader.next().unwrap().is_err());
        assert!(reader.next().is_none());
    }

    #[test]
    fn missing_files_empty_files_and_odd_synthetics_are_errors() {
        let e = TraceSource::open(Some("/nowhere/t.jsonl")).err().unwrap().one_line();
        assert!(e.contains("cannot read trace /nowhere/t.jsonl"), "{e}");
        assert!(TraceSource::open(Some("/")).err().unwrap().one_line().contains("directory"));
        let empty = tempfile::NamedTempFile::new().unwrap();
        let e = TraceSource::open(empty.path().to_str()).unwrap().first(3).unwrap_err().one_line();
        assert!(e.contains("holds no request"), "{e}");
        for arg in
            ["synthetic:", "synthetic:tokens=0", "synthetic:tokens=x", "synthetic:shared", "synthetic:tokens=1,odd"]
        {
            assert!(TraceSource::open(Some(arg)).is_err(), "{arg}");
        }
    }

    #[test]
    fn synthetic_requests_share_blocks_only_when_asked() {
        let own = TraceSource::open(Some("synthetic:tokens=1024")).unwrap().first(2).unwrap();
        assert_eq!((own[0].blocks.clone(), own[1].blocks.clone()), (vec![0, 1], vec![2, 3]));
        let shared = TraceSource::open(Some("synthetic:tokens=1000,shared")).unwrap().first(2).unwrap();
        assert_eq!(shared[0], shared[1]);
    }
}
