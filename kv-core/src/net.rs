//! Control endpoints: host and port as they travel inside messages.

use std::fmt;
use std::sync::Arc;

/// Host and port of a manager's PULL socket. The host is kept **unbracketed**, as inside messages; the text forms
/// bracket IPv6.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Endpoint {
    host: Arc<str>,
    port: u16,
}

impl Endpoint {
    /// An endpoint; brackets round an IPv6 host are taken off.
    pub fn new(host: &str, port: u16) -> Self {
        let host = host.strip_prefix('[').and_then(|h| h.strip_suffix(']')).unwrap_or(host);
        Self { host: Arc::from(host), port }
    }

    /// Host name or address, unbracketed.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// TCP port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Whether the host is an IPv6 address (zone suffix allowed).
    pub fn is_ipv6(&self) -> bool {
        self.host.contains(':')
    }

    /// `tcp://host:port`, bracketed for IPv6.
    pub fn zmq_uri(&self) -> String {
        format!("tcp://{self}")
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_ipv6() {
            write!(f, "[{}]:{}", self.host, self.port)
        } else {
            write!(f, "{}:{}", self.host, self.port)
        }
    }
}

impl fmt::Debug for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
