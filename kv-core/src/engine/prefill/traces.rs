//! Trace contexts of chunks (A3): each is carried with its chunk, entered around what is said of it, and finished when the
//! chunk is, or when its room ends.

use std::collections::VecDeque;

use tracing::Span;

use super::*;

/// Contexts of the chunks of one room that are not finished, in order of the chunks. Chunks finish in order.
#[derive(Debug, Default)]
pub(super) struct Traces(VecDeque<(u32, Span)>);

impl Traces {
    pub fn insert(&mut self, chunk: u32, span: Span) {
        self.0.push_back((chunk, span));
    }

    /// The chunk's context; a disabled one for a chunk without.
    pub fn of(&self, chunk: u32) -> Span {
        self.0.iter().find(|(c, _)| *c == chunk).map_or_else(Span::none, |(_, span)| span.clone())
    }
}

impl PrefillShard {
    /// Say something in the context of a chunk.
    pub(super) fn in_trace(&self, key: RoomKey, chunk: u32, say: impl FnOnce(Option<&'static str>, u64)) {
        let Some(e) = self.rooms.get(key) else { return };
        let room = e.room.room().get();
        e.traces.of(chunk).in_scope(|| say(self.hooks.sender_trace_module(), room));
    }

    /// Finish the contexts of chunks that have ended.
    pub(super) fn finish_traces(&mut self, key: RoomKey) {
        let Some(e) = self.rooms.get_mut(key) else { return };
        if e.traces.0.is_empty() {
            return;
        }
        let module = self.hooks.sender_trace_module();
        let (room, poll, ended) = (e.room.room().get(), e.room.poll(), e.room.ended_before());
        let reason = e.room.failure().map(|f| &*f.reason).unwrap_or_default();
        while e.traces.0.front().is_some_and(|(chunk, _)| *chunk < ended) {
            let Some((chunk, span)) = e.traces.0.pop_front() else { return };
            span.in_scope(|| match poll {
                KvPoll::Failed => tracing::debug!(module, room, chunk, reason, "kv chunk failed with its room"),
                _ => tracing::debug!(module, room, chunk, "kv chunk sent"),
            });
        }
    }
}
