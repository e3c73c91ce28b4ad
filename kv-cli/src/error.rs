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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_one_line_whatever_it_holds() {
        let e = CliError::new("first\nsecond").hint("do\r\nthis");
        assert_eq!(e.one_line(), "first second; do this");
        assert_eq!(CliError::new("alone").to_string(), "alone");
    }
}
