//! The messages whose frames are the same in every dialect that has them (protocol 6.3 to 6.11).

use bytes::Bytes;

use super::frames::{FrameReader, FrameWriter};
use super::message::{
    Abort, AbortAck, AuxData, BootstrapHello, ChunkReady, KvStatus, StagingReq, StagingRsp, Watermark, WireError,
    WireErrorKind,
};
use super::pack::PackError;
use crate::control::Multipart;
use crate::ids::PrefillRank;
use crate::limits::Limits;
use crate::poll::KvPoll;

pub(crate) const ABORT: &[u8] = b"ABORT";
pub(crate) const ABORT_ACK: &[u8] = b"ABORT_ACK";
pub(crate) const AUX_DATA: &[u8] = b"AUX_DATA";
pub(crate) const BOOTSTRAP: &[u8] = b"BOOTSTRAP";
pub(crate) const CHUNK_READY: &[u8] = b"CHUNK_READY";
pub(crate) const STAGING_REQ: &[u8] = b"STAGING_REQ";
pub(crate) const STAGING_RSP: &[u8] = b"STAGING_RSP";
pub(crate) const WATERMARK: &[u8] = b"WATERMARK";

/// What stands in a registration where metadata has its room.
pub(crate) const NO_ROOM: &[u8] = b"None";

const RANK: &str = "prefill rank";

fn rank(reader: FrameReader<'_>, at: usize) -> Result<PrefillRank, WireError> {
    reader.int(at, RANK).map(PrefillRank)
}

/// Status with an optional tag; `with_reason` says whether the dialect writes a reason frame.
pub(crate) fn encode_status(message: &KvStatus, tag: Option<&'static [u8]>, with_reason: bool) -> Multipart {
    let reason = message.reason.as_deref().filter(|_| with_reason);
    let mut writer = FrameWriter::new("status", 32 + reason.map_or(0, str::len));
    if let Some(tag) = tag {
        writer.fixed(tag);
    }
    writer.u64(message.room);
    writer.u64(message.status as u64);
    writer.u32(message.prefill_rank.0);
    match reason {
        Some(reason) => writer.text(reason),
        None if with_reason => writer.empty(),
        None => {}
    }
    writer.finish()
}

/// Status whose room is in frame `at`; the reason is understood in every dialect.
pub(crate) fn parse_status(frames: &[Bytes], at: usize, limits: &Limits) -> Result<KvStatus, WireError> {
    let reader = FrameReader::new("status", frames, at + 3, limits)?;
    let room = reader.int(at, "room")?;
    let number = reader.int(at + 1, "status")?;
    let Some(status) = KvPoll::from_wire(number) else {
        return reader.fail(at + 1, "status", WireErrorKind::BadInteger, format!("{number} is no status"));
    };
    let prefill_rank = rank(reader, at + 2)?;
    let reason = reader.optional(at + 3).map(|frame| reason_text(frame, limits.max_text_bytes));
    Ok(KvStatus { room, status, prefill_rank, reason })
}

/// A reason is for people, and a status must not be lost because of it: bad UTF-8 is replaced, a long one is cut.
fn reason_text(frame: &[u8], max: usize) -> String {
    let mut text = String::from_utf8_lossy(&frame[..frame.len().min(max)]).into_owned();
    let mut end = max.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.truncate(end);
    text
}

pub(crate) fn encode_chunk_ready(message: &ChunkReady) -> Result<Multipart, WireError> {
    let mut writer = FrameWriter::new("CHUNK_READY", 64 + message.writer_id.len());
    writer.fixed(CHUNK_READY);
    writer.u64(message.room);
    writer.u32(message.chunk_idx);
    writer.u32(message.page_start);
    writer.u32(message.num_pages);
    writer.id("writer id", &message.writer_id)?;
    if let Some(rank) = message.prefill_rank {
        writer.u32(rank.0);
    }
    Ok(writer.finish())
}

pub(crate) fn parse_chunk_ready(frames: &[Bytes], limits: &Limits) -> Result<ChunkReady, WireError> {
    let reader = FrameReader::new("CHUNK_READY", frames, 6, limits)?;
    let max = count_bound(limits);
    let room = reader.int(1, "room")?;
    // A chunk holds a page at least, so neither a chunk's number nor its place can be past the last page.
    let chunk_idx = reader.within(2, "chunk", 0..=max)?;
    let page_start = reader.within(3, "first page", 0..=max)?;
    let num_pages = reader.within(4, "pages", 0..=max - page_start)?;
    let writer_id = reader.id(5, "writer id")?;
    let prefill_rank = reader.optional_int(6, RANK)?.map(PrefillRank);
    Ok(ChunkReady { room, chunk_idx, page_start, num_pages, writer_id, prefill_rank })
}

fn count_bound(limits: &Limits) -> u32 {
    u32::try_from(limits.max_pages).unwrap_or(u32::MAX)
}

/// `with_pp_rank`: Mooncake says which PP rank asks, NIXL never does.
pub(crate) fn encode_staging_req(message: &StagingReq, with_pp_rank: bool) -> Result<Multipart, WireError> {
    let mut writer = FrameWriter::new("STAGING_REQ", 64 + message.session_id.len());
    writer.fixed(STAGING_REQ);
    writer.u64(message.room);
    writer.u32(message.chunk_idx);
    writer.u32(message.num_pages);
    writer.id("session id", &message.session_id)?;
    if let Some(pp_rank) = message.requester_pp_rank.filter(|_| with_pp_rank) {
        writer.u32(pp_rank);
    }
    Ok(writer.finish())
}

pub(crate) fn parse_staging_req(frames: &[Bytes], limits: &Limits) -> Result<StagingReq, WireError> {
    let reader = FrameReader::new("STAGING_REQ", frames, 5, limits)?;
    let max = count_bound(limits);
    Ok(StagingReq {
        room: reader.int(1, "room")?,
        chunk_idx: reader.within(2, "chunk", 0..=max)?,
        num_pages: reader.within(3, "pages", 0..=max)?,
        session_id: reader.id(4, "session id")?,
        requester_pp_rank: reader.optional_int(5, "requester's pp rank")?,
    })
}

pub(crate) fn encode_staging_rsp(message: &StagingRsp) -> Result<Multipart, WireError> {
    let mut writer = FrameWriter::new("STAGING_RSP", 96 + message.session_id.len());
    writer.fixed(STAGING_RSP);
    writer.u64(message.room);
    writer.u32(message.chunk_idx);
    writer.i64(message.offset);
    writer.i64(message.round);
    writer.i64(message.end);
    writer.id("session id", &message.session_id)?;
    Ok(writer.finish())
}

pub(crate) fn parse_staging_rsp(frames: &[Bytes], limits: &Limits) -> Result<StagingRsp, WireError> {
    let reader = FrameReader::new("STAGING_RSP", frames, 7, limits)?;
    let rsp = StagingRsp {
        room: reader.int(1, "room")?,
        chunk_idx: reader.within(2, "chunk", 0..=count_bound(limits))?,
        offset: reader.int(3, "offset")?,
        round: reader.int(4, "round")?,
        end: reader.int(5, "end")?,
        session_id: reader.id(6, "session id")?,
    };
    // -2 says that the chunk can never fit; its round and end mean nothing then.
    if rsp.offset < -2 || (rsp.offset >= 0 && rsp.end < rsp.offset) {
        let detail = format!("offset {} and end {} are no range of a ring", rsp.offset, rsp.end);
        return reader.fail(3, "offset", WireErrorKind::Inconsistent, detail);
    }
    Ok(rsp)
}

pub(crate) fn encode_watermark(message: &Watermark) -> Result<Multipart, WireError> {
    let mut writer = FrameWriter::new("WATERMARK", 48 + message.session_id.len());
    writer.fixed(WATERMARK);
    writer.i64(message.round);
    writer.i64(message.tail);
    if !message.session_id.is_empty() {
        writer.id("session id", &message.session_id)?;
    }
    Ok(writer.finish())
}

pub(crate) fn parse_watermark(frames: &[Bytes], limits: &Limits) -> Result<Watermark, WireError> {
    let reader = FrameReader::new("WATERMARK", frames, 3, limits)?;
    Ok(Watermark {
        round: reader.int(1, "round")?,
        tail: reader.int(2, "tail")?,
        session_id: match reader.optional(3) {
            Some(_) => reader.id(3, "session id")?,
            None => String::new(),
        },
    })
}

/// A generation is sent behind an address only: without one nobody could be acked.
pub(crate) fn encode_abort(message: &Abort) -> Result<Multipart, WireError> {
    let mut writer = FrameWriter::new("ABORT", 96);
    writer.fixed(ABORT);
    writer.u64(message.room);
    if let Some(endpoint) = &message.endpoint {
        writer.endpoint(endpoint)?;
        if let Some(generation) = message.generation {
            writer.u64(generation);
        }
    }
    Ok(writer.finish())
}

/// Only the room must be right: whoever sends an ABORT wants the room stopped, whatever else is wrong with it.
pub(crate) fn parse_abort(frames: &[Bytes], limits: &Limits) -> Result<Abort, WireError> {
    let reader = FrameReader::new("ABORT", frames, 2, limits)?;
    let room = reader.int(1, "room")?;
    let endpoint = if frames.len() >= 4 { reader.endpoint(2).ok() } else { None };
    let generation = if endpoint.is_some() { reader.optional_int(4, "generation").unwrap_or(None) } else { None };
    Ok(Abort { room, endpoint, generation })
}

pub(crate) fn encode_abort_ack(message: &AbortAck) -> Multipart {
    let mut writer = FrameWriter::new("ABORT_ACK", 64);
    writer.fixed(ABORT_ACK);
    writer.u64(message.room);
    writer.u32(message.prefill_rank.0);
    writer.u64(message.generation);
    writer.finish()
}

/// An ACK without a generation (older peers, Mooncake with deferred release off) proves nothing and is refused, as
/// 0.5.23 refuses it.
pub(crate) fn parse_abort_ack(frames: &[Bytes], limits: &Limits) -> Result<AbortAck, WireError> {
    let reader = FrameReader::new("ABORT_ACK", frames, 4, limits)?;
    Ok(AbortAck {
        room: reader.int(1, "room")?,
        prefill_rank: rank(reader, 2)?,
        generation: reader.int(3, "generation")?,
    })
}

pub(crate) fn encode_aux_data(message: &AuxData) -> Result<Multipart, WireError> {
    let mut writer = FrameWriter::new("AUX_DATA", 64);
    writer.fixed(AUX_DATA);
    writer.u64(message.room);
    writer.u32(message.buffer_index);
    writer.u32(message.aux_index);
    writer.built("length", |out| {
        let length = u32::try_from(message.data.len())
            .map_err(|_| PackError::too_large("bytes", message.data.len(), u32::MAX as usize))?;
        // The one big-endian number of the protocol.
        out.extend_from_slice(&length.to_be_bytes());
        Ok(())
    })?;
    writer.shared(&message.data);
    Ok(writer.finish())
}

pub(crate) fn parse_aux_data(frames: &[Bytes], limits: &Limits) -> Result<AuxData, WireError> {
    let reader = FrameReader::new("AUX_DATA", frames, 6, limits)?;
    let entries = u32::try_from(limits.max_entries).unwrap_or(u32::MAX);
    let room = reader.int(1, "room")?;
    let buffer_index = reader.within(2, "buffer", 0..=entries.saturating_sub(1))?;
    let aux_index = reader.int(3, "aux index")?;
    let data = reader.shared(5);
    match <[u8; 4]>::try_from(reader.bytes(4)) {
        Ok(length) if u32::from_be_bytes(length) as usize == data.len() => {
            Ok(AuxData { room, buffer_index, aux_index, data })
        }
        Ok(length) => {
            let detail = format!("{} bytes announced, {} came", u32::from_be_bytes(length), data.len());
            reader.fail(4, "length", WireErrorKind::Inconsistent, detail)
        }
        Err(_) => reader.fail(4, "length", WireErrorKind::BadArray, "a length has 4 bytes"),
    }
}

pub(crate) fn encode_bootstrap(message: &BootstrapHello) -> Result<Multipart, WireError> {
    let mut writer = FrameWriter::new("BOOTSTRAP", 64);
    writer.fixed(BOOTSTRAP);
    writer.u64(message.room);
    writer.endpoint(&message.endpoint)?;
    Ok(writer.finish())
}

pub(crate) fn parse_bootstrap(frames: &[Bytes], limits: &Limits) -> Result<BootstrapHello, WireError> {
    let reader = FrameReader::new("BOOTSTRAP", frames, 4, limits)?;
    Ok(BootstrapHello { room: reader.int(1, "room")?, endpoint: reader.endpoint(2)? })
}
