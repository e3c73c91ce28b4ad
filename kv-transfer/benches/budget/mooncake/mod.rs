//! Rows of kv-mooncake, beside the library driven bare in the same processes, and beside its Python module.

mod bare;
mod bulk;
mod pair;
mod python;
mod small;
mod work;

use crate::report::Report;
use crate::{Group, Options, Result, Role};

pub const GROUPS: &[Group] = &[
    Group { rows: bulk::ROWS, run: |o, r| here(bulk::run, o, r) },
    Group { rows: small::ROWS, run: |o, r| here(small::run, o, r) },
];

pub const ROLES: &[(&str, Role)] = &[(pair::DECODE, pair::decode), (pair::PREFILL, pair::prefill)];

/// Measure, unless the library is not on this machine.
fn here(run: fn(&Options, &mut Report) -> Result<()>, options: &Options, report: &mut Report) -> Result<()> {
    if !mooncake_sys::places(None).iter().any(|p| p.path.exists()) {
        println!("skipped: Mooncake rows: no libtransfer_engine.so here; `cargo xtask setup mooncake` fetches it");
        return Ok(());
    }
    run(options, report)
}
