//! Bootstrap servers, and who comes when.

use super::super::case::{Case, Check, End, Fail, Mark, Outcome, Registry, Step, When, Who};
use super::super::program::{Backend, Program};

pub fn cases() -> Vec<Case> {
    use Step::{Pause, Seen, Start};
    vec![
        Case::new("registry-alone", "prefill's bootstrap server in a process of its own").registry(Registry::Alone),
        Case::new("registry-foreign", "ours with their ranks, theirs with our ranks").registry(Registry::Foreign),
        Case::new("registry-foreign-tp2", "the same with TP 2 and PP 2")
            .both("--tp-size 2")
            .prefill("--pp-size 2")
            .registry(Registry::Foreign),
        Case::new("extension-dropped", "their server drops kv_ext from our row: both speak as 0.5.23")
            .registry(Registry::Foreign)
            .check(Check::PlainFrames),
        Case::new("extension-offered", "our decode sends the extension all the same: 0.5.23 takes no notice of it")
            .prefill("--chunk-pages 5")
            .of(Program::Ours, "decode", "--offer-extension")
            .not(When::Prefill(Program::Ours), "our prefill offers it in its row: extension-dropped"),
        Case::new("late-prefill", "decode starts 5 s before prefill").script(&[
            Start(Who::Decode),
            Pause(5.0),
            Start(Who::Prefill),
        ]),
        Case::new("late-decode", "prefill's rooms wait 3 s for decode").script(&[
            Start(Who::Prefill),
            Seen(Who::Prefill, Mark::Ready),
            Pause(3.0),
            Start(Who::Decode),
        ]),
        refused(
            "page-size-differs",
            "decode refuses a prefill with pages of another size",
            "--page-size 32 --item-len 8192",
            &["32", "64"],
        ),
        refused(
            "dtype-differs",
            "decode refuses a prefill with another kv_cache_dtype",
            "--dtype-str fp8_e4m3",
            &["fp8_e4m3", "bfloat16"],
        ),
        Case::new("aux-differs", "prefill has one aux row more than decode: the rows of both arrive")
            .prefill("--aux checksum"),
        unfit(
            "item-differs",
            "a decode with pages of other bytes: the reason arrives",
            "--item-len 8192",
            &["16384", "8192"],
        ),
        unfit("layers-differ", "a decode with fewer layers: the reason arrives", "--layers 2", &["4", "2"]),
    ]
}

/// Decode says no, and names both values; prefill's rooms never start.
fn refused(name: &'static str, shows: &'static str, prefill: &str, values: &'static [&'static str]) -> Case {
    Case::new(name, shows)
        .prefill(prefill)
        .prefill("--timeout 8")
        .rule(Who::Prefill, "", Outcome::Any)
        .ends(Who::Prefill, End::Any)
        // SGLang's decode ends there; ours fails the rooms, each with the reason.
        .ends_when(When::Decode(Program::Sglang), Who::Decode, End::Refused(values))
        .rule(Who::Decode, "", Outcome::Failed(Fail::says(&[], values).all_words()))
        .script(&[
            Step::Start(Who::Prefill),
            Step::Seen(Who::Prefill, Mark::Ready),
            Step::Start(Who::Decode),
            Step::Ended(Who::Decode),
            Step::Close(Who::Prefill),
        ])
}

/// Our prefill tells decode what does not fit. SGLang's dies of it, for this decode and all others.
fn unfit(name: &'static str, shows: &'static str, decode: &str, values: &'static [&'static str]) -> Case {
    let (ours, sglang) = (When::Prefill(Program::Ours), When::Prefill(Program::Sglang));
    let told = Outcome::Failed(Fail::says(values, values).all_words());
    let timed_out = Fail::says(&["timed out"], &["timed out"]);
    Case::new(name, shows)
        .prefill("--boot-timeout 5")
        .decode(decode)
        .decode("--wait-timeout 3 --release-timeout 2")
        .rule_when(ours, Who::Prefill, "", told)
        .rule_when(ours, Who::Decode, "", told)
        .rule_when(sglang, Who::Prefill, "", Outcome::Failed(timed_out))
        .rule_when(sglang, Who::Decode, "", Outcome::Failed(timed_out.unacked(1500.0, 9000.0)))
        .note(sglang, "SGLang's bootstrap thread dies of such a decode: rooms end by timeout")
        .not_over(
            Backend::Mooncake,
            sglang,
            "SGLang's prefill looks at no geometry here: such rooms fail, or have wrong bytes",
        )
}
