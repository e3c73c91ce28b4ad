//! Every path gives back everything. Where nothing can happen any more, not even by time: rooms are gone, pages and aux
//! slots are free, no ACK is owed. The one exception is reported by name: pages held under the policy of proof, whose
//! ABORT, or its ACK, was lost.

use kv_core::room::ReleasePolicy;

use crate::setup::Setup;
use crate::state::State;

pub const NAME: &str = "every path gives back everything";

pub fn holds(setup: &Setup, s: &State) -> bool {
    if !s.at_rest(setup) {
        return true;
    }
    let lost = s.budget.losses < setup.budget.losses;
    s.senders().next().is_none()
        && s.p.iter().all(|n| n.pending_acks.is_empty())
        && s.receivers().all(|(.., r)| {
            let named = r.armed_generation().is_some() && r.unacked().next().is_some();
            setup.release == ReleasePolicy::Proof && lost && named
        })
}
