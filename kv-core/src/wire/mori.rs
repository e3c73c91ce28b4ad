//! The Mori dialect (protocol 6.1.3, 6.2): a guard before registration, metadata and status; buffers are opaque
//! descriptors in msgpack lists.

use bytes::Bytes;

use super::common;
use super::destinations;
use super::dialect::Dialect;
use super::ext::{self, MessageKind};
use super::frames::{FrameReader, FrameWriter, check_shape, unknown_tag};
use super::geometry::{self, StateLists};
use super::message::*;
use super::msgpack;
use crate::control::Multipart;
use crate::limits::Limits;

const GUARD: &[u8] = b"MoriMsgGuard";

/// Mori's frames. It has no staging messages. A registration carries no identity of its own: the engine key is inside
/// the engine descriptor, so [`Registration::name`] is left off.
///
/// Dummy records have no flag. 0.5.23 reads one as a dummy when it has no pages, no aux index **and no prefix length**,
/// and its decodes send the prefix length of a dummy too, so that a prefix hit turns dummies into real peers: such a
/// prefill reports Success for a rank that decode never asked. Here a record without pages and without an aux index is
/// a dummy whatever its prefix length says (a real one always has an aux index, a full prefix hit included), and a dummy
/// is sent without a prefix length, so that 0.5.23 reads it as one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MoriDialect;

impl MoriDialect {
    fn parse_registration(frames: &[Bytes], limits: &Limits) -> Result<Registration, WireError> {
        let reader = FrameReader::new(geometry::MESSAGE, frames, 12, limits)?;
        let entries = limits.max_entries;
        let at = |at, name| move |error| reader.error(at, name, error);
        let list = |place: usize, name: &'static str| {
            let read = || {
                let items = msgpack::get_descriptors(&reader.shared(place), entries)?;
                msgpack::none_elided(&items)?;
                Ok(items)
            };
            read().map_err(at(place, name))
        };
        let kv = list(5, "KV descriptors")?;
        let aux = list(6, "aux descriptors")?;
        let state = msgpack::get_descriptor_lists(&reader.shared(7), entries).map_err(at(7, "state descriptors"))?;
        let lists = StateLists {
            item_lens: reader.nested(12, "state item lengths")?,
            dims: reader.nested(13, "state dims")?,
            layer_ids: reader.nested(16, "state layer ids")?,
            region_lens: Vec::new(),
        };
        let state =
            lists.pair(state.into_iter().map(Buffers::Descriptors).collect()).map_err(at(7, "state descriptors"))?;
        let kv_layer_ids: Vec<u32> = reader.array(17, "KV layer ids", entries)?;
        geometry::check_count("ids", "KV entries", kv_layer_ids.len(), kv.len()).map_err(at(17, "KV layer ids"))?;

        let attn_tp_size = reader.int(9, "attention TP size")?;
        let dcp_size = reader.optional_int(14, "DCP size")?.unwrap_or(1);
        let dcp_rank = reader.optional_int(15, "DCP rank")?.unwrap_or(0);
        geometry::check_groups(attn_tp_size, dcp_size, dcp_rank).map_err(at(14, "DCP size"))?;

        Ok(Registration {
            endpoint: reader.endpoint(2)?,
            name: String::new(),
            metadata: reader.shared(4),
            kv: Buffers::Descriptors(kv),
            kv_item_lens: Vec::new(),
            kv_item_len: reader.int(11, "KV item length")?,
            kv_slots: None,
            kv_kinds: Vec::new(),
            kv_layer_ids,
            aux: Buffers::Descriptors(aux),
            state,
            gpu_id: reader.int(8, "gpu id")?,
            attn_tp_size,
            engine_rank: reader.int(10, "engine rank")?,
            dcp_size,
            dcp_rank,
            staging: None,
            staging_layer_ids: Vec::new(),
        })
    }

    fn parse_metadata(frames: &[Bytes], limits: &Limits) -> Result<Metadata, WireError> {
        let reader = FrameReader::new(destinations::MESSAGE, frames, 7, limits)?;
        let dst_pages = reader.pages(5, "page indices")?;
        let aux_index = match reader.optional_int::<i64>(6, "aux index")? {
            Some(0..) => reader.optional_int(6, "aux index")?,
            _ => None,
        };
        let required_dst_info_num = match reader.optional(8) {
            Some(_) => destinations::required_dst_info_num(reader, 8)?,
            None => 1,
        };
        let metadata = Metadata {
            room: reader.int(1, "room")?,
            endpoint: reader.endpoint(2)?,
            name: reader.id(4, "engine key")?,
            is_dummy: dst_pages.is_empty() && aux_index.is_none(),
            dst_pages,
            aux_index,
            required_dst_info_num,
            state_indices: reader.state_indices(7)?,
            decode_prefix_len: reader.optional_int(9, "decode prefix length")?,
            device_kv_indices: None,
        };
        Ok(destinations::without_dummy_indices(metadata))
    }
}

impl Dialect for MoriDialect {
    fn name(&self) -> &'static str {
        "mori"
    }

    fn registers_once(&self) -> bool {
        true
    }

    fn frames(&self, kind: MessageKind) -> usize {
        match kind {
            MessageKind::Registration => 18,
            MessageKind::Metadata => 10,
            MessageKind::Status => 5,
            other => ext::common_frames(other),
        }
    }

    fn encode_registration(&self, message: &Registration) -> Result<Multipart, WireError> {
        geometry::check(message)?;
        let kv = geometry::descriptors(&message.kv, "KV")?;
        let aux = geometry::descriptors(&message.aux, "aux")?;
        for component in &message.state {
            geometry::descriptors(&component.buffers, "state")?;
        }
        let state =
            message.state.iter().map(|state| geometry::descriptors(&state.buffers, "state").unwrap_or_default());

        let mut writer = FrameWriter::new(geometry::MESSAGE, 4096);
        writer.fixed(GUARD);
        writer.fixed(common::NO_ROOM);
        writer.endpoint(&message.endpoint)?;
        writer.shared(&message.metadata);
        for (name, list) in [("KV descriptors", kv), ("aux descriptors", aux)] {
            writer.built(name, |out| {
                msgpack::none_elided(list)?;
                msgpack::put_descriptors(out, list)
            })?;
        }
        writer.built("state descriptors", |out| msgpack::put_descriptor_lists(out, state))?;
        writer.i64(message.gpu_id);
        writer.u32(message.attn_tp_size);
        writer.u32(message.engine_rank);
        writer.u64(message.kv_item_len);
        geometry::write_state(&mut writer, "state item lengths", &message.state, |state| &state.item_lens)?;
        geometry::write_state(&mut writer, "state dims", &message.state, |state| &state.dims)?;
        writer.u32(message.dcp_size);
        writer.u32(message.dcp_rank);
        geometry::write_state(&mut writer, "state layer ids", &message.state, |state| &state.layer_ids)?;
        writer.array(&message.kv_layer_ids);
        Ok(writer.finish())
    }

    fn encode_metadata(&self, message: &Metadata) -> Result<Multipart, WireError> {
        destinations::check(message)?;
        if !message.is_dummy && message.dst_pages.is_empty() && message.aux_index.is_none() {
            let detail = "without pages and without an aux index it would be read as a dummy";
            return Err(WireError {
                kind: WireErrorKind::Unsupported,
                what: destinations::MESSAGE.into(),
                detail: detail.into(),
            });
        }
        let (pages, state_indices) = destinations::sent_indices(message);
        let mut writer = FrameWriter::new(destinations::MESSAGE, destinations::size_hint(message));
        writer.fixed(GUARD);
        writer.u64(message.room);
        writer.endpoint(&message.endpoint)?;
        writer.id("engine key", &message.name)?;
        writer.array(pages);
        match message.aux_index.filter(|_| !message.is_dummy) {
            Some(aux_index) => writer.u32(aux_index),
            None => writer.empty(),
        }
        destinations::write_state_indices(&mut writer, state_indices)?;
        writer.u32(message.required_dst_info_num);
        match message.decode_prefix_len.filter(|len| *len > 0 && !message.is_dummy) {
            Some(len) => writer.u64(len),
            None => writer.empty(),
        }
        Ok(writer.finish())
    }

    fn encode_status(&self, message: &KvStatus) -> Result<Multipart, WireError> {
        Ok(common::encode_status(message, Some(GUARD), true))
    }

    fn encode_aux_data(&self, message: &AuxData) -> Result<Multipart, WireError> {
        common::encode_aux_data(message)
    }

    fn parse_to_prefill(&self, frames: &[Bytes], limits: &Limits) -> Result<ToPrefill, WireError> {
        check_shape(frames, limits)?;
        // ABORT has no guard, so the tags come first (F24).
        match &frames[0][..] {
            common::ABORT => common::parse_abort(frames, limits).map(ToPrefill::Abort),
            common::BOOTSTRAP => common::parse_bootstrap(frames, limits).map(ToPrefill::Bootstrap),
            GUARD => match frames.get(1).map(|frame| &frame[..]) {
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
            common::AUX_DATA => common::parse_aux_data(frames, limits).map(ToDecode::AuxData),
            common::ABORT_ACK => common::parse_abort_ack(frames, limits).map(ToDecode::AbortAck),
            GUARD => common::parse_status(frames, 1, limits).map(ToDecode::Status),
            other => Err(unknown_tag("decode", other)),
        }
    }
}
