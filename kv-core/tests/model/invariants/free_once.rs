//! Pages are given back once, and not taken back.

use crate::state::State;

pub const NAME: &str = "pages are freed at most once";

pub fn holds(s: &State) -> bool {
    !s.seen.pages_taken_back && s.d.iter().flat_map(|n| &n.lives).all(|l| l.freed <= 1)
}
