//! The error an engine sees when a room failed.

use crate::ids::Room;

/// Why a room failed (requirement D8). The first cause wins; later ones never replace it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("room {room}: {reason}")]
pub struct KvTransferError {
    /// The room that failed.
    pub room: Room,
    /// First recorded cause, or SGLang's default text when no cause is known here.
    pub reason: String,
    /// No cause is known on this rank: another rank failed.
    pub from_another_rank: bool,
}

/// The text used when no local cause is known (requirement C5).
pub const UNKNOWN_REASON: &str = "Failed due to an unknown reason from another rank";
/// The text of a local abort.
pub const ABORTED_REASON: &str = "Aborted by AbortReq.";
/// Prefill's text when decode aborted the room.
pub const ABORTED_BY_DECODE_REASON: &str = "Aborted by decode-side abort notification.";
/// Decode's text when a Failed status came without a reason.
pub const PREFILL_DEAD_REASON: &str = "Failed to get kvcache from prefill instance, it might be dead";
