//! From an op to the library's tasks: one for each span of its plan, which has joined what belongs together.

use std::sync::Arc;

use kv_core::memory::RegisteredRegion;
use kv_core::plan::Span;
use kv_core::transport::{TransportError, TransportErrorKind as ErrorKind, WriteOp};

use crate::engine::Piece;
use crate::peer::Peer;
use crate::probe::Described;
use crate::transport::Core;

/// The pieces of an op, all of them looked at: nothing is posted of an op with a bad one.
pub(crate) fn lower(core: &Arc<Core>, op: &WriteOp, peer: &Peer) -> Result<Vec<Piece>, TransportError> {
    let invalid = |text: String| TransportError::new(ErrorKind::InvalidArgument, text);
    if let Some(foreign) = op.regions.iter().find(|r| !core.is_ours(r)) {
        return Err(invalid(format!("{foreign:?} is not registered with this engine")));
    }
    let (total, most) = (op.plan.total_bytes(), core.config.max_op_bytes.max(1));
    if total > most {
        return Err(invalid(format!("an op of {total} bytes; at most {most}")));
    }
    let there = peer.described();
    let mut pieces = Vec::with_capacity(usize::try_from(op.plan.descriptor_count()).unwrap_or(0));
    let mut failed = None;
    op.plan.for_each_span(|span| {
        // Zero bytes: the library calls them done, and sends nothing.
        if failed.is_some() || span.len == 0 {
            return;
        }
        match piece(&op.regions, &span, &there, peer) {
            Ok(piece) => pieces.push(piece),
            Err(error) => failed = Some(error),
        }
    });
    failed.map_or(Ok(pieces), Err)
}

/// A span in a region of the op, and in one buffer of the peer. The peer would look too, and end a connection over it.
fn piece(
    regions: &[Arc<RegisteredRegion>],
    span: &Span,
    there: &Described,
    peer: &Peer,
) -> Result<Piece, TransportError> {
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
            span.len, span.dst_addr, peer.name
        );
        return Err(TransportError::new(ErrorKind::Refused, text));
    }
    Ok(Piece { source: region.addr() + span.src_offset, target: span.dst_addr, len: span.len })
}
