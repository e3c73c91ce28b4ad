//! The control plane's sockets over loopback: every pair of implementations passes the same suite.
// clippy.toml allows unwrap in #[test] functions only, not in their helpers.
#![allow(clippy::unwrap_used)]

macro_rules! suite {
    ($name:ident, $pusher:ident, $puller:ident) => {
        mod $name {
            use std::collections::{BTreeSet, HashMap};
            use std::net::TcpListener;
            use std::sync::atomic::{AtomicBool, Ordering};
            use std::sync::mpsc::channel;
            use std::sync::{Arc, Mutex};
            use std::time::{Duration, Instant};

            use bytes::Bytes;
            use kv_core::control::wake::WakeFd;
            use kv_core::control::zmq::{
                Implementation, InboxCounters, OutboxCounters, PushRole, ZmqControl, ZmqError, ZmqInbox, ZmqOutbox,
                ZmqSockets,
            };
            use kv_core::control::{ControlError, ControlEvent, ControlPlane, ControlTap, Multipart};
            use kv_core::time::{Clock, MonotonicClock};
            use kv_core::{Endpoint, Limits, Timestamp};

            const PUSHER: Implementation = Implementation::$pusher;
            const PULLER: Implementation = Implementation::$puller;

            include!("suite.rs");
        }
    };
}

suite!(own_to_own, Own, Own);
#[cfg(feature = "libzmq")]
suite!(own_to_libzmq, Own, Libzmq);
#[cfg(feature = "libzmq")]
suite!(libzmq_to_own, Libzmq, Own);
#[cfg(feature = "libzmq")]
suite!(libzmq_to_libzmq, Libzmq, Libzmq);

mod hostile;
