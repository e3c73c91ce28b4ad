//! Telling the registry which DP rank serves a room, where decode cannot tell it from the room's number (protocol 2.5).
//!
//! 0.5.23 asks once, and its scheduler waits for the answer. Here nobody waits; what fails is tried again as long as
//! decode has not come, and a room that fails before it came says what decode could not know (I2).

use slotmap::{Key, KeyData};

use super::*;

/// Where decode looks a room up, and what it must find.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Claim {
    /// `host:port` of the request's bootstrap server.
    pub bootstrap_addr: String,
    /// This rank's DP rank.
    pub dp_rank: u32,
}

/// A claim that the registry has not taken yet.
pub(super) struct Claiming {
    claim: Claim,
    since: Timestamp,
    failures: u32,
    last: Option<String>,
    /// `None` while a question is under way.
    pub retry_at: Option<Timestamp>,
}

/// A failed claim is tried again after this time, doubling up to [`RETRY_MAX`].
const RETRY_MIN: Duration = Duration::from_millis(100);
const RETRY_MAX: Duration = Duration::from_secs(5);

impl Claiming {
    fn text(&self, now: Timestamp) -> String {
        let Self { claim: Claim { bootstrap_addr, dp_rank }, failures, last, .. } = self;
        let secs = now.since(self.since).as_secs_f64();
        let how = match last {
            Some(last) => format!("{failures} attempts in {secs:.1}s, last: {last}"),
            None => format!("no answer within {secs:.1}s"),
        };
        format!(
            "decode cannot know that dp_rank {dp_rank} serves it: not registered at bootstrap_addr {bootstrap_addr}, {how}"
        )
    }
}

impl Entry {
    /// Before a deadline fails the room.
    pub(super) fn say_what_hinders(&mut self, now: Timestamp, out: &mut Vec<SenderEffect>) {
        let Some(claiming) = self.claiming.as_ref().filter(|_| self.room.poll_timeout().is_some_and(|t| t <= now))
        else {
            return;
        };
        self.room.handle_event(now, SenderEvent::Hindered(Some(claiming.text(now).into())), out);
    }
}

impl PrefillShard {
    /// Who takes [`PrefillCommand::Claim`]s; its answers come back as [`PrefillCommand::Directory`]. Without one, nothing
    /// is claimed.
    pub fn set_directory(&mut self, directory: Box<dyn Directory>) {
        self.directory = Some(directory);
    }

    pub(super) fn claim(&mut self, now: Timestamp, shared: &RoomShared, claim: Claim) {
        let Some(key) = self.find(shared) else { return };
        let Some(e) = self.rooms.get_mut(key) else { return };
        e.claiming = Some(Box::new(Claiming { claim, since: now, failures: 0, last: None, retry_at: Some(now) }));
        self.claim_again_if_due(now, key);
    }

    /// The end of the room, or of its wait for decode, ends its claim: a late one could take the place of that of the
    /// number's next life, on another rank. What waits for its turn is taken back; what is on its way to the registry is not.
    pub(super) fn end_claim_if_over(&mut self, key: RoomKey) {
        let Some(e) = self.rooms.get_mut(key) else { return };
        if e.room.poll() != KvPoll::Bootstrapping
            && e.claiming.take().is_some_and(|c| c.retry_at.is_none())
            && let Some(directory) = &mut self.directory
        {
            directory.request(DirectoryRequest::CancelDpRank { token: key.data().as_ffi() });
        }
    }

    pub(super) fn claim_again_if_due(&mut self, now: Timestamp, key: RoomKey) {
        self.end_claim_if_over(key);
        let Some(e) = self.rooms.get_mut(key) else { return };
        let Some(claiming) = e.claiming.as_mut().filter(|c| c.retry_at.is_some_and(|t| t <= now)) else { return };
        let Some(directory) = &mut self.directory else { return e.claiming = None };
        claiming.retry_at = None;
        directory.request(DirectoryRequest::RegisterDpRank {
            token: key.data().as_ffi(),
            bootstrap_addr: claiming.claim.bootstrap_addr.clone(),
            room: e.room.room(),
            dp_rank: claiming.claim.dp_rank,
        });
    }

    pub(super) fn directory_event(&mut self, now: Timestamp, event: DirectoryEvent, control: &mut dyn ControlPlane) {
        // The rest is decode's.
        let DirectoryEvent::DpRankRegistered { token, result } = event else { return };
        match &result {
            Ok(()) => self.stats.dp_ranks_registered.inc(),
            Err(_) => self.stats.dp_rank_failures.inc(),
        }
        let key = RoomKey::from(KeyData::from_ffi(token));
        let Some(e) = self.rooms.get_mut(key) else { return };
        let Some(mut claiming) = e.claiming.take() else { return };
        let hindered = match result {
            Ok(()) if claiming.failures == 0 => return,
            Ok(()) => None,
            Err(error) => {
                let room = e.room.room();
                if claiming.failures == 0 {
                    tracing::warn!(
                        "room {room}: its DP rank is not registered at {}, which is tried again: {error}",
                        claiming.claim.bootstrap_addr
                    );
                }
                let wait = RETRY_MIN.saturating_mul(1 << claiming.failures.min(6)).min(RETRY_MAX);
                claiming.failures = claiming.failures.saturating_add(1);
                claiming.last = Some(error);
                claiming.retry_at = Some(now + wait);
                let text = claiming.text(now);
                e.claiming = Some(claiming);
                Some(text.into())
            }
        };
        self.drive(now, key, SenderEvent::Hindered(hindered), control);
    }
}
