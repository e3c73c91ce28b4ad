//! From an op to requests: one for each span of its plan, which has joined what belongs together.

use std::sync::Arc;

use kv_core::memory::RegisteredRegion;
use kv_core::plan::Span;
use kv_core::transport::{TransportError, TransportErrorKind as ErrorKind, WriteOp};
use mooncake_wire::Descriptor;

use crate::flight::Piece;
use crate::peer::Peer;
use crate::transport::Core;

/// The pieces of an op, all of them looked at: nothing is sent of an op with a bad one.
pub(crate) fn lower(core: &Core, op: &WriteOp, peer: &Peer) -> Result<Vec<Piece>, TransportError> {
    let invalid = |text: String| TransportError::new(ErrorKind::InvalidArgument, text);
    if let Some(foreign) = op.regions.iter().find(|r| !core.is_ours(r)) {
        return Err(invalid(format!("{foreign:?} is not registered with this transport")));
    }
    let (total, most) = (op.plan.total_bytes(), core.target.config.max_op_bytes.max(1));
    if total > most {
        return Err(invalid(format!("an op of {total} bytes; at most {most}")));
    }
    let there = peer.described();
    // One more than there are spans: see `Flight::new`.
    let count = usize::try_from(op.plan.descriptor_count()).unwrap_or(0).saturating_add(1);
    let mut pieces = Vec::with_capacity(count.min(core.target.config.max_pieces_in_flight.max(1) + 1));
    let mut failed = None;
    op.plan.for_each_span(|span| {
        // Zero bytes: a target would refuse them, and there is nothing to move.
        if failed.is_some() || span.len == 0 {
            return;
        }
        match piece(&op.regions, &span, &there) {
            Ok(piece) => pieces.push(piece),
            Err(error) => failed = Some(error),
        }
    });
    failed.map_or(Ok(pieces), Err)
}

/// A span in a region of the op, and in one buffer of the peer. The peer would look too, and end the connection over it.
fn piece(regions: &[Arc<RegisteredRegion>], span: &Span, there: &Descriptor) -> Result<Piece, TransportError> {
    let invalid = |text: String| TransportError::new(ErrorKind::InvalidArgument, text);
    let region = regions
        .iter()
        .find(|r| r.id() == span.src_region)
        .ok_or_else(|| invalid(format!("region {} is not among those the op holds", span.src_region)))?;
    if span.src_offset.checked_add(span.len).is_none_or(|end| end > region.len()) {
        return Err(invalid(format!("{} bytes at {} of {region:?}", span.len, span.src_offset)));
    }
    if !there.holds(span.dst_addr, span.len) {
        let text = format!(
            "{} bytes at {:#x} of {}: a range that it did not register, or not yet when it was connected",
            span.len, span.dst_addr, there.name
        );
        return Err(TransportError::new(ErrorKind::Refused, text));
    }
    Ok(Piece { source: region.addr() + span.src_offset, target: span.dst_addr, len: span.len, fence: false })
}
