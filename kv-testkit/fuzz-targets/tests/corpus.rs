//! The checked-in corpus, replayed by every target on every run of the tests: what was found once stays found.
#![allow(clippy::expect_used)] // a test that cannot set up fails

use kv_fuzz::{TARGETS, corpus};

fn replay(name: &str) {
    let target = kv_fuzz::target(name).expect("a target of that name");
    let inputs = corpus::read(&corpus::dir(target)).expect("a corpus");
    assert!(!inputs.is_empty(), "{name} has no corpus; `cargo run -p kv-transfer-fuzz-targets -- seeds {name}`");
    for (file, input) in inputs {
        assert!(kv_fuzz::driver::passes(target, &input), "{name}: fuzz/corpus/{name}/{file} fails");
    }
}

macro_rules! targets {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() {
                replay(stringify!($name));
            }
        )*

        #[test]
        fn every_target_is_replayed() {
            assert_eq!(TARGETS.iter().map(|t| t.name).collect::<Vec<_>>(), [$(stringify!($name)),*]);
        }
    };
}

targets! {
    wire_nixl wire_mooncake wire_mori wire_tcp wire_pack bootstrap_json bootstrap_http topology layout_plan zmtp tcp_frames
    kvt_inputs room_sender room_receiver shards
}

#[test]
fn the_corpus_is_small_and_holds_every_seed() {
    let mut bytes = 0;
    for target in TARGETS {
        let inputs = corpus::read(&corpus::dir(target)).expect("a corpus");
        bytes += inputs.iter().map(|(_, input)| input.len()).sum::<usize>();
        for seed in (target.seeds)() {
            assert!(kv_fuzz::driver::passes(target, &seed), "a seed of {}", target.name);
        }
    }
    assert!(bytes < 2 << 20, "{bytes} bytes in fuzz/corpus; minimise it with `cargo xtask fuzz --keep`");
}
