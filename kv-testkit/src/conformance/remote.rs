//! A target in another process, driven over two pipes.
//!
//! The child calls [`serve_stdio`] with its transport; the parent holds a [`RemoteTarget`]. One command a line, one answer
//! a line; lines without the mark are noise of whatever else prints there.

use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use kv_core::host::HostIdentity;
use kv_core::net::Endpoint;
use kv_core::transport::{PeerDescriptor, Transport};

use super::harness::{Absent, Block, LocalFaults, LocalTarget, Target};
use crate::print::{hex, unhex};

/// In front of every answer.
const MARK: &str = "kvtk";

/// Serve commands for `transport` from this process's standard input until it ends; answers go to standard output.
pub fn serve_stdio(transport: Arc<dyn Transport>, endpoint: Endpoint, faults: impl LocalFaults) -> std::io::Result<()> {
    serve(transport, endpoint, faults, std::io::stdin().lock(), std::io::stdout().lock())
}

/// Serve commands for `transport` from `input` until it ends. Of `faults`, `cut` is used; the parent kills and pauses.
pub fn serve(
    transport: Arc<dyn Transport>,
    endpoint: Endpoint,
    faults: impl LocalFaults,
    input: impl BufRead,
    mut output: impl Write,
) -> std::io::Result<()> {
    let mut target = LocalTarget::with_faults(transport, endpoint, faults);
    for line in input.lines() {
        let line = line?;
        match answer(&mut target, &line) {
            Ok(text) => writeln!(output, "{MARK} ok {text}")?,
            Err(text) => writeln!(output, "{MARK} err {text}")?,
        }
        output.flush()?;
    }
    Ok(())
}

fn answer(target: &mut dyn Target, line: &str) -> Result<String, String> {
    let words: Vec<&str> = line.split(' ').collect();
    let number = |i: usize| -> Result<usize, String> {
        let word = words.get(i).ok_or_else(|| format!("{line:?} is too short"))?;
        word.parse().map_err(|e| format!("{word:?}: {e}"))
    };
    let block = || number(1).map(|n| n as u32);
    match words[0] {
        "descriptor" => {
            let d = target.descriptor()?;
            let (name, host) = (hex(d.name.as_bytes()), hex(d.endpoint.host().as_bytes()));
            let process = d.host.map(|h| hex(&h.to_bytes())).unwrap_or_default();
            Ok(format!("{name} {host} {} {} {process}", d.endpoint.port(), hex(&d.metadata)))
        }
        "alloc" => target.alloc(number(1)?, number(2)? == 1).map(|b| format!("{} {} {}", b.id, b.addr, b.len)),
        "unregister" => target.unregister(block()?).map(|()| String::new()),
        "free" => target.free(block()?).map(|()| String::new()),
        "read" => target.read(block()?, number(2)?, number(3)?).map(|bytes| hex(&bytes)),
        "write" => {
            let bytes = unhex(words.get(3).unwrap_or(&""))?;
            target.write(block()?, number(2)?, &bytes).map(|()| String::new())
        }
        "guards" => target.check_guards(block()?).map(|()| String::new()),
        "cut" => target.cut().map(|()| String::new()).map_err(|a| a.0.to_string()),
        other => Err(format!("no command {other:?}")),
    }
}

/// A target in a child process.
pub struct RemoteTarget {
    child: Option<Child>,
    to: Box<dyn Write>,
    from: Box<dyn BufRead>,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Running,
    Paused,
    Dead,
}

impl RemoteTarget {
    /// Start `command`, whose program calls [`serve_stdio`].
    pub fn spawn(mut command: Command) -> std::io::Result<Self> {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let missing = || std::io::Error::other("no pipe to the child");
        let to = child.stdin.take().ok_or_else(missing)?;
        let from = child.stdout.take().ok_or_else(missing)?;
        let mut target = Self::over(from, to);
        target.child = Some(child);
        Ok(target)
    }

    /// Talk to a [`serve`] over any pair of pipes. Without a child there is nothing to kill or pause.
    pub fn over(from: impl Read + 'static, to: impl Write + 'static) -> Self {
        Self { child: None, to: Box::new(to), from: Box::new(BufReader::new(from)), state: State::Running }
    }

    /// The child's process id.
    pub fn pid(&self) -> Option<u32> {
        self.child.as_ref().map(Child::id)
    }

    fn ask(&mut self, command: &str) -> Result<String, String> {
        match self.state {
            State::Running => {}
            State::Paused => return Err("the target is paused".into()),
            State::Dead => return Err("the target is dead".into()),
        }
        let io = |e: std::io::Error| format!("the target does not answer: {e}");
        self.to.write_all(command.as_bytes()).map_err(io)?;
        self.to.write_all(b"\n").map_err(io)?;
        self.to.flush().map_err(io)?;
        loop {
            let mut line = String::new();
            if self.from.read_line(&mut line).map_err(io)? == 0 {
                return Err("the target has gone".into());
            }
            // A test runner may have printed the beginning of a line before.
            let Some((_, reply)) = line.trim_end().split_once(&format!("{MARK} ")) else { continue };
            return match reply.split_once(' ').unwrap_or((reply, "")) {
                ("ok", text) => Ok(text.to_string()),
                (_, text) => Err(text.to_string()),
            };
        }
    }

    /// Send a signal by name with the system's `kill`, and wait until the kernel shows one of `states`.
    fn signal(&mut self, name: &str, states: &[char]) -> Result<(), Absent> {
        let pid = self.pid().ok_or(Absent("the target has no process of its own"))?;
        let sent = Command::new("kill").args([format!("-{name}"), pid.to_string()]).status();
        if !sent.is_ok_and(|s| s.success()) {
            return Err(Absent("the system's `kill` cannot be run here"));
        }
        loop {
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
            let stat = stat.map_err(|_| Absent("process states cannot be read here"))?;
            // The name in brackets may hold anything; the state follows the last bracket.
            let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
            if state.is_some_and(|s| states.contains(&s)) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn field<T: std::str::FromStr>(words: &[&str], i: usize) -> Result<T, String> {
    words.get(i).and_then(|w| w.parse().ok()).ok_or_else(|| format!("malformed answer {words:?}"))
}

impl Target for RemoteTarget {
    fn descriptor(&mut self) -> Result<PeerDescriptor, String> {
        let reply = self.ask("descriptor")?;
        let words: Vec<&str> = reply.split(' ').collect();
        let text = |i: usize| {
            let bytes = unhex(words.get(i).unwrap_or(&""))?;
            String::from_utf8(bytes).map_err(|e| e.to_string())
        };
        Ok(PeerDescriptor {
            name: text(0)?,
            endpoint: Endpoint::new(&text(1)?, field(&words, 2)?),
            metadata: unhex(words.get(3).unwrap_or(&""))?.into(),
            host: unhex(words.get(4).unwrap_or(&""))?.try_into().ok().map(HostIdentity::from_bytes),
        })
    }

    fn alloc(&mut self, len: usize, register: bool) -> Result<Block, String> {
        let reply = self.ask(&format!("alloc {len} {}", u8::from(register)))?;
        let words: Vec<&str> = reply.split(' ').collect();
        Ok(Block { id: field(&words, 0)?, addr: field(&words, 1)?, len: field(&words, 2)? })
    }

    fn unregister(&mut self, block: u32) -> Result<(), String> {
        self.ask(&format!("unregister {block}")).map(drop)
    }

    fn free(&mut self, block: u32) -> Result<(), String> {
        self.ask(&format!("free {block}")).map(drop)
    }

    fn read(&mut self, block: u32, offset: usize, len: usize) -> Result<Vec<u8>, String> {
        unhex(&self.ask(&format!("read {block} {offset} {len}"))?)
    }

    fn write(&mut self, block: u32, offset: usize, bytes: &[u8]) -> Result<(), String> {
        self.ask(&format!("write {block} {offset} {}", hex(bytes))).map(drop)
    }

    fn check_guards(&mut self, block: u32) -> Result<(), String> {
        self.ask(&format!("guards {block}")).map(drop)
    }

    fn kill(&mut self) -> Result<(), Absent> {
        let child = self.child.as_mut().ok_or(Absent("the target has no process of its own"))?;
        // Killing what is dead already is fine; either way it is reaped here.
        let _ = child.kill();
        let _ = child.wait();
        self.state = State::Dead;
        Ok(())
    }

    fn pause(&mut self) -> Result<(), Absent> {
        self.signal("STOP", &['T', 't'])?;
        self.state = State::Paused;
        Ok(())
    }

    fn resume(&mut self) {
        if self.state == State::Paused && self.signal("CONT", &['R', 'S', 'D']).is_ok() {
            self.state = State::Running;
        }
    }

    fn cut(&mut self) -> Result<(), Absent> {
        self.ask("cut").map(drop).map_err(|_| Absent("the target's process cannot cut its connections"))
    }
}

impl Drop for RemoteTarget {
    fn drop(&mut self) {
        if self.child.is_some() {
            let _ = self.kill();
        }
    }
}
