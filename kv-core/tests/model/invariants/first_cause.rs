//! The first cause of a failure stays (C5, D4).

use crate::state::State;

pub const NAME: &str = "the first cause wins";

pub fn holds(s: &State) -> bool {
    !s.seen.cause_changed
}
