//! Which chunk a `send()` is: its place in the request, and whether it is the last.

use super::ChunkSpec;

/// Why a `send()` is refused. The room is not changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SendError {
    /// The last chunk is out already.
    #[error("send() after the last chunk")]
    AfterLast,
    /// More pages than were announced: the request would never be complete (0.5.23 waits for ever).
    #[error("send() of {pages} pages after {sent} of {total}")]
    TooManyPages {
        /// Pages of this call.
        pages: usize,
        /// Pages sent before.
        sent: u32,
        /// Pages announced.
        total: u32,
    },
}

/// Counts the pages of a request as they are sent. The chunk that completes the announced number is the last; a request
/// without pages is one empty chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SendCursor {
    total: u32,
    aux_index: Option<u32>,
    sent: u32,
    last_sent: bool,
}

impl SendCursor {
    /// A request of `total` pages, with its metadata slot.
    pub fn new(total: u32, aux_index: Option<u32>) -> Self {
        Self { total, aux_index, sent: 0, last_sent: false }
    }

    /// The chunk these pages are. Its aux slot is named with the last one only.
    ///
    /// # Errors
    /// [`SendError`].
    pub fn next(&mut self, pages: &[i32]) -> Result<ChunkSpec, SendError> {
        if self.last_sent {
            return Err(SendError::AfterLast);
        }
        let end = u32::try_from(pages.len()).ok().and_then(|n| self.sent.checked_add(n));
        let Some(end) = end.filter(|end| *end <= self.total) else {
            return Err(SendError::TooManyPages { pages: pages.len(), sent: self.sent, total: self.total });
        };
        let is_last = end == self.total;
        let chunk = ChunkSpec {
            pages: pages.into(),
            index_slice: self.sent..end,
            is_last,
            has_wait_event: false,
            aux_index: self.aux_index.filter(|_| is_last),
        };
        self.sent = end;
        self.last_sent = is_last;
        Ok(chunk)
    }
}
