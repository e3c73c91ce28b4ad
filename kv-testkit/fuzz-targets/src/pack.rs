//! Packed arrays and msgpack, one by one: what is read is written back to the same values.

use bytes::Bytes;
use kv_core::wire::pack::*;
use kv_core::wire::{msgpack, pack::Word};
use kv_testkit::vectors;

use crate::input::Input;

/// Pieces of packed frames.
pub const WORDS: &[&[u8]] = &[
    b"VRAM",
    b"DRAM",
    b",",
    b"\x01\0\0\0",
    b"\xff\xff\xff\xff",
    b"\xff\xff\xff\xff\xff\xff\xff\xff",
    b"\xc0",
    b"\xc4",
    b"\xc5",
    b"\xc6",
    b"\x90",
    b"\xdc\0\x01",
    b"\xdd\0\0\0\x01",
    b"1_0",
    b"-",
    b"+7",
];

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let kind = input.below(8);
    let max = if input.flag() { 4 } else { 1 << 16 };
    let frame = input.rest();
    match kind {
        0 => array::<u32>(frame, max),
        1 => array::<u64>(frame, max),
        2 => {
            array::<i32>(frame, max);
            if let Ok(pages) = get_pages(frame, max) {
                assert!(pages.len() <= max && pages.iter().all(|p| *p >= 0));
                assert_eq!(Ok(pages.to_vec()), get_array::<i32>(frame, max));
            }
        }
        3 => {
            if let Ok(buffers) = get_buffers(frame, max) {
                assert!(buffers.len() <= max);
                let mut out = Vec::new();
                put_buffers(&mut out, &buffers).expect("buffers that were packed");
                assert_eq!(get_buffers(&out, max), Ok(buffers));
            }
        }
        4 => {
            nested::<u32>(frame, max);
            nested::<u64>(frame, max);
        }
        5 => integer(frame),
        6 => {
            if let Ok(kinds) = get_mem_kinds(frame, max, 0) {
                assert!(kinds.is_empty() || kinds.len() == max);
                let mut out = Vec::new();
                put_mem_kinds(&mut out, &kinds);
                assert_eq!(get_mem_kinds(&out, max, 0), Ok(kinds));
            }
        }
        _ => msgpacked(&Bytes::copy_from_slice(frame), max),
    }
}

fn array<T: Word + PartialEq + std::fmt::Debug>(frame: &[u8], max: usize) {
    if let Ok(values) = get_array::<T>(frame, max) {
        assert!(values.len() <= max);
        let mut out = Vec::new();
        put_array(&mut out, &values);
        assert_eq!(out, frame);
    }
}

fn nested<T: Word + PartialEq + std::fmt::Debug>(frame: &[u8], max: usize) {
    if let Ok(lists) = get_nested::<T>(frame, max, max) {
        assert!(lists.len() <= max && lists.iter().all(|l| l.len() <= max));
        let mut out = Vec::new();
        put_nested(&mut out, lists.iter().map(Vec::as_slice)).expect("lists that were packed");
        assert_eq!(get_nested::<T>(&out, max, max), Ok(lists));
    }
}

fn integer(frame: &[u8]) {
    let parsed = parse_int(frame);
    // Plain digits mean the same to everybody.
    if (1..=18).contains(&frame.len()) && frame.iter().all(u8::is_ascii_digit) {
        let text = std::str::from_utf8(frame).expect("digits");
        assert_eq!(parsed.as_ref().ok(), text.parse::<i128>().ok().as_ref(), "{text}");
    }
    let Ok(value) = parsed else { return };
    let mut out = Vec::new();
    match (u64::try_from(value), i64::try_from(value)) {
        (Ok(value), _) => put_u64(&mut out, value),
        (_, Ok(value)) => put_i64(&mut out, value),
        _ => return,
    }
    assert_eq!(parse_int(&out), Ok(value));
}

fn msgpacked(frame: &Bytes, max: usize) {
    if let Ok(items) = msgpack::get_descriptors(frame, max) {
        assert!(items.len() <= max);
        let mut out = Vec::new();
        msgpack::put_descriptors(&mut out, &items).expect("items that were packed");
        assert_eq!(msgpack::get_descriptors(&out.into(), max), Ok(items));
    }
    if let Ok(lists) = msgpack::get_descriptor_lists(frame, max) {
        let mut out = Vec::new();
        msgpack::put_descriptor_lists(&mut out, lists.iter().map(Vec::as_slice)).expect("lists that were packed");
        assert_eq!(msgpack::get_descriptor_lists(&out.into(), max), Ok(lists));
    }
}

/// Every recorded packing, read as each kind it may be; the descriptors of Mori's registrations.
pub fn seeds() -> Vec<Vec<u8>> {
    let mut out = Vec::new();
    let file = vectors::load("packing");
    for record in file.records().filter(|r| r.has("packed")) {
        let packed = record.bytes("packed");
        let kinds: &[u8] = if record.name().contains("buffers") { &[3] } else { &[4, 0, 1, 2] };
        out.extend(kinds.iter().map(|kind| [&[*kind, 0][..], &packed].concat()));
    }
    for text in [&b"42"[..], b"-2", b" 1_000 ", b"18446744073709551616"] {
        out.push([&[5, 0][..], text].concat());
    }
    out.push([&[6, 1][..], b"VRAM,DRAM,VRAM,DRAM"].concat());
    let file = vectors::load("zmq_mori");
    for record in file.records().filter(|r| r.has("frames")) {
        let packed = record.frames("frames").into_iter().filter(|f| f.first().is_some_and(|b| *b >= 0x90));
        out.extend(packed.map(|f| [&[7, 0][..], &f].concat()));
    }
    out
}
