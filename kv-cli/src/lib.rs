//! The parts of the program `kvt`: run, replay, measure and diagnose KV-cache transfers.

pub mod driver;
pub mod error;
pub mod hf_config;
pub mod memory;
pub mod model;
pub mod pattern;
pub mod plan_requests;
pub mod pool;
pub mod report;
pub mod shape;
pub mod trace;
