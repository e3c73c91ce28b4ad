//! Why a layout, or a pair of layouts, cannot be used.

use std::fmt;

use crate::ids::RegionId;

/// Names one entry of a layout.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EntryRef {
    /// KV entry with this index.
    Kv(u32),
    /// Aux entry with this index.
    Aux(u32),
}

impl fmt::Display for EntryRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Kv(i) => write!(f, "KV entry {i}"),
            Self::Aux(i) => write!(f, "aux entry {i}"),
        }
    }
}

/// What both sides may legally want, but this version does not do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Unsupported {
    /// MHA with unequal attention TP: pages must be cut by heads.
    HeadSlices,
    /// Decode context parallelism on one side only: pages must be laid out anew by token.
    DcpRelayout,
    /// State components (mamba, SWA, DSA, ...).
    StateComponents,
}

impl fmt::Display for Unsupported {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::HeadSlices => "head slices (MHA with unequal attn_tp_size)",
            Self::DcpRelayout => "DCP token relayout (unequal dcp_size)",
            Self::StateComponents => "state components",
        })
    }
}

/// Why a layout is refused. Each names the field and the values.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// A value that can never be right.
    #[error("{field} is {value}: {needed}")]
    Invalid {
        /// Which field.
        field: &'static str,
        /// Its value.
        value: u64,
        /// What it must be.
        needed: &'static str,
    },
    /// An entry whose item length is 0, or does not fit into the entry.
    #[error("{entry}: item_len is {item_len}, the entry has {len} bytes")]
    ItemLen {
        /// Which entry.
        entry: EntryRef,
        /// Its item length in bytes.
        item_len: u64,
        /// Its length in bytes.
        len: u64,
    },
    /// An entry names a region that is not among the registered ones.
    #[error("{entry}: region {region} is not registered")]
    UnknownRegion {
        /// Which entry.
        entry: EntryRef,
        /// The region it names.
        region: RegionId,
    },
    /// Two registered regions have one number.
    #[error("region {0} is given twice")]
    DuplicateRegion(RegionId),
    /// An entry leaves its region.
    #[error("{entry}: bytes {offset}+{len} leave region {region} of {region_len} bytes")]
    OutsideRegion {
        /// Which entry.
        entry: EntryRef,
        /// The region it names.
        region: RegionId,
        /// Where it starts in the region.
        offset: u64,
        /// Its length.
        len: u64,
        /// The region's length.
        region_len: u64,
    },
    /// A peer's entry runs over the end of the address space.
    #[error("{entry}: address {addr:#x} + {len} bytes overflows")]
    AddressOverflow {
        /// Which entry of the peer.
        entry: EntryRef,
        /// Where it starts.
        addr: u64,
        /// Bytes it needs at least.
        len: u64,
    },
    /// Two lists of one side that must be equally long are not.
    #[error("{field} has {got} values for {want} entries")]
    Count {
        /// Which list.
        field: &'static str,
        /// Its length.
        got: u64,
        /// How many entries there are.
        want: u64,
    },
    /// A list over a limit.
    #[error("{field} has {got} entries, more than the limit of {limit}")]
    TooMany {
        /// Which list.
        field: &'static str,
        /// Its length.
        got: u64,
        /// The limit.
        limit: u64,
    },
    /// An entry that the peer's backend elided.
    #[error("{0} of the peer has no descriptor")]
    Elided(EntryRef),
    /// The two sides differ where they must agree.
    #[error("{field} differs: ours {ours}, the peer's {theirs}")]
    Mismatch {
        /// Which field.
        field: &'static str,
        /// Our value.
        ours: String,
        /// The peer's value.
        theirs: String,
    },
    /// The item lengths of a pair of entries differ.
    #[error("item_len differs: ours {ours} (entry {our_entry}), the peer's {theirs} (entry {their_entry})")]
    ItemLenMismatch {
        /// Index of our KV or aux entry.
        our_entry: u32,
        /// Index of the peer's entry.
        their_entry: u32,
        /// Our item length, bytes.
        ours: u64,
        /// The peer's item length, bytes.
        theirs: u64,
    },
    /// One attention TP size must divide the other (requirement G2).
    #[error("attn_tp_size: ours {ours} and the peer's {theirs}: one must divide the other")]
    TpIndivisible {
        /// Ours.
        ours: u32,
        /// The peer's.
        theirs: u32,
    },
    /// The peer has no entry for one of our layers.
    #[error("the peer has no entry for occurrence {occurrence} of layer {layer}")]
    MissingLayer {
        /// The layer.
        layer: u32,
        /// Which of our entries with this layer (0 = K, 1 = V).
        occurrence: u32,
    },
    /// Layer ids on one side only.
    #[error("layer ids: ours {ours}, the peer's {theirs}; with pp_size > 1 both sides must send them or neither")]
    LayerIdsOneSided {
        /// How many we have.
        ours: u64,
        /// How many the peer sent.
        theirs: u64,
    },
    /// Without layer ids the entries cannot be placed.
    #[error("{ours} KV entries of ours cannot be placed among {theirs} of the peer's: {why}; send layer ids")]
    Unplaceable {
        /// Our entries.
        ours: u64,
        /// The peer's entries.
        theirs: u64,
        /// Which rule fails.
        why: &'static str,
    },
    /// Legal, but not done by this version.
    #[error("not supported yet: {what}: ours {ours}, the peer's {theirs}")]
    NotSupported {
        /// What it takes.
        what: Unsupported,
        /// Our value.
        ours: u32,
        /// The peer's value.
        theirs: u32,
    },
}
