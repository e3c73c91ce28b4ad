//! Destination pages are not free while a byte may land in them (F4). A release by timeout, where the policy allows
//! one, is counted as without proof and not judged here.

use crate::state::State;

pub const NAME: &str = "pages are freed only after quiescence";

pub fn holds(s: &State) -> bool {
    s.ops.iter().filter(|op| op.may_land).all(|op| {
        let life = &s.d[usize::from(op.d)].lives[usize::from(op.d_life)];
        life.without_proof || !s.pages_free(op.d, op.d_life)
    })
}
