//! Results on standard output. `print!` panics when nothing can be written; a full disk is no fault of this program.

use std::io::Write;

use crate::error::{CliError, Result};

/// Write `text` and flush it.
///
/// # Errors
/// Standard output takes no more.
pub fn text(text: &str) -> Result<()> {
    to(&mut std::io::stdout().lock(), text)
}

/// Write `text` and an end of line, and flush them.
///
/// # Errors
/// Standard output takes no more.
pub fn line(line: impl std::fmt::Display) -> Result<()> {
    text(&format!("{line}\n"))
}

fn to(out: &mut impl Write, text: &str) -> Result<()> {
    out.write_all(text.as_bytes()).and_then(|()| out.flush()).map_err(|e| {
        let what = CliError::new(format!("cannot write the result to standard output: {e}"));
        match e.kind() {
            // Whoever read it has gone, which they know.
            std::io::ErrorKind::BrokenPipe => what,
            _ => what.hint("make room there, or send it elsewhere"),
        }
    })
}
