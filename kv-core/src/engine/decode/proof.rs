//! Rooms that wait for proof in vain: was the ABORT or its ACK lost, or is the prefill rank that owes it dead?

use super::*;

/// The same peers are asked for anew, for rooms that wait for proof, at most this often.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// A room whose pages are held asks the transport for proof after this time, then ever more rarely, down to [`ASK`].
pub(super) const LOOK: Duration = Duration::from_secs(2);
/// It asks the prefill ranks and the directory this often, when nothing but proof frees it.
pub(super) const ASK: Duration = Duration::from_secs(30);

impl DecodeShard {
    pub(super) fn look_for_proof_if_due(&mut self, now: Timestamp, key: RoomKey, control: &mut dyn ControlPlane) {
        let Some(e) = self.rooms.get_mut(key).filter(|e| e.look_at.is_some_and(|t| t <= now)) else { return };
        let next = now + e.look_every;
        e.look_at = Some(if e.ask_at > now { next.min(e.ask_at) } else { next });
        e.look_every = (e.look_every * 2).min(ASK);
        let records = e.room.peers().map_or(&[][..], |p| &p.records);
        let owes = e.room.unacked().filter_map(|rank| records.iter().find(|r| r.rank == rank));
        let owes: Vec<_> = owes.filter_map(|r| Some((r.rank, r.ext?.process))).collect();
        for (rank, process) in owes {
            if self.is_dead(now, process) {
                self.drive(now, key, ReceiverEvent::RankDead(rank), control);
            }
        }
        let Some(e) = self.rooms.get_mut(key).filter(|e| e.room.awaits_proof() && e.ask_at <= now) else { return };
        e.ask_at = now + ASK;
        self.look_for_proof(now, key, control);
    }

    /// Asked once a turn for all rooms: many may wait for one process.
    fn is_dead(&mut self, now: Timestamp, process: ProcessGeneration) -> bool {
        self.dead.retain(|_, (at, _)| now.since(*at) < LOOK / 2);
        let inbound_dead = &self.config.inbound_dead;
        self.dead.entry(process).or_insert_with(|| (now, inbound_dead(process))).1
    }

    /// A room waits for proof that does not come. Its ABORT goes out again, since it or the ACK may be lost, and a
    /// successor of the process answers it too. And the directory is asked, since a successor may listen elsewhere.
    fn look_for_proof(&mut self, now: Timestamp, key: RoomKey, control: &mut dyn ControlPlane) {
        let contacted = self.rooms.get(key).map_or(0, |e| e.room.contacted());
        let generation = self.rooms.get(key).and_then(|e| e.room.armed_generation());
        self.send_abort(now, key, contacted, generation, control);
        let Some(e) = self.rooms.get(key) else { return };
        let Some(peers) = e.room.peers() else { return };
        let pool_key = peers.pool_key.clone();
        let request = DirectoryRequest::Peers {
            token: self.next_token + 1,
            room: e.room.room(),
            bootstrap_addr: e.bootstrap_addr.clone(),
            prefill_dp_rank: e.prefill_dp_rank,
        };
        self.next_token += 1;
        self.looking.insert(self.next_token, key);
        // Many rooms wait for one rank: it is asked for anew once for all of them.
        self.looked.retain(|_, at| now.since(*at) < LOOK_AGAIN);
        if !self.looked.contains_key(&pool_key) {
            self.looked.insert(pool_key.clone(), now);
            self.directory.request(DirectoryRequest::Forget { pool_key });
        }
        self.directory.request(request);
    }

    /// A new process of ours at the very endpoint of a rank: the one before it has let go of its port, so it is gone. A
    /// process elsewhere, also on the same host, proves nothing: the old one may only be stopped.
    pub(super) fn looked_for_successors(
        &mut self,
        now: Timestamp,
        key: RoomKey,
        found: Option<&PrefillPeers>,
        control: &mut dyn ControlPlane,
    ) {
        let (Some(e), Some(found)) = (self.rooms.get(key), found) else { return };
        let Some(peers) = e.room.peers() else { return };
        let replaced = |rank: &PrefillRank| {
            let of = |p: &PrefillPeers| {
                let record = p.records.iter().find(|r| r.rank == *rank)?;
                Some((record.endpoint.clone(), record.ext?.process))
            };
            of(peers).zip(of(found)).is_some_and(|((at, was), (at_now, is))| at == at_now && was != is)
        };
        let dead: Vec<PrefillRank> = e.room.unacked().filter(replaced).collect();
        for rank in dead {
            self.drive(now, key, ReceiverEvent::RankDead(rank), control);
        }
    }
}
