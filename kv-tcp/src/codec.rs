//! Little-endian fields, length-checked.

/// Bytes that do not follow the format, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed: {0}")]
pub(crate) struct Malformed(pub &'static str);

/// Takes fields off the front of a byte string.
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn bytes(&mut self, n: usize) -> Result<&'a [u8], Malformed> {
        let (head, rest) = self.0.split_at_checked(n).ok_or(Malformed("cut short"))?;
        self.0 = rest;
        Ok(head)
    }

    pub fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or(Malformed("cut short"))?;
        self.0 = rest;
        Ok(*head)
    }

    pub fn u8(&mut self) -> Result<u8, Malformed> {
        self.array().map(u8::from_le_bytes)
    }

    pub fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    /// A count of items of `size` bytes each, which must all be here: so nothing is allocated for a count alone.
    pub fn count(&mut self, size: usize) -> Result<usize, Malformed> {
        let n = self.u32()? as usize;
        if n.checked_mul(size).is_none_or(|bytes| bytes > self.0.len()) {
            return Err(Malformed("count exceeds the data"));
        }
        Ok(n)
    }

    pub fn text(&mut self, max: usize) -> Result<&'a str, Malformed> {
        let n = usize::from(self.u16()?);
        if n > max {
            return Err(Malformed("text too long"));
        }
        std::str::from_utf8(self.bytes(n)?).map_err(|_| Malformed("text is not UTF-8"))
    }

    pub fn end(&self) -> Result<(), Malformed> {
        if self.0.is_empty() { Ok(()) } else { Err(Malformed("bytes left over")) }
    }
}

/// Appends fields.
pub(crate) trait Put {
    fn put(&mut self, bytes: &[u8]);

    fn put_u8(&mut self, v: u8) {
        self.put(&[v]);
    }
    fn put_u16(&mut self, v: u16) {
        self.put(&v.to_le_bytes());
    }
    fn put_u32(&mut self, v: u32) {
        self.put(&v.to_le_bytes());
    }
    fn put_u64(&mut self, v: u64) {
        self.put(&v.to_le_bytes());
    }
    /// Text, cut at a character boundary to what a `u16` length can say.
    fn put_text(&mut self, text: &str, max: usize) {
        let mut n = text.len().min(max).min(usize::from(u16::MAX));
        while !text.is_char_boundary(n) {
            n -= 1;
        }
        self.put_u16(n as u16);
        self.put(&text.as_bytes()[..n]);
    }
}

impl Put for Vec<u8> {
    fn put(&mut self, bytes: &[u8]) {
        self.extend_from_slice(bytes);
    }
}
