//! Rooms of a model's shape over Mooncake's TCP, through the managers and through the lane alone, beside the library bare with
//! the same descriptors and window, and beside its Python module.

use serde_json::{Value, json};

use super::pair::DECODE;
use super::work::Shape;
use crate::child::{Peer, number};
use crate::report::{Budget, Report, Row};
use crate::same_host::Speed;
use crate::stats::median;
use crate::{Options, Result};

pub const ROWS: &[&str] = &[
    "mooncake_16k",
    "mooncake_lane_16k",
    "mooncake_python_16k",
    "mooncake_4k",
    "mooncake_lane_4k",
    "mooncake_python_4k",
];

/// Rooms of one turn, and how many at a time.
const ROOMS: u64 = 4;
const IN_FLIGHT: u64 = 2;
/// Ways to use the bare library, of which the best counts: tasks of a batch, us between two looks. The window is ours.
pub const WAYS: [(u64, u64); 3] = [(128, 0), (512, 0), (128, 20)];
pub const WINDOW: u64 = 512;
/// Ways to use its Python module, of which the best counts: pieces of a batch (it fails beyond 2048), threads.
const PYTHON: [(u64, u64); 3] = [(512, 1), (1024, 1), (512, 2)];

/// Layers, pages and bytes of a page of a room.
const SHAPES: [(u64, u64, u64, &str); 2] = [(32, 64, 16 << 10, "16k"), (64, 128, 4 << 10, "4k")];

pub fn best(speeds: &[Speed]) -> Option<&Speed> {
    speeds.iter().filter(|s| !s.gb_s.is_empty()).max_by(|a, b| a.median().total_cmp(&b.median()))
}

pub fn run(options: &Options, report: &mut Report) -> Result<()> {
    for (layers, pages, page, size) in SHAPES {
        let names = ["", "lane_", "python_"].map(|kind| format!("mooncake_{kind}{size}"));
        if names.iter().any(|n| options.wants(n)) {
            let pages = if options.quick { pages / 4 } else { pages };
            one_shape(options, report, Shape::new(layers, pages, page), &names)?;
        }
    }
    Ok(())
}

fn one_shape(options: &Options, report: &mut Report, shape: Shape, names: &[String; 3]) -> Result<()> {
    let mut peer = Peer::start(DECODE)?;
    let hello = peer.ask(&shape.to_json())?;
    let bytes = shape.room_bytes() * ROOMS;
    let mut turn = |what: Value, speed: &mut Speed, counts: bool| -> Result<()> {
        let reply = peer.ask(&what)?;
        if counts {
            speed.add(bytes, number(&reply, "ns")?, number(&reply, "cpu")?);
        }
        Ok(())
    };
    let (mut rooms, mut lane) = (Speed::default(), Speed::default());
    let (mut bare, mut python) = (WAYS.map(|_| Speed::default()), PYTHON.map(|_| Speed::default()));
    let rounds = options.rounds(10);
    // The first round connects.
    for round in 0..=rounds {
        let counts = round > 0;
        for ((batch, pause), speed) in WAYS.iter().zip(&mut bare) {
            let what = json!({ "do": "bare", "count": ROOMS, "batch": batch, "window": WINDOW, "pause_us": pause });
            turn(what, speed, counts)?;
        }
        turn(json!({ "do": "rooms", "count": ROOMS, "in_flight": IN_FLIGHT }), &mut rooms, counts)?;
        turn(json!({ "do": "lane", "count": ROOMS }), &mut lane, counts)?;
        if hello["python"].is_string() && options.wants(&names[2]) {
            for ((cut, threads), speed) in PYTHON.iter().zip(&mut python) {
                turn(json!({ "do": "python", "count": ROOMS, "cut": cut, "threads": threads }), speed, counts)?;
            }
        }
    }
    let g = shape.pool;
    let what = format!(
        "{rounds} x {ROOMS} rooms of {} MiB ({} layers, pages of {} KiB shuffled), {IN_FLIGHT} at a time",
        shape.room_bytes() >> 20,
        g.layers,
        g.page >> 10
    );
    let each = |speeds: &[Speed]| speeds.iter().map(|s| format!("{:.3}", s.median())).collect::<Vec<_>>().join(", ");
    let bare_note =
        format!("{what}; floor: the best of bare in batches of 128, of 512, of 128 with 20 us rests: {}", each(&bare));
    let python_note = format!(
        "{what}; floor: {}, batch_transfer_sync_write, the best of batches of 512, of 1024, of 512 by 2 threads: {}",
        hello["python"].as_str().unwrap_or_default(),
        each(&python)
    );
    let mut add = |name: &String, ours: &Speed, floor: Option<&Speed>, budget: Budget, note: String| match floor {
        Some(floor) if options.wants(name) => report.add(Row {
            row: name.clone(),
            ours: ours.median(),
            peer: floor.median(),
            unit: "GB/s",
            budget,
            cpu: format!("{:.3} | {:.3} s/GB", median(&ours.cpu), median(&floor.cpu)),
            note,
        }),
        None if options.wants(name) => {
            println!("skipped: {name}: no Python with mooncake.engine; `cargo xtask setup interop` makes one");
        }
        _ => {}
    };
    add(&names[0], &rooms, best(&bare), Budget::RatioAtLeast(0.95), bare_note.clone());
    add(&names[1], &lane, best(&bare), Budget::RatioAtLeast(0.95), bare_note);
    add(&names[2], &rooms, best(&python), Budget::RatioAtLeast(1.0), python_note);
    Ok(())
}
