//! Driving the rooms: completions in, effects out, deadlines.

use super::*;

impl PrefillShard {
    pub(super) fn completions(&mut self, now: Timestamp, control: &mut dyn ControlPlane) {
        let mut news = std::mem::take(&mut self.news);
        // What it reported before a panic counts; the shard and its deadlines go on (F62).
        if catch_unwind(AssertUnwindSafe(|| self.lane.poll(&mut news))).is_err() {
            self.stats.transport_panics.inc();
        }
        for event in news.drain(..) {
            match event {
                LaneEvent::Outcome(op, outcome) => self.outcome(now, op, outcome, control),
                LaneEvent::Settlement(op, settlement) => self.settlement(now, op, settlement, control),
                LaneEvent::PeerLost(id, error) => {
                    if let Some(name) = self.peers.of(id) {
                        self.peer_lost(now, &name, &error.to_string(), control);
                    }
                }
            }
        }
        self.news = news;
    }

    pub(super) fn outcome(&mut self, now: Timestamp, op: OpId, outcome: Outcome, control: &mut dyn ControlPlane) {
        let Some(r) = self.in_flight.remove(&op) else {
            // Given up when the transport panicked over it; what it says now is proof.
            let (src_quiet, dst_quiet) = outcome.quiet();
            return self.settlement(now, op, Settlement::Settled { src_quiet, dst_quiet }, control);
        };
        self.stats.ops_in_flight.set(self.in_flight.len() as u64);
        if let Some(peer) = self.peers.get_mut(&r.name) {
            peer.in_flight = peer.in_flight.saturating_sub(1);
        }
        let (key, chunk, dest, bytes) = (r.key, r.chunk, r.dest, r.bytes);
        self.in_trace(key, chunk, |module, room| match &outcome {
            Outcome::Done => tracing::debug!(module, room, chunk, op = op.0, bytes, "kv write done"),
            Outcome::Failed { error, .. } => tracing::debug!(module, room, chunk, op = op.0, %error, "kv write failed"),
            Outcome::Unresolved { error } => {
                tracing::debug!(module, room, chunk, op = op.0, %error, "kv write unresolved");
            }
        });
        match &outcome {
            Outcome::Done => {
                self.stats.ops_done.inc();
                self.stats.bytes_done.add(r.bytes);
            }
            Outcome::Failed { .. } => self.stats.ops_failed.inc(),
            Outcome::Unresolved { .. } => self.stats.ops_unresolved.inc(),
        }
        let quiet = outcome.quiet();
        if quiet != (true, true) && !mutant!(ForgetOpAtError) {
            self.retain(now, op, r, quiet);
        }
        if let Some(event) = self.outcome_of(&Post { key, chunk, dest }, outcome) {
            self.drive(now, key, event, control);
        }
    }

    /// A write ended without proof: it stays, and is seen to (F5).
    pub(super) fn retain(&mut self, now: Timestamp, id: OpId, op: OpRef, quiet: (bool, bool)) {
        // A room with a write in flight stays.
        let peer = self.rooms.get(op.key).and_then(|e| e.room.destinations().get(op.dest)).map(|d| d.endpoint.clone());
        let peer = peer.unwrap_or_else(|| Endpoint::new("unknown", 0));
        self.stats.peers.retain(&peer, now, id, op.bytes);
        self.stats.ops_retained.inc();
        self.stats.bytes_retained.add(op.bytes);
        self.retained.insert(id, Retained { op, quiet, peer, since: now });
    }

    /// Proof may come side by side; an op is let go of when both sides are quiet.
    fn settlement(&mut self, now: Timestamp, id: OpId, settlement: Settlement, control: &mut dyn ControlPlane) {
        let Some(retained) = self.retained.get_mut(&id) else { return };
        let (s, d) = settlement.quiet();
        let turned = (s && !retained.quiet.0, d && !retained.quiet.1);
        retained.quiet.0 |= s;
        retained.quiet.1 |= d;
        let (key, chunk, dest, bytes) = (retained.op.key, retained.op.chunk, retained.op.dest, retained.op.bytes);
        if retained.quiet == (true, true) {
            let stats = &self.stats;
            stats.peers.settle(&retained.peer, retained.since, id, bytes);
            stats.ops_retained.set(stats.ops_retained.get().saturating_sub(1));
            stats.bytes_retained.set(stats.bytes_retained.get().saturating_sub(bytes));
            self.retained.remove(&id);
        }
        if let Some(event) = self.settlement_of(&Post { key, chunk, dest }, turned) {
            self.drive(now, key, event, control);
        }
    }

    /// Feed a room one event, and carry out everything that follows from it.
    pub(super) fn drive(&mut self, now: Timestamp, key: RoomKey, event: SenderEvent, control: &mut dyn ControlPlane) {
        self.work.push_back((key, event));
        self.work_off(now, control);
    }

    fn work_off(&mut self, now: Timestamp, control: &mut dyn ControlPlane) {
        while let Some((key, event)) = self.work.pop_front() {
            let Some(entry) = self.rooms.get_mut(key) else { continue };
            let mut effects = std::mem::take(&mut self.effects);
            entry.room.handle_event(now, event, &mut effects);
            self.carry_out(now, key, &mut effects, control);
            self.effects = effects;
            self.finish_traces(key);
            self.give_up_pieces(key);
            self.after(key);
        }
    }

    pub(super) fn carry_out(
        &mut self,
        now: Timestamp,
        key: RoomKey,
        effects: &mut Vec<SenderEffect>,
        control: &mut dyn ControlPlane,
    ) {
        let Some(room) = self.rooms.get(key).map(|e| e.room.room()) else { return effects.clear() };
        let mut changed = false;
        for effect in effects.drain(..) {
            match effect {
                SenderEffect::Post(chunk, dest) => self.queue_post(Post { key, chunk, dest }),
                SenderEffect::Status(to, status, reason) => self.status(now, room, &to, status, reason, None, control),
                SenderEffect::StatusOf { to, life, status, reason, tag } => {
                    let about = Some(About { tag, ..About::life(life.process, life.generation) });
                    self.status(now, room, &to, status, reason, about, control);
                }
                SenderEffect::Changed => changed = true,
                SenderEffect::Drained => {
                    if self.pending_acks.contains_key(&room) {
                        self.ack_if_drained(now, room, control);
                    }
                }
            }
        }
        if changed {
            self.publish(key);
        }
    }

    /// Show the handle what changed. Last of a room's effects: a waiter that wakes finds everything done.
    pub(super) fn publish(&mut self, key: RoomKey) {
        let Some(e) = self.rooms.get_mut(key) else { return };
        let poll = e.room.poll();
        if poll.is_terminal() && !e.reported {
            e.reported = true;
            tracing::debug!(
                module = self.hooks.sender_trace_module(),
                room = e.room.room().get(),
                latency = ?e.room.latency(),
                "sender ended: {poll:?}"
            );
            match poll {
                KvPoll::Success => self.stats.rooms_succeeded.inc(),
                _ => self.stats.rooms_failed.inc(),
            }
        }
        e.shared.set_decode_prefix_len(e.room.decode_prefix_len());
        let releasable = e.room.releasable();
        self.stats.awaiting_release(&mut e.held, poll.is_terminal() && !releasable);
        e.shared.publish(poll, releasable, e.room.failure(), e.room.latency());
    }

    /// Deadlines and the end of a room.
    pub(super) fn after(&mut self, key: RoomKey) {
        self.end_claim_if_over(key);
        let Some(e) = self.rooms.get(key) else { return };
        if !e.room.finished() {
            return self.rearm(key);
        }
        let Some(e) = self.rooms.remove(key) else { return };
        let room = e.room.room();
        if let Some(keys) = self.undrained.get_mut(&room) {
            keys.retain(|k| *k != key);
            if keys.is_empty() {
                self.undrained.remove(&room);
            }
        }
        self.stats.rooms_live.set(self.rooms.len() as u64);
        (self.config.freed)(&e.shared);
    }

    /// Late metadata of a room that failed and was cleared is answered for a while (C6).
    pub(super) fn bury(&mut self, now: Timestamp, room: Room, reason: Arc<str>) {
        while self.tombstone_order.len() >= self.config.limits.max_early_rooms {
            let Some((deadline, oldest)) = self.tombstone_order.pop_front() else { break };
            if self.tombstones.get(&oldest).is_some_and(|(t, _)| *t == deadline) {
                self.tombstones.remove(&oldest);
            }
        }
        let deadline = now + self.config.tombstone_timeout;
        self.tombstones.insert(room, (deadline, reason));
        self.tombstone_order.push_back((deadline, room));
    }

    pub(super) fn rearm(&mut self, key: RoomKey) {
        let Some(e) = self.rooms.get_mut(key) else { return };
        let Some(at) = e.due() else { return };
        if e.armed.is_none_or(|armed| at < armed) {
            e.armed = Some(at);
            let rooms = &self.rooms;
            self.timers.arm(at, key, rooms.len(), |t, k| {
                rooms.get(k).is_some_and(|e| e.armed == Some(t) && e.due().is_some())
            });
        }
    }

    pub(super) fn timeouts(&mut self, now: Timestamp, control: &mut dyn ControlPlane) {
        while let Some(key) = self.timers.pop_due(now) {
            let Some(e) = self.rooms.get_mut(key) else { continue };
            e.armed = None;
            let mut effects = std::mem::take(&mut self.effects);
            e.say_what_hinders(now, &mut effects);
            e.room.handle_timeout(now, &mut effects);
            if !effects.is_empty() {
                self.stats.rooms_timed_out.inc();
            }
            self.carry_out(now, key, &mut effects, control);
            self.effects = effects;
            self.finish_traces(key);
            self.give_up_pieces(key);
            self.claim_again_if_due(now, key);
            self.after(key);
            self.work_off(now, control);
        }
        self.outgoing.handle_timeout(now, control, &self.stats);
        while self.early_order.front().is_some_and(|(t, _)| *t <= now) {
            let Some((deadline, room)) = self.early_order.pop_front() else { break };
            if self.early.get(&room).is_some_and(|e| e.deadline == deadline) {
                self.expire_early(now, room, control);
            }
        }
        self.spent.expire(now);
        while self.tombstone_order.front().is_some_and(|(t, _)| *t <= now) {
            let Some((deadline, room)) = self.tombstone_order.pop_front() else { break };
            if self.tombstones.get(&room).is_some_and(|(t, _)| *t == deadline) {
                self.tombstones.remove(&room);
            }
        }
    }

    /// Nobody made a sender for this room: decode is told (F28).
    pub(super) fn expire_early(&mut self, now: Timestamp, room: Room, control: &mut dyn ControlPlane) {
        let Some(early) = self.early.remove(&room) else { return };
        self.early_bytes -= page_bytes(&early.destinations);
        self.stats.early_expired.inc();
        let secs = self.config.early_timeout.as_secs_f64();
        let reason: Arc<str> = format!("prefill made no sender for room {room} within {secs:.1}s").into();
        for d in early.destinations.iter().filter(|d| !d.is_dummy) {
            self.refuse(now, room, d, reason.clone(), control);
        }
    }
}
