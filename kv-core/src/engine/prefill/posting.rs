//! Posting writes: peer by peer, op by op, planned when the lane takes them.

use super::*;

/// Why a write was not posted.
pub(super) enum PostError {
    /// The lane takes no more now.
    Busy,
    /// The connection is gone; the event is the room's, the text the peer's.
    PeerLost(SenderEvent, String),
}

impl PrefillShard {
    pub(super) fn queue_post(&mut self, post: Post<RoomKey>) {
        let Some(e) = self.rooms.get(post.key) else { return };
        let Some(d) = e.room.destinations().get(post.dest) else { return };
        let name = d.name.clone();
        match self.peers.get_mut(&name) {
            Some(peer) if !matches!(peer.link, Link::Refused(_) | Link::Down { .. }) => {
                if peer.posts.is_empty() {
                    self.ready_peers.push_back(name);
                }
                peer.posts.push_back(post);
            }
            Some(peer) => {
                let (Link::Refused(reason) | Link::Down { reason, .. }) = &peer.link else { return };
                let event = SenderEvent::Rejected(post.chunk, post.dest, reason.to_string());
                self.work.push_back((post.key, event));
            }
            None => {
                let event = SenderEvent::Rejected(post.chunk, post.dest, "it is not registered any more".into());
                self.work.push_back((post.key, event));
            }
        }
    }

    /// As many writes are in flight as may be: the next completion wakes the shard.
    pub(super) fn is_full(&self) -> bool {
        self.in_flight.len() >= self.config.limits.max_ops_in_flight
    }

    /// Post what waits, peer by peer: a peer that is busy or still connecting does not hold up the others.
    pub(super) fn post_ready(&mut self, now: Timestamp, control: &mut dyn ControlPlane) {
        let mut busy = Vec::new();
        while let Some(name) = self.ready_peers.pop_front() {
            if self.is_full() {
                busy.push(name);
                break;
            }
            let Some(peer) = self.peers.get_mut(&name) else { continue };
            let (Link::Ready(id), Some(pairing)) = (&peer.link, peer.pairing.clone()) else { continue };
            let id = *id;
            if peer.in_flight >= self.config.limits.max_ops_per_peer {
                busy.push(name);
                continue;
            }
            let Some(post) = peer.posts.pop_front() else { continue };
            peer.last_used = now;
            self.posted_at = now;
            match self.try_post(now, post, &name, id, &pairing) {
                Ok((event, more)) => {
                    if let (true, Some(peer)) = (more, self.peers.get_mut(&name)) {
                        peer.posts.push_front(post);
                    }
                    // Round robin over peers.
                    self.ready_peers.push_back(name);
                    if let Some(event) = event {
                        self.drive(now, post.key, event, control);
                    }
                }
                Err(PostError::PeerLost(event, reason)) => {
                    // First: what all of its rooms hear is this room's reason, too.
                    self.peer_lost(now, &name, &reason, control);
                    self.drive(now, post.key, event, control);
                }
                Err(PostError::Busy) => {
                    if let Some(peer) = self.peers.get_mut(&name) {
                        peer.posts.push_front(post);
                    }
                    busy.push(name);
                }
            }
        }
        self.ready_peers.extend(busy);
    }

    /// Plan and submit one op; what the room hears of it, and whether the write has more. `Err`: the lane is busy.
    #[allow(clippy::result_large_err)] // the lane hands the op back whole
    pub(super) fn try_post(
        &mut self,
        now: Timestamp,
        post: Post<RoomKey>,
        name: &Arc<str>,
        peer: crate::ids::PeerId,
        pairing: &Arc<Pairing>,
    ) -> Result<(Option<SenderEvent>, bool), PostError> {
        let Post { key, chunk, dest } = post;
        let plan = match self.next_piece(&post, pairing) {
            Ok(Some(plan)) => plan,
            Ok(None) => return Ok((None, false)),
            Err(event) => return Ok((Some(event), false)),
        };
        self.next_op += 1;
        let id = OpId(self.next_op);
        let bytes = plan.total_bytes();
        let op = WriteOp { id, peer, plan, regions: self.layout.regions().clone() };
        // A backend that panics costs this room, not the worker (F62). What it posted before is not known.
        #[allow(clippy::result_large_err)] // the op comes back whole, so that nothing is lost
        let posted = catch_unwind(AssertUnwindSafe(|| self.lane.submit(op)));
        match posted {
            Ok(Err(SubmitError::Busy(op))) => {
                self.put_back(&post, op.plan);
                return Err(PostError::Busy);
            }
            Ok(Err(SubmitError::Rejected(op, error))) => {
                self.put_back(&post, op.plan);
                let event = SenderEvent::Rejected(chunk, dest, error.to_string());
                return match error.kind {
                    TransportErrorKind::PeerLost => Err(PostError::PeerLost(event, error.message)),
                    _ => Ok((Some(event), false)),
                };
            }
            Ok(Ok(())) => {}
            Err(_) => {
                let error = TransportError::new(TransportErrorKind::Backend, "the transport panicked in submit");
                if self.accepted(&post).0 {
                    self.work.push_back((key, SenderEvent::Posted(chunk, dest, id)));
                }
                self.retain(now, id, OpRef { key, chunk, dest, bytes, name: name.clone() }, (false, false));
                self.stats.transport_panics.inc();
                self.stats.ops_unresolved.inc();
                return Ok((self.outcome_of(&post, Outcome::Unresolved { error }), false));
            }
        }
        self.stats.ops_posted.inc();
        self.in_trace(key, chunk, |module, room| {
            tracing::debug!(module, room, chunk, op = id.0, bytes, to = &**name, "kv write posted");
        });
        self.in_flight.insert(id, OpRef { key, chunk, dest, bytes, name: name.clone() });
        self.stats.ops_in_flight.set(self.in_flight.len() as u64);
        if let Some(p) = self.peers.get_mut(name) {
            p.in_flight += 1;
        }
        let (first, more) = self.accepted(&post);
        Ok((first.then_some(SenderEvent::Posted(chunk, dest, id)), more))
    }
}

/// KV pages of the chunk, and with the last chunk the aux row.
pub(super) fn make_plan(
    planner: &mut Planner,
    pairing: &Pairing,
    spec: &ChunkSpec,
    d: &Destination,
) -> Result<WritePlan, String> {
    let slice = (u64::from(spec.index_slice.start), u64::from(spec.index_slice.end));
    let pages = dst_slice(&d.pages, slice, &spec.pages).map_err(|e| e.to_string())?;
    if pages.truncated > 0 {
        tracing::warn!(
            "decode {} announced {} pages fewer than are sent; those are not written",
            d.endpoint,
            pages.truncated
        );
    }
    let mut plan = planner.plan_chunk(pairing, pages.src, pages.dst).map_err(|e| e.to_string())?;
    if spec.is_last && d.writes_aux && !pairing.aux().is_empty() {
        match (spec.aux_index, d.aux_index) {
            (Some(src_slot), Some(dst_slot)) => {
                plan.append(planner.plan_aux(pairing, src_slot, dst_slot).map_err(|e| e.to_string())?);
            }
            // Decode reads its slot after Success: one that nobody wrote is no success.
            (None, Some(slot)) => {
                return Err(format!("decode waits for its metadata slot {slot}, but init() named no aux_index"));
            }
            (_, None) => {}
        }
    }
    Ok(plan)
}
