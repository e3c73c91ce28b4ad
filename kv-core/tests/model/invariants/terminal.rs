//! Success and Failed stay (C2, D3).

use crate::state::State;

pub const NAME: &str = "terminal states absorb";

pub fn holds(s: &State) -> bool {
    !s.seen.terminal_left
}
