//! Success means that every byte is in place: on decode of every prefill rank, on prefill at every decode rank (B1, B2).

use kv_core::poll::KvPoll;

use crate::setup::Setup;
use crate::state::State;

pub const NAME: &str = "Success implies that every byte landed";

pub fn holds(setup: &Setup, s: &State) -> bool {
    let chunks = usize::from(setup.chunks);
    let landed = |f: &dyn Fn(&crate::state::Op) -> bool| s.ops.iter().filter(|o| o.landed && f(o)).count();
    let success = |poll: KvPoll| poll == KvPoll::Success;
    s.receivers()
        .filter(|(.., r)| success(r.poll()))
        .all(|(d, life, _)| landed(&|o| (o.d, o.d_life) == (d, life)) >= chunks * usize::from(setup.prefills))
        && s.senders()
            .filter(|(.., r)| success(r.poll()))
            .all(|(p, life, _)| landed(&|o| (o.p, o.life) == (p, life)) >= chunks * usize::from(setup.decodes))
}
