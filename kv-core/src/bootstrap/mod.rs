//! The bootstrap registry: who serves which prefill rank (protocol section 2).
//!
//! * [`types`]: the JSON of the five routes, and the [`Registry`] seam behind which another directory can stand in.
//! * [`table`]: what a server remembers, as a state machine without I/O or clock.
//! * [`address`]: how hosts become URLs.
//! * `server`, `client` (feature `bootstrap`): HTTP on both sides.

pub mod address;
#[cfg(feature = "bootstrap")]
pub mod client;
mod coerce;
#[cfg(feature = "bootstrap")]
pub mod server;
pub mod table;
pub mod types;

#[cfg(feature = "bootstrap")]
pub use client::{HttpRegistry, RegistrationConfig, register_prefill_rank};
#[cfg(feature = "bootstrap")]
pub use server::{BindError, BootstrapConfig, BootstrapServer};
pub use table::{OwnerPolicy, RegistryTable, TableConfig, TableError};
pub use types::{ParallelInfo, PrefillRow, RankAddress, RankKey, Registry, RegistryError, RowError};
