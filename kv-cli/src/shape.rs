//! Parallel sizes of one side, as given on the command line: `tp=2,pp=1,cp=1,dp=1`.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::{CliError, Result};

/// Parallel sizes of a prefill or decode server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shape {
    /// Tensor parallel size (attention).
    pub tp: u32,
    /// Pipeline parallel size.
    pub pp: u32,
    /// Context parallel size (attention).
    pub cp: u32,
    /// Data parallel size (attention).
    pub dp: u32,
}

impl Default for Shape {
    fn default() -> Self {
        Self { tp: 1, pp: 1, cp: 1, dp: 1 }
    }
}

/// One rank of a [`Shape`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rank {
    /// TP rank.
    pub tp: u32,
    /// PP rank.
    pub pp: u32,
    /// CP rank.
    pub cp: u32,
    /// DP rank.
    pub dp: u32,
}

/// Largest value of one size: far above real fleets, small enough to keep a slip of the keyboard from forking forever.
const MAX_SIZE: u32 = 1024;

impl Shape {
    /// Ranks of one server.
    pub fn ranks(self) -> u32 {
        self.tp * self.pp * self.cp * self.dp
    }

    /// Every rank, TP fastest.
    pub fn all_ranks(self) -> Vec<Rank> {
        let mut out = Vec::new();
        for dp in 0..self.dp {
            for cp in 0..self.cp {
                for pp in 0..self.pp {
                    out.extend((0..self.tp).map(|tp| Rank { tp, pp, cp, dp }));
                }
            }
        }
        out
    }

    /// Refuse what this release does not do: both sides must have the same TP and PP size, CP and DP must be 1.
    pub fn check_pair(prefill: Self, decode: Self) -> Result<()> {
        for (name, p, d) in [("tp", prefill.tp, decode.tp), ("pp", prefill.pp, decode.pp)] {
            if p != d {
                return Err(CliError::new(format!("{name} differs: prefill {name}={p}, decode {name}={d}"))
                    .hint("this release moves KV between equal shapes only; give both sides the same sizes"));
            }
        }
        prefill.check_single()?;
        decode.check_single()
    }

    /// Refuse CP and DP above 1 (see [`Self::check_pair`]).
    pub fn check_single(self) -> Result<()> {
        for (name, n) in [("cp", self.cp), ("dp", self.dp)] {
            if n != 1 {
                return Err(CliError::new(format!("{name}={n} is not supported by this release"))
                    .hint(format!("leave {name} out or give {name}=1")));
            }
        }
        Ok(())
    }

    /// Refuse a rank outside the shape.
    pub fn check_rank(self, rank: Rank) -> Result<()> {
        for (name, r, n) in
            [("tp", rank.tp, self.tp), ("pp", rank.pp, self.pp), ("cp", rank.cp, self.cp), ("dp", rank.dp, self.dp)]
        {
            if r >= n {
                return Err(CliError::new(format!("--{name}-rank {r} does not exist with {name}={n}"))
                    .hint(format!("ranks go from 0 to {}", n - 1)));
            }
        }
        Ok(())
    }
}

impl FromStr for Shape {
    type Err = CliError;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |what: String| CliError::new(what).hint("write it like tp=2,pp=1,cp=1,dp=1; what is left out is 1");
        let mut shape = Self::default();
        let mut seen = Vec::new();
        for part in text.split(',').map(str::trim).filter(|p| !p.is_empty()) {
            let (key, value) = part.split_once('=').ok_or_else(|| bad(format!("'{part}' is not key=number")))?;
            let n: u32 = value.parse().map_err(|_| bad(format!("'{value}' in '{part}' is not a number")))?;
            if n == 0 || n > MAX_SIZE {
                return Err(bad(format!("{part}: a size is from 1 to {MAX_SIZE}")));
            }
            if seen.contains(&key) {
                return Err(bad(format!("{key} is given twice")));
            }
            seen.push(key);
            match key {
                "tp" => shape.tp = n,
                "pp" => shape.pp = n,
                "cp" => shape.cp = n,
                "dp" => shape.dp = n,
                _ => return Err(bad(format!("unknown size '{key}'"))),
            }
        }
        Ok(shape)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp={},pp={},cp={},dp={}", self.tp, self.pp, self.cp, self.dp)
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tp{} pp{}", self.tp, self.pp)?;
        if self.cp > 0 {
            write!(f, " cp{}", self.cp)?;
        }
        if self.dp > 0 {
            write!(f, " dp{}", self.dp)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_and_prints() {
        let s: Shape = "tp=2, pp=3".parse().unwrap();
        assert_eq!(s, Shape { tp: 2, pp: 3, cp: 1, dp: 1 });
        assert_eq!(s.to_string().parse::<Shape>().unwrap(), s);
        assert_eq!("".parse::<Shape>().unwrap(), Shape::default());
        assert_eq!(s.all_ranks().len(), 6);
        assert_eq!(s.all_ranks()[1], Rank { tp: 1, ..Rank::default() });
    }

    #[test]
    fn refuses_by_name() {
        for (text, says) in [
            ("tp", "'tp' is not key=number"),
            ("tp=x", "'x' in 'tp=x' is not a number"),
            ("tp=0", "tp=0: a size is from 1"),
            ("ep=2", "unknown size 'ep'"),
            ("tp=1,tp=2", "tp is given twice"),
            ("tp=-1", "not a number"),
        ] {
            let e = text.parse::<Shape>().unwrap_err().one_line();
            assert!(e.contains(says), "{text}: {e}");
        }
    }

    #[test]
    fn unequal_shapes_are_refused_naming_both_values() {
        let tp2 = Shape { tp: 2, ..Shape::default() };
        let e = Shape::check_pair(tp2, Shape::default()).unwrap_err().one_line();
        assert!(e.contains("prefill tp=2, decode tp=1"), "{e}");
        let cp = Shape { cp: 2, ..Shape::default() };
        assert!(Shape::check_pair(cp, cp).unwrap_err().one_line().contains("cp=2"));
        assert!(tp2.check_rank(Rank { tp: 2, ..Rank::default() }).is_err());
        assert_eq!(Shape::check_pair(tp2, tp2), Ok(()));
    }
}
