//! What both handles can do: look at their room, and wait for it.

use crate::ids::Room;
use crate::poll::KvPoll;

/// A room that can be polled: both handles.
pub trait RoomHandle {
    /// Its number.
    fn room(&self) -> Room;
    /// One atomic load.
    fn poll(&self) -> KvPoll;
}

/// Poll many rooms at once: `out[i]` becomes the state of `rooms[i]`, as far as both reach.
pub fn poll_many<H: RoomHandle>(rooms: &[&H], out: &mut [KvPoll]) {
    for (room, out) in rooms.iter().zip(out) {
        *out = room.poll();
    }
}

/// The methods of a handle that only need its `shared` state.
macro_rules! room_handle {
    ($handle:ty) => {
        impl $handle {
            /// Its number.
            pub fn room(&self) -> $crate::ids::Room {
                self.shared.room()
            }

            /// The room's state: one atomic load, which drives nothing (B3). On prefill, Success means that every byte
            /// is in place and decode has been told.
            pub fn poll(&self) -> $crate::poll::KvPoll {
                self.shared.poll()
            }

            /// Wait until the other side is known (WaitingForInput), or the room failed. On decode: until pages may be
            /// published. On prefill sending does not need it, chunks sent before wait for it.
            pub async fn ready(&self) -> $crate::poll::KvPoll {
                self.shared.wait_for(|s| s.poll() != $crate::poll::KvPoll::Bootstrapping).await;
                self.poll()
            }

            /// As [`ready`](Self::ready), blocking, for at most this long.
            pub fn ready_timeout(&self, timeout: std::time::Duration) -> $crate::poll::KvPoll {
                self.shared.wait_for_timeout(timeout, |s| s.poll() != $crate::poll::KvPoll::Bootstrapping);
                self.poll()
            }

            /// Wait for Success or Failed, on any runtime.
            pub async fn wait(&self) -> $crate::poll::KvPoll {
                self.shared.wait_for(|s| s.poll().is_terminal()).await;
                self.poll()
            }

            /// Block until Success or Failed, or the time is over.
            pub fn wait_timeout(&self, timeout: std::time::Duration) -> $crate::poll::KvPoll {
                self.shared.wait_for_timeout(timeout, |s| s.poll().is_terminal());
                self.poll()
            }

            /// Whether this side's pages are free: the room is terminal and, on prefill, nothing reads them any more; on
            /// decode, no write of it can land any more (or the release policy gave up waiting, which is counted).
            pub fn releasable(&self) -> bool {
                self.shared.releasable()
            }

            /// Wait until [`releasable`](Self::releasable).
            pub async fn released(&self) {
                self.shared.wait_for($crate::engine::RoomShared::releasable).await;
            }

            /// Block until [`releasable`](Self::releasable), or the time is over; tells which.
            pub fn released_timeout(&self, timeout: std::time::Duration) -> bool {
                self.shared.wait_for_timeout(timeout, $crate::engine::RoomShared::releasable)
            }
        }

        impl $crate::manager::RoomHandle for $handle {
            fn room(&self) -> $crate::ids::Room {
                self.shared.room()
            }
            fn poll(&self) -> $crate::poll::KvPoll {
                self.shared.poll()
            }
        }

        impl Drop for $handle {
            fn drop(&mut self) {
                self.clear();
            }
        }
    };
}

pub(super) use room_handle;
