//! The three msgpack types that Mori's descriptor lists use: array, bin and nil.
//!
//! Hand-written because anything more would be a dependency for forty lines. Descriptors are opaque and are not copied:
//! they stay slices of the frame.

use bytes::Bytes;

use super::pack::{PackError, shown};
use crate::wire::WireErrorKind;

const NIL: u8 = 0xc0;

fn put_header(out: &mut Vec<u8>, count: usize) -> Result<(), PackError> {
    match count {
        0..=15 => out.push(0x90 | count as u8),
        16..=0xffff => {
            out.push(0xdc);
            out.extend_from_slice(&(count as u16).to_be_bytes());
        }
        _ => {
            let count = u32::try_from(count).map_err(|_| PackError::too_large("items", count, u32::MAX as usize))?;
            out.push(0xdd);
            out.extend_from_slice(&count.to_be_bytes());
        }
    }
    Ok(())
}

fn put_bin(out: &mut Vec<u8>, bin: &[u8]) -> Result<(), PackError> {
    match bin.len() {
        len @ 0..=0xff => out.extend_from_slice(&[0xc4, len as u8]),
        len @ 0x100..=0xffff => {
            out.push(0xc5);
            out.extend_from_slice(&(len as u16).to_be_bytes());
        }
        len => {
            let len = u32::try_from(len).map_err(|_| PackError::too_large("bytes", len, u32::MAX as usize))?;
            out.push(0xc6);
            out.extend_from_slice(&len.to_be_bytes());
        }
    }
    out.extend_from_slice(bin);
    Ok(())
}

fn put_items(out: &mut Vec<u8>, items: &[Option<Bytes>]) -> Result<(), PackError> {
    put_header(out, items.len())?;
    for item in items {
        match item {
            Some(bin) => put_bin(out, bin)?,
            None => out.push(NIL),
        }
    }
    Ok(())
}

/// Append a descriptor list; an empty one is an empty frame.
///
/// # Errors
/// `TooLarge` when a count or length does not fit a `u32`.
pub fn put_descriptors(out: &mut Vec<u8>, items: &[Option<Bytes>]) -> Result<(), PackError> {
    if items.is_empty() { Ok(()) } else { put_items(out, items) }
}

/// Append descriptor lists, one per state component; none at all is an empty frame.
///
/// # Errors
/// `TooLarge` when a count or length does not fit a `u32`.
pub fn put_descriptor_lists<'a, I>(out: &mut Vec<u8>, lists: I) -> Result<(), PackError>
where
    I: ExactSizeIterator<Item = &'a [Option<Bytes>]>,
{
    if lists.len() == 0 {
        return Ok(());
    }
    put_header(out, lists.len())?;
    for list in lists {
        put_items(out, list)?;
    }
    Ok(())
}

struct Cursor<'a> {
    frame: &'a Bytes,
    at: usize,
}

impl<'a> Cursor<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8], PackError> {
        let end = self.at.checked_add(count).filter(|end| *end <= self.frame.len());
        let end = end.ok_or_else(|| PackError::array(format!("ends {count} bytes short of byte {}", self.at)))?;
        let taken = &self.frame[self.at..end];
        self.at = end;
        Ok(taken)
    }

    /// Big-endian length of `width` bytes.
    fn length(&mut self, width: usize) -> Result<usize, PackError> {
        Ok(self.take(width)?.iter().fold(0usize, |length, byte| length << 8 | usize::from(*byte)))
    }

    fn array(&mut self, max: usize) -> Result<usize, PackError> {
        let count = match self.take(1)?[0] {
            short @ 0x90..=0x9f => usize::from(short & 0x0f),
            0xdc => self.length(2)?,
            0xdd => self.length(4)?,
            other => return Err(PackError::array(format!("{} is no array", shown(&[other])))),
        };
        if count > max {
            return Err(PackError::too_large("items", count, max));
        }
        // Every item takes a byte at least, so the memory asked for next is bounded by what was received.
        if count > self.frame.len() - self.at {
            return Err(PackError::array(format!(
                "{count} items announced, {} bytes left",
                self.frame.len() - self.at
            )));
        }
        Ok(count)
    }

    fn item(&mut self) -> Result<Option<Bytes>, PackError> {
        let length = match self.take(1)?[0] {
            NIL => return Ok(None),
            0xc4 => self.length(1)?,
            0xc5 => self.length(2)?,
            0xc6 => self.length(4)?,
            other => return Err(PackError::array(format!("{} is neither bytes nor nil", shown(&[other])))),
        };
        let start = self.at;
        self.take(length)?;
        Ok(Some(self.frame.slice(start..self.at)))
    }

    fn items(&mut self, max: usize) -> Result<Vec<Option<Bytes>>, PackError> {
        let count = self.array(max)?;
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(self.item()?);
        }
        Ok(items)
    }

    fn end(&self) -> Result<(), PackError> {
        let left = self.frame.len() - self.at;
        if left == 0 { Ok(()) } else { Err(PackError::array(format!("{left} bytes after the list"))) }
    }
}

/// Read a descriptor list of at most `max` items.
///
/// # Errors
/// `BadArray` when it is no such list, `TooLarge` for more than `max` items.
pub fn get_descriptors(frame: &Bytes, max: usize) -> Result<Vec<Option<Bytes>>, PackError> {
    if frame.is_empty() {
        return Ok(Vec::new());
    }
    let mut cursor = Cursor { frame, at: 0 };
    let items = cursor.items(max)?;
    cursor.end()?;
    Ok(items)
}

/// Read descriptor lists: at most `max` lists of at most `max` items, and not more than `max` items in all.
///
/// # Errors
/// `BadArray` when it is no such list of lists, `TooLarge` over the bounds.
pub fn get_descriptor_lists(frame: &Bytes, max: usize) -> Result<Vec<Vec<Option<Bytes>>>, PackError> {
    if frame.is_empty() {
        return Ok(Vec::new());
    }
    let mut cursor = Cursor { frame, at: 0 };
    let count = cursor.array(max)?;
    let mut lists = Vec::with_capacity(count);
    let mut left = max;
    for _ in 0..count {
        let list = cursor.items(left)?;
        left -= list.len();
        lists.push(list);
    }
    cursor.end()?;
    Ok(lists)
}

/// # Errors
/// `BadArray` when an item is elided where none may be.
pub(crate) fn none_elided(items: &[Option<Bytes>]) -> Result<(), PackError> {
    match items.iter().position(Option::is_none) {
        Some(at) => Err(PackError::new(WireErrorKind::BadArray, format!("descriptor {at} is nil"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_class_comes_back() {
        for (count, len) in [(1, 0), (15, 255), (16, 256), (3, 65_535), (2, 65_536), (65_536, 1)] {
            let items = vec![Some(Bytes::from(vec![7; len])); count];
            let mut out = Vec::new();
            put_descriptors(&mut out, &items).unwrap();
            assert_eq!(get_descriptors(&Bytes::from(out), count).unwrap(), items);
        }
    }

    #[test]
    fn lies_about_lengths_are_refused() {
        let kind = |frame: &'static [u8]| get_descriptors(&Bytes::from_static(frame), 100).unwrap_err().kind;
        assert_eq!(kind(b"\xdd\xff\xff\xff\xff"), WireErrorKind::TooLarge);
        assert_eq!(kind(b"\xdc\x00\x64"), WireErrorKind::BadArray);
        assert_eq!(kind(b"\x91\xc6\xff\xff\xff\xff\x00"), WireErrorKind::BadArray);
        assert_eq!(kind(b"\x91\xc4"), WireErrorKind::BadArray);
        assert_eq!(kind(b"\x91\xc0\x00"), WireErrorKind::BadArray);
        assert_eq!(kind(b"\x91\xa1\x61"), WireErrorKind::BadArray);
        assert_eq!(kind(b"\x80"), WireErrorKind::BadArray);
    }
}
