//! Geometry of both sides: KV and aux entries, and how they pair.
//!
//! [`LocalLayout`] is what this rank registered, [`PeerLayout`] what a decode rank sent about itself (protocol 6.1),
//! both validated when they are made. [`Pairing`] joins the two once per registered peer; whatever does not fit is
//! found there, so that a peer is refused at registration and not at its first chunk (requirement A4).
//!
//! Not here yet, and refused by name: head slices (unequal TP with MHA), DCP relayout, state components.

mod error;
mod local;
mod pairing;
mod pairs;
mod peer;

pub use error::{EntryRef, LayoutError, Unsupported};
pub use local::{AttentionKind, EntryDesc, LayoutSpec, LocalLayout};
pub use pairing::{Pairing, UnknownSlots};
pub use pairs::{
    CompressedList, build_transfer_entry_pairs, compressed_offsets, mha_pairs, mla_pairs, remap_draft_layer_ids,
};
pub use peer::PeerLayout;
