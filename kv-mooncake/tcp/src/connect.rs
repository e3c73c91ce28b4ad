//! Getting to know a peer: who it is, whether it is who we knew, and connections that lead to it and to nobody else.
//!
//! The wire has no word for generations: a process that restarts on the same ports takes what was meant for the one before.
//! So connections are made here alone, and before one is used, a byte is read over the *anchor*: a connection that is older
//! than all others. Where it answers, its process was there when the others were taken, and so took them.

use std::net::TcpStream;
use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use kv_core::host::ProcessHandle;
use kv_core::ids::PeerId;
use kv_core::transport::{PeerDescriptor, TransportError, TransportErrorKind as ErrorKind};
use mooncake_wire::{Descriptor, session};

use crate::dial::{self, DialError};
use crate::peer::{Peer, State};
use crate::stats;
use crate::sys;
use crate::transport::{Core, lock};

fn failed(name: &str, step: &str, since: Instant, error: DialError) -> TransportError {
    let took = since.elapsed();
    match error {
        DialError::Silent(e) => {
            let text = format!(
                "{name} does not {step} ({took:.1?}): {e}; is the process up, and its ports open to this host?"
            );
            TransportError::new(ErrorKind::PeerLost, text)
        }
        DialError::Odd(why) => TransportError::new(ErrorKind::BadPeer, format!("{name} cannot be written to: {why}")),
    }
}

const DATA_PORT: &str = "serve its memory on its data port";

impl Core {
    /// One attempt. The peer is asked each time: that it failed before counts for nothing, and that it was good neither.
    pub fn connect(&self, descriptor: &PeerDescriptor) -> Result<PeerId, TransportError> {
        let (name, begun) = (&descriptor.name, Instant::now());
        let until = begun + self.target.config.connect_timeout;
        let bad = |text: String| TransportError::new(ErrorKind::BadPeer, text);
        let lost = |text: String| TransportError::new(ErrorKind::PeerLost, text);
        let (host, _) = session(name).ok_or_else(|| bad(format!("{name:?} is no session id (`host:port`)")))?;
        if *name == self.target.name {
            return Err(bad(format!("{name} is this engine itself")));
        }
        // A handle from before the first word: it also sees an end that comes while we connect.
        let process = descriptor.host.and_then(|h| h.open(&self.host));
        if descriptor.host.is_some_and(|h| h.is_gone(&self.host)) {
            return Err(lost(format!("the process of {name} has ended")));
        }
        let ask = || dial::describe(name, until).map_err(|e| failed(name, "answer for itself", begun, e));
        let said = ask()?;
        if let Some(same) = self.known(descriptor, &said, begun) {
            return Ok(same);
        }
        let data = |e: DialError| failed(name, DATA_PORT, begun, e);
        let data_host = said.data_host.as_deref().unwrap_or(host);
        let anchor = dial::dial(data_host, said.data_port, until);
        let anchor = anchor.and_then(|a| sys::tune(&a, self.target.config.dead_after).map(|()| a));
        let anchor = anchor.map_err(|e| data(e.into()))?;
        let peer = Peer {
            id: PeerId(self.next_peer.fetch_add(1, Ordering::Relaxed)),
            name: name.clone(),
            endpoint: Mutex::new(descriptor.endpoint.clone()),
            host: descriptor.host,
            process,
            described: Mutex::new(Arc::new(said)),
            anchor: Mutex::new(anchor),
            spares: Mutex::default(),
            made: AtomicUsize::new(0),
            open: AtomicUsize::new(0),
            closing: AtomicBool::new(false),
            state: Mutex::new(State::Live),
        };
        let again = ask()?;
        if !peer.described().may_be(&again) {
            return Err(lost(format!("{name} was replaced by another process while it was connected; try again")));
        }
        lock(&peer.described).clone_from(&Arc::new(again));
        self.equip(&peer, self.lanes(), until).map_err(data)?;
        self.succeed(descriptor);
        let (id, peer) = (peer.id, Arc::new(peer));
        lock(&self.peers).insert(id, Arc::clone(&peer));
        stats::add(&self.target.counters.peers, 1);
        if let Some(process) = &peer.process {
            self.target.watch_process(id, process.as_fd());
        }
        self.target.watch_anchor(id, lock(&peer.anchor).as_fd());
        Ok(id)
    }

    /// Connections for `lanes` lanes, as many as are missing, and the anchor's word for all of them. A peer that registered
    /// nothing cannot be written to, and needs none.
    pub fn equip(&self, peer: &Peer, lanes: usize, until: Instant) -> Result<(), DialError> {
        let said = peer.described();
        let Some(addr) = said.first() else { return Ok(()) };
        let mut anchor = lock(&peer.anchor);
        let mut fresh: Vec<TcpStream> = Vec::new();
        let missing = lanes.max(1).saturating_sub(peer.made.load(Ordering::SeqCst));
        for _ in 0..missing {
            let to = anchor.peer_addr()?;
            let mut stream = dial::dial(&to.ip().to_string(), to.port(), until)?;
            dial::greet(&mut stream, addr, said.acknowledges(), until)?;
            sys::tune(&stream, self.target.config.dead_after)?;
            stream.set_nonblocking(true)?;
            fresh.push(stream);
        }
        dial::greet(&mut anchor, addr, said.acknowledges(), until)?;
        peer.made.fetch_add(fresh.len(), Ordering::SeqCst);
        lock(&peer.spares).append(&mut fresh);
        Ok(())
    }

    /// The generation that is connected already, if it is the one that answered, with what it registered since.
    fn known(&self, descriptor: &PeerDescriptor, said: &Descriptor, begun: Instant) -> Option<PeerId> {
        let until = begun + self.target.config.connect_timeout;
        let peer = lock(&self.peers).values().find(|p| p.name == descriptor.name && p.live()).cloned()?;
        let same_process = match (peer.host, descriptor.host) {
            (Some(a), Some(b)) => a == b,
            _ => true,
        };
        if !same_process || !peer.described().may_be(said) {
            return None;
        }
        let before = std::mem::replace(&mut *lock(&peer.described), Arc::new(said.clone()));
        if let Err(error) = self.equip(&peer, self.lanes(), until) {
            *lock(&peer.described) = before;
            self.lose(&peer, failed(&peer.name, DATA_PORT, begun, error));
            return None;
        }
        // It may be lost, or forgotten, just now.
        let peers = lock(&self.peers);
        if !peers.contains_key(&peer.id) || !peer.live() {
            return None;
        }
        peer.closing.store(false, Ordering::SeqCst);
        *lock(&peer.endpoint) = descriptor.endpoint.clone();
        Some(peer.id)
    }

    /// Older generations of the session, or at the address, of a new one are over.
    fn succeed(&self, descriptor: &PeerDescriptor) {
        let older = |p: &&Arc<Peer>| *lock(&p.endpoint) == descriptor.endpoint || p.name == descriptor.name;
        let old: Vec<Arc<Peer>> = lock(&self.peers).values().filter(older).cloned().collect();
        old.iter().for_each(|peer| self.replaced(peer, descriptor));
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
