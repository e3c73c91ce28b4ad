//! Prefill's table of decode peers: what each registered, how it pairs, and whether it can be written to.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use crate::host::HostIdentity;
use crate::ids::PeerId;
use crate::layout::Pairing;
use crate::net::Endpoint;
use crate::time::Timestamp;
use crate::wire::{ExtPeer, Registration};

/// Whether writes to a peer can be posted.
#[derive(Debug)]
pub(crate) enum Link {
    /// The connector is at it.
    Connecting(u64),
    /// Connected as this generation.
    Ready(PeerId),
    /// Its geometry or blob cannot be used. Ends when it registers again.
    Refused(Arc<str>),
    /// It broke. Tried again when a room needs it, not before `retry_at`.
    Down { reason: Arc<str>, retry_at: Timestamp },
}

/// A write that waits for its peer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Post<K> {
    pub(crate) key: K,
    pub(crate) chunk: u32,
    pub(crate) dest: usize,
}

#[derive(Debug)]
pub(crate) struct Peer<K> {
    pub(crate) registration: Box<Registration>,
    /// What it said of itself behind its registration: it is ours.
    pub(crate) ext: Option<ExtPeer>,
    /// Which process it is, if it said so.
    pub(crate) host: Option<HostIdentity>,
    /// Of its registration, for tags.
    pub(crate) geometry: u64,
    pub(crate) pairing: Option<Arc<Pairing>>,
    pub(crate) link: Link,
    pub(crate) posts: VecDeque<Post<K>>,
    /// Writes to it without an outcome.
    pub(crate) in_flight: usize,
    /// Losses and failed attempts since it was last connected.
    pub(crate) failures: u32,
    pub(crate) last_used: Timestamp,
}

#[derive(Debug)]
pub(crate) struct Peers<K> {
    pub(crate) by_name: HashMap<Arc<str>, Peer<K>>,
    by_endpoint: HashMap<Endpoint, Arc<str>>,
    by_id: HashMap<PeerId, Arc<str>>,
    by_token: HashMap<u64, Arc<str>>,
    next_token: u64,
}

impl<K> Peers<K> {
    pub(crate) fn new() -> Self {
        Self {
            by_name: HashMap::new(),
            by_endpoint: HashMap::new(),
            by_id: HashMap::new(),
            by_token: HashMap::new(),
            next_token: 0,
        }
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Peer<K>> {
        self.by_name.get(name)
    }

    pub(crate) fn get_mut(&mut self, name: &str) -> Option<&mut Peer<K>> {
        self.by_name.get_mut(name)
    }

    pub(crate) fn at(&self, endpoint: &Endpoint) -> Option<Arc<str>> {
        self.by_endpoint.get(endpoint).cloned()
    }

    pub(crate) fn of(&self, id: PeerId) -> Option<Arc<str>> {
        self.by_id.get(&id).cloned()
    }

    pub(crate) fn insert(&mut self, name: Arc<str>, peer: Peer<K>) {
        self.by_endpoint.insert(peer.registration.endpoint.clone(), name.clone());
        self.by_name.insert(name, peer);
    }

    /// Take a peer out; gives back its connection, to be let go of.
    pub(crate) fn remove(&mut self, name: &str) -> Option<(Peer<K>, Option<PeerId>)> {
        let peer = self.by_name.remove(name)?;
        if self.by_endpoint.get(&peer.registration.endpoint).is_some_and(|n| &**n == name) {
            self.by_endpoint.remove(&peer.registration.endpoint);
        }
        let id = match peer.link {
            Link::Ready(id) => {
                self.by_id.remove(&id);
                Some(id)
            }
            _ => None,
        };
        Some((peer, id))
    }

    /// Start a connection attempt: the token to give the connector.
    pub(crate) fn connecting(&mut self, name: &Arc<str>) -> u64 {
        self.next_token += 1;
        let token = self.next_token;
        if let Some(p) = self.by_name.get_mut(name) {
            p.link = Link::Connecting(token);
            self.by_token.insert(token, name.clone());
        }
        token
    }

    /// The peer whose attempt this was; `Err` when it has moved on meanwhile.
    pub(crate) fn connected(&mut self, token: u64) -> Result<Arc<str>, Option<Arc<str>>> {
        let Some(name) = self.by_token.remove(&token) else { return Err(None) };
        match self.by_name.get(&name) {
            Some(Peer { link: Link::Connecting(t), .. }) if *t == token => Ok(name),
            _ => Err(Some(name)),
        }
    }

    /// Whether `id`, the result of an older attempt at `name`, is in use or about to be: two attempts at one process
    /// give one id.
    pub(crate) fn wants(&self, name: Option<&str>, id: PeerId) -> bool {
        let connecting = |p: &Peer<K>| matches!(p.link, Link::Connecting(_));
        self.by_id.contains_key(&id) || name.and_then(|n| self.get(n)).is_some_and(connecting)
    }

    pub(crate) fn ready(&mut self, name: &Arc<str>, id: PeerId) {
        if let Some(p) = self.by_name.get_mut(name) {
            p.link = Link::Ready(id);
            p.failures = 0;
            self.by_id.insert(id, name.clone());
        }
    }

    /// The connection broke; gives back its id, to be let go of.
    pub(crate) fn down(&mut self, name: &str, reason: Arc<str>, retry_at: Timestamp) -> Option<PeerId> {
        let p = self.by_name.get_mut(name)?;
        match std::mem::replace(&mut p.link, Link::Down { reason, retry_at }) {
            Link::Ready(id) => {
                self.by_id.remove(&id);
                Some(id)
            }
            _ => None,
        }
    }

    /// The peer to give up when the table is full: the least recently used one without work.
    pub(crate) fn victim(&self) -> Option<Arc<str>> {
        self.by_name.iter().filter(|(_, p)| p.posts.is_empty()).min_by_key(|(_, p)| p.last_used).map(|(n, _)| n.clone())
    }
}
