//! Running other programs.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, ExitCode};

/// Errors are lines for a person.
pub type Result<T> = std::result::Result<T, String>;

/// Where the workspace's `Cargo.toml` is.
pub fn workspace_root() -> Result<PathBuf> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    here.parent().map(PathBuf::from).ok_or_else(|| "xtask has no parent directory".to_owned())
}

/// The cargo that runs this program.
pub fn cargo<I: IntoIterator<Item = S>, S: AsRef<OsStr>>(args: I) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Set by the outer cargo for this program; they are not for its children.
    for name in ["CARGO_MANIFEST_DIR", "CARGO_MANIFEST_PATH", "CARGO_PKG_NAME", "CARGO_PKG_VERSION"] {
        command.env_remove(name);
    }
    command.args(args);
    command
}

/// How a command line reads.
pub fn show(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program()).file_name().unwrap_or(command.get_program());
    std::iter::once(program).chain(command.get_args()).map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

/// Run to the end with our own output; its exit code.
pub fn status(command: &mut Command) -> Result<ExitCode> {
    let status = command.status().map_err(|e| format!("cannot run `{}`: {e}", show(command)))?;
    // No code: ended by a signal.
    Ok(ExitCode::from(status.code().and_then(|c| u8::try_from(c).ok()).unwrap_or(1)))
}

/// Run to the end with our own output; an error when it fails.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command.status().map_err(|e| format!("cannot run `{}`: {e}", show(command)))?;
    if status.success() { Ok(()) } else { Err(format!("`{}`: {status}", show(command))) }
}

/// Run to the end and return standard output; an error with the end of standard error when it fails.
pub fn output(command: &mut Command) -> Result<String> {
    let out = command.output().map_err(|e| format!("cannot run `{}`: {e}", show(command)))?;
    if out.status.success() {
        return Ok(String::from_utf8_lossy(&out.stdout).into_owned());
    }
    let text = String::from_utf8_lossy(&out.stderr);
    let last = text.lines().rev().find(|l| !l.trim().is_empty()).unwrap_or("no message");
    Err(format!("`{}`: {}: {last}", show(command), out.status))
}

/// `cargo metadata` of the workspace.
pub fn metadata(extra: &[&str]) -> Result<serde_json::Value> {
    let text = output(cargo(["metadata", "--format-version=1", "--locked"]).args(extra))?;
    serde_json::from_str(&text).map_err(|e| format!("cargo metadata is not JSON: {e}"))
}
