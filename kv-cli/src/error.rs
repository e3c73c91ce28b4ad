//! The one error a person sees: what is wrong, and what to do about it.

use std::fmt;

/// An error that ends a command: one clear line and a non-zero exit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CliError {
    /// What is wrong, with names and numbers.
    pub what: String,
    /// What to do about it; empty when there is nothing to say.
    pub hint: String,
}

/// What most functions of this crate return.
pub type Result<T> = std::result::Result<T, CliError>;

impl CliError {
    /// An error without a hint.
    pub fn new(what: impl fmt::Display) -> Self {
        Self { what: what.to_string(), hint: String::new() }
    }

    /// Say what to do.
    #[must_use]
    pub fn hint(mut self, hint: impl fmt::Display) -> Self {
        self.hint = hint.to_string();
        self
    }

    /// Say what to do about what the operating system said, where that is known; else `otherwise`.
    ///
    /// Errors of other crates come as text, so it is their text that is looked at.
    #[must_use]
    pub fn hint_by_cause(self, otherwise: impl fmt::Display) -> Self {
        // A thread that cannot make its sockets ends, and says no more than that.
        let thread = ["thread died", "thread ended"].iter().any(|t| self.what.contains(t));
        let few_files = open_files_limit().is_some_and(|n| n < FEW_FILES);
        let hint = if self.what.contains("Too many open files") || (thread && few_files) {
            "raise the limit of open files: ulimit -n 4096"
        } else if self.what.contains("Cannot assign requested address") {
            "give an address of this machine (`ip addr` lists them)"
        } else if self.what.contains("failed to lookup address") {
            "correct the host's name, or give an IP address of this machine"
        } else if self.what.contains("Permission denied") {
            "ports below 1024 need a privilege: choose another port"
        } else {
            return self.hint(otherwise);
        };
        self.hint(hint)
    }

    /// The whole error on one line, whatever its parts hold.
    pub fn one_line(&self) -> String {
        let text = if self.hint.is_empty() { self.what.clone() } else { format!("{}; {}", self.what, self.hint) };
        text.split(['\n', '\r']).map(str::trim).filter(|s| !s.is_empty()).collect::<Vec<_>>().join(" ")
    }
}

impl fmt::Display for CliError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.one_line())
    }
}

impl std::error::Error for CliError {}

/// Fewer open files than this are not enough for one rank.
const FEW_FILES: u64 = 64;

/// This process's limit of open files; `None` when it cannot be read.
fn open_files_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: writes one `rlimit`.
    let rc = unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) };
    (rc == 0).then_some(limit.rlim_cur)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_advice_follows_from_what_the_system_said() {
        for (what, hint) in [
            ("epoll: Too many open files (os error 24)", "raise the limit of open files: ulimit -n 4096"),
            ("Cannot assign requested address (os error 99)", "give an address of this machine (`ip addr` lists them)"),
            ("failed to lookup address information", "correct the host's name, or give an IP address of this machine"),
            ("Address already in use", "another port"),
        ] {
            assert_eq!(CliError::new(what).hint_by_cause("another port").hint, hint);
        }
    }

    #[test]
    fn is_one_line_whatever_it_holds() {
        let e = CliError::new("first\nsecond").hint("do\r\nthis");
        assert_eq!(e.one_line(), "first second; do this");
        assert_eq!(CliError::new("alone").to_string(), "alone");
    }
}
