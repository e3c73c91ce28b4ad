//! The fake transport itself: registration, peers, lanes.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use bytes::Bytes;
use kv_core::ids::{PeerId, RegionId};
use kv_core::memory::{MemoryKind, MemoryOwner, RegisteredRegion};
use kv_core::transport::{
    Capabilities, Lane, LaneEvent, PeerDescriptor, Transport, TransportError, TransportErrorKind as Kind,
};

use super::blob::{RemoteRegion, decode, encode};
use super::policy::{Flaw, Policy};
use super::state::{LaneRow, Node, PeerRow, PeerState, RegionRow, Regions};
use super::{FakeFabric, FakeLane, lost};
use crate::memory::with_live;

/// Makes a [`FakeTransport`] that differs from the default.
pub struct FakeTransportBuilder {
    fabric: FakeFabric,
    name: String,
    capabilities: Capabilities,
    policy: Policy,
    capacity: Option<usize>,
    wake_fds: bool,
    flaw: Option<Flaw>,
}

impl FakeTransportBuilder {
    pub(super) fn new(fabric: FakeFabric, name: &str) -> Self {
        let capabilities = Capabilities {
            name: "fake",
            host_memory: true,
            device_memory: true,
            max_op_bytes: None,
            submit_blocks: false,
            done_proves_placement: true,
            settles_unresolved: true,
            unregister_revokes: true,
            checks_destinations: false,
        };
        Self {
            fabric,
            name: name.into(),
            capabilities,
            policy: Policy::default(),
            capacity: None,
            wake_fds: false,
            flaw: None,
        }
    }

    /// Declare other capabilities. `max_op_bytes` is enforced; the rest is what the test makes of it.
    pub fn capabilities(mut self, capabilities: Capabilities) -> Self {
        self.capabilities = capabilities;
        self
    }

    /// The capabilities it will declare.
    pub fn capabilities_mut(&mut self) -> &mut Capabilities {
        &mut self.capabilities
    }

    /// What becomes of ops.
    pub fn policy(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Most ops without outcome; more are `Busy`.
    pub fn capacity(mut self, ops: usize) -> Self {
        self.capacity = Some(ops);
        self
    }

    /// Give lanes a wake fd, readable when there is news that the script made. (Automatic ops move when polled.)
    pub fn wake_fds(mut self) -> Self {
        self.wake_fds = true;
        self
    }

    /// Break the seam in one way, for a negative control.
    pub fn flaw(mut self, flaw: Flaw) -> Self {
        self.flaw = Some(flaw);
        self
    }

    /// The transport.
    pub fn build(self) -> Arc<FakeTransport> {
        let mut inner = self.fabric.0.lock();
        assert!(!inner.nodes.contains_key(&self.name), "the fabric has a transport named {:?} already", self.name);
        let node = Node {
            alive: true,
            paused: false,
            regions: Regions::default(),
            next_region: 1,
            peers: BTreeMap::new(),
            lanes: Vec::new(),
            ops: BTreeMap::new(),
            moving: BTreeSet::new(),
            order: Vec::new(),
            in_flight: 0,
            capacity: self.capacity,
            policy: self.policy,
            script: VecDeque::new(),
            connect_errors: VecDeque::new(),
            connects: Vec::new(),
            flaw: self.flaw,
            leaked: Vec::new(),
            rng: inner.rng.fork(),
        };
        inner.nodes.insert(self.name.clone(), node);
        drop(inner);
        Arc::new(FakeTransport {
            fabric: self.fabric,
            name: self.name,
            capabilities: self.capabilities,
            wake_fds: self.wake_fds,
        })
    }
}

/// One process's transport on a [`FakeFabric`].
pub struct FakeTransport {
    pub(super) fabric: FakeFabric,
    pub(super) name: String,
    capabilities: Capabilities,
    wake_fds: bool,
}

/// Ends a registration.
struct Registration {
    regions: Regions,
    id: RegionId,
    keep: bool,
}

impl Drop for Registration {
    fn drop(&mut self) {
        let mut rows = self.regions.lock();
        match rows.get_mut(&self.id) {
            Some(row) if self.keep => row.gone = true,
            _ => drop(rows.remove(&self.id)),
        }
    }
}

impl FakeTransport {
    /// The fabric it is on.
    pub fn fabric(&self) -> &FakeFabric {
        &self.fabric
    }
}

impl Transport for FakeTransport {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn local_name(&self) -> &str {
        &self.name
    }

    fn local_metadata(&self) -> Bytes {
        let regions = self.fabric.0.lock().node(&self.name).regions.clone();
        let rows = regions.lock();
        let live = rows.iter().filter(|(_, r)| !r.gone);
        let list: Vec<_> = live.map(|(id, r)| RemoteRegion { id: *id, base: r.base, len: r.len, key: r.key }).collect();
        encode(&self.name, &list).into()
    }

    fn register(&self, memory: Arc<dyn MemoryOwner>) -> Result<Arc<RegisteredRegion>, TransportError> {
        let refuse = |text: &str| Err(TransportError::new(Kind::InvalidArgument, text));
        let (base, len) = (memory.base(), memory.len());
        let supported = match memory.kind() {
            MemoryKind::Dram => self.capabilities.host_memory,
            MemoryKind::Vram { .. } => self.capabilities.device_memory,
        };
        if !supported {
            return refuse(&format!("this transport does not take memory of kind {:?}", memory.kind()));
        }
        if len == 0 {
            return refuse("there is nothing to register");
        }
        // The fake copies with the CPU, so real device memory is out of its reach.
        if memory.kind() != MemoryKind::Dram && !with_live(base, len, || ()) {
            return refuse("the fake takes device memory only from TestMemory");
        }
        let mut inner = self.fabric.0.lock();
        let node = inner.node(&self.name);
        let id = RegionId(node.next_region);
        node.next_region += 1;
        let row = RegionRow { base, len, key: node.rng.next_u64(), owner: Arc::downgrade(&memory), gone: false };
        node.regions.lock().insert(id, row);
        let keep = node.flaw == Some(Flaw::KeepsUnregistered);
        let registration = Registration { regions: node.regions.clone(), id, keep };
        Ok(Arc::new(RegisteredRegion::new(id, memory, Box::new(registration))))
    }

    fn connect(&self, peer: &PeerDescriptor) -> Result<PeerId, TransportError> {
        let bad = |text: String| Err(TransportError::new(Kind::BadPeer, format!("peer {:?}: {text}", peer.name)));
        let mut inner = self.fabric.0.lock();
        let node = inner.node(&self.name);
        node.connects.push(peer.clone());
        if let Some(error) = node.connect_errors.pop_front() {
            return Err(error);
        }
        let trusting = node.flaw == Some(Flaw::TrustsForgedPeer);
        let (target, regions) = match decode(&peer.metadata, trusting) {
            Ok(known) => known,
            Err(text) => return bad(text),
        };
        if target != peer.name && !trusting {
            return bad(format!("its metadata says {target:?}"));
        }
        let stuck = node.flaw == Some(Flaw::NeverReconnects);
        let known =
            node.peers.iter_mut().find(|(_, p)| p.target == target && (stuck || p.state == PeerState::Connected));
        // The same process again: its metadata may cover more by now.
        if let Some((id, row)) = known
            && row.endpoint == peer.endpoint
        {
            row.regions = regions;
            return Ok(*id);
        }
        match inner.nodes.get(&target) {
            Some(node) if node.alive => {}
            Some(_) => return Err(lost(format!("process {target} is dead"))),
            None => return bad("no such transport on this fabric".into()),
        }
        let id = PeerId(inner.next_peer);
        inner.next_peer += 1;
        let released = inner.supersede(&self.name, &peer.endpoint, &target);
        let row = PeerRow { target, endpoint: peer.endpoint.clone(), regions, state: PeerState::Connected };
        inner.node(&self.name).peers.insert(id, row);
        drop(inner);
        drop(released);
        Ok(id)
    }

    fn disconnect(&self, peer: PeerId) {
        let mut inner = self.fabric.0.lock();
        if let Some(row) = inner.node(&self.name).peers.get_mut(&peer) {
            row.state = PeerState::Gone;
        }
    }

    fn lane(&self) -> Result<Box<dyn Lane>, TransportError> {
        let (wake, waker) = if self.wake_fds {
            let pair = UnixStream::pair().and_then(|(a, b)| {
                a.set_nonblocking(true)?;
                b.set_nonblocking(true)?;
                Ok((a, b))
            });
            let (a, b) = pair.map_err(|e| TransportError::new(Kind::Unavailable, e))?;
            (Some(a), Some(b))
        } else {
            (None, None)
        };
        let mut inner = self.fabric.0.lock();
        let node = inner.node(&self.name);
        node.lanes.push(LaneRow { queue: VecDeque::<LaneEvent>::new(), open: true, waker });
        Ok(Box::new(FakeLane {
            shared: self.fabric.0.clone(),
            name: self.name.clone(),
            index: node.lanes.len() - 1,
            max_op_bytes: self.capabilities.max_op_bytes,
            wake,
        }))
    }
}
