//! Decode's shard around the receiver rooms, for one room number: what `engine::decode` does.

use kv_core::ids::PrefillRank;
use kv_core::poll::KvPoll;
use kv_core::room::{PublishSpec, ReceiverEffect, ReceiverEvent, ReceiverRoom, ReleasePolicy};
use kv_core::wire::KvStatus;

use crate::prefill::NOW;
use crate::setup::Setup;
use crate::state::{Decode, Msg, ReceiverLife, State};

impl State {
    pub fn create_receiver(&mut self, setup: &Setup, d: u8) {
        let node = &mut self.d[usize::from(d)];
        let room = ReceiverRoom::new(setup.room(), setup.receiver_policy());
        node.lives.push(ReceiverLife { room: Some(room), named: true, without_proof: false, freed: 0 });
        let life = node.lives.len() as u8 - 1;
        self.on_receiver(setup, d, life, ReceiverEvent::Peers(Ok(setup.peers())));
    }

    /// Feed a room one event, watch what must never be seen, and carry out its effects.
    pub fn on_receiver(&mut self, setup: &Setup, d: u8, life: u8, event: ReceiverEvent) {
        self.drive_receiver(setup, d, life, |room, generation, out| room.handle_event(NOW, event, generation, out));
    }

    pub fn receiver_deadline(&mut self, setup: &Setup, d: u8, life: u8) {
        let Some(at) = self.receiver(d, life).and_then(ReceiverRoom::poll_timeout) else { return };
        self.drive_receiver(setup, d, life, |room, generation, out| room.handle_timeout(at, generation, out));
    }

    fn drive_receiver(
        &mut self,
        setup: &Setup,
        d: u8,
        life: u8,
        feed: impl FnOnce(&mut ReceiverRoom, &mut u64, &mut Vec<ReceiverEffect>),
    ) {
        let Decode { lives, generation } = &mut self.d[usize::from(d)];
        let slot = &mut lives[usize::from(life)];
        let Some(room) = slot.room.as_mut() else { return };
        let (poll, failure, free) = (room.poll(), room.failure().cloned(), room.releasable());
        let mut out = Vec::new();
        feed(room, generation, &mut out);
        self.seen.terminal_left |= poll.is_terminal() && room.poll() != poll;
        self.seen.cause_changed |= failure.is_some() && room.failure() != failure.as_ref();
        self.seen.pages_taken_back |= free && !room.releasable();
        self.seen.resurrected |= !slot.named && !room.poll().is_terminal();
        if room.releasable() && !free {
            slot.freed += 1;
        }
        if room.finished() {
            slot.room = None;
        }
        for effect in out {
            match effect {
                ReceiverEffect::Publish(_)
                | ReceiverEffect::Changed
                | ReceiverEffect::Forget
                | ReceiverEffect::Stale
                | ReceiverEffect::Violation(_) => {}
                ReceiverEffect::Abort { contacted, generation } => {
                    for p in 0..contacted as u8 {
                        self.send(setup, Msg::Abort { d, p, generation, d_life: life });
                    }
                }
                ReceiverEffect::Released { proven } => {
                    let slot = &mut self.d[usize::from(d)].lives[usize::from(life)];
                    // Under the policy of proof there is no other release: what claims to be one is not excused.
                    slot.without_proof |= !proven && setup.release != ReleasePolicy::Proof;
                }
            }
        }
    }

    /// `send_metadata()`, to the first `contacted` prefill ranks.
    pub fn publish(&mut self, setup: &Setup, d: u8, life: u8, contacted: u8) {
        let spec = PublishSpec {
            pages: [i32::from(life)].into(),
            aux_index: life.into(),
            state_indices: Vec::new(),
            decode_prefix_len: 0,
            device_kv_indices: None,
        };
        self.on_receiver(setup, d, life, ReceiverEvent::Publish(Box::new(spec)));
        for p in 0..contacted {
            self.send(setup, Msg::Metadata { d, p, d_life: life });
        }
        let error = (contacted < setup.prefills).then(|| "send_metadata: the second one takes no messages".to_owned());
        self.on_receiver(setup, d, life, ReceiverEvent::Published { contacted: contacted.into(), error });
    }

    pub fn status_arrived(&mut self, setup: &Setup, d: u8, rank: u8, status: KvPoll, reason: Option<String>) {
        // A late status finds nothing (B4).
        let Some(life) = self.named_receiver(d) else { return };
        let status = KvStatus { room: setup.room().get(), status, prefill_rank: PrefillRank(rank.into()), reason };
        self.on_receiver(setup, d, life, ReceiverEvent::Status(status));
    }

    /// ACKs find the room by generation.
    pub fn ack_arrived(&mut self, setup: &Setup, d: u8, rank: u8, generation: u64) {
        let lives = (0..).zip(&self.d[usize::from(d)].lives);
        let armed = |r: &ReceiverRoom| r.armed_generation() == Some(generation);
        let found = lives.filter(|(_, l)| l.room.as_ref().is_some_and(armed)).map(|(i, _)| i).next();
        if let Some(life) = found {
            self.on_receiver(setup, d, life, ReceiverEvent::AbortAck(PrefillRank(rank.into()), generation));
        }
    }

    pub fn clear_receiver(&mut self, setup: &Setup, d: u8, life: u8) {
        self.d[usize::from(d)].lives[usize::from(life)].named = false;
        self.on_receiver(setup, d, life, ReceiverEvent::Clear);
    }
}
