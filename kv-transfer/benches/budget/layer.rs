//! What our layer costs over its backend: a room through both managers against the same plan put on kv-tcp's lane.

use serde_json::json;

use crate::bulk::{Bulk, LAYERS, PAGE, room_pages};
use crate::child::number;
use crate::report::{Budget, Report, Row};
use crate::same_host::Speed;
use crate::stats::{median, shuffled_pages};
use crate::sys::process_cpu_ns;
use crate::{Options, Result};

pub const ROWS: &[&str] = &["layer_overhead"];

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    let pages = room_pages(options);
    let pool = 4 * pages;
    let mut bulk = Bulk::start(pool as u64, pool as u64)?;
    let (src, dst) = (shuffled_pages(pool, 21), shuffled_pages(pool, 22));
    let bytes = LAYERS * PAGE * pages as u64;
    let (mut ours, mut floor) = (Speed::default(), Speed::default());
    let rounds = options.rounds(16);
    for round in 0..=rounds {
        let at = round % 4 * pages;
        let (src, dst) = (&src[at..at + pages], &dst[at..at + pages]);
        let cpu = process_cpu_ns();
        let reply = bulk.peer.ask(&json!({ "do": "bare", "src": src, "dst": dst }))?;
        let cpu = process_cpu_ns() - cpu + number(&reply, "cpu")?;
        let batch = bulk.rooms(src, &[dst.to_vec()], 1)?;
        if round > 0 {
            floor.add(bytes, number(&reply, "ns")?, cpu);
            ours.add(bytes, batch.ns, batch.cpu);
        }
    }
    report.add(Row {
        row: ROWS[0].into(),
        ours: ours.median(),
        peer: floor.median(),
        unit: "GB/s",
        budget: Budget::RatioAtLeast(0.95),
        cpu: format!("{:.3} | {:.3} s/GB", median(&ours.cpu), median(&floor.cpu)),
        note: format!(
            "{rounds} rooms one by one, {LAYERS} layers x {pages} shuffled pages of 16 KiB; floor: bare lane"
        ),
    });
    Ok(())
}
