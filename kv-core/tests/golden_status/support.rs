//! A world that speaks a backend's frames, and the records' fields.

use std::sync::Arc;

use bytes::Bytes;
use kv_core::control::Multipart;
use kv_core::hooks::ManagerHooks;
use kv_core::limits::Limits;
use kv_core::room::FailedStatusPolicy;
use kv_core::wire::*;
use kv_testkit::directory::Shape;
use kv_testkit::vectors::Record;
pub use kv_testkit::world::{World, WorldSpec};
use serde_json::Value;

/// Registration and metadata as the fake transport needs them; everything the records speak of in the backend's frames.
pub struct Mixed(&'static dyn Dialect, NixlDialect);

impl Dialect for Mixed {
    fn name(&self) -> &'static str {
        self.0.name()
    }
    fn encode_registration(&self, m: &Registration) -> Result<Multipart, WireError> {
        self.1.encode_registration(m)
    }
    fn encode_metadata(&self, m: &Metadata) -> Result<Multipart, WireError> {
        self.1.encode_metadata(m)
    }
    fn encode_status(&self, m: &KvStatus) -> Result<Multipart, WireError> {
        self.0.encode_status(m)
    }
    fn encode_abort(&self, m: &Abort) -> Result<Multipart, WireError> {
        self.0.encode_abort(m)
    }
    fn encode_abort_ack(&self, m: &AbortAck) -> Result<Multipart, WireError> {
        self.0.encode_abort_ack(m)
    }
    fn parse_to_prefill(&self, frames: &[Bytes], limits: &Limits) -> Result<ToPrefill, WireError> {
        match frames.first() {
            Some(tag) if tag == "ABORT" => self.0.parse_to_prefill(frames, limits),
            _ => self.1.parse_to_prefill(frames, limits),
        }
    }
    fn parse_to_decode(&self, frames: &[Bytes], limits: &Limits) -> Result<ToDecode, WireError> {
        self.0.parse_to_decode(frames, limits)
    }
}

impl ManagerHooks for Mixed {
    fn dialect(&self) -> &dyn Dialect {
        self
    }
}

pub fn world(backend: &str, shape: Shape, decodes: u32) -> World {
    let dialect = built_in(backend).expect("a built-in dialect");
    let hooks = Arc::new(Mixed(dialect, NixlDialect::new()));
    // Towards 0.5.23, as recorded.
    let failed_status = FailedStatusPolicy::WhenSettled;
    // The recorded peers are SGLang's.
    let (prefill_ext, decode_ext) = (false, false);
    World::new(WorldSpec { hooks, failed_status, prefill_ext, decode_ext, ..WorldSpec::of(shape, decodes) })
}

pub fn steps(r: &Record) -> Vec<Value> {
    r.list("steps").to_vec()
}

pub fn field<'a>(step: &'a Value, key: &str) -> &'a Value {
    step.get(key).unwrap_or_else(|| panic!("no {key} in {step}"))
}
