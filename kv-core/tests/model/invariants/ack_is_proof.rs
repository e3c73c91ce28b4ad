//! After an ABORT_ACK nothing of that prefill rank lands in the pages it was sent for (F3).

use crate::state::State;

pub const NAME: &str = "ABORT_ACK implies that no write can land";

pub fn holds(s: &State) -> bool {
    s.ops.iter().filter(|op| op.may_land).all(|op| !s.seen.acked.contains(&(op.p, op.d, op.d_life)))
}
