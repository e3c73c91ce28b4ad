//! A fuzzer for stable Rust: mutates the corpus at random. It sees no coverage, so it keeps nothing but crashes; where
//! nightly Rust is at hand, libFuzzer runs the same targets and finds more.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::{Duration, Instant};

use kv_testkit::Rng;

use crate::Target;

/// Longest input made.
const MAX_LEN: usize = 4096;

/// What a run did.
#[derive(Debug, Default)]
pub struct Report {
    /// Inputs run.
    pub executions: u64,
    /// Time spent.
    pub elapsed: Duration,
    /// Longest time that one input took.
    pub slowest: Duration,
    /// Inputs on which the target panicked, as small as could be made quickly.
    pub crashes: Vec<Vec<u8>>,
}

/// Whether the target takes this input without a panic.
pub fn passes(target: &Target, input: &[u8]) -> bool {
    catch_unwind(AssertUnwindSafe(|| (target.run)(input))).is_ok()
}

/// Run for `time`, from `corpus`. Equal seeds make equal inputs. Stops at the first crash.
pub fn run(target: &Target, corpus: &[Vec<u8>], time: Duration, seed: u64) -> Report {
    let mut report = Report::default();
    let mut rng = Rng::new(seed);
    let started = Instant::now();
    while report.elapsed < time {
        let input = mutate(&mut rng, corpus, target.words);
        let before = Instant::now();
        let passed = passes(target, &input);
        report.slowest = report.slowest.max(before.elapsed());
        report.executions += 1;
        if !passed {
            report.crashes.push(shrink(target, input));
        }
        report.elapsed = started.elapsed();
        if !passed {
            break;
        }
    }
    report
}

/// A corpus entry with some changes.
pub fn mutate(rng: &mut Rng, corpus: &[Vec<u8>], words: &[&[u8]]) -> Vec<u8> {
    let mut out = rng.pick(corpus).cloned().unwrap_or_default();
    for _ in 0..1 + rng.below(6) {
        let at = rng.below(out.len() as u64 + 1) as usize;
        match rng.below(10) {
            0 => out.truncate(at),
            1 => out.insert(at, rng.next_u64() as u8),
            2 | 3 => {
                if let Some(byte) = out.get_mut(at) {
                    *byte ^= 1 << rng.below(8);
                }
            }
            4 => {
                if let Some(byte) = out.get_mut(at) {
                    *byte = rng.next_u64() as u8;
                }
            }
            5 => {
                let end = (at + rng.below(16) as usize).min(out.len());
                out.drain(at..end);
            }
            6 => {
                let end = (at + rng.below(32) as usize).min(out.len());
                let piece = out[at..end].to_vec();
                let to = rng.below(out.len() as u64 + 1) as usize;
                out.splice(to..to, piece);
            }
            7 => {
                let word = rng.pick(words).copied().unwrap_or(&[0xff, 0xff, 0xff, 0xff]);
                let over = if rng.chance(0.5) { (at + word.len()).min(out.len()) } else { at };
                out.splice(at..over, word.iter().copied());
            }
            8 => {
                // The tail of another entry.
                let other = rng.pick(corpus).cloned().unwrap_or_default();
                let from = rng.below(other.len() as u64 + 1) as usize;
                out.truncate(at);
                out.extend_from_slice(&other[from..]);
            }
            _ => {
                let number = [0, 1, 0x7f, 0x80, 0xff, 0x100, 0xffff, 0x7fff_ffff, 0xffff_ffff, u64::MAX];
                let width = [1, 2, 4, 8][rng.below(4) as usize];
                let bytes = rng.pick(&number).copied().unwrap_or(0).to_le_bytes();
                let end = (at + width).min(out.len());
                out[at..end].copy_from_slice(&bytes[..end - at]);
            }
        }
    }
    out.truncate(MAX_LEN);
    out
}

/// A smaller input that still makes the target panic: pieces are cut out while it does.
pub fn shrink(target: &Target, mut input: Vec<u8>) -> Vec<u8> {
    let mut piece = input.len() / 2;
    while piece > 0 {
        let mut at = 0;
        while at < input.len() {
            let mut smaller = input.clone();
            smaller.drain(at..(at + piece).min(input.len()));
            if passes(target, &smaller) {
                at += piece;
            } else {
                input = smaller;
            }
        }
        piece /= 2;
    }
    input
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_planted_fault_is_found_and_made_small() {
        fn fragile(data: &[u8]) {
            assert!(!data.windows(2).any(|w| w == b"KV"), "found");
        }
        let target = Target { name: "fragile", run: fragile, seeds: Vec::new, words: &[b"KV"] };
        let report = run(&target, &[b"some text".to_vec()], Duration::from_secs(30), 1);
        assert_eq!(report.crashes, [b"KV".to_vec()]);
        assert!(report.executions > 0);
    }
}
