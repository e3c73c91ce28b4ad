//! An accepted op on its way: what of it has gone, what was answered, and how it stands.

use std::time::Instant;

use kv_core::transport::WriteOp;
use mooncake_wire::{HEADER_LEN, Read, Write};

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    /// First byte's address here.
    pub source: u64,
    /// First byte's address there.
    pub target: u64,
    pub len: u64,
    /// A byte is read: behind writes that nobody acknowledges, in the order of the stream, its answer says that they are in
    /// place.
    pub fence: bool,
}

impl Piece {
    pub fn header(&self, acknowledged: bool) -> [u8; HEADER_LEN] {
        let (addr, len) = (self.target, self.len);
        if self.fence { Read { addr, len, acknowledged }.encode() } else { Write { addr, len, acknowledged }.encode() }
    }

    /// Bytes behind its header.
    pub fn payload(&self) -> u64 {
        if self.fence { 0 } else { self.len }
    }

    /// Bytes it takes in the stream.
    pub fn wire(&self) -> u64 {
        HEADER_LEN as u64 + self.payload()
    }
}

pub(crate) struct Flight {
    pub op: WriteOp,
    pub pieces: Vec<Piece>,
    /// Pieces that the kernel has whole.
    pub sent: usize,
    /// Pieces that were answered.
    pub answered: usize,
    /// Pieces were left out: they never go.
    pub cut: bool,
    /// It was reported unresolved.
    pub told: bool,
    pub since: Instant,
}

impl Flight {
    /// `acknowledges`: the peer answers each write. Otherwise a byte is read behind the last one.
    pub fn new(op: WriteOp, mut pieces: Vec<Piece>, acknowledges: bool, now: Instant) -> Self {
        if let Some(last) = pieces.last().filter(|_| !acknowledges) {
            pieces.push(Piece { len: 1, fence: true, ..*last });
        }
        Self { op, pieces, sent: 0, answered: 0, cut: false, told: false, since: now }
    }

    pub fn waits(&self) -> bool {
        self.sent < self.pieces.len()
    }

    pub fn over(&self) -> bool {
        self.answered == self.pieces.len()
    }

    /// Leave out what has not begun to go; `part`: the piece after the sent ones has. False: nothing has.
    pub fn cut(&mut self, part: bool) -> bool {
        let begun = self.sent + usize::from(part);
        let fence = self.pieces.last().copied().filter(|p| p.fence);
        let writes = self.pieces.len() - usize::from(fence.is_some());
        if begun < writes {
            self.pieces.truncate(begun);
            self.pieces.extend(fence.filter(|_| begun > 0));
            self.cut = true;
        }
        begun > 0
    }

    /// The next piece was answered.
    pub fn answer(&mut self, acknowledges: bool) -> Result<(), &'static str> {
        if acknowledges {
            if self.answered >= self.sent {
                return Err("an answer to a request that has not gone");
            }
            self.answered += 1;
        } else {
            if self.waits() {
                return Err("a byte that nobody asked for");
            }
            self.answered = self.pieces.len();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kv_core::ids::{OpId, PeerId};

    fn flight(pieces: u64, acknowledges: bool) -> Flight {
        let op = WriteOp { id: OpId(1), peer: PeerId(1), plan: Default::default(), regions: [].into() };
        let piece = |i| Piece { source: 4096 + i * 64, target: 8192 + i * 64, len: 64, fence: false };
        Flight::new(op, (0..pieces).map(piece).collect(), acknowledges, Instant::now())
    }

    #[test]
    fn without_acknowledgements_a_byte_is_read_behind_the_last_write() {
        let mut f = flight(2, false);
        assert_eq!(
            (f.pieces.len(), f.pieces[2].fence, f.pieces[2].target, f.pieces[2].wire()),
            (3, true, 8192 + 64, 24)
        );
        assert_eq!((f.pieces[2].header(false)[16], f.pieces[0].header(false)[16]), (0, 1));
        assert!(f.answer(false).is_err(), "before it has gone");
        f.sent = 3;
        assert!(f.answer(false).is_ok() && f.over());
    }

    #[test]
    fn what_is_cut_short_keeps_its_fence() {
        let mut f = flight(4, false);
        f.sent = 1;
        assert!(f.cut(true) && f.cut && f.pieces.len() == 3 && f.pieces[2].fence);
        let mut f = flight(4, true);
        f.sent = 1;
        assert!(f.cut(false) && f.cut && f.pieces.len() == 1 && !f.over());
        assert!(f.answer(true).is_ok() && f.over() && f.answer(true).is_err());
        let mut f = flight(2, false);
        f.sent = 2;
        assert!(f.cut(false) && !f.cut && f.waits(), "all writes have gone");
        assert!(!flight(4, true).cut(false), "nothing has gone");
    }
}
