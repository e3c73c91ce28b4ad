//! The Mooncake transfer engine as this program opens it.

use kv_transfer::mooncake::{MooncakeConfig, MooncakeTransport};

use crate::error::Result;
use crate::leave;
use crate::library::Vendor;

/// The library.
pub const VENDOR: Vendor = Vendor {
    transport: "mooncake",
    file: "libtransfer_engine.so",
    install: "`cargo xtask setup mooncake` in a checkout, or a Mooncake built with -DBUILD_SHARED_LIBS=ON and \
              KV_MOONCAKE_LIB=/path/to/libtransfer_engine.so (of the wheels, most have no C API)",
};

/// A transport, as every rank uses it. `host`: the address that peers reach this rank at.
///
/// # Errors
/// The library is not here, or cannot start.
pub fn open(host: &str) -> Result<MooncakeTransport> {
    // Its Go runtime outlives it.
    leave::without_destructors();
    let config = MooncakeConfig { host: Some(host.to_owned()), ..MooncakeConfig::default() };
    MooncakeTransport::new(config).map_err(|e| VENDOR.failure(&e.to_string(), "MC_LOG_LEVEL=INFO shows what it does"))
}
