//! Faults end: what must be true then.

use std::collections::BTreeSet;
use std::time::Duration;

use kv_core::engine::{DecodeHeld, PrefillHeld};
use kv_core::ids::OpId;
use kv_core::poll::KvPoll;

use super::config::Rates;
use super::life::Place;
use super::writes::Step;
use super::{Ev, Sim, Undo, Unresolved};

/// Longer than all deadlines together, on the slowest clock.
const ALL_DEADLINES: Duration = Duration::from_secs(150);
/// The longest pause before a lost peer is tried again is a minute; of a slow clock.
const RECONNECT: Duration = Duration::from_secs(80);
/// A room in a healthy fleet.
const HEALTHY: Duration = Duration::from_secs(8);

impl Sim {
    pub(super) fn drain(&mut self) {
        self.heal();
        self.run_for(ALL_DEADLINES);
        self.refresh_writes();
        self.nothing_hangs();
        self.name_unresolved();
        self.settle_all();
        self.run_for(ALL_DEADLINES);
        self.nothing_is_held();
        if self.wrong.is_empty() {
            self.run_for(RECONNECT);
            self.rooms_succeed();
            self.run_for(ALL_DEADLINES);
            self.nothing_is_held();
            self.nobody_was_harmed();
        }
    }

    fn heal(&mut self) {
        self.healing = true;
        self.touch_all = true;
        self.trace.line(format_args!("faults end"));
        self.rates.set(Rates::default());
        let late: Vec<Undo> = std::mem::take(&mut self.pending)
            .into_iter()
            .filter_map(|(id, event)| match event {
                Ev::Undo(undo) => Some(undo),
                Ev::Birth | Ev::Fault => None,
                event => {
                    self.pending.insert(id, event);
                    None
                }
            })
            .collect();
        late.into_iter().for_each(|undo| self.undo(undo));
        self.p.iter().for_each(|p| p.node.transport.heal_connects());
        self.finish_scripts();
        self.finish_writes();
    }

    /// With faults off and all deadlines over, every handle has come to an end.
    fn nothing_hangs(&mut self) {
        let mut found = Vec::new();
        for (id, life) in &self.lives {
            let senders = life.senders.iter().filter_map(|(p, s)| Some((&self.p[*p].name, s.live()?)));
            let receivers = life.receivers.iter().filter_map(|(d, s)| Some((&self.d[*d].node.name, s.live()?)));
            for (name, side) in senders.chain(receivers) {
                if !side.shared.poll().is_terminal() {
                    let poll = side.shared.poll();
                    found.push(format!("{name}: life {id} of room {} hangs in {poll:?}", life.room));
                }
            }
        }
        found.into_iter().for_each(|text| self.wrong(text));
    }

    /// Everything that is still held is named, and has a reason.
    fn name_unresolved(&mut self) {
        let (mut named, mut found) = (Vec::new(), Vec::new());
        for ((process, op), w) in &self.writes {
            let rank = &self.p[w.p];
            assert_eq!(rank.process, *process);
            let room = self.lives.get(&w.life).map_or(0, |l| l.room);
            let why = "the transport proves nothing about the write";
            if !w.never {
                found.push(format!("{}: {op:?} to {} should have settled", rank.name, w.to));
            }
            let (holder, peer) = (rank.name.clone(), w.to.clone());
            named.push(Unresolved { room, life: w.life, holder, peer, op: Some(*op), why });
        }
        for rank in &self.p {
            let of = self.writes.range((rank.process, OpId(0))..=(rank.process, OpId(u64::MAX)));
            let (ops, lives) = (of.clone().count(), of.map(|(_, w)| w.life).collect::<BTreeSet<_>>().len());
            let held = rank.node.shard.held();
            let want = PrefillHeld {
                rooms: lives,
                ops,
                peers: held.peers,
                pending_acks: held.pending_acks.min(lives),
                undrained: held.undrained.min(lives),
                ..PrefillHeld::default()
            };
            if held != want {
                found.push(format!("{} holds {held:?}, of which only {want:?} has a name", rank.name));
            }
        }
        for (id, life) in &self.lives {
            for (d, place) in &life.receivers {
                let Place::Live(side) = place else { continue };
                let name = &self.d[*d].node.name;
                // A prefill rank acks when nothing of the room can be written any more, to whichever decode rank.
                let writer = self.writes.values().find(|w| w.life == *id);
                let proof = self.episode.by_proof(life.prefill);
                let Some(writer) = writer.filter(|_| proof && side.shared.poll() == KvPoll::Failed) else {
                    found.push(format!("{name}: life {id} of room {} is held for nothing", life.room));
                    continue;
                };
                let peer = self.p[writer.p].name.clone();
                let why = "waits for the ACK of a rank with an unresolved write";
                let (room, holder) = (life.room, name.clone());
                named.push(Unresolved { room, life: *id, holder, peer, op: None, why });
            }
        }
        for text in &named {
            self.trace.line(format_args!("unresolved: {text}"));
        }
        self.report.unresolved += named.len() as u64;
        self.report.named = named;
        found.into_iter().for_each(|text| self.wrong(text));
    }

    /// The peers' processes are proven dead, or the writes settle.
    fn settle_all(&mut self) {
        let keys: Vec<(u64, OpId)> = self.writes.keys().copied().collect();
        for (process, op) in keys {
            let step = if self.rng.chance(0.5) { Step::Settle } else { Step::PeerDead };
            self.after(1000, Ev::Write(process, op, step));
        }
    }

    /// Everything is back where it started.
    fn nothing_is_held(&mut self) {
        let mut found = Vec::new();
        for rank in &self.p {
            let held = rank.node.shard.held();
            if held != (PrefillHeld { peers: held.peers, ..PrefillHeld::default() }) {
                found.push(format!("{} holds {held:?}", rank.name));
            }
            let (live, retained) = (rank.node.stats.rooms_live.get(), rank.node.stats.ops_retained.get());
            if (live, retained) != (0, 0) {
                found.push(format!("{}: gauges: {live} rooms live, {retained} writes retained", rank.name));
            }
            let deadlines = rank.node.shard.pending_deadlines();
            if deadlines != 0 {
                found.push(format!("{} remembers {deadlines} deadlines", rank.name));
            }
            if !rank.pages.all_back() || !rank.rows.all_back() {
                found.push(format!("{}: pages or slots are not back", rank.name));
            }
            let not_quiet = rank.node.transport.not_quiet().len();
            if not_quiet > 0 {
                found.push(format!("{}: {not_quiet} writes are not quiet", rank.name));
            }
            let freed = rank.node.freed.lock().map(|f| f.clone()).unwrap_or_default();
            let different: BTreeSet<_> = freed.iter().collect();
            if different.len() != freed.len() || freed.len() as u64 != rank.created {
                found.push(format!("{}: {} rooms made, {} ended", rank.name, rank.created, freed.len()));
            }
        }
        for rank in &self.d {
            let held = rank.node.shard.held();
            if held != (DecodeHeld { registered: held.registered, ..DecodeHeld::default() }) {
                found.push(format!("{} holds {held:?}", rank.node.name));
            }
            let live = rank.node.stats.rooms_live.get();
            let deadlines = rank.node.shard.pending_deadlines();
            if (live, deadlines) != (0, 0) {
                found.push(format!("{}: {live} rooms live, {deadlines} deadlines", rank.node.name));
            }
            if !rank.pages.all_back() || !rank.rows.all_back() {
                found.push(format!("{}: pages or slots are not back", rank.node.name));
            }
            let freed = rank.node.freed.lock().map(|f| f.clone()).unwrap_or_default();
            let different: BTreeSet<_> = freed.iter().collect();
            if different.len() != freed.len() || freed.len() as u64 != rank.created {
                found.push(format!("{}: {} rooms made, {} ended", rank.node.name, rank.created, freed.len()));
            }
        }
        let in_flight = self.net.in_flight();
        if !in_flight.is_empty() {
            found.push(format!("{} messages are under way for ever: {}", in_flight.len(), in_flight[0]));
        }
        if !self.lives.is_empty() {
            found.push(format!("lives that did not end: {:?}", self.lives.keys()));
        }
        let bound = self.net.bound().len();
        if bound != self.p.len() + self.d.len() {
            found.push(format!("{bound} sockets are bound"));
        }
        let ranks = self.p.len() * self.d.len();
        let links = self.net.links().len();
        if links > 2 * ranks {
            found.push(format!("{links} connections between {ranks} pairs"));
        }
        found.into_iter().for_each(|text| self.wrong(text));
    }

    /// Rooms between all pairs of engines go through: nothing has been banned or forgotten for ever.
    fn rooms_succeed(&mut self) {
        let (sent, received) = (self.report.sender_success, self.report.receiver_success);
        let (mut want_sent, mut want_received) = (0, 0);
        self.trace.line(format_args!("every pair of engines tries a room"));
        for prefill in 0..self.episode.prefills.len() {
            for decode in 0..self.episode.decodes.len() {
                self.new_life(prefill, decode, false);
                want_sent += self.prefill_ranks(prefill).len() as u64;
                want_received += self.decode_ranks(decode).len() as u64;
            }
        }
        self.run_for(HEALTHY);
        let sent = self.report.sender_success - sent;
        let received = self.report.receiver_success - received;
        if (sent, received) != (want_sent, want_received) && self.wrong.is_empty() {
            self.wrong(format!(
                "rooms of a healthy fleet: {sent} of {want_sent} senders and {received} of {want_received} receivers succeeded"
            ));
        }
    }

    /// Second users of live numbers were refused.
    fn nobody_was_harmed(&mut self) {
        let alive: BTreeSet<u64> = self.p.iter().map(|p| p.process).chain(self.d.iter().map(|d| d.process)).collect();
        let mut found = Vec::new();
        for (_, shared) in self.impostors.iter().filter(|(process, _)| alive.contains(process)) {
            let reason = shared.failure().map(|f| f.reason.to_string()).unwrap_or_default();
            if shared.poll() != KvPoll::Failed || !reason.contains("in use") || !shared.releasable() {
                found.push(format!("the second user of room {}: {:?} {reason}", shared.room(), shared.poll()));
            }
        }
        found.into_iter().for_each(|text| self.wrong(text));
    }
}
