//! What a peer of the embedded transport sends: its blob, its frames, its plans.

use kv_tcp::fuzzing;

use crate::input::Input;

/// Magics and heads.
pub const WORDS: &[&[u8]] = &[
    b"KVTCP\n",
    b"\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07\x07",
    b"\x05\0\0\0",
    b"\0\0\0\0\x01\0\0\0",
];

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    match input.below(3) {
        0 => fuzzing::blob(input.rest()),
        1 => fuzzing::stream(input.rest()),
        _ => fuzzing::request(input.rest()),
    }
}

/// One of each.
pub fn seeds() -> Vec<Vec<u8>> {
    let of_kind = |(kind, list): (u8, Vec<Vec<u8>>)| list.into_iter().map(move |b| [&[kind][..], &b].concat());
    (0u8..).zip(fuzzing::seeds()).flat_map(of_kind).collect()
}
