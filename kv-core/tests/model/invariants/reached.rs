//! What the exploration must come across.

use kv_core::poll::KvPoll;
use kv_core::room::ReceiverRoom;
use stateright::Property;

use crate::setup::Setup;
use crate::state::State;

/// In every universe.
pub const SUCCESS: &str = "reached: Success on both sides";
/// Where writes fail: pages wait for a proof that comes later.
pub const RETAINED: &str = "reached: pages wait for a retained write";
/// Where pages may go by timeout.
pub const NO_PROOF: &str = "reached: pages were freed without proof";
/// Where a number is used again.
pub const LATER_LIFE: &str = "reached: Success of a later life";

pub fn properties() -> Vec<Property<Setup>> {
    vec![
        Property::sometimes(SUCCESS, |_, s: &State| {
            let mut rooms = s.senders().map(|r| r.2.poll()).chain(s.receivers().map(|r| r.2.poll()));
            s.senders().next().is_some() && s.receivers().next().is_some() && rooms.all(|p| p == KvPoll::Success)
        }),
        Property::sometimes(RETAINED, |_, s: &State| {
            let armed = |r: &ReceiverRoom| r.armed_generation().is_some();
            let waits = |s: &State, d, life| s.receiver(d, life).is_some_and(armed);
            s.ops.iter().any(|o| o.told && o.may_land && waits(s, o.d, o.d_life))
        }),
        Property::sometimes(NO_PROOF, |_, s: &State| s.d.iter().flat_map(|n| &n.lives).any(|l| l.without_proof)),
        Property::sometimes(LATER_LIFE, |_, s: &State| {
            s.receivers().any(|(_, life, r)| life > 0 && r.poll() == KvPoll::Success)
        }),
    ]
}
