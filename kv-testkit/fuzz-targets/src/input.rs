//! Bytes read as choices.

use bytes::Bytes;

/// Takes choices off the front of an input. An input that has run out gives zeros, so every input is a whole one.
#[derive(Clone, Debug)]
pub struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    /// From the start.
    pub fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    /// Whether it has run out.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// At most `n` bytes.
    pub fn bytes(&mut self, n: usize) -> &'a [u8] {
        let (head, rest) = self.0.split_at(n.min(self.0.len()));
        self.0 = rest;
        head
    }

    /// All that is left.
    pub fn rest(&mut self) -> &'a [u8] {
        std::mem::take(&mut self.0)
    }

    fn array<const N: usize>(&mut self) -> [u8; N] {
        let mut out = [0; N];
        let got = self.bytes(N);
        out[..got.len()].copy_from_slice(got);
        out
    }

    /// One byte.
    pub fn u8(&mut self) -> u8 {
        self.array::<1>()[0]
    }

    /// Two bytes, little-endian.
    pub fn u16(&mut self) -> u16 {
        u16::from_le_bytes(self.array())
    }

    /// Four bytes, little-endian.
    pub fn u32(&mut self) -> u32 {
        u32::from_le_bytes(self.array())
    }

    /// Eight bytes, little-endian.
    pub fn u64(&mut self) -> u64 {
        u64::from_le_bytes(self.array())
    }

    /// One bit.
    pub fn flag(&mut self) -> bool {
        self.u8() & 1 != 0
    }

    /// A number below `n`, off one byte; 0 for `n == 0`.
    pub fn below(&mut self, n: usize) -> usize {
        usize::from(self.u8()) % n.max(1)
    }

    /// One of these. Panics when there is none.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        of[self.below(of.len())]
    }

    /// A number of any size: mostly small, now and then at an edge.
    pub fn number(&mut self) -> u64 {
        match self.u8() {
            n @ 0..=191 => u64::from(n),
            192..=223 => u64::from(self.u16()),
            224..=239 => u64::from(self.u32()),
            240..=247 => self.u64(),
            n => [u64::MAX, i64::MAX as u64, u64::from(u32::MAX), 1 << 31, 1 << 32, 1 << 20, 4096, 65_536]
                [usize::from(n - 248)],
        }
    }

    /// [`number`](Self::number), cut to 32 bits.
    pub fn number32(&mut self) -> u32 {
        u32::try_from(self.number()).unwrap_or(u32::MAX)
    }

    /// All that is left as frames: each a length of two bytes, little-endian, then as many bytes of it as there are.
    pub fn frames(&mut self) -> Vec<Bytes> {
        let mut out = Vec::new();
        while !self.is_empty() {
            let n = usize::from(self.u16());
            out.push(Bytes::copy_from_slice(self.bytes(n)));
        }
        out
    }
}

/// What [`Input::frames`] reads. Frames beyond 64 KiB are cut.
pub fn put_frames<B: AsRef<[u8]>>(out: &mut Vec<u8>, frames: &[B]) {
    for frame in frames {
        let frame = &frame.as_ref()[..frame.as_ref().len().min(usize::from(u16::MAX))];
        out.extend_from_slice(&(frame.len() as u16).to_le_bytes());
        out.extend_from_slice(frame);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_and_an_empty_input_is_zeros() {
        let frames = [&b"ABORT"[..], b"", b"7"];
        let mut out = Vec::new();
        put_frames(&mut out, &frames);
        assert_eq!(Input::new(&out).frames(), frames);
        assert_eq!(Input::new(&[9, 0, 1]).frames(), [&[1][..]], "cut at the end");
        let mut empty = Input::new(&[]);
        assert_eq!((empty.u64(), empty.number(), empty.below(3), empty.below(0)), (0, 0, 0, 0));
    }
}
