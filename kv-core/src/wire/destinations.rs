//! Parts of transfer metadata that the dialects share: destination indices, dummies, the number of decodes.

use super::frames::{FrameReader, FrameWriter, unsupported};
use super::message::{Metadata, WireError, WireErrorKind};
use super::pack;

pub(crate) const MESSAGE: &str = "metadata";

/// A dummy names no destination. Should one come with some, the flag wins: nothing is written for it.
pub(crate) fn without_dummy_indices(mut metadata: Metadata) -> Metadata {
    if metadata.is_dummy {
        metadata.dst_pages = Default::default();
        metadata.state_indices = Vec::new();
        metadata.device_kv_indices = None;
    }
    metadata
}

/// How many decodes a rank waits for: one at least, and no more than a room may have.
pub(crate) fn required_dst_info_num(reader: FrameReader<'_>, at: usize) -> Result<u32, WireError> {
    let max = u32::try_from(reader.limits.max_peers_per_room).unwrap_or(u32::MAX).max(1);
    reader.within(at, "required dst info num", 1..=max)
}

/// The destinations as they are sent: none for a dummy.
pub(crate) fn sent_indices(message: &Metadata) -> (&[i32], &[Vec<i32>]) {
    if message.is_dummy { (&[], &[]) } else { (&message.dst_pages, &message.state_indices) }
}

/// A buffer size that fits the frames of this metadata, so that the buffer does not grow while it is written.
pub(crate) fn size_hint(message: &Metadata) -> usize {
    let state: usize = message.state_indices.iter().map(|list| 4 + 4 * list.len()).sum();
    let device = message.device_kv_indices.as_ref().map_or(0, |pages| pages.len());
    128 + message.name.len() + message.endpoint.host().len() + 4 * (message.dst_pages.len() + device) + state
}

pub(crate) fn check(message: &Metadata) -> Result<(), WireError> {
    let refuse = |kind, detail: &str| Err(WireError { kind, what: MESSAGE.into(), detail: detail.into() });
    let negative = |indices: &[i32]| pack::no_negative(indices).is_err();
    if negative(&message.dst_pages) || message.state_indices.iter().any(|list| negative(list)) {
        return refuse(WireErrorKind::BadInteger, "a negative index");
    }
    if message.device_kv_indices.as_deref().is_some_and(negative) {
        return refuse(WireErrorKind::BadInteger, "a negative device page index");
    }
    if message.required_dst_info_num == 0 {
        return refuse(WireErrorKind::BadInteger, "required dst info num 0: the room would never begin");
    }
    Ok(())
}

pub(crate) fn write_state_indices(writer: &mut FrameWriter, lists: &[Vec<i32>]) -> Result<(), WireError> {
    if lists.is_empty() {
        writer.empty();
        return Ok(());
    }
    writer.built("state indices", |out| pack::put_nested(out, lists.iter().map(Vec::as_slice)))
}

/// What NIXL and Mooncake say about a missing aux index.
pub(crate) fn aux_index_needed() -> WireError {
    unsupported(MESSAGE, "an aux index is needed: 0.5.23 stops on the `None` sent instead")
}
