//! How peers are started, and how a person would start them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

use super::options::Options;
use super::process::{Inbox, Own, Process};
use super::program::Program;
use super::server::Server;
use crate::sh::Result;

/// The two programs, ready to be started.
pub struct Launcher {
    /// Our program.
    pub kvt: Option<PathBuf>,
    /// Libraries for it, each with the variable that names it; others it looks for itself.
    pub libraries: Vec<(&'static str, PathBuf)>,
    /// Python with SGLang.
    pub python: Option<PathBuf>,
    pub server: Option<Arc<Server>>,
    /// Folder of logs.
    pub logs: PathBuf,
}

/// The folder of the Python package `sglang_peer`, from the root of the workspace.
pub const PACKAGE: &str = "interop";

/// `python -m sglang_peer ARG`, from the root of the workspace.
pub fn sglang_peer(python: &Path) -> Command {
    let mut command = Command::new(python);
    command.env("PYTHONPATH", PACKAGE).args(["-m", "sglang_peer"]);
    command
}

impl Launcher {
    /// Start a peer. `id` is not used twice in a run; its log is named after it.
    pub fn start(
        &self,
        program: Program,
        role: &str,
        options: &Options,
        id: &str,
        to: (usize, Inbox),
    ) -> Result<Box<dyn Process>> {
        let log = self.log(id);
        // Of a run before; the SGLang server appends.
        let _ = std::fs::remove_file(&log);
        let (actor, inbox) = to;
        match program {
            Program::Ours => {
                let mut command = Command::new(self.kvt.as_deref().ok_or("kvt was not built for this run")?);
                command.args(["peer", role]).args(options.words());
                command.envs(self.libraries.iter().map(|(variable, library)| (variable, library)));
                Ok(Box::new(Own::start(command, &log, actor, inbox)?))
            }
            Program::Sglang => {
                let server = self.server.as_ref().ok_or("the SGLang server was not started for this run")?;
                let argv: Vec<&str> = std::iter::once(role).chain(options.words()).collect();
                Ok(Box::new(server.peer(id, &argv, &log, actor, inbox)?))
            }
        }
    }

    pub fn log(&self, id: &str) -> PathBuf {
        self.logs.join(format!("{id}.log"))
    }

    /// The command line for a person in the root of the workspace.
    pub fn by_hand(&self, program: Program, role: &str, options: &Options) -> String {
        match program {
            Program::Ours => {
                let kvt = self.kvt.as_deref().unwrap_or(Path::new("kvt"));
                format!("{} peer {role} {options}", kvt.display())
            }
            Program::Sglang => {
                let python = self.python.as_deref().unwrap_or(Path::new("python"));
                format!("PYTHONPATH={PACKAGE} {} -m sglang_peer {role} {options}", python.display())
            }
        }
    }
}
