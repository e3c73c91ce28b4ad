//! Control messages on their way out. A message a stalled peer does not take is kept, in order, for a bounded time;
//! the shard never waits for it.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use super::Stats;
use crate::control::{ControlError, ControlPlane, Multipart};
use crate::net::Endpoint;
use crate::time::Timestamp;

/// How long a message waits for a stalled peer (SGLang: 30 s).
const KEEP: Duration = Duration::from_secs(30);
/// How often it is tried again.
const RETRY: Duration = Duration::from_millis(10);
/// Messages kept per peer, beyond the control plane's own queue.
const MAX_KEPT: usize = 100_000;

#[derive(Debug, Default)]
pub(crate) struct Outgoing {
    /// In order of endpoints: a run of the simulation must not depend on a hasher's seed.
    kept: BTreeMap<Endpoint, VecDeque<(Timestamp, Multipart)>>,
    retry_at: Option<Timestamp>,
}

impl Outgoing {
    /// Send now, or keep for later. False when it was given up.
    pub(crate) fn send(
        &mut self,
        now: Timestamp,
        control: &mut dyn ControlPlane,
        to: &Endpoint,
        message: Multipart,
        stats: &Arc<Stats>,
    ) -> bool {
        if let Some(q) = self.kept.get_mut(to) {
            if q.len() >= MAX_KEPT {
                stats.send_failures.inc();
                return false;
            }
            q.push_back((now + KEEP, message));
            return true;
        }
        match control.send(to, message.clone()) {
            Ok(()) => {
                stats.messages_out.inc();
                true
            }
            Err(ControlError::Stalled { .. }) => {
                self.kept.insert(to.clone(), VecDeque::from([(now + KEEP, message)]));
                self.retry_at.get_or_insert(now + RETRY);
                true
            }
            Err(error) => {
                stats.send_failures.inc();
                tracing::warn!("message to {to} lost: {error}");
                false
            }
        }
    }

    /// Messages wait for it: one sent past them would overtake them.
    pub(crate) fn is_stalled(&self, to: &Endpoint) -> bool {
        self.kept.contains_key(to)
    }

    /// The peer is gone: what waits for it is of no use.
    pub(crate) fn forget(&mut self, to: &Endpoint) {
        self.kept.remove(to);
    }

    pub(crate) fn poll_timeout(&self) -> Option<Timestamp> {
        self.retry_at
    }

    /// Try again what waits. Returns the peers that never got a message.
    pub(crate) fn handle_timeout(
        &mut self,
        now: Timestamp,
        control: &mut dyn ControlPlane,
        stats: &Arc<Stats>,
    ) -> Vec<Endpoint> {
        let mut given_up = Vec::new();
        if self.retry_at.is_none_or(|t| t > now) {
            return given_up;
        }
        self.kept.retain(|to, queue| {
            while let Some((deadline, message)) = queue.front() {
                match control.send(to, message.clone()) {
                    Ok(()) => stats.messages_out.inc(),
                    Err(ControlError::Stalled { .. }) if *deadline > now => return true,
                    Err(error) => {
                        stats.send_failures.inc();
                        tracing::warn!("message to {to} lost: {error}");
                        if given_up.last() != Some(to) {
                            given_up.push(to.clone());
                        }
                    }
                }
                queue.pop_front();
            }
            false
        });
        self.retry_at = (!self.kept.is_empty()).then(|| now + RETRY);
        given_up
    }
}
