//! Prefill's shard around the sender rooms, for one room number: what `engine::prefill` does, without its plans.

use std::sync::Arc;

use kv_core::error::ABORTED_BY_DECODE_REASON;
use kv_core::ids::OpId;
use kv_core::poll::KvPoll;
use kv_core::room::Failure;
use kv_core::room::{ChunkSpec, Destination, FailedStatusPolicy, SenderEffect, SenderEvent, SenderRoom};
use kv_core::time::Timestamp;

use crate::setup::Setup;
use crate::state::{Msg, Op, SenderLife, State, wire};

pub const NOW: Timestamp = Timestamp::ZERO;

impl State {
    pub fn create_sender(&mut self, setup: &Setup, p: u8) {
        let node = &mut self.p[usize::from(p)];
        let room = SenderRoom::new(setup.room(), NOW, setup.sender_policy());
        node.lives.push(SenderLife { room: Some(room), named: true, sent: 0, posts: Vec::new() });
        node.tombstone = None;
        let life = node.lives.len() as u8 - 1;
        let (early, failed) = (std::mem::take(&mut node.early), node.early_failed.take());
        for d in early {
            self.on_sender(setup, p, life, SenderEvent::Destination(d));
        }
        if let Some(reason) = failed {
            self.on_sender(setup, p, life, SenderEvent::Fail(Failure::here(reason)));
        }
    }

    /// Feed a room one event, watch what must never be seen, and carry out its effects.
    pub fn on_sender(&mut self, setup: &Setup, p: u8, life: u8, event: SenderEvent) {
        self.drive_sender(setup, p, life, |room, out| room.handle_event(NOW, event, out));
    }

    pub fn sender_deadline(&mut self, setup: &Setup, p: u8, life: u8) {
        let Some(at) = self.sender(p, life).and_then(SenderRoom::poll_timeout) else { return };
        self.drive_sender(setup, p, life, |room, out| room.handle_timeout(at, out));
    }

    fn drive_sender(
        &mut self,
        setup: &Setup,
        p: u8,
        life: u8,
        feed: impl FnOnce(&mut SenderRoom, &mut Vec<SenderEffect>),
    ) {
        let slot = &mut self.p[usize::from(p)].lives[usize::from(life)];
        let named = slot.named;
        let Some(room) = slot.room.as_mut() else { return };
        let (poll, failure, free) = (room.poll(), room.failure().cloned(), room.releasable());
        let mut out = Vec::new();
        feed(room, &mut out);
        self.seen.terminal_left |= poll.is_terminal() && room.poll() != poll;
        self.seen.cause_changed |= failure.is_some() && room.failure() != failure.as_ref();
        self.seen.pages_taken_back |= free && !room.releasable();
        self.seen.resurrected |= !named && !room.poll().is_terminal();
        for effect in out {
            match effect {
                SenderEffect::Post(chunk, dest) => {
                    self.p[usize::from(p)].lives[usize::from(life)].posts.push((chunk, dest));
                }
                SenderEffect::Status(to, status, reason) => {
                    let busy = self.ops.iter().any(|o| (o.p, o.life) == (p, life) && !o.closed());
                    self.seen.told_too_early |=
                        status == KvPoll::Failed && setup.failed_status == FailedStatusPolicy::WhenSettled && busy;
                    self.send(setup, Msg::Status { p, d: to.port() as u8, status: wire(status), reason });
                }
                SenderEffect::StatusOf { .. } => panic!("no decode names a life here"),
                SenderEffect::Changed => {}
                SenderEffect::Drained => self.ack_if_drained(setup, p),
            }
        }
        let slot = &mut self.p[usize::from(p)].lives[usize::from(life)];
        if slot.room.as_ref().is_some_and(SenderRoom::finished) {
            slot.room = None;
            slot.posts.clear();
        }
    }

    /// `send()`.
    pub fn send_chunk(&mut self, setup: &Setup, p: u8, life: u8) {
        let slot = &mut self.p[usize::from(p)].lives[usize::from(life)];
        slot.sent += 1;
        let sent = u32::from(slot.sent);
        let spec = ChunkSpec {
            pages: [sent as i32].into(),
            index_slice: sent - 1..sent,
            is_last: slot.sent == setup.chunks,
            has_wait_event: false,
            aux_index: Some(0),
        };
        self.on_sender(setup, p, life, SenderEvent::Enqueue(spec));
    }

    /// The lane takes a post that waits; with `again` it stays in the queue, as after a busy lane.
    pub fn post(&mut self, setup: &Setup, p: u8, life: u8, at: usize, again: bool) {
        let slot = &mut self.p[usize::from(p)].lives[usize::from(life)];
        let (chunk, dest) = if again { slot.posts[at] } else { slot.posts.remove(at) };
        let named = slot.named;
        let Some(room) = slot.room.as_ref().filter(|r| r.wants_post(chunk, dest)) else { return };
        self.seen.resurrected |= !named || room.poll().is_terminal();
        let to = &room.destinations()[dest];
        let (d, d_life) = (to.endpoint.port() as u8, to.pages[0] as u8);
        let op = Op { p, life, chunk, d, d_life, dest, reading: true, may_land: true, landed: false, told: false };
        self.ops.push(op);
        self.ops.sort_unstable();
        let id = OpId(u64::from(chunk) * 16 + dest as u64);
        self.on_sender(setup, p, life, SenderEvent::Posted(chunk, dest, id));
    }

    pub fn metadata(&mut self, setup: &Setup, p: u8, destination: Destination) {
        if let Some(life) = self.named_sender(p) {
            return self.on_sender(setup, p, life, SenderEvent::Destination(destination));
        }
        let d = destination.endpoint.port() as u8;
        let node = &mut self.p[usize::from(p)];
        match node.tombstone.clone().or_else(|| node.early_failed.clone()) {
            Some(reason) => self.send_failed(setup, p, d, reason),
            None => {
                node.early.retain(|e| e.name != destination.name);
                node.early.push(destination);
            }
        }
    }

    fn send_failed(&mut self, setup: &Setup, p: u8, d: u8, reason: Arc<str>) {
        self.send(setup, Msg::Status { p, d, status: wire(KvPoll::Failed), reason: Some(reason) });
    }

    pub fn abort_arrived(&mut self, setup: &Setup, p: u8, d: u8, generation: Option<u64>, d_life: u8) {
        if let Some(life) = self.named_sender(p) {
            self.on_sender(setup, p, life, SenderEvent::AbortedByDecode);
        } else if !self.p[usize::from(p)].early.is_empty() {
            let node = &mut self.p[usize::from(p)];
            let reason: Arc<str> = node.early_failed.get_or_insert_with(|| ABORTED_BY_DECODE_REASON.into()).clone();
            for early in std::mem::take(&mut node.early) {
                self.send_failed(setup, p, early.endpoint.port() as u8, reason.clone());
            }
        }
        let Some(generation) = generation else { return };
        let targets = &mut self.p[usize::from(p)].pending_acks;
        targets.retain(|t| t.0 != d);
        targets.push((d, generation, d_life));
        self.ack_if_drained(setup, p);
    }

    /// ABORT_ACK when no life can still write (F3).
    fn ack_if_drained(&mut self, setup: &Setup, p: u8) {
        let node = &mut self.p[usize::from(p)];
        if node.lives.iter().filter_map(|l| l.room.as_ref()).any(|r| r.outstanding() > 0) {
            return;
        }
        for (d, generation, d_life) in std::mem::take(&mut node.pending_acks) {
            if !self.seen.acked.contains(&(p, d, d_life)) {
                self.seen.acked.push((p, d, d_life));
                self.seen.acked.sort_unstable();
            }
            self.send(setup, Msg::Ack { p, d, generation });
        }
    }

    pub fn clear_sender(&mut self, setup: &Setup, p: u8, life: u8) {
        self.p[usize::from(p)].lives[usize::from(life)].named = false;
        let failed = |s: &Self| s.sender(p, life).and_then(|r| r.failure()).map(|f| f.reason.clone());
        let before = failed(self);
        self.on_sender(setup, p, life, SenderEvent::Clear);
        self.p[usize::from(p)].tombstone = failed(self).or(before);
    }
}
