//! From a host's text to an address (F66).
//!
//! Names are looked up on a thread of their own: a lookup can take as long as the system's DNS timeouts. (libzmq would
//! do it in its I/O thread, which stops every connection meanwhile, and would ask for one family only.)

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6, ToSocketAddrs};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};

use crate::control::wake::WakeFd;
use crate::net::Endpoint;

/// An address, as the host part of a ZeroMQ URI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    /// Host part of the URI, bracketed for IPv6.
    pub text: String,
    /// Whether it is an IPv6 address.
    pub ipv6: bool,
}

impl Target {
    /// The address with this port. A zone is looked up among the interfaces.
    pub fn socket_address(&self, port: u16) -> io::Result<SocketAddr> {
        let invalid = |e: std::net::AddrParseError| io::Error::new(io::ErrorKind::InvalidInput, e);
        let host = self.text.trim_start_matches('[').trim_end_matches(']');
        let Some((address, zone)) = host.split_once('%') else {
            return Ok(SocketAddr::new(host.parse().map_err(invalid)?, port));
        };
        let scope = match zone.parse() {
            Ok(scope) => scope,
            Err(_) => rustix::net::netdevice::name_to_index(
                rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::DGRAM, None)?,
                zone,
            )?,
        };
        Ok(SocketAddrV6::new(address.parse().map_err(invalid)?, port, 0, scope).into())
    }
}

/// What a host text is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Host {
    Address(Target),
    Name,
}

/// Sort a host text that may come from a peer. A zone is kept as it is.
///
/// libzmq gives some characters a meaning of their own (`;` splits off a source address, `*` is a wildcard), so only
/// those of names and addresses pass.
pub(super) fn parse(host: &str) -> Result<Host, String> {
    if host.is_empty() || host.len() > 255 {
        return Err(format!("a host name has 1 to 255 bytes, this one has {}", host.len()));
    }
    let (address, zone) = host.split_once('%').map_or((host, None), |(a, z)| (a, Some(z)));
    let plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    if let Some(zone) = zone {
        let scoped = address.parse::<Ipv6Addr>().is_ok() && !zone.is_empty() && zone.chars().all(plain);
        return if scoped { Ok(Host::Address(v6(host))) } else { Err("not an IPv6 address with a zone".to_owned()) };
    }
    match address.parse() {
        Ok(IpAddr::V4(ip)) => Ok(Host::Address(Target { text: ip.to_string(), ipv6: false })),
        Ok(IpAddr::V6(_)) => Ok(Host::Address(v6(host))),
        Err(_) if host.starts_with(|c: char| c.is_ascii_alphanumeric()) && host.chars().all(plain) => Ok(Host::Name),
        Err(_) => Err("neither an address nor a host name".to_owned()),
    }
}

fn v6(host: &str) -> Target {
    Target { text: format!("[{host}]"), ipv6: true }
}

/// Where to connect. A wildcard means this host: the loopback of the same family.
pub(super) fn connect_host(host: &str) -> Result<Host, String> {
    Ok(match parse(host)? {
        Host::Address(t) if t.text == Ipv4Addr::UNSPECIFIED.to_string() => {
            Host::Address(Target { text: Ipv4Addr::LOCALHOST.to_string(), ipv6: false })
        }
        Host::Address(_) if host.parse() == Ok(Ipv6Addr::UNSPECIFIED) => {
            Host::Address(v6(&Ipv6Addr::LOCALHOST.to_string()))
        }
        other => other,
    })
}

/// Where to bind; a name is looked up here.
pub(super) fn bind_target(host: &str) -> Result<Target, String> {
    match parse(host)? {
        Host::Address(target) => Ok(target),
        Host::Name => look_up(host).map_err(|e| e.to_string()),
    }
}

/// Look a name up: its first IPv4 address, as SGLang's sockets do, else its first IPv6 address. Blocks.
fn look_up(name: &str) -> io::Result<Target> {
    let found: Vec<SocketAddr> = (name, 0).to_socket_addrs()?.collect();
    prefer_ipv4(&found).ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "the name has no address"))
}

fn prefer_ipv4(found: &[SocketAddr]) -> Option<Target> {
    match found.iter().find(|a| a.is_ipv4()).or(found.first())? {
        SocketAddr::V4(a) => Some(Target { text: a.ip().to_string(), ipv6: false }),
        SocketAddr::V6(a) if a.scope_id() != 0 => Some(v6(&format!("{}%{}", a.ip(), a.scope_id()))),
        SocketAddr::V6(a) => Some(v6(&a.ip().to_string())),
    }
}

/// Looks names up on a thread of its own, one after the other.
pub(super) struct Resolver {
    ask: Sender<Endpoint>,
    answers: Receiver<(Endpoint, Result<Target, String>)>,
}

impl Resolver {
    /// Start the thread; it ends after the lookup it is in when the resolver is dropped. Not joined: a lookup can take
    /// as long as the system's DNS timeouts. `wake` is called for each answer.
    pub fn start(wake: Option<Arc<WakeFd>>) -> io::Result<Self> {
        let (ask, asked) = channel::<Endpoint>();
        let (answer, answers) = channel();
        std::thread::Builder::new().name("kv-resolve".to_owned()).spawn(move || {
            for endpoint in asked {
                let target = look_up(endpoint.host()).map_err(|e| e.to_string());
                if answer.send((endpoint, target)).is_err() {
                    return;
                }
                if let Some(wake) = &wake {
                    wake.wake();
                }
            }
        })?;
        Ok(Self { ask, answers })
    }

    /// Ask for an endpoint's host. False: the thread is gone.
    pub fn ask(&self, endpoint: Endpoint) -> bool {
        self.ask.send(endpoint).is_ok()
    }

    /// The next answer, if one is there.
    pub fn answer(&self) -> Option<(Endpoint, Result<Target, String>)> {
        self.answers.try_recv().ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str, ipv6: bool) -> Result<Host, String> {
        Ok(Host::Address(Target { text: text.to_owned(), ipv6 }))
    }

    #[test]
    fn cat_f66_hosts_get_the_right_text_and_flag() {
        assert_eq!(parse("10.0.0.7"), address("10.0.0.7", false));
        assert_eq!(parse("::1"), address("[::1]", true));
        assert_eq!(parse("fe80::1%eth0"), address("[fe80::1%eth0]", true));
        assert_eq!(parse("fe80::1%eth0.100"), address("[fe80::1%eth0.100]", true));
        assert_eq!(parse("node-7.cluster_a.local"), Ok(Host::Name));
        assert_eq!(connect_host("0.0.0.0"), address("127.0.0.1", false));
        assert_eq!(connect_host("::"), address("[::1]", true));
        assert_eq!(bind_target("::"), Ok(Target { text: "[::]".to_owned(), ipv6: true }));
    }

    #[test]
    fn cat_f66_a_name_with_ipv6_addresses_only_gets_the_flag() {
        let v6_only = ["[2001:db8::7]:0".parse().unwrap()];
        assert_eq!(prefer_ipv4(&v6_only), Some(Target { text: "[2001:db8::7]".to_owned(), ipv6: true }));
        let both = ["[2001:db8::7]:0".parse().unwrap(), "10.0.0.7:0".parse().unwrap()];
        assert_eq!(prefer_ipv4(&both), Some(Target { text: "10.0.0.7".to_owned(), ipv6: false }));
        assert_eq!(prefer_ipv4(&[]), None);
    }

    #[test]
    fn r_h2_hostile_hosts_are_refused() {
        for host in
            ["", "*", "10.0.0.1;10.0.0.2", "a b", "a\0b", "-x", "1:2", "10.0.0.1%eth0", "::1%", "::1%e;f", "[::1"]
        {
            assert!(parse(host).is_err(), "{host:?}");
        }
        assert!(parse(&"a".repeat(256)).is_err());
    }
}
