//! Which transports serve a decode manager of this process.
//!
//! Prefill knows a decode rank by its transport's name: what two ranks of one name announce, it takes for one rank's. And
//! 0.5.23 ignores the second registration of a name, so that the second rank's KV would be written to the first one's
//! pages.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::ManagerError;
use crate::transport::Transport;

/// By address, which is one transport's as long as somebody holds it.
static SERVING: Mutex<BTreeSet<usize>> = Mutex::new(BTreeSet::new());

fn serving() -> MutexGuard<'static, BTreeSet<usize>> {
    SERVING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A transport that serves one decode manager for as long as this lives.
pub(super) struct Serving(Arc<dyn Transport>);

impl Serving {
    pub(super) fn one(transport: Arc<dyn Transport>) -> Result<Self, ManagerError> {
        if serving().insert(address(&transport)) {
            return Ok(Self(transport));
        }
        Err(ManagerError::Config(format!(
            "the transport {} serves another decode manager: prefill tells decode ranks apart by the names of their \
             transports, so give each manager one of its own",
            transport.local_name()
        )))
    }

    pub(super) fn transport(&self) -> &dyn Transport {
        &*self.0
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        serving().remove(&address(&self.0));
    }
}

fn address(transport: &Arc<dyn Transport>) -> usize {
    Arc::as_ptr(transport).cast::<()>().addr()
}
