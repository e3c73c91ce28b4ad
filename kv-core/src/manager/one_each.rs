//! Which transports serve a decode manager of this process.
//!
//! Prefill knows a decode rank by its transport's name: what two ranks of one name announce, it takes for one rank's. And
//! 0.5.23 ignores the second registration of a name over NIXL and MORI-IO, so that the second rank's KV would be written to
//! the first one's pages, also when the first one is long gone.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::ManagerError;
use crate::transport::Transport;

/// Transports that serve, and names that are spent.
#[derive(Default)]
struct Taken {
    /// By address, which is one transport's as long as somebody holds it.
    serving: BTreeSet<usize>,
    /// Where a name is registered once, for the life of the process.
    spent: BTreeSet<String>,
}

static TAKEN: Mutex<Taken> = Mutex::new(Taken { serving: BTreeSet::new(), spent: BTreeSet::new() });

fn taken() -> MutexGuard<'static, Taken> {
    TAKEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A transport that serves one decode manager for as long as this lives.
pub(super) struct Serving(Arc<dyn Transport>);

impl Serving {
    /// `once`: its name can be [registered once](crate::wire::Dialect::registers_once).
    pub(super) fn one(transport: Arc<dyn Transport>, once: bool) -> Result<Self, ManagerError> {
        let (mut taken, name) = (taken(), transport.local_name());
        let refused = |serves| {
            Err(ManagerError::Config(format!(
                "the transport {name} {serves} another decode manager: prefill tells decode ranks apart by the names of \
                 their transports, so give each manager one of its own"
            )))
        };
        if taken.serving.contains(&address(&transport)) {
            return refused("serves");
        }
        if once && !taken.spent.insert(name.to_owned()) {
            return refused("serves, or has served,");
        }
        taken.serving.insert(address(&transport));
        drop(taken);
        Ok(Self(transport))
    }

    pub(super) fn transport(&self) -> &dyn Transport {
        &*self.0
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        taken().serving.remove(&address(&self.0));
    }
}

fn address(transport: &Arc<dyn Transport>) -> usize {
    Arc::as_ptr(transport).cast::<()>().addr()
}
