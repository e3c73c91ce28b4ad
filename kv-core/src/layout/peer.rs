//! What a decode rank registered with us.

use super::{EntryRef, LayoutError, Unsupported};
use crate::limits::Limits;
use crate::memory::MemoryKind;
use crate::wire::message::{Buffers, Registration};

/// A decode rank's geometry, checked. Nothing a peer sends is used for an address before it went through here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerLayout {
    pub(super) kv: Vec<u64>,
    /// One per KV entry, or only the first, or none when there is no KV entry.
    pub(super) kv_item_lens: Vec<u64>,
    pub(super) kv_slots: Option<u64>,
    pub(super) kv_layer_ids: Vec<u32>,
    /// One per KV entry.
    pub(super) kv_kinds: Vec<MemoryKind>,
    pub(super) aux: Vec<u64>,
    pub(super) aux_item_lens: Vec<u64>,
    pub(super) aux_slots: Option<u64>,
    pub(super) attn_tp_size: u32,
    pub(super) engine_rank: u32,
    pub(super) dcp_size: u32,
    pub(super) dcp_rank: u32,
    relative: bool,
}

impl PeerLayout {
    /// Check a registration.
    ///
    /// # Errors
    /// Lists that disagree in length or exceed `limits`, item lengths or sizes of 0, addresses that overflow, elided
    /// KV or aux descriptors; state components, which this version cannot serve.
    pub fn from_registration(registration: &Registration, limits: &Limits) -> Result<Self, LayoutError> {
        let r = registration;
        check_entry_counts(r, limits)?;
        for (field, value) in [("attn_tp_size", r.attn_tp_size), ("dcp_size", r.dcp_size)] {
            if value == 0 {
                return Err(invalid(field, 0, "it must be at least 1"));
            }
        }
        if r.dcp_rank >= r.dcp_size {
            return Err(invalid("dcp_rank", u64::from(r.dcp_rank), "it must be below dcp_size"));
        }
        // A state that is announced and never written would be taken for written.
        let states = r.state.iter().filter(|s| !s.buffers.is_empty()).count();
        if states > 0 {
            return Err(LayoutError::NotSupported {
                what: Unsupported::StateComponents,
                ours: 0,
                theirs: u32::try_from(states).unwrap_or(u32::MAX),
            });
        }

        let (kv, relative) = bases(&r.kv, EntryRef::Kv)?;
        let (aux, _) = bases(&r.aux, EntryRef::Aux)?;
        let mut kv_item_lens = r.kv_item_lens.clone();
        if let Some(&first) = kv_item_lens.first()
            && first != r.kv_item_len
        {
            return Err(LayoutError::Mismatch {
                field: "the peer's first kv_item_len",
                ours: format!("{} (first item length)", r.kv_item_len),
                theirs: format!("{first} (list of item lengths)"),
            });
        }
        if kv_item_lens.is_empty() && !kv.is_empty() {
            kv_item_lens.push(r.kv_item_len);
        }
        if !kv.is_empty() {
            if kv_item_lens.contains(&0) {
                return Err(invalid("kv_item_len", 0, "it must be at least 1"));
            }
            if r.kv_slots == Some(0) {
                return Err(invalid("kv_slots", 0, "KV entries hold at least one page"));
            }
        }
        // What is known to be needed must be addressable; the pairing bounds what is not known.
        for ((&addr, i), &item_len) in kv.iter().zip(0..).zip(&kv_item_lens) {
            let len = item_len.checked_mul(r.kv_slots.unwrap_or(1));
            if len.and_then(|len| addr.checked_add(len)).is_none() {
                let len = len.unwrap_or(u64::MAX);
                return Err(LayoutError::AddressOverflow { entry: EntryRef::Kv(i), addr, len });
            }
        }
        let kv_kinds = match (r.kv_kinds.is_empty(), u32::try_from(r.gpu_id)) {
            (true, Ok(device)) => vec![MemoryKind::Vram { device }; kv.len()],
            _ => r.kv_kinds.clone(),
        };
        Ok(Self {
            kv,
            kv_item_lens,
            kv_slots: r.kv_slots,
            kv_layer_ids: r.kv_layer_ids.clone(),
            kv_kinds,
            aux,
            aux_item_lens: Vec::new(),
            aux_slots: None,
            attn_tp_size: r.attn_tp_size,
            engine_rank: r.engine_rank,
            dcp_size: r.dcp_size,
            dcp_rank: r.dcp_rank,
            relative,
        })
    }

    /// Add the geometry of the aux entries, which 0.5.23 does not send: row bytes and rows. Where it is known, the
    /// pairing compares row sizes and bounds slots.
    ///
    /// # Errors
    /// A list of another length than the aux entries, a row of 0 bytes, rows that overflow.
    pub fn with_aux_geometry(mut self, item_lens: Vec<u64>, slots: u64) -> Result<Self, LayoutError> {
        if item_lens.len() != self.aux.len() {
            let (got, want) = (item_lens.len() as u64, self.aux.len() as u64);
            return Err(LayoutError::Count { field: "aux_item_lens", got, want });
        }
        for ((&addr, i), &item_len) in self.aux.iter().zip(0..).zip(&item_lens) {
            let entry = EntryRef::Aux(i);
            let len = item_len.checked_mul(slots).filter(|len| addr.checked_add(*len).is_some());
            if item_len == 0 {
                return Err(LayoutError::ItemLen { entry, item_len, len: 0 });
            }
            if len.is_none() {
                return Err(LayoutError::AddressOverflow { entry, addr, len: item_len.saturating_mul(slots) });
            }
        }
        self.aux_item_lens = item_lens;
        self.aux_slots = Some(slots);
        Ok(self)
    }

    /// How many KV entries it has.
    pub fn kv_entries(&self) -> usize {
        self.kv.len()
    }

    /// How many aux entries it has.
    pub fn aux_entries(&self) -> usize {
        self.aux.len()
    }

    /// Its attention TP size.
    pub fn attn_tp_size(&self) -> u32 {
        self.attn_tp_size
    }

    /// Its TP rank.
    pub fn engine_rank(&self) -> u32 {
        self.engine_rank
    }

    /// Its buffers are opaque descriptors: addresses in plans are offsets into the descriptor that
    /// [`EntryPair::dst_entry`](crate::plan::EntryPair::dst_entry) names.
    pub fn is_relative(&self) -> bool {
        self.relative
    }
}

fn check_entry_counts(r: &Registration, limits: &Limits) -> Result<(), LayoutError> {
    let limit = limits.max_entries.min(u32::MAX as usize);
    for (field, got) in [("kv", r.kv.len()), ("aux", r.aux.len()), ("state", r.state.len())] {
        if got > limit {
            return Err(LayoutError::TooMany { field, got: got as u64, limit: limit as u64 });
        }
    }
    for (field, got) in
        [("kv_item_lens", r.kv_item_lens.len()), ("kv_layer_ids", r.kv_layer_ids.len()), ("kv_kinds", r.kv_kinds.len())]
    {
        if got != 0 && got != r.kv.len() {
            return Err(LayoutError::Count { field, got: got as u64, want: r.kv.len() as u64 });
        }
    }
    Ok(())
}

/// First byte of each buffer: its address, or 0 within its descriptor.
fn bases(buffers: &Buffers, name: fn(u32) -> EntryRef) -> Result<(Vec<u64>, bool), LayoutError> {
    match buffers {
        Buffers::Addrs(addrs) => Ok((addrs.clone(), false)),
        Buffers::Descriptors(list) => {
            if let Some((_, i)) = list.iter().zip(0..).find(|(d, _)| d.is_none()) {
                return Err(LayoutError::Elided(name(i)));
            }
            Ok((vec![0; list.len()], true))
        }
    }
}

fn invalid(field: &'static str, value: u64, needed: &'static str) -> LayoutError {
    LayoutError::Invalid { field, value, needed }
}
