//! What arrives from decode: registrations, metadata, ABORTs; and the connections to it.

use super::*;

impl PrefillShard {
    pub(super) fn message(&mut self, now: Timestamp, frames: &[bytes::Bytes], control: &mut dyn ControlPlane) {
        self.stats.messages_in.inc();
        let parsed = self.hooks.dialect().parse_to_prefill(frames, &self.config.limits);
        match parsed {
            Ok(ToPrefill::Registration(r)) => self.registration(now, r, control),
            Ok(ToPrefill::Metadata(m)) => self.metadata(now, m, control),
            Ok(ToPrefill::Abort(a)) => self.abort(now, a, control),
            // Staging and late allocation are not offered by this rank, so nobody of ours sends these.
            Ok(_) => self.stats.protocol_violations.inc(),
            Err(error) => self.malformed.report(&self.stats, &error),
        }
    }

    pub(super) fn registration(&mut self, now: Timestamp, r: Box<Registration>, control: &mut dyn ControlPlane) {
        let Some(name) = self.hooks.peer_name(&r) else { return self.stats.protocol_violations.inc() };
        let name: Arc<str> = name.into();
        let mut posts = VecDeque::new();
        if let Some(known) = self.peers.get(&name) {
            let same = *known.registration == *r;
            if same && matches!(known.link, Link::Ready(_) | Link::Connecting(_)) {
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
            .and_then(|peer| Pairing::new(&self.layout, &peer))
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
        self.peers.insert(name.clone(), Peer { registration: r, pairing, link, posts, failures: 0, last_used: now });
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
        let descriptor =
            PeerDescriptor { name: name.to_string(), metadata: r.metadata.clone(), endpoint: r.endpoint.clone() };
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

    pub(super) fn metadata(&mut self, now: Timestamp, m: Metadata, control: &mut dyn ControlPlane) {
        let Some(room) = Room::new(m.room) else { return self.stats.protocol_violations.inc() };
        let refused = self.usable(now, &m.name).err();
        let destination = Destination {
            name: m.name.as_str().into(),
            endpoint: m.endpoint,
            pages: m.dst_pages,
            aux_index: m.aux_index,
            required_dst_info_num: m.required_dst_info_num,
            decode_prefix_len: m.decode_prefix_len,
            is_dummy: m.is_dummy,
        };
        if let Some(&key) = self.by_room.get(&room) {
            if let Some(reason) = refused {
                self.drive(now, key, SenderEvent::Fail(Failure::here(reason)), control);
            }
            return self.drive(now, key, SenderEvent::Destination(destination), control);
        }
        if let Some((_, reason)) = self.tombstones.get(&room).cloned() {
            return self.status(now, room, &destination.endpoint, KvPoll::Failed, Some(reason), control);
        }
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
        let reason = match (&early.failed, refused) {
            (Some(reason), _) => Some(reason.clone()),
            (None, refused) => refused,
        };
        if let Some(reason) = reason {
            early.failed = Some(reason.clone());
            let destinations = std::mem::take(&mut early.destinations);
            for d in destinations.iter().chain([&destination]).filter(|d| !d.is_dummy) {
                self.status(now, room, &d.endpoint.clone(), KvPoll::Failed, Some(reason.clone()), control);
            }
        } else if early.destinations.len() < self.config.limits.max_peers_per_room {
            early.destinations.retain(|d| d.name != destination.name);
            early.destinations.push(destination);
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

    pub(super) fn abort(&mut self, now: Timestamp, a: Abort, control: &mut dyn ControlPlane) {
        let Some(room) = Room::new(a.room) else { return self.stats.protocol_violations.inc() };
        self.stats.aborts_in.inc();
        if let Some(&key) = self.by_room.get(&room) {
            if self.rooms.get(key).is_some_and(|e| !e.room.poll().is_terminal()) {
                self.stats.rooms_aborted.inc();
            }
            self.drive(now, key, SenderEvent::AbortedByDecode, control);
        } else if let Some(early) = self.early.get_mut(&room) {
            // The first reason stays, and every decode rank that is known is told, as with a sender.
            let reason = early.failed.get_or_insert_with(|| ABORTED_BY_DECODE_REASON.into()).clone();
            for d in std::mem::take(&mut early.destinations).iter().filter(|d| !d.is_dummy) {
                self.status(now, room, &d.endpoint, KvPoll::Failed, Some(reason.clone()), control);
            }
        } else {
            self.stats.messages_stale.inc();
        }
        if let (Some(endpoint), Some(generation)) = (a.endpoint, a.generation) {
            let targets = self.pending_acks.entry(room).or_default();
            let full = targets.len() >= self.config.limits.max_peers_per_room;
            match targets.iter_mut().find(|(e, _)| *e == endpoint) {
                Some(t) => t.1 = generation,
                None if full => self.stats.messages_over_limit.inc(),
                None => targets.push((endpoint, generation)),
            }
            self.ack_if_drained(now, room, control);
        }
    }

    /// ABORT_ACK only when no life of the room can still write (F3).
    pub(super) fn ack_if_drained(&mut self, now: Timestamp, room: Room, control: &mut dyn ControlPlane) {
        let lives = self.by_room.get(&room).into_iter().chain(self.undrained.get(&room).into_iter().flatten());
        if lives.filter_map(|k| self.rooms.get(*k)).any(|e| e.room.outstanding() > 0) {
            return;
        }
        for (endpoint, generation) in self.pending_acks.remove(&room).into_iter().flatten() {
            let ack = AbortAck { room: room.get(), prefill_rank: self.config.rank, generation };
            match self.hooks.dialect().encode_abort_ack(&ack) {
                Ok(frames) => {
                    self.stats.abort_acks_out.inc();
                    self.outgoing.send(now, control, &endpoint, frames, &self.stats);
                }
                Err(error) => tracing::warn!("ABORT_ACK of room {room} not sent: {error}"),
            }
        }
    }

    pub(super) fn status(
        &mut self,
        now: Timestamp,
        room: Room,
        to: &Endpoint,
        status: KvPoll,
        reason: Option<Arc<str>>,
        control: &mut dyn ControlPlane,
    ) {
        let message = KvStatus {
            room: room.get(),
            status,
            prefill_rank: self.config.rank,
            reason: reason.map(|r| r.to_string()),
        };
        match self.hooks.dialect().encode_status(&message) {
            Ok(frames) => {
                self.outgoing.send(now, control, to, frames, &self.stats);
            }
            Err(error) => tracing::warn!("status of room {room} not sent: {error}"),
        }
    }
}
