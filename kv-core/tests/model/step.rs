//! What can happen in a state, and what follows.

use kv_core::ids::PrefillRank;
use kv_core::poll::KvPoll;
use kv_core::room::{ReceiverEvent, SenderEvent};
use kv_core::transport::{Outcome, Settlement, TransportError, TransportErrorKind};
use stateright::{Model, Property};

use crate::invariants;
use crate::setup::Setup;
use crate::state::{Decode, Msg, Prefill, Seen, State};

/// One thing that happens. Numbers: ranks, then lives, then places in lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    CreateSender(u8),
    CreateReceiver(u8),
    Publish(u8, u8),
    Send(u8, u8),
    Post(u8, u8, usize),
    Deliver(usize),
    /// The write is done.
    Done(usize),
    /// What was not proven with the outcome is proven now: source, destination.
    Settle(usize, bool, bool),
    ClearSender(u8, u8),
    ClearReceiver(u8, u8),
    SenderDeadline(u8, u8, Free),
    ReceiverDeadline(u8, u8, Free),

    // Mishaps, as many as the budget has.
    Retry(u8, u8, usize),
    Refuse(u8, u8, usize),
    PublishPart(u8, u8),
    /// The write ends in an error; proven quiet: source, destination.
    Fail(usize, bool, bool),
    AbortSender(u8, u8),
    AbortReceiver(u8, u8),
    DropSender(u8, u8),
    DropReceiver(u8, u8),
    Lose(usize),
    Duplicate(usize),
    StrayStatus(u8, u8),
    StrayAck(u8, u8, u64),
    PeerLost(u8, u8, u8),
}

/// A deadline passes because nothing else can happen: it costs nothing.
pub type Free = bool;

/// A rank nobody asked.
const STRANGER: u8 = 9;

impl State {
    pub fn send(&mut self, setup: &Setup, msg: Msg) {
        self.net.push(msg);
        if !setup.in_order {
            self.net.sort_unstable();
        }
    }

    fn deliver(&mut self, setup: &Setup, msg: Msg) {
        match msg {
            Msg::Metadata { d, p, d_life } => self.metadata(setup, p, setup.destination(d, d_life)),
            Msg::Abort { d, p, generation, d_life } => self.abort_arrived(setup, p, d, generation, d_life),
            Msg::Status { p, d, status, reason } => {
                let status = KvPoll::from_wire(status.into()).unwrap();
                self.status_arrived(setup, d, p, status, reason.map(|r| r.to_string()));
            }
            Msg::Ack { p, d, generation } => self.ack_arrived(setup, d, p, generation),
        }
    }

    /// Messages that may arrive next: all, or the first of each channel. Of equal ones, one.
    fn deliverable(&self, setup: &Setup) -> impl Iterator<Item = usize> {
        (0..self.net.len()).filter(move |&i| match setup.in_order {
            true => !self.net[..i].iter().any(|m| m.channel() == self.net[i].channel()),
            false => i == 0 || self.net[i - 1] != self.net[i],
        })
    }

    /// Every handle of this life was cleared: a router may use the number again.
    fn all_cleared(&self, life: u8) -> bool {
        let (p, d) = (&self.p, &self.d);
        let i = usize::from(life);
        p.iter().all(|n| n.lives.get(i).is_some_and(|l| !l.named))
            && d.iter().all(|n| n.lives.get(i).is_some_and(|l| !l.named))
    }

    /// What happens on its own, sooner or later: everything but mishaps and deadlines.
    pub fn progress(&self, setup: &Setup, out: &mut Vec<Action>) {
        for (p, node) in (0..).zip(&self.p) {
            let next = node.lives.len() as u8;
            let free = node.lives.last().is_none_or(|l| l.room.is_none());
            if next < setup.lives && free && (next == 0 || self.all_cleared(next - 1)) {
                out.push(Action::CreateSender(p));
            }
            for (life, l) in (0..).zip(&node.lives) {
                let Some(room) = &l.room else { continue };
                out.extend((0..l.posts.len()).map(|i| Action::Post(p, life, i)));
                if l.named && !room.poll().is_terminal() && l.sent < setup.chunks {
                    out.push(Action::Send(p, life));
                }
                if l.named && room.poll().is_terminal() {
                    out.push(Action::ClearSender(p, life));
                }
            }
        }
        for (d, node) in (0..).zip(&self.d) {
            let next = node.lives.len() as u8;
            let free = node.lives.last().is_none_or(|l| l.room.is_none());
            if next < setup.lives && free && (next == 0 || self.all_cleared(next - 1)) {
                out.push(Action::CreateReceiver(d));
            }
            for (life, l) in (0..).zip(&node.lives) {
                let Some(room) = &l.room else { continue };
                if l.named && room.poll() == KvPoll::WaitingForInput && room.published().is_none() {
                    out.push(Action::Publish(d, life));
                }
                if l.named && room.poll().is_terminal() {
                    out.push(Action::ClearReceiver(d, life));
                }
            }
        }
        out.extend(self.deliverable(setup).map(Action::Deliver));
        for (i, op) in self.ops.iter().enumerate() {
            if !op.told {
                out.push(Action::Done(i));
            } else if !op.closed() {
                out.push(Action::Settle(i, true, true));
                if op.reading && op.may_land {
                    out.extend([Action::Settle(i, true, false), Action::Settle(i, false, true)]);
                }
            }
        }
    }

    pub fn deadlines(&self, free: Free, out: &mut Vec<Action>) {
        let senders = self.senders().filter(|(.., r)| r.poll_timeout().is_some());
        out.extend(senders.map(|(p, life, _)| Action::SenderDeadline(p, life, free)));
        let receivers = self.receivers().filter(|(.., r)| r.poll_timeout().is_some());
        out.extend(receivers.map(|(d, life, _)| Action::ReceiverDeadline(d, life, free)));
    }

    fn mishaps(&self, setup: &Setup, out: &mut Vec<Action>) {
        let b = &self.budget;
        for (p, node) in (0..).zip(&self.p) {
            for (life, l) in (0..).zip(&node.lives) {
                let Some(room) = &l.room else { continue };
                if b.retries > 0 {
                    out.extend((0..l.posts.len()).map(|i| Action::Retry(p, life, i)));
                }
                if b.refusals > 0 {
                    out.extend((0..l.posts.len()).map(|i| Action::Refuse(p, life, i)));
                }
                if b.prefill_aborts > 0 && l.named && !room.poll().is_terminal() {
                    out.extend([Action::AbortSender(p, life), Action::DropSender(p, life)]);
                }
                // Once more, after it failed: the first cause stays.
                if b.prefill_aborts > 0 && l.named && room.poll().is_terminal() {
                    out.push(Action::AbortSender(p, life));
                }
                if b.peers_lost > 0 && !room.poll().is_terminal() {
                    out.extend(room.destinations().iter().map(|d| Action::PeerLost(p, life, d.endpoint.port() as u8)));
                }
            }
        }
        for (d, node) in (0..).zip(&self.d) {
            for (life, l) in (0..).zip(&node.lives) {
                let Some(room) = &l.room else { continue };
                let waits = room.poll() == KvPoll::WaitingForInput;
                if b.partial > 0 && setup.prefills > 1 && l.named && waits && room.published().is_none() {
                    out.push(Action::PublishPart(d, life));
                }
                if b.decode_aborts > 0 && l.named {
                    out.push(Action::AbortReceiver(d, life));
                    if !room.poll().is_terminal() {
                        out.push(Action::DropReceiver(d, life));
                    }
                }
                if b.strays > 0 && l.named && waits {
                    out.push(Action::StrayStatus(d, life));
                }
                if let (Some(generation), true) = (room.armed_generation(), b.strays > 0) {
                    out.push(Action::StrayAck(d, 0, generation + 7));
                    out.push(Action::StrayAck(d, STRANGER, generation));
                }
            }
        }
        if b.losses > 0 {
            out.extend(self.deliverable(setup).map(Action::Lose));
        }
        if b.duplicates > 0 {
            out.extend(self.deliverable(setup).map(Action::Duplicate));
        }
        if b.faults > 0 {
            for (i, op) in self.ops.iter().enumerate().filter(|(_, op)| !op.told) {
                let _ = op;
                out.extend(
                    [(true, true), (true, false), (false, true), (false, false)].map(|(s, d)| Action::Fail(i, s, d)),
                );
            }
        }
    }

    /// Nothing can happen any more, not even by time.
    pub fn at_rest(&self, setup: &Setup) -> bool {
        let mut actions = Vec::new();
        self.progress(setup, &mut actions);
        self.deadlines(true, &mut actions);
        actions.is_empty()
    }

    fn apply(&mut self, setup: &Setup, action: Action) {
        let b = &mut self.budget;
        match action {
            Action::CreateSender(p) => self.create_sender(setup, p),
            Action::CreateReceiver(d) => self.create_receiver(setup, d),
            Action::Publish(d, life) => self.publish(setup, d, life, setup.prefills),
            Action::Send(p, life) => self.send_chunk(setup, p, life),
            Action::Post(p, life, i) => self.post(setup, p, life, i, false),
            Action::Deliver(i) => {
                let msg = self.net.remove(i);
                self.deliver(setup, msg);
            }
            Action::Done(i) => self.end(setup, i, Outcome::Done),
            Action::Settle(i, s, d) => self.settle(setup, i, s, d),
            Action::ClearSender(p, life) => self.clear_sender(setup, p, life),
            Action::ClearReceiver(d, life) => self.clear_receiver(setup, d, life),
            Action::SenderDeadline(p, life, free) => {
                b.deadlines -= u8::from(!free);
                self.sender_deadline(setup, p, life);
            }
            Action::ReceiverDeadline(d, life, free) => {
                b.deadlines -= u8::from(!free);
                self.receiver_deadline(setup, d, life);
            }
            Action::Retry(p, life, i) => {
                b.retries -= 1;
                self.post(setup, p, life, i, true);
            }
            Action::Refuse(p, life, i) => {
                b.refusals -= 1;
                let (chunk, dest) = self.p[usize::from(p)].lives[usize::from(life)].posts.remove(i);
                self.on_sender(setup, p, life, SenderEvent::Rejected(chunk, dest, "refused".into()));
            }
            Action::PublishPart(d, life) => {
                b.partial -= 1;
                self.publish(setup, d, life, 1);
            }
            Action::Fail(i, src_quiet, dst_quiet) => {
                b.faults -= 1;
                let error = TransportError::new(TransportErrorKind::Backend, "ERR");
                self.end(setup, i, Outcome::Failed { src_quiet, dst_quiet, error });
            }
            Action::AbortSender(p, life) => {
                b.prefill_aborts -= 1;
                self.on_sender(setup, p, life, SenderEvent::Abort);
            }
            Action::DropSender(p, life) => {
                b.prefill_aborts -= 1;
                self.clear_sender(setup, p, life);
            }
            Action::AbortReceiver(d, life) => {
                b.decode_aborts -= 1;
                self.on_receiver(setup, d, life, ReceiverEvent::Abort);
            }
            Action::DropReceiver(d, life) => {
                b.decode_aborts -= 1;
                self.clear_receiver(setup, d, life);
            }
            Action::Lose(i) => {
                b.losses -= 1;
                self.net.remove(i);
            }
            Action::Duplicate(i) => {
                b.duplicates -= 1;
                let msg = self.net[i].clone();
                self.deliver(setup, msg);
            }
            Action::StrayStatus(d, _) => {
                b.strays -= 1;
                self.status_arrived(setup, d, STRANGER, KvPoll::Success, None);
            }
            Action::StrayAck(d, rank, generation) => {
                b.strays -= 1;
                // Past the lookup by generation: the room has to see it by itself.
                let last = self.d[usize::from(d)].lives.len() as u8 - 1;
                let event = ReceiverEvent::AbortAck(PrefillRank(rank.into()), generation);
                self.on_receiver(setup, d, last, event);
            }
            Action::PeerLost(p, life, d) => {
                b.peers_lost -= 1;
                let event = SenderEvent::DestinationLost(Setup::name_of(d), "reset".into());
                self.on_sender(setup, p, life, event);
            }
        }
    }

    /// The one outcome of a write: what it claims is true.
    fn end(&mut self, setup: &Setup, i: usize, outcome: Outcome) {
        let (src, dst) = outcome.quiet();
        let op = &mut self.ops[i];
        op.told = true;
        op.landed |= outcome == Outcome::Done;
        (op.reading, op.may_land) = (!src, !dst);
        let op = *op;
        self.ops.sort_unstable();
        self.on_sender(setup, op.p, op.life, SenderEvent::Outcome(op.chunk, op.dest, outcome));
    }

    /// Later proof; a write that was not quiet may have landed until then.
    fn settle(&mut self, setup: &Setup, i: usize, src_quiet: bool, dst_quiet: bool) {
        let op = &mut self.ops[i];
        op.reading &= !src_quiet;
        op.may_land &= !dst_quiet;
        let op = *op;
        self.ops.sort_unstable();
        let event = SenderEvent::Settlement(op.chunk, op.dest, Settlement::Settled { src_quiet, dst_quiet });
        self.on_sender(setup, op.p, op.life, event);
    }
}

impl Model for Setup {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        self.arm();
        let mut s = State {
            p: vec![Prefill::default(); self.prefills.into()],
            d: vec![Decode::default(); self.decodes.into()],
            net: Vec::new(),
            ops: Vec::new(),
            budget: self.budget,
            seen: Seen::default(),
        };
        (0..self.prefills).for_each(|p| s.create_sender(self, p));
        (0..self.decodes).for_each(|d| s.create_receiver(self, d));
        vec![s]
    }

    fn actions(&self, s: &State, out: &mut Vec<Action>) {
        self.arm();
        s.progress(self, out);
        let idle = out.is_empty();
        if idle || s.budget.deadlines > 0 {
            s.deadlines(idle, out);
        }
        s.mishaps(self, out);
    }

    fn next_state(&self, last: &State, action: Action) -> Option<State> {
        self.arm();
        let mut s = last.clone();
        s.apply(self, action);
        (s != *last).then_some(s)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        invariants::all()
    }
}
