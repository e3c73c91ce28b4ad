use super::*;
use proptest::prelude::*;

const BOUNDS: Bounds = Bounds { frames: 8, frame_bytes: 1000, message_bytes: 2000 };

fn message(frames: &[&[u8]]) -> Multipart {
    frames.iter().map(|f| Bytes::copy_from_slice(f)).collect()
}

fn items(decoder: &mut Decoder, pieces: &[&[u8]]) -> Result<Vec<Item>, Fault> {
    let mut out = Vec::new();
    for piece in pieces {
        decoder.feed(piece, BOUNDS, |item| out.push(item))?;
    }
    Ok(out)
}

#[test]
fn frames_are_as_the_specification_has_them() {
    let mut out = Vec::new();
    put_message(&mut out, &message(&[b"ab", b"", &[7; 256]]));
    let mut expected = vec![1, 2, b'a', b'b', 1, 0, 2, 0, 0, 0, 0, 0, 0, 1, 0];
    expected.extend_from_slice(&[7; 256]);
    assert_eq!(out, expected);
}

#[test]
fn cat_f61_over_a_limit_is_dropped_whole_and_takes_no_memory() {
    let mut out = Vec::new();
    put_message(&mut out, &std::iter::repeat_n(Bytes::from_static(b"x"), 40).collect());
    put_message(&mut out, &message(&[&[1; 999], &[2; 999], &[3; 3], b"tail"]));
    put_message(&mut out, &message(&[b"good"]));
    let mut decoder = Decoder::default();
    let mut got = Vec::new();
    for byte in &out {
        decoder.feed(&[*byte], BOUNDS, |item| got.push(item)).unwrap();
        assert!(decoder.kept() <= 2020);
    }
    assert_eq!(got, [Item::TooManyFrames, Item::TooManyBytes, Item::Message(message(&[b"good"]))]);
    // A length that is claimed only.
    let claim = [2, 0, 0, 0, 0, 0, 0, 3, 0xe9];
    assert_eq!(items(&mut Decoder::default(), &[&claim]), Err(Fault::FrameTooLong));
    let claim = [6, 0x80, 0, 0, 0, 0, 0, 0, 0];
    assert_eq!(items(&mut Decoder::default(), &[&claim]), Err(Fault::CommandTooLong));
    assert_eq!(items(&mut Decoder::default(), &[b"GET /"]), Err(Fault::Flags));
}

#[test]
fn a_command_between_two_frames_is_no_part_of_the_message() {
    let bytes = [&[1, 1, b'a'][..], &[4, 2, b'h', b'i'], &[0, 1, b'b']].concat();
    for cut in 0..bytes.len() {
        let got = items(&mut Decoder::default(), &[&bytes[..cut], &bytes[cut..]]).unwrap();
        assert_eq!(got, [Item::Command(b"hi".to_vec()), Item::Message(message(&[b"a", b"b"]))], "cut at {cut}");
    }
}

#[test]
fn cat_f61_commands_in_a_message_that_never_ends_take_bounded_memory() {
    let mut decoder = Decoder::default();
    decoder.feed(&[1, 1, b'a'], BOUNDS, drop).unwrap();
    let command = [&[4, 200][..], &[0; 200]].concat();
    let mut fed = Ok(());
    for _ in 0..1000 {
        fed = decoder.feed(&command, BOUNDS, drop);
        assert!(decoder.kept() <= BOUNDS.message_bytes + 2 * MAX_COMMAND, "{} bytes are kept", decoder.kept());
        if fed.is_err() {
            break;
        }
    }
    assert_eq!(fed, Err(Fault::CommandTooLong));
}

fn any_message() -> impl Strategy<Value = Vec<Vec<u8>>> {
    prop::collection::vec(prop_oneof![Just(0usize), 0..8usize, 250..260usize, 0..1000usize], 1..11)
        .prop_map(|sizes| sizes.iter().enumerate().map(|(i, n)| vec![i as u8; *n]).collect())
}

/// What the decoder should say of a message.
fn expected(frames: &[Vec<u8>]) -> Item {
    let mut bytes = 0;
    for (i, frame) in frames.iter().enumerate() {
        bytes += frame.len();
        if i >= BOUNDS.frames {
            return Item::TooManyFrames;
        }
        if bytes > BOUNDS.message_bytes {
            return Item::TooManyBytes;
        }
    }
    Item::Message(frames.iter().map(|f| Bytes::copy_from_slice(f)).collect())
}

proptest! {
    /// However the stream is cut, the same items come out.
    #[test]
    fn any_cut_gives_the_same_messages(
        messages in prop::collection::vec(any_message(), 1..8),
        cuts in prop::collection::vec(1..700usize, 1..60),
    ) {
        let mut bytes = Vec::new();
        for m in &messages {
            put_message(&mut bytes, &m.iter().map(|f| Bytes::copy_from_slice(f)).collect());
        }
        let mut decoder = Decoder::default();
        let (mut got, mut rest, mut cuts) = (Vec::new(), &bytes[..], cuts.iter().cycle());
        while !rest.is_empty() {
            let (now, later) = rest.split_at(rest.len().min(*cuts.next().unwrap()));
            decoder.feed(now, BOUNDS, |item| got.push(item)).unwrap();
            rest = later;
        }
        let wanted: Vec<Item> = messages.iter().map(|m| expected(m)).collect();
        prop_assert_eq!(got, wanted);
        prop_assert!(decoder.kept() == 0);
    }

    #[test]
    fn garbage_never_panics_and_keeps_little(noise in prop::collection::vec(prop_oneof![0..8u8, any::<u8>()], 0..4000)) {
        let mut decoder = Decoder::default();
        for piece in noise.chunks(97) {
            if decoder.feed(piece, BOUNDS, drop).is_err() {
                break;
            }
            prop_assert!(decoder.kept() <= BOUNDS.message_bytes + MAX_COMMAND + 9 * (BOUNDS.frames + 2) + 97);
        }
    }
}
