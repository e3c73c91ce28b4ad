//! Mooncake's own Python module as the source, as SGLang uses it: `batch_transfer_sync_write`, `transfer_sync_write`.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::{Value, json};

use super::work::Piece;
use crate::Result;
use crate::child::number;

const PROGRAM: &str = include_str!("source.py");

/// The Python that has the module: that of `cargo xtask setup interop`, or the one that this variable names.
const VARIABLE: &str = "KV_BENCH_MOONCAKE_PYTHON";

fn python() -> Option<PathBuf> {
    if let Some(path) = std::env::var_os(VARIABLE) {
        return Some(path.into());
    }
    let exe = std::env::current_exe().ok()?;
    let found = exe.ancestors().map(|d| d.join("setup/interop/bin/python")).find(|p| p.exists());
    found.filter(|p| p.with_file_name("..").join("lib").exists())
}

/// A process with the module and memory of its own.
pub struct Python {
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    base: u64,
    /// Of the module's package.
    pub version: String,
}

impl Python {
    /// `None`: there is no such Python here.
    pub fn start(target: &str, bytes: u64) -> Result<Option<Self>> {
        let Some(python) = python() else { return Ok(None) };
        let mut process = Command::new(python)
            .args(["-c", PROGRAM, target, &bytes.to_string()])
            .env("MC_FORCE_TCP", "1")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (Some(input), Some(output)) = (process.stdin.take(), process.stdout.take()) else {
            return Err("no pipes".into());
        };
        let mut this = Self { process, input, output: BufReader::new(output), base: 0, version: String::new() };
        let hello = this.hear()?;
        (this.base, this.version) = (number(&hello, "base")?, hello["version"].as_str().unwrap_or_default().to_owned());
        Ok(Some(this))
    }

    fn hear(&mut self) -> Result<Value> {
        loop {
            let mut line = String::new();
            if self.output.read_line(&mut line)? == 0 {
                return Err("the Python process ended; see its message above".into());
            }
            // The module writes to standard output, too.
            if let Some(text) = line.strip_prefix("reply ") {
                return Ok(serde_json::from_str(text)?);
            }
        }
    }

    /// Write each list once, in batches of at most `cut`, by so many threads; ns and ns of CPU.
    pub fn write(&mut self, lists: &[Vec<Piece>], ours: u64, cut: u64, threads: u64) -> Result<(u64, u64)> {
        let list = |pieces: &Vec<Piece>| {
            let column = |f: fn(&Piece) -> u64| pieces.iter().map(f).collect::<Vec<_>>();
            let from: Vec<u64> = pieces.iter().map(|p| p.from - ours + self.base).collect();
            json!([from, column(|p| p.to), column(|p| p.len)])
        };
        let lists: Vec<Value> = lists.iter().map(list).collect();
        let request = json!({ "lists": lists, "cut": cut, "threads": threads });
        writeln!(self.input, "{request}")?;
        self.input.flush()?;
        let reply = self.hear()?;
        Ok((number(&reply, "ns")?, number(&reply, "cpu")?))
    }
}

impl Drop for Python {
    fn drop(&mut self) {
        // Only our own child; it may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
