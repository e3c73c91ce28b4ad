//! The lifecycle of one room on either side, as state machines without I/O, clock or threads.
//!
//! ```text
//! handle_event(now, event, effects)   everything that happens to the room
//! handle_timeout(now, effects)        a deadline that poll_timeout() named has come
//! poll_timeout()                      when to call handle_timeout next
//! ```
//!
//! Effects are data; the shard carries them out ([`crate::engine`]). The invariants:
//!
//! * outstanding is a **set of (chunk, attempt) tickets**; a ticket removes only itself, and an unresolved outcome
//!   never discharges it (F1);
//! * per-destination progress lives in the chunk, and a post is legal only from [`Progress::Todo`];
//! * Success needs every write of every chunk Done (B2); responses are a set of ranks (B1);
//! * terminal states absorb, and the first reason stays (C2, D3, D4);
//! * events of a cleared room create nothing (B4).

mod chunk;
mod cursor;
mod life;
mod receiver;
mod sender;

pub use chunk::{Chunk, ChunkSpec, Progress, Ticket};
pub use cursor::{SendCursor, SendError};
pub use life::{PageSum, RoomLife, TagHead, geometry};
pub use receiver::{PublishSpec, ReceiverEffect, ReceiverEvent, ReceiverPolicy, ReceiverRoom, ReleasePolicy};
pub use sender::{Destination, FailedStatusPolicy, SenderEffect, SenderEvent, SenderPolicy, SenderRoom};

use std::sync::Arc;
use std::time::Duration;

use crate::error::{KvTransferError, UNKNOWN_REASON};
use crate::ids::Room;

/// The first cause of a failure.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Failure {
    /// What happened, naming the peer, the step and the time spent.
    pub reason: Arc<str>,
    /// No cause is known on this rank.
    pub from_another_rank: bool,
}

impl Failure {
    /// A failure with a cause known here.
    pub fn here(reason: impl Into<Arc<str>>) -> Self {
        Self { reason: reason.into(), from_another_rank: false }
    }

    /// A failure without a cause known here (C5).
    pub fn elsewhere() -> Self {
        Self { reason: UNKNOWN_REASON.into(), from_another_rank: true }
    }

    /// As the error an engine sees.
    pub fn error(&self, room: Room) -> KvTransferError {
        KvTransferError { room, reason: self.reason.to_string(), from_another_rank: self.from_another_rank }
    }
}

/// SGLang's text for a deadline: `Request <room> timed out after X.Xs in KVPoll.<state>`.
pub(crate) fn timed_out(room: Room, after: Duration, state: &str, hint: &str) -> Arc<str> {
    format!("Request {room} timed out after {:.1}s in KVPoll.{state}{hint}", after.as_secs_f64()).into()
}
