//! What arrives from decode: registrations, metadata, ABORTs; and the connections to it.

use super::lives::Belongs;
use super::*;
use crate::control::Multipart;
use crate::ids::ProcessGeneration;
use crate::wire::{RoomTag, WireError};

/// The life of a room on decode that a message is about.
#[derive(Clone, Copy)]
pub(super) struct About {
    pub process: ProcessGeneration,
    pub generation: u64,
    /// With Success: what was written.
    pub tag: Option<RoomTag>,
    /// With Failed: decode must register first.
    pub register_again: bool,
}

impl About {
    pub fn life(process: ProcessGeneration, generation: u64) -> Self {
        Self { process, generation, tag: None, register_again: false }
    }
}

impl PrefillShard {
    pub(super) fn message(&mut self, now: Timestamp, frames: &[bytes::Bytes], control: &mut dyn ControlPlane) {
        self.stats.messages_in.inc();
        let dialect = self.hooks.dialect();
        let parsed = dialect.parse_to_prefill(frames, &self.config.limits).and_then(|message| {
            let ours = self.config.extension.is_some();
            let ext = if ours { dialect.extension(message.kind(), frames)? } else { None };
            Ok((message, ext))
        });
        match parsed {
            Ok((ToPrefill::Registration(r), ext)) => self.registration(now, r, ext, control),
            Ok((ToPrefill::Metadata(m), ext)) => self.metadata(now, m, ext, control),
            Ok((ToPrefill::Abort(a), ext)) => self.abort(now, a, ext, control),
            // Staging and late allocation are not offered by this rank, so nobody of ours sends these.
            Ok(_) => self.stats.protocol_violations.inc(),
            Err(error) => self.malformed.report(&self.stats, &error),
        }
    }

    /// Spoken to an earlier process at our address (F56).
    fn is_for_another(&self, ext: Option<&Extension>) -> bool {
        let to = ext.and_then(|e| e.to);
        to.is_some_and(|to| self.config.extension.is_some_and(|us| us.process != to))
    }

    pub(super) fn registration(
        &mut self,
        now: Timestamp,
        r: Box<Registration>,
        ext: Option<Extension>,
        control: &mut dyn ControlPlane,
    ) {
        let host = ext.as_ref().and_then(|e| e.host);
        let ext = ext.map(|e| e.from);
        let Some(name) = self.hooks.peer_name(&r) else { return self.stats.protocol_violations.inc() };
        let name: Arc<str> = name.into();
        let mut posts = VecDeque::new();
        if let Some(known) = self.peers.get(&name) {
            let same = *known.registration == *r;
            if same && matches!(known.link, Link::Ready(_) | Link::Connecting(_)) {
                // Through a registry of 0.5.23 decode does not learn that we are ours; what it said elsewhere holds.
                if let (Some(known), Some(_)) = (self.peers.get_mut(&name), ext) {
                    known.ext = ext;
                }
                return;
            }
            // Registered again with other geometry, or after a failure: the old connection goes (0.5.23 hazard 7).
            if let Some((old, id)) = self.peers.remove(&name) {
                posts = old.posts;
                if let Some(id) = id {
                    self.connector.disconnect(id);
                }
            }
        }
        if let Some(old) = self.peers.at(&r.endpoint).filter(|old| *old != name) {
            self.peer_lost(now, &old, "a new process registered at its address", control);
            self.drop_peer(&old);
        }
        if self.peers.by_name.len() >= self.config.limits.max_peers {
            match self.peers.victim() {
                Some(victim) => self.drop_peer(&victim),
                None => return self.stats.messages_over_limit.inc(),
            }
        }
        let paired = PeerLayout::from_registration(&r, &self.config.limits)
            .and_then(|peer| Pairing::with_unknown_slots(&self.layout, &peer, self.config.unknown_slots))
            .map_err(|e| -> Arc<str> { format!("decode {} does not fit this prefill: {e}", r.endpoint).into() });
        let (pairing, refused) = match paired {
            Ok(p) => (Some(Arc::new(p)), None),
            Err(reason) => {
                self.stats.peers_refused.inc();
                tracing::warn!("{reason}");
                (None, Some(reason))
            }
        };
        if refused.is_some() {
            posts.clear();
        }
        let link = Link::Refused(refused.clone().unwrap_or_default());
        self.peers.insert(
            name.clone(),
            Peer {
                geometry: geometry(&r),
                registration: r,
                ext,
                host,
                pairing,
                link,
                posts,
                in_flight: 0,
                failures: 0,
                last_used: now,
            },
        );
        match refused {
            None => {
                self.stats.peers_registered.inc();
                self.connect(&name);
            }
            Some(reason) => self.fail_rooms_of(now, &name, &reason, control),
        }
    }

    pub(super) fn connect(&mut self, name: &Arc<str>) {
        let Some(peer) = self.peers.get(name) else { return };
        let r = &peer.registration;
        let descriptor = PeerDescriptor {
            name: name.to_string(),
            metadata: r.metadata.clone(),
            endpoint: r.endpoint.clone(),
            host: peer.host,
        };
        let token = self.peers.connecting(name);
        self.connector.connect(token, descriptor);
    }

    pub(super) fn drop_peer(&mut self, name: &str) {
        if let Some((_, Some(id))) = self.peers.remove(name) {
            self.connector.disconnect(id);
        }
    }

    pub(super) fn connected(&mut self, now: Timestamp, c: Connected, control: &mut dyn ControlPlane) {
        let name = match self.peers.connected(c.token) {
            Ok(name) => name,
            Err(name) => {
                if let Ok(id) = c.result
                    && !self.peers.wants(name.as_deref(), id)
                {
                    self.connector.disconnect(id);
                }
                return;
            }
        };
        match c.result {
            Ok(id) => {
                self.peers.ready(&name, id);
                self.ready_peers.push_back(name);
            }
            Err(error) => self.peer_lost(now, &name, &format!("cannot connect: {error}"), control),
        }
    }

    /// The peer cannot be written to: its rooms fail, its remote state goes (F55). It is tried again when a room
    /// needs it (F51).
    pub(super) fn peer_lost(&mut self, now: Timestamp, name: &Arc<str>, reason: &str, control: &mut dyn ControlPlane) {
        let Some(peer) = self.peers.get_mut(name) else { return };
        // The transport and the control plane may both see it go.
        if matches!(peer.link, Link::Down { .. } | Link::Refused(_)) {
            return;
        }
        peer.posts.clear();
        self.stats.peers_lost.inc();
        let wait = RECONNECT_MIN.saturating_mul(1 << peer.failures.min(6)).min(RECONNECT_MAX);
        peer.failures = peer.failures.saturating_add(1);
        if let Some(id) = self.peers.down(name, reason.into(), now + wait) {
            self.connector.disconnect(id);
        }
        self.fail_rooms_of(now, name, reason, control);
    }

    pub(super) fn fail_rooms_of(
        &mut self,
        now: Timestamp,
        name: &Arc<str>,
        reason: &str,
        control: &mut dyn ControlPlane,
    ) {
        let rooms: Vec<RoomKey> = self
            .rooms
            .iter()
            .filter(|(_, e)| !e.room.poll().is_terminal() && e.room.destinations().iter().any(|d| d.name == *name))
            .map(|(k, _)| k)
            .collect();
        for key in rooms {
            self.drive(now, key, SenderEvent::DestinationLost(name.clone(), reason.to_owned()), control);
        }
    }

    pub(super) fn metadata(
        &mut self,
        now: Timestamp,
        m: Metadata,
        ext: Option<Extension>,
        control: &mut dyn ControlPlane,
    ) {
        let Some(room) = Room::new(m.room) else { return self.stats.protocol_violations.inc() };
        let peer = self.peers.get(&m.name);
        let registered = peer.and_then(|p| p.ext);
        if let (Some(registered), Some(ext)) = (registered, &ext)
            && registered.process != ext.from.process
        {
            return self.stats.messages_stale.inc();
        }
        let geometry = peer.map_or(0, |p| p.geometry);
        let told = ext.as_ref().and_then(|e| e.aux_writer);
        let life = ext.as_ref().and_then(|ext| DecodeLife::of(&m.endpoint, ext));
        let destination = Destination {
            writes_aux: peer.is_some_and(|p| self.config.aux_rule.writes(&p.registration, told)),
            life: life.as_ref().map(|l| RoomLife { process: l.process, generation: l.generation, geometry }),
            name: m.name.as_str().into(),
            endpoint: m.endpoint,
            pages: m.dst_pages,
            aux_index: m.aux_index,
            required_dst_info_num: m.required_dst_info_num,
            decode_prefix_len: m.decode_prefix_len,
            is_dummy: m.is_dummy,
        };
        if self.is_for_another(ext.as_ref()) {
            self.stats.messages_stale.inc();
            let reason = "this is another process than the one that decode knows at its address: prefill was restarted";
            return self.refuse(now, room, &destination, reason.into(), control);
        }
        let spent = life.as_ref().and_then(|l| self.spent.newest(room, l).map(|newest| (newest, l.generation)));
        if spent.is_some_and(|(newest, this)| this <= newest) {
            return self.stats.messages_stale.inc();
        }
        let refused = self.usable(now, &m.name).err();
        if let Some(&key) = self.by_room.get(&room) {
            match self.belongs(key, life.as_ref()) {
                Belongs::Here => {
                    self.bind(key, life);
                    if let Some(reason) = refused {
                        self.drive(now, key, SenderEvent::Fail(Failure::here(reason)), control);
                    }
                    return self.drive(now, key, SenderEvent::Destination(destination), control);
                }
                Belongs::Past => return self.stats.messages_stale.inc(),
                Belongs::Future => {
                    let text = format!("decode {} began room {room} anew: its ABORT was lost", destination.endpoint);
                    self.drive(now, key, SenderEvent::Fail(Failure::here(text)), control);
                }
            }
        } else if let Some((_, reason)) = self.tombstones.get(&room).cloned()
            // A newer life than the failed one's is for the next sender.
            && spent.is_none()
        {
            if let Some(life) = life {
                self.spend(now, room, life);
            }
            return self.refuse(now, room, &destination, reason, control);
        }
        self.keep_early(now, room, destination, refused, control);
    }

    /// Metadata of a room whose sender does not exist yet.
    fn keep_early(
        &mut self,
        now: Timestamp,
        room: Room,
        destination: Destination,
        refused: Option<Arc<str>>,
        control: &mut dyn ControlPlane,
    ) {
        if !self.early.contains_key(&room) {
            if self.early.len() >= self.config.limits.max_early_rooms {
                return self.stats.messages_over_limit.inc();
            }
            let deadline = now + self.config.early_timeout;
            self.early.insert(room, Early { destinations: Vec::new(), failed: None, deadline });
            self.early_order.push_back((deadline, room));
            // Most rooms find their sender long before the deadline: their entries must not pile up until then.
            if self.early_order.len() > 1024 && self.early_order.len() > 4 * self.early.len() {
                self.early_order.retain(|(t, room)| self.early.get(room).is_some_and(|e| e.deadline == *t));
            }
        }
        let Some(early) = self.early.get_mut(&room) else { return };
        let other_life = |d: &Destination| d.name == destination.name && d.life != destination.life;
        let mixed = early.destinations.iter().any(other_life).then(|| {
            // Which of the two the sender to come is for cannot be told.
            format!("decode {} began room {room} anew before its sender was made", destination.endpoint).into()
        });
        if let Some(reason) = early.failed.clone().or(refused).or(mixed) {
            early.failed = Some(reason.clone());
            let destinations = std::mem::take(&mut early.destinations);
            self.early_bytes -= page_bytes(&destinations);
            for d in destinations.iter().chain([&destination]).filter(|d| !d.is_dummy) {
                self.refuse(now, room, d, reason.clone(), control);
            }
        } else if early.destinations.len() < self.config.limits.max_peers_per_room
            && self.early_bytes + size_of_val(&*destination.pages) <= self.config.limits.max_early_bytes
        {
            self.early_bytes -= page_bytes(&early.destinations);
            early.destinations.retain(|d| d.name != destination.name);
            early.destinations.push(destination);
            self.early_bytes += page_bytes(&early.destinations);
        } else {
            self.stats.messages_over_limit.inc();
        }
    }

    /// Whether rooms can go to this decode; connects again where the connection broke.
    pub(super) fn usable(&mut self, now: Timestamp, name: &str) -> Result<(), Arc<str>> {
        let Some(peer) = self.peers.get_mut(name) else {
            self.stats.messages_stale.inc();
            return Err(format!(
                "decode {name:?} is not registered with this prefill rank: register, then send metadata"
            )
            .into());
        };
        peer.last_used = now;
        match &peer.link {
            Link::Ready(_) | Link::Connecting(_) => Ok(()),
            Link::Refused(reason) => Err(reason.clone()),
            Link::Down { reason, retry_at } if *retry_at > now => {
                let secs = retry_at.since(now).as_secs_f64();
                Err(format!("decode {} is lost ({reason}); tried again in {secs:.1}s", peer.registration.endpoint)
                    .into())
            }
            Link::Down { .. } => {
                let name: Arc<str> = name.into();
                self.connect(&name);
                Ok(())
            }
        }
    }

    pub(super) fn abort(&mut self, now: Timestamp, a: Abort, ext: Option<Extension>, control: &mut dyn ControlPlane) {
        let Some(room) = Room::new(a.room) else { return self.stats.protocol_violations.inc() };
        self.stats.aborts_in.inc();
        let life = ext.as_ref().zip(a.endpoint.as_ref()).and_then(|(ext, endpoint)| DecodeLife::of(endpoint, ext));
        // What ended here before, or was never spoken of to this process, has nothing left to stop.
        let over = life.as_ref().is_some_and(|l| self.spent.newest(room, l).is_some_and(|n| l.generation <= n));
        let nothing_to_stop = over || self.is_for_another(ext.as_ref());
        let sender = self.by_room.get(&room).map(|key| (*key, self.belongs(*key, life.as_ref())));
        let early = |l: &DecodeLife| {
            let same_decode = |d: &&Destination| d.endpoint == l.endpoint && d.life.is_some();
            let theirs = self.early.get(&room).and_then(|e| e.destinations.iter().find(same_decode));
            theirs.is_some_and(|d| d.life.map(|life| DecodeLife::new(&d.endpoint, life)).as_ref() != Some(l))
        };
        if nothing_to_stop {
            self.stats.messages_stale.inc();
        } else if let Some((key, Belongs::Here)) = sender {
            if self.rooms.get(key).is_some_and(|e| !e.room.poll().is_terminal()) {
                self.stats.rooms_aborted.inc();
            }
            self.bind(key, life.clone());
            self.drive(now, key, SenderEvent::AbortedByDecode, control);
        } else if matches!(sender, Some((_, Belongs::Past))) || life.as_ref().is_some_and(early) {
            self.stats.messages_stale.inc();
        } else if let Some(early) = self.early.get_mut(&room) {
            // The first reason stays, and every decode rank that is known is told, as with a sender.
            let reason = early.failed.get_or_insert_with(|| ABORTED_BY_DECODE_REASON.into()).clone();
            let destinations = std::mem::take(&mut early.destinations);
            self.early_bytes -= page_bytes(&destinations);
            for d in destinations.iter().filter(|d| !d.is_dummy) {
                self.refuse(now, room, d, reason.clone(), control);
            }
        } else {
            self.stats.messages_stale.inc();
        }
        if let (Some(life), false) = (&life, nothing_to_stop) {
            self.spend(now, room, life.clone());
        }
        if let (Some(endpoint), Some(generation)) = (a.endpoint, a.generation) {
            if self.peers.at(&endpoint).is_none() && !self.strangers.may_answer(now) {
                return self.stats.messages_over_limit.inc();
            }
            let targets = self.pending_acks.entry(room).or_default();
            let full = targets.len() >= self.config.limits.max_peers_per_room;
            // Two lives of one decode may both wait.
            match targets.iter_mut().find(|t| t.endpoint == endpoint && t.life == life) {
                Some(t) => t.generation = generation,
                None if full => self.stats.messages_over_limit.inc(),
                None => targets.push(AckTarget { endpoint, generation, life }),
            }
            self.ack_if_drained(now, room, control);
        }
    }

    /// ABORT_ACK only when no life of the room can still write where the aborted one did (F3).
    pub(super) fn ack_if_drained(&mut self, now: Timestamp, room: Room, control: &mut dyn ControlPlane) {
        let Some(mut targets) = self.pending_acks.remove(&room) else { return };
        let keys = self.by_room.get(&room).into_iter().chain(self.undrained.get(&room).into_iter().flatten());
        let lives: SmallVec<[&Entry; 2]> = keys.filter_map(|k| self.rooms.get(*k)).collect();
        let mut due: SmallVec<[AckTarget; 1]> = SmallVec::new();
        targets.retain(|t| {
            let wait = lives.iter().any(|e| Self::keeps_back(e, t));
            if !wait {
                due.push(t.clone());
            }
            wait
        });
        if !targets.is_empty() {
            self.pending_acks.insert(room, targets);
        }
        for target in due {
            let ack = AbortAck { room: room.get(), prefill_rank: self.config.rank, generation: target.generation };
            let about = target.life.map(|l| About::life(l.process, l.generation));
            let frames = self.hooks.dialect().encode_abort_ack(&ack);
            match frames.and_then(|frames| self.extended(MessageKind::AbortAck, frames, about)) {
                Ok(frames) => {
                    self.stats.abort_acks_out.inc();
                    self.outgoing.send(now, control, &target.endpoint, frames, &self.stats);
                }
                Err(error) => tracing::warn!("ABORT_ACK of room {room} not sent: {error}"),
            }
        }
    }

    /// With our extension, when decode is ours and spoke of a life.
    fn extended(&self, kind: MessageKind, mut frames: Multipart, about: Option<About>) -> Result<Multipart, WireError> {
        if let (Some(us), Some(about)) = (self.config.extension, about) {
            let ext = Extension {
                to: Some(about.process),
                room_generation: Some(about.generation),
                tag: about.tag,
                register_again: about.register_again,
                ..Extension::from(us)
            };
            self.hooks.dialect().attach_extension(kind, &mut frames, &ext)?;
        }
        Ok(frames)
    }

    /// Tell one destination that the room failed.
    pub(super) fn refuse(
        &mut self,
        now: Timestamp,
        room: Room,
        d: &Destination,
        reason: Arc<str>,
        control: &mut dyn ControlPlane,
    ) {
        let about = d.life.map(|l| About::life(l.process, l.generation));
        self.status(now, room, &d.endpoint, KvPoll::Failed, Some(reason), about, control);
    }

    #[allow(clippy::too_many_arguments)] // one status, said whole
    pub(super) fn status(
        &mut self,
        now: Timestamp,
        room: Room,
        to: &Endpoint,
        status: KvPoll,
        reason: Option<Arc<str>>,
        about: Option<About>,
        control: &mut dyn ControlPlane,
    ) {
        if self.peers.at(to).is_none() && !self.strangers.may_answer(now) {
            return self.stats.messages_over_limit.inc();
        }
        let message = KvStatus {
            room: room.get(),
            status,
            prefill_rank: self.config.rank,
            reason: reason.map(|r| r.to_string()),
        };
        let register_again = status == KvPoll::Failed && self.peers.at(to).is_none();
        let about = about.map(|about| About { register_again, ..about });
        let dialect = self.hooks.dialect();
        let frames = dialect.encode_status(&message).map(|mut frames| {
            // Mooncake sends no reason to 0.5.23, but every dialect reads one, in the last frame.
            if let (Some(_), Some(reason)) = (about, &message.reason)
                && frames.len() + 1 == dialect.frames(MessageKind::Status)
            {
                frames.push(reason.clone().into());
            }
            frames
        });
        match frames.and_then(|frames| self.extended(MessageKind::Status, frames, about)) {
            Ok(frames) => {
                self.outgoing.send(now, control, to, frames, &self.stats);
            }
            Err(error) => tracing::warn!("status of room {room} not sent: {error}"),
        }
    }
}
