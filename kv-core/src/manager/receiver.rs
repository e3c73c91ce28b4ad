//! Decode's handle of one room.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::RoomError;
use super::core::Core;
use super::handle::room_handle;
use crate::KvTransferError;
use crate::engine::{DecodeCommand, DecodeShard, RoomShared};
use crate::poll::KvPoll;
use crate::room::{Failure, PublishSpec};

/// What goes with a request's pages.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MetadataOptions {
    /// State indices per component.
    pub state_indices: Vec<Vec<i32>>,
    /// Tokens of the request already here: pages are asked for from here on.
    pub decode_prefix_len: u64,
    /// Mooncake's device pages.
    pub device_kv_indices: Option<Vec<i32>>,
    /// The pages are of a host pool beside the registered one (requirement D2).
    pub host_destination: bool,
}

/// Decode's handle of one room. `Send + Sync`; dropping it is [`clear`](Self::clear): before `send_metadata` nothing is
/// left behind; after it prefill is told to stop, and the pages stay held until every contacted prefill rank has
/// acknowledged (or the release policy gave up), so keep the handle until [`released`](Self::released) if the pages are
/// to be used again.
pub struct KvReceiver {
    manager: Arc<Core<DecodeShard>>,
    shared: Arc<RoomShared>,
    bootstrap_addr: String,
    stage: Mutex<Stage>,
    fake: bool,
}

/// How far the handle has got. Locked while a command is queued, so that `init()` and `clear()` from two threads reach
/// the shard in this order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    New,
    Started,
    Cleared,
}

impl KvReceiver {
    pub(super) fn new(
        manager: Arc<Core<DecodeShard>>,
        shared: Arc<RoomShared>,
        bootstrap_addr: String,
        fake: bool,
    ) -> Self {
        Self { manager, shared, bootstrap_addr, stage: Mutex::new(Stage::New), fake }
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Find out prefill's ranks and register with them; the room turns WaitingForInput, or Failed with the reason.
    /// `prefill_dp_rank` as the request names it, if it does.
    ///
    /// # Errors
    /// [`RoomError::Order`] when called twice.
    pub fn init(&self, prefill_dp_rank: Option<u32>) -> Result<(), RoomError> {
        let mut stage = self.stage();
        let what = match *stage {
            Stage::New => None,
            Stage::Started => Some("init() was called twice"),
            Stage::Cleared => Some("init() after clear()"),
        };
        if let Some(what) = what {
            return Err(RoomError::Order { room: self.room(), what });
        }
        *stage = Stage::Started;
        if !self.fake {
            let (shared, bootstrap_addr) = (self.shared.clone(), self.bootstrap_addr.clone());
            self.manager.engine.enqueue(DecodeCommand::Create { shared, bootstrap_addr, prefill_dp_rank });
            drop(stage);
            self.manager.engine.kick();
        }
        Ok(())
    }

    /// Publish where this request's KV goes: pages in order of the request's tokens from `decode_prefix_len` on, and
    /// the metadata slot. From here on prefill may write them. The waiting deadline starts.
    ///
    /// Called before the ranks are known, the room fails with that reason (D1): wait for [`ready`](Self::ready).
    ///
    /// # Errors
    /// [`RoomError`]; the room is not changed.
    pub fn send_metadata(&self, kv_indices: &[i32], aux_index: u32, options: MetadataOptions) -> Result<(), RoomError> {
        let room = self.room();
        if options.host_destination {
            let backend = self.manager.backend();
            return Err(RoomError::NotSupported { room, what: "a host destination", backend });
        }
        if *self.stage() == Stage::New {
            return Err(RoomError::Order { room, what: "send_metadata() before init()" });
        }
        if !self.fake {
            let spec = PublishSpec {
                pages: kv_indices.into(),
                aux_index,
                state_indices: options.state_indices,
                decode_prefix_len: options.decode_prefix_len,
                device_kv_indices: options.device_kv_indices.map(Arc::from),
            };
            self.manager.submit(DecodeCommand::Publish(self.shared.clone(), Box::new(spec)));
        }
        Ok(())
    }

    /// Give the room up: it ends Failed and prefill is told. Can be repeated; changes no terminal state and no recorded
    /// reason (D4).
    pub fn abort(&self) {
        if !self.fake {
            self.manager.submit(DecodeCommand::Abort(self.shared.clone()));
        }
    }

    /// Let go of the room. A room that has not ended is concluded Failed (D3); a terminal state keeps its value. The
    /// number is free at once, or when the pages are.
    pub fn clear(&self) {
        let mut stage = self.stage();
        let before = std::mem::replace(&mut *stage, Stage::Cleared);
        if before == Stage::Cleared || self.fake {
            return;
        }
        let started = before == Stage::Started;
        // The number is free at once when its pages are.
        let hold = started && !self.shared.releasable();
        self.manager.live.give_back(&self.shared, hold, || {
            if started {
                self.manager.engine.enqueue(DecodeCommand::Clear(self.shared.clone()));
            }
        });
        drop(stage);
        if started {
            self.manager.engine.kick();
        } else {
            self.shared.conclude_unstarted();
        }
    }

    /// Conclude, clear, and say why the room failed (D8). `None` for a room that succeeded. Asked before the room has
    /// ended, it blocks until the shard has concluded it, for at most 5 s.
    pub fn failure(&self) -> Option<KvTransferError> {
        if self.poll() == KvPoll::Success {
            return None;
        }
        if self.poll() != KvPoll::Failed && !self.fake && *self.stage() == Stage::Started {
            // Asked before this rank knows of a failure: another rank's failed (C5).
            self.manager.submit(DecodeCommand::Fail(self.shared.clone(), Failure::elsewhere()));
            self.wait_timeout(Duration::from_secs(5));
        }
        self.clear();
        let failure = self.shared.failure().cloned().unwrap_or_else(Failure::elsewhere);
        Some(failure.error(self.room()))
    }
}

room_handle!(KvReceiver);
