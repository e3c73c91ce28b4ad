//! Processes of actors: `kvt` as a child of ours, SGLang as a child of its fork server. Both say the same things.

use std::fs::File;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::process::{Pid, Signal, kill_process_group, test_kill_process_group};

use crate::sh::{self, Result};

/// What comes from an actor's process.
#[derive(Debug)]
pub enum Said {
    Line(String),
    /// Exit status; a signal is negative.
    Exit(i32),
}

/// Said by which actor.
pub type Inbox = Sender<(usize, Said)>;

/// An actor's process, as its runner holds it.
pub trait Process: Send {
    /// A line on its standard input.
    fn line(&self, text: &str);
    /// End of its standard input.
    fn close(&self);
    /// A signal to it and its children.
    fn signal(&self, signal: Signal);
    /// Whether anything of its process group still runs.
    fn left(&self) -> bool;
}

/// A child of ours, in a process group of its own.
pub struct Own {
    pid: Pid,
    stdin: Mutex<Option<ChildStdin>>,
    gone: Arc<Mutex<bool>>,
}

impl Own {
    pub fn start(mut command: Command, log: &Path, actor: usize, inbox: Inbox) -> Result<Self> {
        let log = File::create(log).map_err(|e| format!("cannot write {}: {e}", log.display()))?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(log).process_group(0);
        let mut child = command.spawn().map_err(|e| format!("cannot run `{}`: {e}", sh::show(&command)))?;
        let pid = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or("a process without a number")?;
        let stdin = Mutex::new(child.stdin.take());
        let gone = Arc::new(Mutex::new(false));
        let flag = Arc::clone(&gone);
        std::thread::spawn(move || read(child, &flag, actor, &inbox));
        Ok(Self { pid, stdin, gone })
    }
}

fn read(mut child: Child, gone: &Mutex<bool>, actor: usize, inbox: &Inbox) {
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).split(b'\n').map_while(std::io::Result::ok) {
            // The receiver may have given up on this actor.
            let _ = inbox.send((actor, Said::Line(String::from_utf8_lossy(&line).into_owned())));
        }
    }
    let status = child.wait();
    *gone.lock().unwrap_or_else(PoisonError::into_inner) = true;
    let code = status.map_or(-1, |s| s.code().unwrap_or_else(|| -s.signal().unwrap_or(1)));
    let _ = inbox.send((actor, Said::Exit(code)));
}

impl Process for Own {
    fn line(&self, text: &str) {
        if let Some(stdin) = self.stdin.lock().unwrap_or_else(PoisonError::into_inner).as_mut() {
            // It may have gone meanwhile; its exit says so.
            let _ = writeln!(stdin, "{text}").and_then(|()| stdin.flush());
        }
    }

    fn close(&self) {
        drop(self.stdin.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    fn signal(&self, signal: Signal) {
        if !*self.gone.lock().unwrap_or_else(PoisonError::into_inner) {
            let _ = kill_process_group(self.pid, signal);
        }
    }

    fn left(&self) -> bool {
        test_kill_process_group(self.pid).is_ok()
    }
}
