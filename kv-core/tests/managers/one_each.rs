//! One transport, one decode rank.

use std::sync::Arc;

use kv_core::hooks::TcpHooks;
use kv_core::manager::{DecodeConfig, DecodeManager, ManagerError};
use kv_testkit::{FakeFabric, FakeTransport};

use super::support::*;

fn start(transport: &Arc<FakeTransport>) -> Result<DecodeManager, ManagerError> {
    let (_, layout) = memory(&**transport, 1);
    let config = DecodeConfig { host: Some(HOST.into()), ..DecodeConfig::default() };
    DecodeManager::start(config, transport.clone(), Arc::new(TcpHooks::new()), layout)
}

/// Prefill would take both for one, and write the KV of one to the pages of the other.
#[test]
fn r_h1_two_decode_ranks_of_one_name_are_refused() {
    let fabric = FakeFabric::new();
    let shared = fabric.transport("shared-by-two-decodes");
    let first = start(&shared).unwrap();
    let refused = start(&shared).err().unwrap().to_string();
    assert!(refused.contains("shared-by-two-decodes") && refused.contains("one of its own"), "{refused}");
    let receiver = first.receiver(room(7), "p:8998").unwrap();
    drop(first);
    assert!(start(&shared).is_err(), "its rank lives as long as its receivers");
    drop(receiver);
    start(&shared).unwrap();
}
