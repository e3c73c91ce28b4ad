//! `--full`: every case of `cargo xtask interop` in both mixed directions; each counts as a test.

use super::tests_step::Tests;
use super::{Step, required};
use crate::interop::{self, Backend, Counts, Row, Verdict};
use crate::setup;
use crate::sh::Result;

/// SGLang is here, or is fetched. Where that fails, it fails when a backend is asked for that the cases run over.
pub fn setup() -> Result<Step> {
    let asked = required::backends().is_some_and(|r| r.iter().any(|name| backend(name).is_some()));
    judge(setup::target().and_then(|t| setup::interop::python(&t)).map(|p| p.display().to_string()), asked)
}

fn judge(found: Result<String>, asked: bool) -> Result<Step> {
    match (found, asked) {
        (Ok(text), _) => Ok(Step::Passed(text)),
        (Err(e), true) => Err(format!("no SGLang ({} names a backend to run with it): {e}", required::VARIABLE)),
        (Err(e), false) => Ok(Step::Skipped(format!("no SGLang: {e}"))),
    }
}

/// The backends that both programs have.
fn backend(name: &str) -> Option<Backend> {
    [Backend::Nixl, Backend::Mooncake].into_iter().find(|b| b.name() == name)
}

/// Run the cases; the rows, which were shown as they came.
pub fn run() -> Result<Vec<Row>> {
    let asked = required::backends()
        .unwrap_or_else(|| vec![Backend::Nixl.name().to_owned(), Backend::Mooncake.name().to_owned()]);
    interop::mixed(asked.iter().filter_map(|name| backend(name)).collect())
}

/// A line of the step.
pub fn text(rows: &[Row]) -> String {
    let counts = Counts::of(rows);
    let again = rows.iter().filter(|r| r.verdict == Verdict::Pass && r.again).count();
    let again = if again > 0 { format!(" ({again} at the second try)") } else { String::new() };
    format!("{} passed{again}, {} failed, {} n/a", counts.passed, counts.failed, counts.not)
}

/// Each row as a test.
pub fn count(rows: &[Row], tests: &mut Tests, skipped: &mut Vec<String>, failed: &mut Vec<String>) {
    for row in rows {
        let line = format!("interop: {} {} {}: {}", row.case, row.direction, row.backend.name(), row.why());
        match row.verdict {
            Verdict::Pass => tests.passed += 1,
            Verdict::Fail(_) => {
                tests.failed += 1;
                failed.push(line);
            }
            Verdict::Not(_) => {
                tests.ignored += 1;
                skipped.push(line);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interop::Direction;

    #[test]
    fn each_row_counts_as_a_test() {
        let verdicts = [Verdict::Pass, Verdict::Fail(vec!["why".into()]), Verdict::Not("here".into()), Verdict::Pass];
        let rows = verdicts.map(|v| Row::plain("x", Direction::SGLANG_OURS, Backend::Nixl, v));
        let mut tests = Tests { passed: 10, ..Tests::default() };
        let (mut skipped, mut failed) = (Vec::new(), Vec::new());
        count(&rows, &mut tests, &mut skipped, &mut failed);
        assert_eq!(tests.summary(), "12 passed, 1 failed, 1 skipped");
        assert_eq!(
            (skipped, failed),
            (vec!["interop: x sglang>ours nixl: here".to_owned()], vec!["interop: x sglang>ours nixl: why".to_owned()])
        );
    }

    #[test]
    fn sglang_may_be_missing_only_where_nobody_asks_for_it() {
        assert!(matches!(judge(Err("no network".into()), false), Ok(Step::Skipped(_))));
        let Err(e) = judge(Err("no network".into()), true) else { panic!("not a failure") };
        assert!(e.contains("KV_REQUIRE_BACKENDS") && e.contains("no network"), "{e}");
    }
}
