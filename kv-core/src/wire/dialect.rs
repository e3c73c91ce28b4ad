//! The seam between typed messages and a backend's frames.

use bytes::Bytes;

use super::ext::{self, Extension, MessageKind};
use super::frames::unsupported;
use super::message::{
    Abort, AbortAck, AuxData, BootstrapHello, ChunkReady, KvStatus, Metadata, Registration, StagingReq, StagingRsp,
    ToDecode, ToPrefill, Watermark, WireError,
};
use super::{MooncakeDialect, MoriDialect, NixlDialect, common};
use crate::control::Multipart;
use crate::limits::Limits;

/// How one backend writes and reads control messages. The built-in ones are data formats only; a new backend brings its
/// own.
///
/// Encoding writes exactly what SGLang 0.5.23 writes for the same message. What a dialect has no frame for is left off
/// ([`Metadata::device_kv_indices`] on NIXL, a status reason on Mooncake); what would be read as something else, or would
/// stop a 0.5.23 peer, is refused.
///
/// Parsing never panics. It accepts what 0.5.23 accepts: messages of older peers that end early, frames behind the known
/// ones, empty frames for optional values, integers as Python reads them. Everything else is a [`WireError`]; what comes
/// out is within the [`Limits`]. Room 0 and unknown rooms, peers and ranks are the caller's to judge.
pub trait Dialect: Send + Sync {
    /// Short name for logs, metrics and tools (`nixl`).
    fn name(&self) -> &'static str;

    /// D → P: decode's geometry and addresses.
    ///
    /// # Errors
    /// `Inconsistent` when counts contradict each other, `Unsupported` for another kind of [`Buffers`](super::Buffers),
    /// `BadText` or `BadInteger` for a name or endpoint that a peer would refuse.
    fn encode_registration(&self, message: &Registration) -> Result<Multipart, WireError>;

    /// D → P: where a room's KV goes. A dummy is sent without its pages and state indices.
    ///
    /// # Errors
    /// `Unsupported` for a record that needs an aux index and has none, `BadInteger` for a negative index, `BadText` or
    /// `BadInteger` for a name or endpoint that a peer would refuse.
    fn encode_metadata(&self, message: &Metadata) -> Result<Multipart, WireError>;

    /// P → D: a room's status.
    ///
    /// # Errors
    /// None of the built-in dialects fails.
    fn encode_status(&self, message: &KvStatus) -> Result<Multipart, WireError>;

    /// P → D: a staged chunk arrived.
    ///
    /// # Errors
    /// `Unsupported` by dialects without staging, `BadText` for a bad id.
    fn encode_chunk_ready(&self, _message: &ChunkReady) -> Result<Multipart, WireError> {
        Err(no_such_message(self.name(), "CHUNK_READY"))
    }

    /// P → D: ring space wanted.
    ///
    /// # Errors
    /// `Unsupported` by dialects without staging, `BadText` for a bad id.
    fn encode_staging_req(&self, _message: &StagingReq) -> Result<Multipart, WireError> {
        Err(no_such_message(self.name(), "STAGING_REQ"))
    }

    /// D → P: ring space granted.
    ///
    /// # Errors
    /// `Unsupported` by dialects without staging, `BadText` for a bad id.
    fn encode_staging_rsp(&self, _message: &StagingRsp) -> Result<Multipart, WireError> {
        Err(no_such_message(self.name(), "STAGING_RSP"))
    }

    /// D → P: how far the ring is free.
    ///
    /// # Errors
    /// `Unsupported` by dialects without staging, `BadText` for a bad id.
    fn encode_watermark(&self, _message: &Watermark) -> Result<Multipart, WireError> {
        Err(no_such_message(self.name(), "WATERMARK"))
    }

    /// D → P: stop a room. A generation is sent behind an address only.
    ///
    /// # Errors
    /// `BadText` or `BadInteger` for an endpoint that a peer would refuse.
    fn encode_abort(&self, message: &Abort) -> Result<Multipart, WireError> {
        common::encode_abort(message)
    }

    /// P → D: a room is drained.
    ///
    /// # Errors
    /// None of the built-in dialects fails.
    fn encode_abort_ack(&self, message: &AbortAck) -> Result<Multipart, WireError> {
        Ok(common::encode_abort_ack(message))
    }

    /// P → D: one aux row.
    ///
    /// # Errors
    /// `Unsupported` by dialects that write aux rows, `TooLarge` when the row's length does not fit a `u32`.
    fn encode_aux_data(&self, _message: &AuxData) -> Result<Multipart, WireError> {
        Err(no_such_message(self.name(), "AUX_DATA"))
    }

    /// D → P: decode is there (policy prefill_complete).
    ///
    /// # Errors
    /// `BadText` or `BadInteger` for an endpoint that a peer would refuse.
    fn encode_bootstrap(&self, message: &BootstrapHello) -> Result<Multipart, WireError> {
        common::encode_bootstrap(message)
    }

    /// A prefill of 0.5.23 takes no second registration of a name that it knows: it goes on writing to what the first one
    /// announced.
    fn registers_once(&self) -> bool {
        false
    }

    /// How many frames a message of this kind has when every optional one is there.
    fn frames(&self, kind: MessageKind) -> usize {
        ext::common_frames(kind)
    }

    /// Put an extension behind a message, for a peer that is known to be ours. Optional frames that are missing become
    /// empty ones, which reads the same.
    ///
    /// # Errors
    /// `Unsupported` when the message has frames that [`frames`](Self::frames) does not know of.
    fn attach_extension(
        &self,
        kind: MessageKind,
        message: &mut Multipart,
        extension: &Extension,
    ) -> Result<(), WireError> {
        ext::attach(message, self.frames(kind), extension.encode())
    }

    /// The extension of a message of this kind: its last frame, behind all known ones, when it has the magic. Any other
    /// frame there is ignored.
    ///
    /// # Errors
    /// It has the magic and cannot be read.
    fn extension(&self, kind: MessageKind, frames: &[Bytes]) -> Result<Option<Extension>, WireError> {
        ext::detach(frames, self.frames(kind))
    }

    /// Read what arrived on prefill's socket.
    ///
    /// # Errors
    /// Why the message is to be dropped.
    fn parse_to_prefill(&self, frames: &[Bytes], limits: &Limits) -> Result<ToPrefill, WireError>;

    /// Read what arrived on decode's socket.
    ///
    /// # Errors
    /// Why the message is to be dropped.
    fn parse_to_decode(&self, frames: &[Bytes], limits: &Limits) -> Result<ToDecode, WireError>;
}

fn no_such_message(dialect: &str, message: &str) -> WireError {
    unsupported(message, format!("the {dialect} dialect has no such message"))
}

/// The built-in dialect of this name: `nixl`, `mooncake` or `mori`.
pub fn built_in(name: &str) -> Option<&'static dyn Dialect> {
    Some(match name {
        "nixl" => &const { NixlDialect::new() },
        "mooncake" => &MooncakeDialect,
        "mori" => &MoriDialect,
        _ => return None,
    })
}
