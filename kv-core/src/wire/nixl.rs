//! The NIXL dialect (protocol 6.1.1, 6.2): a guard before registration and metadata, a tagged status with a reason.
//!
//! The embedded TCP transport speaks the same frames behind a guard of its own.

use bytes::Bytes;

use super::common;
use super::destinations;
use super::dialect::Dialect;
use super::frames::{FrameReader, FrameWriter, check_shape, unknown_tag, unsupported};
use super::geometry::{self, StateLists};
use super::message::*;
use super::pack;
use crate::control::Multipart;
use crate::limits::Limits;
use crate::memory::MemoryKind;

/// SGLang's guard before NIXL registrations and metadata.
pub const NIXL_GUARD: &str = "NixlMsgGuard";

const STATUS: &[u8] = b"KV_STATUS";

/// NIXL's frames, behind a guard.
///
/// A room's metadata needs an aux index here, for a dummy too: 0.5.23 would write `None` for a missing one, which stops
/// the prefill that reads it, so it is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NixlDialect {
    name: &'static str,
    guard: &'static str,
}

impl Default for NixlDialect {
    fn default() -> Self {
        Self::new()
    }
}

impl NixlDialect {
    /// SGLang's own.
    pub const fn new() -> Self {
        Self { name: "nixl", guard: NIXL_GUARD }
    }

    /// The same frames behind another guard, as the embedded TCP transport uses them; its name is `tcp`.
    pub const fn with_guard(guard: &'static str) -> Self {
        Self { name: "tcp", guard }
    }

    /// The same dialect under another name.
    pub const fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }

    /// The text that registration and metadata begin with.
    pub const fn guard(&self) -> &'static str {
        self.guard
    }

    fn parse_registration(frames: &[Bytes], limits: &Limits) -> Result<Registration, WireError> {
        let reader = FrameReader::new(geometry::MESSAGE, frames, 13, limits)?;
        let entries = limits.max_entries;
        let kv: Vec<u64> = reader.array(6, "KV addresses", entries)?;
        let gpu_id = reader.int(9, "gpu id")?;
        let kv_item_len = reader.int(12, "KV item length")?;
        let at = |at, name| move |error| reader.error(at, name, error);

        let mut kv_item_lens: Vec<u64> = reader.array(19, "KV item lengths", entries)?;
        if kv_item_lens.is_empty() {
            // Older peers have the same length for all.
            kv_item_lens = vec![kv_item_len; kv.len()];
        }
        geometry::check_count("lengths", "KV entries", kv_item_lens.len(), kv.len())
            .map_err(at(19, "KV item lengths"))?;
        let kv_kinds = match reader.optional(18) {
            Some(frame) => pack::get_mem_kinds(frame, kv.len(), gpu_id).map_err(at(18, "memory kinds"))?,
            None => Vec::new(),
        };
        let kv_layer_ids: Vec<u32> = reader.array(21, "KV layer ids", entries)?;
        geometry::check_count("ids", "KV entries", kv_layer_ids.len(), kv.len()).map_err(at(21, "KV layer ids"))?;

        let state_addrs = reader.nested::<u64>(8, "state addresses")?;
        let lists = StateLists {
            item_lens: reader.nested(13, "state item lengths")?,
            dims: reader.nested(14, "state dims")?,
            layer_ids: reader.nested(20, "state layer ids")?,
            region_lens: reader.nested(24, "state region lengths")?,
        };
        let state =
            lists.pair(state_addrs.into_iter().map(Buffers::Addrs).collect()).map_err(at(8, "state addresses"))?;

        let attn_tp_size = reader.int(10, "attention TP size")?;
        let dcp_size = reader.optional_int(22, "DCP size")?.unwrap_or(1);
        let dcp_rank = reader.optional_int(23, "DCP rank")?.unwrap_or(0);
        geometry::check_groups(attn_tp_size, dcp_size, dcp_rank).map_err(at(22, "DCP size"))?;

        Ok(Registration {
            endpoint: reader.endpoint(2)?,
            name: reader.id(4, "agent name")?,
            metadata: reader.shared(5),
            kv: Buffers::Addrs(kv),
            kv_item_lens,
            kv_item_len,
            kv_slots: reader.optional_int(17, "slots per KV entry")?,
            kv_kinds,
            kv_layer_ids,
            aux: Buffers::Addrs(reader.array(7, "aux addresses", entries)?),
            state,
            gpu_id,
            attn_tp_size,
            engine_rank: reader.int(11, "engine rank")?,
            dcp_size,
            dcp_rank,
            staging: geometry::read_staging(reader, 15)?,
            staging_layer_ids: Vec::new(),
        })
    }

    fn parse_metadata(frames: &[Bytes], limits: &Limits) -> Result<Metadata, WireError> {
        let reader = FrameReader::new(destinations::MESSAGE, frames, 8, limits)?;
        let room = reader.int(1, "room")?;
        let endpoint = reader.endpoint(2)?;
        let name = reader.id(4, "agent name")?;
        let dst_pages = reader.pages(5, "page indices")?;
        let aux_index = Some(reader.int(6, "aux index")?);
        let required_dst_info_num = destinations::required_dst_info_num(reader, 7)?;
        let state_indices = reader.state_indices(8)?;
        let decode_prefix_len = reader.optional_int(9, "decode prefix length")?;
        let is_dummy = match reader.optional_int::<i64>(10, "dummy flag")? {
            Some(flag) => flag != 0,
            // Peers from before the flag: nothing to write, unless decode has it all already.
            None => dst_pages.is_empty() && decode_prefix_len.unwrap_or(0) == 0,
        };
        let metadata = Metadata {
            room,
            endpoint,
            name,
            dst_pages,
            aux_index,
            required_dst_info_num,
            state_indices,
            decode_prefix_len,
            is_dummy,
            device_kv_indices: None,
        };
        Ok(destinations::without_dummy_indices(metadata))
    }
}

impl Dialect for NixlDialect {
    fn name(&self) -> &'static str {
        self.name
    }

    fn registers_once(&self) -> bool {
        self.guard == NIXL_GUARD
    }

    fn encode_registration(&self, message: &Registration) -> Result<Multipart, WireError> {
        geometry::check(message)?;
        let elsewhere = |kind: &MemoryKind| match kind {
            MemoryKind::Vram { device } => i64::from(*device) != message.gpu_id,
            MemoryKind::Dram => false,
        };
        if message.kv_kinds.iter().any(elsewhere) {
            return Err(unsupported(geometry::MESSAGE, format!("VRAM of another device than gpu {}", message.gpu_id)));
        }
        let mut writer = FrameWriter::new(geometry::MESSAGE, geometry::size_hint(message));
        writer.fixed(self.guard.as_bytes());
        writer.fixed(common::NO_ROOM);
        writer.endpoint(&message.endpoint)?;
        writer.id("agent name", &message.name)?;
        writer.shared(&message.metadata);
        writer.array(geometry::addrs(&message.kv, "KV")?);
        writer.array(geometry::addrs(&message.aux, "aux")?);
        geometry::write_state_addrs(&mut writer, &message.state)?;
        writer.i64(message.gpu_id);
        writer.u32(message.attn_tp_size);
        writer.u32(message.engine_rank);
        writer.u64(message.kv_item_len);
        geometry::write_state(&mut writer, "state item lengths", &message.state, |state| &state.item_lens)?;
        geometry::write_state(&mut writer, "state dims", &message.state, |state| &state.dims)?;
        geometry::write_staging(&mut writer, message.staging);
        match message.kv_slots {
            Some(slots) => writer.u64(slots),
            None => writer.empty(),
        }
        writer.built("memory kinds", |out| {
            pack::put_mem_kinds(out, &message.kv_kinds);
            Ok(())
        })?;
        writer.array(&message.kv_item_lens);
        geometry::write_state(&mut writer, "state layer ids", &message.state, |state| &state.layer_ids)?;
        writer.array(&message.kv_layer_ids);
        writer.u32(message.dcp_size);
        writer.u32(message.dcp_rank);
        // A list of empty lists would tell prefill to prepare a state path without regions.
        if message.state.iter().all(|state| state.region_lens.is_empty()) {
            writer.empty();
        } else {
            geometry::write_state(&mut writer, "state region lengths", &message.state, |state| &state.region_lens)?;
        }
        Ok(writer.finish())
    }

    fn encode_metadata(&self, message: &Metadata) -> Result<Multipart, WireError> {
        destinations::check(message)?;
        let Some(aux_index) = message.aux_index else {
            return Err(destinations::aux_index_needed());
        };
        let (pages, state_indices) = destinations::sent_indices(message);
        let mut writer = FrameWriter::new(destinations::MESSAGE, destinations::size_hint(message));
        writer.fixed(self.guard.as_bytes());
        writer.u64(message.room);
        writer.endpoint(&message.endpoint)?;
        writer.id("agent name", &message.name)?;
        writer.array(pages);
        writer.u32(aux_index);
        writer.u32(message.required_dst_info_num);
        destinations::write_state_indices(&mut writer, state_indices)?;
        writer.u64(message.decode_prefix_len.unwrap_or(0));
        writer.u64(message.is_dummy.into());
        Ok(writer.finish())
    }

    fn encode_status(&self, message: &KvStatus) -> Result<Multipart, WireError> {
        Ok(common::encode_status(message, Some(STATUS), true))
    }

    fn encode_chunk_ready(&self, message: &ChunkReady) -> Result<Multipart, WireError> {
        common::encode_chunk_ready(message)
    }

    fn encode_staging_req(&self, message: &StagingReq) -> Result<Multipart, WireError> {
        common::encode_staging_req(message, false)
    }

    fn encode_staging_rsp(&self, message: &StagingRsp) -> Result<Multipart, WireError> {
        common::encode_staging_rsp(message)
    }

    fn encode_watermark(&self, message: &Watermark) -> Result<Multipart, WireError> {
        common::encode_watermark(message)
    }

    fn parse_to_prefill(&self, frames: &[Bytes], limits: &Limits) -> Result<ToPrefill, WireError> {
        check_shape(frames, limits)?;
        // ABORT has no guard, so the tags come first (F24).
        match &frames[0][..] {
            common::WATERMARK => common::parse_watermark(frames, limits).map(ToPrefill::Watermark),
            common::STAGING_RSP => common::parse_staging_rsp(frames, limits).map(ToPrefill::StagingRsp),
            common::ABORT => common::parse_abort(frames, limits).map(ToPrefill::Abort),
            common::BOOTSTRAP => common::parse_bootstrap(frames, limits).map(ToPrefill::Bootstrap),
            guard if guard == self.guard.as_bytes() => match frames.get(1).map(|frame| &frame[..]) {
                Some(common::NO_ROOM) => {
                    Self::parse_registration(frames, limits).map(|message| ToPrefill::Registration(Box::new(message)))
                }
                _ => Self::parse_metadata(frames, limits).map(ToPrefill::Metadata),
            },
            other => Err(unknown_tag("prefill", other)),
        }
    }

    fn parse_to_decode(&self, frames: &[Bytes], limits: &Limits) -> Result<ToDecode, WireError> {
        check_shape(frames, limits)?;
        match &frames[0][..] {
            common::CHUNK_READY => common::parse_chunk_ready(frames, limits).map(ToDecode::ChunkReady),
            common::STAGING_REQ => common::parse_staging_req(frames, limits).map(ToDecode::StagingReq),
            common::ABORT_ACK => common::parse_abort_ack(frames, limits).map(ToDecode::AbortAck),
            STATUS => common::parse_status(frames, 1, limits).map(ToDecode::Status),
            other => Err(unknown_tag("decode", other)),
        }
    }
}
