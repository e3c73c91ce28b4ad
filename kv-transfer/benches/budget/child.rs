//! The second process: this program again, in a role, told what to do line by line.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use serde_json::Value;

use crate::{Result, sys};

/// The measuring process's end.
pub struct Peer {
    role: &'static str,
    process: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Peer {
    /// Start this program in a role.
    pub fn start(role: &'static str) -> Result<Self> {
        Self::start_with(role, &[])
    }

    /// The same with more in its environment, and in that of those it starts.
    pub fn start_with(role: &'static str, environment: &[(&str, &str)]) -> Result<Self> {
        let mut process = Command::new(std::env::current_exe()?)
            .args(["--bench", "--role", role])
            .envs(environment.iter().copied())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let (input, output) = (process.stdin.take(), process.stdout.take());
        let (Some(input), Some(output)) = (input, output) else { return Err("no pipes".into()) };
        Ok(Self { role, process, input, output: BufReader::new(output) })
    }

    /// Its process.
    pub fn pid(&self) -> i32 {
        self.process.id() as i32
    }

    pub fn tell(&mut self, what: &Value) -> Result<()> {
        writeln!(self.input, "{what}")?;
        Ok(self.input.flush()?)
    }

    pub fn hear(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.output.read_line(&mut line)? == 0 {
            return Err(format!("the {} process ended; see its message above", self.role).into());
        }
        Ok(serde_json::from_str(&line)?)
    }

    pub fn ask(&mut self, what: &Value) -> Result<Value> {
        self.tell(what)?;
        self.hear()
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // Only our own child; it may have ended by itself.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The other process's end: its standard input and output.
pub struct Link(());

impl Link {
    /// Only in a process that [`Peer::start`] made.
    pub fn new() -> Self {
        sys::die_with_parent();
        sys::allow_copies();
        Self(())
    }

    /// The next request; `None` at the end.
    pub fn next(&mut self) -> Result<Option<Value>> {
        let mut line = String::new();
        if std::io::stdin().lock().read_line(&mut line)? == 0 {
            return Ok(None);
        }
        Ok(Some(serde_json::from_str(&line)?))
    }

    pub fn say(&mut self, what: &Value) -> Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(out, "{what}")?;
        Ok(out.flush()?)
    }
}

/// A number in a message.
pub fn number(v: &Value, key: &str) -> Result<u64> {
    v[key].as_u64().ok_or_else(|| format!("no number '{key}' in {v}").into())
}

/// A text in a message.
pub fn text<'a>(v: &'a Value, key: &str) -> Result<&'a str> {
    v[key].as_str().ok_or_else(|| format!("no text '{key}' in {v}").into())
}

/// A list of numbers in a message.
pub fn numbers(v: &Value, key: &str) -> Result<Vec<u64>> {
    let list = v[key].as_array().ok_or_else(|| format!("no list '{key}' in {v}"))?;
    Ok(list.iter().filter_map(Value::as_u64).collect())
}

/// A list of page numbers in a message.
pub fn pages(v: &Value, key: &str) -> Result<Vec<i32>> {
    Ok(numbers(v, key)?.into_iter().map(|p| p as i32).collect())
}
