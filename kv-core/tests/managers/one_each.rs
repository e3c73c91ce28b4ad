//! One transport, one decode rank.

use std::sync::Arc;

use kv_core::hooks::{ManagerHooks, TcpHooks};
use kv_core::manager::{DecodeConfig, DecodeManager, ManagerError};
use kv_core::wire::{Dialect, NixlDialect};
use kv_testkit::{FakeFabric, FakeTransport};

use super::support::*;

/// SGLang's NIXL workers.
struct Nixl(NixlDialect);

impl ManagerHooks for Nixl {
    fn dialect(&self) -> &dyn Dialect {
        &self.0
    }
}

fn start(transport: &Arc<FakeTransport>) -> Result<DecodeManager, ManagerError> {
    start_with(transport, Arc::new(TcpHooks::new()))
}

fn start_with(transport: &Arc<FakeTransport>, hooks: Arc<dyn ManagerHooks>) -> Result<DecodeManager, ManagerError> {
    let (_, layout) = memory(&**transport, 1);
    let config = DecodeConfig { host: Some(HOST.into()), ..DecodeConfig::default() };
    DecodeManager::start(config, transport.clone(), hooks, layout)
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

/// The next one would have other pages, and 0.5.23 would go on writing to those of the first (its hazard 7).
#[test]
fn r_h1_towards_0_5_23_a_name_is_not_used_again() {
    let fabric = FakeFabric::new();
    let nixl = || Arc::new(Nixl(NixlDialect::new()));
    let shared = fabric.transport("registered-with-0.5.23");
    drop(start_with(&shared, nixl()).unwrap());
    let refused = start_with(&shared, nixl()).err().unwrap().to_string();
    assert!(refused.contains("has served") && refused.contains("one of its own"), "{refused}");
    // Also by another transport that somebody gave the same name.
    let namesake = FakeFabric::new().transport("registered-with-0.5.23");
    assert!(start_with(&namesake, nixl()).is_err());
    start_with(&fabric.transport("registered-with-0.5.23, the next"), nixl()).unwrap();
}
