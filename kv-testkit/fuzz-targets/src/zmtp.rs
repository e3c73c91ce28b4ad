//! ZMTP: what a stranger sends to a control socket.

/// Parts of the protocol.
pub const WORDS: &[&[u8]] =
    &[b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL", b"\x04\x09\x04PING\0\0", b"\x05READY", b"\x0bSocket-Type\0\0\0\x04PUSH"];

/// Take this input.
pub fn run(data: &[u8]) {
    kv_core::control::zmq::fuzzing::stream(data);
}

/// Messages, commands in front and between frames, what is over a bound, and a greeting.
pub fn seeds() -> Vec<Vec<u8>> {
    let frame = |flags: u8, len: usize| [&[flags, len as u8][..], &vec![7; len]].concat();
    let long = |flags: u8, len: usize| [&[flags | 2][..], &(len as u64).to_be_bytes(), &vec![9; len]].concat();
    let ready = b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04PUSH".to_vec();
    let streams = [
        vec![frame(1, 3), frame(1, 0), frame(0, 200)],
        vec![ready, frame(0, 5)],
        vec![frame(1, 2), b"\x04\x09\x04PING\0\0hi".to_vec(), frame(0, 2)],
        vec![frame(1, 1); 8],
        vec![long(1, 400), long(1, 400), long(0, 400), frame(0, 1)],
        vec![long(0, 501)],
        vec![b"\xff\0\0\0\0\0\0\0\0\x7f\x03\0NULL".to_vec(), vec![0; 48]],
    ];
    streams.iter().enumerate().map(|(i, s)| [&[i as u8 * 9][..], &s.concat()].concat()).collect()
}
