//! The figures as Markdown, for BENCHMARKS.md, and as JSON.

use std::fmt::Write as _;
use std::fs;

use serde_json::{Value, json};

use super::super::program::Direction;
use super::sample::Sample;
use super::{Cell, Load};

/// A column: its title, its value, whether larger is better, digits behind the point.
type Column = (&'static str, fn(&Sample) -> f64, bool, usize);

const BIG: [Column; 8] = [
    ("rooms/s", |s| s.rooms_per_s, true, 1),
    ("GB/s", |s| s.gb_per_s, true, 2),
    ("p50 ms", |s| s.p50_ms, false, 1),
    ("p99 ms", |s| s.p99_ms, false, 1),
    ("prefill CPU s", |s| s.prefill_cpu_s, false, 2),
    ("decode CPU s", |s| s.decode_cpu_s, false, 2),
    ("prefill CPU s/GB", Sample::prefill_cpu_per_gb, false, 3),
    ("decode CPU s/GB", Sample::decode_cpu_per_gb, false, 3),
];
const SMALL: [Column; 5] = [
    ("rooms/s", |s| s.rooms_per_s, true, 0),
    ("p50 ms", |s| s.p50_ms, false, 2),
    ("p99 ms", |s| s.p99_ms, false, 2),
    ("prefill CPU us/room", Sample::prefill_us_a_room, false, 1),
    ("decode CPU us/room", Sample::decode_us_a_room, false, 1),
];

fn columns(load: &Load) -> &'static [Column] {
    if load.small { &SMALL } else { &BIG }
}

/// Median, least and most.
fn spread(samples: &[Sample], value: fn(&Sample) -> f64) -> Option<(f64, f64, f64)> {
    let mut all: Vec<f64> = samples.iter().map(value).collect();
    all.sort_by(f64::total_cmp);
    Some((*all.get(all.len() / 2)?, *all.first()?, *all.last()?))
}

pub fn markdown(cells: &[Cell]) -> String {
    let mut out = format!("{}\n", machine());
    for small in [false, true] {
        let rows: Vec<&Cell> = cells.iter().filter(|c| c.load.small == small).collect();
        let Some(first) = rows.first() else { continue };
        let columns = columns(&first.load);
        out += "\n| load | in flight | rooms | prefill>decode | backend |";
        for (name, ..) in columns {
            let _ = write!(out, " {name} |");
        }
        out += " others |\n|---|---:|---:|---|---|";
        out += &"---:|".repeat(columns.len() + 1);
        out.push('\n');
        for cell in &rows {
            out += &line(cell, columns);
        }
    }
    out += &verdicts(cells);
    out
}

fn line(cell: &Cell, columns: &[Column]) -> String {
    let load = &cell.load;
    let rooms = cell.samples.first().map_or(0.0, |s| s.rooms);
    let (direction, backend) = (cell.pair.0, cell.pair.1.name());
    let mut out = format!("| {} | {} | {rooms:.0} | {direction} | {backend} |", load.name, load.in_flight);
    for (_, value, _, digits) in columns {
        out += &match spread(&cell.samples, *value) {
            None => " FAIL |".to_owned(),
            Some((median, _, _)) if cell.samples.len() == 1 => format!(" {median:.digits$} |"),
            Some((median, least, most)) => format!(" {median:.digits$} ({least:.digits$}..{most:.digits$}) |"),
        };
    }
    let others = spread(&cell.samples, |s| s.others).map_or(0.0, |(m, _, _)| m * 100.0);
    let _ = writeln!(out, " {others:.0} % |");
    out
}

/// Ours to ours beside SGLang to SGLang, column by column.
fn verdicts(cells: &[Cell]) -> String {
    let mut out = String::from("\n| load | ours>ours over sglang>sglang |\n|---|---|\n");
    for theirs in cells.iter().filter(|c| c.pair.0 == Direction::SGLANG_SGLANG) {
        let same = |c: &&Cell| c.load.name == theirs.load.name && c.pair == (Direction::OURS_OURS, theirs.pair.1);
        let Some(ours) = cells.iter().find(same) else { continue };
        let parts: Vec<String> = columns(&theirs.load)
            .iter()
            .filter_map(|(name, value, larger, _)| {
                let (o, t) = (spread(&ours.samples, *value)?.0, spread(&theirs.samples, *value)?.0);
                let better = if *larger { o > t } else { o < t };
                Some(format!("{name} {:.2}{}", o / t, if better { "" } else { " **WORSE**" }))
            })
            .collect();
        let _ = writeln!(out, "| {} | {} |", theirs.load.name, parts.join(", "));
    }
    out
}

fn machine() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let field = |text: &str, name: &str| {
        let line = text.lines().find(|l| l.starts_with(name)).unwrap_or_default();
        line.split_once(':').map_or("?", |(_, v)| v.trim()).to_owned()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let memory =
        field(&read("/proc/meminfo"), "MemTotal").trim_end_matches(" kB").parse::<f64>().unwrap_or(0.0) / 1048576.0;
    let (model, kernel) = (field(&read("/proc/cpuinfo"), "model name"), read("/proc/sys/kernel/osrelease"));
    format!(
        "Machine: {cores} cores ({model}), {memory:.0} GiB, Linux {}. Medians (least..most) of rounds in turns; every byte \
         verified after the window. \"others\": what other programs had of the machine. CPU seconds are of the window.",
        kernel.split('-').next().unwrap_or("?").trim()
    )
}

pub fn json(cells: &[Cell]) -> Value {
    let row = |cell: &Cell| {
        let mut row = json!({
            "load": cell.load.name,
            "says": cell.load.says,
            "in_flight": cell.load.in_flight,
            "direction": cell.pair.0.to_string(),
            "backend": cell.pair.1.name(),
            "runs": cell.samples.len(),
            "others": spread(&cell.samples, |s| s.others).map(|m| m.0),
        });
        for (name, value, _, _) in columns(&cell.load) {
            row[*name] =
                spread(&cell.samples, *value).map_or(Value::Null, |(m, a, z)| json!({"median": m, "min": a, "max": z}));
        }
        row
    };
    Value::Array(cells.iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use super::super::{LOADS, pairs};
    use super::*;
    use crate::interop::program::Backend;

    fn sample(rate: f64) -> Sample {
        Sample {
            rooms_per_s: rate,
            gb_per_s: 1.0,
            p50_ms: 2.0,
            p99_ms: 3.0,
            prefill_cpu_s: 1.0,
            decode_cpu_s: 0.5,
            gb: 2.0,
            rooms: 10.0,
            others: 0.01,
        }
    }

    #[test]
    fn medians_with_their_spread_and_what_is_worse() {
        let cell =
            |pair, rates: &[f64]| Cell { load: LOADS[0], pair, samples: rates.iter().map(|r| sample(*r)).collect() };
        let pairs = pairs(Backend::Nixl);
        let cells = [cell(pairs[0], &[5.0, 1.0, 3.0]), cell(pairs[1], &[9.0])];
        let text = markdown(&cells);
        assert!(text.contains("| c1 | 1 | 10 | sglang>sglang | nixl | 3.0 (1.0..5.0) | 1.00 (1.00..1.00) |"), "{text}");
        assert!(text.contains("| c1 | rooms/s 3.00, GB/s 1.00 **WORSE**"), "{text}");
        assert_eq!(json(&cells)[0]["rooms/s"]["median"], 3.0);
    }
}
