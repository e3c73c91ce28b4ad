//! What is fuzzed: one function a target, called alike by libFuzzer (`fuzz/`), by the driver for stable Rust (`kv-fuzz`)
//! and by the test that replays the corpus.
//!
//! | kind | targets |
//! |---|---|
//! | wire | `wire_nixl`, `wire_mooncake`, `wire_mori`, `wire_tcp`, `wire_pack` |
//! | bootstrap | `bootstrap_json`, `bootstrap_http` |
//! | geometry | `topology`, `layout_plan` |
//! | control sockets | `zmtp` |
//! | kv-tcp | `tcp_frames` |
//! | kvt | `kvt_inputs` |
//! | rooms | `room_sender`, `room_receiver`, `shards` |
//!
//! A target panics when something is wrong, and only then. Whatever bytes it gets, it ends soon.
// A target reports by panicking.
#![allow(clippy::expect_used, clippy::unwrap_used)]

mod bootstrap;
pub mod corpus;
pub mod driver;
#[cfg(feature = "mutants")]
pub mod faults;
mod input;
mod kvt;
mod layout;
mod pack;
mod receiver;
mod sender;
mod shards;
mod tcp;
mod topology;
mod wire;
mod zmtp;

pub use input::Input;

/// One thing that is fuzzed.
pub struct Target {
    /// Its name, and that of its directory in the corpus.
    pub name: &'static str,
    /// Take this input; panics when a rule is broken.
    pub run: fn(&[u8]),
    /// Inputs to start from.
    pub seeds: fn() -> Vec<Vec<u8>>,
    /// Words that the parsers look for.
    pub words: &'static [&'static [u8]],
}

/// All of them.
pub const TARGETS: &[Target] = &[
    Target { name: "wire_nixl", run: wire::nixl, seeds: || wire::seeds("zmq_nixl"), words: wire::WORDS },
    Target { name: "wire_mooncake", run: wire::mooncake, seeds: || wire::seeds("zmq_mooncake"), words: wire::WORDS },
    Target { name: "wire_mori", run: wire::mori, seeds: || wire::seeds("zmq_mori"), words: wire::WORDS },
    Target { name: "wire_tcp", run: wire::tcp, seeds: wire::tcp_seeds, words: wire::WORDS },
    Target { name: "wire_pack", run: pack::run, seeds: pack::seeds, words: pack::WORDS },
    Target { name: "bootstrap_json", run: bootstrap::json, seeds: bootstrap::json_seeds, words: bootstrap::WORDS },
    Target { name: "bootstrap_http", run: bootstrap::http, seeds: bootstrap::http_seeds, words: bootstrap::WORDS },
    Target { name: "topology", run: topology::run, seeds: topology::seeds, words: &[] },
    Target { name: "layout_plan", run: layout::run, seeds: layout::seeds, words: &[] },
    Target { name: "zmtp", run: zmtp::run, seeds: zmtp::seeds, words: zmtp::WORDS },
    Target { name: "tcp_frames", run: tcp::run, seeds: tcp::seeds, words: tcp::WORDS },
    Target { name: "kvt_inputs", run: kvt::run, seeds: kvt::seeds, words: kvt::WORDS },
    Target { name: "room_sender", run: sender::run, seeds: sender::seeds, words: &[] },
    Target { name: "room_receiver", run: receiver::run, seeds: receiver::seeds, words: &[] },
    Target { name: "shards", run: shards::run, seeds: shards::seeds, words: &[] },
];

/// The target of that name.
pub fn target(name: &str) -> Option<&'static Target> {
    TARGETS.iter().find(|t| t.name == name)
}
