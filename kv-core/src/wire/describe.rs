//! A readable print of any message, for tools and for logs.

use std::fmt::{self, Write as _};

use bytes::Bytes;

use super::dialect::Dialect;
use super::message::*;
use crate::limits::Limits;
use crate::memory::MemoryKind;

/// Print a message of this dialect: direction, kind and fields, then the frames. What cannot be read is printed with the
/// reasons from both directions. Ends with a newline; at most a few hundred bytes for each frame.
///
/// A message is taken for one to prefill first. No message that a peer of the built-in dialects writes can be read both
/// ways; one that is made up can (Mori's status with frames behind it).
pub fn describe(dialect: &dyn Dialect, frames: &[Bytes]) -> String {
    let mut print = Print(String::new());
    // Writing to a string does not fail.
    let _ = print.message(dialect, frames);
    print.0
}

/// How many items of a list are printed.
const SHOWN: usize = 16;

struct Print(String);

impl Print {
    fn message(&mut self, dialect: &dyn Dialect, frames: &[Bytes]) -> fmt::Result {
        let limits = Limits::default();
        match (dialect.parse_to_prefill(frames, &limits), dialect.parse_to_decode(frames, &limits)) {
            (Ok(message), _) => self.prefill_message(dialect, &message)?,
            (_, Ok(message)) => self.decode_message(dialect, &message)?,
            (Err(prefill), Err(decode)) => {
                writeln!(self.0, "not a message of the {} dialect", dialect.name())?;
                self.field("to prefill", format_args!("{prefill}"))?;
                self.field("to decode", format_args!("{decode}"))?;
            }
        }
        let bytes: usize = frames.iter().map(Bytes::len).sum();
        writeln!(self.0, "  {} frames, {bytes} bytes", frames.len())?;
        for (at, frame) in frames.iter().enumerate() {
            writeln!(self.0, "    [{at:>2}] {}", FrameText(frame))?;
        }
        Ok(())
    }

    fn title(&mut self, dialect: &dyn Dialect, kind: &str, way: &str) -> fmt::Result {
        writeln!(self.0, "{kind} ({way}, {})", dialect.name())
    }

    fn field(&mut self, name: &str, value: impl fmt::Display) -> fmt::Result {
        writeln!(self.0, "  {name:<22} {value}")
    }

    fn optional(&mut self, name: &str, value: Option<impl fmt::Display>) -> fmt::Result {
        match value {
            Some(value) => self.field(name, value),
            None => self.field(name, "-"),
        }
    }

    fn prefill_message(&mut self, dialect: &dyn Dialect, message: &ToPrefill) -> fmt::Result {
        const WAY: &str = "decode -> prefill";
        match message {
            ToPrefill::Registration(message) => {
                self.title(dialect, "registration", WAY)?;
                self.registration(message)
            }
            ToPrefill::Metadata(message) => {
                self.title(dialect, if message.is_dummy { "metadata of a dummy" } else { "metadata" }, WAY)?;
                self.metadata(message)
            }
            ToPrefill::Abort(message) => {
                self.title(dialect, "ABORT", WAY)?;
                self.field("room", message.room)?;
                self.optional("decode", message.endpoint.as_ref())?;
                self.optional("generation", message.generation)
            }
            ToPrefill::StagingRsp(message) => {
                self.title(dialect, "STAGING_RSP", WAY)?;
                self.field("room", message.room)?;
                self.field("chunk", message.chunk_idx)?;
                let note = if message.offset == -2 { " (can never fit)" } else { "" };
                self.field("offset", format_args!("{}{note}", message.offset))?;
                self.field("round", message.round)?;
                self.field("end", message.end)?;
                self.field("session", &message.session_id)
            }
            ToPrefill::Watermark(message) => {
                self.title(dialect, "WATERMARK", WAY)?;
                self.field("round", message.round)?;
                self.field("tail", message.tail)?;
                self.field("session", &message.session_id)
            }
            ToPrefill::Bootstrap(message) => {
                self.title(dialect, "BOOTSTRAP", WAY)?;
                self.field("room", message.room)?;
                self.field("decode", &message.endpoint)
            }
        }
    }

    fn decode_message(&mut self, dialect: &dyn Dialect, message: &ToDecode) -> fmt::Result {
        const WAY: &str = "prefill -> decode";
        match message {
            ToDecode::Status(message) => {
                self.title(dialect, "status", WAY)?;
                self.field("room", message.room)?;
                self.field("status", format_args!("{} {:?}", message.status as u8, message.status))?;
                self.field("prefill rank", message.prefill_rank)?;
                self.optional("reason", message.reason.as_deref())
            }
            ToDecode::ChunkReady(message) => {
                self.title(dialect, "CHUNK_READY", WAY)?;
                self.field("room", message.room)?;
                self.field("chunk", message.chunk_idx)?;
                let pages = format_args!("{} from page {}", message.num_pages, message.page_start).to_string();
                self.field("pages", pages)?;
                self.field("writer (decode's id)", &message.writer_id)?;
                self.optional("prefill rank", message.prefill_rank)
            }
            ToDecode::StagingReq(message) => {
                self.title(dialect, "STAGING_REQ", WAY)?;
                self.field("room", message.room)?;
                self.field("chunk", message.chunk_idx)?;
                self.field("pages", message.num_pages)?;
                self.field("session", &message.session_id)?;
                self.optional("requester's pp rank", message.requester_pp_rank)
            }
            ToDecode::AbortAck(message) => {
                self.title(dialect, "ABORT_ACK", WAY)?;
                self.field("room", message.room)?;
                self.field("prefill rank", message.prefill_rank)?;
                self.field("generation", message.generation)
            }
            ToDecode::AuxData(message) => {
                self.title(dialect, "AUX_DATA", WAY)?;
                self.field("room", message.room)?;
                self.field("buffer", message.buffer_index)?;
                self.field("aux index", message.aux_index)?;
                self.field("row", FrameText(&message.data))
            }
        }
    }

    fn registration(&mut self, message: &Registration) -> fmt::Result {
        self.field("decode", &message.endpoint)?;
        self.field("name", &message.name)?;
        self.field("peer metadata", FrameText(&message.metadata))?;
        let (tp, rank) = (message.attn_tp_size, message.engine_rank);
        self.field("rank", format_args!("{rank}, attention TP size {tp}, gpu {}", message.gpu_id))?;
        self.field("DCP", format_args!("rank {} of {}", message.dcp_rank, message.dcp_size))?;
        self.field("KV", BuffersText(&message.kv))?;
        self.field("KV page bytes", format_args!("{} first, {}", message.kv_item_len, List(&message.kv_item_lens)))?;
        self.optional("KV slots", message.kv_slots)?;
        let dram = message.kv_kinds.iter().filter(|kind| matches!(kind, MemoryKind::Dram)).count();
        match message.kv_kinds.len() {
            0 => self.field("KV memory", "device")?,
            all => self.field("KV memory", format_args!("{dram} host, {} device", all - dram))?,
        }
        self.field("KV layer ids", List(&message.kv_layer_ids))?;
        self.field("aux", BuffersText(&message.aux))?;
        for (at, state) in message.state.iter().enumerate() {
            self.field(&format!("state {at}"), BuffersText(&state.buffers))?;
            self.field("  item bytes", List(&state.item_lens))?;
            self.field("  sliced dims", List(&state.dims))?;
            self.field("  layer ids", List(&state.layer_ids))?;
            self.field("  region bytes", List(&state.region_lens))?;
        }
        match message.staging {
            Some(ring) => self.field("staging ring", format_args!("{} bytes at {:#x}", ring.len, ring.addr))?,
            None => self.field("staging ring", "-")?,
        }
        self.field("staging layer ids", List(&message.staging_layer_ids))
    }

    fn metadata(&mut self, message: &Metadata) -> fmt::Result {
        self.field("room", message.room)?;
        self.field("decode", &message.endpoint)?;
        self.field("name", &message.name)?;
        self.field("pages", Runs(&message.dst_pages))?;
        self.optional("aux index", message.aux_index)?;
        self.field("decodes needed", message.required_dst_info_num)?;
        for (at, indices) in message.state_indices.iter().enumerate() {
            self.field(&format!("state {at}"), Runs(indices))?;
        }
        self.optional("decode prefix tokens", message.decode_prefix_len)?;
        self.optional("device pages", message.device_kv_indices.as_deref().map(Runs))
    }
}

/// Printable text as it is, else hexadecimal; cut after 48 bytes.
struct FrameText<'a>(&'a [u8]);

impl fmt::Display for FrameText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let head = &self.0[..self.0.len().min(48)];
        if self.0.is_empty() {
            return f.write_str("(empty)");
        }
        match std::str::from_utf8(head) {
            Ok(text) if !text.chars().any(char::is_control) => write!(f, "{text:?}")?,
            _ => {
                f.write_str("0x")?;
                head.iter().try_for_each(|byte| write!(f, "{byte:02x}"))?;
            }
        }
        if head.len() < self.0.len() { write!(f, "... {} bytes", self.0.len()) } else { Ok(()) }
    }
}

struct List<'a, T>(&'a [T]);

impl<T: fmt::Display> fmt::Display for List<'_, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("-");
        }
        for (at, item) in self.0.iter().take(SHOWN).enumerate() {
            write!(f, "{}{item}", if at > 0 { ", " } else { "" })?;
        }
        if self.0.len() > SHOWN { write!(f, ", ... {} in all", self.0.len()) } else { Ok(()) }
    }
}

/// Indices as runs: `5-7, 9`.
struct Runs<'a>(&'a [i32]);

impl fmt::Display for Runs<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.len())?;
        let mut lead = ": ";
        for (runs, run) in self.0.chunk_by(|a, b| a.checked_add(1) == Some(*b)).enumerate() {
            if runs == SHOWN {
                return f.write_str(", ...");
            }
            match run {
                [first, .., last] => write!(f, "{lead}{first}-{last}")?,
                [one] => write!(f, "{lead}{one}")?,
                [] => {}
            }
            lead = ", ";
        }
        Ok(())
    }
}

struct BuffersText<'a>(&'a Buffers);

impl fmt::Display for BuffersText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Buffers::Addrs(addrs) => {
                write!(f, "{} addresses", addrs.len())?;
                let mut lead = ": ";
                for addr in addrs.iter().take(SHOWN) {
                    write!(f, "{lead}{addr:#x}")?;
                    lead = ", ";
                }
                if addrs.len() > SHOWN { f.write_str(", ...") } else { Ok(()) }
            }
            Buffers::Descriptors(list) => {
                let elided = list.iter().filter(|item| item.is_none()).count();
                write!(f, "{} descriptors, {elided} elided", list.len())
            }
        }
    }
}
