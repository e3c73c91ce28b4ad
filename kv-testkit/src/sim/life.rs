//! The engines' part: one room life, from its birth to the moment both sides have given everything back.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use kv_core::engine::{ChunkExtras, DecodeCommand, PrefillCommand, RoomShared};
use kv_core::event::SourceEvent;
use kv_core::ids::Room;
use kv_core::poll::KvPoll;
use kv_core::room::{ChunkSpec, PublishSpec};
use kv_core::time::Timestamp;

use super::oracle::{Owner, page, slot};
use super::{Ev, Sim};

/// A side of a room life on one rank.
pub(super) struct Side {
    /// The process it was created in.
    pub(super) process: u64,
    pub(super) shared: Arc<RoomShared>,
    pub(super) pages: Vec<i32>,
    pub(super) row: i32,
    pub(super) last: KvPoll,
    pub(super) reason: Option<Arc<str>>,
    pub(super) cleared: bool,
    /// The pages are back in the pool, or in quarantine.
    pub(super) given: bool,
    /// Sender: chunks sent. Receiver: metadata published.
    pub(super) progress: usize,
    /// Wait events, and the positions whose bytes are there when they fire.
    events: Vec<(SourceEvent, Range<u32>)>,
}

/// What became of a side.
pub(super) enum Place {
    /// Not created yet.
    Planned,
    Live(Side),
    /// Given back; or its process died, or it was never created.
    Over,
}

impl Place {
    pub(super) fn live(&self) -> Option<&Side> {
        match self {
            Self::Live(side) => Some(side),
            _ => None,
        }
    }

    pub(super) fn live_mut(&mut self) -> Option<&mut Side> {
        match self {
            Self::Live(side) => Some(side),
            _ => None,
        }
    }
}

/// One life of a room number.
pub(super) struct Life {
    pub(super) room: u64,
    pub(super) born: Timestamp,
    pub(super) prefill: usize,
    pub(super) decode: usize,
    number_free: bool,
    pub(super) prefix: u32,
    total: u32,
    /// Where chunks end, as positions; the same on every rank.
    cuts: Vec<u32>,
    pub(super) senders: BTreeMap<usize, Place>,
    pub(super) receivers: BTreeMap<usize, Place>,
    /// The process of each prefill rank that made a sender; and those that reported Success.
    pub(super) created_in: BTreeMap<usize, u64>,
    pub(super) succeeded: BTreeSet<u64>,
    /// Pages that a decode process got back without proof: (process, rank, pages, slot).
    pub(super) unproven: Vec<(u64, usize, Vec<i32>, i32)>,
}

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

impl Sim {
    /// A new life is born, unless there are too many; and the next birth is set.
    pub(super) fn birth(&mut self) {
        if self.healing || self.born >= self.episode.lives {
            return;
        }
        if self.lives.len() >= self.episode.concurrent {
            return self.after(MS, Ev::Birth);
        }
        let gap = self.episode.birth_gap.as_nanos() as u64;
        let next = self.rng.below(2 * gap);
        self.after(next, Ev::Birth);
        let (prefill, decode) = (self.rng.below(self.episode.prefills.len() as u64) as usize, {
            self.rng.below(self.episode.decodes.len() as u64) as usize
        });
        self.new_life(prefill, decode, true);
    }

    /// A life between these engines. `odd`: whatever an engine or a client may do to it is drawn, too.
    pub(super) fn new_life(&mut self, prefill: usize, decode: usize, odd: bool) -> u64 {
        self.born += 1;
        let id = self.first_life + self.born;
        let again = self.episode.reuse && odd && self.rng.chance(0.7);
        let reused = if again { self.numbers.entry(decode).or_default().pop_front() } else { None };
        let room = reused.unwrap_or_else(|| {
            self.next_room += 1 + self.rng.below(3);
            self.next_room
        });
        let total = if self.rng.chance(0.06) { 0 } else { 1 + self.rng.below(7) as u32 };
        let prefix = if total > 0 && self.rng.chance(0.15) { self.rng.below(u64::from(total) + 1) as u32 } else { 0 };
        let mut cuts: Vec<u32> =
            (0..self.rng.below(4)).map(|_| prefix + self.rng.below(u64::from(total - prefix) + 1) as u32).collect();
        cuts.sort_unstable();
        cuts.push(total);
        let (p, d) = (self.prefill_ranks(prefill), self.decode_ranks(decode));
        let life = Life {
            room,
            born: self.clock.now(),
            prefill,
            decode,
            number_free: false,
            prefix,
            total,
            cuts,
            senders: p.iter().map(|i| (*i, Place::Planned)).collect(),
            receivers: d.iter().map(|i| (*i, Place::Planned)).collect(),
            created_in: BTreeMap::new(),
            succeeded: BTreeSet::new(),
            unproven: Vec::new(),
        };
        self.trace.line(format_args!(
            "life {id} room {room}: prefill {prefill} -> decode {decode}, {total} pages, {prefix} there, cuts {:?}",
            life.cuts
        ));
        self.owners.life(id, room);
        self.lives.insert(id, life);
        let (mut p_at, mut d_at) = (self.rng.below(500 * US), self.rng.below(500 * US));
        if odd && self.rng.chance(0.1) {
            let late = self.rng.below(30 * MS);
            if self.rng.chance(0.5) { p_at += late } else { d_at += late }
        }
        if odd && self.rng.chance(0.01) {
            // Beyond every deadline.
            let late = self.rng.below(5_000 * MS);
            if self.rng.chance(0.5) { p_at += late } else { d_at += late }
        }
        let (no_p, no_d) = (odd && self.rng.chance(0.01), odd && self.rng.chance(0.01));
        for i in &p {
            let at = p_at + self.rng.below(200 * US);
            if no_p {
                self.sender_over(id, *i);
            } else {
                self.after(at, Ev::CreateSender(id, *i));
            }
        }
        for i in &d {
            let at = d_at + self.rng.below(200 * US);
            if no_d {
                self.receiver_over(id, *i);
            } else {
                self.after(at, Ev::CreateReceiver(id, *i));
            }
        }
        if odd {
            self.oddities(id, &p, &d);
        }
        id
    }

    /// Aborts, early and repeated clears, numbers used twice: at any moment, by anyone.
    fn oddities(&mut self, id: u64, p: &[usize], d: &[usize]) {
        let span = [2 * MS, 10 * MS, 60 * MS][self.rng.below(3) as usize];
        for i in p {
            if self.rng.chance(0.06) {
                let at = self.rng.below(span);
                self.after(at, Ev::AbortSender(id, *i));
            }
            if self.rng.chance(0.02) {
                let at = self.rng.below(span);
                self.after(at, Ev::ClearSender(id, *i));
            }
            if self.rng.chance(0.02) {
                let at = self.rng.below(span);
                self.after(at, Ev::ImpostorSender(id, *i));
            }
        }
        for i in d {
            if self.rng.chance(0.06) {
                let at = self.rng.below(span);
                self.after(at, Ev::AbortReceiver(id, *i));
            }
            if self.rng.chance(0.02) {
                let at = self.rng.below(span);
                self.after(at, Ev::ClearReceiver(id, *i));
            }
            if self.rng.chance(0.02) {
                let at = self.rng.below(span);
                self.after(at, Ev::ImpostorReceiver(id, *i));
            }
        }
    }

    fn shared(room: u64, life: u64) -> Arc<RoomShared> {
        RoomShared::new(Room::new(room).expect("a room number"), life, None)
    }

    /// The positions that a prefill rank sends: its CP rank's part.
    pub(super) fn part(&self, life: &Life, p: usize) -> Range<u32> {
        let cps = self.episode.prefills[life.prefill].shape.prefill_cp;
        let cp = self.p[p].node.place.1;
        let n = life.total - life.prefix;
        life.prefix + n * cp / cps..life.prefix + n * (cp + 1) / cps
    }

    pub(super) fn create_sender(&mut self, id: u64, p: usize) {
        let Some(life) = self.lives.get(&id) else { return };
        if !matches!(life.senders.get(&p), Some(Place::Planned)) {
            return;
        }
        let part = self.part(life, p);
        let need = part.len();
        if self.p[p].pages.available() < need || self.p[p].rows.available() == 0 {
            return match self.healing {
                true => self.sender_over(id, p),
                false => self.after(MS, Ev::CreateSender(id, p)),
            };
        }
        let rank = &mut self.p[p];
        let (pages, row) = (rank.pages.take(need, &mut self.rng), rank.rows.take(1, &mut self.rng)[0]);
        for (page_no, position) in pages.iter().zip(part) {
            for entry in 0..rank.node.entries {
                rank.write_page(*page_no, entry, &page(id, rank.process, entry, position));
            }
        }
        rank.fill_row(row, &slot(id));
        rank.created += 1;
        let shared = Self::shared(life.room, id);
        rank.node.push(PrefillCommand::Create(shared.clone()));
        self.trace.line(format_args!("{} creates the sender of life {id}, pages {pages:?}", rank.name));
        let side = Side {
            process: rank.process,
            shared,
            pages,
            row,
            last: KvPoll::Bootstrapping,
            reason: None,
            cleared: false,
            given: false,
            progress: 0,
            events: Vec::new(),
        };
        if let Some(life) = self.lives.get_mut(&id) {
            life.created_in.insert(p, side.process);
            life.senders.insert(p, Place::Live(side));
        }
        self.on_p[p].insert(id);
        let at = self.rng.below(2 * MS);
        self.after(at, Ev::Send(id, p));
    }

    pub(super) fn create_receiver(&mut self, id: u64, d: usize) {
        let Some(life) = self.lives.get(&id) else { return };
        if !matches!(life.receivers.get(&d), Some(Place::Planned)) {
            return;
        }
        let need = (life.total - life.prefix) as usize;
        if self.d[d].pages.available() < need || self.d[d].rows.available() == 0 {
            return match self.healing {
                true => self.receiver_over(id, d),
                false => self.after(MS, Ev::CreateReceiver(id, d)),
            };
        }
        let rank = &mut self.d[d];
        let (pages, row) = (rank.pages.take(need, &mut self.rng), rank.rows.take(1, &mut self.rng)[0]);
        self.owners.set(&rank.node.name, &pages, row as u32, Owner::Waiting(id));
        rank.created += 1;
        let shared = Self::shared(life.room, id);
        let bootstrap_addr = self.episode.prefills[life.prefill].shape.bootstrap_addr.clone();
        let create = DecodeCommand::Create { shared: shared.clone(), bootstrap_addr, prefill_dp_rank: None };
        rank.node.commands.push(create);
        self.trace.line(format_args!("{} creates the receiver of life {id}, pages {pages:?}", rank.node.name));
        let side = Side {
            process: rank.process,
            shared,
            pages,
            row,
            last: KvPoll::Bootstrapping,
            reason: None,
            cleared: false,
            given: false,
            progress: 0,
            events: Vec::new(),
        };
        if let Some(life) = self.lives.get_mut(&id) {
            life.receivers.insert(d, Place::Live(side));
        }
        self.on_d[d].insert(id);
    }

    /// Send the next chunk.
    pub(super) fn send(&mut self, id: u64, p: usize) {
        let Some(life) = self.lives.get(&id) else { return };
        let part = self.part(life, p);
        let (prefix, cuts) = (life.prefix, life.cuts.clone());
        let Some(side) = self.lives.get_mut(&id).and_then(|l| l.senders.get_mut(&p)?.live_mut()) else { return };
        if side.shared.poll().is_terminal() || side.progress >= cuts.len() {
            return;
        }
        // Which pages decode wants is known when it has said so.
        if prefix > 0 && side.shared.poll() == KvPoll::Bootstrapping {
            return self.after(300 * US, Ev::Send(id, p));
        }
        let clamp = |at: u32| at.clamp(part.start, part.end);
        let chunk = side.progress;
        let from = if chunk == 0 { part.start } else { clamp(cuts[chunk - 1]) };
        let to = clamp(cuts[chunk]);
        side.progress += 1;
        let is_last = side.progress == cuts.len();
        let pages = &side.pages[(from - part.start) as usize..(to - part.start) as usize];
        let event = self.rng.chance(0.1).then(SourceEvent::new);
        let spec = ChunkSpec {
            pages: pages.into(),
            index_slice: from - prefix..to - prefix,
            is_last,
            has_wait_event: event.is_some(),
            aux_index: Some(side.row as u32),
        };
        let shared = side.shared.clone();
        let nth = side.events.len();
        side.events.extend(event.clone().map(|e| (e, from..to)));
        if event.is_some() {
            // The kernel that computes these pages has not run yet.
            let pages = pages.to_vec();
            self.p[p].destroy(&pages);
        }
        self.trace.line(format_args!("{} sends {from}..{to} of life {id}, last {is_last}", self.p[p].name));
        let wait: Option<Arc<dyn kv_core::event::WaitEvent>> = event.clone().map(|e| Arc::new(e) as _);
        let extras = ChunkExtras { wait_event: wait, trace: None };
        self.p[p].node.push(PrefillCommand::Send(shared, spec, extras));
        if event.is_some() {
            let ok = !self.rng.chance(0.03) || self.healing;
            let at = self.rng.below(3 * MS);
            self.after(at, Ev::Signal(id, p, nth, ok));
        }
        if !is_last {
            let at = self.rng.below(2 * MS);
            self.after(at, Ev::Send(id, p));
        }
    }

    /// A wait event fires, and the bytes are there; or its kernel was cancelled.
    pub(super) fn signal(&mut self, id: u64, p: usize, nth: usize, ok: bool) {
        let Some(life) = self.lives.get(&id) else { return };
        let first = self.part(life, p).start;
        let Some(side) = life.senders.get(&p).and_then(Place::live) else { return };
        let Some((event, positions)) = side.events.get(nth).cloned() else { return };
        if !ok {
            return event.signal(Err("the kernel was cancelled".into()));
        }
        if !side.given {
            let rank = &self.p[p];
            for position in positions {
                let at = side.pages[(position - first) as usize];
                (0..rank.node.entries).for_each(|e| rank.write_page(at, e, &page(id, rank.process, e, position)));
            }
        }
        event.signal(Ok(()));
    }

    pub(super) fn publish(&mut self, id: u64, d: usize) {
        let Some(life) = self.lives.get_mut(&id) else { return };
        let prefix = life.prefix;
        let Some(side) = life.receivers.get_mut(&d).and_then(Place::live_mut) else { return };
        if side.progress > 0 || side.cleared {
            return;
        }
        side.progress = 1;
        let spec = PublishSpec {
            pages: side.pages.as_slice().into(),
            aux_index: side.row as u32,
            state_indices: Vec::new(),
            decode_prefix_len: u64::from(prefix),
            device_kv_indices: None,
        };
        let publish = DecodeCommand::Publish(side.shared.clone(), Box::new(spec));
        self.d[d].node.commands.push(publish);
        self.trace.line(format_args!("{} publishes life {id}", self.d[d].node.name));
    }

    pub(super) fn abort_sender(&mut self, id: u64, p: usize) {
        let Some(side) = self.lives.get(&id).and_then(|l| l.senders.get(&p)?.live()) else { return };
        if !side.cleared {
            self.trace.line(format_args!("{} aborts life {id}", self.p[p].name));
            self.p[p].node.push(PrefillCommand::Abort(side.shared.clone()));
        }
    }

    pub(super) fn abort_receiver(&mut self, id: u64, d: usize) {
        let Some(side) = self.lives.get(&id).and_then(|l| l.receivers.get(&d)?.live()) else { return };
        if !side.cleared {
            self.trace.line(format_args!("{} aborts life {id}", self.d[d].node.name));
            self.d[d].node.commands.push(DecodeCommand::Abort(side.shared.clone()));
        }
    }

    pub(super) fn clear_sender(&mut self, id: u64, p: usize) {
        let Some(side) = self.lives.get_mut(&id).and_then(|l| l.senders.get_mut(&p)?.live_mut()) else { return };
        side.cleared = true;
        self.trace.line(format_args!("{} clears life {id}", self.p[p].name));
        self.p[p].node.push(PrefillCommand::Clear(side.shared.clone()));
        self.touched_p.insert(p);
        self.maybe_free_number(id);
    }

    pub(super) fn clear_receiver(&mut self, id: u64, d: usize) {
        let Some(side) = self.lives.get_mut(&id).and_then(|l| l.receivers.get_mut(&d)?.live_mut()) else { return };
        side.cleared = true;
        self.trace.line(format_args!("{} clears life {id}", self.d[d].node.name));
        self.d[d].node.commands.push(DecodeCommand::Clear(side.shared.clone()));
        self.touched_d.insert(d);
        self.maybe_free_number(id);
    }

    /// A client uses a number that is live.
    pub(super) fn impostor(&mut self, id: u64, p: Option<usize>, d: Option<usize>) {
        let Some(life) = self.lives.get(&id) else { return };
        self.impostors_made += 1;
        let shared = Self::shared(life.room, (1 << 60) | self.impostors_made);
        if let Some(p) = p.filter(|p| life.senders[p].live().is_some_and(|s| !s.cleared)) {
            self.p[p].node.push(PrefillCommand::Create(shared.clone()));
            self.p[p].node.push(PrefillCommand::Abort(shared.clone()));
            self.p[p].node.push(PrefillCommand::Clear(shared.clone()));
            self.impostors.push((self.p[p].process, shared));
        } else if let Some(d) = d.filter(|d| life.receivers[d].live().is_some_and(|s| !s.cleared)) {
            let bootstrap_addr = "p0:8998".into();
            let create = DecodeCommand::Create { shared: shared.clone(), bootstrap_addr, prefill_dp_rank: None };
            let commands = &mut self.d[d].node.commands;
            commands.extend([create, DecodeCommand::Abort(shared.clone()), DecodeCommand::Clear(shared.clone())]);
            self.impostors.push((self.d[d].process, shared));
        }
    }

    pub(super) fn sender_over(&mut self, id: u64, p: usize) {
        if let Some(life) = self.lives.get_mut(&id) {
            life.senders.insert(p, Place::Over);
        }
        self.on_p[p].remove(&id);
        self.maybe_end(id);
    }

    pub(super) fn receiver_over(&mut self, id: u64, d: usize) {
        if let Some(life) = self.lives.get_mut(&id) {
            life.receivers.insert(d, Place::Over);
        }
        self.on_d[d].remove(&id);
        self.maybe_end(id);
    }

    /// Both sides have cleared the room: a client may use its number again, whatever is still held for this life.
    fn maybe_free_number(&mut self, id: u64) {
        let Some(life) = self.lives.get_mut(&id) else { return };
        let cleared = |place: &Place| match place {
            Place::Planned => false,
            Place::Live(side) => side.cleared,
            Place::Over => true,
        };
        if !life.number_free && life.senders.values().chain(life.receivers.values()).all(cleared) {
            life.number_free = true;
            self.numbers.entry(life.decode).or_default().push_back(life.room);
        }
    }

    fn maybe_end(&mut self, id: u64) {
        self.maybe_free_number(id);
        let Some(life) = self.lives.get(&id) else { return };
        let over = |all: &BTreeMap<usize, Place>| all.values().all(|s| matches!(s, Place::Over));
        if over(&life.senders) && over(&life.receivers) && life.unproven.is_empty() {
            self.lives.remove(&id);
            self.report.lives += 1;
        }
    }

    /// The process of prefill rank `p` died with its rooms.
    pub(super) fn senders_gone(&mut self, p: usize) {
        let lives: Vec<u64> = self.on_p[p].iter().copied().collect();
        lives.into_iter().for_each(|id| self.sender_over(id, p));
    }

    /// The process of decode rank `d` died with its rooms and its memory.
    pub(super) fn receivers_gone(&mut self, d: usize) {
        let lives: Vec<u64> = self.on_d[d].iter().copied().collect();
        let process = self.d[d].process;
        for life in self.lives.values_mut() {
            life.unproven.retain(|(of, ..)| *of != process);
        }
        lives.into_iter().for_each(|id| self.receiver_over(id, d));
    }

    /// Pages released without proof come back into use when nobody can write them any more.
    pub(super) fn end_quarantine(&mut self) {
        let lives: Vec<u64> = self.quarantined.iter().copied().collect();
        for id in lives {
            let Some(life) = self.lives.get_mut(&id) else {
                self.quarantined.remove(&id);
                continue;
            };
            let quiet = life.senders.values().all(|s| match s {
                Place::Planned => false,
                Place::Live(side) => side.shared.poll().is_terminal(),
                Place::Over => true,
            });
            if !quiet || self.writes.values().any(|w| w.life == id && !w.dst_quiet) {
                continue;
            }
            self.quarantined.remove(&id);
            for (_, d, pages, row) in std::mem::take(&mut life.unproven) {
                let rank = &mut self.d[d];
                self.owners.set(&rank.node.name, &pages, row as u32, Owner::Free);
                rank.pages.give(&pages);
                rank.rows.give(&[row]);
            }
            self.maybe_end(id);
        }
    }

    /// Everything an engine still owes its rooms when faults end: wait events fire, planned sides come.
    pub(super) fn finish_scripts(&mut self) {
        let ids: Vec<u64> = self.lives.keys().copied().collect();
        for id in ids {
            let Some(life) = self.lives.get(&id) else { continue };
            let p: Vec<usize> = life.senders.keys().copied().collect();
            let count = |s: &Side| s.events.len();
            let events: Vec<(usize, usize)> =
                life.senders.iter().filter_map(|(p, s)| Some((*p, count(s.live()?)))).collect();
            for (p, events) in events {
                (0..events).for_each(|nth| self.signal(id, p, nth, true));
            }
            for i in p {
                self.after(MS, Ev::Send(id, i));
            }
        }
    }
}
