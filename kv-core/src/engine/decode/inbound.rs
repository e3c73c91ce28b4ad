//! What arrives from prefill: statuses and ABORT_ACKs, and how far they may be believed.

use super::*;

/// Who a message comes from.
enum Source {
    /// A rank that is not known to be ours.
    Sglang,
    /// The process that was asked, about this life.
    Ours(ExtPeer),
    /// Another process in the place of the one that was asked, about this life.
    Successor,
    /// About another life, or by somebody who should have named one.
    Stale,
}

impl DecodeShard {
    pub(super) fn message(&mut self, now: Timestamp, frames: &[bytes::Bytes], control: &mut dyn ControlPlane) {
        self.stats.messages_in.inc();
        let dialect = self.hooks.dialect();
        let parsed = dialect.parse_to_decode(frames, &self.config.limits).and_then(|message| {
            let ours = self.config.extension.is_some();
            let ext = if ours { dialect.extension(message.kind(), frames)? } else { None };
            Ok((message, ext))
        });
        match parsed {
            Ok((_, Some(ext))) if !self.is_for_us(&ext) => self.stats.messages_stale.inc(),
            Ok((ToDecode::Status(status), ext)) => self.status(now, status, ext, control),
            Ok((ToDecode::AbortAck(ack), ext)) => self.abort_ack(now, &ack, ext, control),
            // Staging and aux by message are not offered by this rank, so nobody of ours sends these.
            Ok(_) => self.stats.protocol_violations.inc(),
            Err(error) => self.malformed.report(&self.stats, &error),
        }
    }

    /// Spoken to this process, and not to an earlier one at our address (F56).
    fn is_for_us(&self, ext: &Extension) -> bool {
        ext.to.is_none_or(|to| self.config.extension.is_some_and(|us| us.process == to))
    }

    fn checks_tags_of(&self, peer: &ExtPeer) -> bool {
        let tag = ExtCapabilities::TAG;
        peer.capabilities.has(tag) && self.config.extension.is_some_and(|us| us.capabilities.has(tag))
    }

    /// How far a message of a prefill rank about a room may be believed.
    fn source(&self, key: RoomKey, rank: PrefillRank, ext: Option<&Extension>) -> Source {
        let Some(e) = self.rooms.get(key) else { return Source::Stale };
        let known = e.room.peers().and_then(|p| p.records.iter().find(|r| r.rank == rank)).and_then(|r| r.ext);
        match (known.filter(|_| self.config.extension.is_some()), ext) {
            (None, _) => Source::Sglang,
            // A life is named in everything a rank of ours says (F6).
            (Some(_), Some(ext)) if ext.room_generation != Some(e.shared.life()) => Source::Stale,
            (Some(known), Some(ext)) if known.process == ext.from.process => Source::Ours(known),
            (Some(_), Some(_)) => Source::Successor,
            (Some(_), None) => Source::Stale,
        }
    }

    fn status(&mut self, now: Timestamp, status: KvStatus, ext: Option<Extension>, control: &mut dyn ControlPlane) {
        let room = Room::new(status.room);
        let Some(&key) = room.and_then(|r| self.by_room.get(&r)) else {
            if let (Some(room), true) = (room, mutant!(LateStatusCreatesRoom)) {
                self.by_room.entry(room).or_default();
            }
            return self.stats.messages_stale.inc();
        };
        let source = self.source(key, status.prefill_rank, ext.as_ref());
        if matches!(source, Source::Ours(_)) && ext.is_some_and(|e| e.register_again) {
            // It gave us up for others, or what we sent was lost. The next room registers.
            self.drive(now, key, ReceiverEvent::Status(status), control);
            return self.forget_peers_of(key);
        }
        match source {
            Source::Sglang => self.drive(now, key, ReceiverEvent::Status(status), control),
            Source::Ours(peer) if self.checks_tags_of(&peer) => {
                self.drive(now, key, ReceiverEvent::StatusOf(status, ext.and_then(|e| e.tag)), control);
            }
            Source::Ours(_) => self.drive(now, key, ReceiverEvent::Status(status), control),
            // It refuses what was meant for the process before it; what that one wrote nobody knows.
            Source::Successor if status.status == KvPoll::Failed => {
                self.drive(now, key, ReceiverEvent::Status(status), control);
                self.forget_peers_of(key);
            }
            Source::Successor | Source::Stale => self.stats.messages_stale.inc(),
        }
    }

    fn abort_ack(&mut self, now: Timestamp, ack: &AbortAck, ext: Option<Extension>, control: &mut dyn ControlPlane) {
        let key = self.by_generation.get(&ack.generation).copied();
        let Some(key) = key.filter(|k| self.rooms.get(*k).is_some_and(|e| e.room.room().get() == ack.room)) else {
            return self.stats.messages_stale.inc();
        };
        match self.source(key, ack.prefill_rank, ext.as_ref()) {
            Source::Stale => self.stats.messages_stale.inc(),
            Source::Sglang | Source::Ours(_) => {
                self.drive(now, key, ReceiverEvent::AbortAck(ack.prefill_rank, ack.generation), control);
            }
            // It answers at the very endpoint that the ABORT went to, so the process before it is gone.
            Source::Successor => self.drive(now, key, ReceiverEvent::RankDead(ack.prefill_rank), control),
        }
    }
}
