//! Judges what actors did. Strict: whatever is not as the case says is a fault.

use std::collections::BTreeMap;

use super::case::{Case, Check, End, Fail, Outcome};
use super::event::Event;
use super::frames;
use super::play::{Acted, Played};
use super::program::{Backend, Direction, Program};

/// Exit status of a peer with rooms that failed.
const ROOMS_FAILED: i32 = 3;
/// Exit status of a decode that cannot use the prefill it found.
const REFUSED: i32 = 4;
const KILLED: i32 = -9;

/// What is said where a reason was not heard: Mooncake's status messages have none, and SGLang's prefill has none of its
/// own for what its Mooncake workers meet.
const UNSAID: [&str; 2] =
    ["failed to get kvcache from prefill instance", "failed due to an unknown reason from another rank"];

/// What is wrong; nothing: the case passed.
pub fn judge(case: &Case, direction: Direction, backend: Backend, played: &Played) -> Vec<String> {
    let mut faults: Vec<String> = played.stuck.iter().cloned().collect();
    for acted in &played.actors {
        let name = format!("{} ({})", acted.who.name(), acted.program.name());
        faults.extend(actor(case, direction, backend, acted).into_iter().map(|f| format!("{name}: {f}")));
    }
    for check in &case.checks {
        match check {
            Check::PlainFrames => faults.extend(frames::check(direction, backend, &played.actors)),
        }
    }
    faults
}

fn actor(case: &Case, direction: Direction, backend: Backend, acted: &Acted) -> Vec<String> {
    let mut faults = Vec::new();
    if acted.left {
        faults.push("processes were left over, and killed".to_owned());
    }
    if let Some(line) = acted.odd.first() {
        faults.push(format!("a line on standard output that is no event: {line}"));
    }
    let end = case.end_of(acted.who, direction);
    errors(acted, end, &mut faults);
    if acted.who.role() == "bootstrap" {
        exit(acted, Some(0), &mut faults);
        return faults;
    }
    rooms(case, direction, backend, acted, end, &mut faults);
    match end {
        Some(End::Killed) => exit(acted, Some(KILLED), &mut faults),
        Some(End::Refused(_)) => exit(acted, Some(REFUSED), &mut faults),
        Some(End::Any) => exit(acted, None, &mut faults),
        None => {
            let failed = acted.of("room").any(|e| e.text("status") != "Success");
            exit(acted, Some(if failed { ROOMS_FAILED } else { 0 }), &mut faults);
            summaries(acted, &mut faults);
        }
    }
    faults
}

fn exit(acted: &Acted, wanted: Option<i32>, faults: &mut Vec<String>) {
    match (acted.exit, wanted) {
        (None, _) => faults.push("did not end".to_owned()),
        (Some(got), Some(wanted)) if got != wanted => faults.push(format!("exit status {got} instead of {wanted}")),
        _ => {}
    }
}

/// Error events: none, but the one that the case is about.
fn errors(acted: &Acted, end: Option<End>, faults: &mut Vec<String>) {
    let has = |e: &Event, words: &[&str]| words.iter().all(|w| e.text("reason").contains(w));
    match end {
        Some(End::Refused(words)) => {
            let all: Vec<_> = acted.of("error").map(|e| e.text("reason").to_owned()).collect();
            if !acted.of("error").any(|e| has(e, words)) {
                faults.push(format!("no error with all of {words:?}, but {all:?}"));
            }
        }
        _ => faults.extend(acted.of("error").map(|e| format!("an error: {}", e.0))),
    }
}

/// Each rank has said how each of its rooms ended, once, and as the case has it.
fn rooms(
    case: &Case,
    direction: Direction,
    backend: Backend,
    acted: &Acted,
    end: Option<End>,
    faults: &mut Vec<String>,
) {
    let mut seen: BTreeMap<(String, u64), u64> = BTreeMap::new();
    let asked = acted.options.rooms();
    for event in acted.of("room") {
        let Some(room) = event.room() else {
            faults.push(format!("a room without a number: {}", event.0));
            continue;
        };
        if !asked.contains(&room) {
            faults.push(format!("room {room} was not asked for"));
        }
        *seen.entry((event.rank(), room)).or_default() += 1;
        if let Some(fault) = room_fault(acted, backend, event, case.outcome(acted.who, room, direction)) {
            faults.push(format!("room {room} of {}: {fault}", event.rank()));
        }
    }
    faults.extend(
        seen.iter().filter(|(_, n)| **n > 1).map(|((rank, room), n)| format!("room {room} of {rank} ended {n} times")),
    );
    // A quiet peer says nothing of rooms that succeeded; its summary counts them.
    if end.is_some() || acted.options.has("--quiet") {
        return;
    }
    let dp = acted.options.number("--dp-size").unwrap_or(1);
    for summary in acted.of("summary") {
        let mine = asked.iter().filter(|r| **r % dp == summary.dp_rank());
        for room in mine {
            let wanted = case.outcome(acted.who, *room, direction);
            if wanted != Outcome::Any && !seen.contains_key(&(summary.rank(), *room)) {
                faults.push(format!("room {room} of {} never ended", summary.rank()));
            }
        }
    }
}

fn room_fault(acted: &Acted, backend: Backend, event: &Event, wanted: Outcome) -> Option<String> {
    let status = event.text("status");
    let decode = acted.who.role() == "decode";
    if status == "Success" && decode {
        if event.flag("verified") != Some(true) {
            return Some(format!("Success, but not verified: {}", event.0));
        }
        if event.count("bad").unwrap_or(0) != 0 {
            return Some(format!("Success with wrong bytes: {}", event.0));
        }
    }
    match wanted {
        Outcome::Any => None,
        Outcome::Success if status == "Success" => None,
        Outcome::Success => Some(format!("{status} instead of Success: {}", reason(event))),
        Outcome::Either(_) if status == "Success" => None,
        Outcome::Failed(fail) | Outcome::Either(fail) => {
            if status != "Failed" {
                return Some(format!("{status} instead of Failed"));
            }
            fail_fault(acted.program, backend, event, &fail)
        }
    }
}

fn fail_fault(program: Program, backend: Backend, event: &Event, fail: &Fail) -> Option<String> {
    let text = event.text("reason");
    if text.is_empty() {
        return Some("Failed without a reason".to_owned());
    }
    let (words, text) = match program {
        Program::Sglang => (fail.sglang, text.to_owned()),
        Program::Ours => (fail.ours, text.to_lowercase()),
    };
    let has = |word: &&&str| text.contains(**word);
    let found = words.iter().filter(has).count();
    let unsaid = backend == Backend::Mooncake && UNSAID.iter().any(|u| text.to_lowercase().contains(u));
    if !unsaid && !words.is_empty() && (found == 0 || fail.all && found < words.len()) {
        return Some(format!("the reason has not {words:?}: {}", reason(event)));
    }
    if let Some(ack) = fail.ack
        && event.flag("abort_ack") != Some(ack)
    {
        return Some(format!(
            "abort_ack {} instead of {ack}",
            event.0.get("abort_ack").unwrap_or(&serde_json::Value::Null)
        ));
    }
    if let Some((least, most)) = fail.ack_ms {
        match event.number("abort_ack_ms") {
            Some(ms) if ms >= least && ms <= most => {}
            got => return Some(format!("pages released after {got:?} ms instead of {least} to {most}")),
        }
    }
    if let Some(acks) = fail.acks
        && event.count("required_acks") != Some(acks)
    {
        return Some(format!("required_acks {:?} instead of {acks}", event.count("required_acks")));
    }
    match (fail.latest_ms, event.number("latency_ms")) {
        (Some(latest), Some(ms)) if ms > latest => Some(format!("failed after {ms} ms, which is after {latest} ms")),
        _ => None,
    }
}

fn reason(event: &Event) -> &str {
    match event.text("reason") {
        "" => "no reason",
        text => text,
    }
}

/// The summaries count what the rooms said.
fn summaries(acted: &Acted, faults: &mut Vec<String>) {
    let ranks = acted.options.ranks();
    let found = acted.of("summary").count() as u64;
    if found != ranks {
        faults.push(format!("{found} summaries of {ranks} ranks"));
    }
    let quiet = acted.options.has("--quiet");
    let dp = acted.options.number("--dp-size").unwrap_or(1);
    for summary in acted.of("summary") {
        let asked = acted.options.rooms().iter().filter(|r| **r % dp == summary.dp_rank()).count() as u64;
        let mine = |ok: bool| {
            let of = acted.of("room").filter(|e| e.rank() == summary.rank());
            of.filter(|e| (e.text("status") == "Success") == ok).count() as u64
        };
        let success = if quiet { asked.saturating_sub(mine(false)) } else { mine(true) };
        let mut expect = vec![("rooms", asked), ("success", success)];
        if acted.who.role() == "decode" {
            expect.push(("corrupt", 0));
        }
        for (key, wanted) in expect {
            if summary.count(key) != Some(wanted) {
                let got = summary.0.get(key).unwrap_or(&serde_json::Value::Null);
                faults.push(format!("summary of {}: {key} {got} instead of {wanted}", summary.rank()));
            }
        }
    }
}

#[cfg(test)]
#[path = "judge_tests.rs"]
mod tests;
