//! Universes: small ones for every run, the full size for `cargo xtask model`.

use crate::explore::{assert_sound, explore};
use crate::invariants::{LATER_LIFE, NO_PROOF, RETAINED, SUCCESS};
use crate::setup::{Budget, Setup};

/// No mishaps.
pub const CALM: Budget = Budget {
    faults: 0,
    refusals: 0,
    prefill_aborts: 0,
    decode_aborts: 0,
    losses: 0,
    duplicates: 0,
    deadlines: 0,
    retries: 0,
    strays: 0,
    partial: 0,
    peers_lost: 0,
};

const fn faults_and_aborts(faults: u8, prefill_aborts: u8, decode_aborts: u8) -> Budget {
    Budget { faults, prefill_aborts, decode_aborts, ..CALM }
}

pub const TWO_PREFILLS: Setup =
    Setup::ours("two prefill ranks, two chunks, a fault", 2, 1, 2, faults_and_aborts(1, 0, 0));
pub const TWO_PREFILLS_ABORT: Setup =
    Setup::ours("two prefill ranks, two chunks, decode aborts", 2, 1, 2, faults_and_aborts(0, 0, 1));
pub const TWO_DECODES: Setup =
    Setup::ours("two decode ranks, two chunks, a fault, prefill aborts", 1, 2, 2, faults_and_aborts(1, 1, 0));
pub const ONE_EACH: Setup =
    Setup::ours("one rank each, two chunks, a fault, both abort", 1, 1, 2, faults_and_aborts(1, 1, 2));
pub const BAD_NETWORK: Setup = Setup::ours(
    "one rank each, a fault, decode aborts, a loss, a duplicate, a retry, a stray",
    1,
    1,
    1,
    Budget { faults: 1, decode_aborts: 1, losses: 1, duplicates: 1, retries: 1, strays: 1, ..CALM },
);
pub const DUPLICATES: Setup = Setup::ours(
    "two prefill ranks, decode aborts, a duplicate, a stray",
    2,
    1,
    1,
    Budget { decode_aborts: 1, duplicates: 1, strays: 1, ..CALM },
);
pub const HALF_PUBLISHED: Setup = Setup::ours(
    "two prefill ranks, metadata to one, a fault, a loss",
    2,
    1,
    1,
    Budget { partial: 1, faults: 1, losses: 1, ..CALM },
);
pub const REFUSALS: Setup = Setup::ours(
    "two decode ranks, a fault, a refused post, a lost peer",
    1,
    2,
    1,
    Budget { faults: 1, refusals: 1, peers_lost: 1, ..CALM },
);
pub const DEADLINES: Setup =
    Setup::ours("two decode ranks, a fault, early deadlines", 1, 2, 1, Budget { faults: 1, deadlines: 1, ..CALM });
pub const REUSE: Setup =
    Setup::ours("two lives, two chunks, a fault, both abort", 1, 1, 2, faults_and_aborts(1, 1, 1)).reused(2);
pub const TOWARDS_0523: Setup = Setup::ours(
    "towards 0.5.23: two decode ranks, a fault, decode aborts, an early deadline",
    1,
    2,
    1,
    Budget { faults: 1, decode_aborts: 1, deadlines: 1, ..CALM },
)
.towards_0523();
pub const TOWARDS_0523_REUSE: Setup =
    Setup::ours("towards 0.5.23: two lives, a fault, both abort", 1, 1, 1, faults_and_aborts(1, 1, 1))
        .reused(2)
        .towards_0523();

#[test]
fn two_prefill_ranks() {
    assert_sound(&TWO_PREFILLS, &[SUCCESS, RETAINED]);
}

#[test]
fn two_prefill_ranks_and_an_abort() {
    assert_sound(&TWO_PREFILLS_ABORT, &[SUCCESS]);
}

#[test]
fn two_decode_ranks() {
    assert_sound(&TWO_DECODES, &[SUCCESS, RETAINED]);
}

#[test]
fn one_rank_each() {
    assert_sound(&ONE_EACH, &[SUCCESS, RETAINED]);
}

#[test]
fn a_bad_network() {
    assert_sound(&BAD_NETWORK, &[SUCCESS, RETAINED]);
}

#[test]
fn duplicates_and_strays() {
    assert_sound(&DUPLICATES, &[SUCCESS]);
}

#[test]
fn half_published() {
    assert_sound(&HALF_PUBLISHED, &[SUCCESS, RETAINED]);
}

#[test]
fn refused_posts_and_lost_peers() {
    assert_sound(&REFUSALS, &[SUCCESS, RETAINED]);
}

#[test]
fn early_deadlines() {
    assert_sound(&DEADLINES, &[SUCCESS, RETAINED]);
}

#[test]
fn a_number_used_again() {
    assert_sound(&REUSE, &[SUCCESS, RETAINED, LATER_LIFE]);
}

#[test]
fn towards_sglang() {
    assert_sound(&TOWARDS_0523, &[SUCCESS, RETAINED, NO_PROOF]);
}

#[test]
fn towards_sglang_a_number_used_again() {
    assert_sound(&TOWARDS_0523_REUSE, &[SUCCESS, RETAINED, LATER_LIFE]);
}

/// What the bytes of 0.5.23 cannot keep apart (F6): pages go by timeout, the number is used again, and the status of the
/// old life, still on its way, counts for the new one. Between two of ours the release waits for the proof, which
/// travels behind that status; see `a_number_used_again`.
#[test]
fn control_without_proof_a_late_status_counts_for_the_next_life() {
    let budget = Budget { decode_aborts: 1, deadlines: 1, ..CALM };
    let found = explore(&Setup::ours("control", 1, 1, 1, budget).reused(2).towards_0523(), 1);
    assert_eq!(found.broken.first().map(|b| b.0), Some("Success implies that every byte landed"));
}

/// `cargo xtask model`.
#[test]
#[ignore = "minutes, in release: cargo xtask model"]
fn full_size() {
    let all = faults_and_aborts(1, 1, 1);
    let network = Budget { losses: 1, duplicates: 1, ..all };
    let lossy = Setup::ours("lossy", 1, 1, 2, Budget { retries: 1, strays: 1, ..network });
    let full = [
        Setup::ours("2 prefill, 1 decode, 2 chunks: fault, both abort", 2, 1, 2, all),
        Setup::ours("1 prefill, 2 decode, 2 chunks: fault, both abort", 1, 2, 2, all),
        Setup::ours("2 prefill, 2 decode, 2 chunks: no mishap", 2, 2, 2, CALM),
        Setup::ours("2 prefill, 1 decode, 1 chunk: 2 faults, decode aborts", 2, 1, 1, faults_and_aborts(2, 0, 1)),
        Setup { name: "1 prefill, 1 decode, 2 chunks: fault, both abort, loss, duplicate, retry, stray", ..lossy },
        Setup::ours(
            "2 prefill, 1 decode, 1 chunk: fault, decode aborts, loss, duplicate",
            2,
            1,
            1,
            Budget { prefill_aborts: 0, ..network },
        ),
        Setup::ours("2 prefill, 1 decode, 1 chunk, 2 lives: fault, decode aborts", 2, 1, 1, faults_and_aborts(1, 0, 1))
            .reused(2),
        Setup::ours(
            "1 prefill, 1 decode, 2 chunks, 3 lives: 2 faults, both abort",
            1,
            1,
            2,
            faults_and_aborts(2, 1, 2),
        )
        .reused(3),
        Setup::ours(
            "towards 0.5.23: 1 prefill, 2 decode, 2 chunks: fault, both abort, early deadline",
            1,
            2,
            2,
            Budget { deadlines: 1, ..all },
        )
        .towards_0523(),
    ];
    println!("| universe | unique states | time |\n|---|---|---|");
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    let mut total = 0;
    for setup in full {
        let found = explore(&setup, threads);
        println!("| {} | {} | {:.1} s |", setup.name, found.states, found.took.as_secs_f64());
        assert_eq!(found.broken, [], "{}", setup.name);
        total += found.states;
    }
    println!("| all | {total} | |");
}
