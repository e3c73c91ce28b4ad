//! Layouts for tests: regions that are numbers only, peers made of address lists.
#![allow(dead_code)] // each test file uses its own part

use std::sync::Arc;

use bytes::Bytes;
use kv_core::ids::RegionId;
use kv_core::layout::{EntryDesc, LayoutError, LayoutSpec, LocalLayout, PeerLayout};
use kv_core::limits::Limits;
use kv_core::memory::{MemoryOwner, RegisteredRegion};
use kv_core::net::Endpoint;
use kv_core::wire::message::{Buffers, Registration};
use serde_json::Value;

struct Numbers {
    base: u64,
    len: u64,
}

// SAFETY: nothing in these tests reads or writes through the address; only the numbers are used.
unsafe impl MemoryOwner for Numbers {
    fn base(&self) -> u64 {
        self.base
    }
    fn len(&self) -> u64 {
        self.len
    }
}

/// A region that is only its numbers.
pub fn region(id: u32, base: u64, len: u64) -> Arc<RegisteredRegion> {
    Arc::new(RegisteredRegion::new(RegionId(id), Arc::new(Numbers { base, len }), Box::new(())))
}

/// An entry that fills region `id` from its start.
pub fn entry(id: u32, len: u64, item_len: u64) -> EntryDesc {
    EntryDesc { region: RegionId(id), offset: 0, len, item_len, layer_id: None }
}

/// A layout with one region of `slots` items per entry: KV entries from region 0, aux entries after them.
pub fn local(kv: &[(u64, u64)], aux: &[(u64, u64)], slots: u64, spec: LayoutSpec) -> LocalLayout {
    try_local(kv, aux, slots, spec).unwrap()
}

pub fn try_local(
    kv: &[(u64, u64)],
    aux: &[(u64, u64)],
    slots: u64,
    mut spec: LayoutSpec,
) -> Result<LocalLayout, LayoutError> {
    let ids: Vec<_> = spec.kv.iter().map(|e| e.layer_id).collect();
    let all = kv.iter().chain(aux).zip(0u32..);
    let regions: Vec<_> = all.clone().map(|(&(addr, item), i)| region(i, addr, item * slots)).collect();
    let mut entries: Vec<_> = all.map(|(&(_, item), i)| entry(i, item * slots, item)).collect();
    spec.aux = entries.split_off(kv.len());
    for (entry, id) in entries.iter_mut().zip(ids) {
        entry.layer_id = id;
    }
    spec.kv = entries;
    LocalLayout::new(spec, regions)
}

/// Entries that only carry layer ids, for [`local`].
pub fn layers(ids: &[u32]) -> Vec<EntryDesc> {
    ids.iter().map(|&id| EntryDesc { layer_id: Some(id), ..entry(0, 1, 1) }).collect()
}

/// A registration with one item length.
pub fn registration(kv: &[u64], item_len: u64, aux: &[u64]) -> Registration {
    Registration {
        endpoint: Endpoint::new("10.0.0.7", 41234),
        name: "peer".into(),
        metadata: Bytes::new(),
        kv: Buffers::Addrs(kv.to_vec()),
        kv_item_lens: vec![item_len; kv.len()],
        kv_item_len: if kv.is_empty() { 0 } else { item_len },
        kv_slots: None,
        kv_kinds: vec![],
        kv_layer_ids: vec![],
        aux: Buffers::Addrs(aux.to_vec()),
        state: vec![],
        gpu_id: 0,
        attn_tp_size: 1,
        engine_rank: 0,
        dcp_size: 1,
        dcp_rank: 0,
        staging: None,
        staging_layer_ids: vec![],
    }
}

/// The peer of a registration.
pub fn peer(registration: &Registration) -> PeerLayout {
    PeerLayout::from_registration(registration, &Limits::default()).unwrap()
}

pub fn vectors(text: &str) -> Vec<Value> {
    let file: Value = serde_json::from_str(text).unwrap();
    file["vectors"].as_array().unwrap().clone()
}

pub fn u64s(v: &Value) -> Vec<u64> {
    v.as_array().unwrap().iter().map(|v| v.as_u64().unwrap()).collect()
}

pub fn u32s(v: &Value) -> Vec<u32> {
    u64s(v).into_iter().map(|v| v.try_into().unwrap()).collect()
}

pub fn pages(v: &Value) -> Vec<i32> {
    v.as_array().unwrap().iter().map(|v| v.as_i64().unwrap().try_into().unwrap()).collect()
}

pub fn num(v: &Value) -> u32 {
    v.as_u64().unwrap().try_into().unwrap()
}
