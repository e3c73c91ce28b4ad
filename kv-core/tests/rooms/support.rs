//! Rooms with their effects at hand.

use std::sync::Arc;
use std::time::Duration;

use kv_core::directory::{PrefillPeers, PrefillRecord};
use kv_core::ids::{OpId, PrefillRank, Room};
use kv_core::net::Endpoint;
use kv_core::poll::KvPoll;
use kv_core::room::*;
use kv_core::time::Timestamp;
use kv_core::transport::{Outcome, Settlement, TransportError, TransportErrorKind};
use kv_core::wire::KvStatus;

pub const BOOTSTRAP: Duration = Duration::from_secs(300);
pub const WAITING: Duration = Duration::from_secs(200);
pub const RELEASE: Duration = Duration::from_secs(30);

pub fn room() -> Room {
    Room::new(42).unwrap()
}

pub fn secs(s: u64) -> Timestamp {
    Timestamp::ZERO + Duration::from_secs(s)
}

pub fn endpoint(port: u16) -> Endpoint {
    Endpoint::new("10.0.0.7", port)
}

pub fn policy(failed_status: FailedStatusPolicy) -> Arc<SenderPolicy> {
    Arc::new(SenderPolicy { bootstrap_timeout: BOOTSTRAP, failed_status, max_destinations: 4, max_chunks: 4096 })
}

/// Decode `name`, at the port of that number; `required` decodes make the room complete.
pub fn destination(name: u16, required: u32) -> Destination {
    Destination {
        name: format!("d{name}").into(),
        endpoint: endpoint(name),
        pages: [0, 1, 2, 3].into(),
        aux_index: Some(0),
        required_dst_info_num: required,
        decode_prefix_len: Some(0),
        is_dummy: false,
        writes_aux: true,
        life: None,
    }
}

pub fn dummy(name: u16, required: u32) -> Destination {
    Destination { is_dummy: true, pages: [].into(), aux_index: None, ..destination(name, required) }
}

pub fn chunk(is_last: bool) -> ChunkSpec {
    ChunkSpec { pages: [0].into(), index_slice: 0..1, is_last, has_wait_event: false, aux_index: Some(0) }
}

pub fn error(text: &str) -> TransportError {
    TransportError::new(TransportErrorKind::Backend, text)
}

pub fn failed(src_quiet: bool, dst_quiet: bool) -> Outcome {
    Outcome::Failed { src_quiet, dst_quiet, error: error("ERR") }
}

pub fn unresolved() -> Outcome {
    Outcome::Unresolved { error: error("stuck") }
}

pub const SETTLED: Settlement = Settlement::Settled { src_quiet: true, dst_quiet: true };

/// A sender room on a clock of its own.
pub struct Sender {
    pub room: SenderRoom,
    pub now: Timestamp,
    next_op: u64,
}

impl Sender {
    pub fn new(failed_status: FailedStatusPolicy) -> Self {
        Self { room: SenderRoom::new(room(), secs(0), policy(failed_status)), now: secs(0), next_op: 0 }
    }

    /// In Bootstrapping, between two of ours.
    pub fn ours() -> Self {
        Self::new(FailedStatusPolicy::AtOnce)
    }

    /// In Bootstrapping, towards SGLang 0.5.23.
    pub fn towards_0523() -> Self {
        Self::new(FailedStatusPolicy::WhenSettled)
    }

    /// With the metadata of decodes 1 to `n`.
    pub fn with_metadata(mut self, n: u16) -> Self {
        (1..=n).for_each(|i| drop(self.on(SenderEvent::Destination(destination(i, u32::from(n))))));
        self
    }

    /// With one chunk enqueued and posted to every destination that wants it.
    pub fn with_posted(mut self, is_last: bool) -> Self {
        let effects = self.on(SenderEvent::Enqueue(chunk(is_last)));
        self.post_all(&effects);
        self
    }

    pub fn on(&mut self, event: SenderEvent) -> Vec<SenderEffect> {
        let mut out = Vec::new();
        self.room.handle_event(self.now, event, &mut out);
        out
    }

    /// Carry out the posts among `effects`.
    pub fn post_all(&mut self, effects: &[SenderEffect]) {
        for e in effects {
            if let SenderEffect::Post(chunk, dest) = *e {
                assert!(self.room.wants_post(chunk, dest));
                self.next_op += 1;
                assert_eq!(self.on(SenderEvent::Posted(chunk, dest, OpId(self.next_op))), []);
            }
        }
    }

    pub fn timeout(&mut self) -> Vec<SenderEffect> {
        let mut out = Vec::new();
        self.room.handle_timeout(self.now, &mut out);
        out
    }

    pub fn reason(&self) -> &str {
        &self.room.failure().expect("a failed room").reason
    }
}

pub fn status(to: u16, status: KvPoll, reason: Option<&str>) -> SenderEffect {
    SenderEffect::Status(endpoint(to), status, reason.map(Into::into))
}

pub fn record(rank: u32, is_dummy: bool) -> PrefillRecord {
    let endpoint = endpoint(9000 + rank as u16);
    PrefillRecord { endpoint, rank: PrefillRank(rank), cp_rank: 0, tp_rank: rank, pp_rank: 0, is_dummy, ext: None }
}

/// Ranks 0 to `n - 1`, all of which must report Success.
pub fn peers(n: u32) -> Arc<PrefillPeers> {
    peers_of((0..n).map(|r| record(r, false)).collect(), n)
}

pub fn peers_of(records: Vec<PrefillRecord>, required: u32) -> Arc<PrefillPeers> {
    Arc::new(PrefillPeers {
        bootstrap_addr: "p:8998".into(),
        pool_key: "p:8998_0_0_0".into(),
        records,
        required_dst_info_num: 1,
        required_prefill_response_num: required,
        generation: 1,
    })
}

pub fn publish_spec() -> Box<PublishSpec> {
    Box::new(PublishSpec {
        pages: [4, 5].into(),
        aux_index: 1,
        state_indices: Vec::new(),
        decode_prefix_len: 0,
        device_kv_indices: None,
    })
}

/// A receiver room on a clock of its own.
pub struct Receiver {
    pub room: ReceiverRoom,
    pub now: Timestamp,
    pub generation: u64,
}

impl Receiver {
    pub fn new(release: ReleasePolicy) -> Self {
        let policy = Arc::new(ReceiverPolicy { waiting_timeout: WAITING, release });
        Self { room: ReceiverRoom::new(room(), policy), now: secs(0), generation: 0 }
    }

    /// In Bootstrapping; pages are released by ACK or after 30 s.
    pub fn default_policy() -> Self {
        Self::new(ReleasePolicy::AckOrTimeout(RELEASE))
    }

    pub fn with_peers(mut self, n: u32) -> Self {
        self.on(ReceiverEvent::Peers(Ok(peers(n))));
        self
    }

    pub fn published(mut self) -> Self {
        let n = self.room.peers().unwrap().records.len();
        assert_eq!(self.on(ReceiverEvent::Publish(publish_spec())), [ReceiverEffect::Publish(publish_spec())]);
        assert_eq!(self.on(ReceiverEvent::Published { contacted: n, error: None }), []);
        self
    }

    pub fn on(&mut self, event: ReceiverEvent) -> Vec<ReceiverEffect> {
        let mut out = Vec::new();
        self.room.handle_event(self.now, event, &mut self.generation, &mut out);
        out
    }

    pub fn timeout(&mut self) -> Vec<ReceiverEffect> {
        let mut out = Vec::new();
        self.room.handle_timeout(self.now, &mut self.generation, &mut out);
        out
    }

    pub fn reason(&self) -> &str {
        &self.room.failure().expect("a failed room").reason
    }
}

pub fn success(rank: u32) -> ReceiverEvent {
    said(rank, KvPoll::Success, None)
}

pub fn said(rank: u32, status: KvPoll, reason: Option<&str>) -> ReceiverEvent {
    let reason = reason.map(str::to_owned);
    ReceiverEvent::Status(KvStatus { room: 42, status, prefill_rank: PrefillRank(rank), reason })
}

pub fn ack(rank: u32, generation: u64) -> ReceiverEvent {
    ReceiverEvent::AbortAck(PrefillRank(rank), generation)
}
