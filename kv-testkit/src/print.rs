//! Bytes and frames a person can read.

use std::fmt::Write as _;

/// Lower-case hex.
pub fn hex(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    let mut out = String::with_capacity(bytes.len() * 2);
    for b in bytes {
        out.push(DIGITS[usize::from(b >> 4)] as char);
        out.push(DIGITS[usize::from(b & 15)] as char);
    }
    out
}

fn nibble(c: u8) -> Result<u8, String> {
    match c {
        b'0'..=b'9' => Ok(c - b'0'),
        b'a'..=b'f' => Ok(c - b'a' + 10),
        b'A'..=b'F' => Ok(c - b'A' + 10),
        _ => Err(format!("{:?} is not a hex digit", c as char)),
    }
}

/// Bytes of lower- or upper-case hex text, or what is wrong with it.
pub fn unhex(text: &str) -> Result<Vec<u8>, String> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if !rest.is_empty() {
        return Err(format!("{} hex digits do not make whole bytes", text.len()));
    }
    pairs.iter().map(|[high, low]| Ok(nibble(*high)? << 4 | nibble(*low)?)).collect()
}

/// The usual three columns: offset, 16 bytes in hex, text.
pub fn hexdump(bytes: &[u8]) -> String {
    let mut out = String::new();
    for (i, row) in bytes.chunks(16).enumerate() {
        let hex = row.iter().map(|b| format!("{b:02x}")).collect::<Vec<_>>().join(" ");
        let text: String = row.iter().map(|&b| if (0x20..0x7f).contains(&b) { b as char } else { '.' }).collect();
        let _ = writeln!(out, "{:08x}  {hex:<47}  |{text}|", i * 16);
    }
    out
}

/// One frame in one line: its text when printable, else its length and first bytes in hex.
pub fn frame(bytes: &[u8]) -> String {
    const SHOWN: usize = 24;
    match std::str::from_utf8(bytes) {
        Ok(t) if t.len() <= 80 && t.chars().all(|c| !c.is_control()) => format!("{t:?}"),
        _ if bytes.len() <= SHOWN => format!("<{} B {}>", bytes.len(), hex(bytes)),
        _ => format!("<{} B {}..>", bytes.len(), hex(&bytes[..SHOWN])),
    }
}

/// A message in one line: `["KV_STATUS", "42", <8 B ..>]`.
pub fn frames<B: AsRef<[u8]>>(message: &[B]) -> String {
    format!("[{}]", message.iter().map(|f| frame(f.as_ref())).collect::<Vec<_>>().join(", "))
}

/// Where two byte strings first differ, with both sides around it; `None` when they are equal.
pub fn first_difference(got: &[u8], want: &[u8]) -> Option<String> {
    if got.len() != want.len() {
        return Some(format!("{} bytes instead of {}", got.len(), want.len()));
    }
    let at = got.iter().zip(want).position(|(g, w)| g != w)?;
    let wrong = got.iter().zip(want).filter(|(g, w)| g != w).count();
    let end = (at + 16).min(got.len());
    Some(format!(
        "{wrong} of {} bytes differ, first at offset {at}: got {} want {}",
        got.len(),
        hex(&got[at..end]),
        hex(&want[at..end])
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hex_there_and_back() {
        assert_eq!(hex(&[0, 0xab, 0xff]), "00abff");
        assert_eq!(unhex("00ABff"), Ok(vec![0, 0xab, 0xff]));
        assert!(unhex("abc").is_err() && unhex("zz").is_err());
    }

    #[test]
    fn frames_are_readable() {
        assert_eq!(frames(&[b"KV_STATUS".as_slice(), b"42", b"", &[0, 1]]), r#"["KV_STATUS", "42", "", <2 B 0001>]"#);
        assert!(hexdump(b"hello, world.....").starts_with("00000000  68 65 6c 6c 6f"));
        assert_eq!(hexdump(&[0; 17]).lines().count(), 2);
    }

    #[test]
    fn differences_name_the_offset() {
        assert_eq!(first_difference(b"abc", b"abc"), None);
        let d = first_difference(b"abX", b"abc");
        assert_eq!(d.as_deref(), Some("1 of 3 bytes differ, first at offset 2: got 58 want 63"));
    }
}
