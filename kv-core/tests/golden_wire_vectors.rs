//! Every record of the five wire vector files, recorded from SGLang 0.5.23, in both directions (R-H1).
//!
//! Each file has a test of its own; a record that nothing handles fails it, and the number of records exercised must be
//! the number in the file. Where the vectors record a fault of 0.5.23, the test says how ours differs and why.

// Helpers outside `#[test]` functions may panic as well: they are part of the tests.
#![allow(clippy::unwrap_used)]

#[path = "golden_wire/common.rs"]
mod common;
#[path = "golden_wire/mooncake.rs"]
mod mooncake;
#[path = "golden_wire/mori.rs"]
mod mori;
#[path = "golden_wire/nixl.rs"]
mod nixl;
#[path = "golden_wire/packing.rs"]
mod packing;
#[path = "golden_wire/support.rs"]
mod support;
