//! A transport whose every outcome the test decides.
//!
//! A [`FakeFabric`] joins any number of [`FakeTransport`]s, each a process of its own as far as peers can tell. A write
//! *lands* (bytes are really copied, source to destination) at a moment of its own, apart from when its outcome is
//! reported; so a test can let bytes land after an error and see who freed pages too early.
//!
//! ```
//! # use kv_testkit::fake_transport::{FakeFabric, Policy};
//! let fabric = FakeFabric::new();
//! let prefill = fabric.transport("prefill-0");
//! let decode = fabric.transport("decode-0");
//! prefill.set_policy(Policy::Hold); // ops stay in flight until the test says otherwise
//! # let _ = decode;
//! ```
//!
//! Then, per op: [`complete`](FakeTransport::complete), [`fail`](FakeTransport::fail),
//! [`unresolve`](FakeTransport::unresolve), [`settle`](FakeTransport::settle), [`land`](FakeTransport::land), ...
//!
//! # What it checks by itself
//! * An `OpId` submitted twice panics.
//! * A landing outside what the target has registered at that moment, or into a range under
//!   [`guard`](FakeFabric::guard), is a violation; so is source memory that changed between submit and landing, and a
//!   lane dropped over a write that is not quiet. A violation nobody [took](FakeFabric::take_violations) panics when
//!   the fabric goes.
//! * A script that breaks the seam's own law (two outcomes, landing after `dst_quiet`) panics.

mod blob;
mod land;
mod lane;
mod op;
mod policy;
mod script;
mod state;
mod transport;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

pub use lane::FakeLane;
pub use op::OpInfo;
pub use policy::{Flaw, Policy, Verdict};
pub use state::Landing;
pub use transport::{FakeTransport, FakeTransportBuilder};

use kv_core::transport::{Outcome, Settlement, TransportError, TransportErrorKind};
use state::{Guard, Inner};

pub(crate) struct Shared {
    inner: Mutex<Inner>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let inner = self.inner.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !inner.violations.is_empty() && !std::thread::panicking() {
            panic!("violations nobody looked at:\n  {}", inner.violations.join("\n  "));
        }
    }
}

/// What joins fake transports. Clones are the same fabric.
#[derive(Clone)]
pub struct FakeFabric(pub(crate) Arc<Shared>);

impl Default for FakeFabric {
    fn default() -> Self {
        Self::new()
    }
}

impl FakeFabric {
    /// An empty fabric.
    pub fn new() -> Self {
        Self(Arc::new(Shared { inner: Mutex::new(Inner::default()) }))
    }

    /// A transport named `name`, with default capabilities and [`Policy::CompleteAtOnce`]. Panics when the name is taken:
    /// a name means one process generation.
    pub fn transport(&self, name: &str) -> Arc<FakeTransport> {
        self.builder(name).build()
    }

    /// As [`transport`](Self::transport), with other capabilities, capacity or a deliberate flaw.
    pub fn builder(&self, name: &str) -> FakeTransportBuilder {
        FakeTransportBuilder::new(self.clone(), name)
    }

    /// A landing outside registered memory ends its op `Failed` (`Refused`), as a NIC would, and is no violation.
    pub fn refuse_quietly(&self) {
        self.0.lock().refuse_quietly = true;
    }

    /// Whether to check that the source does not change between submit and landing. On by default.
    pub fn watch_sources(&self, on: bool) {
        self.0.lock().watch_sources = on;
    }

    /// A new generation at a known endpoint proves nothing about ops to the old one (it may be on another host): they stay
    /// as they are. By default they end quiet: reported ones settle `PeerGenerationDead`, others fail.
    pub fn leave_superseded(&self) {
        self.0.lock().leave_superseded = true;
    }

    /// From now on, a write that lands in `[addr, addr + len)` is a violation that says `why`: "these pages are somebody
    /// else's now". Use it the moment an engine says that pages may be reused.
    pub fn guard(&self, addr: u64, len: u64, why: impl Into<String>) {
        self.0.lock().guards.push(Guard { addr, len, why: why.into() });
    }

    /// Lift every guard that starts at `addr`.
    pub fn unguard(&self, addr: u64) {
        self.0.lock().guards.retain(|g| g.addr != addr);
    }

    /// The process `name` dies: nothing lands in its memory any more, and nothing can be submitted to it. Transports
    /// connected to it hear `PeerLost`. Scripted ops stay as they are; ops under automatic policies go `Unresolved`, and
    /// settle as [`Settlement::PeerGenerationDead`] some polls later.
    pub fn kill(&self, name: &str) {
        self.0.lock().kill(name);
    }

    /// The process `name` ends, and its own writes with it: nothing of them lands any more. Its peers see it as
    /// [`kill`](Self::kill)ed. Whoever holds its lanes may drop them.
    pub fn exit(&self, name: &str) {
        let released = self.0.lock().exit(name);
        drop(released);
    }

    /// Look at every span before it lands; what `look` returns is a violation. It must not call the fabric, which is
    /// locked meanwhile.
    pub fn observe(&self, look: impl FnMut(&Landing<'_>) -> Option<String> + Send + 'static) {
        self.0.lock().observer = Some(Box::new(look));
    }

    /// Stop (or let go on) the process `name`: automatic ops to it make no progress, and nothing is proven about them.
    pub fn pause(&self, name: &str, paused: bool) {
        self.0.lock().node(name).paused = paused;
    }

    /// Cut every connection to `name` without harming the process. Automatic ops to it go `Unresolved`; some of them
    /// still land, and settle later.
    pub fn cut(&self, name: &str) {
        self.0.lock().cut(name);
    }

    /// Violations so far.
    pub fn violations(&self) -> Vec<String> {
        self.0.lock().violations.clone()
    }

    /// Take the violations, so that they do not fail the test when the fabric goes.
    pub fn take_violations(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().violations)
    }

    /// Panics if anything was let go too early: a violation was recorded; the source of a write that may still read it has
    /// changed by now; or the destination of a write that may still land is not registered any more. Call it whenever an
    /// engine has let go of something.
    pub fn assert_no_premature_release(&self) {
        let mut inner = self.0.lock();
        inner.check_held();
        let found = std::mem::take(&mut inner.violations);
        drop(inner);
        assert!(found.is_empty(), "released too early:\n  {}", found.join("\n  "));
    }
}

fn lost(text: impl std::fmt::Display) -> TransportError {
    TransportError::new(TransportErrorKind::PeerLost, text)
}

fn outcome_quiet(outcome: &Outcome) -> (bool, bool) {
    match outcome {
        Outcome::Done => (true, true),
        Outcome::Failed { src_quiet, dst_quiet, .. } => (*src_quiet, *dst_quiet),
        Outcome::Unresolved { .. } => (false, false),
    }
}

/// Whether the event leaves (source, destination) quiet, given how they were.
fn settlement_quiet(settlement: Settlement) -> (bool, bool) {
    match settlement {
        Settlement::Settled { src_quiet, dst_quiet } => (src_quiet, dst_quiet),
        Settlement::PeerGenerationDead => (true, true),
    }
}
