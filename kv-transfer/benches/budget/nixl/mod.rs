//! Rows of kv-nixl, beside the library driven bare in the same processes.

mod bare;
mod bulk;
mod completion;
mod idle;
mod pair;
mod peers;
mod rooms;

use crate::report::Report;
use crate::{Group, Options, Result, Role};

pub const GROUPS: &[Group] = &[
    Group { rows: bulk::ROWS, run: |o, r| here(bulk::run, o, r) },
    Group { rows: rooms::ROWS, run: |o, r| here(rooms::run, o, r) },
    Group { rows: completion::ROWS, run: |o, r| here(completion::run, o, r) },
    Group { rows: idle::ROWS, run: |o, r| here(idle::run, o, r) },
    Group { rows: peers::ROWS, run: |o, r| here(peers::run, o, r) },
];

pub const ROLES: &[(&str, Role)] = &[
    (pair::DECODE, pair::decode),
    (pair::PREFILL, pair::prefill),
    (rooms::ROLE, rooms::role),
    (completion::ROLE, completion::role),
    (peers::OURS, peers::ours),
    (peers::BARE, peers::bare),
    (peers::TARGET, peers::target),
];

/// Measure, unless the library is not on this machine.
fn here(run: fn(&Options, &mut Report) -> Result<()>, options: &Options, report: &mut Report) -> Result<()> {
    let places = nixl_capi_sys::places(None);
    if !places.iter().any(|p| p.path.exists()) {
        println!("skipped: NIXL rows: no libnixl_capi.so here; `cargo xtask setup nixl` fetches it");
        return Ok(());
    }
    run(options, report)
}
