//! Prefill's handle of one room.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::RoomError;
use super::core::Core;
use super::handle::room_handle;
use crate::KvTransferError;
use crate::engine::{ChunkExtras, PrefillCommand, PrefillShard, RoomShared};
use crate::event::WaitEvent;
use crate::poll::KvPoll;
use crate::room::{Failure, SendCursor, SendError};

/// What a request says beyond its room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SenderOptions {
    /// The DP rank of prefill that the request names (`disagg_prefill_dp_rank`): decode asks that one for the room, whatever
    /// the load balancing.
    pub prefill_dp_rank: Option<u32>,
}

/// What goes with a chunk besides its pages (requirement A3).
#[derive(Clone, Default)]
pub struct SendOptions {
    /// State indices per component; used with the last chunk only.
    pub state_indices: Vec<Vec<i32>>,
    /// Source pages must not be read before this fired.
    pub wait_event: Option<Arc<dyn WaitEvent>>,
    /// Trace context of this chunk: the span that all that is said of its posting, its writes' outcomes, and its end is
    /// said in (level DEBUG, with the fields `room`, `chunk` and the backend's `module`). It is let go of on every way
    /// the chunk can end: sent, failed or aborted with its room, cleared, refused. A context that comes as text (a W3C
    /// `traceparent`) becomes a field or the parent of the span:
    /// `tracing::info_span!("kv_send", traceparent = "00-...-01")`.
    pub trace: Option<tracing::Span>,
}

/// Prefill's handle of one room. `Send + Sync`; dropping it is [`clear`](Self::clear): in Bootstrapping and
/// WaitingForInput the room ends Failed and decode is told; with writes in flight they run to their end, and their
/// memory stays registered until it is proven quiet.
pub struct KvSender {
    manager: Arc<Core<PrefillShard>>,
    shared: Arc<RoomShared>,
    /// Set by `init()`.
    cursor: Mutex<Option<SendCursor>>,
    cleared: AtomicBool,
    fake: bool,
}

impl KvSender {
    pub(super) fn new(manager: Arc<Core<PrefillShard>>, shared: Arc<RoomShared>, fake: bool) -> Self {
        Self { manager, shared, cursor: Mutex::default(), cleared: AtomicBool::new(false), fake }
    }

    /// Tokens of the request that decode already has, a whole number of pages: send from there on. Known from
    /// WaitingForInput on; 0 before.
    pub fn decode_prefix_len(&self) -> u64 {
        self.shared.decode_prefix_len()
    }

    /// Say how many pages will be sent in all, and which metadata slot goes with the last chunk.
    ///
    /// # Errors
    /// [`RoomError::Order`] when called twice.
    pub fn init(&self, num_kv_indices: u32, aux_index: Option<u32>) -> Result<(), RoomError> {
        let mut cursor = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        if cursor.is_some() {
            return Err(RoomError::Order { room: self.room(), what: "init() was called twice" });
        }
        *cursor = Some(SendCursor::new(num_kv_indices, aux_index));
        Ok(())
    }

    /// Send the next pages of the request. The chunk that completes the number given to [`init`](Self::init) is the
    /// last one; a request without pages (a full prefix hit) is one call with an empty list. After a terminal state it
    /// returns at once and queues nothing (C1).
    ///
    /// # Errors
    /// [`RoomError`]; the room is not changed.
    pub fn send(&self, kv_indices: &[i32], options: SendOptions) -> Result<(), RoomError> {
        let room = self.room();
        if self.poll().is_terminal() {
            return Ok(());
        }
        let state_indices = self.manager.hooks.prepare_send_state_indices(options.state_indices);
        if !state_indices.iter().all(Vec::is_empty) {
            let backend = self.manager.backend();
            return Err(RoomError::NotSupported { room, what: "a state component", backend });
        }
        let mut guard = self.cursor.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(cursor) = guard.as_mut() else {
            return Err(RoomError::Order { room, what: "send() before init()" });
        };
        let spec = cursor.next(kv_indices).map_err(|e| match e {
            SendError::AfterLast => RoomError::AfterLast { room },
            SendError::TooManyPages { pages, sent, total } => RoomError::TooManyPages { room, pages, sent, total },
        })?;
        // Queued under the cursor's lock, so that two threads' chunks keep their order; carried out without it, since a
        // waker may call back.
        let extras = ChunkExtras { wait_event: options.wait_event, trace: options.trace };
        self.manager.engine.enqueue(PrefillCommand::Send(self.shared.clone(), spec, extras));
        drop(guard);
        self.manager.engine.kick();
        Ok(())
    }

    /// Give the room up: it ends Failed, and every known decode is told. Can be repeated; changes no terminal state.
    pub fn abort(&self) {
        if !self.fake {
            self.manager.submit(PrefillCommand::Abort(self.shared.clone()));
        }
    }

    /// From the first `send()` to Success, and from the last `send()` to Success.
    pub fn transfer_latency(&self) -> Option<(Duration, Duration)> {
        self.shared.latency()
    }

    /// Let go of the room: its number is free for the next one. A terminal state keeps its value (C3).
    pub fn clear(&self) {
        if !self.cleared.swap(true, Ordering::AcqRel) && !self.fake {
            let clear = PrefillCommand::Clear(self.shared.clone());
            self.manager.live.give_back(&self.shared, false, || self.manager.engine.enqueue(clear));
            self.manager.engine.kick();
        }
    }

    /// Conclude, clear, and say why the room failed. `None` for a room that succeeded. Asked before the room has ended,
    /// it blocks until the shard has concluded it, for at most 5 s.
    pub fn failure(&self) -> Option<KvTransferError> {
        if self.poll() == KvPoll::Success {
            return None;
        }
        if self.poll() != KvPoll::Failed && !self.fake {
            // Asked before this rank knows of a failure: another rank's failed (C5).
            self.manager.submit(PrefillCommand::Fail(self.shared.clone(), Failure::elsewhere()));
            self.wait_timeout(Duration::from_secs(5));
        }
        self.clear();
        let failure = self.shared.failure().cloned().unwrap_or_else(Failure::elsewhere);
        Some(failure.error(self.room()))
    }
}

room_handle!(KvSender);
