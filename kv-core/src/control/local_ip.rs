//! Which address a manager publishes (protocol section 4).

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs, UdpSocket};

use super::nic;

/// Why no address was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LocalIpError {
    /// `SGLANG_LOCAL_IP_NIC` names an interface without a usable address.
    #[error("interface {0}, named by SGLANG_LOCAL_IP_NIC, has no address but loopback or link-local ones")]
    Nic(String),
    /// Nothing worked.
    #[error("no local address: there is no route out and the host name leads to none; set SGLANG_HOST_IP")]
    NotFound,
}

/// The address to publish, or the name the environment gives. In this order: `SGLANG_HOST_IP`, `HOST_IP`, the interface
/// named by `SGLANG_LOCAL_IP_NIC`, the address the kernel would send from to 8.8.8.8, then to an IPv6 resolver (nothing
/// is sent), then what the host's name leads to.
///
/// Reads the environment; call it once, at the start. The last step looks a name up, which can block.
///
/// # Errors
/// [`LocalIpError`] when the interface has no address or nothing worked.
pub fn local_ip() -> Result<String, LocalIpError> {
    discover(&System)
}

/// What the discovery asks the system; the tests answer instead.
trait Probe {
    fn env(&self, name: &str) -> Option<String>;
    fn nic(&self, name: &str) -> Vec<IpAddr>;
    fn source_towards(&self, remote: SocketAddr) -> Option<IpAddr>;
    fn host_name_addresses(&self) -> Vec<IpAddr>;
}

fn discover(probe: &impl Probe) -> Result<String, LocalIpError> {
    let set = |name| probe.env(name).filter(|value| !value.is_empty());
    if let Some(host) = set("SGLANG_HOST_IP").or_else(|| set("HOST_IP")) {
        return Ok(host);
    }
    if let Some(name) = set("SGLANG_LOCAL_IP_NIC") {
        let found = probe.nic(&name);
        let best = found.iter().find(|ip| ip.is_ipv4() && usable(ip)).or_else(|| found.iter().find(|ip| usable(ip)));
        return best.map(ToString::to_string).ok_or(LocalIpError::Nic(name));
    }
    let v4 = IpAddr::V4(Ipv4Addr::new(8, 8, 8, 8));
    let v6 = IpAddr::V6(Ipv6Addr::new(0x2001, 0x4860, 0x4860, 0, 0, 0, 0, 0x8888));
    let routed = [v4, v6].into_iter().filter_map(|remote| probe.source_towards(SocketAddr::new(remote, 80)));
    let named = || probe.host_name_addresses().into_iter();
    routed
        .chain(std::iter::once_with(named).flatten())
        .find(usable)
        .map(|ip| ip.to_string())
        .ok_or(LocalIpError::NotFound)
}

/// Other hosts can use it as it is. A link-local IPv6 address needs a zone, which means nothing elsewhere.
fn usable(ip: &IpAddr) -> bool {
    let link_local = matches!(ip, IpAddr::V6(v6) if v6.is_unicast_link_local());
    !ip.is_loopback() && !ip.is_unspecified() && !link_local
}

struct System;

impl Probe for System {
    fn env(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }

    fn nic(&self, name: &str) -> Vec<IpAddr> {
        nic::addresses(name)
    }

    fn source_towards(&self, remote: SocketAddr) -> Option<IpAddr> {
        let any = if remote.is_ipv4() { IpAddr::V4(Ipv4Addr::UNSPECIFIED) } else { IpAddr::V6(Ipv6Addr::UNSPECIFIED) };
        let socket = UdpSocket::bind((any, 0)).ok()?;
        // A UDP connect picks a route and a source address; it sends nothing.
        socket.connect(remote).ok()?;
        Some(socket.local_addr().ok()?.ip())
    }

    fn host_name_addresses(&self) -> Vec<IpAddr> {
        let name = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let found = (name.trim(), 0).to_socket_addrs();
        found.map(|all| all.map(|a| a.ip()).collect()).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Default)]
    struct Fake {
        env: Vec<(&'static str, &'static str)>,
        nic: Vec<&'static str>,
        v4: Option<&'static str>,
        v6: Option<&'static str>,
        name: Vec<&'static str>,
    }

    fn ips(text: &[&str]) -> Vec<IpAddr> {
        text.iter().map(|t| t.parse().unwrap()).collect()
    }

    impl Probe for Fake {
        fn env(&self, name: &str) -> Option<String> {
            self.env.iter().find(|(n, _)| *n == name).map(|(_, v)| (*v).to_owned())
        }
        fn nic(&self, _: &str) -> Vec<IpAddr> {
            ips(&self.nic)
        }
        fn source_towards(&self, remote: SocketAddr) -> Option<IpAddr> {
            if remote.is_ipv4() { self.v4 } else { self.v6 }.map(|t| t.parse().unwrap())
        }
        fn host_name_addresses(&self) -> Vec<IpAddr> {
            ips(&self.name)
        }
    }

    fn found(fake: Fake) -> Result<String, LocalIpError> {
        discover(&fake)
    }

    #[test]
    fn the_environment_wins_in_order() {
        let env = vec![("HOST_IP", "10.0.0.2"), ("SGLANG_HOST_IP", "10.0.0.1"), ("SGLANG_LOCAL_IP_NIC", "x")];
        assert_eq!(found(Fake { env, ..Fake::default() }), Ok("10.0.0.1".to_owned()));
        let env = vec![("HOST_IP", "10.0.0.2"), ("SGLANG_HOST_IP", "")];
        assert_eq!(found(Fake { env, v4: Some("10.0.0.9"), ..Fake::default() }), Ok("10.0.0.2".to_owned()));
    }

    #[test]
    fn a_named_interface_is_used_or_refused_never_ignored() {
        let fake =
            |nic| Fake { env: vec![("SGLANG_LOCAL_IP_NIC", "eth1")], nic, v4: Some("10.0.0.9"), ..Fake::default() };
        assert_eq!(found(fake(vec!["fe80::1", "2001:db8::1", "10.1.0.1"])), Ok("10.1.0.1".to_owned()));
        assert_eq!(found(fake(vec!["fe80::1", "2001:db8::1"])), Ok("2001:db8::1".to_owned()));
        assert_eq!(found(fake(vec!["fe80::1", "127.0.0.1"])), Err(LocalIpError::Nic("eth1".to_owned())));
    }

    #[test]
    fn cat_f66_routes_come_before_the_host_name() {
        let fake = |v4, v6, name| Fake { v4, v6, name, ..Fake::default() };
        assert_eq!(found(fake(Some("10.0.0.9"), Some("2001:db8::9"), vec![])), Ok("10.0.0.9".to_owned()));
        assert_eq!(found(fake(None, Some("2001:db8::9"), vec!["10.0.0.3"])), Ok("2001:db8::9".to_owned()));
        assert_eq!(found(fake(None, None, vec!["127.0.1.1", "10.0.0.3"])), Ok("10.0.0.3".to_owned()));
        assert_eq!(found(fake(Some("127.0.0.1"), None, vec!["127.0.1.1"])), Err(LocalIpError::NotFound));
    }

    #[test]
    fn the_loopback_interface_has_its_address() {
        assert!(nic::addresses("lo").contains(&IpAddr::V4(Ipv4Addr::LOCALHOST)));
        assert!(nic::addresses("no-such-interface").is_empty());
    }
}
