//! NIXL as this program opens it.

use kv_transfer::nixl::{NixlConfig, NixlTransport};

use crate::error::Result;
use crate::leave;
use crate::library::Vendor;

/// The library.
pub const VENDOR: Vendor = Vendor {
    transport: "nixl",
    file: "libnixl_capi.so",
    install: "`cargo xtask setup nixl` in a checkout, or `pip install --no-deps nixl-cu12==1.5.1`, or \
              KV_NIXL_LIB=/path/to/libnixl_capi.so",
};

/// A transport, as every rank uses it.
///
/// # Errors
/// The library is not here, or cannot start.
pub fn open() -> Result<NixlTransport> {
    // Where there is RDMA, a destructor of a library that it brings crashes.
    leave::without_destructors();
    NixlTransport::new(NixlConfig::default()).map_err(|e| {
        let tls = std::env::var_os("UCX_TLS").is_some();
        VENDOR.failure(&e.to_string(), advice(tls))
    })
}

fn advice(tls: bool) -> &'static str {
    if tls { "unset UCX_TLS, or put tcp into it" } else { "NIXL_LOG_LEVEL=debug UCX_LOG_LEVEL=info show what it does" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cure_follows_the_cause() {
        let missing = VENDOR.failure("/x/libnixl_capi.so has no function f: use NIXL 1.5", advice(true));
        assert_eq!(missing.hint, VENDOR.install);
        let backend = "NIXL cannot start its backend UCX: backend error (-2)";
        assert!(VENDOR.failure(backend, advice(true)).hint.contains("UCX_TLS"));
        assert!(VENDOR.failure(backend, advice(false)).hint.contains("LOG_LEVEL"));
    }
}
