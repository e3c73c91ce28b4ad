//! What came of a case in a direction, and how it is shown.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use super::case::Case;
use super::play::Played;
use super::program::{Backend, Direction};

/// Lines of events and logs that are shown of an actor of a case that failed.
const SHOWN: usize = 30;

/// Characters of a line of a log that are shown.
const WIDE: usize = 400;

#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    Pass,
    Fail(Vec<String>),
    /// There is nothing to run, and why.
    Not(String),
}

#[derive(Debug, Clone)]
pub struct Row {
    pub case: &'static str,
    pub shows: &'static str,
    pub direction: Direction,
    pub backend: Backend,
    pub verdict: Verdict,
    pub note: Option<String>,
    /// It was played twice.
    pub again: bool,
    pub seconds: f64,
    pub commands: Vec<String>,
}

impl Row {
    pub fn new(case: &Case, direction: Direction, backend: Backend, verdict: Verdict) -> Self {
        let plain = Self::plain(case.name, direction, backend, verdict);
        Self { shows: case.shows, note: case.note_in(direction).map(str::to_owned), ..plain }
    }

    /// A row with no more than its verdict.
    pub fn plain(case: &'static str, direction: Direction, backend: Backend, verdict: Verdict) -> Self {
        Self {
            case,
            shows: "",
            direction,
            backend,
            verdict,
            note: None,
            again: false,
            seconds: 0.0,
            commands: Vec::new(),
        }
    }

    pub fn word(&self) -> &'static str {
        match self.verdict {
            Verdict::Pass => "pass",
            Verdict::Fail(_) => "FAIL",
            Verdict::Not(_) => "n/a",
        }
    }

    /// Why it did not pass, or what is to be said of a pass.
    pub fn why(&self) -> String {
        match &self.verdict {
            Verdict::Pass => self.note.clone().unwrap_or_default(),
            Verdict::Fail(faults) => faults.join("; "),
            Verdict::Not(why) => why.clone(),
        }
    }

    pub fn line(&self) -> String {
        let why = self.why();
        let colon = if why.is_empty() { "" } else { ": " };
        let name = format!("{} {} {}", self.case, self.direction, self.backend.name());
        format!("{:4} {name:<48} {:5.1} s{colon}{why}", self.word(), self.seconds)
    }

    pub fn json(&self) -> Value {
        json!({
            "case": self.case,
            "shows": self.shows,
            "direction": self.direction.to_string(),
            "backend": self.backend.name(),
            "result": self.word().to_lowercase(),
            "why": self.why(),
            "seconds": (self.seconds * 10.0).round() / 10.0,
            "commands": self.commands,
        })
    }
}

/// Counts of a run.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    pub passed: u64,
    pub failed: u64,
    pub not: u64,
}

impl Counts {
    pub fn of(rows: &[Row]) -> Self {
        let mut counts = Self::default();
        for row in rows {
            match row.verdict {
                Verdict::Pass => counts.passed += 1,
                Verdict::Fail(_) => counts.failed += 1,
                Verdict::Not(_) => counts.not += 1,
            }
        }
        counts
    }
}

/// Markdown: a line a case and backend, a column a direction.
pub fn table(rows: &[Row]) -> String {
    let mut directions: Vec<Direction> = Vec::new();
    let mut lines: Vec<(&Row, Backend)> = Vec::new();
    for row in rows {
        if !directions.contains(&row.direction) {
            directions.push(row.direction);
        }
        if !lines.iter().any(|(r, b)| r.case == row.case && *b == row.backend) {
            lines.push((row, row.backend));
        }
    }
    let mut out = String::from("| case | what it shows | backend |");
    for d in &directions {
        let _ = write!(out, " {d} |");
    }
    out += " note |\n|---|---|---|";
    out += &"---:|".repeat(directions.len());
    out += "---|\n";
    for (first, backend) in lines {
        let _ = write!(out, "| `{}` | {} | {} |", first.case, first.shows, backend.name());
        let mut notes: Vec<String> = Vec::new();
        for d in &directions {
            let row = rows.iter().find(|r| r.case == first.case && r.backend == backend && r.direction == *d);
            match row {
                None => out += " |",
                Some(r) if matches!(r.verdict, Verdict::Not(_)) => out += " n/a |",
                Some(r) => drop(write!(out, " {} {:.1} s |", r.word(), r.seconds)),
            }
            if let Some(why) = row.map(Row::why).filter(|w| !w.is_empty()) {
                notes.push(format!("{d}: {}", why.replace('|', "/")));
            }
        }
        let _ = writeln!(out, " {} |", notes.join("; "));
    }
    out
}

/// What a person needs to see why a case failed, and to run it again.
pub fn details(row: &Row, played: &Played) -> String {
    let mut out = format!("---- {} {} {}\n", row.case, row.direction, row.backend.name());
    if let Verdict::Fail(faults) = &row.verdict {
        for fault in faults {
            let _ = writeln!(out, "  fault: {fault}");
        }
    }
    for acted in &played.actors {
        let exit = acted.exit.map_or("none".to_owned(), |c| c.to_string());
        let _ = writeln!(
            out,
            "  {} ({}), exit status {exit}:\n    {}",
            acted.who.name(),
            acted.program.name(),
            acted.command
        );
        let skipped = acted.events.len().saturating_sub(SHOWN);
        if skipped > 0 {
            let _ = writeln!(out, "    ... {skipped} events before");
        }
        for event in &acted.events[skipped..] {
            let _ = writeln!(out, "    {}", event.0);
        }
        let log = tail(&acted.log, SHOWN);
        if !log.is_empty() {
            let _ = writeln!(out, "  its log {}:", acted.log.display());
            for line in log {
                let _ = writeln!(out, "    {line}");
            }
        }
    }
    out
}

fn tail(path: &Path, lines: usize) -> Vec<String> {
    let text = fs::read(path).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default();
    let all: Vec<_> = text.lines().map(str::to_owned).collect();
    let cut = |line: &String| line.chars().take(WIDE).collect();
    all[all.len().saturating_sub(lines)..].iter().map(cut).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_line_a_case_and_a_column_a_direction() {
        let case = Case::new("one", "something");
        let mut fail = Row::new(&case, Direction::SGLANG_OURS, Backend::Nixl, Verdict::Fail(vec!["a|b".into()]));
        fail.seconds = 1.25;
        let rows = [fail, Row::new(&case, Direction::OURS_SGLANG, Backend::Nixl, Verdict::Not("later".into()))];
        let text = table(&rows);
        assert!(text.contains("| sglang>ours | ours>sglang | note |"), "{text}");
        assert!(
            text.contains("| `one` | something | nixl | FAIL 1.2 s | n/a | sglang>ours: a/b; ours>sglang: later |"),
            "{text}"
        );
        assert_eq!(Counts::of(&rows), Counts { passed: 0, failed: 1, not: 1 });
        assert_eq!(rows[0].json()["result"], "fail");
    }
}
