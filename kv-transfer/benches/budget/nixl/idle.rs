//! CPU of a pair that is connected and has nothing to do: both processes, the library's threads included.

use serde_json::json;

use super::pair::{DECODE, Shape};
use crate::child::{Peer, number};
use crate::report::{Budget, Report, Row};
use crate::{Options, Result};

pub const ROWS: &[&str] = &["nixl_idle", "nixl_idle_tcp"];

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let secs = if options.quick { 5 } else { 10 };
    for (row, tls) in ROWS.iter().zip([None, Some("tcp")]) {
        if !options.wants(row) {
            continue;
        }
        let mut peer = Peer::start_with(DECODE, tls.map(|v| ("UCX_TLS", v)).as_slice())?;
        peer.ask(&Shape::new(2, 16, 16 << 10, 4 << 20).to_json())?;
        peer.ask(&json!({ "do": "rooms", "count": 4, "in_flight": 1 }))?;
        std::thread::sleep(std::time::Duration::from_secs(1));
        let reply = peer.ask(&json!({ "do": "idle", "secs": secs }))?;
        let share = number(&reply, "cpu")? as f64 / number(&reply, "ns")? as f64 * 100.0;
        report.add(Row {
            row: (*row).to_owned(),
            ours: share,
            peer: 1.0,
            unit: "% of a core",
            budget: Budget::AtMost(1.0),
            cpu: String::new(),
            note: format!("prefill and decode together, {secs} s; floor column: the budget"),
        });
    }
    Ok(())
}
