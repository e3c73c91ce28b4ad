//! Source pages are not free while a write may read them.

use crate::state::State;

pub const NAME: &str = "no source overwrite";

pub fn holds(s: &State) -> bool {
    s.ops.iter().filter(|op| op.reading).all(|op| !s.source_free(op.p, op.life))
}
