//! One line a message.

use bytes::Bytes;
use kv_core::limits::Limits;
use kv_core::wire::{Dialect, ToDecode, ToPrefill};

/// Without addresses, which differ from run to run.
pub(super) fn message(dialect: &dyn Dialect, frames: &[Bytes], limits: &Limits, to_decode: bool) -> String {
    if to_decode {
        return match dialect.parse_to_decode(frames, limits) {
            Ok(ToDecode::Status(s)) => {
                let reason = s.reason.unwrap_or_default();
                format!("KV_STATUS room {} {:?} of rank {} {reason}", s.room, s.status, s.prefill_rank)
            }
            Ok(ToDecode::AbortAck(a)) => {
                format!("ABORT_ACK room {} of rank {}, generation {}", a.room, a.prefill_rank, a.generation)
            }
            _ => format!("{} strange frames", frames.len()),
        };
    }
    match dialect.parse_to_prefill(frames, limits) {
        Ok(ToPrefill::Registration(r)) => format!("registration of {}", r.name),
        Ok(ToPrefill::Metadata(m)) => {
            let dummy = if m.is_dummy { ", dummy" } else { "" };
            format!("metadata room {} pages {:?} slot {:?} from {}{dummy}", m.room, m.dst_pages, m.aux_index, m.name)
        }
        Ok(ToPrefill::Abort(a)) => format!("ABORT room {}, generation {:?}", a.room, a.generation),
        _ => format!("{} strange frames", frames.len()),
    }
}
