//! Short forms.

use std::sync::Arc;
use std::time::Duration;

use kv_core::engine::{ChunkExtras, RoomShared};
use kv_core::event::SourceEvent;
use kv_core::ids::OpId;
use kv_core::poll::KvPoll;
use kv_testkit::fake_transport::Policy;
use kv_testkit::net::Flight;
pub use kv_testkit::world::{World, WorldSpec};

pub type Room = Arc<RoomShared>;

pub const SECOND: Duration = Duration::from_secs(1);

pub fn secs(s: u64) -> Duration {
    Duration::from_secs(s)
}

pub fn world() -> World {
    World::new(WorldSpec::default())
}

/// One prefill rank, one decode rank; writes stay in flight until they are completed by hand.
pub fn held_world(spec: WorldSpec) -> World {
    let w = World::new(spec);
    w.p.iter().for_each(|p| p.transport.set_policy(Policy::Hold));
    w
}

pub fn polls(rooms: &[Room]) -> Vec<u8> {
    rooms.iter().map(|r| r.poll() as u8).collect()
}

pub fn reason(room: &Room) -> String {
    room.failure().expect("a failed room").reason.to_string()
}

/// A chunk that waits for this event.
pub fn after(event: &SourceEvent) -> ChunkExtras {
    ChunkExtras { wait_event: Some(Arc::new(event.clone())), trace: None }
}

/// Room 7 opened for pages 4 and 5, pages 0 and 1 being sent as one chunk: a write in flight on prefill rank 0.
pub fn in_flight(w: &mut World) -> (Room, Room, OpId) {
    let (mut s, mut r) = w.open(7, &[4, 5]);
    w.send(0, &s[0], &[0, 1], 0, true);
    w.run();
    (s.remove(0), r.remove(0), w.p[0].transport.only().id)
}

pub fn is_tag(f: &Flight, tag: &str) -> bool {
    f.frames.first().is_some_and(|t| t == tag)
}

/// Both sides clear, all that is due happens; nothing may be left.
pub fn end(w: &mut World, senders: &[Room], receivers: &[Room]) {
    w.close(senders, receivers);
    w.assert_nothing_held();
    w.fabric.assert_no_premature_release();
}

pub fn one(w: &mut World, s: &Room, r: &Room) {
    end(w, std::slice::from_ref(s), std::slice::from_ref(r));
}

pub const SUCCESS: KvPoll = KvPoll::Success;
pub const FAILED: KvPoll = KvPoll::Failed;
