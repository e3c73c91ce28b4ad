//! Rooms of a model's shape over NIXL, through the managers and through the lane alone, beside the library bare.

use serde_json::{Value, json};

use super::pair::{DECODE, Shape};
use crate::child::{Peer, number};
use crate::report::{Budget, Report, Row};
use crate::same_host::Speed;
use crate::stats::median;
use crate::{Options, Result};

pub const ROWS: &[&str] = &[
    "nixl_16k",
    "nixl_lane_16k",
    "nixl_4k",
    "nixl_lane_4k",
    "nixl_16k_tcp",
    "nixl_lane_16k_tcp",
    "nixl_4k_tcp",
    "nixl_lane_4k_tcp",
];

/// Rooms of one turn, and how many at a time.
const ROOMS: u64 = 4;
const IN_FLIGHT: u64 = 2;
/// Ways to use the bare library, of which the best counts: us between two looks, and bytes of one request (0: a room).
const WAYS: [(u64, u64); 3] = [(0, 0), (20, 0), (0, 4 << 20)];

/// Layers, pages and bytes of a page of a room.
const SHAPES: [(u64, u64, u64, &str); 2] = [(32, 256, 16 << 10, "16k"), (64, 512, 4 << 10, "4k")];

/// The largest op of a run: the default, or what `KV_BENCH_MAX_OP_MIB` says.
fn max_op_bytes() -> u64 {
    let asked = std::env::var("KV_BENCH_MAX_OP_MIB").ok().and_then(|n| n.parse::<u64>().ok());
    asked.map_or(kv_transfer::nixl::NixlConfig::default().max_op_bytes, |mib| mib << 20)
}

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    for (tls, suffix) in [(None, ""), (Some("tcp"), "_tcp")] {
        for (layers, pages, page, size) in SHAPES {
            let names = [format!("nixl_{size}{suffix}"), format!("nixl_lane_{size}{suffix}")];
            if names.iter().any(|n| options.wants(n)) {
                // Over TCP a room takes several times as long.
                let pages = if options.quick || tls.is_some() { pages / 4 } else { pages };
                let shape = Shape::new(layers, pages, page, max_op_bytes());
                one_shape(options, report, shape, tls, &names)?;
            }
        }
    }
    Ok(())
}

fn one_shape(
    options: &Options,
    report: &mut Report,
    shape: Shape,
    tls: Option<&str>,
    names: &[String; 2],
) -> Result<()> {
    let mut peer = Peer::start_with(DECODE, tls.map(|v| ("UCX_TLS", v)).as_slice())?;
    peer.ask(&shape.to_json())?;
    let bytes = shape.room_bytes() * ROOMS;
    let mut turn = |what: Value, speed: &mut Speed, counts: bool| -> Result<()> {
        let reply = peer.ask(&what)?;
        if counts {
            speed.add(bytes, number(&reply, "ns")?, number(&reply, "cpu")?);
        }
        Ok(())
    };
    let (mut rooms, mut lane, mut bare) = (Speed::default(), Speed::default(), WAYS.map(|_| Speed::default()));
    let rounds = options.rounds(10);
    // The first round connects.
    for round in 0..=rounds {
        let counts = round > 0;
        for ((pause, cut), speed) in WAYS.iter().zip(&mut bare) {
            let what = json!({ "do": "bare", "count": ROOMS, "in_flight": IN_FLIGHT, "pause_us": pause, "cut": cut });
            turn(what, speed, counts)?;
        }
        turn(json!({ "do": "rooms", "count": ROOMS, "in_flight": IN_FLIGHT }), &mut rooms, counts)?;
        turn(json!({ "do": "lane", "count": ROOMS }), &mut lane, counts)?;
    }
    let best = bare.iter().max_by(|a, b| a.median().total_cmp(&b.median())).ok_or("no floor")?;
    let g = shape.pool;
    for (name, ours) in names.iter().zip([&rooms, &lane]) {
        if !options.wants(name) {
            continue;
        }
        report.add(Row {
            row: name.clone(),
            ours: ours.median(),
            peer: best.median(),
            unit: "GB/s",
            budget: Budget::RatioAtLeast(0.95),
            cpu: format!("{:.3} | {:.3} s/GB", median(&ours.cpu), median(&best.cpu)),
            note: format!(
                "{rounds} x {ROOMS} rooms of {} MiB ({} layers, pages of {} KiB shuffled), {IN_FLIGHT} at a time; ops of {} MiB; \
                 floor: the best of bare with prepared lists and a request a room, looked at without a rest ({:.3}), \
                 every 20 us ({:.3}), and requests of 4 MiB without a rest ({:.3})",
                shape.room_bytes() >> 20,
                g.layers,
                g.page >> 10,
                shape.max_op_bytes >> 20,
                bare[0].median(),
                bare[1].median(),
                bare[2].median(),
            ),
        });
    }
    Ok(())
}
