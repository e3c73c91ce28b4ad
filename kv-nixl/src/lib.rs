//! NIXL as a transport of `kv_core`.
mod agent;
mod config;
mod environment;
mod hooks;
mod keeper;
mod lane;
mod metadata;
mod peer;
mod stats;
mod transport;

pub use config::{NixlConfig, PeerErrors};
pub use environment::prepare_environment;
pub use hooks::NixlHooks;
pub use nixl_capi_sys::{Place, places};
pub use stats::Stats;
pub use transport::{LibraryInfo, NixlTransport};
