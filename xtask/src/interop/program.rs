//! Who plays which role.

use std::fmt;

use crate::sh::Result;

/// The two programs that are either side of a case.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Program {
    /// SGLang's own classes: `python -m sglang_peer`.
    Sglang,
    /// `kvt peer`.
    Ours,
}

impl Program {
    pub fn name(self) -> &'static str {
        match self {
            Self::Sglang => "sglang",
            Self::Ours => "ours",
        }
    }

    pub fn other(self) -> Self {
        match self {
            Self::Sglang => Self::Ours,
            Self::Ours => Self::Sglang,
        }
    }
}

/// Which program is prefill, which is decode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Direction {
    pub prefill: Program,
    pub decode: Program,
}

impl Direction {
    pub const SGLANG_OURS: Self = Self { prefill: Program::Sglang, decode: Program::Ours };
    pub const OURS_SGLANG: Self = Self { prefill: Program::Ours, decode: Program::Sglang };
    pub const SGLANG_SGLANG: Self = Self { prefill: Program::Sglang, decode: Program::Sglang };
    pub const OURS_OURS: Self = Self { prefill: Program::Ours, decode: Program::Ours };
    /// What interoperates.
    pub const MIXED: [Self; 2] = [Self::SGLANG_OURS, Self::OURS_SGLANG];
    /// What tells a fault of one side from one of the runner.
    pub const CONTROLS: [Self; 2] = [Self::SGLANG_SGLANG, Self::OURS_OURS];

    pub fn has(self, program: Program) -> bool {
        self.prefill == program || self.decode == program
    }

    /// `sglang>ours`, `sglang-ours`; `mixed`, `controls`, `all`.
    pub fn parse(text: &str) -> Result<Vec<Self>> {
        let all = || Self::MIXED.into_iter().chain(Self::CONTROLS);
        match text {
            "mixed" => return Ok(Self::MIXED.to_vec()),
            "controls" => return Ok(Self::CONTROLS.to_vec()),
            "all" => return Ok(all().collect()),
            _ => {}
        }
        let plain = text.replace('-', ">");
        all().find(|d| d.to_string() == plain).map(|d| vec![d]).ok_or_else(|| {
            let names: Vec<_> = all().map(|d| d.to_string()).collect();
            format!("no direction '{text}'; there are mixed, controls, all, {} (prefill>decode)", names.join(", "))
        })
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}>{}", self.prefill.name(), self.decode.name())
    }
}

/// What moves the bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Backend {
    Nixl,
    Mooncake,
    Tcp,
}

impl Backend {
    pub fn name(self) -> &'static str {
        match self {
            Self::Nixl => "nixl",
            Self::Mooncake => "mooncake",
            Self::Tcp => "tcp",
        }
    }

    /// Why a direction cannot have this backend.
    pub fn lacks(self, direction: Direction) -> Option<&'static str> {
        match self {
            Self::Nixl | Self::Mooncake => None,
            Self::Tcp => direction.has(Program::Sglang).then_some("SGLang has no tcp"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directions_have_names() {
        assert_eq!(Direction::parse("sglang>ours"), Ok(vec![Direction::SGLANG_OURS]));
        assert_eq!(Direction::parse("ours-sglang"), Ok(vec![Direction::OURS_SGLANG]));
        assert_eq!(Direction::parse("all").map(|d| d.len()), Ok(4));
        assert!(Direction::parse("ours").unwrap_err().contains("mixed, controls, all, sglang>ours"));
    }

    #[test]
    fn a_backend_that_a_side_lacks_is_named() {
        assert_eq!(Backend::Nixl.lacks(Direction::SGLANG_OURS), None);
        assert_eq!(Backend::Mooncake.lacks(Direction::OURS_SGLANG), None);
        assert!(Backend::Tcp.lacks(Direction::OURS_SGLANG).is_some());
    }
}
