//! Each thing that a peer can do wrong is a fault.

use std::path::PathBuf;
use std::time::Duration;

use super::super::case::Who;
use super::*;

const DIRECTION: Direction = Direction::SGLANG_OURS;

fn acted(case: &Case, who: Who, exit: i32, lines: &[&str]) -> Acted {
    Acted {
        who,
        program: case.program(who, DIRECTION),
        options: case.options(who),
        command: String::new(),
        log: PathBuf::new(),
        events: lines.iter().map(|l| Event::parse(l).unwrap()).collect(),
        odd: Vec::new(),
        exit: Some(exit),
        left: false,
    }
}

fn judged(case: &Case, actors: Vec<Acted>) -> Vec<String> {
    judge(case, DIRECTION, Backend::Nixl, &Played { actors, stuck: None, took: Duration::ZERO })
}

fn one_room() -> Case {
    Case::new("x", "").both("--rooms 7:1")
}

const GOOD: &str = r#"{"event":"room","room":7,"status":"Success","verified":true,"bad":0}"#;
const COUNTED: &str = r#"{"event":"summary","rooms":1,"success":1,"corrupt":0}"#;
const FAILED: &str = r#"{"event":"room","room":7,"status":"Failed","reason":"Request 7 timed out","abort_ack":true,"abort_ack_ms":12.0,"required_acks":2,"latency_ms":3000}"#;
const LOST: &str = r#"{"event":"summary","rooms":1,"success":0,"corrupt":0}"#;

fn faults_of(case: &Case, exit: i32, lines: &[&str]) -> String {
    judged(case, vec![acted(case, Who::Decode, exit, lines)]).join("; ")
}

#[test]
fn what_is_as_it_should_be_has_no_fault() {
    assert_eq!(faults_of(&one_room(), 0, &[GOOD, COUNTED]), "");
}

#[test]
fn a_success_must_be_verified_and_counted_once() {
    let case = one_room();
    let unverified = r#"{"event":"room","room":7,"status":"Success"}"#;
    assert!(faults_of(&case, 0, &[unverified, COUNTED]).contains("not verified"));
    let wrong = r#"{"event":"room","room":7,"status":"Success","verified":true,"bad":3}"#;
    assert!(faults_of(&case, 0, &[wrong, COUNTED]).contains("wrong bytes"));
    assert!(faults_of(&case, 0, &[GOOD, GOOD, COUNTED]).contains("ended 2 times"));
    assert!(faults_of(&case, 0, &[COUNTED]).contains("never ended"));
    let corrupt = r#"{"event":"summary","rooms":1,"success":1,"corrupt":1}"#;
    assert!(faults_of(&case, 0, &[GOOD, corrupt]).contains("corrupt 1 instead of 0"));
    assert!(faults_of(&case, 0, &[GOOD]).contains("0 summaries of 1 ranks"));
    let other = r#"{"event":"room","room":8,"status":"Success","verified":true}"#;
    assert!(faults_of(&case, 0, &[GOOD, other, COUNTED]).contains("room 8 was not asked for"));
}

#[test]
fn errors_odd_lines_exits_and_left_processes_are_faults() {
    let case = one_room();
    let error = r#"{"event":"error","reason":"boom"}"#;
    assert!(faults_of(&case, 0, &[GOOD, error, COUNTED]).contains("boom"));
    assert!(faults_of(&case, 3, &[GOOD, COUNTED]).contains("exit status 3 instead of 0"));
    let mut decode = acted(&case, Who::Decode, 0, &[GOOD, COUNTED]);
    decode.left = true;
    decode.odd.push("Traceback".into());
    decode.exit = None;
    let faults = judged(&case, vec![decode]).join("; ");
    for part in ["left over", "no event: Traceback", "did not end"] {
        assert!(faults.contains(part), "{faults}");
    }
    let stuck = Played { actors: Vec::new(), stuck: Some("after 9 s".into()), took: Duration::ZERO };
    assert_eq!(judge(&case, DIRECTION, Backend::Nixl, &stuck), ["after 9 s"]);
}

#[test]
fn a_failure_must_be_the_one_that_is_expected() {
    let expect = |fail| one_room().rule(Who::Decode, "", Outcome::Failed(fail));
    let faults = |fail: Fail| faults_of(&expect(fail), 3, &[FAILED, LOST]);
    let timed_out = Fail::says(&[], &["timed out"]);
    assert_eq!(faults(timed_out.ack_between(0.0, 100.0).acks(2).by_ms(3500.0)), "");
    assert!(faults(Fail::says(&[], &["abort"])).contains("the reason has not"));
    assert!(faults(Fail::says(&[], &["timed out", "9"]).all_words()).contains("the reason has not"));
    assert!(faults(timed_out.unacked(0.0, 100.0)).contains("abort_ack true instead of false"));
    assert!(faults(timed_out.ack_between(50.0, 100.0)).contains("pages released after"));
    assert!(faults(timed_out.acks(1)).contains("required_acks"));
    assert!(faults(timed_out.by_ms(1000.0)).contains("after 1000 ms"));
    assert!(faults_of(&expect(Fail::ANY), 0, &[GOOD, COUNTED]).contains("Success instead of Failed"));
    assert!(faults_of(&one_room(), 3, &[FAILED, LOST]).contains("Failed instead of Success: Request 7 timed out"));
    let hung = r#"{"event":"room","room":7,"status":"Timeout"}"#;
    assert!(faults_of(&expect(Fail::ANY), 3, &[hung, LOST]).contains("Timeout instead of Failed"));
    let silent = r#"{"event":"room","room":7,"status":"Failed"}"#;
    assert!(faults_of(&expect(Fail::ANY), 3, &[silent, LOST]).contains("without a reason"));
}

#[test]
fn the_killed_need_no_summary_and_the_refused_must_name_both_values() {
    let killed = one_room().ends(Who::Decode, End::Killed).rule(Who::Decode, "", Outcome::Any);
    assert_eq!(faults_of(&killed, -9, &[]), "");
    assert!(faults_of(&killed, 0, &[GOOD, COUNTED]).contains("exit status 0 instead of -9"));
    let refused = one_room().ends(Who::Decode, End::Refused(&["32", "64"]));
    let error = r#"{"event":"error","reason":"page size 32, not 64"}"#;
    assert_eq!(faults_of(&refused, 4, &[error]), "");
    assert!(faults_of(&refused, 4, &[r#"{"event":"error","reason":"no"}"#]).contains("no error with all of"));
}

#[test]
fn the_quiet_are_counted_by_their_summary() {
    let case = one_room().both("--quiet");
    assert_eq!(faults_of(&case, 0, &[COUNTED]), "");
    assert!(faults_of(&case, 0, &[LOST]).contains("success 0 instead of 1"));
}

#[test]
fn a_dp_rank_has_the_rooms_of_its_number() {
    let case = Case::new("x", "").both("--rooms 4:2").prefill("--dp-size 2");
    let room = |n, dp| format!(r#"{{"event":"room","room":{n},"status":"Success","rank":{{"dp":{dp}}}}}"#);
    let summary = |dp| format!(r#"{{"event":"summary","rooms":1,"success":1,"rank":{{"dp":{dp}}}}}"#);
    let lines = [room(4, 0), room(5, 1), summary(0), summary(1)];
    let prefill =
        |lines: &[String]| acted(&case, Who::Prefill, 0, &lines.iter().map(String::as_str).collect::<Vec<_>>());
    assert_eq!(judged(&case, vec![prefill(&lines)]), Vec::<String>::new());
    let faults = judged(&case, vec![prefill(&[room(4, 0), room(5, 0), summary(0), summary(1)])]);
    assert!(faults.iter().any(|f| f.contains("room 5 of tp0 pp0 cp0 dp1 never ended")), "{faults:?}");
}
