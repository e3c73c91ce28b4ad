//! A chunk goes to a destination once.

use crate::state::State;

pub const NAME: &str = "each (chunk, destination) is delivered at most once";

pub fn holds(s: &State) -> bool {
    // Sorted: two writes of the same thing are neighbours.
    let key = |i: usize| s.ops.get(i).map(|o| (o.p, o.life, o.chunk, o.d, o.d_life));
    (1..s.ops.len()).all(|i| key(i) != key(i - 1))
}
