//! Getting to know a peer: who it is, whether it is who we knew, and whether writes to it would arrive.

use std::ffi::CString;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kv_core::host::ProcessHandle;
use kv_core::ids::PeerId;
use kv_core::transport::{PeerDescriptor, TransportError, TransportErrorKind as ErrorKind};

use crate::peer::{Peer, State};
use crate::probe::{self, Described, ProbeError};
use crate::stats;
use crate::transport::{Core, lock};

impl Core {
    /// One attempt. The peer is asked each time: that it failed before counts for nothing, and that it was good neither.
    pub fn connect(&self, descriptor: &PeerDescriptor) -> Result<PeerId, TransportError> {
        let bad = |text: String| TransportError::new(ErrorKind::BadPeer, text);
        let lost = |text: String| TransportError::new(ErrorKind::PeerLost, text);
        let name = &descriptor.name;
        let c_name = CString::new(name.as_str()).ok().filter(|_| probe::session(name).is_some());
        let c_name = c_name.ok_or_else(|| bad(format!("{name:?} is no session id (`host:port`)")))?;
        if name == self.engine.name() {
            return Err(bad(format!("{name} is this engine itself")));
        }
        // A handle from before the first word: it also sees an end that comes while we connect.
        let process = descriptor.host.and_then(|h| h.open(&self.host));
        if descriptor.host.is_some_and(|h| h.is_gone(&self.host)) {
            return Err(lost(format!("the process of {name} has ended")));
        }
        let said = Arc::new(self.ask(name)?);
        if let Some(same) = self.known(descriptor, &said) {
            return Ok(same);
        }
        // Whatever the library knows of the session is of another generation, or of before a failure.
        let segment = self.engine.open_anew(&c_name);
        let segment = segment.ok_or_else(|| lost(format!("Mooncake cannot open {name}, which answered just now")))?;
        let window = self.window(name);
        if let Some(addr) = said.first().filter(|_| said.protocol == "tcp") {
            let greeted = self.engine.greet(segment, addr, self.config.probe_timeout);
            greeted.map_err(|why| {
                let port = said.data_port;
                lost(format!("{name} does not serve its memory on its data port {port}: {why}"))
            })?;
        }
        window.confirm(Instant::now());
        self.succeed(descriptor);
        let id = PeerId(self.next_peer.fetch_add(1, Ordering::Relaxed));
        let peer = Arc::new(Peer {
            id,
            name: name.clone(),
            segment,
            endpoint: Mutex::new(descriptor.endpoint.clone()),
            host: descriptor.host,
            process,
            described: Mutex::new(said),
            window,
            open: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            state: Mutex::new(State::Live),
            failed: AtomicBool::new(false),
        });
        lock(&self.peers).insert(id, Arc::clone(&peer));
        stats::add(&self.counters.peers, 1);
        self.keeper.watch(&peer);
        self.supersede_parted(&peer);
        Ok(id)
    }

    fn ask(&self, name: &str) -> Result<Described, TransportError> {
        stats::add(&self.counters.probes, 1);
        probe::describe(name, self.config.probe_timeout).map_err(|e| {
            stats::add(&self.counters.probes_failed, 1);
            match e {
                ProbeError::Silent(e) => {
                    TransportError::new(ErrorKind::PeerLost, format!("{name} does not answer for itself: {e}"))
                }
                ProbeError::Odd(why) => {
                    TransportError::new(ErrorKind::BadPeer, format!("{name} cannot be written to: {why}"))
                }
            }
        })
    }

    /// The generation that is connected already, if it is the one that answered, with what it registered since.
    fn known(&self, descriptor: &PeerDescriptor, said: &Arc<Described>) -> Option<PeerId> {
        let peer = lock(&self.peers).values().find(|p| p.name == descriptor.name && p.live()).cloned()?;
        let same_process = match (peer.host, descriptor.host) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        };
        if !same_process || !peer.described().may_be(said) {
            return None;
        }
        *lock(&peer.described) = Arc::clone(said);
        // It may be lost, or forgotten, just now.
        let peers = lock(&self.peers);
        if !peers.contains_key(&peer.id) || !peer.live() {
            return None;
        }
        peer.closing.store(false, Ordering::SeqCst);
        *lock(&peer.endpoint) = descriptor.endpoint.clone();
        peer.window.confirm(Instant::now());
        Some(peer.id)
    }

    /// Older generations of the session, or at the address, of a new one are over.
    fn succeed(&self, descriptor: &PeerDescriptor) {
        let older = |p: &&Arc<Peer>| *lock(&p.endpoint) == descriptor.endpoint || p.name == descriptor.name;
        let old: Vec<Arc<Peer>> = lock(&self.peers).values().filter(older).cloned().collect();
        for peer in old {
            self.replaced(&peer, descriptor);
        }
    }

    /// Another process, or the same one after a failure, takes the place of `peer`.
    fn replaced(&self, peer: &Arc<Peer>, descriptor: &PeerDescriptor) {
        let text = format!("{} registered anew at {}", descriptor.name, descriptor.endpoint);
        let error = TransportError::new(ErrorKind::PeerLost, text);
        let dead = match (peer.host, descriptor.host) {
            // One address on one boot of one host belongs to one process at a time.
            (Some(old), Some(new)) => *lock(&peer.endpoint) == descriptor.endpoint && old.succeeded_by(&new),
            _ => false,
        };
        // Where the process itself can be seen, only its end is its end.
        let dead = dead && peer.process.as_ref().is_none_or(ProcessHandle::exited);
        if dead { self.die(peer, error) } else { self.lose(peer, error) }
    }
}
