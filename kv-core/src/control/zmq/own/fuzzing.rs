//! Inner doors for the fuzz targets; no part of the API.
#![allow(clippy::expect_used)] // a broken rule is what a fuzzer looks for

use super::codec::{Bounds, Decoder, Item, put_message};
use super::handshake::{self, End};

const BOUNDS: Bounds = Bounds { frames: 6, frame_bytes: 500, message_bytes: 900 };

/// What a stranger sends on a connection: the first byte says how it is cut. However it is cut, the same comes out;
/// what is kept is bounded; a message that is accepted is within the bounds, and survives our own encoding.
pub fn stream(data: &[u8]) {
    let Some((&cut, bytes)) = data.split_first() else { return };
    let _ = handshake::check_greeting(bytes);
    let whole = items(bytes, bytes.len().max(1));
    let pieces = items(bytes, usize::from(cut) + 1);
    assert_eq!(whole, pieces);
    for item in whole.0 {
        match item {
            Item::Message(message) => {
                assert!(message.len() <= BOUNDS.frames);
                assert!(message.iter().map(bytes::Bytes::len).sum::<usize>() <= BOUNDS.message_bytes);
                let mut out = Vec::new();
                put_message(&mut out, &message);
                assert_eq!(items(&out, out.len()), (vec![Item::Message(message)], true));
            }
            Item::Command(body) => {
                for (end, up) in [(End::Push, false), (End::Pull, false), (End::Pull, true)] {
                    let _ = handshake::command(end, up, &body);
                }
            }
            Item::TooManyFrames | Item::TooManyBytes => {}
        }
    }
}

fn items(bytes: &[u8], cut: usize) -> (Vec<Item>, bool) {
    let (mut decoder, mut out) = (Decoder::default(), Vec::new());
    for piece in bytes.chunks(cut) {
        if decoder.feed(piece, BOUNDS, |item| out.push(item)).is_err() {
            return (out, false);
        }
        assert!(decoder.kept() <= (16 << 10) + cut);
    }
    (out, true)
}
