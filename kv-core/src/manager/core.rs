//! What both managers are made of: a shard with its thread, its sockets and its room numbers.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::live::LiveRooms;
use super::runtime::{Engine, Step};
use super::{ManagerError, RoomError};
use crate::control::ControlTap;
use crate::control::local_ip::local_ip;
use crate::control::zmq::{Implementation, PushRole, ZmqControl, ZmqInbox, ZmqOutbox, ZmqSockets};
use crate::engine::{RoomShared, Stats};
use crate::hooks::ManagerHooks;
use crate::ids::Room;
use crate::limits::Limits;
use crate::net::Endpoint;
use crate::poll::KvPoll;
use crate::time::{Clock, MonotonicClock};
use crate::transport::Transport;

/// A rank's shard and everything around it. Its drop ends the thread, then the shard.
pub(super) struct Core<S: Step> {
    pub(super) engine: Arc<Engine<S>>,
    pub(super) live: Arc<LiveRooms>,
    pub(super) hooks: Arc<dyn ManagerHooks>,
    pub(super) endpoint: Endpoint,
    pub(super) stats: Arc<Stats>,
    transport: Arc<dyn Transport>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// The sockets of a rank whose shard is still to be made.
pub(super) struct Sockets {
    inbox: ZmqInbox,
    outbox: ZmqOutbox,
    tap: Option<Arc<dyn ControlTap>>,
}

impl Sockets {
    /// Have `tap` hear every message.
    pub(super) fn tapped(self, tap: Option<Arc<dyn ControlTap>>) -> Self {
        Self { tap, ..self }
    }
}

impl<S: Step> Core<S> {
    /// Bind the control socket. The shard's own parts need the engine and the endpoint; [`Self::start`] completes it.
    pub(super) fn bind(
        host: Option<&str>,
        limits: &Limits,
        zmq: Implementation,
        role: PushRole,
        transport: Arc<dyn Transport>,
        hooks: Arc<dyn ManagerHooks>,
    ) -> Result<(Self, Sockets), ManagerError> {
        let host = match host {
            Some(host) => host.to_owned(),
            None => local_ip().map_err(|e| ManagerError::LocalAddress(e.to_string()))?,
        };
        let control_error = |e: &dyn std::fmt::Display| ManagerError::Control(e.to_string());
        let sockets = ZmqSockets::new(zmq, limits).map_err(|e| control_error(&e))?;
        let (inbox, endpoint) = sockets.bind(&host, limits).map_err(|e| control_error(&e))?;
        let mut outbox = sockets.outbox(role, limits).map_err(|e| control_error(&e))?;
        let clock: Arc<dyn Clock> = Arc::new(MonotonicClock::new());
        // Decode's steps never block: it posts nothing.
        let inline = role == PushRole::ToPrefill || !transport.capabilities().submit_blocks;
        let engine = Engine::new(inline, clock)?;
        outbox.set_wake(engine.waker());
        let core = Self {
            engine,
            live: Arc::new(LiveRooms::new(limits.max_rooms)),
            hooks,
            endpoint,
            stats: Arc::new(Stats::default()),
            transport,
            thread: Mutex::new(None),
        };
        Ok((core, Sockets { inbox, outbox, tap: None }))
    }

    /// Give the shard its thread.
    pub(super) fn start(&self, name: &str, shard: S, sockets: Sockets) -> std::io::Result<()> {
        let control = ZmqControl::new(sockets.outbox).tapped(sockets.tap);
        let thread = self.engine.start(name, shard, control, sockets.inbox)?;
        *self.thread.lock().unwrap_or_else(PoisonError::into_inner) = Some(thread);
        Ok(())
    }

    /// Queue a command and have it carried out.
    pub(super) fn submit(&self, command: S::Command) {
        self.engine.enqueue(command);
        self.engine.kick();
    }

    /// Name of the transport.
    pub(super) fn backend(&self) -> &'static str {
        self.transport.capabilities().name
    }

    /// Take a room number.
    pub(super) fn take(&self, room: Room) -> Result<Arc<RoomShared>, RoomError> {
        let life = self.live.take(room)?;
        Ok(RoomShared::new(room, life, self.engine.events()))
    }
}

impl<S: Step> Drop for Core<S> {
    fn drop(&mut self) {
        let thread = self.thread.lock().unwrap_or_else(PoisonError::into_inner).take();
        self.engine.stop(thread);
    }
}

/// A room of the fake host: Success at once, nothing on the wire (A5).
pub(super) fn fake_room(room: Room) -> Arc<RoomShared> {
    let shared = RoomShared::new(room, 0, None);
    shared.publish(KvPoll::Success, true, None, None);
    shared
}
