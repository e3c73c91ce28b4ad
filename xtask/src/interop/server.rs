//! The fork server of SGLang peers: imports SGLang once, then starts a peer in tens of milliseconds.

use std::collections::HashMap;
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, test_kill_process_group};
use serde_json::{Value, json};

use super::process::{Inbox, Process, Said};
use crate::sh::{self, Result};

/// Importing SGLang takes about ten seconds; on a cold disk more.
const IMPORT: Duration = Duration::from_secs(180);
/// What its children take to go when its standard input ends.
const LEAVE: Duration = Duration::from_secs(10);

#[derive(Default)]
struct Shared {
    stdin: Option<ChildStdin>,
    /// Where the lines of a child go, by its id.
    routes: HashMap<String, (usize, Inbox)>,
    pids: HashMap<String, u64>,
}

/// The running server.
pub struct Server {
    shared: Arc<Mutex<Shared>>,
    child: Mutex<Child>,
}

impl Server {
    /// Start it; returns when SGLang is imported.
    pub fn start(mut command: Command, log: &Path) -> Result<Self> {
        let file = std::fs::File::create(log).map_err(|e| format!("cannot write {}: {e}", log.display()))?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(file).process_group(0);
        let mut child = command.spawn().map_err(|e| format!("cannot run `{}`: {e}", sh::show(&command)))?;
        let shared = Arc::new(Mutex::new(Shared { stdin: child.stdin.take(), ..Shared::default() }));
        let stdout = child.stdout.take().ok_or("the SGLang server has no output")?;
        let (ready, serving) = channel();
        let routes = Arc::clone(&shared);
        std::thread::spawn(move || {
            for line in BufReader::new(stdout).split(b'\n').map_while(std::io::Result::ok) {
                let line = String::from_utf8_lossy(&line);
                match serde_json::from_str::<Value>(&line) {
                    Ok(v) if v["event"] == "serving" => drop(ready.send(())),
                    Ok(v) => route(&routes, &v),
                    Err(_) => eprintln!("interop: the SGLang server says: {line}"),
                }
            }
            // It is gone: so are its children.
            for (_, (actor, inbox)) in lock(&routes).routes.drain() {
                let _ = inbox.send((actor, Said::Exit(-1)));
            }
        });
        let server = Self { shared, child: Mutex::new(child) };
        server.wait(&serving).map_err(|e| format!("{e}; `{}`, log: {}", sh::show(&command), log.display()))?;
        Ok(server)
    }

    fn wait(&self, serving: &Receiver<()>) -> Result<()> {
        match serving.recv_timeout(IMPORT) {
            Ok(()) => Ok(()),
            Err(RecvTimeoutError::Timeout) => Err(format!("SGLang is not imported after {} s", IMPORT.as_secs())),
            Err(RecvTimeoutError::Disconnected) => Err("the SGLang server ended before SGLang was imported".into()),
        }
    }

    /// Start a peer. `id` must be new.
    pub fn peer(self: &Arc<Self>, id: &str, argv: &[&str], log: &Path, actor: usize, inbox: Inbox) -> Result<Served> {
        lock(&self.shared).routes.insert(id.to_owned(), (actor, inbox));
        self.tell(&json!({"start": id, "argv": argv, "env": {}, "log": log}))?;
        Ok(Served { server: Arc::clone(self), id: id.to_owned() })
    }

    pub fn pid(&self) -> u32 {
        self.child.lock().unwrap_or_else(PoisonError::into_inner).id()
    }

    fn tell(&self, value: &Value) -> Result<()> {
        let mut shared = lock(&self.shared);
        let stdin = shared.stdin.as_mut().ok_or("the SGLang server is closed")?;
        writeln!(stdin, "{value}").and_then(|()| stdin.flush()).map_err(|e| format!("the SGLang server is gone: {e}"))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(lock(&self.shared).stdin.take());
        let mut child = self.child.lock().unwrap_or_else(PoisonError::into_inner);
        let until = Instant::now() + LEAVE;
        while matches!(child.try_wait(), Ok(None)) {
            if Instant::now() > until {
                eprintln!("interop: the SGLang server does not go; it is killed");
                let _ = child.kill();
                let _ = child.wait();
                return;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

fn lock(shared: &Mutex<Shared>) -> std::sync::MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A line of the server to the actor it is about.
fn route(shared: &Mutex<Shared>, line: &Value) {
    let mut shared = lock(shared);
    let Some(id) = line["id"].as_str() else {
        eprintln!("interop: the SGLang server says: {line}");
        return;
    };
    match line["event"].as_str() {
        Some("started") => {
            let pid = line["pid"].as_u64().unwrap_or(0);
            shared.pids.insert(id.to_owned(), pid);
        }
        Some("exit") => {
            if let Some((actor, inbox)) = shared.routes.remove(id) {
                let code = line["rc"].as_i64().and_then(|c| i32::try_from(c).ok()).unwrap_or(-1);
                let _ = inbox.send((actor, Said::Exit(code)));
            }
        }
        _ => {
            if let Some((actor, inbox)) = shared.routes.get(id) {
                let _ = inbox.send((*actor, Said::Line(line.to_string())));
            }
        }
    }
}

/// A peer that the server started.
pub struct Served {
    server: Arc<Server>,
    id: String,
}

impl Process for Served {
    // What cannot be said to a server that is gone needs no saying: the reader has told of the exit.
    fn line(&self, text: &str) {
        let _ = self.server.tell(&json!({"line": self.id, "text": text}));
    }

    fn close(&self) {
        let _ = self.server.tell(&json!({"close": self.id}));
    }

    fn left(&self) -> bool {
        let pid = lock(&self.server.shared).pids.get(&self.id).copied();
        pid.and_then(|p| Pid::from_raw(i32::try_from(p).ok()?)).is_some_and(|p| test_kill_process_group(p).is_ok())
    }

    fn signal(&self, signal: Signal) {
        let _ = self.server.tell(&json!({"kill": self.id, "signal": signal.as_raw()}));
    }
}
