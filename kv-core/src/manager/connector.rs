//! Connecting transport peers, which may take seconds, away from the shard.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use crate::engine::{Connected, Connector};
use crate::ids::PeerId;
use crate::transport::{PeerDescriptor, Transport, TransportError, TransportErrorKind};

enum Job {
    Connect(u64, PeerDescriptor),
    /// Look at the list of peers to let go of.
    Disconnect,
}

/// Peers to let go of. Whoever takes a job carries all of it out first, under the lock: so a connection that was asked for
/// after a peer was let go of is not made before it, and does not find the old one still there.
type Disconnects = Mutex<Vec<PeerId>>;

/// Threads that connect; several, so that one dead peer does not hold up the others.
pub(super) struct ConnectorThreads {
    jobs: Sender<Job>,
    disconnects: Arc<Disconnects>,
    done: Arc<dyn Fn(Connected) + Send + Sync>,
}

const THREADS: usize = 4;

impl ConnectorThreads {
    /// `done` gets each finished attempt.
    pub(super) fn start(
        transport: Arc<dyn Transport>,
        done: Arc<dyn Fn(Connected) + Send + Sync>,
    ) -> std::io::Result<Self> {
        let (jobs, queue) = channel();
        let queue = Arc::new(Mutex::new(queue));
        let disconnects = Arc::<Disconnects>::default();
        for i in 0..THREADS {
            let (transport, queue, done) = (transport.clone(), queue.clone(), done.clone());
            let disconnects = disconnects.clone();
            std::thread::Builder::new()
                .name(format!("kv-connect-{i}"))
                .spawn(move || work(&*transport, &queue, &disconnects, &*done))?;
        }
        Ok(Self { jobs, disconnects, done })
    }
}

/// Until the shard, and with it the sending half, is gone.
fn work(
    transport: &dyn Transport,
    queue: &Mutex<Receiver<Job>>,
    disconnects: &Disconnects,
    done: &(dyn Fn(Connected) + Send + Sync),
) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        disconnects.lock().unwrap_or_else(PoisonError::into_inner).drain(..).for_each(|id| transport.disconnect(id));
        match job {
            Ok(Job::Connect(token, peer)) => done(Connected { token, result: transport.connect(&peer) }),
            Ok(Job::Disconnect) => {}
            Err(_) => return,
        }
    }
}

impl Connector for ConnectorThreads {
    fn connect(&mut self, token: u64, peer: PeerDescriptor) {
        if self.jobs.send(Job::Connect(token, peer)).is_err() {
            let error = TransportError::new(TransportErrorKind::Unavailable, "the connector threads are gone");
            (self.done)(Connected { token, result: Err(error) });
        }
    }

    fn disconnect(&mut self, peer: PeerId) {
        self.disconnects.lock().unwrap_or_else(PoisonError::into_inner).push(peer);
        // Without threads there is no transport left to disconnect from.
        let _ = self.jobs.send(Job::Disconnect);
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::sync::mpsc;

    use super::*;
    use crate::ids::PeerId;
    use crate::memory::{MemoryOwner, RegisteredRegion};
    use crate::net::Endpoint;
    use crate::transport::{Capabilities, Lane};

    /// Knows whether its one peer is connected, and takes its time to let go of it.
    struct Slow(Mutex<bool>);

    impl Transport for Slow {
        fn capabilities(&self) -> &Capabilities {
            unreachable!()
        }
        fn local_name(&self) -> &str {
            unreachable!()
        }
        fn local_metadata(&self) -> bytes::Bytes {
            unreachable!()
        }
        fn register(&self, _: Arc<dyn MemoryOwner>) -> Result<Arc<RegisteredRegion>, TransportError> {
            unreachable!()
        }
        fn lane(&self) -> Result<Box<dyn Lane>, TransportError> {
            unreachable!()
        }
        fn connect(&self, _: &PeerDescriptor) -> Result<PeerId, TransportError> {
            let mut connected = self.0.lock().unwrap();
            if std::mem::replace(&mut *connected, true) {
                return Err(TransportError::new(TransportErrorKind::Backend, "the old connection is still there"));
            }
            Ok(PeerId(1))
        }
        fn disconnect(&self, _: PeerId) {
            std::thread::sleep(std::time::Duration::from_micros(200));
            *self.0.lock().unwrap() = false;
        }
    }

    /// A decode that registers anew is let go of and connected again in one step: four threads must not swap the two.
    #[test]
    fn a_connection_asked_for_after_a_peer_was_let_go_of_is_made_after_it() {
        let (tell, told) = mpsc::channel();
        let done = Arc::new(move |c: Connected| tell.send(c.result).unwrap());
        let mut connector = ConnectorThreads::start(Arc::new(Slow(Mutex::new(true))), done).unwrap();
        let peer = PeerDescriptor {
            name: "d".into(),
            metadata: bytes::Bytes::new(),
            endpoint: Endpoint::new("127.0.0.1", 1),
            host: None,
        };
        for n in 0..300 {
            connector.disconnect(PeerId(1));
            connector.connect(n, peer.clone());
            assert_eq!(told.recv().unwrap(), Ok(PeerId(1)), "round {n}");
        }
    }
}
