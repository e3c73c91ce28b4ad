//! What is explored: how many ranks, chunks and lives, under which policies, with how many faults.

use std::sync::Arc;
use std::time::Duration;

use kv_core::directory::{PrefillPeers, PrefillRecord};
use kv_core::ids::{PrefillRank, Room};
#[cfg(feature = "mutants")]
use kv_core::mutants::Mutant;
use kv_core::net::Endpoint;
use kv_core::room::{Destination, FailedStatusPolicy, ReceiverPolicy, ReleasePolicy, SenderPolicy};

/// How many of each mishap may still happen. Each is taken where the model checker likes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Budget {
    /// Writes that end in an error, with every combination of what is proven.
    pub faults: u8,
    /// Posts the transport refuses.
    pub refusals: u8,
    /// `abort()` or an early `clear()` on prefill.
    pub prefill_aborts: u8,
    /// The same on decode.
    pub decode_aborts: u8,
    /// Messages lost.
    pub losses: u8,
    /// Messages that arrive twice.
    pub duplicates: u8,
    /// Deadlines that pass while something else could still happen. When nothing can, time passes for nothing.
    pub deadlines: u8,
    /// Posts that are tried again although they were accepted.
    pub retries: u8,
    /// Messages nobody of this room should have sent.
    pub strays: u8,
    /// Metadata that reached the first prefill rank only.
    pub partial: u8,
    /// Decode ranks reported as lost.
    pub peers_lost: u8,
}

/// One universe to explore.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Its name in tables.
    pub name: &'static str,
    /// Prefill ranks; each writes every chunk to every decode rank.
    pub prefills: u8,
    /// Decode ranks.
    pub decodes: u8,
    /// Chunks of each life, on each prefill rank.
    pub chunks: u8,
    /// How often the room number is used.
    pub lives: u8,
    /// Prefill's policy.
    pub failed_status: FailedStatusPolicy,
    /// Decode's policy.
    pub release: ReleasePolicy,
    /// Messages from one rank to another arrive in order (as on one ZMQ connection), or in any.
    pub in_order: bool,
    /// Mishaps.
    pub budget: Budget,
    /// The fault put back.
    #[cfg(feature = "mutants")]
    pub mutant: Option<Mutant>,
}

/// Decode frees pages after this time without an ACK, where its policy says so.
pub const RELEASE: Duration = Duration::from_secs(30);

impl Setup {
    /// Between two of ours: the proof, and no other release.
    pub const fn ours(name: &'static str, prefills: u8, decodes: u8, chunks: u8, budget: Budget) -> Self {
        Self {
            name,
            prefills,
            decodes,
            chunks,
            lives: 1,
            failed_status: FailedStatusPolicy::AtOnce,
            release: ReleasePolicy::Proof,
            in_order: false,
            budget,
            #[cfg(feature = "mutants")]
            mutant: None,
        }
    }

    /// Towards SGLang 0.5.23 on the other side.
    pub const fn towards_0523(self) -> Self {
        Self { failed_status: FailedStatusPolicy::WhenSettled, release: ReleasePolicy::AckOrTimeout(RELEASE), ..self }
    }

    /// The room number is used `lives` times; messages keep their order.
    pub const fn reused(self, lives: u8) -> Self {
        Self { lives, in_order: true, ..self }
    }

    /// With a fault put back.
    #[cfg(feature = "mutants")]
    pub const fn with(self, mutant: Mutant) -> Self {
        Self { mutant: Some(mutant), ..self }
    }

    /// Put the fault back on this thread: the checker has threads of its own.
    pub fn arm(&self) {
        #[cfg(feature = "mutants")]
        kv_core::mutants::set(self.mutant);
    }

    /// With the fault put back.
    pub fn armed<T>(&self, f: impl FnOnce() -> T) -> T {
        self.arm();
        f()
    }

    pub fn room(&self) -> Room {
        Room::new(42).unwrap()
    }

    pub fn endpoint(decode: u8) -> Endpoint {
        Endpoint::new("d", u16::from(decode))
    }

    pub fn name_of(decode: u8) -> Arc<str> {
        format!("d{decode}").into()
    }

    /// The metadata of one life of a decode rank: its pages are named after the life.
    pub fn destination(&self, decode: u8, life: u8) -> Destination {
        Destination {
            name: Self::name_of(decode),
            endpoint: Self::endpoint(decode),
            pages: [i32::from(life)].into(),
            aux_index: Some(u32::from(life)),
            required_dst_info_num: u32::from(self.decodes),
            decode_prefix_len: None,
            is_dummy: false,
            writes_aux: true,
            life: None,
        }
    }

    pub fn sender_policy(&self) -> Arc<SenderPolicy> {
        Arc::new(SenderPolicy {
            bootstrap_timeout: Duration::from_secs(300),
            failed_status: self.failed_status,
            max_destinations: 4,
            max_chunks: 16,
        })
    }

    pub fn receiver_policy(&self) -> Arc<ReceiverPolicy> {
        Arc::new(ReceiverPolicy { waiting_timeout: Duration::from_secs(300), release: self.release })
    }

    pub fn peers(&self) -> Arc<PrefillPeers> {
        let record = |rank: u8| PrefillRecord {
            endpoint: Endpoint::new("p", u16::from(rank)),
            rank: PrefillRank(rank.into()),
            cp_rank: 0,
            tp_rank: rank.into(),
            pp_rank: 0,
            is_dummy: false,
            ext: None,
        };
        Arc::new(PrefillPeers {
            bootstrap_addr: "p:8998".into(),
            pool_key: "p:8998_0_0_0".into(),
            records: (0..self.prefills).map(record).collect(),
            required_dst_info_num: self.decodes.into(),
            required_prefill_response_num: self.prefills.into(),
            generation: 1,
        })
    }
}
