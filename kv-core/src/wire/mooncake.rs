//! The Mooncake dialect (protocol 6.1.2, 6.2): no guard; registration and metadata are told apart by the room frame.

use bytes::Bytes;

use super::common;
use super::destinations;
use super::dialect::Dialect;
use super::ext::{self, MessageKind};
use super::frames::{FrameReader, FrameWriter, check_shape, unknown_tag};
use super::geometry::{self, StateLists};
use super::message::*;
use super::pack;
use crate::control::Multipart;
use crate::limits::Limits;

/// Mooncake's frames. A status carries no reason when sent, but one is understood when received.
///
/// A dummy is what has neither pages nor an aux index, so a record that is none must have an aux index: without pages
/// it would be read as a dummy, with pages 0.5.23 would write `None` for it and stop the prefill that reads it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MooncakeDialect;

impl MooncakeDialect {
    fn parse_registration(frames: &[Bytes], limits: &Limits) -> Result<Registration, WireError> {
        let reader = FrameReader::new(geometry::MESSAGE, frames, 10, limits)?;
        let entries = limits.max_entries;
        let at = |at, name| move |error| reader.error(at, name, error);
        let kv: Vec<u64> = reader.array(4, "KV addresses", entries)?;
        let kv_layer_ids: Vec<u32> = reader.array(12, "KV layer ids", entries)?;
        geometry::check_count("ids", "KV entries", kv_layer_ids.len(), kv.len()).map_err(at(12, "KV layer ids"))?;
        let kv_item_lens: Vec<u64> = reader.array(19, "KV item lengths", entries)?;
        geometry::check_count("lengths", "KV entries", kv_item_lens.len(), kv.len())
            .map_err(at(19, "KV item lengths"))?;

        let state_addrs = reader.nested::<u64>(6, "state addresses")?;
        let lists = StateLists {
            item_lens: reader.nested(10, "state item lengths")?,
            dims: reader.nested(11, "state dims")?,
            layer_ids: reader.nested(13, "state layer ids")?,
            region_lens: Vec::new(),
        };
        let state =
            lists.pair(state_addrs.into_iter().map(Buffers::Addrs).collect()).map_err(at(6, "state addresses"))?;

        let attn_tp_size = reader.int(8, "attention TP size")?;
        let dcp_size = reader.optional_int(16, "DCP size")?.unwrap_or(1);
        let dcp_rank = reader.optional_int(17, "DCP rank")?.unwrap_or(0);
        geometry::check_groups(attn_tp_size, dcp_size, dcp_rank).map_err(at(16, "DCP size"))?;

        Ok(Registration {
            endpoint: reader.endpoint(1)?,
            name: reader.id(3, "session id")?,
            metadata: Bytes::new(),
            kv: Buffers::Addrs(kv),
            kv_item_lens,
            kv_item_len: reader.int(9, "KV item length")?,
            kv_slots: None,
            kv_kinds: Vec::new(),
            kv_layer_ids,
            aux: Buffers::Addrs(reader.array(5, "aux addresses", entries)?),
            state,
            gpu_id: 0,
            attn_tp_size,
            engine_rank: reader.int(7, "engine rank")?,
            dcp_size,
            dcp_rank,
            staging: geometry::read_staging(reader, 14)?,
            staging_layer_ids: reader.array(18, "staging layer ids", entries)?,
        })
    }

    fn parse_metadata(frames: &[Bytes], limits: &Limits) -> Result<Metadata, WireError> {
        let reader = FrameReader::new(destinations::MESSAGE, frames, 8, limits)?;
        let is_dummy = reader.optional(4).is_none() && reader.optional(5).is_none();
        let device = reader.optional(9).map(|_| reader.pages(9, "device page indices")).transpose()?;
        let metadata = Metadata {
            room: reader.int(0, "room")?,
            endpoint: reader.endpoint(1)?,
            name: reader.id(3, "session id")?,
            dst_pages: reader.pages(4, "page indices")?,
            aux_index: if is_dummy { None } else { Some(reader.int(5, "aux index")?) },
            required_dst_info_num: destinations::required_dst_info_num(reader, 7)?,
            state_indices: reader.state_indices(6)?,
            decode_prefix_len: reader.optional_int(8, "decode prefix length")?,
            is_dummy,
            device_kv_indices: device,
        };
        Ok(destinations::without_dummy_indices(metadata))
    }
}

/// Neither a known tag nor, after blanks and signs, a number.
fn is_room(frame: &[u8]) -> bool {
    pack::parse_int(frame).is_ok()
}

impl Dialect for MooncakeDialect {
    fn name(&self) -> &'static str {
        "mooncake"
    }

    fn frames(&self, kind: MessageKind) -> usize {
        match kind {
            MessageKind::Registration => 20,
            MessageKind::Metadata => 10,
            MessageKind::Status => 4,
            other => ext::common_frames(other),
        }
    }

    fn encode_registration(&self, message: &Registration) -> Result<Multipart, WireError> {
        geometry::check(message)?;
        let mut writer = FrameWriter::new(geometry::MESSAGE, geometry::size_hint(message));
        writer.fixed(common::NO_ROOM);
        writer.endpoint(&message.endpoint)?;
        writer.id("session id", &message.name)?;
        writer.array(geometry::addrs(&message.kv, "KV")?);
        writer.array(geometry::addrs(&message.aux, "aux")?);
        geometry::write_state_addrs(&mut writer, &message.state)?;
        writer.u32(message.engine_rank);
        writer.u32(message.attn_tp_size);
        writer.u64(message.kv_item_len);
        geometry::write_state(&mut writer, "state item lengths", &message.state, |state| &state.item_lens)?;
        geometry::write_state(&mut writer, "state dims", &message.state, |state| &state.dims)?;
        writer.array(&message.kv_layer_ids);
        geometry::write_state(&mut writer, "state layer ids", &message.state, |state| &state.layer_ids)?;
        geometry::write_staging(&mut writer, message.staging);
        writer.u32(message.dcp_size);
        writer.u32(message.dcp_rank);
        writer.array(&message.staging_layer_ids);
        writer.array(&message.kv_item_lens);
        Ok(writer.finish())
    }

    fn encode_metadata(&self, message: &Metadata) -> Result<Multipart, WireError> {
        destinations::check(message)?;
        if !message.is_dummy && message.aux_index.is_none() {
            return Err(destinations::aux_index_needed());
        }
        let (pages, state_indices) = destinations::sent_indices(message);
        let mut writer = FrameWriter::new(destinations::MESSAGE, destinations::size_hint(message));
        writer.u64(message.room);
        writer.endpoint(&message.endpoint)?;
        writer.id("session id", &message.name)?;
        writer.array(pages);
        match message.aux_index.filter(|_| !message.is_dummy) {
            Some(aux_index) => writer.u32(aux_index),
            None => writer.empty(),
        }
        destinations::write_state_indices(&mut writer, state_indices)?;
        writer.u32(message.required_dst_info_num);
        writer.u64(message.decode_prefix_len.unwrap_or(0));
        writer.array(message.device_kv_indices.as_deref().filter(|_| !message.is_dummy).unwrap_or_default());
        Ok(writer.finish())
    }

    fn encode_status(&self, message: &KvStatus) -> Result<Multipart, WireError> {
        Ok(common::encode_status(message, None, false))
    }

    fn encode_chunk_ready(&self, message: &ChunkReady) -> Result<Multipart, WireError> {
        common::encode_chunk_ready(message)
    }

    fn encode_staging_req(&self, message: &StagingReq) -> Result<Multipart, WireError> {
        common::encode_staging_req(message, true)
    }

    fn encode_staging_rsp(&self, message: &StagingRsp) -> Result<Multipart, WireError> {
        common::encode_staging_rsp(message)
    }

    fn encode_watermark(&self, message: &Watermark) -> Result<Multipart, WireError> {
        common::encode_watermark(message)
    }

    fn encode_aux_data(&self, message: &AuxData) -> Result<Multipart, WireError> {
        common::encode_aux_data(message)
    }

    fn parse_to_prefill(&self, frames: &[Bytes], limits: &Limits) -> Result<ToPrefill, WireError> {
        check_shape(frames, limits)?;
        match &frames[0][..] {
            common::WATERMARK => common::parse_watermark(frames, limits).map(ToPrefill::Watermark),
            common::STAGING_RSP => common::parse_staging_rsp(frames, limits).map(ToPrefill::StagingRsp),
            common::ABORT => common::parse_abort(frames, limits).map(ToPrefill::Abort),
            common::BOOTSTRAP => common::parse_bootstrap(frames, limits).map(ToPrefill::Bootstrap),
            common::NO_ROOM => {
                Self::parse_registration(frames, limits).map(|message| ToPrefill::Registration(Box::new(message)))
            }
            room if is_room(room) => Self::parse_metadata(frames, limits).map(ToPrefill::Metadata),
            other => Err(unknown_tag("prefill", other)),
        }
    }

    fn parse_to_decode(&self, frames: &[Bytes], limits: &Limits) -> Result<ToDecode, WireError> {
        check_shape(frames, limits)?;
        match &frames[0][..] {
            common::AUX_DATA => common::parse_aux_data(frames, limits).map(ToDecode::AuxData),
            common::CHUNK_READY => common::parse_chunk_ready(frames, limits).map(ToDecode::ChunkReady),
            common::STAGING_REQ => common::parse_staging_req(frames, limits).map(ToDecode::StagingReq),
            common::ABORT_ACK => common::parse_abort_ack(frames, limits).map(ToDecode::AbortAck),
            room if is_room(room) => common::parse_status(frames, 0, limits).map(ToDecode::Status),
            other => Err(unknown_tag("decode", other)),
        }
    }
}
