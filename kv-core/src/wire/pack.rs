//! Encodings inside frames: decimal integers, packed arrays, buffer lists, nested arrays, memory kinds.
//!
//! Source: `disaggregation/common/utils.py` and `nixl/conn.py` of SGLang 0.5.23. Everything written by a peer is checked
//! against a bound and against the bytes that are really there **before** anything is allocated for it.

use std::sync::Arc;

use super::message::WireErrorKind;
use crate::memory::MemoryKind;

/// What is wrong with one frame; the caller adds which frame it was.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct PackError {
    /// One word per kind.
    pub kind: WireErrorKind,
    /// What is wrong.
    pub detail: String,
}

impl PackError {
    pub(crate) fn new(kind: WireErrorKind, detail: impl Into<String>) -> Self {
        Self { kind, detail: detail.into() }
    }

    pub(crate) fn array(detail: impl Into<String>) -> Self {
        Self::new(WireErrorKind::BadArray, detail)
    }

    pub(crate) fn too_large(what: &str, got: usize, max: usize) -> Self {
        Self::new(WireErrorKind::TooLarge, format!("{got} {what}, at most {max} are accepted"))
    }
}

/// A frame as it may be shown in an error: escaped, and cut after 40 bytes.
pub fn shown(frame: &[u8]) -> String {
    let head = &frame[..frame.len().min(40)];
    let more = if head.len() < frame.len() { "..." } else { "" };
    format!("\"{}{more}\"", head.escape_ascii())
}

/// Whether Python's `int()` strips this byte (`str.strip` of ASCII text).
fn is_blank(byte: u8) -> bool {
    matches!(byte, 9..=13 | 28..=32)
}

/// An integer as Python's `int()` reads ASCII text: blanks around it, one sign, single `_` between digits and leading
/// zeros are accepted, because SGLang's receivers accept them.
///
/// # Errors
/// `BadInteger` when it is not an integer, or does not fit an `i128`.
pub fn parse_int(text: &[u8]) -> Result<i128, PackError> {
    // What every sender really writes: up to 18 plain digits.
    if !text.is_empty() && text.len() <= 18 && text.iter().all(u8::is_ascii_digit) {
        return Ok(text.iter().fold(0u64, |value, digit| value * 10 + u64::from(digit - b'0')).into());
    }
    parse_lenient(text)
}

fn parse_lenient(text: &[u8]) -> Result<i128, PackError> {
    let bad = || PackError::new(WireErrorKind::BadInteger, format!("{} is not an integer", shown(text)));
    let start = text.iter().position(|byte| !is_blank(*byte)).ok_or_else(bad)?;
    let end = text.iter().rposition(|byte| !is_blank(*byte)).ok_or_else(bad)? + 1;
    let mut body = &text[start..end];
    let negative = body[0] == b'-';
    if negative || body[0] == b'+' {
        body = &body[1..];
    }
    let mut value = 0i128;
    let mut after_digit = false;
    for byte in body {
        match byte {
            b'0'..=b'9' => {
                let digit = i128::from(byte - b'0');
                value = value.checked_mul(10).and_then(|value| value.checked_add(digit)).ok_or_else(|| {
                    PackError::new(WireErrorKind::BadInteger, format!("{} is out of every range", shown(text)))
                })?;
                after_digit = true;
            }
            b'_' if after_digit => after_digit = false,
            _ => return Err(bad()),
        }
    }
    // Also refuses an empty body and a trailing `_`.
    if !after_digit {
        return Err(bad());
    }
    Ok(if negative { -value } else { value })
}

/// Append canonical decimal text.
pub fn put_u64(out: &mut Vec<u8>, mut value: u64) {
    let mut digits = [0u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (value % 10) as u8;
        value /= 10;
        if value == 0 {
            break;
        }
    }
    out.extend_from_slice(&digits[at..]);
}

/// Append canonical decimal text.
pub fn put_i64(out: &mut Vec<u8>, value: i64) {
    if value < 0 {
        out.push(b'-');
    }
    put_u64(out, value.unsigned_abs());
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for i32 {}
    impl Sealed for u32 {}
    impl Sealed for u64 {}
}

/// An element of a packed array; little-endian on the wire.
pub trait Word: Copy + sealed::Sealed {
    /// Bytes of one element.
    const SIZE: usize;
    /// Write into exactly [`SIZE`](Self::SIZE) bytes.
    fn write(self, to: &mut [u8]);
    /// Read from exactly [`SIZE`](Self::SIZE) bytes.
    fn read(from: &[u8]) -> Self;
}

macro_rules! word {
    ($($int:ty),*) => {$(
        impl Word for $int {
            const SIZE: usize = size_of::<$int>();
            fn write(self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_le_bytes());
            }
            fn read(from: &[u8]) -> Self {
                let mut bytes = [0; size_of::<$int>()];
                bytes.copy_from_slice(from);
                Self::from_le_bytes(bytes)
            }
        }
    )*};
}
word!(i32, u32, u64);

/// Append a packed array: elements only, no count.
pub fn put_array<T: Word>(out: &mut Vec<u8>, values: &[T]) {
    let start = out.len();
    out.resize(start + values.len() * T::SIZE, 0);
    for (to, value) in out[start..].chunks_exact_mut(T::SIZE).zip(values) {
        value.write(to);
    }
}

/// How many elements a packed array holds.
///
/// # Errors
/// `BadArray` when the length is no multiple of the width, `TooLarge` for more than `max`.
fn array_len<T: Word>(frame: &[u8], max: usize) -> Result<usize, PackError> {
    if !frame.len().is_multiple_of(T::SIZE) {
        return Err(PackError::array(format!("{} bytes are no whole number of {}-byte items", frame.len(), T::SIZE)));
    }
    let count = frame.len() / T::SIZE;
    if count > max { Err(PackError::too_large("items", count, max)) } else { Ok(count) }
}

/// Read a packed array of at most `max` elements.
///
/// # Errors
/// `BadArray` when the length is no multiple of the width, `TooLarge` for more than `max`.
pub fn get_array<T: Word>(frame: &[u8], max: usize) -> Result<Vec<T>, PackError> {
    array_len::<T>(frame, max)?;
    Ok(frame.chunks_exact(T::SIZE).map(T::read).collect())
}

/// Read a packed array of page indices, none negative, at most `max`, into shared memory.
///
/// # Errors
/// As [`get_array`], and `BadInteger` for a negative index: as an offset it would point outside the buffer.
pub fn get_pages(frame: &[u8], max: usize) -> Result<Arc<[i32]>, PackError> {
    if frame.is_empty() {
        return Ok(Arc::default());
    }
    array_len::<i32>(frame, max)?;
    let pages: Arc<[i32]> = frame.chunks_exact(4).map(i32::read).collect();
    no_negative(&pages)?;
    Ok(pages)
}

/// # Errors
/// `BadInteger` when an index is negative.
pub(crate) fn no_negative(indices: &[i32]) -> Result<(), PackError> {
    // One pass without branches; the place is looked for only when there is something wrong.
    if indices.iter().fold(0, |all, index| all | index) < 0
        && let Some(at) = indices.iter().position(|index| *index < 0)
    {
        return Err(PackError::new(WireErrorKind::BadInteger, format!("index {at} is negative: {}", indices[at])));
    }
    Ok(())
}

fn put_u32(out: &mut Vec<u8>, value: usize, what: &str) -> Result<(), PackError> {
    let value = u32::try_from(value).map_err(|_| PackError::too_large(what, value, u32::MAX as usize))?;
    out.extend_from_slice(&value.to_le_bytes());
    Ok(())
}

/// Append a buffer list: nothing for an empty one, else a `u32` count, `u32` lengths, and the buffers back to back.
///
/// # Errors
/// `TooLarge` when a count or length does not fit a `u32`.
pub fn put_buffers<B: AsRef<[u8]>>(out: &mut Vec<u8>, buffers: &[B]) -> Result<(), PackError> {
    if buffers.is_empty() {
        return Ok(());
    }
    put_u32(out, buffers.len(), "buffers")?;
    for buffer in buffers {
        put_u32(out, buffer.as_ref().len(), "bytes")?;
    }
    for buffer in buffers {
        out.extend_from_slice(buffer.as_ref());
    }
    Ok(())
}

/// The buffers of a list, without copying them.
///
/// # Errors
/// `BadArray` when header and bytes disagree, `TooLarge` for more than `max` buffers.
pub fn get_buffers(frame: &[u8], max: usize) -> Result<Vec<&[u8]>, PackError> {
    if frame.is_empty() {
        return Ok(Vec::new());
    }
    let (count, rest) =
        frame.split_first_chunk().ok_or_else(|| PackError::array("a buffer list of less than 4 bytes"))?;
    let count = u32::from_le_bytes(*count) as usize;
    if count > max {
        return Err(PackError::too_large("buffers", count, max));
    }
    let (lengths, mut body) = count
        .checked_mul(4)
        .and_then(|bytes| rest.split_at_checked(bytes))
        .ok_or_else(|| PackError::array(format!("{count} buffers, but no room for their lengths")))?;
    let mut buffers = Vec::with_capacity(count);
    for length in lengths.chunks_exact(4) {
        let length = u32::read(length) as usize;
        let (buffer, after) = body
            .split_at_checked(length)
            .ok_or_else(|| PackError::array(format!("a buffer of {length} bytes where {} are left", body.len())))?;
        buffers.push(buffer);
        body = after;
    }
    if !body.is_empty() {
        return Err(PackError::array(format!("{} bytes after the last buffer", body.len())));
    }
    Ok(buffers)
}

/// Append a nested array: a buffer list of packed arrays. No list at all is an empty frame; one empty list is not.
///
/// # Errors
/// `TooLarge` when a count or length does not fit a `u32`.
pub fn put_nested<'a, T, I>(out: &mut Vec<u8>, lists: I) -> Result<(), PackError>
where
    T: Word + 'a,
    I: ExactSizeIterator<Item = &'a [T]> + Clone,
{
    if lists.len() == 0 {
        return Ok(());
    }
    put_u32(out, lists.len(), "lists")?;
    for list in lists.clone() {
        put_u32(out, list.len().saturating_mul(T::SIZE), "bytes")?;
    }
    lists.for_each(|list| put_array(out, list));
    Ok(())
}

/// Read a nested array of at most `max_lists` lists with at most `max_items` elements in each.
///
/// # Errors
/// As [`get_buffers`] and [`get_array`].
pub fn get_nested<T: Word>(frame: &[u8], max_lists: usize, max_items: usize) -> Result<Vec<Vec<T>>, PackError> {
    get_buffers(frame, max_lists)?.into_iter().map(|list| get_array(list, max_items)).collect()
}

/// Append memory kinds: `VRAM` and `DRAM` joined by commas. The device number travels elsewhere.
pub fn put_mem_kinds(out: &mut Vec<u8>, kinds: &[MemoryKind]) {
    for (at, kind) in kinds.iter().enumerate() {
        if at > 0 {
            out.push(b',');
        }
        out.extend_from_slice(match kind {
            MemoryKind::Dram => b"DRAM",
            MemoryKind::Vram { .. } => b"VRAM",
        });
    }
}

/// Read the memory kinds of `entries` entries; an empty frame means that all are memory of `device`.
///
/// # Errors
/// `Inconsistent` for another number of kinds, `BadText` for an unknown one, `BadInteger` for device memory of a device
/// that is none.
pub fn get_mem_kinds(frame: &[u8], entries: usize, device: i64) -> Result<Vec<MemoryKind>, PackError> {
    let vram = || {
        u32::try_from(device)
            .map(|device| MemoryKind::Vram { device })
            .map_err(|_| PackError::new(WireErrorKind::BadInteger, format!("VRAM, but the device number is {device}")))
    };
    if frame.is_empty() {
        return if entries == 0 { Ok(Vec::new()) } else { Ok(vec![vram()?; entries]) };
    }
    let count = frame.split(|byte| *byte == b',').count();
    if count != entries {
        let detail = format!("{count} memory kinds for {entries} entries");
        return Err(PackError::new(WireErrorKind::Inconsistent, detail));
    }
    let kind = |text: &[u8]| match text {
        b"VRAM" => vram(),
        b"DRAM" => Ok(MemoryKind::Dram),
        other => Err(PackError::new(WireErrorKind::BadText, format!("{} is no memory kind", shown(other)))),
    };
    frame.split(|byte| *byte == b',').map(kind).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_are_read_as_pythons_int() {
        let good: [(&[u8], i128); 12] = [
            (b"0", 0),
            (b" +7 ", 7),
            (b"0_1", 1),
            (b"-2", -2),
            (b"-0", 0),
            (b"\t1_000\r\n", 1000),
            (b"\x1c\x1f5", 5),
            (b"000000000000000000000000000000000000000000000000000000000000007", 7),
            (b"18446744073709551615", u64::MAX as i128),
            (b"999999999999999999", 999_999_999_999_999_999),
            (b"+1_2_3", 123),
            (b"-9223372036854775808", i64::MIN as i128),
        ];
        for (text, value) in good {
            assert_eq!(parse_int(text), Ok(value), "{}", shown(text));
        }
        let bad: [&[u8]; 16] = [
            b"", b" ", b"+", b"-", b"+-1", b"+ 1", b"_1", b"1_", b"1__0", b"1 0", b"0x1", b"1.0", b"None", b"5\0",
            b"\xff", b"-_1",
        ];
        for text in bad {
            assert_eq!(parse_int(text).unwrap_err().kind, WireErrorKind::BadInteger, "{}", shown(text));
        }
        assert!(parse_int(&[b'9'; 5000]).unwrap_err().detail.contains("out of every range"));
    }

    #[test]
    fn integers_are_written_canonically() {
        let mut out = Vec::new();
        for value in [0, 9, 10, 42, u64::MAX] {
            out.clear();
            put_u64(&mut out, value);
            assert_eq!(out, value.to_string().into_bytes());
        }
        for value in [0, -1, i64::MIN, i64::MAX] {
            out.clear();
            put_i64(&mut out, value);
            assert_eq!(out, value.to_string().into_bytes());
        }
    }

    #[test]
    fn a_header_cannot_make_us_allocate() {
        let kind = |frame: &[u8]| get_buffers(frame, 1 << 16).unwrap_err().kind;
        assert_eq!(kind(&[1, 0, 0]), WireErrorKind::BadArray);
        assert_eq!(kind(&[0xff, 0xff, 0xff, 0xff]), WireErrorKind::TooLarge);
        assert_eq!(kind(&[2, 0, 0, 0, 1, 0, 0, 0]), WireErrorKind::BadArray);
        assert_eq!(kind(&[1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 1]), WireErrorKind::BadArray);
        assert_eq!(kind(&[1, 0, 0, 0, 1, 0, 0, 0, 1, 2]), WireErrorKind::BadArray);
        assert_eq!(get_array::<i32>(&[0; 6], 9).unwrap_err().kind, WireErrorKind::BadArray);
        assert_eq!(get_array::<i32>(&[0; 8], 1).unwrap_err().kind, WireErrorKind::TooLarge);
        assert_eq!(get_pages(&[0, 0, 0, 0, 0xff, 0xff, 0xff, 0xff], 9).unwrap_err().kind, WireErrorKind::BadInteger);
    }

    #[test]
    fn memory_kinds_name_their_device() {
        let kinds = get_mem_kinds(b"VRAM,DRAM", 2, 3).unwrap();
        assert_eq!(kinds, [MemoryKind::Vram { device: 3 }, MemoryKind::Dram]);
        assert_eq!(get_mem_kinds(b"DRAM", 1, -1).unwrap(), [MemoryKind::Dram]);
        assert_eq!(get_mem_kinds(b"VRAM", 1, -1).unwrap_err().kind, WireErrorKind::BadInteger);
        assert_eq!(get_mem_kinds(b"VRAM ", 1, 0).unwrap_err().kind, WireErrorKind::BadText);
        assert_eq!(get_mem_kinds(b"VRAM", 2, 0).unwrap_err().kind, WireErrorKind::Inconsistent);
    }
}
