//! A transport's lane alone, without managers.

use std::collections::HashSet;
use std::num::NonZeroU64;
use std::sync::Arc;

use kv_transfer::memory::RegisteredRegion;
use kv_transfer::plan::WritePlan;
use kv_transfer::tcp::HostArena;
use kv_transfer::transport::{Lane, LaneEvent, Outcome, SubmitError, Transport, WriteOp};
use kv_transfer::{OpId, PeerId};
use serde_json::Value;

use crate::pair::PATIENCE;
use crate::sys::{now_ns, readable};
use crate::{Result, target};

/// A transport of its own and a lane of it.
pub struct OurLane<T> {
    pub transport: Arc<T>,
    pub region: Arc<RegisteredRegion>,
    regions: Arc<[Arc<RegisteredRegion>]>,
    lane: Box<dyn Lane>,
    max: NonZeroU64,
    next: u64,
    lost: HashSet<PeerId>,
}

impl<T: Transport> OurLane<T> {
    pub fn new(transport: T, arena: Arc<HostArena>) -> Result<Self> {
        let transport = Arc::new(transport);
        let region = transport.register(arena)?;
        let lane = transport.lane()?;
        let max = transport.capabilities().max_op_bytes.and_then(NonZeroU64::new).ok_or("no largest op")?;
        Ok(Self { transport, regions: Arc::new([region.clone()]), region, lane, max, next: 0, lost: HashSet::new() })
    }

    pub fn connect(&self, description: &Value) -> Result<PeerId> {
        Ok(self.transport.connect(&target::descriptor(description)?)?)
    }

    /// Wait until a peer is lost.
    #[cfg(feature = "nixl")]
    pub fn lost(&mut self, peer: PeerId) -> Result<()> {
        let fd = self.lane.wake_fd().ok_or("a lane without a descriptor")?;
        let mut news = Vec::new();
        while !self.lost.remove(&peer) {
            if !readable(fd, PATIENCE) {
                return Err("nobody notices that the peer is gone".into());
            }
            self.lane.poll(&mut news);
            self.lost.extend(news.drain(..).filter_map(|e| match e {
                LaneEvent::PeerLost(peer, _) => Some(peer),
                _ => None,
            }));
        }
        Ok(())
    }

    /// Writes, each cut as the managers cut them, from the cut of the first to the end of the last, ns.
    pub fn run(&mut self, peer: PeerId, plans: Vec<WritePlan>) -> Result<u64> {
        let fd = self.lane.wake_fd().ok_or("a lane without a descriptor")?;
        let (mut flying, mut news) = (HashSet::new(), Vec::new());
        let start = now_ns();
        let mut pieces = plans.into_iter().flat_map(|p| p.split(self.max));
        let mut held = None;
        loop {
            let next = held.take().or_else(|| {
                let plan = pieces.next()?;
                self.next += 1;
                Some(WriteOp { id: OpId(self.next), peer, plan, regions: self.regions.clone() })
            });
            match next.map(|op| (op.id, self.lane.submit(op))) {
                Some((id, Ok(()))) => {
                    flying.insert(id);
                    continue;
                }
                Some((_, Err(SubmitError::Busy(op)))) => held = Some(op),
                Some((_, Err(SubmitError::Rejected(_, e)))) => return Err(e.to_string().into()),
                None if flying.is_empty() => return Ok(now_ns() - start),
                None => {}
            }
            if !readable(fd, PATIENCE) {
                return Err("the lane has no news".into());
            }
            self.lane.poll(&mut news);
            for event in news.drain(..) {
                match event {
                    LaneEvent::Outcome(id, Outcome::Done) if flying.remove(&id) => {}
                    LaneEvent::PeerLost(other, _) if other != peer => drop(self.lost.insert(other)),
                    other => return Err(format!("{other:?}").into()),
                }
            }
        }
    }
}
