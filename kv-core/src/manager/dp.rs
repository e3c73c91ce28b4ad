//! How decode finds the DP rank of prefill that serves a room (protocol 2.5).

use super::PrefillIdentity;
use crate::bootstrap::types::FOLLOW_BOOTSTRAP_ROOM;
use crate::ids::Room;

/// The DP ranks of a server, and what decode knows of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DpRanks {
    size: u32,
    own: u32,
    /// Decode looks each room up.
    looked_up: bool,
}

/// What is to be done so that decode asks this rank for a room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DpRank {
    /// Nothing.
    Known,
    /// Register this DP rank for the room.
    Claim(u32),
}

impl DpRanks {
    pub(super) fn new(identity: &PrefillIdentity, load_balance_method: &str, force_register: bool) -> Self {
        let (size, own) = identity.dp();
        Self { size, own, looked_up: force_register || load_balance_method != FOLLOW_BOOTSTRAP_ROOM }
    }

    /// Whether rooms may have to be registered.
    pub(super) fn are_claimed(&self) -> bool {
        self.size > 1 && self.looked_up
    }

    /// Whether decode asks this rank for the room. `named`: by the request.
    ///
    /// 0.5.23 takes a request that names another rank, and waits for a decode that went there. And it compares and
    /// registers the attention DP rank also where decode counts replicas, so that all of them claim to be rank 0.
    pub(super) fn serves(&self, room: Room, named: Option<u32>) -> Result<DpRank, String> {
        let Self { size, own, looked_up } = *self;
        // Below `size`, so it fits.
        let by_room = (room.get() % u64::from(size.max(1))) as u32;
        match named {
            Some(named) if named != own => Err(format!(
                "prefill_dp_rank conflict: dispatched to dp_rank {own} but the request names prefill_dp_rank {named}, \
                 which decode asks for it: route the request to the rank that it names"
            )),
            Some(_) => Ok(DpRank::Known),
            None if size <= 1 => Ok(DpRank::Known),
            None if looked_up => Ok(DpRank::Claim(own)),
            None if by_room == own => Ok(DpRank::Known),
            None => Err(format!(
                "follow_bootstrap_room conflict: dispatched to dp_rank {own} but bootstrap_room {room} implies dp_rank \
                 {by_room}. To allow mixed routing, have ranks registered and looked up: force_register_dp_rank on \
                 prefill and force_query_dp_rank on decode (SGLANG_DISAGGREGATION_FORCE_QUERY_PREFILL_DP_RANK=1 on both)"
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ranks(identity: PrefillIdentity, method: &str, force: bool) -> DpRanks {
        DpRanks::new(&identity, method, force)
    }

    fn room(n: u64) -> Room {
        Room::new(n).unwrap()
    }

    #[test]
    fn r_g1_replicas_count_before_attention_dp_groups() {
        let attn = PrefillIdentity { attn_dp: (4, 3), ..PrefillIdentity::default() };
        let both = PrefillIdentity { system_dp: (2, 1), ..attn.clone() };
        assert_eq!((attn.dp(), both.dp(), PrefillIdentity::default().dp()), ((4, 3), (2, 1), (1, 0)));
        assert_eq!(ranks(both, "round_robin", false).serves(room(8), None), Ok(DpRank::Claim(1)));
    }

    #[test]
    fn r_g1_what_decode_cannot_tell_is_registered_and_what_contradicts_it_refused() {
        let attn = PrefillIdentity { attn_dp: (2, 1), ..PrefillIdentity::default() };
        let by_room = ranks(attn.clone(), FOLLOW_BOOTSTRAP_ROOM, false);
        assert_eq!((by_room.serves(room(9), None), by_room.are_claimed()), (Ok(DpRank::Known), false));
        let conflict = by_room.serves(room(8), None).unwrap_err();
        let text = "follow_bootstrap_room conflict: dispatched to dp_rank 1 but bootstrap_room 8 implies dp_rank 0. ";
        assert!(conflict.starts_with(text), "{conflict}");
        for other in [ranks(attn.clone(), FOLLOW_BOOTSTRAP_ROOM, true), ranks(attn, "total_tokens", false)] {
            assert!(other.are_claimed());
            assert_eq!([8, 9].map(|n| other.serves(room(n), None)), [Ok(DpRank::Claim(1)), Ok(DpRank::Claim(1))]);
            // The request says it to both sides.
            assert_eq!(other.serves(room(8), Some(1)), Ok(DpRank::Known));
            let conflict = other.serves(room(8), Some(0)).unwrap_err();
            assert!(conflict.starts_with("prefill_dp_rank conflict: dispatched to dp_rank 1"), "{conflict}");
        }
        // One rank needs no name.
        let only = ranks(PrefillIdentity::default(), "round_robin", true);
        assert_eq!((only.serves(room(9), None), only.are_claimed()), (Ok(DpRank::Known), false));
    }
}
