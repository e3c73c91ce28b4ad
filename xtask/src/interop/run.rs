//! A run: builds what is needed, starts the SGLang server once, plays the cases side by side.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use super::case::Case;
use super::judge::judge;
use super::launch::{self, Launcher};
use super::play::{self, Stage};
use super::port;
use super::program::{Backend, Direction, Program};
use super::row::{self, Row, Verdict};
use super::server::Server;
use crate::setup;
use crate::sh::{self, Result};

/// The program of ours that is used instead of building one.
const KVT: &str = "KVT";

/// What to run.
pub struct Plan {
    pub cases: Vec<Case>,
    pub directions: Vec<Direction>,
    pub backends: Vec<Backend>,
    pub record: Option<PathBuf>,
    pub jobs: Option<usize>,
    /// Play once more, alone, what failed; but never what has wrong bytes.
    pub again: bool,
}

/// Play everything; the rows in the order of the cases.
pub fn all(plan: &Plan) -> Result<Vec<Row>> {
    let mut todo = VecDeque::new();
    for case in &plan.cases {
        for backend in &plan.backends {
            todo.extend(plan.directions.iter().map(|d| (todo.len(), case, *backend, *d)).collect::<Vec<_>>());
        }
    }
    let runs = |p: Program| todo.iter().any(|(_, case, b, d)| b.lacks(*d).is_none() && case.plays(p, *d));
    let launcher = launcher(runs(Program::Ours).then_some(&plan.backends), runs(Program::Sglang), "quick")?;
    if let Some(folder) = &plan.record {
        make(folder)?;
    }
    let jobs = plan.jobs.unwrap_or_else(|| std::thread::available_parallelism().map_or(2, |n| n.get().clamp(2, 4)));
    eprintln!("interop: {} runs, {jobs} at a time; logs: {}", todo.len(), launcher.logs.display());
    let (todo, rows) = (Mutex::new(todo), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                loop {
                    let next = todo.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
                    let Some((n, case, backend, direction)) = next else { return };
                    let stage = Stage { launcher: &launcher, backend, captures: plan.record.clone() };
                    let (row, details) = one(&stage, case, direction);
                    let mut rows = rows.lock().unwrap_or_else(PoisonError::into_inner);
                    eprintln!("{}{details}", row.line());
                    rows.push((n, row));
                }
            });
        }
    });
    let mut rows = rows.into_inner().unwrap_or_else(PoisonError::into_inner);
    rows.sort_by_key(|(n, _)| *n);
    let mut rows: Vec<Row> = rows.into_iter().map(|(_, r)| r).collect();
    for row in rows.iter_mut().filter(|r| plan.again && may_be_haste(&r.verdict)) {
        let Some(case) = plan.cases.iter().find(|c| c.name == row.case) else { continue };
        let stage = Stage { launcher: &launcher, backend: row.backend, captures: None };
        let (mut second, details) = one(&stage, case, row.direction);
        second.again = true;
        if second.verdict == Verdict::Pass {
            second.note = Some(format!("at the second try, alone; at the first: {}", row.why()));
        }
        eprintln!("again: {}{details}", second.line());
        *row = second;
    }
    Ok(rows)
}

/// Times of a case are seconds, and the machine may have had none for it. Wrong bytes are never that.
fn may_be_haste(verdict: &Verdict) -> bool {
    let wrong = |fault: &String| ["wrong bytes", "not verified", "corrupt", "stray"].iter().any(|w| fault.contains(w));
    matches!(verdict, Verdict::Fail(faults) if !faults.iter().any(wrong))
}

/// One case in one direction, and what a person should see of it when it failed.
fn one(stage: &Stage<'_>, case: &Case, direction: Direction) -> (Row, String) {
    let not = stage.backend.lacks(direction).or(case.not_in(direction, stage.backend));
    let not = not.map(str::to_owned);
    let not = not.or_else(|| play::host(case).ok().and_then(port::missing));
    if let Some(why) = not {
        return (Row::new(case, direction, stage.backend, Verdict::Not(why)), String::new());
    }
    match play::play(stage, case, direction) {
        Err(e) => (Row::new(case, direction, stage.backend, Verdict::Fail(vec![e])), String::new()),
        Ok(played) => {
            let faults = judge(case, direction, stage.backend, &played);
            let failed = !faults.is_empty();
            let verdict = if failed { Verdict::Fail(faults) } else { Verdict::Pass };
            let mut row = Row::new(case, direction, stage.backend, verdict);
            row.seconds = played.took.as_secs_f64();
            row.commands = played.actors.iter().map(|a| a.command.clone()).collect();
            let details = if failed { format!("\n{}", row::details(&row, &played)) } else { String::new() };
            (row, details)
        }
    }
}

/// The programs that a run needs. `ours`: the backends that ours has part in. SGLang is imported once, here.
pub fn launcher(ours: Option<&Vec<Backend>>, sglang: bool, profile: &str) -> Result<Launcher> {
    let target = setup::target()?;
    let logs = target.join("interop").join("logs");
    make(&logs)?;
    let kvt = if ours.is_some() { Some(kvt(&target, profile)?) } else { None };
    let mut libraries = Vec::new();
    for backend in ours.into_iter().flatten() {
        libraries.extend(setup::library_of(backend.name())?);
    }
    let (mut python, mut server) = (None, None);
    if sglang {
        let found = setup::interop::python(&target)?;
        eprintln!("interop: importing SGLang ...");
        let mut command = launch::sglang_peer(&found);
        command.arg("serve");
        server = Some(Arc::new(Server::start(command, &logs.join("server.log"))?));
        python = Some(found);
    }
    Ok(Launcher { kvt, libraries, python, server, logs })
}

/// Our program: the one that is named, or built here.
fn kvt(target: &Path, profile: &str) -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(KVT).filter(|v| !v.is_empty()).map(PathBuf::from) {
        eprintln!("interop: {KVT} is set, nothing is built: {}", path.display());
        return if path.is_file() { Ok(path) } else { Err(format!("{KVT}={}: there is no such file", path.display())) };
    }
    eprintln!("interop: building kvt ...");
    sh::run(&mut sh::cargo([
        "build",
        "--profile",
        profile,
        "--locked",
        "--quiet",
        "-p",
        "kv-transfer-cli",
        "--bin",
        "kvt",
    ]))?;
    Ok(target.join(profile).join("kvt"))
}

fn make(folder: &Path) -> Result<()> {
    std::fs::create_dir_all(folder).map_err(|e| format!("cannot make {}: {e}", folder.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_bytes_are_never_played_again() {
        let fail = |text: &str| may_be_haste(&Verdict::Fail(vec!["x".into(), text.into()]));
        assert!(fail("room 100: Timeout instead of Success"));
        assert!(!fail("room 100: Success with wrong bytes: {}") && !fail("summary: corrupt 1 instead of 0"));
        assert!(!may_be_haste(&Verdict::Pass));
    }
}
