//! Rows, their budgets, and how they are printed.

use serde_json::{Value, json};

use crate::sys;

/// What a row is held to.
#[derive(Clone, Copy)]
pub enum Budget {
    /// ours / floor at most this.
    RatioAtMost(f64),
    /// ours / floor at least this.
    RatioAtLeast(f64),
    /// ours at most this, in the row's unit.
    AtMost(f64),
    /// ours at least this, in the row's unit.
    AtLeast(f64),
    /// Shown only.
    None,
}

impl Budget {
    fn text(self) -> String {
        match self {
            Self::RatioAtMost(x) => format!("ratio <= {x}"),
            Self::RatioAtLeast(x) => format!("ratio >= {x}"),
            Self::AtMost(x) => format!("<= {x}"),
            Self::AtLeast(x) => format!(">= {x}"),
            Self::None => "-".to_owned(),
        }
    }

    fn verdict(self, ours: f64, ratio: f64) -> &'static str {
        let met = match self {
            Self::RatioAtMost(x) => ratio <= x,
            Self::RatioAtLeast(x) => ratio >= x,
            Self::AtMost(x) => ours <= x,
            Self::AtLeast(x) => ours >= x,
            Self::None => return "-",
        };
        if met { "met" } else { "MISSED" }
    }
}

/// One line of the table.
pub struct Row {
    pub row: String,
    pub ours: f64,
    /// The floor, measured in the same run.
    pub peer: f64,
    pub unit: &'static str,
    pub budget: Budget,
    /// CPU of ours and of the floor, with their unit.
    pub cpu: String,
    /// What the floor is, and whatever else belongs to the row.
    pub note: String,
}

impl Row {
    fn ratio(&self) -> f64 {
        self.ours / self.peer
    }

    fn verdict(&self) -> &'static str {
        self.budget.verdict(self.ours, self.ratio())
    }
}

/// Three significant digits, without an exponent.
fn short(x: f64) -> String {
    match x.abs() {
        a if !a.is_finite() => "-".to_owned(),
        a if a >= 100.0 => format!("{x:.0}"),
        a if a >= 10.0 => format!("{x:.1}"),
        a if a >= 1.0 => format!("{x:.2}"),
        _ => format!("{x:.3}"),
    }
}

/// The rows so far.
#[derive(Default)]
pub struct Report {
    rows: Vec<(Row, f64)>,
    head: bool,
}

impl Report {
    /// Add a row and print it.
    pub fn add(&mut self, row: Row) {
        if !self.head {
            self.head = true;
            println!(
                "{:<24} {:>9} {:>9} {:>6}  {:<12} {:<14} {:<6}  {:<38} note",
                "row", "ours", "floor", "ratio", "unit", "budget", "", "CPU ours | floor"
            );
        }
        println!(
            "{:<24} {:>9} {:>9} {:>6.3}  {:<12} {:<14} {:<6}  {:<38} {}",
            row.row,
            short(row.ours),
            short(row.peer),
            row.ratio(),
            row.unit,
            row.budget.text(),
            row.verdict(),
            row.cpu,
            row.note
        );
        self.rows.push((row, sys::load()));
    }

    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// A table for a document.
    pub fn markdown(&self) -> String {
        let mut out = String::from(
            "| row | ours | floor | ratio | unit | budget | verdict | CPU ours / floor | note |\n\
             |---|---:|---:|---:|---|---|---|---|---|\n",
        );
        for (r, _) in &self.rows {
            let cells = [
                format!("`{}`", r.row),
                short(r.ours),
                short(r.peer),
                format!("{:.3}", r.ratio()),
                r.unit.to_owned(),
                r.budget.text(),
                r.verdict().to_owned(),
                r.cpu.replace('|', "/"),
                r.note.clone(),
            ];
            out += &format!("| {} |\n", cells.join(" | "));
        }
        out
    }

    /// One array, for machines.
    pub fn json(&self) -> Value {
        let row = |(r, load): &(Row, f64)| {
            json!({
                "row": r.row, "ours": r.ours, "peer": r.peer, "ratio": r.ratio(), "unit": r.unit,
                "budget": r.budget.text(), "verdict": r.verdict(), "cpu": r.cpu, "note": r.note, "load": load,
            })
        };
        Value::Array(self.rows.iter().map(row).collect())
    }
}
