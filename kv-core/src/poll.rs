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
