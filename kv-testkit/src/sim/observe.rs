//! What handles show, and what an engine does about it: checks, and pages given back.

use kv_core::poll::KvPoll;

use super::life::{Place, Side};
use super::oracle::{Owner, page, slot};
use super::{Ev, Sim};
use crate::world::AUX_LEN;

const MS: u64 = 1_000_000;

impl Sim {
    /// What the handles on prefill rank `p` show by now.
    pub(super) fn observe_senders(&mut self, p: usize) {
        let lives: Vec<u64> = self.on_p[p].iter().copied().collect();
        for id in lives {
            let Some(life) = self.lives.get_mut(&id) else { continue };
            let prefix = u64::from(life.prefix);
            let Some(side) = life.senders.get_mut(&p).and_then(Place::live_mut) else { continue };
            let (poll, was) = (side.shared.poll(), side.last);
            if let Some(wrong) = side.watch() {
                self.wrong(format!("{}: life {id}: {wrong}", self.p[p].name));
            }
            let Some(side) = self.lives.get_mut(&id).and_then(|l| l.senders.get_mut(&p)?.live_mut()) else { continue };
            if poll != was {
                self.trace.line(format_args!(
                    "{}: life {id} is {poll:?} {}",
                    self.p[p].name,
                    side.shared.failure().map_or("", |f| &f.reason)
                ));
                if matches!(poll, KvPoll::WaitingForInput | KvPoll::Transferring)
                    && side.shared.decode_prefix_len() != prefix
                    && !self.episode.reuse
                {
                    let got = side.shared.decode_prefix_len();
                    self.wrong(format!("{}: life {id}: decode_prefix_len {got}, not {prefix}", self.p[p].name));
                }
                if poll == KvPoll::Success {
                    let process = self.p[p].process;
                    if self.open_writes(process, id).next().is_some() {
                        self.refresh_writes();
                    }
                    let open = self.open_writes(process, id).next().map(|(op, _)| op);
                    if let Some(op) = open {
                        self.wrong(format!("{}: life {id}: Success with write {op:?} open", self.p[p].name));
                    }
                    if let Some(life) = self.lives.get_mut(&id) {
                        life.succeeded.insert(process);
                    }
                    self.report.sender_success += 1;
                }
                if poll.is_terminal() {
                    let late = if self.rng.chance(0.05) { 200 * MS } else { 2 * MS };
                    let at = self.rng.below(late);
                    self.after(at, Ev::ClearSender(id, p));
                }
            }
            self.give_back_source(id, p);
        }
    }

    fn give_back_source(&mut self, id: u64, p: usize) {
        let process = self.p[p].process;
        let Some(side) = self.lives.get(&id).and_then(|l| l.senders[&p].live()) else { return };
        if side.shared.releasable() && !side.given {
            let reading = |sim: &Self| sim.open_writes(process, id).find(|(_, w)| !w.src_quiet).map(|(op, _)| op);
            if reading(self).is_some() {
                self.refresh_writes();
            }
            let reading = reading(self);
            if let Some(op) = reading {
                self.wrong(format!("{}: life {id}: source given back while {op:?} may read it", self.p[p].name));
            }
            let rank = &mut self.p[p];
            let Some(side) = self.lives.get_mut(&id).and_then(|l| l.senders.get_mut(&p)?.live_mut()) else { return };
            side.given = true;
            rank.destroy(&side.pages);
            rank.fill_row(side.row, &[0xdd; AUX_LEN]);
            rank.pages.give(&side.pages);
            rank.rows.give(&[side.row]);
        }
        let Some(side) = self.lives.get(&id).and_then(|l| l.senders[&p].live()) else { return };
        if side.cleared && side.given && side.shared.poll().is_terminal() {
            self.sender_over(id, p);
        }
    }

    /// What the handles on decode rank `d` show by now. `unproven`: the shard counted releases without proof meanwhile.
    pub(super) fn observe_receivers(&mut self, d: usize, unproven: bool) {
        let before = self.unproven_count(d);
        let lives: Vec<u64> = self.on_d[d].iter().copied().collect();
        for id in lives {
            let Some(side) = self.lives.get_mut(&id).and_then(|l| l.receivers.get_mut(&d)?.live_mut()) else {
                continue;
            };
            let (poll, was) = (side.shared.poll(), side.last);
            let wrong = side.watch();
            let published = side.progress > 0;
            let reason = side.shared.failure().map_or_else(|| "".into(), |f| f.reason.clone());
            if let Some(wrong) = wrong {
                self.wrong(format!("{}: life {id}: {wrong}", self.d[d].node.name));
            }
            if poll != was {
                self.trace.line(format_args!("{}: life {id} is {poll:?} {reason}", self.d[d].node.name));
                match poll {
                    KvPoll::WaitingForInput if self.rng.chance(0.02) && !self.healing => {
                        // Changed its mind.
                        let at = self.rng.below(40 * MS);
                        self.after(at, Ev::AbortReceiver(id, d));
                    }
                    KvPoll::WaitingForInput => {
                        let at = self.rng.below(MS);
                        self.after(at, Ev::Publish(id, d));
                    }
                    KvPoll::Success => {
                        if !published {
                            self.wrong(format!("{}: life {id}: Success before metadata", self.d[d].node.name));
                        }
                        self.check_bytes(id, d);
                        self.report.receiver_success += 1;
                    }
                    KvPoll::Failed if reason.contains("timed out") => self.check_deadline(id, d),
                    _ => {}
                }
                if poll.is_terminal() {
                    let late = if self.rng.chance(0.05) { 200 * MS } else { 2 * MS };
                    let at = self.rng.below(late);
                    self.after(at, Ev::ClearReceiver(id, d));
                }
            }
            self.hold_destination(id, d);
            self.give_back_destination(id, d, unproven);
        }
        if unproven && self.unproven_count(d) == before {
            self.wrong(format!("{}: pages released without proof, against the policy", self.d[d].node.name));
        }
    }

    /// Rooms of rank `d` whose pages are in quarantine.
    fn unproven_count(&self, d: usize) -> usize {
        let lives = self.quarantined.iter().filter_map(|id| self.lives.get(id));
        lives.flat_map(|l| &l.unproven).filter(|(_, rank, ..)| *rank == d).count()
    }

    /// A completion that has arrived wins over a deadline seen in the same step (D5).
    fn check_deadline(&mut self, id: u64, d: usize) {
        let Some(life) = self.lives.get(&id) else { return };
        let asked = self.shape(life.prefill, d).peers().records;
        let told = asked.iter().filter(|r| !r.is_dummy).all(|record| {
            let p = life.senders.keys().find(|p| self.p[**p].node.rank == record.rank);
            p.and_then(|p| life.created_in.get(p)).is_some_and(|process| life.succeeded.contains(process))
        });
        let (endpoint, room) = (&self.d[d].node.endpoint, life.room.to_string());
        let on_its_way = || {
            let about = |f: &crate::net::Flight| f.frames.get(1).is_some_and(|r| *r == room.as_bytes());
            self.net.in_flight().iter().any(|f| f.to == *endpoint && about(f))
        };
        let no_loss = self.episode.rates.loss == 0.0 && self.trouble_at < life.born;
        if told && no_loss && !on_its_way() {
            let name = &self.d[d].node.name;
            self.wrong(format!("{name}: life {id}: timed out, and every Success had arrived"));
        }
    }

    /// Success: every byte of every rank that had to write is in place.
    fn check_bytes(&mut self, id: u64, d: usize) {
        let Some(life) = self.lives.get(&id) else { return };
        let Some(side) = life.receivers[&d].live() else { return };
        let rank = &self.d[d];
        let mut found = Vec::new();
        for record in self.shape(life.prefill, d).peers().records.iter().filter(|r| !r.is_dummy) {
            let Some(p) = life.senders.keys().find(|p| self.p[**p].node.rank == record.rank) else { continue };
            let process = life.created_in.get(p).copied().unwrap_or_default();
            if !life.succeeded.contains(&process) {
                found.push(format!("Success, and prefill rank {} has not reported it", record.rank));
                continue;
            }
            let spec = &self.episode.prefills[life.prefill];
            for position in self.part(life, *p) {
                let at = side.pages[(position - life.prefix) as usize];
                for entry in 0..self.p[*p].node.entries {
                    let to = spec.decode_entry(self.p[*p].node.place.2, entry);
                    if rank.node.page(to, at) != page(id, process, entry, position) {
                        found.push(format!("page {at} of entry {to} (position {position}) does not hold its bytes"));
                    }
                }
            }
        }
        if rank.node.aux_row(side.row as usize) != slot(id) {
            found.push(format!("metadata slot {} does not hold its bytes", side.row));
        }
        let (pages, row, name) = (side.pages.clone(), side.row, rank.node.name.clone());
        self.owners.set(&name, &pages, row as u32, Owner::Done(id));
        for text in found {
            self.wrong(format!("{name}: life {id}: {text}"));
        }
    }

    /// A room that failed keeps its pages until nothing can land.
    fn hold_destination(&mut self, id: u64, d: usize) {
        let Some(side) = self.lives.get(&id).and_then(|l| l.receivers[&d].live()) else { return };
        if side.shared.poll() == KvPoll::Failed && !side.given {
            self.owners.set(&self.d[d].node.name, &side.pages, side.row as u32, Owner::Held(id));
        }
    }

    fn give_back_destination(&mut self, id: u64, d: usize, unproven: bool) {
        let name = self.d[d].node.name.clone();
        let Some(side) = self.lives.get(&id).and_then(|l| l.receivers[&d].live()) else { return };
        let success = side.shared.poll() == KvPoll::Success;
        // An engine keeps the pages of a finished transfer until it is done with the request.
        if side.shared.releasable() && !side.given && (!success || side.cleared) {
            let (pages, row, process) = (side.pages.clone(), side.row, side.process);
            let by_proof = self.lives.get(&id).is_some_and(|l| self.episode.by_proof(l.prefill));
            // In this step the shard counted a release without proof: it may have been this one.
            if unproven && !success && !by_proof {
                self.owners.set(&name, &pages, row as u32, Owner::Unproven(id));
                self.quarantined.insert(id);
                if let Some(life) = self.lives.get_mut(&id) {
                    life.unproven.push((process, d, pages, row));
                }
            } else {
                let landing = |sim: &Self| {
                    let mut of = sim.writes.iter().filter(|(_, w)| w.life == id && w.to == name && !w.dst_quiet);
                    of.next().map(|((_, op), _)| *op)
                };
                if landing(self).is_some() {
                    self.refresh_writes();
                }
                if let Some(op) = landing(self) {
                    self.wrong(format!("{name}: life {id}: pages given back as proven while {op:?} may land"));
                }
                self.owners.set(&name, &pages, row as u32, Owner::Free);
                self.d[d].pages.give(&pages);
                self.d[d].rows.give(&[row]);
            }
            if let Some(side) = self.lives.get_mut(&id).and_then(|l| l.receivers.get_mut(&d)?.live_mut()) {
                side.given = true;
            }
        }
        let Some(side) = self.lives.get(&id).and_then(|l| l.receivers[&d].live()) else { return };
        if side.cleared && side.given && side.shared.poll().is_terminal() {
            self.receiver_over(id, d);
        }
    }
}

impl Side {
    /// What must never happen to a handle, whatever happens to its room.
    fn watch(&mut self) -> Option<String> {
        let (poll, was) = (self.shared.poll(), self.last);
        self.last = poll;
        let reason = self.shared.failure().map(|f| f.reason.clone());
        if was.is_terminal() && poll != was {
            return Some(format!("{poll:?} after {was:?}"));
        }
        if poll == KvPoll::Failed && reason.as_ref().is_none_or(|r| r.is_empty()) {
            return Some("Failed without a reason".into());
        }
        if let (Some(first), Some(now)) = (&self.reason, &reason)
            && first != now
        {
            return Some(format!("the first cause was {first:?}, now it is {now:?}"));
        }
        if poll == KvPoll::Success && reason.is_some() {
            return Some(format!("Success with a failure: {reason:?}"));
        }
        if self.shared.releasable() && !poll.is_terminal() {
            return Some(format!("releasable in {poll:?}"));
        }
        self.reason = self.reason.take().or(reason);
        None
    }
}
