//! Parts of a registration that the dialects share: buffers, state components, the staging ring.

use bytes::Bytes;

use super::frames::{FrameReader, FrameWriter, unsupported};
use super::message::{Buffers, Registration, StagingBase, StateComponent, WireError, WireErrorKind};
use super::pack::{self, PackError, Word};

pub(crate) const MESSAGE: &str = "registration";

/// The addresses of these buffers, for the dialects that send addresses.
pub(crate) fn addrs<'a>(buffers: &'a Buffers, name: &str) -> Result<&'a [u64], WireError> {
    match buffers {
        Buffers::Addrs(addrs) => Ok(addrs),
        Buffers::Descriptors(list) if list.is_empty() => Ok(&[]),
        Buffers::Descriptors(_) => Err(unsupported(MESSAGE, format!("{name}: descriptors where addresses are sent"))),
    }
}

/// The descriptors of these buffers, for the dialects that send descriptors.
pub(crate) fn descriptors<'a>(buffers: &'a Buffers, name: &str) -> Result<&'a [Option<Bytes>], WireError> {
    match buffers {
        Buffers::Descriptors(list) => Ok(list),
        Buffers::Addrs(addrs) if addrs.is_empty() => Ok(&[]),
        Buffers::Addrs(_) => Err(unsupported(MESSAGE, format!("{name}: addresses where descriptors are sent"))),
    }
}

/// Refuse to send what no peer could make sense of.
pub(crate) fn check(message: &Registration) -> Result<(), WireError> {
    let entries = message.kv.len();
    let per_entry = |name: &str, count: usize| check_count(name, "KV entries", count, entries);
    let checks = per_entry("KV item lengths", message.kv_item_lens.len())
        .and_then(|()| per_entry("memory kinds", message.kv_kinds.len()))
        .and_then(|()| per_entry("KV layer ids", message.kv_layer_ids.len()))
        .and_then(|()| {
            message.state.iter().try_for_each(|state| {
                check_count("state item lengths", "tensors", state.item_lens.len(), state.buffers.len())?;
                check_count("state region lengths", "tensors", state.region_lens.len(), state.buffers.len())
            })
        })
        .and_then(|()| check_groups(message.attn_tp_size, message.dcp_size, message.dcp_rank));
    checks.map_err(|error| WireError { kind: error.kind, what: MESSAGE.into(), detail: error.detail })
}

/// A list has one item for each of `of` things, or was not sent.
pub(crate) fn check_count(name: &str, things: &str, count: usize, of: usize) -> Result<(), PackError> {
    if count == 0 || count == of {
        return Ok(());
    }
    Err(PackError::new(WireErrorKind::Inconsistent, format!("{count} {name} for {of} {things}")))
}

pub(crate) fn check_groups(attn_tp_size: u32, dcp_size: u32, dcp_rank: u32) -> Result<(), PackError> {
    if attn_tp_size == 0 {
        return Err(PackError::new(WireErrorKind::BadInteger, "attention TP size 0"));
    }
    if dcp_rank >= dcp_size {
        let detail = format!("DCP rank {dcp_rank} of {dcp_size}");
        return Err(PackError::new(WireErrorKind::Inconsistent, detail));
    }
    Ok(())
}

/// A nested frame of one list per state component.
pub(crate) fn write_state<T: Word>(
    writer: &mut FrameWriter,
    name: &str,
    state: &[StateComponent],
    list: impl Fn(&StateComponent) -> &[T],
) -> Result<(), WireError> {
    writer.built(name, |out| pack::put_nested(out, state.iter().map(&list)))
}

/// A nested frame of the addresses of the state components.
pub(crate) fn write_state_addrs(writer: &mut FrameWriter, state: &[StateComponent]) -> Result<(), WireError> {
    const NAME: &str = "state addresses";
    for component in state {
        addrs(&component.buffers, NAME)?;
    }
    write_state(writer, NAME, state, |component| addrs(&component.buffers, NAME).unwrap_or_default())
}

/// What the frames say about state components, list by list; absent lists are empty.
#[derive(Default)]
pub(crate) struct StateLists {
    pub(crate) item_lens: Vec<Vec<u32>>,
    pub(crate) dims: Vec<Vec<u32>>,
    pub(crate) layer_ids: Vec<Vec<u32>>,
    pub(crate) region_lens: Vec<Vec<u64>>,
}

impl StateLists {
    /// Pair the lists by position. A list may end early, but may not name a component without buffers. Dims and layer
    /// ids inside a component keep the count that the peer sent; the plan judges them.
    pub(crate) fn pair(self, buffers: Vec<Buffers>) -> Result<Vec<StateComponent>, PackError> {
        let components = buffers.len();
        let longest = [self.item_lens.len(), self.dims.len(), self.layer_ids.len(), self.region_lens.len()];
        if let Some(lists) = longest.into_iter().find(|lists| *lists > components) {
            let detail = format!("{lists} lists for {components} state components");
            return Err(PackError::new(WireErrorKind::Inconsistent, detail));
        }
        let mut item_lens = self.item_lens.into_iter();
        let mut dims = self.dims.into_iter();
        let mut layer_ids = self.layer_ids.into_iter();
        let mut region_lens = self.region_lens.into_iter();
        let pair = |buffers: Buffers| {
            let component = StateComponent {
                item_lens: item_lens.next().unwrap_or_default(),
                dims: dims.next().unwrap_or_default(),
                layer_ids: layer_ids.next().unwrap_or_default(),
                region_lens: region_lens.next().unwrap_or_default(),
                buffers,
            };
            let tensors = component.buffers.len();
            check_count("item lengths", "tensors", component.item_lens.len(), tensors)?;
            check_count("region lengths", "tensors", component.region_lens.len(), tensors)?;
            Ok(component)
        };
        buffers.into_iter().map(pair).collect()
    }
}

/// Two frames: the ring's address as 8 packed bytes, its length as text; both empty without a ring.
pub(crate) fn write_staging(writer: &mut FrameWriter, staging: Option<StagingBase>) {
    match staging {
        Some(staging) => {
            writer.array(&[staging.addr]);
            writer.u64(staging.len);
        }
        None => {
            writer.empty();
            writer.empty();
        }
    }
}

/// The ring in frames `at` and `at + 1`; none when the address is absent, empty or 0.
pub(crate) fn read_staging(reader: FrameReader<'_>, at: usize) -> Result<Option<StagingBase>, WireError> {
    let addr = match reader.array::<u64>(at, "staging address", 1)?[..] {
        [] | [0] => return Ok(None),
        [addr, ..] => addr,
    };
    let len = reader.optional_int(at + 1, "staging bytes")?.unwrap_or(0);
    if len == 0 || addr.checked_add(len).is_none() {
        let detail = format!("a ring of {len} bytes at {addr:#x}");
        return reader.fail(at + 1, "staging bytes", WireErrorKind::Inconsistent, detail);
    }
    Ok(Some(StagingBase { addr, len }))
}

/// A size that usually fits a registration without its opaque parts.
pub(crate) fn size_hint(message: &Registration) -> usize {
    let state: usize = message.state.iter().map(|state| 32 + 32 * state.buffers.len()).sum();
    256 + message.name.len() + 24 * message.kv.len() + 8 * message.aux.len() + state
}
