//! A child of a check: lines of JSON to it and from it, and never longer than a deadline.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::probe::PROBE;
use crate::error::CliError;

/// Why a child could not do its part, in its own words.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Failure {
    /// What is wrong.
    pub what: String,
    /// What to do.
    pub hint: String,
}

impl From<CliError> for Failure {
    fn from(e: CliError) -> Self {
        Self { what: e.what, hint: e.hint }
    }
}

/// One that runs. Killed when dropped: its memory, its threads and what it has loaded go with it.
pub struct Other {
    name: &'static str,
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
    deadline: Instant,
}

impl Other {
    /// This program, told to do `task` of [`probe::child`](super::probe::child).
    pub fn start(name: &'static str, mut command: Command, task: &str, deadline: Instant) -> Result<Self, CliError> {
        let cannot = |e: std::io::Error| CliError::new(format!("cannot start the {name}: {e}"));
        // What libraries say is noise here, unless somebody asks for it.
        let loud =
            ["NIXL_LOG_LEVEL", "UCX_LOG_LEVEL", "MC_LOG_LEVEL"].iter().any(|name| std::env::var_os(name).is_some());
        let mut child = command
            .env(PROBE, task)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(if loud { Stdio::inherit() } else { Stdio::null() })
            .spawn()
            .map_err(cannot)?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (tx, lines) = channel();
        let other = Self { name, child, stdin, lines, deadline };
        if let Some(stdout) = stdout {
            let read = move || {
                for line in BufReader::new(stdout).lines() {
                    let Ok(line) = line else { return };
                    if tx.send(line).is_err() {
                        return;
                    }
                }
            };
            // Not joined: it ends with the child's output.
            std::thread::Builder::new().name("kvt-doctor".into()).spawn(read).map_err(cannot)?;
        }
        Ok(other)
    }

    /// Say something to it. That it is gone shows when it is asked.
    pub fn tell(&mut self, what: &impl Serialize) {
        if let (Some(stdin), Ok(mut line)) = (&mut self.stdin, serde_json::to_string(what)) {
            line.push('\n');
            let _ = stdin.write_all(line.as_bytes()).and_then(|()| stdin.flush());
        }
    }

    /// What it says next. Lines that are none of its own, of libraries that print, are passed over.
    pub fn hear<T: DeserializeOwned>(&mut self) -> Result<T, CliError> {
        loop {
            match self.lines.recv_timeout(self.deadline.saturating_duration_since(Instant::now())) {
                Ok(line) => {
                    if let Ok(said) = serde_json::from_str::<Result<T, Failure>>(&line) {
                        return said.map_err(|f| CliError::new(f.what).hint(f.hint));
                    }
                }
                Err(RecvTimeoutError::Timeout) => {
                    return Err(CliError::new(format!("the {} hangs, and was ended", self.name)));
                }
                Err(RecvTimeoutError::Disconnected) => {
                    let status = self.status();
                    return Err(CliError::new(format!("the {} ended without a word: {status}", self.name)));
                }
            }
        }
    }

    /// How it ended; its output has.
    fn status(&mut self) -> String {
        let patience = Instant::now() + Duration::from_secs(1);
        while Instant::now() < patience {
            match self.child.try_wait() {
                Ok(Some(status)) => return status.to_string(),
                Ok(None) => std::thread::sleep(Duration::from_millis(5)),
                Err(e) => return e.to_string(),
            }
        }
        "it closed its output and goes on".into()
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        // Errors only mean that it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The child's own side: the next line on standard input.
pub fn hear<T: DeserializeOwned>() -> Result<T, CliError> {
    let mut line = String::new();
    let failed = |e: &dyn std::fmt::Display| CliError::new(format!("the check asks for nonsense: {e}"));
    std::io::stdin().lock().read_line(&mut line).map_err(|e| failed(&e))?;
    serde_json::from_str(&line).map_err(|e| failed(&e))
}

/// The child's own side: a line on standard output.
pub fn say<T: Serialize>(said: &Result<T, Failure>) -> Result<(), CliError> {
    crate::out::line(serde_json::to_string(said).map_err(|e| CliError::new(e.to_string()))?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str, patience: Duration) -> Other {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        Other::start("shell", command, "", Instant::now() + patience).unwrap()
    }

    const LONG: Duration = Duration::from_secs(60);

    #[test]
    fn it_is_heard_between_the_lines_of_its_libraries() {
        let mut other = shell(
            "read x; echo noise; echo \"{\\\"Ok\\\":$x}\"; echo '{\"Err\":{\"what\":\"a\",\"hint\":\"b\"}}'",
            LONG,
        );
        other.tell(&7);
        assert_eq!(other.hear::<u32>(), Ok(7));
        assert_eq!(other.hear::<u32>(), Err(CliError::new("a").hint("b")));
    }

    #[test]
    fn its_crash_and_its_hang_are_failures_in_words() {
        let e = shell("kill -SEGV $$", LONG).hear::<u32>().unwrap_err();
        assert!(e.what.contains("the shell ended without a word: signal: 11"), "{e}");
        let started = Instant::now();
        let e = shell("exec sleep 60", Duration::from_millis(50)).hear::<u32>().unwrap_err();
        assert!(e.what.contains("hangs") && started.elapsed() < Duration::from_secs(30), "{e}");
    }
}
