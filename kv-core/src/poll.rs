//! The five states a room shows to its engine.

/// What `poll()` shows; the numbers are SGLang's and travel in status messages.
///
/// Over several ranks the states combine by minimum, so a failure anywhere wins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum KvPoll {
    /// Terminal: the transfer failed; [`failure`](crate::KvTransferError) says why.
    Failed = 0,
    /// Prefill waits for decode's metadata; decode resolves prefill's addresses.
    Bootstrapping = 1,
    /// Prefill may send; decode may publish its pages or waits for them to be filled.
    WaitingForInput = 2,
    /// Writes are under way (prefill), or complete but gated (decode).
    Transferring = 3,
    /// Terminal: every byte is in place.
    Success = 4,
}

impl KvPoll {
    /// The state with this number on the wire.
    pub const fn from_wire(value: i64) -> Option<Self> {
        Some(match value {
            0 => Self::Failed,
            1 => Self::Bootstrapping,
            2 => Self::WaitingForInput,
            3 => Self::Transferring,
            4 => Self::Success,
            _ => return None,
        })
    }

    /// Failed or Success: the state never changes again (requirement D3).
    pub const fn is_terminal(self) -> bool {
        matches!(self, Self::Failed | Self::Success)
    }
}

/// What all pipeline stages of one prefill agree that a room shows (requirement G3): the minimum over the ranks, and
/// Bootstrapping while any is unknown.
///
/// A scheduling step takes one [snapshot](Self::agree) and decides by it on every rank; what a rank learns meanwhile
/// shows in the next one. Otherwise stages act on different outcomes, and the pipeline stands still.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgreedPoll {
    known: Vec<Option<KvPoll>>,
    agreed: KvPoll,
}

impl AgreedPoll {
    /// A room of this many ranks, none of which has said anything.
    pub fn new(ranks: usize) -> Self {
        Self { known: vec![None; ranks], agreed: KvPoll::Bootstrapping }
    }

    /// What a rank shows now. A rank that does not exist, and news after a terminal state, change nothing.
    pub fn report(&mut self, rank: usize, poll: KvPoll) {
        if let Some(known) = self.known.get_mut(rank).filter(|k| !k.is_some_and(KvPoll::is_terminal)) {
            *known = Some(poll);
        }
    }

    /// Begin a scheduling step: the snapshot that holds until the next one.
    pub fn agree(&mut self) -> KvPoll {
        let all: Option<Vec<KvPoll>> = self.known.iter().copied().collect();
        self.agreed = all.and_then(|all| all.into_iter().min()).unwrap_or(KvPoll::Bootstrapping);
        self.agreed
    }

    /// The snapshot.
    pub const fn poll(&self) -> KvPoll {
        self.agreed
    }
}
