//! Connecting transport peers, which may take seconds, away from the shard.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};

use crate::engine::{Connected, Connector};
use crate::ids::PeerId;
use crate::transport::{PeerDescriptor, Transport, TransportError, TransportErrorKind};

enum Job {
    Connect(u64, PeerDescriptor),
    Disconnect(PeerId),
}

/// Threads that connect; several, so that one dead peer does not hold up the others.
pub(super) struct ConnectorThreads {
    jobs: Sender<Job>,
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
        for i in 0..THREADS {
            let (transport, queue, done) = (transport.clone(), queue.clone(), done.clone());
            std::thread::Builder::new()
                .name(format!("kv-connect-{i}"))
                .spawn(move || work(&*transport, &queue, &*done))?;
        }
        Ok(Self { jobs, done })
    }
}

/// Until the shard, and with it the sending half, is gone.
fn work(transport: &dyn Transport, queue: &Mutex<Receiver<Job>>, done: &(dyn Fn(Connected) + Send + Sync)) {
    loop {
        let job = queue.lock().unwrap_or_else(PoisonError::into_inner).recv();
        match job {
            Ok(Job::Connect(token, peer)) => done(Connected { token, result: transport.connect(&peer) }),
            Ok(Job::Disconnect(id)) => transport.disconnect(id),
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
        // Without threads there is no transport left to disconnect from.
        let _ = self.jobs.send(Job::Disconnect(peer));
    }
}
