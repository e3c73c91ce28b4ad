//! A cleared room stays concluded, and a concluded room posts nothing (B4).

use crate::state::State;

pub const NAME: &str = "no resurrection";

pub fn holds(s: &State) -> bool {
    !s.seen.resurrected
}
