//! Towards SGLang 0.5.23 decode is told Failed only when every write settled: it may free its pages on its own clock (B2).

use crate::state::State;

pub const NAME: &str = "Failed is told when every write settled";

pub fn holds(s: &State) -> bool {
    !s.seen.told_too_early
}
