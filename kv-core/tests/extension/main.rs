//! Two of ours, and one of ours with a peer of 0.5.23: the extension (H4), lives (F6), tags (H3), policies (F4, B2),
//! processes (F56), metadata slots (F47).
// A test reports by panicking.
#![allow(clippy::unwrap_used, clippy::expect_used, missing_docs)]

mod aux;
mod discovery;
mod frame;
mod lives;
mod policies;
mod process;
#[allow(dead_code)] // shared with the other lifecycle tests
#[path = "../lifecycle/support.rs"]
mod support;
mod tags;

use std::sync::{Arc, Mutex};

use kv_core::control::Multipart;
use kv_core::wire::Extension;
use kv_testkit::net::{Action, Flight};
use support::*;

/// Every message sent from now on.
pub struct Spy(Arc<Mutex<Vec<Flight>>>);

impl Spy {
    pub fn on(w: &World) -> Self {
        let seen: Arc<Mutex<Vec<Flight>>> = Arc::default();
        let log = seen.clone();
        w.net.rule(Action::Drop, move |f| {
            log.lock().unwrap().push(f.clone());
            false
        });
        Self(seen)
    }

    pub fn all(&self) -> Vec<Flight> {
        self.0.lock().unwrap().clone()
    }

    /// The last message that begins so.
    pub fn last(&self, which: fn(&Flight) -> bool) -> Flight {
        self.all().into_iter().rfind(which).expect("such a message")
    }
}

pub fn extension(frames: &Multipart) -> Option<Extension> {
    Extension::parse(frames.last()?).expect("an extension that can be read")
}

pub fn is_status(f: &Flight) -> bool {
    is_tag(f, "KV_STATUS")
}

pub fn is_abort(f: &Flight) -> bool {
    is_tag(f, "ABORT")
}

pub fn is_ack(f: &Flight) -> bool {
    is_tag(f, "ABORT_ACK")
}

pub fn is_registration(f: &Flight) -> bool {
    is_tag(f, "KvTcpMsgGuard") && f.frames[1] == "None"
}

pub fn is_metadata(f: &Flight) -> bool {
    is_tag(f, "KvTcpMsgGuard") && f.frames[1] != "None"
}

/// Prefill as 0.5.23.
pub fn old_prefill() -> WorldSpec {
    WorldSpec { prefill_ext: false, ..WorldSpec::default() }
}
